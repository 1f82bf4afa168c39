"""The Rust side of an engine's process: connections to the daemon, the mapped pool, copies without the GIL.

Schedulers, workers, tools and fabric engines belong to the process that made them. In a child that it forks their calls
raise RuntimeError, and closing or dropping them does nothing."""

from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any, Literal, final

from kvlane.connector.shard_layout import ShardLayout

__version__: str
WIRE_VERSION: int

def log_descriptor() -> int:
    """Begins to keep the core's log messages, and gives an eventfd that becomes readable with each. One a process."""

def take_log() -> tuple[list[tuple[int, str]], int]:
    """The messages since the last call, each with its level of Python's logging, and how many there was no room for."""

# (base address, block stride, number of blocks, bytes of a piece, byte offsets of the pieces inside a block)
Region = tuple[int, int, int, int, list[int]]

@final
class Hit:
    """What a lookup found. `tokens == 0` is a miss and has no lease."""

    tokens: int
    lease: int
    boot: bytes
    groups: list[tuple[int, int]]  # (group index, first block that the hit includes)

    def pages(self, group: int, rank: int) -> bytes:
        """Pool pages of this rank's shards, little-endian u32 a block, from the group's first block on. Those of ranks
        that hold the same blocks, one after the other, are what `Worker.load` wants for them."""

    def pages_of(self, group: int, rank: int, blocks: list[int]) -> bytes:
        """The same for some blocks, named by their numbers in the prompt. ValueError for one that is not in the hit."""

    def stored_blocks(self, group: int) -> int:
        """Blocks from the prompt's first one that need no saving: the hit's and those stored after it."""

@final
class Scheduler:
    """The scheduler's connection. No call blocks longer than it says, none raises because of the daemon's state."""

    connected: bool
    ready: bool  # all workers of the engine have mapped the pool of this boot
    boot: bytes | None
    pool_bytes: int  # size of the daemon's pool; 0 while not connected
    is_recorded: bool  # somebody records the daemon's requests
    engine_id: str
    run: (
        bytes  # 16 random bytes that name this scheduler to the daemon, drawn when it was made; for `handoff`
    )
    gone: list[bytes]  # boots that this was connected to and is no more: their hits must not be promised
    over: list[bytes]  # those of `gone` whose processes have ended: workers may let their pools go
    address: str
    refusal: str  # the daemon's last refusal, or why it is not spoken to, or empty

    def __init__(
        self,
        address: str | None,
        engine_id: str,
        client: str,
        groups: list[tuple[bytes, str, int, int]],  # (namespace 16 B, name, tokens per block, window blocks)
        workers: int,
        lookup_timeout_ms: float = 50.0,
        daemon_user: str
        | None = None,  # who may run the daemon beside this user and root; None: KVLANE_DAEMON_USER
        follow_journal: bool = False,  # ask the daemon every 100 ms which blocks come and go
        crosses_hosts: bool = False,  # whether other hosts may have its blocks
    ) -> None: ...
    def lookup_start(
        self,
        request_id: str,
        hashes: list[list[bytes]],
        max_tokens: int,
        handoff: tuple[str, bytes, int, int] | None = None,
        tokens_per_s: int = 0,
        number: int = 0,
        again: bool = False,
        traceparent: str = "",
    ) -> None:
        """Ask for a prefix; one list of block hashes (16 bytes or more each) per group. Returns at once. The daemon
        fetches nothing that would come later than an engine that computes `tokens_per_s` could have computed it; 0 if
        that is not known.

        `handoff` is (engine_id, run, tokens, wait_ms): that engine saves the prompt's first tokens, and its scheduler
        is `run`. The answer waits for them, until nothing has been heard of their saves for `wait_ms`, at most 30 s.
        `number` is the engine's number of the request, as in `requests_ended`; 0 for none. `again`: the request had
        blocks already, or saved some of these itself, so that recordings leave this lookup out. `traceparent` is the
        header that the request came with (W3C Trace Context), or empty."""

    def requests_ended(
        self, requests: list[tuple[int, tuple[int, int, int], int, str, int, list[bytes]]], /
    ) -> None:
        """Report requests that have ended, each as (number, (tokens of the prompt, of the answer, in the engine's own
        cache), age in ms, leg, index of the first block of `hashes`, hashes of blocks that were saved). The leg is
        "prefill", "decode" or empty. Does nothing unless `is_recorded`."""

    def lookup_poll(self, request_id: str, wait_us: int = 0) -> Hit | None:
        """None while pending. After the lookup timeout, or with the daemon down, a miss. Consumes the answer:
        the caller now owns the hit's lease. An unknown request id is a miss. Waits up to `wait_us`, the first
        millisecond without letting other Python threads run: getting the interpreter back would take longer."""

    def lookup(self, hashes: list[list[bytes]], max_tokens: int, timeout_ms: float = 1000.0) -> Hit:
        """Ask and wait; for tools and benchmarks."""

    def forget(self, request_id: str) -> None:
        """Drop an unconsumed lookup; its lease, if one comes, is given back."""

    def release(self, boot: bytes, lease: int) -> None:
        """Give a lease back. Of another boot, it is already gone: nothing happens."""

    def tick(self) -> None:
        """Once a step: reconnect when due, send what is queued, read answers, heartbeat. Never blocks."""

    def cancel_saves(self, up_to_job: int, timeout_ms: float = 1000.0) -> bool:
        """No save job of the engine up to this one may become a block any more, unless it is complete. True when nobody
        reads blocks of the engine for one of them: they may be overwritten. False if that could not be confirmed."""

    def take_changes(self) -> tuple[bool, list[tuple[int, bytes, bool]]]:
        """Blocks of the engine's groups that came to RAM or went since the last call, whoever saved them, where the
        journal is followed: (group, hash, whether it came), in order, about 4,096 at most; `tick` asks for more once
        these are taken. True before them: something was missed, or it is another run of the daemon, so that what was
        heard before is worth nothing."""

    def take_stats(self) -> dict[str, float]:
        """Counters since the last call: lookups, hits, misses, timeouts, reconnects, lookup_seconds_sum, ..."""

    def close(self) -> None:
        """Say goodbye: the daemon has freed what this process held when it returns, which takes at most a second."""

