"""Memory with a known address and a known page size."""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import re
from pathlib import Path
from typing import Any

from kvlane import _core
from kvlane.bench.extra import numpy

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


def parse_memory(text: str) -> str:
    """For argparse: "host", "cuda:N", or "cuda:N,cuda:M" for two sides. Raises ArgumentTypeError, with the text."""
    if text != "host" and not re.fullmatch(r"cuda:\d+(,cuda:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither host nor cuda:N nor cuda:N,cuda:M")
    return text


def both_memories(memory: str) -> tuple[str, str]:
    """The first side's and the second side's."""
    first, _, second = memory.partition(",")
    return first, second or first


def allocate(size: int, memory: str) -> Memory | GpuMemory:
    """Memory of the host on huge pages, or of a GPU."""
    return Memory(size, huge=True) if memory == "host" else GpuMemory(size, memory)


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
        _fill(self.words, salt)

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


def _fill(words: numpy.ndarray[Any, Any], salt: int) -> None:
    words[:] = numpy.arange(len(words), dtype=numpy.uint64)
    words *= numpy.uint64(0x9E37_79B9_7F4A_7C15)
    words += numpy.uint64(salt)


class GpuMemory:
    """The same on a GPU with a name such as "cuda:0". OSError if there is none."""

    def __init__(self, size: int, device: str) -> None:
        self.size = size
        self.device = device
        self.core = _core.GpuMemory(int(device.removeprefix("cuda:")), size)
        self.address = self.core.address
        self.put(0, numpy.zeros(size, dtype=numpy.uint8))

    @property
    def words(self) -> numpy.ndarray[Any, Any]:
        """A copy of all words."""
        return self.get(0, self.size).view(numpy.uint64)

    def fill(self, salt: int) -> None:
        """Gives every word a value of its own."""
        words = numpy.empty(self.size // 8, dtype=numpy.uint64)
        _fill(words, salt)
        self.put(0, words.view(numpy.uint8))

    def put(self, start: int, bytes: numpy.ndarray[Any, Any]) -> None:
        """Writes bytes from this offset on."""
        bytes = numpy.ascontiguousarray(bytes)
        self.core.copy_from_host(start, bytes.ctypes.data, len(bytes))

    def get(self, start: int, end: int) -> numpy.ndarray[Any, Any]:
        """The bytes from offset to offset."""
        bytes = numpy.empty(end - start, dtype=numpy.uint8)
        self.core.copy_to_host(start, bytes.ctypes.data, len(bytes))
        return bytes
