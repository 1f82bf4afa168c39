"""`kvlane bench ssd`: the SSD tier on one file or several, and its checksums alone. With peers beside it:
bench/ssd/peers.py."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlane import _bench
from kvlane.bench import report
from kvlane.bench.extra import tqdm
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.sizes import parse_size

NAME = "ssd"
HELP = "the SSD tier: reads, writes, both, CPU, restart; beside bare checksums"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# Blocks in flight, by their size.
DEPTHS = {2 * MIB: 16, 256 * KIB: 32}
DEPTH = 32
READ_GOAL, WRITE_GOAL, BESIDE_GOAL, ONE_GOAL = 0.95, 0.9, 0.7, 1.3
# Of a peer on huge pages, where the pool is on pages of 4 KiB.
HUGE_GOAL = 0.9
# CPU time of reads, beside that of their checksums.
CRC_GOAL = 1.8
# Reads of one block after the other, whose latencies are compared.
ONE_READS = 1000
CPU_GOAL, RESTART_GOAL = 0.15, 0.2
_CRC_BYTES = 256 * MIB
_PATH_TIMEOUT_S = 5
# Files as large as this have the 64 MiB of full segments with which a tier measures.
_MEASURED_OVER = 256 * MIB
# The checksums alone, among what takes turns.
CRC = "crc"
ON_HUGE = " on huge pages"
Values = dict[str, float]


@dataclass(frozen=True)
class Phase:
    """Blocks that are read in random order, or written one behind the other, `depth` at once."""

    op: str
    paths: tuple[str, ...]
    file_bytes: int
    """The size of each file."""
    block_bytes: int
    count: int
    depth: int
    huge: bool
    """Whether a peer's memory is in huge pages, if the peer has that option."""
    first: int = 0
    """The block of each file where writes begin."""


@dataclass(frozen=True)
class Peer:
    """Another program that does a phase. It reads the tier's files, because a disk is not equally fast everywhere. It
    writes files of its own."""

    does: Callable[[Phase], Values]
    missing: Callable[[], str | None]
    """Why it cannot be measured here; None if it can."""
    install: str
    """How to install it."""
    p99_goal: float | None = None
    """The largest ratio of the tier's p99 reads to its own."""
    has_huge_pages: bool = False
    """Whether it can have huge pages where none are reserved, and then has a row of its own with them."""


NO_PEERS: Mapping[str, Peer] = {}


def add_arguments(parser: argparse.ArgumentParser, peers: Mapping[str, Peer] = NO_PEERS) -> None:
    """The flags of `kvlane bench ssd`."""
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        type=Path,
        help="a file to make, or a folder for one; several are striped as one tier. They are removed after",
    )
    parser.add_argument(
        "--capacity",
        type=parse_size,
        default=2 * GIB,
        help="of each file; peers get others (default: 2g)",
    )
    parser.add_argument(
        "--blocks",
        type=lambda text: [_block(each) for each in text.split(",")],
        default=list(DEPTHS),
        help="sizes of blocks (default: 2m,256k)",
    )
    parser.add_argument(
        "--phase-bytes",
        type=parse_size,
        default=GIB,
        help="that are read, or written, in a turn (default: 1g)",
    )
    parser.add_argument(
        "--vs",
        type=lambda text: [] if text == "none" else _names(text, (*peers, CRC)),
        help=f"what else to measure, in turns: {','.join((*peers, CRC))} or none (default: what is there)",
    )
    parser.add_argument("--rounds", type=_count, default=3, help="of all, in turns (default %(default)s)")
    parser.add_argument(
        "--restart-blocks", type=_count, default=100_000, help="to be found again (default %(default)s)"
    )
    parser.add_argument("--threads", action="store_true", help="the tier without io_uring")
    parser.add_argument(
        "--path",
        choices=("auto", "direct", "staged"),
        default="auto",
        help="the way of the tier's transfers, as --ssd-path of kvlane serve (default %(default)s)",
    )
    add_out(parser)


def run(arguments: argparse.Namespace, peers: Mapping[str, Peer] = NO_PEERS, note: str = "") -> int:
    """Measures and publishes. `note` is what readers should know of the peers."""
    with report.CpuWatch() as watch:
        outcome = measure(arguments, peers, note)
    # The files' paths are not published.
    shown = {key: value for key, value in vars(arguments).items() if key != "paths"}
    return publish(argparse.Namespace(**shown, files=len(arguments.paths)), outcome, watch)