@final
class Finished:
    """The end of a save or load job. Exactly one comes for each job, whatever happens."""

    job: int
    kind: str  # "save", "load", or "released" for a load that goes on
    ok: bool  # load: every byte arrived. save: the job ended; see `blocks` for what was stored
    blocks: int  # blocks copied
    present: int  # save: blocks that the pool had, or another engine was saving
    bytes: int
    seconds: float
    detail: str  # empty, or why it failed

@final
class Worker:
    """One rank's connection, its mapping of the pool and its mover thread. No call waits for the daemon."""

    connected: bool
    method: str  # how saves travel: "process_vm", "mapped", "gpu", "" before the first registration
    reason: str

    def __init__(
        self,
        address: str | None,
        engine_id: str,
        client: str,
        rank: int,
        workers: int,
        groups: list[tuple[bytes, bytes, list[Region]]],  # (namespace, layout digest 16 B, regions)
        save_method: str = "auto",
        save_timeout_ms: float = 10000.0,
        gpu: bytes | None = None,  # UUID (16 bytes) of the GPU that the regions lie on
        # Of each group, how many consecutive ranks hold the same blocks: each saves a slice of a block and loads all of
        # it. A block has at least 512 bytes for each. None: 1, blocks of its own.
        replicas: list[int] | None = None,
        daemon_user: str | None = None,
        # Of each group, what its layout digest stands for, so that the daemon can compare it with others. One that is
        # beyond the daemon's bounds is not told.
        shards: Sequence[ShardLayout | None] | None = None,
        # For each region of each group the place in the model of the first layer that reads it, or a later region of
        # the group. Loads of several groups come in this order. None: in the order of regions.
        layers: list[list[int]] | None = None,
        # When a load "when_near" is released: so many steps, and the milliseconds that other requests may wait for it,
        # before its predicted end.
        steps_ahead: float = 0.5,
        load_stall_ms: float = 0.0,
    ) -> None: ...
    def save(
        self, job: int, groups: list[tuple[int, bytes, list[bytes], list[int]]], stream: int = 0
    ) -> None:
        """Queue a save: (group, parent hash or b"", hashes, block ids). The blocks' bytes must stay as they are
        until the job is Finished. On a GPU it starts after what the CUDA stream has been given so far."""

    def load(
        self,
        job: int,
        boot: bytes,
        groups: list[tuple[int, list[int], bytes]],
        stream: int = 0,
        release: Literal["at_end", "when_near", "at_once"] = "at_end",
    ) -> None:
        """Queue a load from the mapped pool of that boot: (group, block ids, pages). Where several ranks hold the same
        blocks: the pages of all of them, rank after rank. Goes on without the daemon. On a
        GPU it starts after what the CUDA stream has been given so far, and may be Finished twice: first as "released",
        when it can only succeed and streams can wait for it, then as "load" when every byte is there. `release` says
        when: at once, so early that it is predicted to have ended when its request computes, or not before its end."""

    def outstanding_loads(self) -> list[int]:
        """Jobs of loads that were released and have not ended."""

    def wait_for_loads(self, stream: int, jobs: Sequence[int], region: tuple[int, int] | None = None) -> None:
        """Later work of the CUDA stream starts once this region (its group and its number; None: all) of these released
        loads is there. Does not wait itself."""

    def step_begins(self, computes: bool, present: bytes | None = None, gone: list[bytes] = ...) -> None:
        """The engine begins a step, which ends with the next `poll`, and may compute in it. The pool of a daemon that
        died stays mapped, for loads that were promised on it, until a step tells that none follows: the scheduler is
        at `present` and all loads of this step are of that boot, or its boot is one of `gone` and no load of this
        step is of it."""

    def poll(self) -> list[Finished]:
        """Jobs that ended since the last call. Costs nothing when there are none."""

    def wait(self, timeout_ms: float) -> bool:
        """Wait, without the GIL, until poll() has something or nothing is queued. False at the timeout."""

    def wait_registered(self, timeout_ms: float) -> bool:
        """Wait, without the GIL, until registered with a daemon. False at the timeout, or when none answers."""

    def take_stats(self) -> dict[str, float]: ...
    def close(self) -> None:
        """End copies in flight, unmap, say goodbye."""

