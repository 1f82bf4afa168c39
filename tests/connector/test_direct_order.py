"""The order of a hand-off's blocks, and the memory in which the blocks of all groups lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import full_group, window_group
from hypothesis import given
from hypothesis import strategies as some

from kvlane.connector.direct_order import Order, Part, shared_memory
from kvlane.connector.groups import CHUNKS, STATE, CacheGroup, Unsupported
from kvlane.connector.layout import GroupLayout
from kvlane.connector.shard_layout import ShardLayout

WINDOW = window_group(1, 2, 8)
STATES = replace(window_group(2, 1, 16), kind=STATE)
IN_CHUNKS = replace(window_group(1, 4, 4), kind=CHUNKS, window=16)


def spelled(order: Order, prompt: int) -> list[tuple[int, int]]:
    """Each place's group and block, as they follow from the docs alone."""
    found = [order.at(prompt, place) for place in range(order.count(prompt))]
    return [(each[0].index, each[1]) for each in found if each is not None]


@pytest.mark.parametrize(
    ("groups", "prompt", "places"),
    [
        ([full_group(0, 4)], 10, [(0, 0), (0, 1), (0, 2)]),
        ([full_group(0, 4)], 8, [(0, 0), (0, 1)]),
        # Hits end at a block's end of every group, before the last token.
        ([full_group(0, 4), WINDOW], 33, [*((0, block) for block in range(8)), (1, 2), (1, 3)]),
        ([full_group(0, 4), WINDOW], 32, [*((0, block) for block in range(6)), (1, 1), (1, 2)]),
        ([full_group(0, 4), WINDOW], 9, [(0, 0), (0, 1), (1, 0)]),
        ([full_group(0, 4), WINDOW], 8, []),
        (
            [full_group(0, 4), WINDOW, STATES],
            40,
            [*((0, block) for block in range(8)), (1, 2), (1, 3), (2, 1)],
        ),
        # Tokens see only the present chunk.
        ([full_group(0, 4), IN_CHUNKS], 31, [*((0, block) for block in range(7)), (1, 4), (1, 5), (1, 6)]),
        ([full_group(0, 4), IN_CHUNKS], 33, [(0, block) for block in range(8)]),
    ],
)
def test_which_blocks_are_handed_over_and_in_which_order(
    groups: list[CacheGroup], prompt: int, places: list[tuple[int, int]]
) -> None:
    order = Order(groups, True)
    assert spelled(order, prompt) == places
    assert order.at(prompt, len(places)) is None and order.at(prompt, 1 << 40) is None


@given(some.integers(1, 2000), some.integers(1, 9), some.sampled_from([4, 8, 16]))
def test_parts_follow_each_other_and_hold_blocks_of_the_prompt(prompt: int, blocks: int, size: int) -> None:
    order = Order([full_group(0, 4), window_group(1, blocks, size), STATES], True)
    place = 0
    for part in order.parts(prompt):
        assert part.place == place and 0 <= part.first <= part.end
        assert part.end * part.group.tokens_per_block == order.tokens(prompt) < prompt
        place = part.end_place
    assert place == order.count(prompt)


def test_with_a_drafter_and_one_group_the_last_tokens_stay() -> None:
    assert Order([full_group(0, 4)], False).parts(10) == [Part(full_group(0, 4), 0, 2, 0)]


@pytest.mark.parametrize("groups", [[WINDOW], [full_group(0), full_group(1)]])
def test_a_model_needs_one_group_with_full_attention(groups: list[CacheGroup]) -> None:
    with pytest.raises(Unsupported, match="one KV cache group"):
        Order(groups, True)


def layout(base: int, names: str, step: int = 1 << 20, lengths: tuple[int, ...] = (64, 64)) -> GroupLayout:
    """A region a layer, with a piece of each length; a block has 128 bytes."""
    offsets = [sum(lengths[:place]) for place in range(len(lengths))]
    regions = [(base + number * step, 128, 10, lengths[0], offsets) for number in range(len(names))]
    last = {f"layers.{name}": number for number, name in enumerate(names)}
    return GroupLayout(regions, ShardLayout(0, 1, 1, 1, ()), 128, last, 1, 1)


def test_one_group_is_as_it_is() -> None:
    only = layout(0, "01")
    assert shared_memory([only]).regions is only.regions
    assert shared_memory([only]).digest == only.digest


def test_groups_share_each_tensor_which_is_complete_with_its_last_layer() -> None:
    """A window's layers 0, 2 and 4, and full attention's 1 and 3: the last tensor has one layer."""
    memory = shared_memory([layout(4096, "024"), layout(4096, "13")])
    starts = [4096 + number * (1 << 20) + half for number in range(3) for half in (0, 64)]
    assert [region[0] for region in memory.regions] == starts
    assert all(region[1:] == (128, 10, 64, [0]) for region in memory.regions)
    assert memory.last_region == {"layers.1": 1, "layers.3": 3, "layers.4": 5}
    elsewhere = shared_memory([layout(1 << 30, "024", 1 << 16), layout(1 << 30, "13", 1 << 16)])
    assert elsewhere.digest == memory.digest


def test_a_state_and_attention_that_cut_a_page_otherwise_are_one_piece() -> None:
    memory = shared_memory([layout(0, "0", lengths=(96,)), layout(0, "1", lengths=(64, 64))])
    assert memory.regions == [(0, 128, 10, 128, [0])]


@pytest.mark.parametrize("other", [layout(0, "13"), layout(4096, "31"), layout(4096, "1")])
def test_other_layers_in_a_tensor_are_another_meaning(other: GroupLayout) -> None:
    """Bytes of one layer would be read into another one's."""
    memory = shared_memory([layout(4096, "024"), layout(4096, "13")])
    assert shared_memory([layout(4096, "024"), other]).digest != memory.digest


def test_groups_with_blocks_of_different_sizes_in_the_same_bytes_are_refused() -> None:
    other = layout(0, "1")
    other.regions[0] = (0, 256, 5, 64, [0, 64])
    with pytest.raises(Unsupported, match="different sizes"):
        shared_memory([layout(0, "0"), other])
