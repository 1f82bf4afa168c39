import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import window_group
from tensors import Tensor

from kvlane.connector.assemble import awaited_regions, engine_id, group_name, holders, one_layer_ahead
from kvlane.connector.groups import STATE
from kvlane.connector.layout import GroupLayout, group_layout, reading_order


def config(engine: str, size: int, rank: int, **parallel: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id=engine),
        parallel_config=SimpleNamespace(data_parallel_size=size, data_parallel_rank=rank, **parallel),
        model_config=SimpleNamespace(model="org/Llama-3.1-8B"),
    )


def test_data_parallel_engines_have_names_of_their_own() -> None:
    assert engine_id(config("e", 1, 0)) == "e"
    assert engine_id(config("e", 2, 1)) == "e_dp1"
    assert engine_id(config("e_dp1", 2, 1)) == "e_dp1", "vLLM has named it already"


def test_a_group_is_named_for_people() -> None:
    name = group_name(config("e", 1, 0), window_group(0, 2))
    assert name == "Llama-3.1-8B f32 4 tokens window 6"


@pytest.mark.parametrize(
    ("shards", "tensor", "expected"), [(1, 4, 4), (2, 4, 2), (None, 4, 1), (3, 4, 1), (1, 1, 1)]
)
def test_ranks_that_hold_the_same_blocks(shards: int | None, tensor: int, expected: int) -> None:
    group = dataclasses.replace(window_group(0, 2), tensor_shards=shards)
    assert holders(group, SimpleNamespace(tensor_parallel_size=tensor)) == expected


def layers(*numbers: int) -> list[str]:
    return [f"model.layers.{number}.attn" for number in numbers]


def apart(*numbers: int) -> GroupLayout:
    """A region for each layer."""
    caches = {name: Tensor(np.zeros((7, 4, 8), "int16")) for name in layers(*numbers)}
    return group_layout(caches, caches, 7, {}, [0, 1, 1])


def test_loads_come_in_the_order_in_which_the_model_reads_its_layers_whichever_groups_they_are_of() -> None:
    window, full = apart(0, 1, 3, 4, 6, 9, 10), apart(2, 5, 11)
    assert reading_order([full, window]) == [[2, 5, 9], [0, 1, 3, 4, 6, 7, 8]], "layers 7 and 8 have no cache"
    memory = Tensor(np.zeros((7, 4, 8), "int16"))
    shared = group_layout(dict.fromkeys(layers(0, 3), memory), layers(0, 3), 7, {}, [0, 1, 1])
    assert reading_order([shared, apart(1, 2)]) == [[0], [1, 2]], "layer 3 reads what layer 0 has read"


def test_a_step_waits_layer_by_layer_unless_the_model_keeps_states() -> None:
    groups = [window_group(0, 0), window_group(1, 2)]
    made = [apart(1), apart(0, 2)]
    assert awaited_regions(groups, made) == dict(zip(layers(1, 0, 2), [(0, 0), (1, 0), (1, 1)], strict=True))
    states = dataclasses.replace(groups[1], kind=STATE)
    assert awaited_regions([groups[0], states], made) == {}


def test_each_layer_waits_for_the_next_one_in_the_models_order() -> None:
    regions = dict(zip(layers(10, 2, 0), [(0, 3), (0, 1), (0, 0)], strict=True))
    ahead = dict(zip(layers(10, 2, 0), [(0, 3), (0, 3), (0, 1)], strict=True))
    assert one_layer_ahead(regions) == (ahead, (0, 0))
    shared = dict(zip(layers(0, 1, 2), [(0, 0), (0, 1), (0, 0)], strict=True))
    assert one_layer_ahead(shared)[0] == dict(zip(layers(0, 1, 2), [(0, 1), (0, 1), (0, 0)], strict=True))
    assert one_layer_ahead({}) == ({}, None)
