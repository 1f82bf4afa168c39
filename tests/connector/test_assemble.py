import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import window_group

from kvlane.connector.assemble import engine_id, group_name, holders
from kvlane.connector.groups import Unsupported, cache_groups


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


def test_context_parallel_engines_are_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match="decode_context_parallel_size is 2"):
        cache_groups(config("e", 1, 0, decode_context_parallel_size=2), None)
