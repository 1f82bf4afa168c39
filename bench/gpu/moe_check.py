"""Ranks of kvlane.moe on streams of the GPUs, beside ranks in the memory of the host: rows and sums, bit for bit.

    python bench/gpu/moe_check.py --seconds 60 --out out/moe-check

Draws sizes, layouts, types, casts and routings until the time is over. Then it replays eight CUDA graphs of different
numbers of tokens on one all-to-all, with other ids each time and calls between them. Controls: ids that the host was
not told, and changed weights, have to be found.

With `--one-stream` all ranks share a stream: each sends before one receives, so no kernel waits for another. That is
for compute-sanitizer, which may run kernels one after the other. Graphs are left out then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import add_arguments, head

from kvlane.bench.all_to_all_gpu import Meeting, joined
from kvlane.moe import AllToAll

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Ranks:
    """Ranks on streams of a GPU, and as many in the memory of the host."""

    def __init__(
        self, count: int, sizes: dict[str, Any], rows: int | None = None, is_one_stream: bool = False
    ) -> None:
        """`rows`: room for those that come to a GPU, in other layouts than masked."""
        self.own = list(range(count))
        self.host = joined(Meeting(count, self.own, None), self.own, **sizes)
        more: dict[str, Any] = {} if rows is None else {"capacity": rows}
        gpus = torch.cuda.device_count()
        self.devices = [torch.device("cuda", 0 if is_one_stream else rank % gpus) for rank in self.own]
        # A rank that hangs is an error soon.
        more["timeout"] = 10.0
        meeting = Meeting(count, self.own, None)
        self.gpu = joined(meeting, self.own, self.devices, **sizes, **more)
        one = torch.cuda.Stream()
        self.streams = [one if is_one_stream else torch.cuda.Stream(device) for device in self.devices]

    def close(self) -> None:
        for rank in (*self.host, *self.gpu):
            rank.close()

    def by_host(self, given: list[tuple[Any, ...]], reduced: bool) -> list[tuple[Any, Any]]:
        """Rows and sums of each rank."""
        return in_threads(lambda rank: on_host(self.host[rank], given[rank], reduced), len(self.own))


def synchronize() -> None:
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)


def in_threads(act: Any, count: int) -> list[Any]:
    """What each rank gives; calls of the host wait for each other."""
    found: list[Any] = [None] * count
    raised: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            raised.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return found


def made_of(rows: torch.Tensor) -> torch.Tensor:
    """The experts' work. Rows that no token has may be anything."""
    dtype = torch.bfloat16 if rows.dtype == torch.float8_e4m3fn else rows.dtype
    return (rows.float() * 1.5 + 1).to(dtype)


def on_host(rank: AllToAll, given: tuple[Any, ...], reduced: bool) -> tuple[Any, Any]:
    x, ids, weights, scales = given
    got = rank.dispatch(x, ids, weights, scales)
    return got, rank.combine(made_of(got.rows), got, reduced=reduced)


def on_gpu(
    ranks: Ranks, given: list[tuple[Any, ...]], reduced: bool, is_split: bool
) -> list[tuple[Any, Any]]:
    """Each call of all ranks, one rank after the other: calls only enqueue."""
    there = [
        tuple(None if each is None else each.to(device) for each in of_rank)
        for device, of_rank in zip(ranks.devices, given, strict=True)
    ]
    synchronize()
    sent: list[Any] = []
    received: list[Any] = []
    for rank, stream, of_rank in zip(ranks.gpu, ranks.streams, there, strict=True):
        with torch.cuda.stream(stream):
            (sent if is_split else received).append((rank._send if is_split else rank.dispatch)(*of_rank))
    if is_split:
        for rank, stream, one in zip(ranks.gpu, ranks.streams, sent, strict=True):
            with torch.cuda.stream(stream):
                received.append(rank._receive(one))
    made = []
    for stream, got in zip(ranks.streams, received, strict=True):
        with torch.cuda.stream(stream):
            made.append(made_of(got.rows))
    found = []
    checked = []
    for rank, stream, got, y in zip(ranks.gpu, ranks.streams, received, made, strict=True):
        with torch.cuda.stream(stream):
            if is_split:
                checked.append(rank._send_back(y, got, reduced, None))
            else:
                found.append((got, rank.combine(y, got, reduced=reduced)))
    if is_split:
        for rank, stream, got, one, of_rank in zip(
            ranks.gpu, ranks.streams, received, checked, there, strict=True
        ):
            with torch.cuda.stream(stream):
                y, tokens = one[0], of_rank[0]
                assert tokens is not None
                out = y.new_empty((tokens.shape[0], y.shape[-1]))
                rank._gather(one, out)
                found.append((got, out))
    synchronize()
    for rank in ranks.gpu:
        rank.check()
    return found


