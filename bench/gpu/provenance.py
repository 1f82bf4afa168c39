"""The fields with which every result of this folder begins: the benchmark, the day, the commit, the GPUs and their
driver, and the versions of the packages that took part."""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from systems import versions

from kvlane.bench import report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what only a person may know."""
    parser.add_argument("--commit", help="of the kvlane that is installed, where git does not know it")


def head(benchmark: str, settings: argparse.Namespace) -> dict[str, Any]:
    """The head of a result. Take it before you measure: it ends the program if the commit is unknown."""
    commit = settings.commit or report.commit()
    if not commit:
        sys.exit("git does not know the commit here: give it with --commit")
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "versions": versions(),
        "host": host(),
    }


def public(settings: argparse.Namespace, hidden: Collection[str] = ()) -> dict[str, Any]:
    """The settings that mean something elsewhere: no paths, and nothing `hidden`."""
    hidden = {*hidden, "commit", "scratch"}
    return {
        key: value
        for key, value in vars(settings).items()
        if key not in hidden and not isinstance(value, Path)
    }


def host() -> dict[str, Any]:
    """The GPUs that this process may use, their driver, and how many CPUs there are."""
    found = _gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if not found:
        report.say("nvidia-smi names no GPU: the result will say that there was none")
    return {
        "gpus": [name for name, _ in found],
        "driver": found[0][1] if found else None,
        "cpus": os.cpu_count(),
    }


def _gpus(visible: str) -> list[tuple[str, str]]:
    """Name and driver of each GPU. `visible` is as CUDA takes it: numbers or ids, "" for all."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if visible:
        query.append(f"--id={visible}")
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = (line.rpartition(",") for line in told.splitlines() if line.strip())
    return [(name.strip(), driver.strip()) for name, _, driver in rows]
