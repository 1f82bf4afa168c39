"""The README's picture: the time to the first token of 10,000 cached tokens, by four systems on one GPU.

All four are of one run on one host (`compare.py`): each system alone on the GPU, one after the other. `bench/redraw.py`
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
    """From what `compare.py` wrote of one mode and four systems."""
    settings, versions = result["settings"], result["versions"]
    (mode,) = settings["modes"]
    found = {run["system"]: run["found"] for run in result["runs"]}
    rows = (
        ("computed again", [found["none"]["cold"]], NOTHING),
        ("vLLM's offload", found["offload"]["warm"], OTHERS),
        (f"PegaFlow {versions['pegaflow-llm-cu13']}", found["pegaflow"]["warm"], OTHERS),
        (f"kvlane {versions['kvlane']}", found["kvlane"]["warm"], KVLANE),
    )
    gpu = gpus(result["host"]).partition(",")[0]  # without the driver's version
    return Picture(
        title=f"Time to first token (TTFT) of a prompt of {settings['tokens']:,} cached tokens",
        about=f"{gpu}, the shape of {SHAPES[settings['shape']]} (random weights), vLLM {versions['vllm']}, "
        f"{MODES[mode]}, {result['date']}. One system after the other on one host, {settings['prompts']} prompts, "
        f"each loaded {settings['rounds']} times; bars: medians, thin lines: the fastest to the slowest prompt.",
        panels=(Panel("", tuple(_bar(*row) for row in rows)),),
        size=1.25,
    )


def _bar(name: str, rounds: list[dict[str, float]], colour: str) -> Bar:
    """The median of the rounds' medians, as in `compare.py`."""
    value = statistics.median(each["p50"] for each in rounds)
    low, high = min(each["min"] for each in rounds), max(each["max"] for each in rounds)
    return Bar(name, value, f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms", colour, low, high)
