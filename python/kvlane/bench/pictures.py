"""The pictures of `kvlane bench` and `kvlane demo`, made from their JSON files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlane.bench.drawing import AT_LEAST, AT_MOST, COLOURS, Bar, Panel, Picture, finite, number

# The 99th percentile of fewer samples is the largest one: they are drawn instead.
_P99_SAMPLES = 100
# The scale's end in multiples of a goal; values further off are written as text.
_FARTHEST = 2.5


def goals(result: Mapping[str, Any]) -> Picture | None:
    """Every figure with a goal, as a multiple of the goal. `result` is what `figures.publish` writes. None if no figure
    has one. Figures with a least value and figures with a largest value have panels and colours of their own.
    """
    at_least = tuple(_share(each, "at_least") for each in result["figures"] if each["at_least"] is not None)
    at_most = tuple(_share(each, "at_most") for each in result["figures"] if each["at_most"] is not None)
    panels = [
        Panel("At least: a bar has to reach the line, which is the goal", at_least, 1.0),
        Panel("At most: a bar has to end before the line, which is the goal", at_most, 1.0),
    ]
    filled = tuple(panel for panel in panels if panel.bars)
    if not filled:
        return None
    shares = [bar.value for panel in filled for bar in panel.bars if bar.value is not None]
    cut = " A bar with a gap is longer than it is drawn." if max(shares, default=0.0) > _FARTHEST else ""
    return Picture(
        f"kvlane bench {result['benchmark']}: what was measured, and the goals",
        f"Bars: what was measured, as a multiple of its goal.{cut} {_where(result)}",
        filled,
        cut_at=_FARTHEST,
    )


def of_the_slowest_rank(result: Mapping[str, Any]) -> Picture:
    """Medians of `kvlane bench all-to-all --device cuda`: each call, and what is beside it."""
    end = ", p50 of the slowest rank"
    bars = tuple(
        Bar(
            figure["what"].removesuffix(end),
            finite(figure["value"]),
            figure["text"],
            AT_LEAST if figure["what"].startswith(("dispatch", "combine")) else AT_MOST,
        )
        for figure in result["figures"]
        if figure["what"].endswith(end) and "again" not in figure["what"]
    )
    settings = result["settings"]
    return Picture(
        f"Dispatch and combine of {settings['tokens']} tokens a rank among {settings['ranks']} ranks",
        f"Medians of the slowest rank: kvlane's calls, and what they are beside. {result['note']} {result['date']}.",
        (Panel("us", bars),),
    )


def _share(figure: Mapping[str, Any], bound: str) -> Bar:
    value, goal = finite(figure["value"]), figure[bound]
    # At a goal of 0 there are no multiples: 0 reaches it, and anything else does not.
    share = max(value, 0.0) / goal if value is not None and goal else None
    text = figure["text"] if value is not None else "not measured"
    return Bar(
        figure["what"],
        share,
        f"{text}, goal {figure['goal'].removeprefix('at least ').removeprefix('at most ')}"
        + ("" if figure["passed"] else ": missed"),
        AT_LEAST if bound == "at_least" else AT_MOST,
        hatched=bound == "at_most",
        missed=not figure["passed"],
    )


def _where(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    cores = "one core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    return f"{machine['cpu']}, {cores}, {result['date']}."


def fabric(result: Mapping[str, Any]) -> dict[str, Picture]:
    """Rates of long operations and latencies of short ones, over sockets and between processes of one host, and the
    goals. Keyed by the suffix of the file's name behind that of the benchmark. `result` is that of `kvlane bench
    fabric`.
    """
    found: dict[str, Picture] = {}
    about = _where(result) + " Medians of rounds in which the systems take turns."
    for place, transports, how in (
        ("", ("tcp", "tcp-no-checksums", "tls"), "TCP"),
        ("-one-host", ("cma", "memory"), "one host"),
    ):
        results = [each for each in result["results"] if each["transport"] in transports]
        for kind, what, unit in (("", "gb_per_s", "GB/s"), ("-latency", "p50_us", "us")):
            rows = [each for each in results if (each["bytes"] <= SMALL) == (kind == "-latency")]
            title = "latency of single operations, p50" if kind else "GB/s of single operations"
            if panels := _operations(rows, what, unit):
                found[place + kind] = Picture(f"kvlane bench fabric, {how}: {title}", about, panels, 2)
    if wanted := goals(result):
        found["-goals"] = wanted
    return found


SMALL = 64 * 1024
"""Operations up to so many bytes are drawn by latency, longer ones by rate."""


def _operations(rows: Sequence[Mapping[str, Any]], what: str, unit: str) -> tuple[Panel, ...]:
    """A panel for each operation: of one size, writes to the left and reads to the right."""
    systems = list(dict.fromkeys(each["system"] for each in rows))
    panels: dict[tuple[str, int | None], dict[str, list[Bar]]] = {}
    for row in rows:
        value = row[what]
        if value is None and "error" not in row:
            continue  # a stream has no latency
        size = row["bytes"] if row["pattern"] == "contiguous" else None
        bars = panels.setdefault((row["pattern"], size), {}).setdefault(row["op"], [])
        bars.append(
            Bar(
                row["system"],
                value,
                "failed" if value is None else f"{number(value)} {unit}",
                COLOURS[systems.index(row["system"]) % len(COLOURS)],
            )
        )
    return tuple(
        Panel(f"{op.upper()} {pattern if size is None else size_name(size)}", tuple(bars))
        for (pattern, size), by_op in panels.items()
        for op, bars in by_op.items()
    )


def size_name(size: int) -> str:
    """For people: 2 MiB."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def serve(result: Mapping[str, Any]) -> Picture:
    """The time to first token in each round of each engine. `result` is that of `kvlane bench serve`."""
    settings = result["settings"]
    engines = [measured["name"] for measured in result["runs"]]
    panels = tuple(
        Panel(
            measured["name"],
            tuple(
                _times(round_label(each), each["ttft_ms"], each.get("ttft_each_ms", ()), index)
                for each in measured["rounds"]
            ),
        )
        for index, measured in enumerate(result["runs"])
    )
    drawn = [bar for panel in panels for bar in panel.bars]
    kinds = ["dots: single prompts"] if any(bar.samples for bar in drawn) else []
    kinds += ["thin lines: from the median to p99"] if any(bar.high is not None for bar in drawn) else []
    return Picture(
        "Time to first token (TTFT)" + ("" if len(engines) > 1 else f", {engines[0]}" if engines else ""),
        f"{settings['num_prompts']} prompts of {settings['input_len']} tokens, {settings['request_rate']} a second. "
        f"{'; '.join(['Bars: the mean', *kinds])}. {result['machine']['cpu']}.",
        panels,
    )


def round_label(each: Mapping[str, Any]) -> str:
    """The round's name; a repeat that is not known to be warm is marked."""
    return f"{each['round']} (not known\nto be kvlane's)" if each.get("not_warm") else each["round"]


def _times(name: str, summary: Mapping[str, float], samples: Sequence[float], colour: int) -> Bar:
    """A row with the mean: with all samples if they are few, else with the median and p99."""
    mean = finite(summary["mean"])
    if mean is None:
        return Bar(name, None, "no answer", COLOURS[0])
    few = len(samples) < _P99_SAMPLES
    text = f"{number(mean)} ms" if few else f"{number(mean)} ms, p99 {number(summary['p99'])} ms"
    return Bar(
        name,
        mean,
        text,
        COLOURS[colour % len(COLOURS)],
        low=None if few else summary["p50"],
        high=None if few else summary["p99"],
        samples=tuple(samples) if few else (),
    )


def demo(title: str, prompt_tokens: int, scenarios: Mapping[str, Mapping[str, Any]]) -> Picture:
    """The time to first token computed, from the daemon and from the SSD: by name, figures of scenarios of the demo."""
    names = {"cold": "computed", "warm": "from the daemon", "ssd": "from the SSD"}
    bars = [
        _times(name, scenarios[key]["ttft_ms"], scenarios[key].get("ttft_each_ms", ()), index)
        for index, (key, name) in enumerate(names.items())
        if key in scenarios and "ttft_ms" in scenarios[key]
    ]
    return Picture(
        f"Time to first token of {prompt_tokens:,} tokens",
        f"{title[:1].upper()}{title[1:]}. Bars: the mean; dots: single prompts.",
        (Panel("", tuple(bars)),),
    )


def direct(result: Mapping[str, Any]) -> Picture:
    """When a prompt's prefill ends and when its first token comes. `result` is what the demo of direct hand-offs
    writes."""
    made = [each for each in result["handed_over"] if each["prefill_ms"] is not None]
    panels = []
    if made:
        steps = (("prefill engine answers", "prefill_ms"), ("decode engine's first token", "first_token_ms"))
        bars = []
        for place, (label, name) in enumerate(steps):
            each = [one[name] for one in made]
            mean = sum(each) / len(each)
            bars.append(Bar(label, mean, f"{number(mean)} ms", COLOURS[place], samples=tuple(each)))
        panels.append(Panel("Milliseconds from asking both engines", tuple(bars)))
    return Picture(
        "Prompts handed over directly",
        f"{result['title'][:1].upper()}{result['title'][1:]}. Bars: means; dots: single prompts.",
        tuple(panels),
    )


HOSTS = {"cold": "computed at A", "remote": "B's first hit, from A", "local": "B again, from its own pool"}
"""The bars of `hosts`, by their keys in the result."""


def hosts(result: Mapping[str, Any]) -> Picture:
    """The time to the first token of a prompt that another host has computed. `result` is what the demo of two hosts
    writes."""
    bars = []
    for place, (name, label) in enumerate(HOSTS.items()):
        if found := result["ttft_ms"].get(name):
            mean = found["mean"]
            bars.append(Bar(label, mean, f"{number(mean)} ms", COLOURS[place], samples=tuple(found["each"])))
    panels = [Panel("Time to first token, ms", tuple(bars))] if bars else []
    return Picture(
        f"{result['prompt_tokens']} tokens that another host has computed",
        f"{result['title'][:1].upper()}{result['title'][1:]}. Bars: means; dots: single prompts.",
        tuple(panels),
    )


def pairs(result: Mapping[str, Any]) -> Picture:
    """The share of a prompt that decode engines compute. The demo of prefill and decode engines writes `result`."""
    panels = []
    tokens = result["prompt_tokens"]
    each = [
        computed
        for scenario in result["scenarios"]
        for computed in scenario["figures"].get("computed_tokens_each", ())
    ]
    if each:
        mean = sum(each) / len(each)
        decode = Bar(
            "decode engine",
            100 * mean / tokens,
            f"{number(mean)} tokens, most {max(each)}",
            COLOURS[1],
            samples=tuple(100 * computed / tokens for computed in each),
        )
        alone = Bar("one engine alone", 100.0, f"{tokens} tokens", COLOURS[0])
        panels.append(Panel("Share of a prompt's tokens that is computed", (alone, decode)))
    return Picture(
        "Prefill and decode engines behind kvlane route",
        f"{result['title'][:1].upper()}{result['title'][1:]}. Bars: means; dots: single prompts.",
        tuple(panels),
    )
