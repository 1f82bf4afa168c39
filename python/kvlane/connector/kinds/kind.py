"""The interface of a kind of job: the part of each role that does one thing, such as loads or saves.

Both roles ask their kinds in the order of the lists in `kvlane.connector.kinds`. A kind overrides only the methods that
it needs; the ones here do nothing. Its scheduler half gives its worker half jobs in `StepJobs`, and gets back ends of
jobs and reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvlane.connector.adapters import Moment
from kvlane.connector.announcements import Announcements
from kvlane.connector.connection import Connection
from kvlane.connector.core_protocols import Finished, HandoffRank, RankLayerHook, SchedulerCore, WorkerCore
from kvlane.connector.counters import Counters
from kvlane.connector.guard import Failures
from kvlane.connector.jobs import JobEnd, Mergeable, StepJobs
from kvlane.connector.known_weights import KnownWeights
from kvlane.connector.pins import Pins
from kvlane.connector.prefill_rate import PrefillRate
from kvlane.connector.requests import GroupHashes, RequestState
from kvlane.connector.settings import Settings
from kvlane.connector.shape import EngineShape
from kvlane.connector.stream import Stream
from kvlane.connector.vllm_protocols import AllocatedBlocks, Block, KVEvent, Request, SchedulerOutput, Tables
from kvlane.connector.weights import WeightsReport

if TYPE_CHECKING:
    from kvlane.connector.direct import Direct

LayerHook = Callable[[str], None]
"""Called with a layer's name before the layer reads its KV cache."""
CopyBlock = Callable[[int, int], None]
"""Copies one block of a rank's cache to another one: from, to. On a GPU in the stream that the calling thread computes
in."""


class Answer(NamedTuple):
    """A kind's answer for a prompt that vLLM is about to schedule."""

    tokens: int = 0
    """Tokens past the engine's own that will come without being computed."""
    wait: bool = False
    """Nothing is decided yet: vLLM has to ask again."""
    at_once: bool = False
    """The tokens are there when the next step computes: the request need not wait for a load."""


NOTHING = Answer()
ASK_AGAIN = Answer(wait=True)


@dataclass
class SchedulerShared:
    """The state that all kinds of the scheduler role share."""

    core: SchedulerCore
    connection: Connection
    shape: EngineShape
    settings: Settings
    failures: Failures
    clock: Callable[[], float]
    counters: Counters
    pins: Pins
    hashes: GroupHashes
    weights: KnownWeights
    moment: Moment
    rate: PrefillRate
    jobs: Iterator[int]
    """Numbers for new jobs. All kinds draw from it, so that a job's end finds the kind that started it."""
    requests: dict[str, RequestState] = field(default_factory=dict)
    """The live requests, by vLLM's id."""
    events: list[KVEvent] = field(default_factory=list)
    """For routers, in the order in which they happened."""
    direct: Direct | None = None
    """Direct hand-offs; None where they are not wanted, or the model has none."""
    announcements: Announcements | None = None
    """Announces the daemon's blocks to routers; None without a listener."""


