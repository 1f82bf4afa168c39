"""What the connector reads of vLLM's objects is there in the vLLM that is installed."""

from __future__ import annotations

import inspect
import re

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core import block_pool, kv_cache_manager, kv_cache_utils
from vllm.v1.core.sched import output
from vllm.v1.request import Request

from kvlane.connector import capabilities, vllm_protocols

pytestmark = pytest.mark.old_vllm

CLASSES = {
    vllm_protocols.LoraRequest: LoRARequest,
    vllm_protocols.Feature: MultiModalFeatureSpec,
    vllm_protocols.Request: Request,
    vllm_protocols.Block: kv_cache_utils.KVCacheBlock,
    vllm_protocols.AllocatedBlocks: kv_cache_manager.KVCacheBlocks,
    vllm_protocols.BlockPool: block_pool.BlockPool,
    vllm_protocols.LandingPool: block_pool.BlockPool,
    vllm_protocols.FreeBlock: kv_cache_utils.KVCacheBlock,
    vllm_protocols.FreeBlockQueue: kv_cache_utils.FreeKVCacheBlockQueue,
    vllm_protocols.NewRequest: output.NewRequestData,
    vllm_protocols.CachedRequests: output.CachedRequestData,
    vllm_protocols.SchedulerOutput: output.SchedulerOutput,
}


def members(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


def names_of(made: type) -> set[str]:
    """Members of a class: methods, properties, fields, and what `__init__` sets."""
    names = set(dir(made))
    for each in made.__mro__:
        names |= set(getattr(each, "__annotations__", ()))
    return names | set(re.findall(r"self\.(\w+)\b[^=\n(]*=", inspect.getsource(made)))


@pytest.mark.parametrize("protocol", CLASSES, ids=lambda protocol: protocol.__name__)
def test_vllm_has_what_the_connector_reads(protocol: type) -> None:
    assert members(protocol), "a protocol without members says nothing"
    assert members(protocol) <= names_of(CLASSES[protocol])


def test_the_state_of_blocks_is_shown_where_failed_requests_are_reported() -> None:
    """Both came with 0.30; before it the connector follows the scheduler's messages."""
    shown = "kv_connector_block_state" in names_of(output.SchedulerOutput)
    assert shown == capabilities.reports_failed_requests()
    if shown:
        assert members(vllm_protocols.BlockState) <= names_of(output.KVConnectorBlockState)


def test_what_only_some_versions_have_is_called_so_in_this_one() -> None:
    assert {"mm_features", "skip_reading_prefix_cache"} <= names_of(Request)


def test_every_protocol_is_compared() -> None:
    protocols = {
        made
        for made in vars(vllm_protocols).values()
        if getattr(made, "_is_protocol", False) and made.__module__ == vllm_protocols.__name__
    }
    assert protocols == {*CLASSES, vllm_protocols.BlockState}
