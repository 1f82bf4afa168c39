"""Writes the demo's results: demo-pd.json, two tables, a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlane.bench import pictures, report
from kvlane.bench.drawing import number, save
from kvlane.demo.scenarios import Scenario

EQUAL, COMPUTES, CONTROL = "answers equal", "the decode engine computes", "control"
"""The prefix of these scenarios' names."""


def result(
    scenarios: Sequence[Scenario], planned: int, requests: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of demo-pd.json; `planned` is how many scenarios there should have been."""
    return {
        "passed": len(scenarios) == planned and all(scenario.passed for scenario in scenarios),
        "answers_equal": _passed(scenarios, EQUAL),
        "control_failed_as_it_must": _passed(scenarios, CONTROL),
        "decode_computes_little": _passed(scenarios, COMPUTES),
        "scenarios": [
            {"name": each.name, "passed": each.passed, "figures": each.figures, "problems": each.problems}
            for each in scenarios
        ],
        "requests": list(requests),
    }


def _passed(scenarios: Sequence[Scenario], name: str) -> bool:
    """Whether a scenario passed; False if it was not reached."""
    return any(each.name.startswith(name) and each.passed for each in scenarios)


def publish(found: Mapping[str, Any], out: Path, name: str = "demo-pd") -> None:
    """Prints the tables, and writes both files of this name, a .json and a .png."""
    print(report.paragraph(found["title"]))
    print(report.table(["request", "prefill", "decode", "why"], _served(found["requests"])))
    print()
    rows = [
        [each["name"], _short(each["name"], each["figures"]), "passed" if each["passed"] else "FAILED"]
        for each in found["scenarios"]
    ]
    print(report.table(["scenario", "what came", ""], rows))
    for scenario in found["scenarios"]:
        for problem in scenario["problems"]:
            print(report.paragraph(f"{scenario['name']}: {problem}"))
    report.write_json(out / f"{name}.json", found)
    save(pictures.pairs(found), out / f"{name}.png")
    print(f"written: {out / name}.json, {out / name}.png")


def _served(requests: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each request of the first scenario; the others, of which there are many, by number."""
    rows, many = [], Counter[tuple[str, str, str, str]]()
    for each in requests:
        kind, _, number_ = each["request"].rpartition(" ")
        row = (each["prefill"], each["decode"], each["why"])
        if number_.isdigit():
            many[(kind, *row)] += 1
        else:
            rows.append([each["request"], *row])
    return rows + [[f"{kind} ({count} times)", *row] for (kind, *row), count in many.items()]


def _short(name: str, figures: Mapping[str, Any]) -> str:
    """A scenario's figures in short."""
    if name.startswith(EQUAL) and figures:
        return f"{figures['alike']} of {figures['prompts']} {figures['compared']}"
    if name.startswith(COMPUTES) and figures:
        return f"{figures['within']} of {figures['prompts']}, most {max(figures['computed_tokens_each'])}"
    if "roles" in figures:
        return f"it had the roles {', '.join(figures['roles'])}; {figures['answered']} answered"
    if "changed_tokens" in figures:
        return f"{figures['changed_tokens']} tokens changed"
    if "answered" in figures:
        return f"{figures['answered']} of {figures['requests']} answered"
    if "found_ready_s" in figures:
        return f"found {figures['found_ready_s']:.1f} s after it answered"
    if "ttft_ms" in figures:
        return f"TTFT {number(figures['ttft_ms']['mean'])} ms"
    return ""
