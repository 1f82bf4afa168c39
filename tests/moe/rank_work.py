"""The work of the ranks' processes, by name. Each gets its group, a function that says an event, and arguments."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
from oracle import Sizes

from kvlane import moe
from kvlane.moe import _host

Say = Callable[[str], None]
POISON = 0xA5


def all_to_all(group: moe.Group, sizes: Sizes, **more: Any) -> moe.AllToAll:
    return moe.AllToAll(
        group,
        experts=sizes.experts,
        top_k=sizes.top_k,
        max_tokens=sizes.max_tokens,
        hidden=sizes.hidden,
        dtype=sizes.dtype,
        scale_bytes=sizes.scale_bytes,
        alignment=sizes.alignment,
        layout=sizes.layout,
        capacity=sizes.capacity,
        **more,
    )


def there_and_back(group: moe.Group, say: Say, sizes: Sizes, rounds: int) -> Any:
    """Dispatches and combines with other routing each time; the number of rows that were compared, or what is wrong."""
    compared = 0
    poison_new_arrays()
    with all_to_all(group, sizes) as ranks:
        for number in range(rounds):
            inputs = drawn(sizes, number, rounds)
            own = inputs[group.rank]
            reduced = number % 2 == 1 or sizes.layout == "tokens"
            # Some get their weights with combine.
            late = own.weights if number % 4 == 0 and not reduced else None
            scales = own.scales if sizes.scale_bytes else None
            got = ranks.dispatch(own.x, own.ids, own.weights if late is None else None, scales)
            find = rows_by_token if sizes.layout == "tokens" else rows_by_expert
            found = find(group.rank, sizes, inputs, got)
            if isinstance(found, str):
                return f"round {number}: {found}"
            y, count = found
            out = ranks.combine(y, got, reduced=number % 2 == 1, weights=late)
            if out.tobytes() != oracle.sums_of(sizes, group.rank, inputs, reduced).tobytes():
                return f"round {number}: sums"
            compared += count
    return compared


def drawn(sizes: Sizes, number: int, rounds: int) -> list[oracle.Input]:
    """Every third routing is skewed, every fourth one only to experts of the tokens' own ranks."""
    inputs = oracle.draw(sizes, 100 * rounds + number, skewed=number % 3 == 2)
    if number % 4 == 3:
        for rank, each in enumerate(inputs):
            held = sizes.experts_of(rank)
            each.ids = held.start + each.ids % len(held) if held else np.full_like(each.ids, -1)
    return inputs


def poison_new_arrays() -> None:
    def poisoned(like: Any, shape: tuple[int, ...]) -> Any:
        made = np.empty(shape, like.dtype)
        made.view(np.uint8).fill(POISON)
        return made

    _host.empty_like = poisoned


def rows_by_expert(rank: int, sizes: Sizes, inputs: list[oracle.Input], got: moe.Received) -> Any:
    """What the experts make of the rows, and how many came; or what is wrong. Other rows have the poison."""
    rows, counts, starts, count = oracle.rows_of(sizes, rank, inputs)
    lead = (len(counts), sizes.room) if sizes.layout == "masked" else (count,)
    said = None if got.starts is None else got.starts.tolist()
    if (got.counts.tolist(), said) != (counts, starts if sizes.layout == "experts" else None):
        return f"counts {got.counts}, starts {got.starts}"
    if got.rows.shape != (*lead, sizes.hidden) or (got.ids, got.weights) != (None, None):
        return f"shape {got.rows.shape}"
    found = got.rows.reshape(count, sizes.hidden)
    scales = got.scales.reshape(count, sizes.scale_bytes) if sizes.scale_bytes else None
    y = np.zeros((count, sizes.hidden), got.rows.dtype)
    unused = np.ones(count, bool)
    for position, source, token, k in rows:
        there = inputs[source]
        unused[position] = False
        if found[position].tobytes() != there.x[token].tobytes():
            return f"row {position} is not token {token} of rank {source}"
        if scales is not None and scales[position].tobytes() != there.scales[token].tobytes():
            return f"scales of row {position}"
        y[position] = oracle.expert_output(sizes, int(there.ids[token, k]), found[position])
    for array in (found, scales):
        if array is not None and not (array[unused].view(np.uint8) == POISON).all():
            return "a row that did not come was written"
    return y.reshape(*lead, sizes.hidden), len(rows)


