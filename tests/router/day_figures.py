"""Memory, descriptors and threads of programs over a day's soak: samples, quiet moments, and how quarters compare."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from day_readers import page_of
from processes import PATIENCE

SAMPLE_PERIOD_S = 5.0
# Prometheus' own word for the share of a run that no figure is taken from.
WARM_UP = 0.1
GROWTH_MAX = 0.02
# For processes this small, with 10 to 40 MiB of anonymous memory, 2 % is less than malloc moves when threads come and
# go, and than a window of hits takes for a further namespace. A leak of 2 MiB in an hour is one of 5 bytes a request.
SLACK_BYTES = 2 << 20
# The router closes idle connections to engines after 4 s, and looks every 2 s.
SETTLE_S = 7.0
# A session starts a thread of the first name with its first lookup that waits for the SSD, so equally many engines may
# have more or fewer. The kernel starts the workers of an io_uring as it needs them.
UNEVEN = ("kvlane-late", "iou-wrk-")
MIB = 1 << 20


@dataclass(frozen=True)
class Program:
    """A process to watch, which serves /metrics."""

    name: str
    pid: int
    address: str

    def metrics(self) -> dict[str, float]:
        """Values by name and labels."""
        lines = (line for line in page_of(self.address, "/metrics").splitlines() if line and line[0] != "#")
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def status(self) -> dict[str, int]:
        """Threads, and memory in bytes."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        pairs = (line.split(":", 1) for line in lines)
        wanted = {"Threads": 1, "VmRSS": 1024, "RssAnon": 1024, "RssFile": 1024, "RssShmem": 1024}
        return {name: int(value.split()[0]) * wanted[name] for name, value in pairs if name in wanted}

    def descriptors(self) -> Counter[str]:
        """Open descriptors by kind."""
        kinds: Counter[str] = Counter()
        for each in os.listdir(f"/proc/{self.pid}/fd"):
            # It was closed meanwhile.
            with contextlib.suppress(OSError):
                kinds[os.readlink(f"/proc/{self.pid}/fd/{each}").split(":[")[0]] += 1
        return kinds

    def threads(self) -> Counter[str]:
        """Threads by name."""
        names: Counter[str] = Counter()
        for each in os.listdir(f"/proc/{self.pid}/task"):
            # It ended meanwhile.
            with contextlib.suppress(OSError):
                names[Path(f"/proc/{self.pid}/task/{each}/comm").read_text().strip()] += 1
        return names

    def counts(self) -> tuple[int, int]:
        """Descriptors, and threads that all engines of equal number have."""
        threads = self.threads()
        usual = sum(count for name, count in threads.items() if not name.startswith(UNEVEN))
        return len(os.listdir(f"/proc/{self.pid}/fd")), usual


@dataclass(frozen=True)
class Sample:
    at: float
    """Seconds since the loads began."""
    resident: int
    """process_resident_memory_bytes, with the pool and the program's own file."""
    anonymous: int
    open_fds: int
    """process_open_fds; the connection of the scrape is one of them."""
    threads: int


@dataclass(frozen=True)
class Quiet:
    """A moment without load and with the same engines."""

    at: float
    descriptors: int
    threads: int
    by_kind: dict[str, int]
    by_name: dict[str, int]


@dataclass
class Watched:
    """What was seen of one program."""

    program: Program
    samples: list[Sample] = field(default_factory=list)
    quiet: list[Quiet] = field(default_factory=list)
    usual: tuple[int, int] | None = None
    """Descriptors and threads at the first quiet moment after the warm-up."""

    def sample(self, at: float) -> None:
        metrics, status = self.program.metrics(), self.program.status()
        self.samples.append(
            Sample(
                at,
                int(metrics["process_resident_memory_bytes"]),
                status["RssAnon"],
                int(metrics["process_open_fds"]),
                status["Threads"],
            )
        )

    def look(self, at: float, is_warm: bool) -> None:
        """Waits until descriptors and threads are as many as at the first quiet moment. Otherwise takes the fewest that
        it saw: a connection of a scrape, a page or a probe ends by itself."""
        began = time.monotonic()
        descriptors, threads = fewest = self.program.counts()
        while fewest != self.usual and time.monotonic() - began < (
            SETTLE_S if self.usual is None else PATIENCE
        ):
            time.sleep(0.02)
            now = self.program.counts()
            if now == self.usual:
                fewest = now
                break
            fewest = (min(fewest[0], now[0]), min(fewest[1], now[1]))
        descriptors, threads = fewest
        kinds, names = dict(self.program.descriptors()), dict(self.program.threads())
        self.quiet.append(Quiet(at, descriptors, threads, kinds, names))
        if is_warm and self.usual is None:
            self.usual = fewest


class Sampler:
    """Samples all programs every 5 s, in a thread of its own."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.watched = [Watched(program) for program in programs]
        self.began = time.monotonic()
        self.failures: list[str] = []
        self.scrapes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def age(self) -> float:
        return time.monotonic() - self.began

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_PERIOD_S):
            for each in self.watched:
                try:
                    each.sample(self.age())
                    self.scrapes += 1
                except (OSError, KeyError) as error:
                    self.failures.append(f"{each.program.name}: {type(error).__name__}: {error}")

    def stop(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE)


@dataclass(frozen=True)
class Comparison:
    """Medians of the first and of the last quarter."""

    program: str
    figure: str
    first: float
    last: float
    allowed: float | None
    """The most by which the last may differ. None: it is only shown."""

    @property
    def is_flat(self) -> bool:
        if self.allowed is None:
            return True
        # Memory may shrink. Of descriptors and threads neither more nor fewer are right.
        change = self.last - self.first
        return change <= self.allowed and (self.allowed > 0 or change == 0)

    def shown(self) -> str:
        unit = MIB if "MiB" in self.figure else 1
        change = f"{100 * (self.last / self.first - 1):+.2f} %" if self.first else ""
        verdict = "" if self.allowed is None else "flat" if self.is_flat else "GROWS"
        name = f"{self.program}: {self.figure}"
        return f"{name:42} {self.first / unit:12.2f} {self.last / unit:12.2f} {change:>10}  {verdict}"


def compare(watched: Watched, seconds: float) -> list[Comparison]:
    """`seconds`: how long the loads went on."""
    warm = WARM_UP * seconds
    quarter = (seconds - warm) / 4

    def medians(points: Sequence[Sample] | Sequence[Quiet], name: str) -> tuple[float, float]:
        first = [getattr(point, name) for point in points if warm <= point.at < warm + quarter]
        last = [getattr(point, name) for point in points if point.at >= seconds - quarter]
        assert first and last, f"no {name} of {watched.program.name} in a quarter"
        return statistics.median(first), statistics.median(last)

    def comparison(figure: str, name: str, is_quiet: bool, allowed: float | None) -> Comparison:
        first, last = medians(watched.quiet if is_quiet else watched.samples, name)
        if allowed == SLACK_BYTES:
            allowed = max(GROWTH_MAX * first, SLACK_BYTES)
        return Comparison(watched.program.name, figure, first, last, allowed)

    return [
        comparison("anonymous memory, MiB", "anonymous", False, SLACK_BYTES),
        comparison("resident memory, MiB", "resident", False, None),
        comparison("descriptors, quiet", "descriptors", True, 0),
        comparison("descriptors at scrapes", "open_fds", False, None),
        comparison("threads, quiet", "threads", True, 0),
        comparison("threads under load", "threads", False, None),
    ]


def document(watched: Watched) -> dict[str, object]:
    return {
        "samples": [asdict(each) for each in watched.samples],
        "quiet": [asdict(each) for each in watched.quiet],
    }
