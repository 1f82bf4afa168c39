"""`kvlane bench all-to-all`: dispatch and combine of kvlane.moe among processes of this host, on CPUs or GPUs."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from kvlane.bench import all_to_all_gpu, report
from kvlane.bench.extra import numpy, tqdm
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.sizes import count

NAME = "all-to-all"
HELP = (
    "dispatch and combine of a mixture of experts: on CPUs beside gloo moving the same rows, on GPUs beside NCCL, "
    "DeepEP or a copy"
)
# Rounds before those that count: memory is touched for the first time.
_WARM_UP = 3
ROUTINGS = ("uniform", "zipf", "one-expert")
# By the time that gloo takes for the same rows, without a plan, places or sums.
GLOO_GOAL = 0.6
_PEERS = {"dispatch": "gloo-rows", "combine-reduced": "gloo-sums"}
_TITLES = {
    "dispatch": "dispatch",
    "combine": "combine, exact",
    "combine-reduced": "combine, reduced",
    "dispatch-send": "dispatch, the part that sends",
    "dispatch-receive": "dispatch, the part that receives",
    "combine-send": "combine, the part that sends",
    "combine-receive": "combine, the part that receives",
    "gloo-rows": "gloo, the rows of dispatch",
    "gloo-sums": "gloo, the rows of combine, reduced",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench all-to-all`."""
    parser.add_argument("--ranks", type=count, default=4, help="processes (default %(default)s)")
    parser.add_argument("--tokens", type=count, default=128, help="of each rank (default %(default)s)")
    parser.add_argument("--experts", type=count, default=256, help="of all ranks (default %(default)s)")
    parser.add_argument("--top-k", type=count, default=8, help="experts a token (default %(default)s)")
    parser.add_argument(
        "--hidden", type=count, default=7168, help="bfloat16 numbers a row (default %(default)s)"
    )
    parser.add_argument(
        "--routing", choices=ROUTINGS, default="uniform", help="who is asked (default %(default)s)"
    )
    parser.add_argument("--rounds", type=count, default=50, help="(default %(default)s)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where ranks are (default %(default)s)"
    )
    parser.add_argument(
        "--layout",
        choices=("experts", "masked", "tokens"),
        default="experts",
        help="how rows stand (default %(default)s)",
    )
    gpus = parser.add_argument_group("with --device cuda")
    gpus.add_argument(
        "--cast",
        action="store_true",
        help="dispatch casts rows of bfloat16 to fp8, and gives scales by column",
    )
    gpus.add_argument("--eager", action="store_true", help="call by call, and not by CUDA graphs")
    gpus.add_argument(
        "--deepep",
        action="store_true",
        help="DeepEP's low-latency calls too, from the module deep_ep beside torch",
    )
    gpus.add_argument("--num-sms", type=count, help="multiprocessors of a call at most (default: all)")
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    on_gpus = arguments.device == "cuda"
    if arguments.top_k > arguments.experts:
        raise SystemExit(f"a token names {arguments.top_k} of {arguments.experts} experts: lower --top-k")
    if not on_gpus and (of_gpus := _flags_of_gpus(arguments)):
        raise SystemExit(f"{', '.join(of_gpus)}: with --device cuda only")
    with report.CpuWatch() as watch:
        outcome = all_to_all_gpu.measure(arguments, NAME, _ids) if on_gpus else measure(arguments)
    return publish(arguments, outcome, watch)


