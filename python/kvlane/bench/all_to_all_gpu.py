"""`kvlane bench all-to-all --device cuda`: ranks on GPUs, by CUDA graphs or call by call.

A process for each GPU holds `ranks / gpus` ranks, each on a stream of its own. All begin a round together: behind a
sleeping kernel, and behind a collective of NCCL if there are several GPUs. A figure is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import os
import statistics
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from kvlane.bench import pictures
from kvlane.bench.extra import tqdm
from kvlane.bench.figures import Figure, Outcome
from kvlane.moe import AllToAll, Group

_WARM_UP = 5
# Longer than the host takes to enqueue a round: about 1 ms.
_SLEEP_CYCLES = 2_000_000
_SCALED = 128
_TITLES = {
    "empty": "an empty kernel",
    "dispatch": "dispatch",
    "dispatch-again": "dispatch, again",
    "combine": "combine, exact",
    "combine-reduced": "combine, reduced",
    "there-and-back": "dispatch and the first combine",
    "dispatch-send": "dispatch, the part that sends",
    "dispatch-receive": "dispatch, the part that receives",
    "combine-send": "the first combine, the part that sends",
    "combine-receive": "the first combine, the part that receives",
    "copy": "a copy of the rows of dispatch on the same GPU",
    "nccl-rows": "NCCL, the rows of dispatch",
    "nccl-sums": "NCCL, the rows of combine, reduced",
    "nccl-all-gather": "NCCL, all rows to all",
    "nccl-reduce-scatter": "NCCL, sums of all rows of all",
    "deepep-dispatch": "DeepEP, low-latency dispatch",
    "deepep-combine": "DeepEP, low-latency combine",
}

_BESIDE = (
    ("dispatch", "nccl-rows"),
    ("combine-reduced", "nccl-sums"),
    ("dispatch", "copy"),
    ("dispatch", "deepep-dispatch"),
    ("combine", "deepep-combine"),
)


def measure(arguments: argparse.Namespace, name: str, draw: Callable[[Any, dict[str, Any]], Any]) -> Outcome:
    """Medians and p99 of the slowest rank. `draw` gives the ids of a rank's tokens."""
    import torch

    there = torch.cuda.device_count()
    if not there:
        raise SystemExit("--device cuda needs a GPU that torch sees: torch.cuda.device_count() is 0")
    gpus = math.gcd(arguments.ranks, there)
    if arguments.deepep and not 1 < gpus == arguments.ranks:
        raise SystemExit(
            f"--deepep needs a GPU for each of two ranks or more: {arguments.ranks} ranks, {there} GPUs"
        )
    if arguments.deepep and importlib.util.find_spec("deep_ep") is None:
        raise SystemExit(
            "--deepep needs DeepEP's module deep_ep: install it beside torch, or name its folder in PYTHONPATH"
        )
    settings = vars(arguments) | {"run": None, "gpus": gpus, "draw": draw}
    with tempfile.TemporaryDirectory() as folder:
        settings["store"] = f"{folder}/store"
        found = _by_processes(settings)
    figures = []
    for kind, times in found.items():
        figures.append(Figure(f"{_TITLES[kind]}, p50 of the slowest rank", statistics.median(times), "us"))
        figures.append(Figure(f"{_TITLES[kind]}, p99", sorted(times)[-1 - (len(times) - 1) // 100], "us"))
    for ours, peer in _BESIDE:
        if ours in found and peer in found:
            ratio = statistics.median(found[ours]) / statistics.median(found[peer])
            figures.append(Figure(f"{_TITLES[ours]} / {_TITLES[peer]}", ratio))
    note = (
        f"{arguments.ranks} ranks on {gpus} {torch.cuda.get_device_name(0)}, {arguments.tokens} tokens each, "
        f"{arguments.top_k} of {arguments.experts} experts, rows of {arguments.hidden} fp8 with scales to dispatch"
        f"{', which it casts from bfloat16 and gives by column,' if arguments.cast else ''} and "
        f"of bfloat16 to combine, layout {arguments.layout}, {arguments.routing} routing, other ids in each round, "
        f"{'call by call' if arguments.eager else 'by CUDA graphs'}. torch {torch.__version__}."
    )
    return Outcome(name, figures, {"us_by_round": found}, note, pictures.of_the_slowest_rank)


def _by_processes(settings: dict[str, Any]) -> dict[str, list[float]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=_process, args=(gpu, theirs if gpu == 0 else None, settings), daemon=True)
        for gpu in range(settings["gpus"])
    ]
    try:
        for process in processes:
            process.start()
        theirs.close()
        rounds = settings["rounds"]
        with tqdm(total=rounds, desc="rounds", unit="round", leave=False) as bar:
            while True:
                heard = ours.recv()
                if isinstance(heard, dict):
                    return heard
                bar.update(heard)
    except EOFError:
        raise SystemExit("a process of the benchmark ended; its words are above") from None
    finally:
        for process in processes:
            process.terminate()
            process.join()


class Meeting:
    """The all-gather of ranks, of which this process has some in threads."""

    def __init__(self, size: int, own: list[int], dist: Any) -> None:
        self._told: dict[int, bytes] = {}
        self._all: list[bytes] = []
        self._size, self._dist = size, dist
        self._together = threading.Barrier(len(own), action=self._gather)

    def _gather(self) -> None:
        told = [self._told] if self._dist is None else [{}] * self._dist.get_world_size()
        if self._dist is not None:
            self._dist.all_gather_object(told, self._told)
        everything = {rank: each for part in told for rank, each in part.items()}
        self._all = [everything[rank] for rank in range(self._size)]

    def group(self, rank: int) -> Group:
        """That of one rank."""

        def all_gather(told: bytes) -> list[bytes]:
            self._told[rank] = told
            self._together.wait(120)
            everything = self._all
            self._together.wait(120)
            return everything

        return Group(rank, self._size, all_gather)


def joined(
    meeting: Meeting, ranks: list[int], devices: list[Any] | None = None, **sizes: Any
) -> list[AllToAll]:
    """An all-to-all for each of these ranks, on its device, each made in a thread."""
    made: dict[int, AllToAll | BaseException] = {}

    def join(rank: int) -> None:
        own = {} if devices is None else {"device": devices[ranks.index(rank)]}
        try:
            made[rank] = AllToAll(meeting.group(rank), **sizes, **own)
        except BaseException as error:  # noqa: BLE001 - it is raised by the caller
            made[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = []
    for rank in ranks:
        one = made[rank]
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found


@dataclass
class Rank:
    """A rank of this process, and what it sends."""

    all_to_all: AllToAll
    stream: Any
    x: Any
    scales: Any
    ids: Any
    wide_ids: Any
    """The same of 64 bits, for DeepEP."""
    weights: Any
    y: Any
    drawn: list[Any]
    """Ids of some rounds."""
    begin: Any
    end: Any
    graphs: dict[str, Any] = field(default_factory=dict)
    got: Any = None
    sent: Any = None
    """A dispatch, or a combine, whose part that receives is due."""


def _process(gpu: int, pipe: Connection | None, settings: dict[str, Any]) -> None:
    # Each stream has a queue of its own: a rank's kernel waits for no other one's but by its words.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(gpu)
    gpus, size = settings["gpus"], settings["ranks"]
    if gpus > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{settings['store']}", rank=gpu, world_size=gpus
        )
    each = size // gpus
    own = list(range(gpu * each, (gpu + 1) * each))
    ranks = _ranks(torch, Meeting(size, own, dist if gpus > 1 else None), own, settings)
    found = _rounds(torch, dist if gpus > 1 else None, ranks, settings, pipe)
    for rank in ranks:
        rank.all_to_all.check()
    if pipe is not None:
        with suppress(BrokenPipeError):
            pipe.send(found)
    if gpus > 1:
        dist.barrier()


def _ranks(torch: Any, meeting: Meeting, own: list[int], settings: dict[str, Any]) -> list[Rank]:
    import numpy

    tokens, hidden, top_k = settings["tokens"], settings["hidden"], settings["top_k"]
    sizes: dict[str, Any] = {"layout": settings["layout"], "exact": settings["layout"] != "tokens"}
    if settings["layout"] == "experts":
        sizes["alignment"] = 128
    if settings["cast"]:
        sizes |= {"cast": "fp8", "scales_column_major": True}
    else:
        sizes |= {"row_bytes": hidden, "scale_bytes": hidden // _SCALED * 4}
    if settings["num_sms"] is not None:
        sizes["num_sms"] = settings["num_sms"]
    made = joined(
        meeting,
        own,
        experts=settings["experts"],
        top_k=top_k,
        max_tokens=tokens,
        hidden=hidden,
        device=f"cuda:{torch.cuda.current_device()}",
        **sizes,
    )
    ranks = []
    for rank, all_to_all in zip(own, made, strict=True):
        source = numpy.random.default_rng(rank)
        drawn = [torch.from_numpy(settings["draw"](source, settings)).int().cuda() for _ in range(16)]
        random = torch.Generator("cuda").manual_seed(rank)
        x = torch.randint(0, 255, (tokens, hidden), dtype=torch.uint8, device="cuda", generator=random)
        scales = torch.rand(tokens, hidden // _SCALED, device="cuda", generator=random)
        if settings["cast"]:
            scales = None
            x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda", generator=random)
        weights = torch.rand(tokens, top_k, device="cuda", generator=random)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        stream = torch.cuda.Stream()
        ids = drawn[0].clone()
        ranks.append(Rank(all_to_all, stream, x, scales, ids, ids.long(), weights, None, drawn, *events))
    torch.cuda.synchronize()
    return ranks


def _rounds(
    torch: Any, dist: Any, ranks: list[Rank], settings: dict[str, Any], pipe: Connection | None
) -> dict[str, list[float]]:
    calls = _calls(torch, dist, ranks, settings)
    gate, together = torch.cuda.Stream(), torch.cuda.Event()
    word = torch.zeros(1, device="cuda")
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_WARM_UP + settings["rounds"]):
        for rank in ranks:
            with torch.cuda.stream(rank.stream):
                rank.ids.copy_(rank.drawn[number % len(rank.drawn)])
                rank.wide_ids.copy_(rank.ids)
        torch.cuda.synchronize()
        for name, call in calls.items():
            with torch.cuda.stream(gate):
                torch.cuda._sleep(_SLEEP_CYCLES)
                if dist is not None:
                    dist.all_reduce(word)
                together.record()
            for rank in ranks:
                with torch.cuda.stream(rank.stream):
                    rank.stream.wait_event(together)
                    rank.begin.record()
                    call(rank)
                    rank.end.record()
            torch.cuda.synchronize()
            slowest = max(rank.begin.elapsed_time(rank.end) for rank in ranks) * 1e3
            if number >= _WARM_UP:
                found[name].append(slowest)
        if pipe is not None and number >= _WARM_UP:
            pipe.send(1)
    if dist is not None:
        for name, times in found.items():
            slowest = torch.tensor(times)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name] = slowest.tolist()
    return found


def _calls(
    torch: Any, dist: Any, ranks: list[Rank], settings: dict[str, Any]
) -> dict[str, Callable[[Rank], None]]:
    """The calls of a round, in their order. A combine follows a dispatch."""

    def dispatch(rank: Rank) -> None:
        rank.got = rank.all_to_all.dispatch(rank.x, rank.ids, rank.weights, rank.scales)

    def combine(rank: Rank, reduced: bool) -> None:
        if rank.y is None:
            shape = (*rank.got.rows.shape[:-1], settings["hidden"])
            rank.y = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        rank.all_to_all.combine(rank.y, rank.got, reduced=reduced)

    def there_and_back(rank: Rank) -> None:
        dispatch(rank)
        combine(rank, sums[0] == "combine-reduced")

    def dispatch_send(rank: Rank) -> None:
        rank.sent = rank.all_to_all._send(rank.x, rank.ids, rank.weights, rank.scales)

    def dispatch_receive(rank: Rank) -> None:
        rank.got = rank.all_to_all._receive(rank.sent)

    def combine_send(rank: Rank) -> None:
        rank.sent = rank.all_to_all._send_back(rank.y, rank.got, sums[0] == "combine-reduced", None)

    def combine_receive(rank: Rank) -> None:
        out = torch.empty(settings["tokens"], settings["hidden"], dtype=torch.bfloat16, device="cuda")
        rank.all_to_all._gather(rank.sent, out)

    parts = {
        "dispatch-send": dispatch_send,
        "dispatch-receive": dispatch_receive,
        "combine-send": combine_send,
        "combine-receive": combine_receive,
    }
    sums = ["combine-reduced"] if settings["layout"] == "tokens" else ["combine", "combine-reduced"]
    # Once as calls: all ranks' kernels are loaded, and outputs are there.
    for name in sums:
        for rank in ranks:
            with torch.cuda.stream(rank.stream):
                dispatch(rank)
        for rank in ranks:
            with torch.cuda.stream(rank.stream):
                combine(rank, name == "combine-reduced")
        torch.cuda.synchronize()
    if settings["eager"]:
        calls: dict[str, Callable[[Rank], None]] = {"empty": lambda rank: rank.end.record()}
        for name in sums:
            calls["dispatch" if name == sums[0] else "dispatch-again"] = dispatch
            calls[name] = lambda rank, is_reduced=name == "combine-reduced": combine(rank, is_reduced)
        calls["there-and-back"] = there_and_back
        calls |= parts
    else:
        calls = _graphs(torch, ranks, sums, dispatch, combine, there_and_back, parts)
    calls |= _peers(torch, dist, ranks, settings)
    return calls


def _graphs(
    torch: Any,
    ranks: list[Rank],
    sums: list[str],
    dispatch: Any,
    combine: Any,
    there_and_back: Any,
    parts: dict[str, Callable[[Rank], None]],
) -> Any:
    """Graphs of each call. Those of a combine and of the dispatch before it go together."""
    for rank in ranks:

        def captured(name: str, act: Callable[[], None], rank: Rank = rank) -> None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=rank.stream):
                act()
            rank.graphs[name] = graph

        small = torch.zeros(1, device="cuda")
        captured("empty", lambda small=small: small.zero_())
        for name in sums:
            captured(f"dispatch before {name}", lambda rank=rank: dispatch(rank))
            captured(name, lambda rank=rank, name=name: combine(rank, name == "combine-reduced"))
        captured("there-and-back", lambda rank=rank: there_and_back(rank))
        for name, part in parts.items():
            captured(name, lambda rank=rank, part=part: part(rank))
    torch.cuda.synchronize()
    calls = {"empty": lambda rank: rank.graphs["empty"].replay()}
    for name in sums:
        first = "dispatch" if name == sums[0] else "dispatch-again"
        calls[first] = lambda rank, name=name: rank.graphs[f"dispatch before {name}"].replay()
        calls[name] = lambda rank, name=name: rank.graphs[name].replay()
    for name in ("there-and-back", *parts):
        calls[name] = lambda rank, name=name: rank.graphs[name].replay()
    return calls


def _peers(torch: Any, dist: Any, ranks: list[Rank], settings: dict[str, Any]) -> dict[str, Any]:
    """What others take for the same bytes."""
    size, hidden = settings["ranks"], settings["hidden"]
    row = hidden + hidden // _SCALED * 4
    each = -(-settings["experts"] // size)
    first = ranks[0]
    wanted = first.drawn[0] // each
    # Rows to every rank, one a token and rank, by the first draw.
    sent = [int((wanted == rank).any(1).sum()) for rank in range(size)]
    if dist is None:
        copies = [torch.empty(2, sum(sent), row, dtype=torch.uint8, device="cuda") for _ in ranks]
        by_rank = {id(rank): copy for rank, copy in zip(ranks, copies, strict=True)}
        return {"copy": lambda rank: by_rank[id(rank)][0].copy_(by_rank[id(rank)][1])}
    if len(ranks) > 1:
        return {}
    splits = torch.tensor(sent)
    back = torch.empty_like(splits)
    dist.all_to_all_single(back, splits)
    found = {}
    for name, bytes_a_row, out, into in (
        ("nccl-rows", row, sent, back.tolist()),
        ("nccl-sums", 2 * hidden, back.tolist(), sent),
    ):
        source = torch.empty(sum(out), bytes_a_row, dtype=torch.uint8, device="cuda")
        target = torch.empty(sum(into), bytes_a_row, dtype=torch.uint8, device="cuda")

        def exchange(
            _: Rank, source: Any = source, target: Any = target, out: Any = out, into: Any = into
        ) -> None:
            dist.all_to_all_single(target, source, into, out)

        found[name] = exchange
    tokens = settings["tokens"]
    rows = torch.empty(tokens, row, dtype=torch.uint8, device="cuda")
    all_rows = torch.empty(size * tokens, row, dtype=torch.uint8, device="cuda")
    sums = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    all_sums = torch.zeros(size * tokens, hidden, dtype=torch.bfloat16, device="cuda")
    found["nccl-all-gather"] = lambda _: dist.all_gather_into_tensor(all_rows, rows)
    found["nccl-reduce-scatter"] = lambda _: dist.reduce_scatter_tensor(sums, all_sums)
    if settings["deepep"]:
        found |= _deepep(torch, dist, first, settings)
    return found


def keep_nvshmem_on_this_host() -> None:
    """Keeps NVSHMEM, over which DeepEP runs, from looking for network cards, unless the user has set its variables."""
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")


def _deepep(torch: Any, dist: Any, rank: Rank, settings: dict[str, Any]) -> dict[str, Callable[[Rank], None]]:
    """DeepEP's low-latency calls with the same ids. They cast rows of bfloat16 to fp8, and their layout is `masked`."""
    keep_nvshmem_on_this_host()
    from deep_ep import Buffer  # pyright: ignore[reportMissingImports]

    size, tokens, experts, hidden = (settings[name] for name in ("ranks", "tokens", "experts", "hidden"))
    room = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, size, experts)
    buffer = Buffer(dist.group.WORLD, 0, room, low_latency_mode=True, num_qps_per_rank=experts // size)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    y = torch.randn(experts // size, size * tokens, hidden, dtype=torch.bfloat16, device="cuda")
    handles: list[Any] = []

    def dispatch(_: Rank) -> None:
        handles[:] = [buffer.low_latency_dispatch(x, rank.wide_ids, tokens, experts)[2]]

    def combine(_: Rank) -> None:
        buffer.low_latency_combine(y, rank.wide_ids, rank.weights, handles[0])

    calls = {"deepep-dispatch": dispatch, "deepep-combine": combine}
    with torch.cuda.stream(rank.stream):
        for call in calls.values():
            call(rank)
    torch.cuda.synchronize()
    if settings["eager"]:
        return calls
    for name, call in calls.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=rank.stream):
            call(rank)
        rank.graphs[name] = graph
    # A call keeps what its graph reads and writes.
    return {name: lambda rank, name=name, _=call: rank.graphs[name].replay() for name, call in calls.items()}
