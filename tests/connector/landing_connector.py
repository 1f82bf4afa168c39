"""A connector for tests, in which blocks that another engine computed become an engine's own prefix cache.

Nothing is promised to vLLM before it is there. A request with `{"land": NAME}` waits while the scheduler half takes
blocks of the engine's pool and the workers write the bytes in; then these are hashed as the request's own, and vLLM
finds them by itself. The prompt's last block, which a prefix cache never gives as a whole, is handed over by a copy
inside the engine. A request with `{"keep": NAME}` leaves its prompt's blocks as files. It is what product code does
with blocks, and nothing else: no threads, no fences, one KV cache group, prompts of one chunk.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peer_folder import PeerFolder
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

GROUP = 0


@dataclass
class Landing:
    """A request that waits for blocks of another engine."""

    request: Any
    name: str
    begun: bool = False
    local: list[Any] = field(default_factory=list)  # the prompt's beginning, which this engine has by itself
    taken: list[Any] = field(default_factory=list)  # the whole blocks after it
    last: Any = None  # the partial block at the end, which is never hashed
    asked: int = 0  # blocks whose bytes the workers were asked to write
    written: int = 0  # blocks whose bytes are there, in all ranks
    ready: bool = False  # hashed, or given up: the request need not wait any more

    def held(self) -> list[Any]:
        return self.local + self.taken + ([self.last] if self.last is not None else [])


@dataclass
class Work(KVConnectorMetadata):
    """What workers do in a step."""

    step: int = 0
    writes: list[tuple[int, str, int]] = field(default_factory=list)  # block, name and index in the prompt
    copies: list[tuple[int, int]] = field(default_factory=list)  # source, target
    keeps: list[tuple[int, str, int]] = field(default_factory=list)


@dataclass
class Written(KVConnectorWorkerMetadata):
    """How many ranks have done a step's writes."""

    ranks: Counter[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Written)
        return Written(self.ranks + other.ranks)


class LandingConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles. A test that has the engine in its own process sets how it behaves."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.peer = PeerFolder(Path(extra["folder"]))
        self.block_size = vllm_config.cache_config.block_size
        self.ranks = vllm_config.parallel_config.world_size
        self.rank = vllm_config.parallel_config.rank
        self.behave_well()
        # Scheduler half.
        self.landings: dict[str, Landing] = {}
        self.keeps: dict[str, str] = {}
        self.computed: Counter[str] = Counter()
        """Tokens that the engine computed for requests that landed, by name."""
        self.targets_that_are_sources = 0
        """Blocks that are read and written by copies of one step."""
        self.resets: list[int] = []
        """References that were given back at each reset of the pool."""
        self._work = Work()
        self._steps: dict[int, list[Landing]] = {}
        self._copied: list[Any] = []  # sources of the copies of the step that is made
        self._sent: list[Any] = []  # and of the one before
        # Worker half.
        self.caches: list[torch.Tensor] = []
        self.hooks: list[str] = []
        """Hooks of workers, in order."""
        self._done: Counter[int] = Counter()

    def behave_well(self) -> None:
        """What product code would do; tests set one of these otherwise to see what it is good for."""
        self.leaves_probabilities_alone = True
        self.takes_in = "build_connector_meta"
        self.hands_last_block_over = True
        self.holds_sources = True
        self.gives_back_before_reset = True
        self.gives_up = "when asked"  # or "by room", "never"

    # The scheduler half's blocks.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Nothing tells a connector before the pool is reset, so the method is wrapped on this instance."""
        self.pool = gpu_block_pool
        reset = gpu_block_pool.reset_prefix_cache

        def give_back_and_reset() -> bool:
            if self.gives_back_before_reset and self._holds_all_that_is_held():
                self._give_all_back()
            return reset()

        gpu_block_pool.reset_prefix_cache = give_back_and_reset

    def held(self) -> list[Any]:
        """A block for each reference."""
        return [block for each in self.landings.values() for block in each.held()] + self._copied + self._sent

    def _holds_all_that_is_held(self) -> bool:
        """If not, vLLM refuses the reset anyhow, and what lands need not be given up for it."""
        mine = Counter(block.block_id for block in self.held())
        return all(block.is_null or block.ref_cnt == mine[block.block_id] for block in self.pool.blocks)

    def _give_all_back(self) -> None:
        self.resets.append(len(self.held()))
        self.peer.note("resets", given_back=self.resets)
        for landing in self.landings.values():
            # The reset is there to forget bytes of before it, so nothing is hashed.
            self._give_back(landing)
        self.pool.free_blocks(self._copied + self._sent)
        self._copied, self._sent = [], []

    def take(self, count: int) -> list[Any]:
        """The oldest free blocks, in the order in which vLLM would take them."""
        taken: list[Any] = []
        block = self.pool.free_block_queue.fake_free_list_head.next_free_block
        while len(taken) < count and block.next_free_block is not None:  # the queue's end is a fake
            taken.append(block)
            block = block.next_free_block
        assert len(taken) == count
        self.pool.evict_blocks({each.block_id for each in taken})
        self.pool.touch(taken)
        return taken

    def _give_back(self, landing: Landing) -> None:
        landing.ready = True
        # As vLLM does it: a prompt's end is older than its beginning.
        self.pool.free_blocks(reversed(landing.held()))
        landing.local, landing.taken, landing.last = [], [], None

    # Landing.

    def _land(self, hook: str) -> None:
        if hook != self.takes_in:
            return
        for landing in self.landings.values():
            if not landing.ready:
                self._advance(landing)

    def _advance(self, landing: Landing) -> None:
        offered = self.peer.offered(landing.name)
        request = landing.request
        whole = request.num_prompt_tokens // self.block_size
        if offered.blocks and not landing.begun:
            landing.begun = True
            # Held, so that it is still there at the end.
            while len(landing.local) < whole and (
                found := self.pool.get_cached_block(request.block_hashes[len(landing.local)], [GROUP])
            ):
                landing.local += found
            self.pool.touch(landing.local)
            landing.asked = landing.written = len(landing.local)
        if offered.blocks > landing.asked:
            blocks = self.take(offered.blocks - landing.asked)
            for index, block in enumerate(blocks, landing.asked):
                self._work.writes.append((block.block_id, landing.name, index))
                if index < whole:
                    landing.taken.append(block)
                else:
                    landing.last = block
            landing.asked = offered.blocks
            self._steps.setdefault(self._work.step, []).append(landing)
        if offered.ended and landing.written == landing.asked:
            self._hash(landing)
            landing.ready = True

    def _hash(self, landing: Landing) -> None:
        """What has come becomes prefix cache like any other, in the prompt's order."""
        there = max(0, landing.written - len(landing.local))
        blocks = landing.local + landing.taken[:there]
        self.pool.cache_full_blocks(
            request=landing.request,
            blocks=blocks,
            num_cached_blocks=len(landing.local),
            num_full_blocks=len(blocks),
            block_size=self.block_size,
            kv_cache_group_id=GROUP,
        )

    def _give_up(self, landing: Landing) -> None:
        if not landing.ready:
            self._hash(landing)
        self._give_back(landing)

    def _give_up_one(self) -> bool:
        """Of the latest that hold something; gives whether there was one."""
        held = [each for each in self.landings.values() if each.held() and each.written == each.asked]
        if held:
            self._give_up(held[-1])
        return bool(held)

    def _make_room(self, scheduler_output: Any) -> None:
        """Versions before 0.30 do not ask: so keep free what running requests may take in two steps."""
        tokens = scheduler_output.num_scheduled_tokens.values()
        wanted = sum(-(-2 * count // self.block_size) for count in tokens)
        while self.pool.get_num_free_blocks() < wanted and self._give_up_one():
            pass

    # vLLM's hooks of the scheduler.

    def on_new_request(self, request: Any) -> None:
        parameters = request.kv_transfer_params or {}
        has_to_be_computed = self.leaves_probabilities_alone and request.skip_reading_prefix_cache
        if "land" in parameters and not has_to_be_computed:
            self.landings[request.request_id] = Landing(request, parameters["land"])
        if "keep" in parameters:
            self.keeps[request.request_id] = parameters["keep"]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._land("get_num_new_matched_tokens")
        landing = self.landings.get(request.request_id)
        if landing is None:
            return 0, False
        if not landing.ready:
            return None, False
        rest = request.num_prompt_tokens - 1 - num_computed_tokens
        return (rest, False) if rest > 0 and self._source(landing, rest) is not None else (0, False)

    def _source(self, landing: Landing, rest: int) -> Any:
        """The block that has the last tokens: a partial one, or a whole one of which vLLM must compute a token."""
        if not self.hands_last_block_over or rest >= self.block_size:
            return None
        whole, partial = divmod(landing.request.num_prompt_tokens, self.block_size)
        if partial:
            return landing.last
        blocks = landing.local + landing.taken
        return blocks[-1] if len(blocks) == whole else None

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        landing = self.landings.get(request.request_id)
        if landing is None or not landing.ready:
            return
        if num_external_tokens:
            # All that is promised is in blocks of this engine: a copy cannot fail.
            source = self._source(landing, num_external_tokens)
            target = blocks.blocks[GROUP][(request.num_prompt_tokens - 1) // self.block_size]
            self._work.copies.append((source.block_id, target.block_id))
            if self.holds_sources:
                self._copied.append(source)
                self.pool.touch([source])
        # The request has references of its own by now.
        self._give_back(landing)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        for name, count in scheduler_output.num_scheduled_tokens.items():
            if name in self.landings:
                self.computed[self.landings[name].name] += count
        self._keep(scheduler_output)
        self._land("build_connector_meta")
        if self.gives_up == "by room":
            self._make_room(scheduler_output)
        self.pool.free_blocks(self._sent)
        self._sent, self._copied = self._copied, []
        work, self._work = self._work, Work(self._work.step + 1)
        sources, targets = ({pair[end] for pair in work.copies} for end in (0, 1))
        self.targets_that_are_sources += len(sources & targets)
        return work

    def _keep(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            name = self.keeps.pop(new.req_id, None)
            if name is None:
                continue
            prompt = len(new.prompt_token_ids)
            computed = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            assert computed == prompt, "computed in one chunk"
            blocks = new.block_ids[GROUP][: -(-prompt // self.block_size)]
            self._work.keeps += [(block, name, index) for index, block in enumerate(blocks)]

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if report is None:
            return
        for step, ranks in report.ranks.items():
            assert ranks == self.ranks, "vLLM gives the reports of all ranks together"
            for landing in self._steps.pop(step):
                landing.written = landing.asked

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self.keeps.pop(request.request_id, None)
        landing = self.landings.pop(request.request_id, None)
        if landing is not None:
            # Aborted: what has come may serve the next one.
            self._give_up(landing)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        """Asked when a running request gets no block. True, and the request is tried again in the next step."""
        return self.gives_up == "when asked" and self._give_up_one()

    # Workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.hooks.append("start_load_kv")
        work = self._get_connector_metadata()
        assert isinstance(work, Work)
        for block, name, index in work.writes:
            data = self.peer.file(name, index, self.rank).read_bytes()
            parts = torch.frombuffer(bytearray(data), dtype=torch.uint8).chunk(len(self.caches))
            for cache, part in zip(self.caches, parts, strict=True):
                cache[block].copy_(part.view(cache.dtype).view(cache[block].shape))
        for source, target in work.copies:
            for cache in self.caches:
                cache[target].copy_(cache[source])
        if work.writes:
            self._done[work.step] += 1

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.hooks.append("layer")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        self.hooks.append("wait_for_save")
        work = self._get_connector_metadata()
        assert isinstance(work, Work)
        for block, name, index in work.keeps:
            parts = [cache[block].contiguous().view(torch.uint8).flatten() for cache in self.caches]
            self.peer.file(name, index, self.rank).write_bytes(torch.cat(parts).numpy().tobytes())

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        done, self._done = self._done, Counter()
        return Written(done) if done else None
