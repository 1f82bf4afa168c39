"""`kvlane bench copy`: saves and loads beside the bare loop that moves the same bytes, on the same kind of memory.

This process is the bare reader; the engine is a child of it, since a process may always read its own children.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from kvlane import _bench
from kvlane.bench import daemon, report
from kvlane.bench.engine import Engine, block_hashes
from kvlane.bench.extra import numpy, tqdm
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.memory import Memory
from kvlane.bench.sizes import count

NAME = "copy"
HELP = "saves and loads of 2 MiB blocks, whole and in 64 KiB pieces, against bare process_vm and memcpy loops"
BLOCK_BYTES = 2 << 20
# Pieces of a block: whole, and as a model of 16 layers with separate keys and values has it.
SHAPES = {"2 MiB": 1, "64 KiB pieces": 32}
GOALS = {"2 MiB": 0.9, "64 KiB pieces": 0.85}
# Each measured copy, and the bare loop of its comparison.
PAIRS = {"save by process_vm": "process_vm loop", "save by mapping": "memcpy out", "load": "memcpy in"}
_METHODS = {"save by process_vm": "process_vm", "save by mapping": "mapped"}
# process_vm takes up to so many ranges a call. For whole blocks, one call for each block is as fast.
_PIECES_PER_CALL = 1024
_WARM_UP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench copy`."""
    parser.add_argument(
        "--mib",
        type=count,
        default=512,
        help="working set on each side; larger than the caches (default %(default)s)",
    )
    parser.add_argument("--rounds", type=count, default=15, help="of all copies, interleaved")
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


def measure(arguments: argparse.Namespace) -> Outcome:
    """Medians over rounds in which all copies take turns."""
    size = arguments.mib << 20
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    # Room for the blocks that two engines may have in flight.
    with daemon.running(size + (64 << 20)) as serve:
        huge = serve.page_size.startswith("2 MB")
        target = Memory(size, shared=True, huge=huge)
        pages = {"pool": serve.page_size, "memfd of the loops": target.page_size}
        for shape, pieces in SHAPES.items():
            with tqdm(total=arguments.rounds, desc=shape, unit="round", leave=False) as progress:
                speeds, cpu, pages["engine"] = _take_turns(
                    serve, target, size, pieces, huge, arguments.rounds, progress
                )
            medians = {name: statistics.median(values) for name, values in speeds.items()}
            ratios = {
                name: statistics.median(
                    mine / bare for mine, bare in zip(speeds[name], speeds[bare_name], strict=True)
                )
                for name, bare_name in PAIRS.items()
            }
            # By CPU time of the copying threads, which a busy machine cannot disturb.
            cpu_ratios = {
                name: statistics.median(cpu[bare_name]) / statistics.median(cpu[name])
                for name, bare_name in PAIRS.items()
            }
            details[shape] = {
                "gb_per_s": medians,
                "ratios": ratios,
                "cpu_ratios": cpu_ratios,
                "rounds": speeds,
                "cpu_seconds": cpu,
            }
            for name, bare_name in PAIRS.items():
                figures.append(Figure(f"{shape}: {bare_name}", medians[bare_name], "GB/s"))
                figures.append(Figure(f"{shape}: {name}", medians[name], "GB/s"))
                figures.append(Figure(f"{shape}: {name} / {bare_name}", ratios[name], at_least=GOALS[shape]))
                figures.append(Figure(f"{shape}: {name} / {bare_name}, by CPU time", cpu_ratios[name]))
    note = (
        f"{arguments.mib} MiB in shuffled blocks of 2 MiB, touched before; pool in {pages['pool']} pages, memfd of the "
        f"loops in {pages['memfd of the loops']}, the engine's memory in {pages['engine']}. Times from the "
        "queueing of a job to its end; ratios are medians over rounds. By CPU time: of the threads that copy, which "
        "other work on the machine does not lengthen. Loads always copy from the mapping."
    )
    return Outcome(NAME, figures, {"pages": pages, "shapes": details}, note)