def differences(wanted: tuple[Any, Any], found: tuple[Any, Any], layout: str) -> list[str]:
    """What is not equal, bit for bit."""
    (host, sums), (got, gpu_sums) = wanted, found
    names = []
    if not torch.equal(host.counts, got.counts.cpu()):
        return ["counts"]
    got = got.trimmed()
    for name in ("rows", "scales", "ids", "weights"):
        theirs, ours = getattr(host, name), getattr(got, name)
        if theirs is None:
            continue
        ours = ours.cpu()
        if layout == "tokens":
            is_equal = equal_bits(theirs, ours)
        else:
            starts = range(len(host.counts)) if layout == "masked" else host.starts.tolist()
            is_equal = layout == "masked" or torch.equal(host.starts, got.starts.cpu())
            for start, count in zip(starts, host.counts.tolist(), strict=True):
                cut = (start, slice(count)) if layout == "masked" else slice(start, start + count)
                is_equal = is_equal and equal_bits(theirs[cut], ours[cut])
        if not is_equal:
            names.append(name)
    return names if equal_bits(sums, gpu_sums.cpu()) else [*names, "sums"]


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(bytes_of(one), bytes_of(other))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # A dimension of one element may have any stride, and `contiguous` leaves it.
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def drawn(source: random.Random, sizes: dict[str, Any], tokens: int) -> tuple[Any, ...]:
    """A rank's tokens. A tenth of the ids is none; at times many want one expert, or one token an expert twice."""
    seed = torch.Generator().manual_seed(source.randrange(1 << 30))
    shape = (tokens, sizes["top_k"])
    ids = torch.randint(0, sizes["experts"], shape, generator=seed)
    if source.random() < 0.5:
        ids = torch.rand(tokens, sizes["experts"], generator=seed).argsort(1)[:, : sizes["top_k"]]
        ids = torch.nn.functional.pad(ids, (0, sizes["top_k"] - ids.shape[1]), value=-1)
    if source.random() < 0.2:
        ids[torch.rand(shape, generator=seed) < 0.5] = source.randrange(sizes["experts"])
    ids[torch.rand(shape, generator=seed) < 0.1] = -1
    x = torch.randn(tokens, sizes["hidden"], generator=seed).to(DTYPES[sizes["dtype"]])
    scales = None
    if sizes["scale_bytes"]:
        scales = torch.randint(0, 256, (tokens, sizes["scale_bytes"]), generator=seed, dtype=torch.uint8)
        scales = scales.view(torch.int32) if sizes.get("scales_column_major") else scales
    ids = ids.int() if source.random() < 0.5 else ids
    return x, ids, torch.rand(shape, generator=seed) - 0.3, scales


def drawn_sizes(source: random.Random) -> tuple[int, dict[str, Any]]:
    layout = source.choice(["experts", "masked", "tokens"])
    dtype = source.choice(list(DTYPES))
    count = source.choice([1, 2, 3, 4, 6, 8])
    most = source.choice([1, 7, 64, 128, 129, 700])
    top_k = source.choice([1, 2, 6, 8, 22])
    sizes = {
        "experts": source.choice([count, 8, 61, 256]),
        "top_k": top_k,
        "max_tokens": most,
        "hidden": 8 * source.choice([1, 5, 128, 360, 896]),
        "dtype": dtype,
        "scale_bytes": source.choice([0, 4, 17, 224]),
        "layout": layout,
    }
    kind = source.choice([None, "by column", "fp8", "fp8_pow2", "fp8_ue8m0"])
    if kind == "by column":
        sizes |= {"scale_bytes": source.choice([4, 16, 224]), "scales_column_major": True}
    elif kind is not None:
        sizes |= {
            "cast": kind,
            "dtype": "bfloat16",
            "scale_bytes": 0,
            "hidden": 512 * source.choice([1, 3, 14]),
        }
        sizes["scales_column_major"] = source.random() < 0.5
    if layout == "experts":
        sizes["alignment"] = source.choice([1, 8, 128])
    if layout == "masked":
        sizes["max_tokens"] = min(most, 64)
        sizes["capacity"] = count * sizes["max_tokens"] * top_k
        sizes["experts"] = min(sizes["experts"], 61)
    return count, sizes


