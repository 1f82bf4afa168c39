"""kvlane.moe on CPUs: ranks are processes, and what they get is compared with an oracle."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import Sizes
from rank_processes import Ranks, run

from kvlane import moe

ALONE = Sizes(ranks=1, experts=4, top_k=2, hidden=8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks meet, and where children find the modules of this folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))))
    return tmp_path


@pytest.mark.parametrize("layout", ["experts", "masked", "tokens"])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(ranks=1, experts=6, top_k=3, hidden=16),
        Sizes(ranks=2, experts=5, top_k=1, hidden=8, dtype="float16", scale_bytes=4, alignment=16),
        Sizes(ranks=3, experts=8, top_k=4, hidden=24, dtype="bfloat16", scale_bytes=12),
        Sizes(ranks=4, experts=3, top_k=8, hidden=64, dtype="bfloat16", alignment=8),
        Sizes(ranks=8, experts=20, top_k=22, hidden=8192, dtype="bfloat16", max_tokens=4),
    ],
    ids=lambda sizes: f"{sizes.ranks}-{sizes.dtype}",
)
def test_rows_and_sums_are_those_of_the_oracle(sizes: Sizes, layout: str, folder: Path) -> None:
    """Ranks differ in their tokens, one has none; experts are uneven, one rank may have none; ids repeat and are -1."""
    if layout != "experts":
        # Ids repeat: an expert can get more rows than there are tokens.
        capacity = sizes.ranks * sizes.max_tokens * sizes.top_k if layout == "masked" else None
        sizes = replace(sizes, layout=layout, capacity=capacity, alignment=1)
    compared = run(sizes.ranks, "there_and_back", sizes, 9)
    assert all(isinstance(each, int) for each in compared), compared
    assert sum(compared) > 50
    assert not list(folder.rglob("moe-*.sock")), "a socket is left behind"


def test_an_expert_with_more_rows_than_its_capacity_fails_what_needs_it_and_the_rest_works() -> None:
    sizes = Sizes(ranks=3, experts=9, top_k=2, hidden=8, layout="masked", capacity=9, max_tokens=16)
    found = run(sizes.ranks, "over_capacity", sizes, 40)
    assert all(isinstance(each, tuple) for each in found), found
    dispatches, combines, right = (sum(each) for each in zip(*found, strict=True))
    assert min(dispatches, combines, right) > 5, found


def test_ranks_that_differ_in_the_layout_are_told() -> None:
    found = run(2, "join_only", [Sizes(2, 8, 2, 16), Sizes(2, 8, 2, 16, layout="tokens")])
    assert all("layout is experts here and tokens at rank 1" in text for _, text in found), found
    masked = Sizes(2, 8, 2, 16, layout="masked")
    found = run(2, "join_only", [replace(masked, capacity=4), replace(masked, capacity=5)])
    assert "capacity is 4 here and 5 at rank 1" in found[0][1]


def test_exact_sums_have_the_same_bits_for_any_number_of_ranks() -> None:
    found = {size: b"".join(run(size, "exact_sums", Sizes(size, 8, 4, 32, "bfloat16"))) for size in (1, 2, 4)}
    assert found[1] == found[2] == found[4]
    assert any(found[1])


def test_a_killed_rank_is_named_by_the_others_and_everything_after_fails() -> None:
    with Ranks(3, "until_lost", (Sizes(ranks=3, experts=6, top_k=2, hidden=8), 50.0)) as ranks:
        ranks.until("dispatched", 20)
        os.kill(ranks.processes[2].pid or 0, signal.SIGKILL)
        results = ranks.done(2)
    for kind, text, took, same_again in results.values():
        assert kind == "RankLost"
        # One may have seen the other one fail first.
        assert text.startswith(
            ("rank 2 is gone: its process ended", "rank 0 takes no part", "rank 1 takes no part")
        )
        assert took < 10, "far from the timeout"
        assert same_again
    assert any("rank 2 is gone" in text for _, text, _, _ in results.values())


def test_a_stopped_rank_is_named_after_the_timeout() -> None:
    with Ranks(2, "until_lost", (Sizes(ranks=2, experts=4, top_k=2, hidden=8), 3.0)) as ranks:
        ranks.until("dispatched", 5)
        os.kill(ranks.processes[1].pid or 0, signal.SIGSTOP)
        kind, text, took, same_again = ranks.done(1)[0]
    assert kind == "RankSilent"
    assert "rank 1 sent no" in text and "within 3 s" in text
    assert took < 20 and same_again


def test_ranks_that_differ_are_told_in_what() -> None:
    sizes = [Sizes(2, 8, 2, 16), Sizes(2, 8, 3, 16)]
    found = run(2, "join_only", sizes)
    assert [kind for kind, _ in found] == ["NotJoined"] * 2
    assert all("rank 0: top_k is 2 here and 3 at rank 1" in text for _, text in found)


def test_joining_and_leaving_leaks_nothing() -> None:
    assert run(2, "join_and_leave", Sizes(ranks=2, experts=4, top_k=2, hidden=8), 40) == [(0, 0)] * 2


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_64_ranks_have_the_rows_and_sums_of_the_oracle() -> None:
    sizes = Sizes(ranks=64, experts=150, top_k=5, hidden=32, dtype="bfloat16", max_tokens=6)
    with Ranks(64, "there_and_back", (sizes, 5), patience_s=600) as ranks:
        compared = ranks.done()
    assert all(isinstance(each, int) for each in compared.values()), compared
    assert sum(compared.values()) > 500


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_1000_times_of_joining_and_leaving_leak_nothing() -> None:
    sizes = Sizes(ranks=2, experts=4, top_k=2, hidden=8)
    with Ranks(2, "join_and_leave", (sizes, 1000), patience_s=600) as ranks:
        assert ranks.done() == {0: (0, 0), 1: (0, 0)}


def test_a_rank_that_waits_can_be_interrupted() -> None:
    with Ranks(2, "interrupted", (Sizes(ranks=2, experts=4, top_k=2, hidden=8),)) as ranks:
        what, took = ranks.done(1)[0]
    assert what == "interrupted"
    assert took < 20


def test_another_thread_asks_while_one_waits() -> None:
    """It waited for the rank with the interpreter, which the rank that waited needed to look for signals."""
    with Ranks(2, "looked_at", (Sizes(ranks=2, experts=4, top_k=2, hidden=8),)) as ranks:
        assert ranks.done(1)[0] == ["silent"]


def test_a_call_that_waits_ends_when_another_thread_closes_and_the_other_rank_learns_of_it() -> None:
    took, said = run(2, "closed", Sizes(ranks=2, experts=4, top_k=2, hidden=8))
    assert took is not None and took < 20
    assert said.startswith("rank 0 takes no part any more")


def test_a_rank_without_tokens_is_told_of_a_wrong_type_before_anything_is_sent() -> None:
    """Any empty array passed for rows of the right size. It was sent, and the others waited for this rank."""
    said = run(2, "empty_of_another_type", Sizes(ranks=2, experts=4, top_k=2, hidden=8))[1]
    assert said == "x is [0, 8] of float64, and has to be 0 rows of 32 bytes"


def test_a_rank_that_cannot_take_the_rows_ends_it_for_all() -> None:
    """It tried again, one dispatch behind the others, who had computed its tokens by then."""
    zero, one = run(2, "no_memory", Sizes(ranks=2, experts=4, top_k=2, hidden=8))
    assert zero == (
        1,
        "MemoryError: no rows",
        "a dispatch was given up before its rows were received, so this rank is out of step with the others",
    )
    number, first, _ = one
    assert number in (1, 2)
    assert first.startswith("RankLost: rank 0 takes no part any more")


def test_one_rank_with_sizes_that_cannot_be_ends_it_for_all() -> None:
    """The others waited in all_gather for a rank that had raised."""
    found = run(2, "join_only", [Sizes(2, 8, 2, 16), Sizes(2, 8, 33, 16)])
    assert found[1] == ("ValueError", "top_k is 33, and has to be 1 to 32")
    assert found[0][0] == "NotJoined"
    assert "rank 1 cannot: top_k is 33" in found[0][1]


@pytest.mark.parametrize(
    ("more", "kind", "why"),
    [
        ({"layout": "rows"}, "ValueError", "rank 1 cannot: layout is experts, masked or tokens"),
        ({"experts": 8.0}, "ValueError", "rank 1 cannot: experts is 8.0, and has to be a whole number"),
        ({"num_sms": 4}, "ValueError", "rank 1 cannot: num_sms is for GPUs"),
        ({"device": "tpu"}, "ValueError", "rank 1 cannot: device is cpu, cuda or cuda:N, and not 'tpu'"),
        ({"cast": "fp8"}, "ValueError", "rank 1 cannot: hidden is 16, and has no whole blocks"),
        ({"exact": False}, "NotJoined", "exact is True here and False at rank 1"),
        ({"dtype": "float32"}, "NotJoined", "dtype is bfloat16 here and float32 at rank 1"),
        ({"hidden": 24}, "NotJoined", "hidden is 16 here and 24 at rank 1"),
    ],
)
def test_an_argument_of_one_rank_ends_it_for_all(more: dict[str, Any], kind: str, why: str) -> None:
    """Its own error came before it had told the others anything: they waited for it, or joined it."""
    found = run(2, "join_with", [{}, more])
    assert [name for name, _ in found] == ["NotJoined", kind], found
    assert why in found[0][1]


def test_ranks_that_cast_otherwise_do_not_join() -> None:
    found = run(2, "join_with", [{"hidden": 512, "cast": cast} for cast in ("fp8", "fp8_pow2")])
    assert "cast is fp8 here and fp8_pow2 at rank 1" in found[0][1]


def alone(**more: Any) -> moe.AllToAll:
    settings = {"experts": 4, "top_k": 2, "max_tokens": 3, "hidden": 8, "dtype": "float32"}
    return moe.AllToAll(moe.Group(0, 1, lambda told: [told]), **(settings | more))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"top_k": 33}, "top_k is 33, and has to be 1 to 32"),
        ({"hidden": 3, "row_bytes": 16}, "hidden is 3: a row of combine has 12 bytes"),
        ({"row_bytes": 24}, "row_bytes is 24, and has to be a multiple of 16"),
        ({"dtype": "int8"}, "dtype is bfloat16, float16 or float32"),
        ({"timeout": 0}, "timeout has to be above 0"),
        ({"experts": -1}, "experts is -1"),
        ({"max_tokens": 1 << 64}, "max_tokens is 18446744073709551616, and has to be 0 to"),
        ({"device": "cuda:"}, "device is cpu, cuda or cuda:N, and not 'cuda:'"),
        ({"device": "cuda", "num_sms": 0}, "num_sms is 0, and has to be at least 1"),
        ({"timeout": float("nan")}, "timeout has to be above 0"),
        ({"layout": "rows"}, "layout is experts, masked or tokens, and not 'rows'"),
        ({"layout": "masked", "alignment": 8}, "alignment is for the layout experts"),
        ({"capacity": 3}, "capacity is for the layout masked on CPUs, and the layout is experts"),
        ({"layout": "masked", "capacity": 0}, "capacity is 0, and has to be 1 to"),
        ({"layout": "masked", "capacity": 1 << 30}, "a rank might receive 4294967296 rows"),
        ({"alignment": 1 << 16, "experts": 1 << 16}, "a rank might receive 4294967302 rows"),
    ],
)
def test_sizes_that_cannot_be_are_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        alone(**more)


def arrays(tokens: int = 1, **more: Any) -> dict[str, Any]:
    made = {
        "x": np.ones((tokens, 8), np.float32),
        "ids": np.zeros((tokens, 2), np.int64),
        "weights": np.ones((tokens, 2), np.float32),
    }
    return made | more


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            arrays(ids=np.array([[0, 4]])),
            "token 0 wants expert 4 as its number 1: experts are 0 to 3, and -1 is none",
        ),
        (arrays(ids=np.array([[0, -2]])), "wants expert -2"),
        (arrays(ids=np.zeros((1, 2))), "ids are float64, and have to be integers"),
        (arrays(ids=np.zeros((1, 3), np.int32)), r"ids is \[1, 3\], and has to be \[1, 2\]"),
        (arrays(weights=np.ones((1, 2))), "weights are float64, and have to be float32"),
        (
            arrays(x=np.ones((1, 7), np.float32)),
            r"x is \[1, 7\] of float32, and has to be 1 rows of 32 bytes",
        ),
        (arrays(x=np.ones((2, 8), np.float32)[:, ::2]), "x is not contiguous"),
        (arrays(4), r"4 tokens, and room for 3 \(max_tokens\)"),
        (arrays(ids=np.array([[2**64 - 1, 0]], np.uint64)), "ids are uint64"),
        (arrays(x=[[1.0] * 8]), "x is a list, and has to be a tensor or an array"),
        (arrays(x=np.ones((1, 4), object)), "x has objects of Python"),
        (arrays(scales=np.ones((1, 4), np.uint8)), "scales of 0 bytes a row"),
    ],
)
def test_wrong_arguments_are_refused_and_the_next_call_works(given: dict[str, Any], why: str) -> None:
    with alone() as one:
        with pytest.raises(ValueError, match=why):
            one.dispatch(**given)
        assert one.dispatch(**arrays()).counts.tolist() == [2, 0, 0, 0]


def test_a_result_is_combined_once_with_rows_of_its_size() -> None:
    nothing: Any = None
    with alone() as one, alone() as other:
        got = one.dispatch(**arrays())
        with pytest.raises(ValueError, match=r"y is \[1, 8\] of float32, and has to be \[2, 8\]"):
            one.combine(got.rows[:1], got)
        with pytest.raises(ValueError, match=r"y is \[2, 8\] of float64"):
            one.combine(got.rows.astype(np.float64), got)
        assert one.combine(got.rows, got).tolist() == [[2.0] * 8]
        with pytest.raises(ValueError, match="combined before"):
            one.combine(got.rows, got)
        theirs = other.dispatch(**arrays())
        with pytest.raises(ValueError, match="of another all-to-all"):
            one.combine(theirs.rows, theirs)
        # The weights of a combine that was refused were kept.
        with pytest.raises(ValueError, match="of another all-to-all"):
            one.combine(theirs.rows, theirs, weights=np.full((1, 2), 9, np.float32))
        assert other.combine(theirs.rows, theirs).tolist() == [[2.0] * 8]
        with pytest.raises(ValueError, match="received is a NoneType"):
            one.combine(got.rows, nothing)


def test_rows_of_a_host_have_no_room_to_cut() -> None:
    """The padding behind the last expert went, and combine missed it."""
    with alone(alignment=4) as one:
        got = one.dispatch(**arrays(3))
        assert len(got.rows) == 8
        cut = got.trimmed()
        assert one.combine(cut.rows, cut).tolist() == [[2.0] * 8] * 3


def test_weights_come_once_and_where_they_are_used() -> None:
    with alone() as one, alone(layout="tokens") as by_token:
        got = one.dispatch(**arrays(weights=None))
        twos = np.full((1, 2), 2, np.float32)
        refused = {
            "this dispatch had no weights": {},
            "this dispatch had no weights: give them to it": {"reduced": True},
            "combine takes weights only for exact sums": {"reduced": True, "weights": twos},
            r"weights is \[1, 1\], and has to be \[1, 2\]": {"weights": twos[:, :1]},
            "weights are float64": {"weights": twos.astype(np.float64)},
        }
        for why, given in refused.items():
            with pytest.raises(ValueError, match=why):
                one.combine(got.rows, got, **given)
        assert one.combine(got.rows, got, weights=twos).tolist() == [[4.0] * 8]
        got = by_token.dispatch(**arrays(weights=None))
        assert got.weights is None
        with pytest.raises(ValueError, match="combine takes weights only for exact sums"):
            by_token.combine(got.rows, got, weights=twos)
        assert by_token.combine(got.rows, got).tolist() == [[1.0] * 8]


def test_a_third_dispatch_waits_for_the_first_to_be_combined_or_dropped() -> None:
    with alone() as one:
        first, second = one.dispatch(**arrays()), one.dispatch(**arrays())
        with pytest.raises(ValueError, match="two dispatches are neither combined nor given up"):
            one.dispatch(**arrays())
        one.combine(second.rows, second)
        one.combine(first.rows, first)
        third, fourth = one.dispatch(**arrays()), one.dispatch(**arrays())
        third.give_up()
        one.dispatch(**arrays())
        with pytest.raises(ValueError, match="combined before, or given up"):
            one.combine(third.rows, third)
        one.combine(fourth.rows, fourth)
        assert one.stats().dispatches == 5


def test_a_closed_one_says_so_and_an_all_gather_that_fails_is_raised() -> None:
    one = alone()
    one.close()
    with pytest.raises(ValueError, match="this all-to-all is closed"):
        one.dispatch(**arrays())

    def fails(told: bytes) -> list[bytes]:
        raise ConnectionError("the switch is gone")

    with pytest.raises(ConnectionError, match="the switch is gone"):
        moe.AllToAll(moe.Group(0, 1, fails), experts=1, top_k=1, max_tokens=1, hidden=8)
    # Others' bytes, once.
    answers = iter([[b"garbage"]])
    garbled = moe.Group(0, 1, lambda told: next(answers, [told]))
    with pytest.raises(moe.NotJoined, match="bytes for rank 0 that are not of this kvlane"):
        moe.AllToAll(garbled, experts=1, top_k=1, max_tokens=1, hidden=8)
