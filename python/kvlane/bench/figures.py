"""Figures with a goal, and how a benchmark that has such figures publishes them."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlane.bench import pictures, report
from kvlane.bench.drawing import Picture, save


@dataclass(frozen=True)
class Figure:
    """A measured value and its goal; without a goal it is only for information."""

    what: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the value reaches its goal; False if it could not be measured."""
        if self.at_most is not None:
            return self.value <= self.at_most
        return self.at_least is None or self.value >= self.at_least

    @property
    def goal(self) -> str:
        """For people: "at most 2 %"."""
        if self.at_most is not None:
            return f"at most {with_unit(self.at_most, self.unit)}"
        return "" if self.at_least is None else f"at least {with_unit(self.at_least, self.unit)}"

    @property
    def text(self) -> str:
        """Value and unit."""
        return with_unit(self.value, self.unit)

    def facts(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self) | {"text": self.text, "goal": self.goal, "passed": self.passed}


def with_unit(value: float, unit: str) -> str:
    """Three digits and the unit; ratios, which have none, get an x."""
    text = "-" if math.isnan(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{text} {unit}" if unit else f"{text}x"


@dataclass
class Outcome:
    """The result of one benchmark."""

    name: str
    figures: Sequence[Figure]
    details: Mapping[str, Any]
    note: str
    picture: Callable[[Mapping[str, Any]], Picture | None] = pictures.goals
    """Of what is written; None: there is none."""


def add_out(parser: argparse.ArgumentParser) -> None:
    """The flag --out."""
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the results (default %(default)s)"
    )


def publish(arguments: argparse.Namespace, outcome: Outcome, watch: report.CpuWatch) -> int:
    """Table to stdout, NAME.json and, if there is something to draw, NAME.png to --out.

    A missed goal is a result, not a failure: always 0.
    """
    settings = {key: value for key, value in vars(arguments).items() if key not in ("run", "out")}
    result = {
        "benchmark": outcome.name,
        "settings": {
            key: str(value) if isinstance(value, Path) else value for key, value in settings.items()
        },
        "date": time.strftime("%Y-%m-%d"),
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "commit": report.commit(),
        "note": outcome.note,
        "figures": [figure.facts() for figure in outcome.figures],
        **outcome.details,
    }
    out: Path = arguments.out
    report.write_json(out / f"{outcome.name}.json", result)
    print(table(outcome.figures))
    print(report.paragraph(outcome.note))
    print(f"others used {watch.facts['other_cores']:.2f} cores meanwhile")
    written = [out / f"{outcome.name}.json"]
    # The same values as in the file, which has null for what was not measured.
    if picture := outcome.picture(json.loads(written[0].read_text())):
        written.append(out / f"{outcome.name}.png")
        save(picture, written[-1])
    print(f"written: {', '.join(map(str, written))}")
    return 0


def table(figures: Sequence[Figure]) -> str:
    """What, value, goal, whether it is reached."""
    rows = [
        [
            figure.what,
            figure.text,
            figure.goal or "-",
            ("yes" if figure.passed else "NO") if figure.goal else "-",
        ]
        for figure in figures
    ]
    return report.table(["figure", "measured", "goal", "reached"], rows)
