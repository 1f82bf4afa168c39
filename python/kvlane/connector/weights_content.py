"""The content of a model's weight files, as a digest of chosen bytes: fast, and the same on every host.

In a safetensors file it reads the header, the tensors below 64 KiB, and of every other tensor a page in each 16 MiB.
The tensor's name draws the pages by a fixed key, so all hosts read the same ones. Training changes nearly every number
of a tensor, so a page distinguishes two models. An edit of a few rows of a large tensor may go unseen.

Files of other formats do not say where their tensors are. In these, in damaged files, and in files whose small tensors
are more than a gibibyte together, it reads the beginning, the end (PyTorch keeps a checksum of every tensor there) and
pages between. That is weaker.

A file's name is not in the digest, so the same files by any path are equal. The distribution of tensors over files is
in it, through the headers: the same weights cut into other files are another model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
WHOLE_BELOW = 64 << 10
"""Tensors of fewer bytes are read whole."""
STRETCH = 16 << 20
"""A page of larger tensors is read in each stretch of this many bytes."""
KEY = b"kvlane weights 1"
"""Draws the pages. Another key is another digest of every model."""
# In files other than safetensors: bytes at both ends, and pages between.
ENDS = 1 << 20
PAGES_BETWEEN = 64
# The format's own limit.
MAX_HEADER = 100_000_000
MAX_READ = 1 << 30
"""Bytes that are read of a file's tensors at most; a file that would need more is read like one of another format."""
THREADS = 16
TENSORS_A_JOB = 8


@dataclass(frozen=True)
class WeightsContent:
    """The content of a list of weight files."""

    digest: str
    """32 hexadecimal digits."""
    weaker: bool
    """Whether a file's tensors could not be told apart, so that only pages of it were read."""


class FilesChanging(Exception):
    """The files changed each time while they were read."""


Signature = tuple[tuple[int, int, int, int, int], ...]


def signature_of(files: Iterable[Path]) -> Signature:
    """Device, inode, bytes, modification and change time (ns) of files. Raises OSError."""
    found = []
    for each in files:
        stat = each.stat()
        found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(found)


def read_content(files: Sequence[Path], whole_below: int = WHOLE_BELOW) -> WeightsContent:
    """Reads weight files, in this order; JSON files (an index, a configuration) are read whole. Raises OSError."""
    digest = hashlib.blake2b(key=KEY, digest_size=16)
    weaker = False
    with ThreadPoolExecutor(min(THREADS, 4 * (os.cpu_count() or 1))) as pool:
        for each in files:
            with _opened(each) as file:
                size = os.fstat(file).st_size
                if each.suffix == ".json":
                    weaker = weaker or size > MAX_HEADER
                    ranges = [(0, size)] if size <= MAX_HEADER else _pages(size)
                    parts = [_read(file, *every) for every in ranges]
                else:
                    header = safetensors_header(file, size)
                    if header is not None and header.bytes_read(whole_below) > MAX_READ:
                        header = None
                    weaker = weaker or header is None
                    ranges = _pages(size) if header is None else [(0, header.end)]
                    parts = [_read(file, *every) for every in ranges]
                    if header is not None:
                        tensors = header.tensors
                        jobs = [
                            tensors[first : first + TENSORS_A_JOB]
                            for first in range(0, len(tensors), TENSORS_A_JOB)
                        ]
                        parts += pool.map(lambda job, file=file: _digest_of(file, job, whole_below), jobs)
                    digest.update(struct.pack("<Q", size))
                digest.update(struct.pack("<Q", len(parts)))
                for part in parts:
                    digest.update(struct.pack("<Q", len(part)))
                    digest.update(part)
    return WeightsContent(digest.hexdigest(), weaker)


@dataclass(frozen=True)
class SafetensorsHeader:
    """The positions of a safetensors file's tensors."""

    end: int
    """Bytes of the header with its length; data follow."""
    tensors: list[tuple[str, int, int]]
    """Name, first byte and end in the file, in the order of the data."""

    def bytes_read(self, whole_below: int) -> int:
        """Bytes of the tensors that are read."""
        sizes = (end - begin for _, begin, end in self.tensors)
        return sum(size if size < max(whole_below, PAGE) else -(-size // STRETCH) * PAGE for size in sizes)


def safetensors_header(file: int, size: int) -> SafetensorsHeader | None:
    """An open file's header; None if it is not a safetensors file, or a damaged one."""
    start = os.pread(file, 8, 0)
    if len(start) < 8:
        return None
    (length,) = struct.unpack("<Q", start)
    end = 8 + length
    if length > MAX_HEADER or end > size:
        return None
    try:
        entries = json.loads(_read(file, 8, length))
        tensors = [
            _tensor(name, entry, end, size) for name, entry in entries.items() if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    tensors.sort(key=lambda tensor: (tensor[1], tensor[2], tensor[0]))
    # The format forbids tensors that overlap: a small file could have its bytes read a million times.
    if any(after[1] < before[2] for before, after in itertools.pairwise(tensors)):
        return None
    return SafetensorsHeader(end, tensors)


def _tensor(name: str, entry: Mapping[str, list[int]], data: int, size: int) -> tuple[str, int, int]:
    begin, end = entry["data_offsets"]
    if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end <= size - data):
        raise ValueError(f"the tensor {name!r} lies outside of its file")
    return name, data + begin, data + end


def _samples(name: str, begin: int, end: int, whole_below: int) -> list[tuple[int, int]]:
    """The parts of a tensor to read: first byte and number of bytes of each."""
    size = end - begin
    if size < max(whole_below, PAGE):
        return [(begin, size)]
    what = name.encode("utf-8", "surrogatepass")
    found = []
    for stretch in range(0, size, STRETCH):
        length = min(STRETCH, size - stretch)
        page = min(PAGE, length)
        at = _drawn(struct.pack("<Q", stretch) + what, length - page + 1)
        found.append((begin + stretch + at, page))
    return found


def _drawn(what: bytes, below: int) -> int:
    return int.from_bytes(hashlib.blake2b(what, key=KEY, digest_size=8).digest(), "little") % below


def _pages(size: int) -> list[tuple[int, int]]:
    """The pages that are read of a file of unknown format."""
    if size <= 2 * ENDS + PAGES_BETWEEN * PAGE:
        return [(0, size)]
    between = size - 2 * ENDS - PAGE + 1
    drawn = sorted(_drawn(struct.pack("<QQ", size, page), between) for page in range(PAGES_BETWEEN))
    return [(0, ENDS), *((ENDS + at, PAGE) for at in drawn), (size - ENDS, ENDS)]


def page_of(path: Path) -> bytes:
    """A page of a file, drawn from its size. Raises OSError."""
    with _opened(path) as file:
        size = os.fstat(file).st_size
        return os.pread(file, PAGE, _drawn(struct.pack("<Q", size), max(1, size - PAGE + 1)))


def _digest_of(file: int, tensors: list[tuple[str, int, int]], whole_below: int) -> bytes:
    digest = hashlib.blake2b(key=KEY, digest_size=16)
    for tensor in tensors:
        for each in _samples(*tensor, whole_below):
            digest.update(_read(file, *each))
    return digest.digest()


def _read(file: int, at: int, size: int) -> bytes:
    parts = []
    while size > 0:
        part = os.pread(file, size, at)
        if not part:
            raise FilesChanging("a weight file became shorter while it was read")
        parts.append(part)
        at += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Pages far apart are wanted, and nothing of what lies beside them.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        yield file
    finally:
        os.close(file)