@final
class Tool:
    """A connection for tools, tests and benchmarks: status, settle, and the pool itself."""

    boot: bytes

    def __init__(
        self, address: str | None, timeout_ms: float = 1000.0, daemon_user: str | None = None
    ) -> None:
        """Raises ConnectionError with the address and what to do when no daemon answers."""

    def status(self) -> dict[str, object]: ...
    def settle(self, timeout_ms: int = 10000) -> None:
        """Returns when everything committed before is sealed and visible. TimeoutError otherwise."""

    def drop_namespaces(self, namespaces: list[bytes]) -> None: ...
    def read_pool(self, offset: int, length: int) -> bytes: ...
    def write_pool(self, offset: int, data: bytes) -> None:
        """Overwrite pool bytes: for controls that must fail, and tests of the scrub. Same user only."""
    def close(self) -> None:
        """Say goodbye: the daemon does not count this tool any more when it returns, at most a second later."""

def default_address() -> str:
    """The address used when none is given: KVLANE_ADDR, else the socket in the user's runtime directory."""

def runtime_folder() -> Path:
    """The folder in which a user's processes of this host find each other; it is made if need be. OSError where it is
    not this user's alone."""

class HandoffRank:
    """A rank's part of direct hand-offs: blocks that it computes are read by the same rank of another engine, and
    blocks of that one are read into its own. It has a thread."""

    def __init__(
        self,
        listen: str,
        token: str,
        regions: list[tuple[int, int, int, int, list[int]]],
        areas: list[tuple[int, int]],
        key: bytes,
        transport: str,
        gpu: bytes | None = None,
        tls: tuple[str, str, str] | None = None,
    ) -> None:
        """`listen`: HOST:PORT. `regions`: as of `Worker`, one after the other. `areas`: address and bytes of the memory
        in which they lie, which has to stay until `close`. `key`: 16 bytes, by which its own scheduler is known.
        `transport`: auto, tcp, cma or cuda. `gpu`: the UUID of the GPU whose memory it is. `tls`: files with
        a certificate, its key, and the authority's certificate. OSError, ValueError."""

    @property
    def endpoint(self) -> bytes:
        """Where it can be reached."""

    def step_begins(self, filled: Sequence[tuple[bytes, int, list[int], bytes | None]], /) -> None:
        """A step of the engine fills these blocks: of each hand-off its id, which block of the prompt the first of them
        is, their ids, and 16 bytes of the hash of the last of them. Once computed they stay as they are until the
        scheduler's `take_free_lendings` names the hand-off."""

    def layer_hook(self, layers: list[tuple[str, int]], /) -> LayerHook:
        """What is to be called within steps with each layer that is computed. `layers`: their names, each with the
        last region that it writes. Regions count from 0."""

    def step_ends(self, stream: int = 0) -> None:
        """The same of all of them. A GPU's stream may compute on when the next step begins."""

    def take_counts(self) -> tuple[int, int, int, int, int, int]:
        """Since the last call: READs that brought their bytes, READs that did not, runs of neighbouring bytes of which
        they consisted, bytes from GPU to GPU, bytes by process_vm, bytes by TCP."""

    def close(self) -> None:
        """When this returns nothing is read or written any more."""