def measure(arguments: argparse.Namespace, peers: Mapping[str, Peer] = NO_PEERS, note: str = "") -> Outcome:
    """Medians over rounds in which the tier and its peers take turns."""
    names = _present(arguments.vs, peers)
    present = {name: peer for name, peer in peers.items() if name in names}
    files = [path / "kvlane-bench.data" if path.is_dir() else path for path in arguments.paths]
    for file in files:
        if (beside := _peers_file(file)).exists():
            sys.exit(f"kvlane bench ssd: {beside} exists, and a benchmark makes its own files")
    sizes: list[dict[str, Any]] = []
    figures: list[Figure] = []
    turns = sum(1 for each in arguments.blocks for _ in range(arguments.rounds * 3 + 1)) + 1
    with ExitStack() as stack:
        stack.callback(_remove, [_peers_file(file) for file in files])
        progress = stack.enter_context(tqdm(total=turns, unit="turn", leave=False))
        for block in arguments.blocks:
            measured = _measure_size(arguments, files, block, present, CRC in names, progress)
            sizes.append(measured)
            figures += _figures(measured, present)
        progress.set_description("restart")
        tables, headers = _restart(files[0], arguments.restart_blocks)
        progress.update()
    # Opening a file has a fixed cost, so few blocks do not show the cost of many.
    goal = RESTART_GOAL * arguments.restart_blocks / 100_000 if arguments.restart_blocks >= 100_000 else None
    figures.append(
        Figure(f"restart from tables, {arguments.restart_blocks} blocks", tables, "s", at_most=goal)
    )
    if headers is not None:
        figures.append(Figure(f"restart from headers, {arguments.restart_blocks} blocks", headers, "s"))
    conditions = (
        f"{len(files)} file{'s' if len(files) > 1 else ''} of {arguments.capacity >> 20} MiB, direct I/O, the pool in "
        f"pages of {sizes[0]['pool_pages']}; "
        f"{arguments.phase_bytes >> 20} MiB a turn, medians over {arguments.rounds} rounds in which all take turns. "
        "Reads come in an order without pattern and every block's checksum is verified. "
        f"Writes go over a file that was full before. CPU is that of the whole process. {note}"
    ).rstrip()
    details = {
        "files": len(files),
        "sizes": sizes,
        "restart_s": {"blocks": arguments.restart_blocks, "tables": tables, "headers": headers},
    }
    return Outcome(NAME, figures, details, conditions)