def random_sizes(seconds: float, seed: int, is_one_stream: bool) -> dict[str, Any]:
    """Rounds that were compared, and what was wrong."""
    source = random.Random(seed)
    end = time.monotonic() + seconds
    rounds, made, wrong = 0, 0, []
    while time.monotonic() < end:
        count, sizes = drawn_sizes(source)
        held = -(-sizes["experts"] // count)
        # Ids repeat, so more rows may come than the default has room for.
        rows = (
            count * sizes["max_tokens"] * sizes["top_k"] + 128 * held
            if sizes["layout"] == "experts"
            else None
        )
        ranks = Ranks(count, sizes, rows, is_one_stream)
        made += 1
        for _ in range(4):
            tokens = [source.choice([0, 1, sizes["max_tokens"]]) for _ in ranks.own]
            given = [drawn(source, sizes, each) for each in tokens]
            reduced = sizes["layout"] == "tokens" or source.random() < 0.5
            wanted = ranks.by_host(given, reduced)
            found = on_gpu(ranks, given, reduced, is_one_stream or source.random() < 0.3)
            for rank in ranks.own:
                names = differences(wanted[rank], found[rank], sizes["layout"])
                wrong += [{"rank": rank, "ranks": count, "what": names, "reduced": reduced, **sizes}] * bool(
                    names
                )
            rounds += 1
        ranks.close()
    return {"all_to_alls": made, "rounds": rounds, "wrong": wrong[:20], "wrong_count": len(wrong)}


def graphs(replays: int, seed: int, count: int = 4) -> dict[str, Any]:
    """Replays of eight graphs of different sizes on one all-to-all, with calls between them."""
    source = random.Random(seed)
    sizes = {
        "experts": 32,
        "top_k": 4,
        "max_tokens": 128,
        "hidden": 512,
        "dtype": "bfloat16",
        "scale_bytes": 16,
    }
    ranks = Ranks(count, sizes)
    on_gpu(ranks, [drawn(source, sizes, 3) for _ in ranks.own], False, False)
    kinds = []
    for tokens in (0, 1, 2, 17, 32, 64, 100, 128):
        reduced = tokens % 2 == 0
        of_ranks = []
        for rank, stream, device in zip(ranks.gpu, ranks.streams, ranks.devices, strict=True):
            static = [each.to(device) for each in drawn(source, sizes, tokens)]
            static[1] = static[1].long()
            synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream):
                got = rank.dispatch(*static)
                out = rank.combine(made_of(got.rows), got, reduced=reduced)
            of_ranks.append((graph, static, got, out))
        kinds.append((tokens, reduced, of_ranks))
    synchronize()
    wrong, compared = [], 0
    for number in range(replays):
        tokens, reduced, of_ranks = source.choice(kinds)
        is_compared = number % 50 == 0
        given = []
        for (_, static, _, _), stream in zip(of_ranks, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                if is_compared:
                    fresh = drawn(source, sizes, tokens)
                    given.append((fresh[0], fresh[1].long(), fresh[2], fresh[3]))
                    for target, value in zip(static, given[-1], strict=True):
                        target.copy_(value)
                else:
                    static[1].random_(0, sizes["experts"])
        for (graph, _, _, _), stream in zip(of_ranks, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        if number % 7 == 0:
            on_gpu(ranks, [drawn(source, sizes, 5) for _ in ranks.own], True, False)
        if is_compared:
            synchronize()
            wanted = ranks.by_host(given, reduced)
            for rank in ranks.own:
                _, _, got, out = of_ranks[rank]
                # A call between them writes none of the graph's memory.
                if names := differences(wanted[rank], (got, out), "experts"):
                    wrong.append({"rank": rank, "tokens": tokens, "what": names, "replay": number})
            compared += 1
    synchronize()
    for rank in ranks.gpu:
        rank.check()
    found = {"replays": replays, "compared": compared, "wrong": wrong[:20], "wrong_count": len(wrong)}
    ranks.close()
    return found


def controls(seed: int, is_one_stream: bool) -> dict[str, bool]:
    """Whether differences are found where there are some."""
    source = random.Random(seed)
    sizes = {"experts": 8, "top_k": 2, "max_tokens": 16, "hidden": 64, "dtype": "bfloat16", "scale_bytes": 0}
    ranks = Ranks(2, sizes, None, is_one_stream)
    given = [drawn(source, sizes, 16) for _ in ranks.own]
    wanted = ranks.by_host(given, False)
    other_ids = [(x, (ids + 1) % 8, weights, scales) for x, ids, weights, scales in given]
    other_weights = [(x, ids, weights + 0.5, scales) for x, ids, weights, scales in given]
    by_ids = differences(wanted[0], on_gpu(ranks, other_ids, False, is_one_stream)[0], "experts")
    by_weights = differences(wanted[0], on_gpu(ranks, other_weights, False, is_one_stream)[0], "experts")
    ranks.close()
    return {"other_ids_are_found": bool(by_ids), "other_weights_are_found": by_weights == ["sums"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of drawn sizes (default %(default)s)")
    parser.add_argument("--replays", type=int, default=10_000, help="of graphs (default %(default)s)")
    parser.add_argument("--one-stream", action="store_true", help="no kernel waits for another")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/moe-check"))
    add_arguments(parser)
    settings = parser.parse_args()
    # Each rank's stream has a queue of its own.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    settings.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"about": head("moe-check", settings)}
    acts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("controls", lambda: controls(settings.seed, settings.one_stream)),
        ("random_sizes", lambda: random_sizes(settings.seconds, settings.seed, settings.one_stream)),
    ]
    if not settings.one_stream:
        acts.append(("graphs", lambda: graphs(settings.replays, settings.seed)))
    for name, act in acts:
        found[name] = act()
        print(name, json.dumps(found[name]), flush=True)
        (settings.out / "moe-check.json").write_text(json.dumps(found, indent=2) + "\n")
    is_right = all(found["controls"].values())
    is_right = is_right and not any(found[name].get("wrong_count") for name, _ in acts)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
