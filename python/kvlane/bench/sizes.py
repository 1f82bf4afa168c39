"""Sizes as people write them, for the flags of benchmarks. The same rules as in crates/cli/src/size.rs."""

from __future__ import annotations

import argparse
import re

_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_UNIT = re.compile(r"(?P<letter>[kmgt])(?P<rest>|b|i|ib)", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes: "4gb" is 4 * 10^9; "4g", "4gi" and "4gib" are 4 * 2^30; the same with k, m and t; "b" or a plain number.

    Raises ArgumentTypeError, for argparse, in one sentence with the value.
    """
    written = text.strip()
    number = re.match(r"[0-9.]*", written)
    assert number is not None
    factor = _factor(text, written[number.end() :].strip())
    digits = number.group()
    if re.fullmatch(r"[0-9]+", digits):
        value = int(digits) * factor
    elif re.fullmatch(r"[0-9]+\.[0-9]*|\.[0-9]+", digits):
        value = int(float(digits) * factor)
    else:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write for example 256k, 2mib or 1gb")
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: it has to be above 0")
    return value


def _factor(text: str, unit: str) -> int:
    if unit.lower() in ("", "b"):
        return 1
    found = _UNIT.fullmatch(unit)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} has the unknown unit {unit!r}; b, kb, mb, gb and tb (powers of 1000) and k, m, g, t, kib, mib, "
            "gib and tib (powers of 1024) are known"
        )
    base = 1000 if found["rest"].lower() == "b" else 1024
    return base ** _POWERS[found["letter"].lower()]


def count(text: str) -> int:
    """For argparse: a whole number above 0. Raises ArgumentTypeError, with the text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)
