"""What is told of a rank's part of a block, and that its digest stays the one under which blocks are stored already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensors import Tensor, strided

from kvlane.connector.axes import KERNEL_BLOCKS, NO_FACTS, LayerFacts, dimensions, layer_facts
from kvlane.connector.cross_layers import layer_caches
from kvlane.connector.groups import CacheGroup
from kvlane.connector.layout import GroupLayout, LayerHint, group_layout
from kvlane.connector.shard_layout import Dimension, Heads, LayerLayout, ShardLayout

LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(12)]
ATTENTION = LayerFacts(tokens=16, heads=Heads(8, 128, (0, 8)))
NAMED = LayerFacts(tokens=16, heads=Heads(8, 128, (0, 8)), is_named=True)
LATENT = LayerFacts(tokens=16, heads=Heads(1, 576, (0, 1)))
STATE = LayerFacts(tokens=528, is_state=True)


def layout(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    facts: LayerFacts = NO_FACTS,
    *,
    dtype: str = "float16",
    backend: str = "",
    names: list[str] = LAYERS,
    cut: tuple[int, int, int] = (0, 1, 1),
    ranks: int = 1,
) -> GroupLayout:
    hints = {name: LayerHint(backend=backend) for name in names}
    caches = {name: Tensor(strided(shape, order, dtype)) for name in names}
    return group_layout(caches, names, 7, hints, cut, ranks, dict.fromkeys(names, facts))


def states() -> GroupLayout:
    raw = np.arange(7 * 16, dtype="float32").reshape(7, 16)
    parts = [Tensor(raw[:, :4]), Tensor(raw[:, 4:12].reshape(7, 2, 4))]
    return group_layout({"m": parts}, ["m"], 7, {}, [0, 1, 1], facts={"m": STATE})


def dimensions_of(made: GroupLayout, layer: int = 0) -> list[tuple[str, int]]:
    return [(each.axis, each.size) for each in made.shard.layers[layer].dimensions]


# As the release before descriptions made them: blocks on an SSD are found by these.
STORED = {
    "heads before tokens": (
        layout((7, 8, 16, 256), (0, 1, 2, 3), NAMED, backend="FLASH_ATTN", cut=(1, 2, 1)),
        "755275641590b10c5eb89fb5816873a8",
    ),
    "tokens before heads": (
        layout((7, 2, 16, 8, 128), (0, 1, 2, 3, 4), ATTENTION, backend="FLASHINFER"),
        "eae33228d99eca7e497b503ff9ed473a",
    ),
    "latent, in four ranks of a second stage": (
        layout((7, 16, 576), (0, 1, 2), LATENT, backend="FLASHMLA", cut=(5, 4, 2), ranks=4),
        "c7d87a68830015a7df64990d6af87652",
    ),
    "kernel blocks": (
        layout((28, 4, 8, 64), (0, 2, 1, 3), names=LAYERS[:1], dtype="uint8"),
        "cc9e91480d7bd844122fc6877be8cb6e",
    ),
    "states": (states(), "2773652d62a1c2814732e4c9d5ca2601"),
}


@pytest.mark.parametrize(("made", "digest"), STORED.values(), ids=STORED.keys())
def test_blocks_that_are_stored_are_found_by_the_same_digest(made: GroupLayout, digest: str) -> None:
    assert made.digest.hex() == digest


def test_each_dimension_has_its_name() -> None:
    by_name = layout((7, 8, 16, 256), (0, 2, 1, 3), NAMED)
    assert dimensions_of(by_name) == [("token", 16), ("head", 8), ("content", 256)]
    assert dimensions_of(layout((7, 2, 16, 8, 128), (0, 1, 2, 3, 4), ATTENTION)) == [
        ("half", 2),
        ("token", 16),
        ("head", 8),
        ("content", 128),
    ]
    assert dimensions_of(layout((7, 16, 576), (0, 1, 2), LATENT)) == [("token", 16), ("content", 576)]
    assert (dimensions_of(states(), 0), dimensions_of(states(), 1)) == (
        [("state", 4)],
        [("state", 2), ("state", 4)],
    )
    assert [(each.name, each.part) for each in states().shard.layers] == [("m", 0), ("m", 1)]
    in_four = layout((28, 8, 4, 128), (0, 1, 2, 3), ATTENTION)
    assert dimensions_of(in_four) == [("kernel block", 4), ("head", 8), ("token", 4), ("content", 128)]


def test_dimensions_that_could_be_two_things_stay_untold() -> None:
    sixteen_heads = LayerFacts(tokens=16, heads=Heads(16, 128))
    assert dimensions_of(layout((7, 16, 16, 128), (0, 1, 2, 3), sixteen_heads)) == [
        ("untold", 16),
        ("untold", 16),
        ("content", 128),
    ]
    two_heads = LayerFacts(tokens=16, heads=Heads(2, 128))
    assert dimensions_of(layout((2, 7, 16, 2, 128), (0, 1, 2, 3, 4), two_heads))[0] == ("untold", 2)
    # A backend that folds tokens and heads into one dimension.
    assert dimensions_of(layout((7, 2, 16 * 8 * 128), (0, 1, 2), ATTENTION)) == [
        ("half", 2),
        ("untold", 16384),
    ]
    assert dimensions_of(layout((7, 8, 16, 256), (0, 1, 2, 3))) == [
        ("untold", 8),
        ("untold", 16),
        ("untold", 256),
    ]
    # From the version on that promises an order, sizes do not matter.
    named = LayerFacts(tokens=16, heads=Heads(16, 128), is_named=True)
    assert dimensions_of(layout((7, 16, 16, 256), (0, 2, 1, 3), named)) == [
        ("token", 16),
        ("head", 16),
        ("content", 256),
    ]


def test_layers_between_each_others_heads_are_one_that_tells_so() -> None:
    """One tensor of three layers, heads outside of them."""
    memory = np.zeros((7, 8, 3, 16, 256), dtype="int16")
    names = LAYERS[:3]
    caches = layer_caches(Tensor(memory), (1, 3, 0, 2, 4), [[name] for name in names], 7)
    made = group_layout(caches, names, 7, {}, [0, 1, 1], facts=dict.fromkeys(names, ATTENTION))
    assert dimensions_of(made) == [("head", 8), ("layer", 3), ("token", 16), ("content", 256)]
    assert [layer.name for layer in made.shard.layers] == names[:1]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    order=st.permutations(range(4)),
    heads=st.integers(1, 4),
    is_named=st.booleans(),
)
def test_what_is_told_besides_changes_no_digest(
    sizes: list[int], order: list[int], heads: int, is_named: bool
) -> None:
    facts = LayerFacts(tokens=sizes[0], heads=Heads(heads, 4), is_named=is_named)
    shape = (7, *sizes)
    plain, described = (layout(shape, tuple(order), each, names=LAYERS[:2]) for each in (NO_FACTS, facts))
    assert plain.digest == described.digest
    assert [layer.heads for layer in described.shard.layers] == [facts.heads] * 2
    of_both = [[size for _, size in dimensions_of(each)] for each in (plain, described)]
    assert of_both[0] == of_both[1]


@pytest.mark.parametrize(
    "change",
    [
        {"index": 1, "tensor_parallel": 2},
        {"holders": 2, "tensor_parallel": 2},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"name": "l.1"},
        {"part": 1},
        {"dtype": "torch.float16"},
        {"element_bytes": 4},
        {"backend": "OTHER"},
        {"dimensions": (Dimension("head", 1, 8),)},
        {"dimensions": (Dimension("head", 0, 4),)},
        {"dimensions": (Dimension("kernel block", None, 8),)},
    ],
)
def test_other_bytes_have_another_digest(change: dict[str, Any]) -> None:
    def digest(change: dict[str, Any]) -> bytes:
        layer: dict[str, Any] = {
            "name": "l.0",
            "part": 0,
            "dtype": "torch.bfloat16",
            "element_bytes": 2,
            "backend": "FLASH_ATTN",
            "dimensions": (Dimension("head", 0, 8),),
        }
        shard: dict[str, Any] = {"index": 0, "holders": 1, "tensor_parallel": 1, "pipeline_parallel": 1}
        layer |= {key: value for key, value in change.items() if key in layer}
        shard |= {key: value for key, value in change.items() if key in shard}
        return ShardLayout(**shard, layers=(LayerLayout(**layer),)).digest()

    assert digest({}) == digest({})
    assert digest({}) != digest(change)


def test_ranks_that_share_blocks_tell_the_same() -> None:
    first, second, third = (
        layout((7, 16, 576), (0, 1, 2), LATENT, cut=(rank, 2, 2), ranks=2).shard for rank in (0, 1, 2)
    )
    assert first == second
    assert (first.index, first.holders, third.index) == (0, 2, 1)


def facts_of(
    rank: int,
    tensor: int,
    spec: Any,
    *,
    usual: int = 0,
    shards: int | None = None,
    drafter: object = None,
    kind: str = "full_attention",
) -> LayerFacts:
    parallel = SimpleNamespace(rank=rank, tensor_parallel_size=tensor)
    model = SimpleNamespace(get_num_kv_heads=lambda parallel: usual)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=model, speculative_config=drafter)
    group: CacheGroup = CacheGroup(
        index=0,
        group_id=0,
        kind=kind,
        window=0,
        tokens_per_block=16,
        window_blocks=0,
        dtype="torch.bfloat16",
        is_draft=False,
        layer_names=("l.0",),
        tensor_shards=shards,
    )
    groups: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    return layer_facts(config, groups, [group], is_named=False)["l.0"]


def attention(heads: int, size: int = 128) -> Any:
    return SimpleNamespace(block_size=16, num_kv_heads=heads, head_size=size)


@pytest.mark.parametrize(
    ("facts", "heads"),
    [
        (facts_of(0, 1, attention(8)), Heads(8, 128, (0, 8))),
        (facts_of(3, 4, attention(2), usual=2), Heads(2, 128, (6, 8))),
        # The second stage of a pipeline begins with the first head again.
        (facts_of(4, 4, attention(2), usual=2), Heads(2, 128, (0, 8))),
        # One latent vector in all ranks, and two of which each is in two ranks.
        (facts_of(3, 4, attention(1, 576), usual=1, shards=1), Heads(1, 576, (0, 1))),
        (facts_of(2, 4, attention(1, 576), usual=1, shards=2), Heads(1, 576, (1, 2))),
        # A head of its own, or a copy of one that other ranks have too.
        (facts_of(3, 4, attention(1), usual=1), Heads(1, 128)),
        # A layer that is not split as the model is, and one that may be a drafter's.
        (facts_of(3, 4, attention(8), usual=2), Heads(8, 128)),
        (facts_of(3, 4, attention(2), usual=2, drafter=object()), Heads(2, 128)),
    ],
)
def test_heads_are_placed_where_that_is_certain(facts: LayerFacts, heads: Heads) -> None:
    assert (facts.heads, facts.tokens, facts.is_state) == (heads, 16, False)


def test_states_have_no_heads() -> None:
    spec = SimpleNamespace(block_size=528, shapes=((4,),))
    facts = facts_of(0, 2, spec, kind="mamba")
    assert (facts.heads, facts.tokens, facts.is_state) == (None, 528, True)


def test_layers_of_one_group_with_specifications_of_their_own() -> None:
    spec = SimpleNamespace(block_size=16, kv_cache_specs={"l.0": attention(4, 64)})
    assert facts_of(0, 1, spec).heads == Heads(4, 64, (0, 4))


def test_kernel_blocks_have_no_index() -> None:
    made = dimensions([(KERNEL_BLOCKS, 4), (0, 8), (1, 3), (2, 128)], 4, ATTENTION)
    assert made[0] == Dimension("kernel block", None, 4)
    assert made[1:] == (Dimension("head", 0, 8), Dimension("untold", 1, 3), Dimension("content", 2, 128))