def _take_turns(
    serve: daemon.Daemon,
    target: Memory,
    size: int,
    pieces: int,
    huge: bool,
    rounds: int,
    progress: tqdm[Any],
) -> tuple[dict[str, list[float]], dict[str, list[float]], str]:
    """GB/s and CPU seconds of each copy in each round, and the engine's page size."""
    near, far = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_engine_process, args=(far, serve.address, size, pieces, huge), daemon=True
    )
    child.start()
    far.close()
    engine_address, engine_pages, namespace, order = near.recv()
    assert child.pid is not None
    length = BLOCK_BYTES // pieces
    loop = _pieces(engine_address, target.address, order, size, pieces)

    def ask(operation: str) -> tuple[float, float]:
        before = daemon.cpu_seconds(serve.pid, "kvlane-session")
        near.send(operation)
        seconds, used = near.recv()
        return seconds, used + daemon.cpu_seconds(serve.pid, "kvlane-session") - before

    speeds: dict[str, list[float]] = {name: [] for pair in PAIRS.items() for name in pair}
    cpu: dict[str, list[float]] = {name: [] for name in speeds}
    for number in range(-_WARM_UP, rounds):
        before = time.thread_time()
        bare = _bench.read_process(child.pid, loop, length, _PIECES_PER_CALL)
        taken = {"process_vm loop": (bare, time.thread_time() - before)}
        for name in ("save by process_vm", "memcpy out", "save by mapping", "load", "memcpy in"):
            if name in _METHODS:
                serve.tool.drop_namespaces([namespace])
            taken[name] = ask(name)
            # The daemon computes the checksums of saved blocks in the background; they are no part of any copy.
            serve.settle()
        if number >= 0:
            for name, (seconds, used) in taken.items():
                speeds[name].append(size / seconds / 1e9)
                cpu[name].append(used)
            progress.update()
    near.send("end")
    child.join()
    serve.tool.drop_namespaces([namespace])
    return speeds, cpu, engine_pages


def _pieces(engine: int, linear: int, order: list[int], size: int, pieces: int) -> list[tuple[int, int]]:
    """Address in the engine and in a linear memory of each piece of the blocks in that order."""
    length, blocks = BLOCK_BYTES // pieces, size // BLOCK_BYTES
    return [
        (engine + piece * blocks * length + block * length, linear + (place * pieces + piece) * length)
        for place, block in enumerate(order)
        for piece in range(pieces)
    ]


def _copying_cpu_seconds() -> float:
    """CPU seconds of this thread, which runs the bare loops, and of the engines' movers."""
    return time.thread_time() + daemon.cpu_seconds(os.getpid(), "kvlane-mover")


def _engine_process(pipe: Connection, address: str, size: int, pieces: int, huge: bool) -> None:
    """Runs two engines over one memory, one for each way to save. Obeys the names of copies."""
    memory = Memory(size)
    linear = Memory(size, shared=True, huge=huge)
    memory.fill(pieces)
    length, blocks = BLOCK_BYTES // pieces, size // BLOCK_BYTES
    order = list(range(blocks))
    random.Random(0).shuffle(order)
    hashes = block_hashes(f"copy-{pieces}", blocks)
    engines = {
        name: Engine(
            address,
            f"copy-{pieces}-{method}",
            block_bytes=BLOCK_BYTES,
            memory=memory,
            pieces=pieces,
            save_method=method,
        )
        for name, method in _METHODS.items()
    }
    loader = engines["save by mapping"]
    outward = _pieces(memory.address, linear.address, order, size, pieces)
    inward = [(to, come_from) for come_from, to in outward]
    pipe.send((memory.address, memory.page_size, loader.namespace, order))
    checked = False
    while (operation := pipe.recv()) != "end":
        copying = _copying_cpu_seconds()
        if operation == "memcpy out":
            seconds = _bench.copy(outward, length)
        elif operation == "memcpy in":
            seconds = _bench.copy(inward, length)
        elif operation in engines:
            finished = engines[operation].save(hashes, order)
            assert finished.bytes == size, f"{finished.bytes} bytes were saved and not {size}"
            seconds = finished.seconds
        else:
            hit = loader.lookup(hashes)
            kept = None if checked else memory.words.copy()
            if kept is not None:
                memory.words[:] = 0
                copying = _copying_cpu_seconds()
            finished = loader.load(hit, order)
            assert finished.bytes == size, f"{finished.bytes} bytes were loaded and not {size}"
            if kept is not None:
                assert numpy.array_equal(kept, memory.words), "other bytes were loaded than were saved"
                checked = True
            seconds = finished.seconds
        pipe.send((seconds, _copying_cpu_seconds() - copying))
    for engine in engines.values():
        engine.close()
