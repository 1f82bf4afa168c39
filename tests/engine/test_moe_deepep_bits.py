"""bench/gpu/moe_deepep.py counts differing rows and sums. kvlane's module in the host's memory plays both sides."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kvlane.moe.deep_ep import Buffer

SCRIPTS = Path(__file__).parents[2] / "bench" / "gpu"


@pytest.fixture
def moe_deepep(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("moe_deepep")
    for name, value in {"EXPERTS": 8, "MOST": 8, "HIDDEN": (256,), "TOP_K": (3,)}.items():
        monkeypatch.setattr(script, name, value)
    return script


@pytest.fixture
def buffers(tmp_path: Path) -> Iterator[list[Any]]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    made = [Buffer(dist.group.WORLD, low_latency_mode=True) for _ in range(2)]
    yield made
    for buffer in made:
        buffer.destroy()
    dist.destroy_process_group()


class Wrong:
    """A buffer of which a bit of a sum, or of the first row of each expert, is another."""

    def __init__(self, buffer: Any, what: str) -> None:
        self.buffer, self.what = buffer, what

    def clean_low_latency_buffer(self, *_: Any) -> None:
        pass

    def low_latency_dispatch(self, *arguments: Any, **more: Any) -> Any:
        found = self.buffer.low_latency_dispatch(*arguments, **more)
        rows = found[0][0] if more["use_fp8"] else found[0]
        if self.what == "rows":
            rows.view(torch.uint8)[:, 0, 0] ^= 1
        return found

    def low_latency_combine(self, *arguments: Any, **more: Any) -> Any:
        sums, event, hook = self.buffer.low_latency_combine(*arguments, **more)
        if self.what == "sums":
            sums.view(torch.int16)[-1, -1] ^= 1
        return sums, event, hook


def test_equal_sides_have_no_differences(moe_deepep: Any, buffers: list[Any]) -> None:
    found = moe_deepep.compare(*buffers, 0.3, 1, "cpu")
    assert (found["other_rows"], found["other_sums"]) == (0, 0)
    assert found["rows"] > 0 and found["sums"] >= 256
    assert all(moe_deepep.controls(*buffers, 1, "cpu").values())


@pytest.mark.parametrize("what", ["rows", "sums"])
def test_one_changed_bit_is_counted(moe_deepep: Any, buffers: list[Any], what: str) -> None:
    found = moe_deepep.compare(buffers[0], Wrong(buffers[1], what), 0.3, 1, "cpu")
    if what == "sums":
        assert (found["other_rows"], found["other_sums"]) == (0, found["rounds"])
    else:
        assert 0 < found["other_rows"] < found["rows"]
