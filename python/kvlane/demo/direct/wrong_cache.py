"""Makes the bytes of an engine's own KV cache wrong, for controls. Only for engines on the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def make_cache_wrong(processes: Sequence[int], kv_cache: int) -> int:
    """Permutes the numbers of an engine's KV cache: they are as well-formed as before, and belong to other tokens.
    Returns the bytes that changed."""
    changed = 0
    for pid in processes:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, flags, _, _, inode, *name = line.split()
            begin, end = (int(part, 16) for part in span.split("-"))
            # The heap has a name. It grows beyond a small cache, and would end the engine.
            if flags.startswith("rw") and inode == "0" and not name and end - begin >= kv_cache:
                changed += _turn_around(pid, begin, end)
    return changed


def _turn_around(pid: int, begin: int, end: int) -> int:
    changed, window = 0, 1 << 20
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for at in range(begin, end, window):
            size = min(window, end - at)
            found = os.pread(memory.fileno(), size, at)
            if any(found):
                turned = memoryview(found).cast("I")[::-1].tobytes()
                changed += os.pwrite(memory.fileno(), turned, at)
    return changed