def rows_by_token(rank: int, sizes: Sizes, inputs: list[oracle.Input], got: moe.Received) -> Any:
    """The sums of this rank's experts, by what came alone, and how many tokens came; or what is wrong."""
    rows, ids, weights = oracle.tokens_of(sizes, rank, inputs)
    counts = oracle.rows_of(sizes, rank, inputs)[1]
    if got.counts.tolist() != counts or got.starts is not None:
        return f"counts {got.counts}, starts {got.starts}"
    if len(got.rows) != len(rows) or got.ids.tobytes() != ids.tobytes():
        return f"ids {got.ids}"
    if got.weights.tobytes() != weights.tobytes():
        return f"weights {got.weights}"
    y = np.zeros((len(rows), sizes.hidden), got.rows.dtype)
    for position, (source, token) in enumerate(rows):
        there = inputs[source]
        if got.rows[position].tobytes() != there.x[token].tobytes():
            return f"row {position} is not token {token} of rank {source}"
        if sizes.scale_bytes and got.scales[position].tobytes() != there.scales[token].tobytes():
            return f"scales of row {position}"
        total = np.zeros(sizes.hidden, np.float32)
        for expert, weight in zip(got.ids[position], got.weights[position], strict=True):
            if expert >= 0:
                number = int(expert) + sizes.experts_of(rank).start
                made = oracle.expert_output(sizes, number, got.rows[position])
                total = oracle.weighted_onto(total, weight, oracle.read(made, sizes.dtype))
        y[position] = oracle.written(total, sizes.dtype)
    return y, len(rows)


