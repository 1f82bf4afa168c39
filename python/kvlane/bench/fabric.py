"""`kvlane bench fabric`: transfers of kvlane.fabric between two processes, and the same bytes moved by bare calls. With
peers beside it: bench/fabric/peers.py."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvlane.bench import certificates, pictures, report
from kvlane.bench.children import Child, Failed
from kvlane.bench.daemon import cpu_seconds
from kvlane.bench.drawing import save
from kvlane.bench.extra import tqdm
from kvlane.bench.fabric_sides import SIDES, Cell, Kvlane, Side, unpack_address
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.memory import both_memories, parse_memory
from kvlane.bench.sizes import parse_size

T = TypeVar("T")

NAME = "fabric"
HELP = "transfers between processes: size, pages, latency; beside a bare socket loop, process_vm and memcpy"
KIB, MIB = 1 << 10, 1 << 20
SIZES = (64, 4 * KIB, 64 * KIB, MIB, 16 * MIB)
OPS = ("write", "read")
PATTERNS = ("contiguous", "paged")
TRANSPORTS = ("tcp", "cma", "cuda")
# Measured beside transfers of GPUs' memory: a plain socket between host memories, and the copies alone, through the
# host and over the link between the GPUs.
GPU_OTHERS = ("loop", "gpu-copies", "peer-copy")
# The bare counterparts of a transfer through sockets.
_SOCKET_PARTS = ("loop", "gpu-copies")
CUDA_GOALS = {MIB: 0.9, 16 * MIB: 0.9, None: 0.9}  # of peer-copy


@dataclass(frozen=True)
class System:
    """One of the systems that take turns."""

    side: str
    """The key of `Field.sides` for its processes."""
    transport: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables of the system's processes, added to the environment of this one."""


class Goal(NamedTuple):
    """The least ratio of `own`'s GB/s to `other`'s; None if the ratio is for information. A `size` of None is the paged
    pattern."""

    own: str
    op: str
    size: int | None
    other: str
    at_least: float | None


@dataclass(frozen=True)
class Field:
    """The systems beside kvlane, and the goals of their ratios."""

    systems: Mapping[str, System]
    sides: Mapping[str, type[Side]]
    program: tuple[str, ...]
    """Arguments of Python that start a process of one side; the side's name follows."""
    goals: tuple[Goal, ...]
    not_of_gpus: Mapping[str, str]
    """Why a side is not measured with the memory of GPUs, by side."""
    tuning: tuple[str, ...] = ()
    """Prefixes of variables that change what a system does. A process gets them from its own `environment` only."""
    latency_others: tuple[tuple[str, str], ...] = ()
    """Pairs of systems whose latencies are compared: ours, and the one that it is divided by."""
    missing: Callable[[str], str | None] = lambda name: None
    """Why a side cannot be measured here; None if it can."""
    install: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """How to install a side that is missing."""
    note: str = ""
    gpu_note: str = ""

    @property
    def others(self) -> tuple[str, ...]:
        """The sides beside kvlane that move memory of the host."""
        return tuple(name for name in self.sides if name not in ("kvlane", "gpu-copies", "peer-copy"))


def _bare_goals() -> tuple[Goal, ...]:
    tcp = [("write", 16 * MIB), ("write", None)]
    cma = [(op, size, goal) for op in OPS for size, goal in ((MIB, 0.9), (16 * MIB, 0.9), (None, None))]
    return (
        *(Goal("kvlane", op, size, "loop", 0.95) for op, size in tcp),
        *(Goal("kvlane-cma", op, size, "process_vm", goal) for op, size, goal in cma),
    )