def _measure_size(
    arguments: argparse.Namespace,
    files: list[Path],
    block: int,
    peers: Mapping[str, Peer],
    with_crc: bool,
    progress: tqdm[Any],
) -> dict[str, Any]:
    depth, count = DEPTHS.get(block, DEPTH), max(arguments.phase_bytes // block, 1)
    paths = tuple(str(_peers_file(file)) for file in files)
    rounds: dict[str, list[Values]] = {}
    failures: dict[str, str] = {}
    progress.set_description(f"{name_of(block)}: filling")
    try:
        # One block more than is in flight, for the one that is being written.
        tier = _bench.SsdBench(
            [str(file) for file in files],
            arguments.capacity,
            block,
            (depth + 1) * block,
            arguments.threads,
            arguments.path,
        )
    except OSError as error:
        sys.exit(f"kvlane bench ssd: {error}")
    with closing(tier):
        whole = len(files) * arguments.capacity // block
        # Newest blocks that stay while others are written, and when nothing is. All may be in one file: the faster one.
        of_a_file = whole // len(files)
        among, anywhere = min(count, of_a_file // 4), of_a_file // 2
        # Until the first segments are used again.
        rounds["kvlane first write"] = [_values(tier.write(whole))]
        await_path(tier, arguments.capacity)
        if peers:
            _fill(paths, arguments.capacity)
        file_bytes = min(file.stat().st_size for file in files) // block * block
        progress.update()

        first = 0
        pages = tier.pool_pages
        on_huge = pages.startswith("2 MB")

        def phase(op: str, huge: bool = on_huge) -> Phase:
            if op == "read":
                return Phase(op, tuple(map(str, files)), file_bytes, block, count, depth, huge)
            return Phase(op, paths, file_bytes, block, count, depth, huge, first)

        for op in ("write", "read"):
            does: dict[str, Callable[[], Values]] = {
                f"kvlane {op}": lambda op=op: _values(
                    tier.write(count) if op == "write" else tier.read(anywhere, count, depth)
                )
            }
            for name, peer in peers.items():
                does[f"{name} {op}"] = lambda op=op, peer=peer: peer.does(phase(op))
                if peer.has_huge_pages and not on_huge:
                    does[f"{name}{ON_HUGE} {op}"] = lambda op=op, peer=peer: peer.does(phase(op, True))
            if with_crc and op == "read":
                does["crc32c"] = lambda: {"cpu_s_per_gb": 1e9 / _bench.crc32c(block, _CRC_BYTES)}
            for number in range(arguments.rounds):
                names = list(does)
                # Writes continue where the last round ended, as a log's do.
                blocks, share = file_bytes // block, -(-count // len(files))
                first = number * share % blocks if blocks else 0
                first = first if first + share <= blocks else 0
                # No kind always follows the same one.
                turn = number % len(names)
                for name in names[turn:] + names[:turn]:
                    if name in failures:
                        continue
                    progress.set_description(f"{name_of(block)}: {name}")
                    try:
                        rounds.setdefault(name, []).append(does[name]())
                    except (OSError, TimeoutError) as error:
                        if name.startswith("kvlane"):
                            raise
                        failures[name] = str(error)
                        report.say(f"{name} of {name_of(block)} failed: {error}")
                progress.update()
        for _ in range(arguments.rounds):
            progress.set_description(f"{name_of(block)}: reads beside writes")
            alone = _values(tier.read(among, count, depth))
            read, written = tier.read_beside_writes(among, count, depth)
            beside = _values(read)
            share = {"share": beside["gb_per_s"] / alone["gb_per_s"]}
            rounds.setdefault("kvlane read alone", []).append(alone)
            rounds.setdefault("kvlane read beside writes", []).append(beside | share)
            rounds.setdefault("kvlane write beside reads", []).append(_values(written))
            progress.set_description(f"{name_of(block)}: one read beside writes")
            one = min(count, ONE_READS)
            rounds.setdefault("kvlane one read alone", []).append(_values(tier.read(among, one, 1)))
            beside = _values(tier.read_beside_writes(among, one, 1)[0])
            rounds.setdefault("kvlane one read beside writes", []).append(beside)
            progress.update()
        status, ways = tier.status(), tier.paths()
    medians = {
        name: {what: statistics.median(each[what] for each in values) for what in values[0]}
        for name, values in rounds.items()
        if name not in failures
    }
    return {
        "block_bytes": block,
        "depth": depth,
        "pool_pages": pages,
        "devices": [
            {
                "io": io,
                "direct": direct,
                "registered": registered,
                "notes": notes,
                "staged": staged,
                "reason": reason,
                "rates": rates,
            }
            for (io, direct, registered, notes), (staged, reason, rates) in zip(status, ways, strict=True)
        ],
        "medians": medians,
        "rounds": rounds,
        "failures": failures,
    }


def _figures(measured: dict[str, Any], peers: Mapping[str, Peer] = NO_PEERS) -> list[Figure]:
    name, medians = name_of(measured["block_bytes"]), measured["medians"]
    figures = []
    for op, goal in (("read", READ_GOAL), ("write", WRITE_GOAL)):
        own = medians[f"kvlane {op}"]
        figures.append(Figure(f"{op} {name}", own["gb_per_s"], "GB/s"))
        all_peers = [name + pages for name in peers for pages in ("", ON_HUGE)]
        others = {peer: medians[f"{peer} {op}"] for peer in all_peers if f"{peer} {op}" in medians}
        figures += [
            Figure(f"{op} {name}, {peer}", other["gb_per_s"], "GB/s") for peer, other in others.items()
        ]
        # With other pages the device behaves differently, because requests are as long as memory is contiguous.
        for peer in [each for each in others if each.endswith(ON_HUGE)]:
            other = others.pop(peer)
            ratio = own["gb_per_s"] / other["gb_per_s"]
            figures.append(Figure(f"{op} {name} / {peer}", ratio, at_least=HUGE_GOAL))
        if others:
            best = max(other["gb_per_s"] for other in others.values())
            what = f"{op} {name} / {'better of ' if len(others) > 1 else ''}{', '.join(others)}"
            figures.append(Figure(what, own["gb_per_s"] / best, at_least=goal))
        figures.append(Figure(f"{op} {name}, p50", own["p50_us"] / 1e3, "ms"))
        figures.append(Figure(f"{op} {name}, p99", own["p99_us"] / 1e3, "ms"))
        if op == "read":
            figures += [
                Figure(
                    f"{op} {name}, p99 / {peer}'s",
                    own["p99_us"] / other["p99_us"],
                    at_most=peers[peer].p99_goal,
                )
                for peer, other in others.items()
            ]
        figures.append(Figure(f"{op} {name}, CPU", own["cpu_s_per_gb"], "core s/GB", at_most=CPU_GOAL))
        figures += [
            Figure(f"{op} {name}, CPU, {peer}", other["cpu_s_per_gb"], "core s/GB")
            for peer, other in others.items()
        ]
    if "crc32c" in medians:
        crc = medians["crc32c"]["cpu_s_per_gb"]
        figures.append(Figure(f"crc32c alone, {name}", crc, "core s/GB"))
        ratio = medians["kvlane read"]["cpu_s_per_gb"] / crc
        figures.append(Figure(f"read {name}, CPU / crc32c alone", ratio, at_most=CRC_GOAL))
    share = medians["kvlane read beside writes"]["share"]
    figures.append(Figure(f"read {name} beside a write backlog / alone", share, at_least=BESIDE_GOAL))
    alone, beside = medians["kvlane one read alone"], medians["kvlane one read beside writes"]
    figures.append(Figure(f"one read of {name}, p99", alone["p99_us"] / 1e3, "ms"))
    slower = beside["p99_us"] / alone["p99_us"]
    figures.append(
        Figure(f"one read of {name}, p99 beside a write backlog / alone", slower, at_most=ONE_GOAL)
    )
    return figures


def _values(measured: tuple[int, float, float, float, list[int]]) -> Values:
    """The figures of one phase of the tier."""
    size, seconds, cpu, device_cpu, latencies = measured
    if not size:
        # Writes beside reads may have had no turn at all.
        return dict.fromkeys(
            ("gb_per_s", "p50_us", "p99_us", "cpu_s_per_gb", "device_cpu_s_per_gb"), math.nan
        )
    times = report.summary(map(float, latencies))
    return {
        "gb_per_s": size / seconds / 1e9,
        "p50_us": times["p50"],
        "p99_us": times["p99"],
        "cpu_s_per_gb": cpu / (size / 1e9),
        "device_cpu_s_per_gb": device_cpu / (size / 1e9),
    }


def _restart(file: Path, blocks: int) -> tuple[float, float | None]:
    try:
        return _bench.ssd_restart(str(file), blocks, True)
    except OSError as error:
        sys.exit(f"kvlane bench ssd, restart: {error}")


def _present(asked: list[str] | None, peers: Mapping[str, Peer]) -> list[str]:
    """The peers to measure beside the tier. A missing peer is named. If the user asked for it, the benchmark ends."""
    present = []
    for name in (*peers, CRC) if asked is None else asked:
        if why := peers[name].missing() if name in peers else None:
            sentence = f"{name} is not measured, {why}: {peers[name].install}"
            if asked is not None:
                sys.exit(sentence)
            report.say(sentence)
        else:
            present.append(name)
    return present


def _peers_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.peers")


def _fill(paths: tuple[str, ...], size: int) -> int:
    """Writes files for the peers, without holes, and returns their length."""
    size = size // (4 * MIB) * (4 * MIB) or size
    chunk = os.urandom(min(size, 4 * MIB))
    for path in paths:
        if os.path.exists(path) and os.path.getsize(path) == size:
            continue
        with open(path, "wb") as file:
            for _ in range(size // len(chunk)):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    return size


def _remove(files: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def await_path(tier: _bench.SsdBench, capacity: int) -> None:
    """Waits until the tier has measured both ways, if it does so: it begins when nothing is in flight."""
    if capacity < _MEASURED_OVER:
        return
    until = time.monotonic() + _PATH_TIMEOUT_S
    while any("not measured yet" in reason for _, reason, _ in tier.paths()) and time.monotonic() < until:
        time.sleep(0.02)


def name_of(block: int) -> str:
    """2 MiB, 256 KiB."""
    return f"{block // MIB} MiB" if block % MIB == 0 else f"{block // KIB} KiB"


def _block(text: str) -> int:
    size = parse_size(text)
    if size % 4096:
        raise argparse.ArgumentTypeError(f"{text} is no multiple of 4096")
    return size


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return int(text)


def _names(text: str, known: Sequence[str]) -> list[str]:
    named = text.split(",")
    if unknown := [each for each in named if each not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
    return named