def _flags_of_gpus(arguments: argparse.Namespace) -> list[str]:
    """Those that were given, and that ranks on CPUs would not heed."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    names = ("cast", "eager", "deepep", "num_sms")
    given = [name for name in names if getattr(arguments, name) != parser.get_default(name)]
    return [f"--{name.replace('_', '-')}" for name in given]


def measure(arguments: argparse.Namespace) -> Outcome:
    """The slowest rank of each round: medians and p99 over rounds in which all take turns."""
    found = _rounds(arguments)
    figures: list[Figure] = []
    slowest = {name: [max(of_rank[name] for of_rank in each) * 1e3 for each in found] for name in found[0][0]}
    for name, times in slowest.items():
        figures.append(Figure(f"{_TITLES[name]}, p50 of the slowest rank", statistics.median(times), "ms"))
        figures.append(Figure(f"{_TITLES[name]}, p99", sorted(times)[-1 - (len(times) - 1) // 100], "ms"))
    for ours, peer in _PEERS.items():
        if peer in slowest:
            ratio = statistics.median(slowest[ours]) / statistics.median(slowest[peer])
            figures.append(Figure(f"{_TITLES[ours]} / gloo", ratio, at_most=GLOO_GOAL))
    note = (
        f"{arguments.ranks} processes, {arguments.tokens} tokens each, {arguments.top_k} of {arguments.experts} "
        f"experts, rows of {arguments.hidden} bfloat16, layout {arguments.layout}, {arguments.routing} routing, other "
        "ids in each round. "
    )
    if "gloo-rows" in slowest:
        note += "Gloo moves the rows alone, one for each rank, by all_to_all_single with known sizes."
    else:
        note += "Without gloo: there is no torch beside this Python."
    return Outcome(NAME, figures, {"ms_by_round": slowest}, note)


def _rounds(arguments: argparse.Namespace) -> list[list[dict[str, float]]]:
    """For each round that counts, the seconds of each rank by what it did."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(arguments.ranks):
            ours, theirs = context.Pipe()
            settings = vars(arguments) | {"run": None, "store": f"{folder}/store"}
            processes.append(context.Process(target=_rank, args=(rank, theirs, settings), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            # The two gathers by which ranks join, then one turn for each round.
            for _ in range(2):
                told = [_heard(pipe) for pipe in pipes]
                for pipe in pipes:
                    pipe.send(told)
            found = []
            for _ in tqdm(range(_WARM_UP + arguments.rounds), desc="rounds", unit="round", leave=False):
                for pipe in pipes:
                    # A rank that has ended has said why, which is heard next.
                    with suppress(BrokenPipeError):
                        pipe.send("go")
                found.append([_heard(pipe) for pipe in pipes])
        finally:
            for process in processes:
                process.terminate()
                process.join()
    return found[_WARM_UP:]


def _heard(pipe: Connection) -> Any:
    try:
        heard = pipe.recv()
    except EOFError:
        raise SystemExit("a rank of the benchmark ended; its words are above") from None
    if isinstance(heard, str):
        raise SystemExit(heard)
    return heard


def _rank(rank: int, pipe: Connection, settings: dict[str, Any]) -> None:
    """What each process does: a round for each `go`."""
    from kvlane.moe import AllToAll, Group

    def all_gather(told: bytes) -> list[bytes]:
        pipe.send(told)
        return pipe.recv()

    ranks, tokens, hidden, top_k = (settings[name] for name in ("ranks", "tokens", "hidden", "top_k"))
    source = numpy.random.default_rng(rank)
    # The upper half of a float32 is a bfloat16. Random bits would be denormal numbers here and there, with which a CPU
    # takes many times as long.
    x = (source.standard_normal((tokens, hidden), numpy.float32).view(numpy.uint32) >> 16).astype(
        numpy.uint16
    )
    weights = numpy.full((tokens, top_k), 1 / top_k, numpy.float32)
    group = Group(rank, ranks, all_gather)
    capacity = None
    if settings["layout"] == "masked":
        # With one expert a token names it for each k.
        capacity = ranks * tokens * (top_k if settings["routing"] == "one-expert" else 1)
    try:
        with AllToAll(
            group,
            experts=settings["experts"],
            top_k=top_k,
            max_tokens=tokens,
            hidden=hidden,
            layout=settings["layout"],
            capacity=capacity,
        ) as all_to_all:
            gloo = _gloo(rank, settings)
            # The sums of that layout are the caller's.
            first_is_reduced = settings["layout"] == "tokens"
            out = numpy.empty((tokens, hidden), numpy.uint16)
            while pipe.recv() == "go":
                ids = _ids(source, settings)
                times: dict[str, float] = {}

                def timed(name: str, call: Callable[[], Any], times: dict[str, float] = times) -> Any:
                    """All ranks begin at a time, if torch is there: so none waits for the call before."""
                    if gloo is not None:
                        gloo.barrier()
                    began = time.perf_counter()
                    result = call()
                    times[name] = time.perf_counter() - began
                    return result

                # Experts that change nothing.
                got = timed("dispatch", lambda ids=ids: all_to_all.dispatch(x, ids, weights))
                if not first_is_reduced:
                    timed("combine", lambda got=got: all_to_all.combine(got.rows, got))
                    got = all_to_all.dispatch(x, ids, weights)
                timed("combine-reduced", lambda got=got: all_to_all.combine(got.rows, got, reduced=True))
                sent = timed("dispatch-send", lambda ids=ids: all_to_all._send(x, ids, weights, None))
                got = timed("dispatch-receive", lambda sent=sent: all_to_all._receive(sent))
                back = timed(
                    "combine-send",
                    lambda got=got: all_to_all._send_back(got.rows, got, first_is_reduced, None),
                )
                timed("combine-receive", lambda back=back: all_to_all._gather(back, out))
                if gloo is not None:
                    times |= _by_gloo(gloo, x, ids, settings)
                pipe.send(times)
    except ValueError as error:
        pipe.send(str(error))


def _ids(source: Any, settings: dict[str, Any]) -> Any:
    """Different experts for each token, as the routing says; the same expert for all tokens and k with one-expert."""
    tokens, experts, top_k = (settings[name] for name in ("tokens", "experts", "top_k"))
    if settings["routing"] == "one-expert":
        return numpy.zeros((tokens, top_k), numpy.int64)
    # The largest of perturbed logarithms are a draw without repetition (Gumbel).
    weights = numpy.ones(experts) if settings["routing"] == "uniform" else 1 / numpy.arange(1, experts + 1)
    scores = numpy.log(weights) + source.gumbel(size=(tokens, experts))
    return numpy.argsort(-scores, axis=1)[:, :top_k].copy()


def _gloo(rank: int, settings: dict[str, Any]) -> Any:
    """torch.distributed with gloo; None without torch."""
    try:
        import torch.distributed as dist
    except ImportError:
        return None
    store = f"file://{settings['store']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=settings["ranks"])
    return dist


def _by_gloo(dist: Any, x: Any, ids: Any, settings: dict[str, Any]) -> dict[str, float]:
    """Seconds of one row for each token and rank there, and of as many back. What goes where is known before."""
    import torch

    ranks = settings["ranks"]
    holders = ids // -(-settings["experts"] // ranks)
    # Bytes, because gloo knows no numbers of 16 bits.
    to = [torch.from_numpy(x[(holders == rank).any(axis=1)].view(numpy.uint8)) for rank in range(ranks)]
    sent = torch.tensor([len(each) for each in to])
    received = torch.zeros(ranks, dtype=torch.int64)
    dist.all_to_all_single(received, sent)
    rows = torch.cat(to)
    room = torch.empty((int(received.sum()), rows.shape[1]), dtype=torch.uint8)
    times = {}
    dist.barrier()
    began = time.perf_counter()
    dist.all_to_all_single(room, rows, received.tolist(), sent.tolist())
    times["gloo-rows"] = time.perf_counter() - began
    dist.barrier()
    began = time.perf_counter()
    dist.all_to_all_single(rows, room, sent.tolist(), received.tolist())
    times["gloo-sums"] = time.perf_counter() - began
    return times
