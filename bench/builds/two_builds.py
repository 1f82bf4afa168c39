"""Two builds of kvlane in turns: what a change that should cost nothing costs.

    python bench/builds/two_builds.py --before kvlane-old.whl --after dist/kvlane-*.whl  # half an hour

Runs `kvlane bench lookup`, `copy`, `hooks` and `overhead` of both wheels, or with --only others such as `fabric` and
`ssd`, each in an environment of its own that takes all else (vLLM, numpy) from this one. A round runs the old build,
the new one and the old one once more, in an order that changes from round to round. How much the old build differs
from itself is the control: what the new one differs by means something only beyond it.

A row holds when the new build is at most 3 % worse than the old one, by the median over all rounds, or no more than the
old build's second run differs from its first. Writes builds.json and builds.png; status 1 when a row does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import site
import statistics
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlane.bench import drawing, report
from kvlane.bench.drawing import Bar, Panel, Picture

ALLOWED = 0.03
# The benchmarks, with flags that let a round take about two minutes.
BENCHMARKS = {
    "lookup": ("--rounds", "1000"),
    "copy": ("--mib", "256", "--rounds", "7"),
    "hooks": ("--rounds", "5"),
    "overhead": ("--engines", "1", "--pairs", "30"),
    "fabric": ("--loopback", "--vs", "none", "--rounds", "3"),
    "ssd": (".", "--vs", "none", "--rounds", "1", "--restart-blocks", "10000"),
}
USUAL = ("lookup", "copy", "hooks", "overhead")
RUNS = ("before", "after", "before again")
_TIMEOUT_S = 1200

# By row, then by run: one value a round.
Values = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Row:
    """One figure of both builds."""

    what: str
    unit: str
    before: float
    after: float
    worse: float
    """By how much of the old build's median the new one's is worse; negative when it is better."""
    spread: float
    """How much the old build's two runs of a round differ, as a share; median over the rounds."""

    @property
    def holds(self) -> bool:
        """Whether the new build is no worse than allowed."""
        return self.worse <= max(ALLOWED, self.spread)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, metavar="WHEEL", help="of the old build")
    parser.add_argument("--after", type=Path, required=True, metavar="WHEEL", help="of the new build")
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHMARKS), help=f"else {', '.join(USUAL)}")
    parser.add_argument("--out", type=Path, default=Path("out/builds"))
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    pythons = {name: environment(getattr(settings, name), settings.out / name) for name in RUNS[:2]}
    values: Values = {}
    units: dict[str, str] = {}
    with report.CpuWatch() as watch:
        for number in range(settings.rounds):
            for name in settings.only or USUAL:
                for run in in_order(number):
                    report.say(f"[{number + 1}/{settings.rounds}] {name}: {run}")
                    for what, unit, value in measure(pythons[run.split()[0]], name, settings.out):
                        values.setdefault(what, {}).setdefault(run, []).append(value)
                        units[what] = unit
    rows = compare(values, units)
    result = {
        "benchmark": "builds in turns",
        "date": time.strftime("%Y-%m-%d"),
        "settings": {"rounds": settings.rounds, "benchmarks": BENCHMARKS},
        "wheels_sha256": {name: digest(getattr(settings, name)) for name in RUNS[:2]},
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "units": units,
        "values": values,
        "compared": [asdict(row) | {"holds": row.holds} for row in rows],
    }
    report.write_json(settings.out / "builds.json", result)
    drawing.save(picture(result), settings.out / "builds.png")
    print(table(rows))
    print(
        f"others used {watch.facts['other_cores']:.2f} cores meanwhile; written: {settings.out}/builds.json"
    )
    return 0 if all(row.holds for row in rows) else 1


def in_order(number: int) -> Sequence[str]:
    """The runs of a round: each comes first, second and last equally often."""
    turn = number % len(RUNS)
    return RUNS[turn:] + RUNS[:turn]