BARE = Field(
    systems={
        "kvlane": System("kvlane", "tcp"),
        "kvlane-cma": System("kvlane", "cma"),
        "kvlane-no-checksums": System("kvlane", "tcp-no-checksums"),
        "kvlane-tls": System("kvlane", "tls"),
        "loop": System("loop", "tcp"),
        "kvlane-cuda": System("kvlane", "cuda"),
        "gpu-copies": System("gpu-copies", "memory"),
        "peer-copy": System("peer-copy", "memory"),
        "process_vm": System("process_vm", "cma"),
        "memcpy": System("memcpy", "memory"),
    },
    sides=SIDES,
    program=("-m", "kvlane.bench.fabric_sides"),
    goals=_bare_goals(),
    not_of_gpus={
        "process_vm": "it does not reach a GPU's memory",
        "memcpy": "it does not reach a GPU's memory",
        "kvlane-cma": "process_vm does not reach a GPU's memory",
    },
)
READ_GOAL = 0.9  # of our write of the same size
CHECKSUMS_GOAL = 0.9  # of our rate without
LATENCY_BYTES, LATENCY_GOAL = 64, 1.0
# Names of our systems in figures.
WIRES = {"kvlane": "TCP", "kvlane-cma": "cma", "kvlane-cuda": "cuda"}
IDLE_SECONDS, IDLE_GOAL = 2.0, 0.01
# Latencies are in the table up to this size.
_SMALL = pictures.SMALL
# Bytes that a cell moves, in at most and at least so many operations.
_CELL_BYTES, _MOST, _LEAST = 256 * MIB, 1000, 3
# Bytes before and behind an operation that the check reads for stray bytes.
_MARGIN = 4 * KIB


