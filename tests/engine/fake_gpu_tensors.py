"""Tensors of the host in the place of a GPU's, for ranks of kvlane.moe on fake GPUs.

A fake runs the kernels' own source on CPUs, and its memory is the host's.
"""

from __future__ import annotations

import os
from typing import Any


def use() -> None:
    """From now on `device="cuda"` is a fake GPU of this process, with torch's memory of the host."""
    import torch

    from kvlane.moe import _gpu

    os.environ["KVLANE_GPU_DRIVER"] = "fake"
    setattr(_gpu.GpuEnd, "_torch_device", staticmethod(lambda _: torch.device("cpu")))  # noqa: B010 - of a class
    setattr(_gpu.GpuEnd, "_stream", lambda _: 0)  # noqa: B010
    for name in ("cast", "dispatch", "send", "receive", "_combine"):
        setattr(_gpu.GpuEnd, name, _waited_for(getattr(_gpu.GpuEnd, name)))


def _waited_for(call: Any) -> Any:
    """Memory of the host is given back while kernels run, which torch's memory of GPUs is not for their stream."""

    def call_and_wait(end: Any, *arguments: Any) -> Any:
        result = call(end, *arguments)
        end._rank.synchronize()
        return result

    return call_and_wait
