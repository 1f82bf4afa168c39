"""What engines tell of their layouts, from Python to the daemon's log and `kvlane status`."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from processes import Daemon, run_kvlane, until

from kvlane import _core
from kvlane.connector.shard_layout import Dimension, Heads, LayerLayout, ShardLayout

NAMESPACE = bytes([3]) * 16


def layout(tensor_parallel: int) -> ShardLayout:
    """4096 bytes a block: a rank's part of 8 heads, of as many layers as fill them."""
    heads = 8 // tensor_parallel
    dimensions = (Dimension("head", 0, heads), Dimension("token", 1, 16), Dimension("content", 2, 16))
    layers = tuple(
        LayerLayout(
            f"model.layers.{number}.attn",
            0,
            "torch.uint8",
            1,
            "FLASH_ATTN",
            dimensions,
            Heads(heads, 8, (0, 8)),
            16,
        )
        for number in range(2 * tensor_parallel)
    )
    return ShardLayout(0, 1, tensor_parallel, 1, layers)


class DescribedEngine:
    """The scheduler and the first rank of an engine that tells what its blocks consist of."""

    def __init__(self, daemon: Daemon, name: str, shard: ShardLayout | None, digest: bytes) -> None:
        self._memory = mmap.mmap(-1, 8 * 4096)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.scheduler = _core.Scheduler(daemon.address, name, "test", [(NAMESPACE, "a model", 16, 0)], 1)
        until("the scheduler is connected", lambda: self._tick() is not None)
        groups = [(NAMESPACE, digest, [(base, 4096, 8, 4096, [0])])]
        self.worker = _core.Worker(daemon.address, name, "test", 0, 1, groups, shards=[shard])

    def _tick(self) -> bytes | None:
        self.scheduler.tick()
        return self.scheduler.boot

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


@pytest.fixture
def engines() -> Iterator[Any]:
    with ExitStack() as stack:

        def start(*arguments: Any) -> DescribedEngine:
            engine = DescribedEngine(*arguments)
            stack.callback(engine.close)
            return engine

        yield start


def test_an_engine_of_another_layout_is_explained_in_the_log_and_in_status(
    daemon: Daemon, engines: Any
) -> None:
    first, second = (
        engines(daemon, name, layout(tensor), layout(tensor).digest())
        for name, tensor in (("first", 1), ("second", 2))
    )
    assert first.worker.connected and second.worker.connected, second.worker.reason
    told = daemon.log.wait_for("share no blocks")
    assert 'engine="second"' in told and "tensor-parallel size: 2 here, 1 there" in told
    assert "layer model.layers.0.attn: 4 KV heads x 8 (from number 0, of 8) here, 8 KV heads x 8" in told

    status = run_kvlane("status", "--addr", daemon.address).stdout
    lines = status.split("only if their layouts are equal.")[1]
    one = "2 layers, 8 KV heads x 8, uint8, 16 tokens, HNC"
    assert one in lines and "4 layers, 4 of 8 KV heads x 8, uint8, 16 tokens, HNC" in lines, status
    spaces = json.loads(run_kvlane("status", "--json", "--addr", daemon.address).stdout)["namespaces"]
    assert one in [space["layout"] for space in spaces]


def test_a_digest_that_is_told_to_be_something_else_is_refused(daemon: Daemon, engines: Any) -> None:
    right = layout(1)
    engines(daemon, "right", right, right.digest())
    first, *others = right.layers
    wrong = dataclasses.replace(right, layers=(dataclasses.replace(first, dtype="torch.int8"), *others))
    refused = engines(daemon, "wrong", wrong, right.digest())
    assert not refused.worker.connected
    difference = "layer model.layers.0.attn: torch.int8 of 1 bytes here, torch.uint8 of 1 bytes there"
    assert difference in refused.worker.reason
    # Engines of earlier versions tell nothing, and share.
    assert engines(daemon, "silent", None, right.digest()).worker.connected


def test_a_layout_beyond_the_bounds_is_not_told_and_the_engine_is_served(
    daemon: Daemon, engines: Any
) -> None:
    (layer, *_) = layout(1).layers
    endless = dataclasses.replace(layout(1), layers=(dataclasses.replace(layer, name="l" * 300),))
    assert engines(daemon, "endless", endless, endless.digest()).worker.connected
    spaces = json.loads(run_kvlane("status", "--json", "--addr", daemon.address).stdout)["namespaces"]
    assert [space["layout"] for space in spaces] == [""]


def test_wrong_layouts_from_python(daemon: Daemon) -> None:
    groups = [(NAMESPACE, bytes(16), [(4096, 4096, 4, 4096, [0])])]
    with pytest.raises(ValueError, match="layouts of 2 groups came with 1 groups"):
        _core.Worker(daemon.address, "py", "test", 0, 1, groups, shards=[None, None])
    axis: Any = "colour"
    layer = dataclasses.replace(layout(1).layers[0], dimensions=(Dimension(axis, 0, 4096),))
    with pytest.raises(ValueError, match="'colour' is nothing that a dimension counts"):
        wrong = dataclasses.replace(layout(1), layers=(layer,))
        _core.Worker(daemon.address, "py", "test", 0, 1, groups, shards=[wrong])