class SchedulerKind:
    """A kind of job in the scheduler role. If a method raises, the caller logs and counts the error, and still calls
    the other kinds."""

    name: ClassVar[str]
    """The name of its parts in `StepJobs.others` and `KVLaneWorkerMetadata.others`, and in messages of errors."""

    def __init__(self, shared: SchedulerShared) -> None:
        self._shared = shared

    def request_added(self, state: RequestState) -> None:
        """A request has arrived."""

    def answer(self, state: RequestState, local_tokens: int) -> Answer:
        """The tokens of a prompt past the `local_tokens` of vLLM's own cache that vLLM need not compute. The first kind
        that promises tokens, or answers ASK_AGAIN, decides; later kinds are not called. Promised tokens are loaded
        while other requests compute."""
        return NOTHING

    def allocated(
        self, request: Request, state: RequestState | None, blocks: AllocatedBlocks, tokens: int
    ) -> None:
        """vLLM has allocated blocks for a request. `tokens` are those that this kind has promised, 0 if none. Unless it
        promised them `at_once`, the request now waits until all workers report it (`Reports.loaded`), so the kind must
        start a job or report a failed one. Until the kind calls `state.tokens_ended`, at the job's end, none of the
        request's blocks is saved."""

    def plan(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        """Puts the workers' jobs of this step into `jobs`. A kind that expects an answer soon sets `jobs.idle` to
        False, so that workers do not wait."""

    def idle(self) -> None:
        """Called in a step in which nothing is computed and workers start nothing. A kind may wait here for some
        milliseconds if all requests wait for it."""

    def ended(self, job: int, end: JobEnd) -> bool:
        """Workers have reported the end of a job. True if it is of this kind."""
        return False

    def reported(self, part: object) -> None:
        """Takes the worker halves' reports (`Reports.others`), merged over the ranks that sent one."""

    def request_finished(self, request: Request, state: RequestState, tables: Tables) -> None:
        """A request is over, and vLLM is about to free its blocks."""

    def hands_over(self, request: Request, state: RequestState) -> dict[str, object] | None:
        """The members of `kvlane` in the `kv_transfer_params` for the engine that decodes this request. Called after
        `request_finished` of all kinds."""
        return None

    def give_back(self, state: RequestState) -> None:
        """Releases what the kind holds for a request that has ended, or takes no part in the cache."""

    def daemon_restarted(self) -> None:
        """The daemon is another run than before, with nothing stored."""

    def runs_gone(self, gone: Sequence[bytes]) -> None:
        """The scheduler has left these runs of the daemon. Workers may unmap their pools, so no kind may promise blocks
        of them."""

    def pinned(self) -> Iterable[Block]:
        """Blocks that the kind pins and can unpin before vLLM resets its own cache, each as often as it is pinned."""
        return ()

    def before_pool_reset(self) -> None:
        """vLLM is about to reset its own cache. It refuses while any block is referenced."""

    def pool_was_reset(self) -> None:
        """vLLM's own cache is empty."""

    def reset(self) -> None:
        """The engine's weights may be others from here on."""

    def pending(self) -> bool:
        """Whether the engine has to keep stepping for this kind although no request runs."""
        return False

    def free_blocks_soon(self) -> bool:
        """Called when a running request gets no block. Makes blocks come free soon if the kind can. True if they will,
        so that vLLM need not preempt a request."""
        return False


@dataclass
class Reports:
    """Reports of one rank's kinds for vLLM and the scheduler role, since the last take."""

    jobs: dict[int, JobEnd] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    """Requests that may compute: their load has ended, or every step waits for it."""
    failed: set[str] = field(default_factory=set)
    """Requests of `loaded` whose blocks did not come."""
    failed_blocks: set[int] = field(default_factory=set)
    """Blocks of failed loads, for versions of vLLM that take no failures by request."""
    weights: WeightsReport | None = None
    others: dict[str, Mergeable] = field(default_factory=dict)
    """By name of a further kind: its report to its scheduler half, besides ends of jobs."""


@dataclass
class DirectRank:
    """A rank's side of direct hand-offs."""

    agent: HandoffRank
    layer_hook: RankLayerHook | None
    """Called with each layer that is computed; None if the rank reports only whole steps."""
    stream: Callable[[], int]
    """Gives the handle of the stream that the calling thread computes in; 0 on a CPU."""


@dataclass
class WorkerShared:
    """The state that all kinds of the worker role share."""

    rank: int
    failures: Failures
    counters: Counters = field(default_factory=Counters)
    reports: Reports = field(default_factory=Reports)
    direct: DirectRank | None = None
    """The rank's side of direct hand-offs; None without them."""
    core: WorkerCore | None = None
    """Before caches are registered, and after they are gone, there is none: every job fails."""
    stream: Stream | None = None
    """How the engine computes on a GPU; None on a CPU."""
    replicas: Sequence[int] = ()
    """For each group, how many consecutive ranks hold the same blocks; empty if none do."""
    steps_at_once: int = 0
    """Empty steps left that do not wait for copies, because the engine is about to learn of a released load."""

    def stream_handle(self) -> int:
        """The handle of the stream that the engine computes in; 0 on a CPU."""
        return self.stream.handle() if self.stream is not None else 0


class WorkerKind:
    """A kind of job in the worker role. Every job that arrives is reported exactly once in `shared.reports`, as failed
    if nothing else is possible. If a method raises, the caller logs and counts the error, and still calls the other
    kinds."""

    name: ClassVar[str]

    def __init__(self, shared: WorkerShared) -> None:
        self._shared = shared

    def attached(self) -> None:
        """Called once there are caches, and a core that copies."""

    def step_begins(self, jobs: StepJobs) -> LayerHook | None:
        """Before the forward pass: start what may write the engine's blocks. A hook is called for each layer."""

    def layers_computed(self, jobs: StepJobs) -> LayerHook | None:
        """Before the forward pass, behind `step_begins`: a hook is called when a layer's part of the KV cache is
        written. It must not raise."""

    def computed(self, jobs: StepJobs) -> None:
        """The forward pass is over, on the GPU or in its stream: start what reads the engine's blocks."""

    def finished(self, end: Finished) -> bool:
        """The core reports that a job ended, or that a load was released. True if the job is of this kind."""
        return False

    def waits_for(self) -> float:
        """Milliseconds that a step with nothing to compute may wait for this kind's copies."""
        return 0.0

    def detached(self) -> None:
        """The core is closed: jobs that have not ended end as failed."""