class LayerHook:
    """Tells a rank's part of direct hand-offs how far a step is: the regions of layers that are done, in the order of
    regions. A layer that is done before its turn is counted when those before it are done, too."""

    def begin(self, stream: int, /) -> None:
        """A step begins, which `step_begins` was told of. On a GPU, `stream` is the handle of the engine's stream that
        computes; 0 on a CPU."""

    def __call__(self, layer: str, /) -> None:
        """This layer's part of the step's blocks is computed; on a GPU once the stream has come so far. Raises nothing
        where it cannot be told."""

    def check(self) -> None:
        """Raises the first error since this was last called: OSError if a GPU's driver refuses."""

class HandoffScheduler:
    """A scheduler's part of direct hand-offs. Ids, contents and keys have 16 bytes. It has a thread; no call but
    `wait_over`, `end_all` and `close` waits for anybody."""

    def __init__(
        self,
        listen: str,
        token: str,
        ranks: list[tuple[bytes, bytes]],
        shape: bytes,
        networks: list[tuple[IPv4Address | IPv6Address, int]],
        tls: tuple[str, str, str] | None = None,
    ) -> None:
        """`ranks`: endpoint and key of each, in their order. `shape`: the same in engines whose blocks are cut alike.
        `networks`: those that may be connected to beside the loopback. `tls`: as of the ranks."""

    @property
    def address(self) -> str:
        """HOST:PORT at which other engines reach it."""

    def begin_lending(self, id: bytes, content: bytes, /) -> bool:
        """Starts to lend a prompt's blocks. False if there are too many lendings, or the id was used before."""

    def hold_lending(self, id: bytes, /) -> None: ...
    def release_lending(self, id: bytes, /) -> None: ...
    def lending_progress(self, id: bytes, ahead: int, computed: int, /) -> bool:
        """Records the requests ahead of it, and its computed tokens. False once the lending has ended."""

    def give_up_lending(self, id: bytes, /) -> None:
        """Ends a lending, because its request ended early or its blocks cannot stay."""

    def end_oldest_unwanted_lending(self, but: bytes, /) -> bytes | None:
        """Ends the oldest lending that no engine has asked for, but never `but`. Its blocks may be unpinned at once,
        because no rank has offered them."""

    def take_free_lendings(self) -> list[bytes]:
        """Lendings that ended since the last call, and have no READ in flight: their blocks may be unpinned."""

    def begin_landing(
        self,
        id: bytes,
        address: str,
        content: bytes,
        first_block: int,
        end_block: int,
        patience_ms: float,
        budget_ms: float,
        /,
    ) -> bool:
        """A prompt that the engine at `address` computes is to land here: its blocks from `first_block` on, `end_block`
        is the first that is not wanted. It is given up after `patience_ms`, or after `budget_ms`, by when this engine
        would have computed it. False: too many are, or the id was used before. ValueError for what is no
        address."""

    def give_room(self, id: bytes, blocks: list[int], /) -> None:
        """These blocks of the engine are for the next of the prompt. They may be written until it is over."""

    def postpone_landing(self, id: bytes, budget_ms: float, waits_for_room: bool, /) -> None:
        """Extend a landing's budget to `budget_ms` from now. Its patience stays. With `waits_for_room` it is not
        stalled either."""

    def live_landings(self) -> list[bytes]:
        """Those that are not over, so that their blocks may be written."""

    def standing(self, id: bytes, /) -> tuple[str | None, str, int, list[tuple[int, bytes]]] | None:
        """How it ended, None while it goes on: landed, refused, unreachable, unheard, stalled, too_long, budget,
        peer_lost or given_up; the same as a sentence; the block before which all have landed; and hashes, each with its
        block."""

    def give_landing_up(self, id: bytes, /) -> None:
        """It is over when `standing` says so."""

    def forget_landing(self, id: bytes, /) -> None:
        """One that is over. ValueError for another one."""

    def wait_for_end(self, timeout_ms: float, /) -> bool:
        """Waits until a landing has ended since the last call. Returns False after the timeout."""

    def wait_over(self, id: bytes, timeout_ms: float, /) -> bool:
        """Waits until it is over."""

    def end_all(self, timeout_ms: float, /) -> bool:
        """Gives all up that computes or lands here, and waits until nothing of it is read or written. False: not in
        this time."""

    def close(self) -> None:
        """Ends all connections."""