def over_capacity(group: moe.Group, say: Say, sizes: Sizes, rounds: int) -> Any:
    """How many dispatches and combines failed for want of room, and how many sums were right; or what is wrong."""
    dispatches = combines = right = 0
    with all_to_all(group, sizes) as ranks:
        for number in range(rounds):
            inputs = oracle.draw(sizes, number)
            own = inputs[group.rank]
            over = {rank: oracle.needed(sizes, rank, inputs) for rank in range(sizes.ranks)}
            over = {rank: needed for rank, needed in over.items() if needed > sizes.room}
            try:
                got = ranks.dispatch(own.x, own.ids, own.weights)
            except moe.CapacityExceeded as error:
                if error.needed != over.get(group.rank) or f"{error.needed} rows" not in str(error):
                    return f"round {number}: {error}, and needed are {over}"
                dispatches += 1
                continue
            if group.rank in over:
                return f"round {number}: a dispatch without room"
            y = rows_by_expert_unchecked(group.rank, sizes, inputs)
            asked = {one // sizes.experts_a_rank for one in own.ids.ravel().tolist() if one >= 0}
            try:
                out = ranks.combine(y, got, reduced=number % 2 == 1)
            except moe.CapacityExceeded as error:
                if error.needed not in [over[rank] for rank in asked & over.keys()]:
                    return f"round {number}: {error}, and needed are {over}"
                combines += 1
                continue
            if asked & over.keys():
                return f"round {number}: a sum of rows that had no room"
            if out.tobytes() != oracle.sums_of(sizes, group.rank, inputs, number % 2 == 1).tobytes():
                return f"round {number}: sums"
            right += 1
    return dispatches, combines, right


def rows_by_expert_unchecked(rank: int, sizes: Sizes, inputs: list[oracle.Input]) -> Any:
    rows, counts, _, count = oracle.rows_of(sizes, rank, inputs)
    y = np.zeros((count, sizes.hidden), inputs[0].x.dtype)
    for position, source, token, k in rows:
        there = inputs[source]
        y[position] = oracle.expert_output(sizes, int(there.ids[token, k]), there.x[token])
    return y.reshape(len(counts), sizes.room, sizes.hidden)


def exact_sums(group: moe.Group, say: Say, sizes: Sizes) -> Any:
    """The sums of the tokens that the ranks have together, the same for any number of ranks."""
    whole = oracle.draw(Sizes(1, sizes.experts, sizes.top_k, sizes.hidden, sizes.dtype), 5)[0]
    mine = np.array_split(np.arange(len(whole.ids)), group.size)[group.rank]
    with all_to_all(group, sizes) as ranks:
        got = ranks.dispatch(whole.x[mine], whole.ids[mine], whole.weights[mine])
        y = np.zeros((len(got.rows), sizes.hidden), whole.x.dtype)
        experts = sizes.experts_of(group.rank)
        for expert, start, count in zip(experts, got.starts, got.counts, strict=True):
            y[start : start + count] = oracle.expert_output(sizes, expert, got.rows[start : start + count])
        return ranks.combine(y, got).tobytes()


def until_lost(group: moe.Group, say: Say, sizes: Sizes, timeout: float) -> Any:
    """Dispatches until that fails: how, how long the last call took, and how the next one fails."""
    own = oracle.draw(sizes, 1)[group.rank]
    with all_to_all(group, sizes, timeout=timeout) as ranks:
        say("joined")
        while True:
            began = time.monotonic()
            try:
                got = ranks.dispatch(own.x, own.ids, own.weights)
                ranks.combine(np.zeros((len(got.rows), sizes.hidden), own.x.dtype), got)
            except moe.MoeError as error:
                took = time.monotonic() - began
                try:
                    ranks.check()
                except moe.MoeError as again:
                    return type(error).__name__, str(error), took, str(again) == str(error)
                return type(error).__name__, str(error), took, False
            if group.rank == 0:
                say("dispatched")


def join_only(group: moe.Group, say: Say, sizes_by_rank: list[Sizes]) -> Any:
    """Joins with sizes of its own."""
    with all_to_all(group, sizes_by_rank[group.rank]) as ranks:
        return ranks.nbytes


def join_with(group: moe.Group, say: Say, arguments_by_rank: list[dict[str, Any]]) -> Any:
    """Joins with arguments of its own."""
    sizes = {"experts": 8, "top_k": 2, "max_tokens": 4, "hidden": 16, "timeout": 20.0}
    with moe.AllToAll(group, **(sizes | arguments_by_rank[group.rank])) as ranks:
        return ranks.nbytes


def join_and_leave(group: moe.Group, say: Say, sizes: Sizes, times: int) -> Any:
    """How many descriptors and mappings this process has more than after the first time."""

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("kvlane-moe")

    counted = []
    own = oracle.draw(sizes, 3)[group.rank]
    for _ in range(times):
        with all_to_all(group, sizes) as ranks:
            ranks.dispatch(own.x, own.ids, own.weights)
        counted.append(held())
    first, last = counted[0], counted[-1]
    return last[0] - first[0], last[1] - first[1]


def interrupted(group: moe.Group, say: Say, sizes: Sizes) -> Any:
    """Rank 0 waits for rank 1, which does nothing, and is interrupted."""
    ranks = all_to_all(group, sizes)
    if group.rank == 1:
        time.sleep(30)
        return None
    own = oracle.draw(sizes, 3)[0]
    # A shell starts what runs in its background with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        ranks.dispatch(own.x, own.ids, own.weights)
    except KeyboardInterrupt:
        return "interrupted", time.monotonic() - began
    return "answered", 0.0


def looked_at(group: moe.Group, say: Say, sizes: Sizes) -> Any:
    """Rank 0 waits for rank 1 in a thread; another thread asks it for its size meanwhile."""
    ranks = all_to_all(group, sizes, timeout=1.0)
    if group.rank == 1:
        time.sleep(5)
        return None
    own = oracle.draw(sizes, 3)[0]
    failed: list[str] = []

    def wait() -> None:
        try:
            ranks.dispatch(own.x, own.ids, own.weights)
        except moe.RankSilent:
            failed.append("silent")

    waiting = threading.Thread(target=wait)
    waiting.start()
    while waiting.is_alive():
        ranks.stats()
    return failed


def closed(group: moe.Group, say: Say, sizes: Sizes) -> Any:
    """A thread of rank 0 waits for rank 1, and another one closes it: how long that took, and how rank 1 learns."""
    ranks = all_to_all(group, sizes)
    own = oracle.draw(sizes, 3)[group.rank]
    if group.rank == 1:
        time.sleep(2)
        try:
            # Rank 0 has sent its part of the first one.
            for _ in range(2):
                ranks.dispatch(own.x, own.ids, own.weights).give_up()
        except moe.RankLost as error:
            return str(error)
        return "answered"
    threading.Timer(0.3, ranks.close).start()
    began = time.monotonic()
    try:
        ranks.dispatch(own.x, own.ids, own.weights)
    except moe.MoeError:
        return time.monotonic() - began
    return None


def empty_of_another_type(group: moe.Group, say: Say, sizes: Sizes) -> Any:
    """Rank 1 has no tokens, and rows of the wrong type. Nothing is sent then, and the right call works."""
    own = oracle.draw(sizes, 3)[0]
    with all_to_all(group, sizes) as ranks:
        if group.rank == 1:
            x, ids, weights = np.empty((0, sizes.hidden)), own.ids[:0], own.weights[:0]
            try:
                ranks.dispatch(x, ids, weights)
            except ValueError as error:
                said = str(error)
            got = ranks.dispatch(x.astype(np.float32), ids, weights)
            ranks.combine(np.zeros((len(got.rows), sizes.hidden), np.float32), got)
            return said
        got = ranks.dispatch(own.x, own.ids, own.weights)
        ranks.combine(np.zeros((len(got.rows), sizes.hidden), np.float32), got)
        return None


def no_memory(group: moe.Group, say: Say, sizes: Sizes) -> Any:
    """Rank 0 has no memory for the rows of its second dispatch."""
    own = oracle.draw(sizes, 3)[0]
    with all_to_all(group, sizes) as ranks:
        for number in range(3):
            if group.rank == 0 and number == 1:

                def fails(*_: object) -> None:
                    raise MemoryError("no rows")

                _host.empty_like = fails
            try:
                ranks.dispatch(own.x, own.ids, own.weights)
            except (MemoryError, moe.MoeError) as error:
                first = f"{type(error).__name__}: {error}"
                try:
                    ranks.dispatch(own.x, own.ids, own.weights)
                except moe.MoeError as again:
                    return number, first, str(again)
    return "answered"
