"""The counters of the connector, by name."""

from __future__ import annotations

from collections.abc import Mapping

# Each is summed over an interval; scheduler and workers send the same kind of object.
COUNTERS = {
    "lookups": "Lookups sent to the kvlane daemon",
    "hits": "Lookups that found at least one block",
    "misses": "Lookups that found nothing",
    "timeouts": "Lookups given up after kvlane.lookup_timeout_ms",
    "unavailable": "Lookups that missed because no daemon was connected",
    "lookup_seconds": "Seconds from asking to answer, summed over answered lookups",
    "connects": "Connections to the daemon opened, by scheduler and workers",
    "disconnects": "Connections to the daemon lost, by scheduler and workers",
    "hit_tokens": "Prompt tokens loaded from the daemon instead of computed",
    "copied_last_blocks": "Prompts whose last block was copied inside the engine's own cache instead of computed",
    "load_jobs": "Loads that ended, by worker",
    "load_blocks": "Blocks loaded, by worker",
    "load_bytes": "Bytes loaded",
    "load_seconds": "Seconds of loading, summed over jobs",
    "failed_loads": "Loads that did not bring all bytes",
    "save_jobs": "Saves that ended, by worker",
    "save_blocks": "Blocks saved, by worker",
    "save_bytes": "Bytes saved",
    "save_seconds": "Seconds of saving, summed over jobs",
    "present_blocks": "Blocks not saved because the daemon had them, by worker",
    "failed_saves": "Saves that the daemon did not take completely",
    "save_timeouts": "Saves given up because the daemon did not answer",
    "handed_over": "Prompts that a router asked this engine to hand over to a decode engine",
    "not_handed_over": "Prompts that were to be handed over, of which nothing could be stored",
    "awaited_hand_offs": "Lookups that waited for a prefill engine to store its blocks",
    "short_hand_offs": "Lookups that waited and found less than the prefill engine had named",
    "ignored_hand_offs": "Hand-offs that name another daemon or other content, or that make no sense",
    "direct_legs": "Prompts that were computed to be handed over directly",
    "direct_not_offered": "Prompts that were to be handed over directly, and were not",
    "direct_offered_blocks": "Blocks offered to other engines",
    "direct_landings": "Prompts that this engine asked other engines for",
    "direct_landed": "Prompts that other engines handed over directly and completely",
    "direct_landed_tokens": "Prompt tokens that other engines handed over directly",
    "direct_wait_seconds": "Seconds from asking other engines for a prompt until that was over, summed over prompts",
    "direct_loaded_tokens": "Prompt tokens loaded from the daemon while other engines handed over the rest",
    "direct_overflows": "Prompts of other engines that found no room and went into the daemon's pool",
    "direct_overflowed_tokens": "Tokens of those prompts that the daemon then had",
    "direct_fallbacks": "Prompts that were to be handed over directly, and that this engine computed wholly or in part",
    "direct_reads": "Reads of other engines' blocks, by worker",
    "direct_failed_reads": "Reads of other engines' blocks that did not bring their bytes",
    "direct_read_runs": "Contiguous runs of bytes in reads of other engines' blocks",
    "direct_cuda_bytes": "Bytes of other engines' blocks read from GPU to GPU, on the same host",
    "direct_cma_bytes": "Bytes of other engines' blocks read by process_vm, from memory of the same host",
    "direct_tcp_bytes": "Bytes of other engines' blocks read through sockets",
    "withdrawn_blocks": "Blocks that KV events took back, because the daemon no longer has them or is out of reach",
    "skipped_blocks": "Blocks not saved because too many were pinned or the daemon was away",
    "unshared_requests": "Requests that did not use the cache, because their blocks' content has no known identity",
    "errors": "Errors inside the connector, each survived",
}
# Names in the core's take_stats that differ from ours.
CORE_NAMES = {"losses": "disconnects"}


class Counters:
    """Counts between two intervals."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        """Count; `name` is a key of COUNTERS."""
        assert name in COUNTERS, f"no counter is called {name!r}"
        if value:
            self._values[name] = self._values.get(name, 0) + value

    def add_core(self, values: Mapping[str, float], names: frozenset[str]) -> None:
        """Count what the core counted itself, as far as it is in `names`; the rest is counted elsewhere."""
        for name, value in values.items():
            ours = CORE_NAMES.get(name, name)
            if ours in names:
                self.add(ours, value)

    def take(self) -> dict[str, float] | None:
        """The counts since the last call; None if there are none."""
        if not self._values:
            return None
        values, self._values = self._values, {}
        return values
