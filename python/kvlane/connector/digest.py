"""Digests of values that JSON can hold."""

from __future__ import annotations

import hashlib
import json

JsonValue = object
"""A value of JSON: None, bool, int, float, str, lists and dictionaries of these."""


def digest16(meaning: JsonValue) -> bytes:
    """blake2b-128 of the canonical JSON of `meaning`."""
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
