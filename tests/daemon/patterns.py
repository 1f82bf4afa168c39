"""Names and bytes of blocks: each block's bytes follow from its hash, so anyone can tell right ones from wrong ones."""

from __future__ import annotations

import hashlib
from functools import lru_cache

TOKENS = 16
NAMESPACE = bytes([3]) * 16


def block_hash(prompt: str, index: int) -> bytes:
    return hashlib.blake2b(f"{prompt}/{index}".encode(), digest_size=16).digest()


def hashes(prompt: str, first: int, count: int) -> list[bytes]:
    return [block_hash(prompt, index) for index in range(first, first + count)]


@lru_cache(maxsize=8192)
def content(name: bytes, length: int) -> bytes:
    return hashlib.shake_128(name).digest(length)