def add_arguments(parser: argparse.ArgumentParser, field: Field = BARE) -> None:
    """The flags of `kvlane bench fabric`."""
    sides = parser.add_mutually_exclusive_group()
    sides.add_argument(
        "address", metavar="ADDRESS", nargs="?", help="what a --server has printed; measure against it"
    )
    sides.add_argument(
        "--loopback", action="store_true", help="both sides on this machine, started here (the default)"
    )
    sides.add_argument(
        "--server", action="store_true", help="print an address and be the far side until interrupted"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:0", help="of --server (default %(default)s)"
    )
    parser.add_argument(
        "--token", default="", help="both sides give it; needed where other hosts reach --listen"
    )
    parser.add_argument(
        "--tls",
        nargs="*",
        metavar="FILE",
        help="measure encrypted connections too: CERTIFICATE KEY AUTHORITY as PEM files; none with --loopback, "
        "where throw-away ones are made by the openssl command. With an address or --server instead of plain ones",
    )
    parser.add_argument(
        "--no-checksums",
        action="store_true",
        help="measure TCP without kvlane's checksums too",
    )
    parser.add_argument(
        "--paths",
        "--connections",
        dest="connections",
        type=_positive,
        default=1,
        metavar="N",
        help="connections of kvlane to each address of the far side (default %(default)s)",
    )
    parser.add_argument(
        "--socket-threads",
        type=_positive,
        default=1,
        metavar="N",
        help="threads of each of kvlane's engines that read and write sockets (default %(default)s); more need as many "
        "--connections",
    )
    parser.add_argument(
        "--nics",
        type=lambda text: text.split(","),
        metavar="ADDR,ADDR",
        help="local addresses at which kvlane's far side listens, each a path of its own, with the port of --listen; "
        "with --loopback or --server",
    )
    parser.add_argument(
        "--transports",
        type=_some_of(TRANSPORTS),
        help="of kvlane: tcp,cma (process_vm, on one host),cuda (between GPUs of one host); default: all that reach "
        "the memory with --loopback, tcp with ADDRESS",
    )
    parser.add_argument(
        "--memory",
        type=parse_memory,
        default="host",
        metavar="host|cuda:N|cuda:N,cuda:M",
        help="of both sides, or of the near one and the far one; with ADDRESS of the near one, and --server says its "
        "own (default %(default)s)",
    )
    parser.add_argument("--ops", type=_some_of(OPS), default=list(OPS), help="default: write,read")
    parser.add_argument(
        "--patterns", type=_some_of(PATTERNS), default=list(PATTERNS), help="default: contiguous,paged"
    )
    parser.add_argument(
        "--sizes",
        type=lambda text: [parse_size(each) for each in text.split(",")],
        default=list(SIZES),
        help="of contiguous operations (default: 64,4k,64k,1m,16m)",
    )
    parser.add_argument(
        "--pages", type=_positive, default=4096, help="of one paged operation (default %(default)s)"
    )
    parser.add_argument("--page-bytes", type=parse_size, default=64 * KIB, help="of each page (default: 64k)")
    parser.add_argument(
        "--vs",
        type=lambda text: [] if text == "none" else _some_of((*field.others, *GPU_OTHERS[1:]))(text),
        help=f"what else to measure, in turns: {','.join(field.others)} or none; with --loopback only (default: what "
        f"is there); with --memory cuda:N {','.join(GPU_OTHERS)}",
    )
    parser.add_argument("--rounds", type=_positive, default=3, help="of all systems (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="the results to stdout as JSON, and no files")
    add_out(parser)


def run(arguments: argparse.Namespace, field: Field = BARE) -> int:
    """Measure and publish, or be the far side."""
    if arguments.server:
        return _serve(arguments)
    with report.CpuWatch() as watch:
        outcome = measure(arguments, field)
    if arguments.json:
        print(json.dumps({"results": outcome.details["results"]}))
        return 0
    print(table(outcome.details["results"]))
    print()
    # Not for a file: who may connect.
    shown = {key: value for key, value in vars(arguments).items() if key not in ("token", "address")}
    status = publish(argparse.Namespace(**shown), outcome, watch)
    result = json.loads((arguments.out / f"{outcome.name}.json").read_text())
    for suffix, picture in pictures.fabric(result).items():
        save(picture, arguments.out / f"{outcome.name}{suffix}.png")
    return status


def measure(arguments: argparse.Namespace, field: Field = BARE) -> Outcome:
    """Medians over rounds in which all systems take turns; the bytes of each cell are checked before."""
    names = _systems(arguments, field)
    cells = _cells(arguments, [field.sides[field.systems[name].side] for name in names])
    with ExitStack() as stack:
        tls = stack.enter_context(_tls(arguments))
        systems = [
            stack.enter_context(closing(system))
            for name in names
            if (system := _system(name, arguments, tls, field)) is not None
        ]
        with tqdm(total=(1 + arguments.rounds) * len(systems), unit="turn", leave=False) as progress:
            for system in systems:
                progress.set_description(f"{system.name}: check")
                with system.turn():
                    for op, cell in cells:
                        system.attempt(system.check, op, cell)
                progress.update()
            rounds: dict[tuple[str, str, Cell], list[dict[str, float]]] = {}
            for number in range(arguments.rounds):
                # No system always follows the same one.
                first = number % len(systems)
                for system in systems[first:] + systems[:first]:
                    progress.set_description(system.name)
                    with system.turn():
                        for op, cell in cells:
                            if values := system.attempt(system.measure, op, cell):
                                rounds.setdefault((system.name, op, cell), []).append(values)
                    progress.update()
            progress.set_description("idle")
            idle = systems[0].idle_cores()
    failures = {
        (system.name, op, cell): text for system in systems for (op, cell), text in system.failures.items()
    }
    medians = {
        key: {what: statistics.median(each[what] for each in values) for what in values[0]}
        for key, values in rounds.items()
        if key not in failures
    }
    results = [
        _row(
            name,
            field.systems[name].transport,
            op,
            cell,
            medians.get((name, op, cell), {}),
            failures.get((name, op, cell)),
            arguments.memory,
        )
        for name in names
        for op, cell in cells
        if cell.pattern in field.sides[field.systems[name].side].patterns
    ]
    whose = "one side" if arguments.address else "both sides"
    figures = [
        *(_ratios(medians, field) if arguments.memory == "host" else _gpu_ratios(medians, field)),
        Figure(f"idle, {whose}, a connection open", idle, "cores", at_most=IDLE_GOAL),
    ]
    note = (
        f"Single operations one after the other, medians over {arguments.rounds} rounds in which the systems take "
        "turns and the others are stopped; bytes checked once each, not timed. Paged: "
        f"{arguments.pages} shuffled pages of {arguments.page_bytes} bytes in one call, which loop and memcpy move in "
        f"one piece. {field.note}"
    ).rstrip()
    if arguments.memory != "host":
        note = (
            f"Memory of {' and '.join(dict.fromkeys(both_memories(arguments.memory)))}. Single operations one after "
            f"the other, medians over {arguments.rounds} rounds in which the systems take turns and the others are "
            "stopped; bytes checked once each, not timed. Paged: "
            f"{arguments.pages} shuffled pages of {arguments.page_bytes} bytes in one "
            "call, which loop and gpu-copies move in one piece. loop is a plain socket with the host's memory, "
            "gpu-copies the same bytes copied out of a GPU's memory and in again through pinned memory, in one "
            "process. peer-copy is the same bytes copied by one process over the link between the GPUs, or within "
            f"one: by a copy engine, pages by a kernel of 16 blocks. {field.gpu_note}"
        ).rstrip()
    details = {
        "results": results,
        "rounds": [
            {"system": name, "op": op, "pattern": cell.pattern, "bytes": cell.bytes, "rounds": values}
            for (name, op, cell), values in rounds.items()
        ],
    }
    return Outcome(NAME, figures, details, note)


def _row(
    name: str,
    transport: str,
    op: str,
    cell: Cell,
    values: dict[str, float],
    failure: str | None,
    memory: str = "host",
) -> dict[str, Any]:
    """A result; None for cells that the system does not have. `error` if the cell failed."""
    return {
        "op": op,
        "transport": transport,
        "pattern": cell.pattern,
        "bytes": cell.bytes,
        **{what: values.get(what) for what in ("gb_per_s", "p50_us", "p99_us")},
        "system": name,
        "memory": "host" if name == "loop" else memory,
        **({"error": failure} if failure else {}),
    }


class _System:
    """The processes of one system, connected: `near` moves bytes. `far` is None if it is on another host, or in the
    same process. The processes are stopped outside their turns."""

    def __init__(
        self, name: str, arguments: argparse.Namespace, tls: list[str] | None = None, field: Field = BARE
    ) -> None:
        self.name, self._field = name, field
        self.failures: dict[tuple[str, Cell], str] = {}
        self._arguments, self._region = arguments, _region(arguments)
        self._system = field.systems[name]
        self._runner = self._system.side
        self._side_type = field.sides[self._runner]
        self._tls = tls if self._system.transport == "tls" else None
        self._children: list[Child] = []
        try:
            with self.turn():
                self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        self._far: Child | None = None
        if not self._arguments.address and not self._side_type.is_both:
            self._far = self._start(near=False)
        self._near = self._start(near=True)
        if address := self._arguments.address or (self._far and self._far.ask("listen")):
            self._near.ask("connect", address=address)
        # The connection is used once now, because one that is only begun would not survive being stopped.
        self._near.ask("once", op=self._arguments.ops[0], cell=Cell("contiguous", 1))

    def _start(self, near: bool) -> Child:
        child = Child([*self._field.program, self._runner], self._system.environment, self._field.tuning)
        self._children.append(child)
        options: dict[str, Any] = {
            "token": self._arguments.token,
            "connections": self._arguments.connections,
            "socket_threads": self._arguments.socket_threads,
            "tls": self._tls,
            "transport": self._system.transport if self._system.transport in ("cma", "cuda") else "tcp",
            "checksums": self._system.transport != "tcp-no-checksums",
        }
        of_near, of_far = both_memories(self._arguments.memory)
        options["memory"] = of_near if near else of_far
        if self._side_type.is_both:
            options["far_memory"] = of_far
        if not near:
            options["listen"] = _listen(self._arguments)
        child.ask("open", size=self._region, near=near, **options)
        return child

    def close(self) -> None:
        """Ends the processes."""
        for child in self._children:
            child.end()
        self._children.clear()

    def attempt(self, do: Callable[[str, Cell], T], op: str, cell: Cell) -> T | None:
        """Calls `do`, if the system has such cells. A peer's failure is a result: it goes into `failures`, the cell is
        not tried again, and new processes begin, because the failure may have spoilt the former ones."""
        if cell.pattern not in self._side_type.patterns or (op, cell) in self.failures:
            return None
        try:
            return do(op, cell)
        except Failed as failure:
            if self._runner == "kvlane":
                raise
            self.failures[op, cell] = str(failure)
            self.close()
            self._begin()
            return None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The system's processes run in this context, and are stopped after it."""
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def measure(self, op: str, cell: Cell) -> dict[str, float]:
        """gb_per_s, p50_us and p99_us of one turn."""
        count = max(_LEAST, min(_MOST, _CELL_BYTES // cell.bytes))
        return self._near.ask("measure", op=op, cell=cell, warm_up=max(1, count // 10), count=count)

    def idle_cores(self) -> float:
        """CPU seconds in a second of all its processes together, with a connection open."""
        with self.turn():
            self._near.ask("once", op="write", cell=Cell("contiguous", 1))
            time.sleep(0.2)
            pids = [child.pid for child in self._children]
            start, before = time.monotonic(), sum(map(cpu_seconds, pids))
            time.sleep(IDLE_SECONDS)
            return (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - start)

    def check(self, op: str, cell: Cell) -> None:
        """Does one operation into poisoned memory, and compares all bytes of both sides. `Failed` if one is wrong."""
        if cell.pattern == "stream":
            return  # into memory that only the system sees
        runs = cell.first_runs(self._region, whole=not self._side_type.moves_pages)
        if op == "read":
            runs = [(far, near, length) for near, far, length in runs]
        targets = [target for _, target, _ in runs]
        start = max(0, min(targets) - _MARGIN)
        end = min(self._region, max(targets) + runs[0][2] + _MARGIN)
        salt = sum(map(ord, self.name + op)) + cell.bytes
        window: dict[str, Any] = {"start": start, "end": end}
        into_far = op == "write"
        if into_far:
            self._prepare(True, "poison", window)
            self._prepare(False, "fill", {**window, "salt": salt})
        else:
            self._prepare(True, "fill", {**window, "salt": salt})
            self._prepare(False, "poison", window)
        self._near.ask("once", op=op, cell=cell)
        wrong = self._wrong(into_far, {**window, "salt": salt, "runs": runs})
        if wrong is not None:
            where = "far" if into_far else "near"
            raise Failed(
                f"{self.name}, {op} {cell.pattern}, {cell.bytes} bytes: wrong byte at {wrong} of the {where} side"
            )

    def _prepare(self, far: bool, do: str, facts: dict[str, Any]) -> None:
        if far and self._far is None and not self._side_type.is_both:
            # No process of this system runs on the far side, so the near side does it.
            self._near.ask(do, **facts)
            self._move("write", facts)
            return
        self._side(far).ask(do, **facts, far=far and self._far is None)

    def _wrong(self, far: bool, facts: dict[str, Any]) -> int | None:
        if far and self._far is None and not self._side_type.is_both:
            self._near.ask("poison", start=facts["start"], end=facts["end"])
            self._move("read", facts)
            return self._near.ask("wrong", **facts)
        return self._side(far).ask("wrong", **facts, far=far and self._far is None)

    def _side(self, far: bool) -> Child:
        return self._far if far and self._far is not None else self._near

    def _move(self, op: str, facts: dict[str, Any]) -> None:
        self._near.ask("move", op=op, start=facts["start"], end=facts["end"])

    def _signal(self, number: int) -> None:
        for child in self._children:
            child.signal(number)


@contextmanager
def _tls(arguments: argparse.Namespace) -> Iterator[list[str] | None]:
    """The files of --tls; made here if none are given. SystemExit with a sentence if that fails."""
    if arguments.tls is None or len(arguments.tls) == 3:
        yield arguments.tls
        return
    if arguments.tls or arguments.address or arguments.server:
        sys.exit("--tls needs three files: CERTIFICATE KEY AUTHORITY; none with --loopback only")
    with tempfile.TemporaryDirectory() as folder:
        try:
            files = certificates.make(Path(folder))
        except OSError as error:
            sys.exit(f"--tls: {error}; or give CERTIFICATE KEY AUTHORITY")
        yield [str(file) for file in files]


def _serve(arguments: argparse.Namespace) -> int:
    side = Kvlane()
    listen = _listen(arguments)
    with _tls(arguments) as tls:
        try:
            side.open(
                _region(arguments),
                both_memories(arguments.memory)[1],
                token=arguments.token,
                listen=listen,
                tls=tls,
            )
        except (OSError, ValueError) as error:
            what = f"--listen {','.join(listen)}" + _but_host(arguments, ", --memory {}")
            sys.exit(f"{what}: {error}")
    print(side.listen(), flush=True)
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return 0


def _but_host(arguments: argparse.Namespace, text: str) -> str:
    return "" if arguments.memory == "host" else text.format(arguments.memory)


def _listen(arguments: argparse.Namespace) -> list[str]:
    """The address at which kvlane's far side listens."""
    if not arguments.nics:
        return [arguments.listen]
    port = arguments.listen.rpartition(":")[2]
    return [f"[{nic}]:{port}" if ":" in nic else f"{nic}:{port}" for nic in arguments.nics]


def _system(name: str, arguments: argparse.Namespace, tls: list[str] | None, field: Field) -> _System | None:
    """The system; None if two processes may not read each other's memory, unless the user named the system."""
    try:
        return _System(name, arguments, tls, field)
    except Failed as failure:
        asked = arguments.transports if name == "kvlane-cma" else arguments.vs
        if field.systems[name].transport != "cma" or asked is not None:
            raise
        report.say(f"{name} is not measured: {failure}")
        return None


def _systems(arguments: argparse.Namespace, field: Field) -> list[str]:
    """The systems that run: kvlane first, then those that were asked for or are installed."""
    if arguments.address:
        try:
            unpack_address(arguments.address)
        except ValueError as error:
            sys.exit(str(error))
        if arguments.vs:
            sys.exit("--vs goes with --loopback only: the others need their far side here")
        if arguments.nics:
            sys.exit("--nics goes with --loopback or --server: the far side listens")
        if arguments.memory != "host" and "cma" in (arguments.transports or ()):
            sys.exit(f"--transports cma: {field.not_of_gpus['kvlane-cma']}")
        if arguments.tls is not None:
            return ["kvlane-tls"]
        own = ["kvlane" if each == "tcp" else f"kvlane-{each}" for each in arguments.transports or ["tcp"]]
        return own + ["kvlane-no-checksums"] * arguments.no_checksums
    if arguments.memory != "host":
        return _gpu_systems(arguments, field)
    others = field.others if arguments.vs is None else arguments.vs
    for name in set(GPU_OTHERS[1:]) & set(others):
        sys.exit(f"--vs {name} goes with --memory cuda:N")
    if "cuda" in (arguments.transports or ()):
        sys.exit("--transports cuda goes with --memory cuda:N")
    others = _installed(others, arguments, field)
    return [
        name
        for name, system in field.systems.items()
        if (system.side in others and system.transport != "cuda")
        or (system.side == "kvlane" and system.transport in (arguments.transports or ("tcp", "cma")))
        or (system.transport == "tls" and arguments.tls is not None)
        or (system.transport == "tcp-no-checksums" and arguments.no_checksums)
    ]


def _installed(others: Sequence[str], arguments: argparse.Namespace, field: Field) -> list[str]:
    """Those of the sides that can be measured here. SystemExit if one was asked for and is missing."""
    absent = {each: why for each in others if (why := field.missing(each))}
    for name, why in absent.items():
        line = f"{name} is not measured, {why}: {field.install[name]}"
        if arguments.vs:
            sys.exit(line)
        report.say(line)
    return [each for each in others if each not in absent]


def _gpu_systems(arguments: argparse.Namespace, field: Field) -> list[str]:
    """The systems that move the memory of GPUs, and those that they are compared with."""
    wanted = [*field.others, *GPU_OTHERS[1:]] if arguments.vs is None else arguments.vs
    transports = arguments.transports or TRANSPORTS
    without = [
        each for each in (*wanted, *["kvlane-cma"] * ("cma" in transports)) if each in field.not_of_gpus
    ]
    asked = [*(arguments.vs or ()), *(["kvlane-cma"] if "cma" in (arguments.transports or ()) else [])]
    for name in without:
        line = f"{name} is not measured with --memory {arguments.memory}: {field.not_of_gpus[name]}"
        if name in asked:
            sys.exit(line)
        report.say(line)
    systems = [name for name, each in (("kvlane", "tcp"), ("kvlane-cuda", "cuda")) if each in transports]
    systems += ["kvlane-no-checksums"] * arguments.no_checksums
    systems += ["kvlane-tls"] * (arguments.tls is not None)
    others = _installed([each for each in wanted if each not in without], arguments, field)
    peers = [
        name for name, system in field.systems.items() if system.side in others and system.transport == "cuda"
    ]
    return systems + [each for each in GPU_OTHERS if each in others] + peers


def _cells(arguments: argparse.Namespace, sides: Sequence[type[Side]]) -> list[tuple[str, Cell]]:
    cells = []
    if "contiguous" in arguments.patterns:
        cells += [Cell("contiguous", size) for size in arguments.sizes]
    if "paged" in arguments.patterns:
        cells.append(Cell("paged", arguments.pages * arguments.page_bytes, arguments.pages))
    if any("stream" in side.patterns for side in sides):
        cells.append(Cell("stream", MIB))
    return [(op, cell) for op in arguments.ops for cell in cells]


def _region(arguments: argparse.Namespace) -> int:
    """Bytes of memory on either side, in whole pages."""
    needed = max([*arguments.sizes, arguments.pages * arguments.page_bytes])
    return -(-needed // (4 * KIB)) * 4 * KIB


def _ratios(medians: dict[tuple[str, str, Cell], dict[str, float]], field: Field = BARE) -> list[Figure]:
    """The ratios of our figures to others' of the same run, if both were measured."""
    by_size = _by_size(medians)
    figures = _goal_ratios(by_size, field)
    for size in (MIB, 16 * MIB, None):
        write, read = by_size.get(("kvlane", "write", size)), by_size.get(("kvlane", "read", size))
        if write and read:
            ratio = read["gb_per_s"] / write["gb_per_s"]
            figures.append(Figure(f"TCP read {_label(size)} / own write", ratio, at_least=READ_GOAL))
    for op, size in itertools.product(OPS, (MIB, 16 * MIB, None)):
        encrypted, plain = by_size.get(("kvlane-tls", op, size)), by_size.get(("kvlane", op, size))
        if encrypted and plain:
            ratio = encrypted["gb_per_s"] / plain["gb_per_s"]
            figures.append(Figure(f"TLS {op} {_label(size)} / own TCP", ratio))
    for op, size in itertools.product(OPS, (MIB, 16 * MIB)):
        plain, summed = by_size.get(("kvlane-no-checksums", op, size)), by_size.get(("kvlane", op, size))
        if plain and summed:
            ratio = summed["gb_per_s"] / plain["gb_per_s"]
            what = f"TCP {op} {_label(size)} / own without checksums"
            figures.append(Figure(what, ratio, at_least=CHECKSUMS_GOAL))
    for op, pair in itertools.product(OPS, field.latency_others):
        mine, theirs = (by_size.get((name, op, LATENCY_BYTES)) for name in pair)
        other = pair[1]
        if mine and theirs:
            what = f"{WIRES[pair[0]]} {op} {_label(LATENCY_BYTES)}, p50 / {other}"
            figures.append(Figure(what, mine["p50_us"] / theirs["p50_us"], at_most=LATENCY_GOAL))
    return figures


def _by_size(
    medians: dict[tuple[str, str, Cell], dict[str, float]],
) -> dict[tuple[str, str, int | None], dict[str, float]]:
    """The medians by system, operation and bytes; None for the paged pattern."""
    return {
        (name, op, cell.bytes if cell.pattern == "contiguous" else None): values
        for (name, op, cell), values in medians.items()
    }


def _goal_ratios(by_size: dict[tuple[str, str, int | None], dict[str, float]], field: Field) -> list[Figure]:
    """The ratios of `field.goals`."""
    figures = []
    for own, op, size, other, goal in field.goals:
        is_stream = field.sides[field.systems[other].side].patterns == ("stream",)
        mine = by_size.get((own, op, size))
        theirs = by_size.get((other, op, None if is_stream else size))
        if mine and theirs:
            ratio = mine["gb_per_s"] / theirs["gb_per_s"]
            figures.append(Figure(f"{WIRES[own]} {op} {_label(size)} / {other}", ratio, at_least=goal))
    return figures


def _gpu_ratios(medians: dict[tuple[str, str, Cell], dict[str, float]], field: Field = BARE) -> list[Figure]:
    """The ratio of our rate to the slower of its two parts, a socket and copies; by cuda to a bare copy, to peers."""
    figures = _goal_ratios(_by_size(medians), field)
    for (name, op, cell), values in medians.items():
        bare = medians.get(("peer-copy", op, cell))
        if name == "kvlane-cuda" and cell.bytes >= MIB and bare:
            size = cell.bytes if cell.pattern == "contiguous" else None
            what = f"cuda {op} {_label(size)} / peer-copy"
            ratio = values["gb_per_s"] / bare["gb_per_s"]
            figures.append(Figure(what, ratio, at_least=CUDA_GOALS.get(size) if op == "read" else None))
        parts = [medians.get((each, op, cell)) for each in _SOCKET_PARTS]
        if name == "kvlane" and cell.bytes >= MIB and all(parts):
            slower = min(part["gb_per_s"] for part in parts if part)
            size = _label(cell.bytes if cell.pattern == "contiguous" else None)
            what = f"TCP {op} {size}, GPU memory / slower of {' and '.join(_SOCKET_PARTS)}"
            figures.append(Figure(what, values["gb_per_s"] / slower))
    return figures


def table(results: Sequence[dict[str, Any]]) -> str:
    """GB/s of each system, with a row for each operation. Below are latencies of small operations, and failures."""
    parts = [
        _one_table("GB/s", "gb_per_s", results),
        _one_table("p50, us", "p50_us", [each for each in results if _is_small(each)]),
        "\n".join(
            report.paragraph(
                f"failed: {each['system']}, {each['op']} {each['pattern']} {_label(each['bytes'])}: {each['error']}"
            )
            for each in results
            if "error" in each
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def _is_small(result: dict[str, Any]) -> bool:
    return result["bytes"] <= _SMALL


def _one_table(title: str, what: str, results: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(each["system"] for each in results))
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for each in results:
        value = "failed" if "error" in each else each[what]
        if value is not None:
            rows.setdefault((each["op"], each["pattern"], each["bytes"]), {})[each["system"]] = value
    if not rows:
        return ""
    return report.table(
        [title, *names],
        [
            [f"{op} {pattern} {_label(size)}", *(row.get(name, "-") for name in names)]
            for (op, pattern, size), row in rows.items()
        ],
    )


def _label(size: int | None) -> str:
    if size is None:
        return "paged"
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _some_of(names: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [each for each in chosen if each not in names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return [name for name in names if name in chosen]

    return parse
