"""`kvlane bench handoff-scale`: what each of hundreds of engines holds that hand over directly, without a model."""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import os
import re
import secrets
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvlane.bench import report
from kvlane.bench.extra import tqdm
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.memory import allocate
from kvlane.bench.sizes import count

NAME = "handoff-scale"
HELP = "connections, descriptors and memory of hundreds of engines that hand over directly; needs no vLLM"
CONNECTIONS_GOAL, MEMORY_GOAL_MB, IDLE_GOAL_S = 300, 64, 70
BLOCKS, BLOCK_BYTES = 4, 4096
PATIENCE_MS = 60_000.0
PATIENCE_S = 120.0
# Hand-offs at a time: on one host all engines share its processors.
TOGETHER = 8
# Rounds of hand-offs between two looks at all engines.
LOOK_EVERY = 8
PINGED_S = 12.0
_SHAPE, _CONTENT, _HASH = bytes(16), bytes(16), bytes(16)
_ESTABLISHED = "01"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench handoff-scale`."""
    parser.add_argument("--prefill", type=count, default=96, help="engines (default %(default)s)")
    parser.add_argument("--decode", type=count, default=144, help="engines (default %(default)s)")
    parser.add_argument(
        "--transport",
        choices=("auto", "tcp"),
        default="tcp",
        help="tcp: as engines on hosts of their own (default %(default)s)",
    )
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


class Engine:
    """A rank and a scheduler with a small memory, in a process of its own."""

    def __init__(self, transport: str) -> None:
        from kvlane import _core

        self._memory = allocate(BLOCKS * BLOCK_BYTES, "host")
        key = secrets.token_bytes(16)
        regions = [(self._memory.address, BLOCK_BYTES, BLOCKS, BLOCK_BYTES, [0])]
        areas = [(self._memory.address, self._memory.size)]
        self._rank = _core.HandoffRank("127.0.0.1:0", "", regions, areas, key, transport, None)
        ranks = [(self._rank.endpoint, key)]
        self._scheduler = _core.HandoffScheduler("127.0.0.1:0", "", ranks, _SHAPE, [])
        self._pings: Any = None

    def address(self) -> str:
        """The address at which it hands over."""
        return self._scheduler.address

    def lend(self, names: Sequence[bytes]) -> None:
        """Offers a prompt of all blocks under each of these names."""
        self._scheduler.take_free_lendings()
        for name in names:
            assert self._scheduler.begin_lending(name, _CONTENT), "too many hand-offs"
            self._rank.step_begins([(name, 0, list(range(BLOCKS)), _HASH)])
            self._rank.step_ends()

    def land(self, wanted: Sequence[tuple[bytes, str]]) -> float:
        """Takes each prompt from the engine at its address. Milliseconds until all have landed."""
        began = time.perf_counter()
        for name, address in wanted:
            asked = self._scheduler.begin_landing(
                name, address, _CONTENT, 0, BLOCKS, PATIENCE_MS, PATIENCE_MS
            )
            assert asked, "too many hand-offs"
            self._scheduler.give_room(name, list(range(BLOCKS)))
        for name, address in wanted:
            assert self._scheduler.wait_over(name, PATIENCE_MS), f"nothing came from {address}"
            standing = self._scheduler.standing(name)
            assert standing is not None and standing[0] == "landed", standing
            self._scheduler.forget_landing(name)
        return 1e3 * (time.perf_counter() - began)

    def facts(self) -> dict[str, Any]:
        """What the process holds: inodes of its sockets, descriptors, bytes of its own memory, CPU seconds."""
        sockets, descriptors = [], 0
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{entry}"))
                descriptors += 1
                sockets += [int(found[1])] if found else []
        memory = re.search(
            r"^Private_Dirty: +(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE
        )
        assert memory is not None
        return {
            "sockets": sockets,
            "descriptors": descriptors,
            "bytes": int(memory[1]) * 1024,
            "cpu_s": time.process_time(),
        }

    def ping(self, port: int) -> None:
        """Begins to ping a proxy."""
        from kvlane.connector.p2p_pings import Pings

        self._pings = Pings(("127.0.0.1", port), "P", "127.0.0.1:8000", self.address())

    def stop_pings(self) -> None:
        """Ends the pings."""
        self._pings.close()


class Child:
    """An engine's process, forked from this one."""

    def __init__(self, transport: str) -> None:
        self._pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(other, transport))
        self._process.start()
        other.close()

    def tell(self, what: str, *arguments: Any) -> None:
        """Has the engine do something."""
        self._pipe.send((what, arguments))

    def answer(self) -> Any:
        """What came of it."""
        if not self._pipe.poll(PATIENCE_S):
            raise SystemExit(f"an engine says nothing for {PATIENCE_S:.0f} s")
        failed, answer = self._pipe.recv()
        if failed:
            raise SystemExit(f"an engine failed: {answer}")
        return answer

    def end(self) -> None:
        """Ends the process."""
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, transport: str) -> None:
    gc.collect()
    engine = Engine(transport)
    while (said := pipe.recv()) is not None:
        what, arguments = said
        try:
            pipe.send((False, getattr(engine, what)(*arguments)))
        except Exception as error:  # noqa: BLE001 - the parent reports it
            pipe.send((True, f"{type(error).__name__}: {error}"))
    os._exit(0)


def _all(children: Iterable[Child], what: str, *arguments: Any) -> list[Any]:
    children = list(children)
    for child in children:
        child.tell(what, *arguments)
    return [child.answer() for child in children]


@dataclass(frozen=True)
class Held:
    """What one engine holds at a moment."""

    connections: int
    descriptors: int
    bytes: int


def _look(children: Sequence[Child]) -> list[Held]:
    connected = set[int]()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    connected.add(int(fields[9]))
    return [
        Held(len(connected.intersection(each["sockets"])), each["descriptors"], each["bytes"])
        for each in _all(children, "facts")
    ]


@contextmanager
def _engines(arguments: argparse.Namespace) -> Iterator[tuple[list[Child], list[Child]]]:
    children: list[Child] = []
    try:
        total = arguments.prefill + arguments.decode
        children += (Child(arguments.transport) for _ in tqdm(range(total), unit="engine"))
        yield children[: arguments.prefill], children[arguments.prefill :]
    finally:
        for child in children:
            child.end()


def measure(arguments: argparse.Namespace) -> Outcome:
    """Has every pair hand over once, then lets all be idle."""
    with _engines(arguments) as (prefill, decode):
        addresses = _all(prefill, "address")
        everyone = [*prefill, *decode]
        before = _settled(everyone)
        most, landed_ms = list(before), list[float]()
        for number in tqdm(range(len(prefill)), unit="round"):
            landed_ms += _round(number, prefill, decode, addresses)
            if number % LOOK_EVERY == LOOK_EVERY - 1 or number == len(prefill) - 1:
                most = [
                    Held(*(max(pair) for pair in zip(_values(one), _values(now), strict=True)))
                    for one, now in zip(most, _look(everyone), strict=True)
                ]
        idle_s = _until_idle(everyone, before)
        after = _look(everyone)
        pings = _pings(everyone)
    grown = [
        Held(now.connections - one.connections, now.descriptors - one.descriptors, now.bytes - one.bytes)
        for one, now in zip(before, most, strict=True)
    ]
    sides = {"prefill": grown[: len(prefill)], "decode": grown[len(prefill) :]}
    connections = max(each.connections for each in grown)
    megabytes = max(each.bytes for each in grown) / 1e6
    left = max(now.connections - one.connections for one, now in zip(before, after, strict=True))
    figures = [
        Figure(
            "connections to other engines, most of an engine",
            connections,
            "sockets",
            at_most=CONNECTIONS_GOAL,
        ),
        Figure("memory for them, most of an engine", megabytes, "MB", at_most=MEMORY_GOAL_MB),
        Figure("from the last hand-off until all are closed", idle_s, "s", at_most=IDLE_GOAL_S),
        Figure("connections that are left then, most of an engine", left, "sockets", at_most=0),
        *(
            Figure(f"{what} of {side} engines, median", statistics.median(values), unit)
            for side, held in sides.items()
            for what, unit, values in (
                ("connections", "sockets", [each.connections for each in held]),
                ("descriptors", "more", [each.descriptors for each in held]),
                ("memory", "MB", [each.bytes / 1e6 for each in held]),
            )
        ),
        Figure(f"a hand-off of 16 KiB, {TOGETHER} at a time", statistics.median(landed_ms), "ms"),
        *pings,
    ]
    pairs = len(prefill) * len(decode)
    note = (
        f"{len(prefill)} prefill and {len(decode)} decode engines without a model, each a process of one rank. Each of "
        f"the {pairs} pairs hands over once, {TOGETHER} at a time. Bytes go by {arguments.transport}. A prefill "
        f"engine that was new to a decode engine is connected for its first hand-off, which is every one here. Memory "
        "is what a process has written of its own."
    )
    return Outcome(NAME.replace("-", "_"), figures, {"pairs": pairs, "landed_ms": landed_ms}, note)


def _settled(everyone: Sequence[Child]) -> list[Held]:
    """What all hold once their own ranks and schedulers are connected."""
    before, now = None, _look(everyone)
    while before != [each.connections for each in now]:
        before = [each.connections for each in now]
        time.sleep(1)  # nobody tells when a connection within another process is made
        now = _look(everyone)
    return now


def _values(held: Held) -> tuple[int, int, int]:
    return held.connections, held.descriptors, held.bytes


def _round(
    number: int, prefill: Sequence[Child], decode: Sequence[Child], addresses: Sequence[str]
) -> list[float]:
    """Each decode engine takes a prompt from another prefill engine than in all rounds before."""
    landed_ms: list[float] = []
    for first in range(0, len(decode), TOGETHER):
        some = range(first, min(first + TOGETHER, len(decode)))
        lent: dict[int, list[bytes]] = {}
        for at in some:
            source = (at + number) % len(prefill)
            name = hashlib.blake2b(f"{source} {at}".encode(), digest_size=16).digest()
            lent.setdefault(source, []).append(name)
            decode[at].tell("land", [(name, addresses[source])])
        for source, names in lent.items():
            prefill[source].tell("lend", names)
        for source in lent:
            prefill[source].answer()
        landed_ms += [decode[at].answer() for at in some]
    return landed_ms


def _until_idle(everyone: Sequence[Child], before: Sequence[Held]) -> float:
    """Seconds until no engine has a connection to another one; at most two minutes."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < PATIENCE_S:
        held = _look(everyone)
        if all(now.connections <= one.connections for one, now in zip(before, held, strict=True)):
            break
        time.sleep(1)  # nobody tells when a connection of another process ends
    return waited


def _pings(everyone: Sequence[Child]) -> list[Figure]:
    """Pings of all engines at one proxy; none if this Python lacks what sends them."""
    try:
        import msgspec  # noqa: F401  # pyright: ignore
        import zmq
    except ImportError:
        return []
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    _all(everyone, "ping", port)
    used = _cpu(everyone)
    engines, pings, until = set[bytes](), 0, time.monotonic() + PINGED_S
    while (left := until - time.monotonic()) > 0:
        if socket.poll(int(1e3 * left)):
            engines.add(socket.recv_multipart()[1])
            pings += 1
    used = _cpu(everyone) - used
    _all(everyone, "stop_pings")
    socket.close()
    return [
        Figure("engines whose pings a proxy has got", len(engines), "engines", at_least=len(everyone)),
        Figure("pings a second, of all engines", pings / PINGED_S, "/s"),
        Figure("CPU of an engine that is idle and pings", 100 * used / PINGED_S / len(everyone), "%"),
    ]


def _cpu(everyone: Sequence[Child]) -> float:
    return sum(each["cpu_s"] for each in _all(everyone, "facts"))
