"""The README's picture: the time to the first token of 10,000 cached tokens, in an idle engine and beside decodes.

All bars are of one run on one host (`compare.py`): each system alone on the GPU, one after the other. `bench/redraw.py`
draws it.
"""

from __future__ import annotations

import statistics
from typing import Any

from pictures import MODES, NOTHING, gpus

from kvlane.bench.drawing import Bar, Panel, Picture

KVLANE, OTHERS = "#2f6fb3", "#b9a184"
SHAPES = {"llama-8b": "Llama-3.1-8B"}


def picture(result: dict[str, Any]) -> Picture:
    """From what `compare.py` wrote of one mode and three systems."""
    settings, versions = result["settings"], result["versions"]
    (mode,) = settings["modes"]
    found = {run["system"]: run["found"] for run in result["runs"]}
    systems = (
        ("vLLM's offload", found["offload"], OTHERS),
        (f"PegaFlow {versions['pegaflow-llm-cu13']}", found["pegaflow"], OTHERS),
        (f"kvlane {versions['kvlane']}", found["kvlane"], KVLANE),
    )
    computed = _bar("computed", [found["kvlane"]["cold"]], NOTHING)
    idle = tuple(_bar(name, parts["warm"], colour) for name, parts, colour in systems)
    busy = tuple(_bar(name, parts["beside_decode_warm"], colour) for name, parts, colour in systems)
    gpu = gpus(result["host"]).partition(",")[0]  # without the driver's version
    return Picture(
        title=f"Time to first token (TTFT) of a prompt of {settings['tokens']:,} cached tokens",
        about=f"{gpu}, the shape of {SHAPES[settings['shape']]} (random weights), vLLM {versions['vllm']}, "
        f"{MODES[mode]}, {result['date']}. One system after the other on one host, {settings['prompts']} prompts, "
        f"each loaded {settings['rounds']} times, and {settings['decode_rounds']} times beside decodes; bars: "
        "medians, thin lines: the fastest to the slowest prompt.",
        panels=(
            Panel("in an idle engine", (computed, *idle)),
            Panel(f"beside {settings['decodes']} decodes", busy),
        ),
        columns=2,
        size=1.1,
    )


def _bar(name: str, rounds: list[dict[str, float]], colour: str) -> Bar:
    """The median of the rounds' medians, as in `compare.py`."""
    value = statistics.median(each["p50"] for each in rounds)
    low, high = min(each["min"] for each in rounds), max(each["max"] for each in rounds)
    return Bar(name, value, f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms", colour, low, high)
