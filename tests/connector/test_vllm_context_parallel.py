"""Ranks that share the tokens of each block (decode context parallelism), as vLLM's own classes describe them, and in a
real engine, whose attention for it on CPUs is the tests' own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from context_parallel_engine import found
from context_parallel_on_cpu import SPOIL, SPOILS, install
from script_with_vllm import result_of
from stores import DaemonStore
from tiny_model import build_tiny_model
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec

from kvlane.connector.capabilities import context_ranks, reports_failed_requests
from kvlane.connector.groups import CacheGroup, Unsupported, cache_groups
from kvlane.connector.packing import backend_name

DEALS_BY_LAYER = hasattr(FullAttentionSpec, "dcp_sharded")


def full(heads: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16)


def latent() -> MLAAttentionSpec:
    arguments: dict[str, Any] = {"max_tp_shards": 1} if hasattr(MLAAttentionSpec, "max_tp_shards") else {}
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, **arguments)


def config(tensor: int, ranks: int, **parallel: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor,
            decode_context_parallel_size=ranks,
            **{"prefill_context_parallel_size": 1, "cp_kv_cache_interleave_size": 1, **parallel},
        ),
        model_config=SimpleNamespace(use_mla=True, dtype=torch.bfloat16),
        cache_config=SimpleNamespace(
            block_size=16,
            enable_prefix_caching=True,
            prefix_match_unit=None,
            hash_block_size=None,
            cache_dtype="auto",
        ),
        kv_transfer_config=object(),
    )


def groups(vllm: Any, *specs: Any) -> list[CacheGroup]:
    of_vllm = [KVCacheGroupSpec([f"{number}"], spec) for number, spec in enumerate(specs)]
    return cache_groups(vllm, SimpleNamespace(kv_cache_groups=of_vllm))  # pyright: ignore[reportArgumentType]


@pytest.mark.old_vllm
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_block_has_the_tokens_that_vllm_hashes_for_it(ranks: int) -> None:
    vllm = config(4, ranks)
    for spec in (full(), latent()):
        (group,) = groups(vllm, spec)
        of_vllm: Any = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
        assert (group.tokens_per_block,) * 2 == resolve_kv_cache_block_sizes(of_vllm, vllm)


@pytest.mark.old_vllm
def test_ranks_that_share_a_block_hold_no_copies() -> None:
    assert groups(config(4, 1), latent())[0].tensor_shards == 1
    # With two of four, ranks 0 and 2 hold the same, but are no neighbours.
    assert [groups(config(4, ranks), latent())[0].tensor_shards for ranks in (2, 4)] == [None, None]


@pytest.mark.skipif(not DEALS_BY_LAYER, reason="in this vLLM all layers have their tokens dealt")
def test_layers_that_keep_all_tokens_in_every_rank_have_blocks_of_usual_size() -> None:
    """Such as a drafter that runs without context parallelism."""
    alike = dataclasses.replace(latent(), dcp_sharded=False)
    found = groups(config(2, 2), full(), alike)
    assert [(each.tokens_per_block, each.tensor_shards) for each in found] == [(32, None), (16, 1)]


@pytest.mark.old_vllm
def test_states_are_whole_in_every_rank() -> None:
    """Versions that say nothing of it, too."""
    assert context_ranks(config(2, 2), cast("Any", SimpleNamespace(mamba_cache_mode="align"))) == 1
    assert context_ranks(config(2, 2), cast("Any", SimpleNamespace())) == 2


@pytest.mark.old_vllm
def test_engines_that_deal_tokens_in_another_way_have_other_layouts() -> None:
    class Backend:
        @staticmethod
        def get_name() -> str:
            return "FLASH_ATTN"

    names = [
        backend_name(Backend, vllm, full())
        for vllm in (
            config(4, 1),
            config(4, 2),
            config(4, 4),
            config(4, 2, cp_kv_cache_interleave_size=16),
        )
    ]
    assert names[0] == "FLASH_ATTN", "blocks that were stored before are found"
    assert len(set(names)) == len(names)
    assert names[3] == "FLASH_ATTN, 16 tokens x 2 ranks"
    # Workers deal by the newer name, before 0.30 even if the scheduler thinks otherwise.
    former = config(4, 2, dcp_kv_cache_interleave_size=8)
    assert backend_name(Backend, former, full()) == names[1]


@pytest.mark.old_vllm
def test_prefill_context_parallelism_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match="prefill_context_parallel_size is 2"):
        groups(config(2, 1, prefill_context_parallel_size=2), full())


# ---- In an engine ----


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DaemonStore]:
    made = DaemonStore(tmp_path)
    yield made
    made.close()


def with_plugin(folder: Path) -> dict[str, str]:
    path, spoil = install(folder), folder / "spoil"
    spoil.write_text("")
    return {"PYTHONPATH": path, SPOIL: str(spoil)}


def serve(tmp_path: Path, model: Path, name: str, store: DaemonStore, *more: str) -> dict[str, Any]:
    log = tmp_path / f"{name}.log"
    found: Any = result_of(
        "context_parallel_engine.py",
        *("--model", str(model), "--address", store.address, *more),
        log=log,
        environment=with_plugin(tmp_path / name),
    )
    lines = [line for line in log.read_text().splitlines() if "kvlane: " in line]
    assert not any("ERROR" in line for line in lines), lines
    return found


needs_newest = pytest.mark.skipif(
    not reports_failed_requests(), reason="the tests' attention is for a newer vLLM"
)
ONE_AT_A_TIME = ("--interleave", "1")


@needs_newest
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_blocks_come_back_to_all_ranks(tmp_path: Path, store: DaemonStore) -> None:
    """Each rank's part of each block counts: without that of the second one, or with the two exchanged, the answers are
    others."""
    model = build_tiny_model(tmp_path / "model", kv_heads=1)
    result = serve(tmp_path, model, "engine", store, *ONE_AT_A_TIME, "--spoil", *SPOILS)
    cold, warm, spoilt = result["cold"], result["warm"], result["spoilt"]
    # The last two begin as the first does.
    assert cold["cached"] == [0] * (len(found()) - 2) + [128, 128]
    assert len({tuple(each) for each in cold["answers"]}) == len(found())
    assert warm == {"answers": cold["answers"], "cached": found()}
    assert len(spoilt) == len(SPOILS)
    for each in spoilt:
        pairs = zip(each["answers"], cold["answers"], each["cached"], strict=True)
        assert all(other != right for other, right, tokens in pairs if tokens)


@needs_newest
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_what_one_engine_computed_is_a_hit_for_those_that_deal_tokens_alike(
    tmp_path: Path, store: DaemonStore
) -> None:
    model = build_tiny_model(tmp_path / "model", kv_heads=1)
    first = serve(tmp_path, model, "first", store, *ONE_AT_A_TIME)
    again = serve(tmp_path, model, "restarted", store, *ONE_AT_A_TIME, "--once")
    assert again["cold"] == first["warm"] == {"answers": first["cold"]["answers"], "cached": found()}
    # What others store is another layout.
    other = serve(tmp_path, model, "other", store, "--interleave", "16")
    assert (other["cold"], other["warm"]) == (first["cold"], first["warm"])


@needs_newest
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_prompts_are_handed_over_directly(tmp_path: Path, runtime_folder: None) -> None:
    model = build_tiny_model(tmp_path / "model", kv_heads=1)
    arguments = ("--model", str(model), "--folder", str(tmp_path), "--tensor", "2", "--context", "2")
    log = tmp_path / "engines.log"
    result = result_of("served_direct.py", *arguments, log=log, environment=with_plugin(tmp_path / "plugin"))
    assert result["landed"] == [[alone, 299] for alone in result["alone"]]
    assert len({tuple(alone) for alone in result["alone"]}) == 3
    assert result["counted"] == {"direct_landed": 3, "direct_landed_tokens": 900, "direct_fallbacks": 0}
