"""The pictures of `compare.py`, `turns.py` and `restart.py`, made from their JSON files."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvlane.bench.drawing import COLOURS, Bar, Panel, Picture, number

NOTHING = "#9aa3ad"
# By the name of a system in `systems.py`.
NAMES = {
    "none": "no connector",
    "kvlane": "kvlane",
    "pegaflow": "PegaFlow",
    "offload": "vLLM's offload",
    "lmcache": "LMCache",
    "lmcache-mp": "LMCache's server",
}
MODES = {"eager": "eager mode", "graphs": "CUDA graphs"}
# By the name of a part in the JSON file.
PARTS = {
    "cold": "computed: nothing is cached",
    "in_gpu": "hit in the engine's own GPU memory",
    "warm": "from the cache outside, one prompt at a time",
    "open_loop": "the same, prompts arrive at fixed times",
}


def gpus(host: Mapping[str, Any]) -> str:
    """The GPUs of a result's host, with their driver. Results before 2026-11-27 have the driver in a GPU's name, and
    those of `compare.py` are one text."""
    if isinstance(host["gpus"], str):
        return host["gpus"]
    counted = Counter(host["gpus"])
    names = [name if count == 1 else f"{count} x {name}" for name, count in counted.items()]
    driver = [f"driver {host['driver']}"] if host.get("driver") else []
    return ", ".join([*names, *driver]) or "no GPU"


def compared(result: Mapping[str, Any], mode: str) -> Picture:
    """TTFT of each system, of what `compare.py` wrote: computed, in GPU memory, from the cache outside, open loop.

    Bars are medians of the rounds' medians. The rounds' medians are drawn where there are several.
    """
    systems = list(dict.fromkeys(run["system"] for run in result["runs"] if run["system"] != "pair"))
    paired = [run["found"] for run in result["runs"] if run["system"] == "pair" and run["mode"] == mode]
    panels = []
    for part, heading in PARTS.items():
        bars = []
        for index, system in enumerate(dict.fromkeys(["none", *systems])):
            rounds = _rounds(result, system, mode, part)
            if not rounds and system == "none" and part in ("cold", "in_gpu"):
                rounds = [each[part]["none"] for each in paired]
            if rounds:
                colour = NOTHING if system == "none" else COLOURS[index - 1]
                bars.append(_bar(NAMES.get(system, system), rounds, colour))
        if bars:
            panels.append(Panel(heading, tuple(bars)))
    versions = result.get("versions", {})
    known = [f"{name} {versions[key]}" for key, name in VERSIONS.items() if key in versions]
    return Picture(
        f"Time to first token (TTFT), median, {MODES.get(mode, mode)}",
        f"{_prompts(result)}{gpus(result['host'])}; {', '.join([*known, result['date']])}. Thin lines: from the "
        "fastest prompt to the slowest; dots: medians of rounds.",
        tuple(panels),
        2,
    )


VERSIONS = {"vllm": "vLLM", "kvlane": "kvlane", "pegaflow-llm-cu13": "PegaFlow", "lmcache": "LMCache"}


def _prompts(result: Mapping[str, Any]) -> str:
    settings = result.get("settings", {})
    if not {"prompts", "tokens"} <= set(settings):
        return ""
    return f"{settings['prompts']} prompts of {settings['tokens']:,} tokens; "


def _rounds(result: Mapping[str, Any], system: str, mode: str, part: str) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    for run in result["runs"]:
        if run["system"] == system and run["mode"] == mode and part in run["found"]:
            each = run["found"][part]
            found += each if isinstance(each, list) else [each]
    return [each for each in found if each.get("p50") is not None]


def _bar(name: str, rounds: list[dict[str, float]], colour: str) -> Bar:
    medians = tuple(each["p50"] for each in rounds)
    value = statistics.median(medians)
    known = all("min" in each for each in rounds)
    return Bar(
        name,
        value,
        f"{number(value)} ms",
        colour,
        low=min(each["min"] for each in rounds) if known else None,
        high=max(each["max"] for each in rounds) if known else None,
        samples=medians if len(medians) > 1 else (),
    )


# By the name of a part in the JSON file: TTFT, and the p99 of gaps.
BESIDE_DECODES = {
    ("in_gpu", "p50"): "TTFT, engine idle: hit in GPU memory",
    ("warm", "p50"): "TTFT, engine idle: loaded",
    ("busy_in_gpu_ttft", "p50"): "TTFT beside decodes: hit in GPU memory",
    ("busy_warm_ttft", "p50"): "TTFT beside decodes: loaded",
    ("busy_in_gpu", "p99"): "p99 of decodes' gaps: beside hits",
    ("busy_warm", "p99"): "p99 of decodes' gaps: beside loads",
    ("busy_saved", "p99"): "p99 of decodes' gaps: beside saves",
    ("busy_quiet", "p99"): "p99 of decodes' gaps: no prompts",
}


def beside_decodes(result: Mapping[str, Any]) -> Picture:
    """Of what `turns.py` wrote: TTFT of each system, alone and beside decodes, and the gaps of these."""
    panels = []
    for (part, figure), heading in BESIDE_DECODES.items():
        bars = []
        for index, (system, found) in enumerate(result["found"].items()):
            values = tuple(each[figure] for each in found.get(part, ()) if each)
            if values:
                value, colour = statistics.median(values), NOTHING if system == "none" else COLOURS[index - 1]
                bars.append(
                    Bar(NAMES.get(system, system), value, f"{number(value)} ms", colour, samples=values)
                )
        if bars:
            panels.append(Panel(heading, tuple(bars)))
    settings, versions = result["settings"], result["versions"]
    known = [f"{name} {versions[key]}" for key, name in VERSIONS.items() if key in versions]
    return Picture(
        f"{settings['tokens']:,} tokens alone and beside {settings['decodes']} decodes, four engines in turns",
        f"{gpus(result['host'])}; {', '.join([*known, result['date']])}. "
        f"{MODES['eager' if settings['eager'] else 'graphs']}; bars: medians of rounds; dots: rounds.",
        tuple(panels),
        2,
    )


def restarted(result: Mapping[str, Any]) -> Picture:
    """TTFT of what `restart.py` measured, in each mode, with every single prompt."""
    panels = tuple(
        Panel(
            MODES.get(mode) or mode,
            # Results before 2026-11-29 have fewer of them.
            tuple(_restart_bar(run, name, what) for name, what in TIMES.items() if name in run["summary"]),
        )
        for mode, run in result["runs"].items()
    )
    versions = ", ".join(
        f"{name} {result['versions'][key]}" for key, name in VERSIONS.items() if key in result["versions"]
    )
    return Picture(
        f"Time to first token (TTFT) of {result['settings']['tokens']:,} tokens, through two kills",
        f"{gpus(result['host'])}; {versions}, {result['date']}. Bars: medians; dots: single prompts.",
        panels,
    )


TIMES = {
    "cold": "computed",
    "in_gpu": "hit in the engine's own GPU memory",
    "warm": "from the daemon",
    "restarted": "from the daemon, engine killed and restarted: first loads",
    "restarted_in_gpu": "hit in that engine's own GPU memory",
    "restarted_warm": "from the daemon, that engine's later loads",
    "without_daemon": "daemon killed: computed again",
    "again": "daemon restarted: from the daemon again",
}


def _restart_bar(run: Mapping[str, Any], name: str, what: str) -> Bar:
    value = run["summary"][name]["p50"]
    samples = tuple(each for row in run.get(f"{name}_ms", ()) for each in row)
    colour = COLOURS[1 if name.endswith("in_gpu") else 0]
    if name in ("cold", "without_daemon"):
        colour = NOTHING
    return Bar(what, value, f"{number(value)} ms", colour, samples=samples)
