"""Bare loops, and parts of kvlane by themselves, that `kvlane.bench` measures. Engines do not load this module."""

from typing import final

# The loops take addresses and descriptors as they are: a wrong one crashes.

def read_process(pid: int, pieces: list[tuple[int, int]], length: int, pieces_per_call: int) -> float:
    """Read `length` bytes at each first address of another process to the second of this one by process_vm_readv,
    in calls of up to 1024 pieces; the seconds taken. OSError where the kernel refuses."""

def copy(pieces: list[tuple[int, int]], length: int) -> float:
    """Copy `length` bytes from each first address to the second one by memcpy; the seconds taken."""

def ping_pong(socket: int, length: int) -> float:
    """Send `length` bytes over a blocking socket and wait for as many; the seconds taken."""

def echo(socket: int, length: int) -> None:
    """Send back messages of `length` bytes until the peer closes the socket."""

def gpus() -> list[tuple[int, str, str, int]]:
    """Ordinal, name, PCI address and bytes of each GPU. OSError where there is no driver, which says why."""

def gpu_copy(
    gpu: int,
    path: str,
    total_bytes: int,
    piece_bytes: int,
    method: str,
    blocks: int = 16,
    peer: int | None = None,
) -> float:
    """GB/s of copies of shuffled pieces. path: "h2d", "d2h", or "peer" with a second GPU; method: "contiguous",
    "engine", "batch", "kernel" or "auto". OSError where the bytes did not arrive as they were."""

def gpu_calibrate(gpu: int) -> tuple[list[tuple[str, int, str, float]], list[tuple[str, int, int]]]:
    """What the daemon measures at its start: path, bytes of a piece, way to copy and GB/s of each; and for each path
    from how many bytes on batch calls of copy engines are chosen, and single copies."""

def gpu_rails(gpu: int) -> list[int]:
    """Ordinals of the GPUs whose links a load for this one can use too."""

def gpu_together(
    gpus: list[int],
    total_bytes: int,
    piece_bytes: int,
    method: str,
    joined: int = 1,
    staged: bool = False,
) -> float:
    """GB/s in sum from the host to each of these GPUs at the same time, of so many bytes to each in shuffled pieces;
    `method`, `joined` and `staged` as in the other two. OSError where the bytes did not arrive as they were."""

def gpu_load(
    gpu: int,
    rails: list[int],
    total_bytes: int,
    piece_bytes: int,
    joined: int = 4,
    slot_bytes: int | None = None,
    slots: int | None = None,
    staged: bool = False,
) -> float:
    """GB/s from the host to a GPU over its own link and those of `rails`, of shuffled pieces. So many of them as
    `joined` lie one after the other in the host's memory; `staged`: in long runs through a ring on the GPU. OSError
    where the bytes did not arrive as they were."""

@final
class IndexOwners:
    """Owners of blocks in name only, each on a port of loopback, which announce them to replicas of an index over TCP.
    Each has `kept` blocks that stay, and `turning` ones, which changes replace."""

    def __init__(self, owners: int, kept: int, turning: int, replicas: list[str]) -> None: ...
    def addresses(self) -> list[str]:
        """Their names in the index."""

    def change(self, a_second: float, at_a_time: int) -> None:
        """All of them together make so many changes a second from now on, each so many at a time."""

    def acknowledged(self) -> int:
        """Changes that replicas have acknowledged, summed over replicas."""

    def close(self) -> None:
        """End them."""

@final
class IndexLookups:
    """A daemon without blocks that only asks replicas of an index, and an engine that pings an echo."""

    def __init__(self, replicas: list[str], answer_ms: float, echo: str | None = None) -> None: ...
    @property
    def pings_from(self) -> str | None:
        """The address that the echo must answer."""

    def reached(self) -> tuple[int, int]:
        """The number of owners and of replicas that it has reached."""

    def ask(
        self, owners: int, kept: int, blocks: int, a_second: float, seconds: float
    ) -> tuple[int, list[float], list[float], int, int, list[float]]:
        """Ask for prompts of the first so many owners, among the blocks that they keep, and ping in turn. Lookups;
        microseconds of each that found all, and of each that found nothing; how many found something else; pings, and
        microseconds of each."""

    def close(self) -> None:
        """End the daemon."""

@final
class IndexEcho:
    """Answers messages of an `IndexLookups` at once, in another process."""

    def __init__(self) -> None: ...
    @property
    def address(self) -> str:
        """Where it listens."""

    def answer(self, asker: str) -> None:
        """Answer the engine at this address from now on."""

def index_core(entries: int) -> list[tuple[str, float]]:
    """Figures by name of an index of so many entries, by itself in this thread."""

@final
class SsdBench:
    """An SSD tier on new files of `capacity` bytes each, for `kvlane bench ssd`; they are removed with it. OSError
    where that is not possible, also where one of them is there already. What measures gives bytes, seconds, CPU
    seconds of the process, those of the devices' threads, and the latency of each block in microseconds."""

    def __init__(
        self,
        paths: list[str],
        capacity: int,
        block_bytes: int,
        pool_bytes: int,
        threads: bool = False,
        path: str = "auto",
    ) -> None: ...
    def status(self) -> list[tuple[str, bool, bool, list[str]]]:
        """Of each device: "io_uring" or "threads", direct I/O, registered memory, and what is not as it should be."""

    def paths(self) -> list[tuple[bool, str, tuple[int, int] | None]]:
        """Of each device: whether transfers go through staging memory, why, and the read rates direct and staged."""

    @property
    def pool_pages(self) -> str:
        """Size of the pool's pages."""

    def write(self, count: int) -> tuple[int, float, float, float, list[int]]:
        """Write so many new blocks, as fast as the backlog takes them."""

    def read(self, among: int, count: int, depth: int) -> tuple[int, float, float, float, list[int]]:
        """Read `count` times a block of the newest `among`, `depth` at once, with no pattern."""

    def read_beside_writes(
        self, among: int, count: int, depth: int
    ) -> tuple[
        tuple[int, float, float, float, list[int]],
        tuple[int, float, float, float, list[int]],
    ]:
        """The same with a backlog of writes all the time: what was read and what was written, the CPU time of both."""

    def close(self) -> None:
        """End the tier and remove its files."""

def ssd_restart(path: str, blocks: int, headers: bool = False) -> tuple[float, float | None]:
    """Seconds in which an SSD tier with so many blocks of 4 KiB is open again, from tables, and from headers alone."""

def crc32c(piece_bytes: int, bytes: int) -> float:
    """Bytes of checksums for each second of CPU time, over memory that no cache holds."""