class GpuMemory:
    """Memory of a GPU, for benchmarks and tests of what moves such memory. It takes addresses of host memory as
    numbers, so a wrong one is a crash. OSError where there is no driver, no such GPU, or it refuses."""

    def __init__(self, gpu: int, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> str:
        """Such as "cuda:0"."""

    @property
    def uuid(self) -> bytes:
        """The GPU's UUID, 16 bytes, as `HandoffRank` takes it."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def copy_from_host(self, offset: int, address: int, length: int) -> None: ...
    def copy_to_host(self, offset: int, address: int, length: int) -> None: ...
    def copy_to(self, offset: int, to: GpuMemory, to_offset: int, length: int) -> None:
        """Into other memory by way of the host's pinned memory; it is there when this returns."""

    def copy_from(self, other: GpuMemory, runs: list[tuple[int, int, int]], blocks: int) -> None:
        """Ranges (offset here, offset there, bytes) of other memory, over the link between the GPUs: by the copy kernel
        with so many thread blocks, with 0 by copy engines alone."""

_Extras = tuple[tuple[int, int] | None, float | None, bool]  # (counter, generation), milliseconds, bulk
_Side = tuple[int, int, int, bytes]  # region, offset, stride, pages as little-endian u32

@final
class MoeFailure(Exception):
    """A kind, a sentence, and the rows needed or 0."""

class MoeDispatch:
    """A dispatch of a `MoeRank`, from its send until it is combined."""

    def give_up(self) -> None: ...

class MoeRank:
    """`kvlane.moe.AllToAll` is for users, and keeps the arrays alive. Memory is an address and bytes.

    ValueError if the caller did something wrong. `MoeFailure` for the rest, of the kinds lost, silent, not joined,
    capacity and failed."""

    def __init__(self, rank: int, ranks: int, sizes: Any, all_gather: Callable[[bytes], list[bytes]]) -> None:
        """`sizes` is a `kvlane.moe._received.Sizes`."""

    def bytes(self) -> int: ...
    def stats(self) -> tuple[int, int, int, int]: ...
    def check(self) -> None: ...
    def send(
        self, rows: tuple[int, int], scales: tuple[int, int], ids: tuple[int, int], weights: tuple[int, int]
    ) -> MoeDispatch: ...
    def arrive(self, dispatch: MoeDispatch) -> tuple[list[int], list[int], int]:
        """Rows for each expert of this rank, the first row of each if rows go by experts, and rows of all."""

    def place(self, dispatch: MoeDispatch, rows: tuple[int, int], scales: tuple[int, int]) -> None: ...
    def wanted(self, dispatch: MoeDispatch, ids: tuple[int, int], weights: tuple[int, int]) -> None:
        """For the layout of tokens: `top_k` int64 and float32 for each row."""

    def send_back(
        self, dispatch: MoeDispatch, outputs: tuple[int, int], is_reduced: bool, weights: tuple[int, int]
    ) -> None:
        """`weights` of no bytes are those that were dispatched."""

    def gather(self, dispatch: MoeDispatch, tokens: tuple[int, int]) -> None: ...
    def give_up(self) -> None: ...
    def close(self) -> None: ...

def moe_decline(ranks: int, why: str, all_gather: Callable[[bytes], list[bytes]], /) -> None:
    """Tells the other ranks, instead of joining them, why this one cannot."""

def moe_cast(from_: tuple[int, int], rows: tuple[int, int], scales: tuple[int, int], kind: str, /) -> None:
    """Rows of bfloat16 in the memory of the host, as fp8 with scales; `kind` as the `cast` of `kvlane.moe`."""

class MoeGpuDispatch:
    """A dispatch of a `MoeGpuRank`, until it is combined."""

    def give_up(self) -> None: ...

class MoeGpuRank:
    """`kvlane.moe.AllToAll` is for users, and keeps the tensors alive. Addresses are of memory that the GPU reaches.
    Calls launch work in a stream, by the driver's handle.

    Errors are those of `MoeRank`, and OSError from the driver when it is made."""

    def __init__(
        self,
        device: int,
        rank: int,
        ranks: int,
        sizes: Any,
        multiprocessors: int | None,
        all_gather: Callable[[bytes], list[bytes]],
    ) -> None: ...
    def bytes(self) -> int: ...
    def stats(self) -> tuple[int, int, int, int]:
        """Of what ran so far. Waits for a copy from the GPU."""

    def check(self) -> None: ...
    def cast(self, stream: int, tokens: int, from_: int, rows: int, scales: int, kind: str, /) -> None:
        """`moe_cast` by a kernel."""

    def dispatch(
        self,
        stream: int,
        input: tuple[int, int, int, int, int, int | None],
        output: tuple[int, int, int, int, int, int, bool] | None,
    ) -> MoeGpuDispatch:
        """`input`: number of tokens; addresses of rows, scales and ids; bytes of an id; address of weights. `output`:
        addresses of rows, scales, counts, starts, ids and weights, and whether scales go by column; without it,
        `receive` is due."""

    def receive(
        self, stream: int, dispatch: MoeGpuDispatch, output: tuple[int, int, int, int, int, int, bool]
    ) -> None: ...
    def combine(
        self,
        stream: int,
        dispatch: MoeGpuDispatch,
        outputs: int,
        tokens: int,
        weights: int | None,
        is_reduced: bool,
        part: Literal["both", "send", "receive"],
    ) -> None: ...
    def give_up(self) -> None: ...
    def synchronize(self) -> None:
        """Waits for all work of the GPU."""

    def close(self) -> None:
        """Waits for all work of the GPU."""

class FabricPeer:
    def id(self) -> tuple[int, int]:
        """Engine id, boot nonce."""

@final
class FabricPieces:
    """What a transfer moves."""

    @staticmethod
    def runs(local: int, remote: int, runs: bytes) -> FabricPieces:
        """Each run: offset here, offset there, length, little-endian u64."""

    @staticmethod
    def pages(page_bytes: int, local: _Side, remote: _Side) -> FabricPieces: ...

@final
class FabricGroup:
    """`kvlane.fabric.Group` is for users. Answers the transfer of each member."""

    def scatter(
        self,
        parts: list[tuple[FabricPieces, tuple[int, int] | None]],
        timeout_ms: float | None,
        is_bulk: bool,
    ) -> list[FabricTransfer]: ...
    def barrier(self, counters: list[tuple[int, int]], timeout_ms: float | None) -> list[FabricTransfer]: ...

@final
class FabricTransfer:
    """`kvlane.fabric.Transfer` is for users. An outcome is None, empty, or why the transfer failed."""

    def wait(self, timeout_ms: float | None) -> str | None: ...
    def outcome(self) -> str | None: ...
    def carried(self) -> list[tuple[str, int]]: ...
    def cancel(self) -> None: ...

@final
class FabricEngine:
    """`kvlane.fabric.Engine` is for users, and keeps registered memory alive."""

    def __init__(
        self,
        listen: list[str],
        token: str,
        connections: int,
        patience_ms: float,
        transport: str,
        copy_threads: int | None,
        socket_threads: int,
        inbox: tuple[int, int],
        checksums: bool,
        tls: tuple[str, str, str] | None,
    ) -> None:
        """`copy_threads`: None for the engine's own choice. `inbox`: most messages, and most bytes of them. `tls`:
        certificate, key, authority."""

    def register(self, address: int, length: int, access: str) -> int: ...
    def register_gpu(self, gpu: int, address: int, length: int, access: str) -> int:
        """OSError where there is no driver or no such GPU, or it refuses."""

    def staged(self) -> tuple[int, int, int]:
        """Bytes copied to GPUs, bytes copied from them, copies that failed."""

    def unregister(self, region: int) -> None: ...
    def describe(self) -> bytes: ...
    def connect(self, descriptor: bytes) -> FabricPeer: ...
    def connect_to(self, address: str, timeout_ms: float) -> FabricPeer: ...
    def open_window(self, peer: tuple[int, int], ranges: list[tuple[int, int, int]]) -> bytes: ...
    def close_window(self, window: bytes) -> None: ...
    def read_window(
        self, peer: FabricPeer, window: bytes, local: int, runs: bytes, extras: _Extras
    ) -> FabricTransfer | None: ...
    def regions(self, peer: FabricPeer) -> list[tuple[int, int, bool, bool]]: ...
    def update(self, peer: FabricPeer, descriptor: bytes) -> None: ...
    def disconnect(self, peer: FabricPeer) -> None: ...
    def paths(
        self, peer: FabricPeer
    ) -> list[tuple[str, str | None, bool, float | None, str | None, str | None]]: ...
    def measure_holds(self) -> None:
        """How long the engine's lock is held each time, from now on. For benchmarks."""

    def take_holds(self) -> list[tuple[int, int]]:
        """What was measured, in nanoseconds of the processor and on the wall; a million at the most."""

    def checksum_errors(self) -> int: ...
    def connections_without_rings(self) -> int: ...
    def begin(
        self, peer: FabricPeer, is_write: bool, pieces: FabricPieces, extras: _Extras
    ) -> FabricTransfer: ...
    def begin_runs(
        self, peer: FabricPeer, is_write: bool, regions: tuple[int, int], runs: bytes, extras: _Extras
    ) -> FabricTransfer:
        """As `begin` with `FabricPieces.runs` of a region here and one there."""

    def group(self, peers: list[FabricPeer]) -> FabricGroup: ...
    def send(self, peer: FabricPeer, bytes: bytes, timeout_ms: float, is_bulk: bool) -> FabricTransfer: ...
    def receive(self, timeout_ms: float | None) -> tuple[tuple[int, int], bytes] | None:
        """Engine id and boot nonce of the sender, and the bytes."""

    def id(self) -> tuple[int, int]: ...
    def open_counter(self, counter: int) -> int: ...
    def count(self, counter: int, generation: int) -> int: ...
    def retire_counter(self, counter: int, generation: int) -> int: ...
    def wait_count(self, counter: int, generation: int, target: int, timeout_ms: float | None) -> bool: ...
    def close(self) -> None: ...
