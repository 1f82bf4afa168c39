"""Weight files for tests, written without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def safetensors(path: Path, tensors: dict[str, bytes]) -> Path:
    """A safetensors file of byte tensors."""
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    return path


def sparse_safetensors(path: Path, sizes: dict[str, int]) -> Path:
    """A safetensors file whose tensors are holes: any size, no space on the disk."""
    header, at = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return path
