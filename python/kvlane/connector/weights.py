"""Identifies the weights with which a worker computes, by a digest of samples of every parameter.

An engine may change its weights in place, as trainers do. Then the files no longer describe them, and new blocks must
not get the files' name. The digest distinguishes weights; a label names them:

    ""              the weights with which the engine was started
    "version NAME"  weights that the trainer has named (`name_weights`)
    "life N"        unnamed weights, seen first after the engine's Nth reset

A digest that was seen before gets its former label. So an engine that slept, or got its first weights again, finds its
blocks. If no digest can be taken, only weights that were named since the last reset have a label.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

# Words of 4 bytes that are read of each parameter, evenly spread; smaller ones are read whole. A training step may
# change few of a parameter's words, in 16 bits one in a hundred, but the samples of a model are a million together.
SAMPLED_WORDS = 4096
WORD_BYTES = 4
# Digests that are remembered; the least recently seen is forgotten.
REMEMBERED = 64
STARTED_WITH = ""
# Callers between a model runner and the connector are fewer.
FRAMES_MAX = 32

# The weights of the engine whose worker lives in this process.
_watched: weakref.WeakSet[Weights] = weakref.WeakSet()


def name_weights(version: str) -> None:
    """Tell kvlane which weights this worker has now: call it in every worker, after the weights were changed and before
    `reset_prefix_cache(reset_connector=True)`. Engines of one model whose weights have one name share blocks."""
    if not version:
        raise ValueError("a version of weights needs a name")
    for weights in list(_watched):
        weights.name(version)


class WorkerExtension:
    """For vLLM's `worker_extension_cls="kvlane.connector.weights.WorkerExtension"`: lets an updater that is outside the
    workers name the weights, by `collective_rpc("kvlane_name_weights", args=("step-120",))`."""

    def kvlane_name_weights(self, version: str) -> None:
        """See `name_weights`."""
        name_weights(version)


@dataclass(frozen=True)
class WeightsReport:
    """The ranks' report on their weights after a reset."""

    reset: int
    """The reset that made the scheduler ask."""
    labels: frozenset[tuple[int, str | None]]
    """Each rank's label; None if the rank cannot digest its weights."""

    def merge(self, other: WeightsReport) -> WeightsReport:
        """The merged report of this and other ranks. The report of the later reset wins."""
        if self.reset != other.reset:
            return max(self, other, key=lambda report: report.reset)
        return WeightsReport(self.reset, self.labels | other.labels)


class Weights:
    """The weights of one worker."""

    def __init__(self, parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None) -> None:
        """`parameters` gives the names and tensors that the worker computes with; None if they cannot be read. Takes
        the first digest."""
        self._parameters = parameters
        self._labels: OrderedDict[bytes, str] = OrderedDict()
        # The name given since the last `label`, if there are no digests.
        self._named: str | None = None
        if parameters is not None:
            self._labels[digest(parameters())] = STARTED_WITH
        _watched.add(self)

    def name(self, version: str) -> None:
        """Names the present weights."""
        if self._parameters is None:
            self._named = version
        else:
            self._remember(digest(self._parameters()), f"version {version}")

    def label(self, reset: int) -> str | None:
        """The label of the present weights after the engine's reset number `reset`; None if they have none."""
        if self._parameters is None:
            named, self._named = self._named, None
            return f"version {named}" if named is not None else None
        found = digest(self._parameters())
        self._remember(found, self._labels.get(found, f"life {reset}"))
        return self._labels[found]

    def _remember(self, found: bytes, label: str) -> None:
        self._labels[found] = label
        self._labels.move_to_end(found)
        if len(self._labels) > REMEMBERED:
            self._labels.popitem(last=False)


def digest(parameters: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """blake2b of samples of all parameters, in the order of their names. Shared memory counts once."""
    hasher = hashlib.blake2b(digest_size=16)
    seen: set[int] = set()
    is_synchronized = False
    for name, tensor in sorted(parameters, key=lambda item: item[0]):
        if tensor.is_cuda and not is_synchronized:
            import torch

            # The code that changes weights may use a stream of its own.
            torch.cuda.synchronize(tensor.device)
            is_synchronized = True
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() == 0:
            continue
        seen.add(storage.data_ptr())
        hasher.update(f"{name} {storage.nbytes()}\n".encode())
        hasher.update(_samples(tensor, storage))
    return hasher.digest()


def _samples(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bytes:
    """Sampled bytes of a parameter's memory, regardless of its dimensions' order."""
    import torch

    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    words = storage.nbytes() // WORD_BYTES
    if words <= SAMPLED_WORDS:
        return memory.cpu().numpy().tobytes()
    each = words // SAMPLED_WORDS
    place = torch.arange(SAMPLED_WORDS, dtype=torch.int64)
    # The sampled word shifts within its stretch, because rows may be as long as the stretch.
    places = place * words // SAMPLED_WORDS + place * 2654435761 % each
    sampled = memory[: words * WORD_BYTES].view(torch.int32)[places.to(tensor.device)]
    return sampled.cpu().numpy().tobytes()


class ModelRunner(Protocol):
    """The method of vLLM's model runner, or of its worker, that gives its model."""

    def get_model(self) -> torch.nn.Module: ...


def calling_runner() -> ModelRunner | None:
    """The model runner (or worker) on whose behalf the connector is being called; None where there is none.

    vLLM does not hand its model to connectors. It calls `register_kv_caches` from its runner, in every version, when
    the weights are loaded.
    """
    frame = sys._getframe(1)
    for _ in range(FRAMES_MAX):
        owner = frame.f_locals.get("self")
        if callable(getattr(owner, "get_model", None)):
            return owner
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def parameters_of(runner: ModelRunner) -> Iterable[tuple[str, torch.Tensor]]:
    """Names and tensors of the runner's model, and of its drafter's."""
    yield from runner.get_model().named_parameters()
    draft_of = getattr(
        runner, "get_draft_model", lambda: getattr(getattr(runner, "drafter", None), "model", None)
    )
    draft = draft_of()
    if draft is not None:
        yield from ((f"draft.{name}", tensor) for name, tensor in draft.named_parameters())


def parameters_move(vllm_config: VllmConfig) -> bool:
    """Whether the parameters' memory changes while the weights stay the same, so a digest shows nothing. Experts change
    places, or layers take turns in one memory."""
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        return True
    offload = getattr(vllm_config, "offload_config", None)
    prefetch = getattr(offload, "prefetch", None)
    return bool(getattr(prefetch, "offload_group_size", 0))
