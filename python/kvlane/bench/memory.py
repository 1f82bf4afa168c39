"""Memory with a known address and a known page size."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path
from typing import Any

from kvlane import _core
from kvlane.bench.extra import numpy

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


class Memory:
    """Zeroed memory of this process, all of it touched: anonymous, or a shared memfd like the daemon's pool."""

    def __init__(self, size: int, *, shared: bool = False, huge: bool = False) -> None:
        if shared:
            descriptor = os.memfd_create("kvlane-bench")
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
            os.close(descriptor)
        else:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.words = numpy.frombuffer(self._map, dtype=numpy.uint64)
        self.words[:] = 0

    def fill(self, salt: int) -> None:
        """Gives every word a value of its own."""
        self.words[:] = numpy.arange(len(self.words), dtype=numpy.uint64)
        self.words *= numpy.uint64(0x9E37_79B9_7F4A_7C15)
        self.words += numpy.uint64(salt)

    def put(self, start: int, bytes: numpy.ndarray[Any, Any]) -> None:
        """Writes bytes from this offset on."""
        self.words.view(numpy.uint8)[start : start + len(bytes)] = bytes

    def get(self, start: int, end: int) -> numpy.ndarray[Any, Any]:
        """The bytes from offset to offset."""
        return self.words.view(numpy.uint8)[start:end]

    @property
    def page_size(self) -> str:
        """ "2 MB" where at least half of it lies on huge pages, else the size of an ordinary page."""
        inside, huge_kb = False, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if found := _MAPPING.match(line):
                start, end = int(found[1], 16), int(found[2], 16)
                inside = start < self.address + self.size and self.address < end
            elif inside and line.startswith(("AnonHugePages", "ShmemPmdMapped")):
                huge_kb += int(line.split()[1])
        return "2 MB" if huge_kb * 1024 * 2 >= self.size else f"{mmap.PAGESIZE // 1024} kB"


class GpuMemory:
    """The same on a GPU with a name such as "cuda:0". OSError if there is none."""

    def __init__(self, size: int, device: str) -> None:
        self.size = size
        self.device = device
        self.core = _core.GpuMemory(int(device.removeprefix("cuda:")), size)
        self.address = self.core.address
        self.put(0, numpy.zeros(size, dtype=numpy.uint8))

    def put(self, start: int, bytes: numpy.ndarray[Any, Any]) -> None:
        """Writes bytes from this offset on."""
        bytes = numpy.ascontiguousarray(bytes)
        self.core.copy_from_host(start, bytes.ctypes.data, len(bytes))

    def get(self, start: int, end: int) -> numpy.ndarray[Any, Any]:
        """The bytes from offset to offset."""
        bytes = numpy.empty(end - start, dtype=numpy.uint8)
        self.core.copy_to_host(start, bytes.ctypes.data, len(bytes))
        return bytes