def environment(wheel: Path, folder: Path) -> Path:
    """The Python of an environment with this wheel, and behind it all that this Python has."""
    venv.create(folder, clear=True, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for program in packages.glob("kvlane-*.data/scripts/*"):
        target = folder / "bin" / program.name
        program.rename(target)
        target.chmod(0o755)
    (packages / "behind.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder / "bin" / "python"


def digest(wheel: Path) -> str:
    """By which a wheel can be told from another one of the same version."""
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def measure(python: Path, name: str, out: Path) -> list[tuple[str, str, float]]:
    """One run: what, unit and value of all figures that count."""
    results = out / f"{python.parents[1].name}-results"
    results.mkdir(exist_ok=True)
    # The tier's file lies beside the results.
    flags = [str(results) if flag == "." else flag for flag in BENCHMARKS[name]]
    command = [python, "-m", "kvlane.bench", name, *flags, "--out", results]
    path = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    ran = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ran.pop("PYTHONPATH", None)
    log = out / f"{name}.log"
    with log.open("ab") as written:
        done = subprocess.run(
            command, stdout=written, stderr=written, env=ran, timeout=_TIMEOUT_S, check=False
        )
    if done.returncode:
        sys.exit(f"kvlane bench {name} ended with {done.returncode}; see {log}")
    return figures(json.loads((results / f"{name}.json").read_text()))


def figures(result: dict[str, Any]) -> list[tuple[str, str, float]]:
    """kvlane's own figures in a benchmark's result, without yardsticks, intervals and bare loops."""
    if result["benchmark"] == "fabric":
        return list(map(transfer_figure, result["results"]))
    told = {each["what"]: each for each in result["figures"]}
    chosen = {
        "lookup": lambda what: "lookup" in what,
        "copy": lambda what: "save" in what or "load" in what,
        "hooks": lambda what: "nothing to do" in what,
        # The CPU time itself and not what it is above plain vLLM's: 3 % of a difference near nothing means nothing.
        "overhead": lambda what: "above plain vLLM" in what,
        "ssd": lambda what: re.fullmatch(r"(read|write) [0-9]+ [KM]iB", what) is not None,
    }[result["benchmark"]]
    found = []
    for what, each in told.items():
        if chosen(what):
            name, unit, value = what, each["unit"], each["value"]
            if result["benchmark"] == "overhead":
                name, unit, value = "engine CPU time / plain vLLM's, no hits", "", 1 + value / 100
            found.append((f"{result['benchmark']}, {name}", unit, value))
    return found


def transfer_figure(cell: dict[str, Any]) -> tuple[str, str, float]:
    """The figure that is compared for a transfer: the time of a small one, the rate of others."""
    size = f"{cell['bytes']} B" if cell["pattern"] == "contiguous" else cell["pattern"]
    what = f"fabric, {cell['transport']} {cell['op']} {size}"
    if cell["pattern"] == "contiguous" and cell["bytes"] < 1 << 20:
        return what, "us", cell["p50_us"]
    return what, "GB/s", cell["gb_per_s"]


def compare(values: Values, units: dict[str, str]) -> list[Row]:
    """Each figure of the new build beside the old one's."""
    rows = []
    for what, runs in values.items():
        before = statistics.median(runs["before"] + runs["before again"])
        after = statistics.median(runs["after"])
        worse = 1 - after / before if is_better_large(what, units[what]) else after / before - 1
        pairs = zip(runs["before"], runs["before again"], strict=True)
        spread = statistics.median(abs(first - second) / first for first, second in pairs)
        rows.append(Row(what, units[what], before, after, worse, spread))
    return rows


def is_better_large(what: str, unit: str) -> bool:
    """Rates, and ratios of rates to a bare loop's, which only `copy` has."""
    return unit == "GB/s" or (unit == "" and what.startswith("copy"))


def table(rows: Sequence[Row]) -> str:
    """The comparison as a table."""
    return report.table(
        ["figure, medians", "before", "after", "worse", "old from old", "holds"],
        [
            [
                row.what,
                f"{row.before:.3g} {row.unit or 'x'}",
                f"{row.after:.3g} {row.unit or 'x'}",
                f"{row.worse:+.1%}",
                f"{row.spread:.1%}",
                "yes" if row.holds else "NO",
            ]
            for row in rows
        ],
        width=140,
    )


def picture(result: dict[str, Any]) -> Picture:
    """By how much the new build is worse, and the old one differs from itself."""
    bars = []
    for row in result["compared"]:
        bars.append(
            Bar(
                row["what"],
                abs(row["worse"]) * 100,
                f"{row['worse'] * 100:+.1f} %" + (" worse" if row["worse"] > 0 else " (better)"),
                drawing.COLOURS[0] if row["worse"] > 0 else drawing.COLOURS[2],
                missed=not row["holds"],
            )
        )
        bars.append(
            Bar(
                "old build, second run",
                row["spread"] * 100,
                f"{row['spread'] * 100:.1f} %",
                drawing.COLOURS[7],
            )
        )
    machine = result["machine"]
    about = (
        f"Medians of {result['settings']['rounds']} rounds in which both builds took turns, the old one twice. "
        f"{machine['cpu']}, {machine['cores']} cores; others used {machine['cpu_use']['other_cores']:.2f}."
    )
    return Picture(
        "What the new build costs",
        about,
        (
            Panel(
                f"% of the old build; worse by at most {ALLOWED:.0%} holds", tuple(bars), goal=ALLOWED * 100
            ),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
