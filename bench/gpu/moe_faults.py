"""Ranks of kvlane.moe that die, stop, or get too many rows, on the GPUs of this host.

    python bench/gpu/moe_faults.py --out out/moe-faults

A rank stays, and meets one new process after the other, on the next GPU if there is one. Each is killed while the one
that stays waits in a kernel. Then: how long until that kernel ends, which error comes, and whether it is for good. The
last one is stopped instead. After that dispatches without room, and all-to-alls that are made and closed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from provenance import add_arguments, head

from kvlane.bench.all_to_all_gpu import Meeting, joined
from kvlane.moe import AllToAll, CapacityExceeded, Group, MoeError, RankLost, RankSilent

# The kernel in which the rank that stays waits.
KINDS = ("before it sent anything", "before it combined", "in calls", "in graphs")
SIZES: dict[str, Any] = {"experts": 64, "top_k": 8, "max_tokens": 128, "hidden": 2048, "layout": "experts"}
STOPPED_FOR_S = 2.0
ROUNDS = 100


def given(device: torch.device, tokens: int = 128) -> tuple[Any, ...]:
    ids = torch.randint(0, SIZES["experts"], (tokens, SIZES["top_k"]), device=device)
    x = torch.randn(tokens, SIZES["hidden"], device=device).bfloat16()
    return x, ids, torch.rand(tokens, SIZES["top_k"], device=device)


def in_and_out(rank: AllToAll, x: Any, ids: Any, weights: Any) -> Any:
    got = rank.dispatch(x, ids, weights)
    return rank.combine(got.rows, got)


def other(pipe: Connection, kind: str) -> None:
    """A rank that is killed, or stopped."""
    torch.cuda.set_device(1 % torch.cuda.device_count())
    mine = given(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    pipe.send("started")
    rank = AllToAll(Group(1, 2, met_over(pipe)), device="cuda", **SIZES)
    if kind == KINDS[1]:
        rank.dispatch(*mine)
    pipe.send("there")
    while kind in KINDS[2:]:
        in_and_out(rank, *mine)
    # Until the signal comes.
    pipe.recv()


def met_over(pipe: Connection) -> Any:
    def all_gather(told: bytes) -> list[bytes]:
        pipe.send(told)
        theirs = pipe.recv()
        return [theirs, told]

    return all_gather


def staying(pipe: Connection) -> Any:
    def all_gather(told: bytes) -> list[bytes]:
        theirs = pipe.recv()
        pipe.send(told)
        return [told, theirs]

    return all_gather


def lost(kind: str, sent_signal: signal.Signals, begun: tuple[Any, Connection]) -> dict[str, Any]:
    """What the rank that stays sees."""
    process, pipe = begun
    timeout = STOPPED_FOR_S if sent_signal == signal.SIGSTOP else 60.0
    device = torch.device("cuda", 0)
    rank = AllToAll(Group(0, 2, staying(pipe)), device="cuda:0", timeout=timeout, **SIZES)
    mine = given(device)
    graph = None
    if kind == KINDS[3]:
        in_and_out(rank, *mine)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            in_and_out(rank, *mine)
    assert pipe.recv() == "there"
    ended: list[float] = []

    def watch() -> None:
        found = select.poll()
        found.register(os.pidfd_open(process.pid), select.POLLIN)
        found.poll(5000 if sent_signal == signal.SIGKILL else 1)
        ended.append(time.monotonic())

    watching = threading.Thread(target=watch)
    watching.start()
    threading.Timer(0.05, lambda: os.kill(process.pid, sent_signal)).start()
    asked = time.monotonic() + 0.05
    error: MoeError | None = None
    while error is None and time.monotonic() < asked + 30:
        try:
            if graph is not None:
                graph.replay()
            else:
                in_and_out(rank, *mine)
            torch.cuda.synchronize()
            rank.check()
        except MoeError as raised:
            error = raised
    torch.cuda.synchronize()
    seen = time.monotonic()
    watching.join()
    is_for_good = False
    try:
        if graph is not None:
            graph.replay()
            torch.cuda.synchronize()
        in_and_out(rank, *mine)
    except MoeError as raised:
        is_for_good = type(raised) is type(error)
    rank.close()
    process.kill()
    process.join()
    return {
        "kind": kind,
        "signal": sent_signal.name,
        "ms_after_the_signal": round((seen - asked) * 1e3, 2),
        "ms_after_the_pidfd": round((seen - ended[0]) * 1e3, 2) if sent_signal == signal.SIGKILL else None,
        "error": f"{type(error).__name__}: {error}",
        "is_right": isinstance(error, RankSilent if sent_signal == signal.SIGSTOP else RankLost),
        "is_for_good": is_for_good,
    }


def too_many_rows(rounds: int) -> dict[str, Any]:
    """Two ranks whose capacity is too small for every second dispatch."""
    sizes = SIZES | {"capacity": 100, "timeout": 10.0}
    ranks = joined(Meeting(2, [0, 1], None), [0, 1], device="cuda:0", **sizes)
    streams = [torch.cuda.Stream() for _ in ranks]
    said, right = 0, 0
    for number in range(2 * rounds):
        fits = number % 2 == 1
        mine = [given(torch.device("cuda", 0), 4 if fits else 128) for _ in ranks]
        torch.cuda.synchronize()
        sums = []
        for rank, stream, each in zip(ranks, streams, mine, strict=True):
            with torch.cuda.stream(stream):
                sums.append(in_and_out(rank, *each))
        torch.cuda.synchronize()
        for rank, out in zip(ranks, sums, strict=True):
            try:
                rank.check()
                right += fits and not bool(torch.isnan(out).any())
            except CapacityExceeded as error:
                said += not fits and error.needed > 100 and bool(torch.isnan(out).all())
    for rank in ranks:
        rank.close()
    return {"dispatches_without_room": rounds, "said_by_ranks": said, "right_by_ranks_after_it": right}


def made_and_closed(times: int) -> dict[str, Any]:
    """Bytes of the GPU, and open files, before and after."""

    def cycle() -> None:
        for rank in joined(Meeting(2, [0, 1], None), [0, 1], device="cuda:0", **SIZES):
            rank.close()

    def taken() -> tuple[int, int]:
        torch.cuda.synchronize()
        free, there = torch.cuda.mem_get_info(0)
        return there - free, len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        cycle()
    before, began = taken(), time.monotonic()
    for _ in range(times):
        cycle()
    seconds = time.monotonic() - began
    after = taken()
    return {
        "cycles": times,
        "ms_each": round(seconds / times * 1e3, 1),
        "gpu_bytes_more": after[0] - before[0],
        "files_more": after[1] - before[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=2, help="of each kind (default %(default)s)")
    parser.add_argument("--cycles", type=int, default=1000, help="made and closed (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/moe-faults"))
    add_arguments(parser)
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"about": head("moe-faults", settings)}
    context = multiprocessing.get_context("spawn")
    plan = [(kind, signal.SIGKILL) for kind in KINDS] * settings.times + [(KINDS[0], signal.SIGSTOP)]
    begun = []
    for kind, _ in plan:
        ours, theirs = context.Pipe()
        process = context.Process(target=other, args=(theirs, kind), daemon=True)
        process.start()
        theirs.close()
        begun.append((process, ours))
    for _, pipe in begun:
        assert pipe.recv() == "started"
    found["lost"] = []
    for (kind, sent_signal), one in zip(plan, begun, strict=True):
        found["lost"].append(lost(kind, sent_signal, one))
        print(json.dumps(found["lost"][-1]), flush=True)
    found["too_many_rows"] = too_many_rows(ROUNDS)
    print(json.dumps(found["too_many_rows"]), flush=True)
    found["made_and_closed"] = made_and_closed(settings.cycles)
    print(json.dumps(found["made_and_closed"]), flush=True)
    (settings.out / "moe-faults.json").write_text(json.dumps(found, indent=2) + "\n")
    is_right = all(each["is_right"] and each["is_for_good"] for each in found["lost"])
    said = found["too_many_rows"]
    is_right = is_right and said["said_by_ranks"] == said["right_by_ranks_after_it"] == 2 * ROUNDS
    sys.exit(0 if is_right and found["made_and_closed"]["files_more"] == 0 else 1)


if __name__ == "__main__":
    main()
