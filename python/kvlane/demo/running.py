"""Runs a demo's scenarios with progress shown, and ends in good order at Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from tqdm import tqdm

from kvlane.demo.pd.asking import AskFailed
from kvlane.demo.processes import ProcessFailed
from kvlane.demo.scenarios import Scenario

_ENDS = (signal.SIGINT, signal.SIGTERM)


def end_at_signals() -> None:
    """From here on SIGINT and SIGTERM raise SystemExit, once, because a second one must not stop the cleanup."""
    for number in _ENDS:
        signal.signal(number, _end)


def _end(number: int, _: object) -> None:
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def run(steps: Sequence[Callable[[Callable[[str], object]], Scenario]]) -> list[Scenario]:
    """Runs all scenarios in order. It stops after one in which a process failed, because the next ones build on it."""
    finished: list[Scenario] = []
    with tqdm(total=len(steps), unit="scenario", bar_format="{l_bar}{bar}| {n}/{total} [{elapsed}]") as bar:
        for scenario in steps:
            try:
                finished.append(scenario(bar.set_description_str))
            except (ProcessFailed, AskFailed, OSError) as error:
                finished.append(Scenario(scenario.__name__.replace("_", " "), problems=[str(error)]))
                break
            finally:
                bar.update()
            outcome = "passed" if finished[-1].passed else "; ".join(["FAILED", *finished[-1].problems[:2]])
            bar.write(f"{finished[-1].name}: {outcome}", file=sys.stderr)
    return finished
