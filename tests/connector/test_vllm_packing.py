"""The name of a layer's attention backend says how it packs keys and values; no engine is started."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvlane.connector.groups import Unsupported
from kvlane.connector.packing import backend_name

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
CONFIG: Any = SimpleNamespace(
    model_config=SimpleNamespace(dtype=torch.bfloat16),
    cache_config=SimpleNamespace(cache_dtype="auto"),
    parallel_config=SimpleNamespace(decode_context_parallel_size=1),
)


def name_of_cpu_backend() -> str:
    return backend_name(cpu_attn.CPUAttentionBackend, CONFIG, SPEC)


@contextmanager
def choosing(choose: Callable[..., str]) -> Iterator[None]:
    """A choice of packing with the parameters of vLLM's own function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attn, "_get_attn_isa", functools.wraps(cpu_attn._get_attn_isa)(choose))
        yield


def test_each_packing_has_a_backend_name_of_its_own() -> None:
    names = set()
    for packing in ("amx", "vec"):
        with choosing(lambda *_, packing=packing, **__: packing):
            names.add(name_of_cpu_backend())
    assert names == {"CPU_ATTN/amx", "CPU_ATTN/vec"}


def test_a_vllm_that_does_not_tell_its_packing_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda dtype, weather: "vec")
    with pytest.raises(Unsupported, match="by dtype, weather, not all"):
        name_of_cpu_backend()
    monkeypatch.delattr(cpu_attn, "_get_attn_isa")
    with pytest.raises(Unsupported, match="does not tell how its attention backend CPU_ATTN packs"):
        name_of_cpu_backend()


def test_backends_whose_dimensions_say_all_keep_their_names() -> None:
    """Engines on GPUs still find the blocks that they stored before packings had names."""

    class Backend:
        @staticmethod
        def get_name() -> str:
            return "FLASH_ATTN"

    assert backend_name(Backend, CONFIG, SPEC) == "FLASH_ATTN"
    assert backend_name(None, CONFIG, SPEC) == ""


def test_the_same_keys_and_values_are_other_bytes() -> None:
    """The reason for the packing's name: one shape, two orders. The kernel packs for AMX on any processor."""
    current_platform.import_kernels()
    keys, values = torch.randn(2, 32, 2, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    packed = []
    for packing in ("amx", "vec"):
        cache = torch.zeros(2, 1, 2, 32, 64, dtype=torch.bfloat16)
        cpu_attn.ops.cpu_attn_reshape_and_cache(keys, values, *cache, torch.arange(32), packing)
        packed.append(cache)
    assert not torch.equal(*packed)
    assert torch.equal(*(each.flatten().sort().values for each in packed)), "the numbers are the same"
