"""Pictures can be read: no text lies on another, and what they show is what was measured."""

from __future__ import annotations

import importlib.util
import itertools
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlane.bench import drawing, pictures, replay_picture, route_replay_picture
from kvlane.bench.drawing import Bar, Panel, Picture
from kvlane.bench.figures import Figure

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def redraw() -> Iterator[Any]:
    """bench/redraw.py, which finds modules beside it by sys.path."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("redraw", ROOT / "bench/redraw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["redraw"] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = before
        for name in ("redraw", "first_picture", "pictures"):
            sys.modules.pop(name, None)


def unreadable(figure: Any) -> list[str]:
    """A sentence for each text that lies on another one or on a bar, or is not all on the page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    drawn: list[Text] = []
    # Axes have labels that they do not draw, for ticks out of their range.
    with pytest.MonkeyPatch.context() as patch:
        draw = Text.draw
        patch.setattr(Text, "draw", lambda text, renderer: (drawn.append(text), draw(text, renderer)))
        canvas.draw()
    texts = [each for each in drawn if each.get_visible() and each.get_text().strip()]
    boxes = [(each.get_text(), each.get_window_extent(canvas.get_renderer())) for each in texts]
    bars = [
        each.get_window_extent()
        for axes in figure.axes
        for each in axes.patches
        if isinstance(each, Rectangle)
    ]
    found = [f"{a!r} lies on {b!r}" for (a, x), (b, y) in itertools.combinations(boxes, 2) if _overlap(x, y)]
    found += [f"{text!r} lies on a bar" for text, box in boxes for bar in bars if _overlap(box, bar)]
    page = figure.bbox
    found += [
        f"{text!r} is not all on the page"
        for text, box in boxes
        if box.x0 < page.x0 or box.x1 > page.x1 or box.y0 < page.y0 or box.y1 > page.y1
    ]
    return found


def _overlap(a: Any, b: Any) -> bool:
    """By more than a pixel, as boxes of letters that touch do."""
    return min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1


def test_no_text_of_a_committed_picture_lies_on_another(redraw: Any) -> None:
    """Eleven labels of bench/ssd lay on each other, and nobody could read what was missed."""
    found = {str(each.path.relative_to(ROOT)): unreadable(each.draw()) for each in redraw.committed()}
    assert len(found) > 10
    assert {path: sentences for path, sentences in found.items() if sentences} == {}


def test_committed_pictures_show_the_committed_results(redraw: Any) -> None:
    assert list(redraw.stale(redraw.committed())) == []


def test_every_committed_picture_is_redrawn_by_the_script(redraw: Any) -> None:
    """One that nobody can draw again goes out of step with its result, and nobody notices."""
    drawn = {each.path for each in redraw.committed()}
    there = {*(ROOT / "bench").glob("*/results/**/*.png"), *(ROOT / "docs/pictures").glob("*.png")}
    assert there == drawn


def test_a_picture_of_another_result_is_noticed(
    redraw: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = next(iter(redraw.committed()))
    monkeypatch.setattr(redraw, "ROOT", tmp_path)
    copied = tmp_path / first.path.name
    here = replace(first, path=copied)
    assert list(redraw.stale(iter([here]))) == [f"{copied.name} is missing"]
    shutil.copy(first.path, copied)
    assert list(redraw.stale(iter([here]))) == []
    changed = replace(here, facts=first.facts | {"title": "other tokens"})
    assert list(redraw.stale(iter([changed]))) == [f"{copied.name} does not show {first.result.name}"]


def test_the_first_picture_shows_three_systems_of_one_run_idle_and_beside_decodes(redraw: Any) -> None:
    first = next(iter(redraw.committed()))
    idle, busy = ({bar["name"]: bar["value"] for bar in panel["bars"]} for panel in first.facts["panels"])
    # The medians of the result's rounds, as its lab book tells them.
    assert idle == {
        "computed": 274.37,
        "vLLM's offload": 72.267,
        "PegaFlow 0.25.1": 46.636,
        "kvlane 0.1.0": 33.999,
    }
    rounded = {name: round(value, 2) for name, value in busy.items()}
    assert rounded == {"vLLM's offload": 73.18, "PegaFlow 0.25.1": 146.12, "kvlane 0.1.0": 44.68}
    width, height = first.draw().get_size_inches() * 100
    # With four commands below it, it has to fit on a screen of 1280 x 800.
    assert round(width) <= 830 and round(height) <= 260


def result(*figures: Figure) -> dict[str, Any]:
    return {
        "benchmark": "lookup",
        "date": "2026-11-23",
        "machine": {"cpu": "a CPU", "cores": 2},
        "figures": [figure.facts() for figure in figures],
    }


def test_at_least_and_at_most_are_told_apart_and_goals_are_lines() -> None:
    """One colour for both said nothing: a long bar was good in one place and bad in the next."""
    found = pictures.goals(
        result(
            Figure("rate", 0.5, at_least=1.0),
            Figure("time", 3.0, "ms", at_most=2.0),
            Figure("for information", 7.0),
        )
    )
    assert found is not None
    least, most = found.panels
    assert least.goal == most.goal == 1.0
    assert (least.bars[0].colour, least.bars[0].hatched) != (most.bars[0].colour, most.bars[0].hatched)
    assert [(bar.text, bar.value, bar.missed) for panel in found.panels for bar in panel.bars] == [
        ("0.5x, goal 1x: missed", 0.5, True),
        ("3 ms, goal 2 ms: missed", 1.5, True),
    ]
    assert unreadable(drawing.draw(found)) == []


def test_goals_without_a_number_and_far_away_are_drawn_too() -> None:
    found = pictures.goals(
        result(
            Figure("never came", float("nan"), "ms", at_most=2.0),
            Figure("below nothing", -1.0, "ms", at_most=2.0),
            Figure("far away", 900.0, at_least=1.0),
        )
    )
    assert found is not None
    assert [bar.text for panel in found.panels for bar in panel.bars] == [
        "900x, goal 1x",
        "not measured, goal 2 ms: missed",
        "-1 ms, goal 2 ms",
    ]
    assert unreadable(drawing.draw(found)) == []


def test_without_goals_there_is_no_picture_of_goals() -> None:
    assert pictures.goals(result(Figure("for information", 7.0))) is None


def served(count: int) -> dict[str, Any]:
    each = [100.0 + number for number in range(count)]
    ttft = {"mean": sum(each) / count, "p50": each[count // 2], "p99": each[-1]}
    return {
        "settings": {"num_prompts": count, "input_len": 2000, "request_rate": 2.0},
        "machine": {"cpu": "a CPU"},
        "runs": [
            {
                "name": name,
                "rounds": [
                    {"round": round_, "ttft_ms": ttft, "ttft_each_ms": each} for round_ in ("cold", "warm")
                ],
            }
            for name in ("vLLM alone", "vLLM with kvlane")
        ],
    }


def test_of_few_prompts_each_is_drawn_and_of_many_the_p99() -> None:
    """The p99 of four prompts is the slowest of them, and looked like a property of the system."""
    few, many = pictures.serve(served(4)), pictures.serve(served(200))
    for bar in few.panels[0].bars:
        assert bar.samples == (100.0, 101.0, 102.0, 103.0) and "p99" not in bar.text and bar.high is None
    for bar in many.panels[0].bars:
        assert bar.samples == () and bar.text == "200 ms, p99 299 ms" and bar.high == 299.0
    assert unreadable(drawing.draw(few)) == unreadable(drawing.draw(many)) == []


def test_rounds_without_any_answer_have_a_row() -> None:
    failed = served(4)
    failed["runs"][0]["rounds"][1] |= {"ttft_ms": dict.fromkeys(("mean", "p50", "p99")), "ttft_each_ms": []}
    shown = pictures.serve(failed)
    assert [(bar.value, bar.text) for bar in shown.panels[0].bars] == [(101.5, "102 ms"), (None, "no answer")]
    assert unreadable(drawing.draw(shown)) == []


def test_the_demo_shows_each_prompt() -> None:
    timed = {"ttft_ms": {"mean": 2.0, "p50": 2.0, "p99": 3.0}, "ttft_each_ms": [1.0, 2.0, 3.0]}
    shown = pictures.demo("on cpu: a CPU", 512, {"cold": timed, "control": {}, "ssd": timed})
    assert [(bar.name, bar.samples) for bar in shown.panels[0].bars] == [
        ("computed", (1.0, 2.0, 3.0)),
        ("from the SSD", (1.0, 2.0, 3.0)),
    ]
    assert unreadable(drawing.draw(shown)) == []


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_bars_are_called_and_however_long_they_are(seed: int) -> None:
    source = random.Random(seed)

    def words(most: int) -> str:
        return " ".join("x" * source.randint(1, 14) for _ in range(source.randint(1, most)))

    def bar() -> Bar:
        value = source.choice([None, 0.0, source.uniform(0, 1), 10 ** source.uniform(-3, 6)])
        samples = tuple(source.uniform(0, 2) * (value or 1) for _ in range(source.choice([0, 3])))
        return Bar(words(9), value, words(2), "#3b78b5", samples=samples, missed=source.random() < 0.3)

    panels = tuple(
        Panel(words(12), tuple(bar() for _ in range(source.randint(1, 9))), source.choice([None, 1.0]))
        for _ in range(source.randint(1, 5))
    )
    picture = Picture(words(20), words(60), panels, source.choice([1, 2]), cut_at=source.choice([None, 2.5]))
    assert unreadable(drawing.draw(picture)) == []


def test_what_was_drawn_is_read_back(tmp_path: Path) -> None:
    picture = Picture(
        "“title”", "$about$", (Panel("", (Bar("a", 1.5, "1.5 µs", "#000000", samples=(1.0,)),)),)
    )
    drawing.save(picture, tmp_path / "new" / "a.png")
    assert drawing.facts_in(tmp_path / "new" / "a.png") == picture.facts()
    pytest.importorskip("PIL").Image.open(tmp_path / "new" / "a.png").verify()
    (tmp_path / "b.png").write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match=r"b\.png is not a PNG"):
        drawing.facts_in(tmp_path / "b.png")


def test_capacities_that_lie_close_together_are_not_written_on_each_other() -> None:
    """`kvlane replay --capacity 9%,9.5%,10%` wrote three numbers on one place."""
    report = {
        "trace": "t.jsonl",
        "with_scans": False,
        "ceiling_percent": 36.6,
        "results": [
            {"policy": "lru", "capacity_share": share, "prefix_hit_percent": 50 * share}
            for share in (0.01, 0.09, 0.095, 0.1, 0.105)
        ],
    }
    assert unreadable(replay_picture.picture(report)) == []


def test_policies_of_a_fleet_are_not_written_on_each_other() -> None:
    figures = ("ttft_p50_ms", "ttft_p99_ms", "within_limits_percent")
    report = {
        "trace": "conversation_trace.jsonl",
        "fleet": "4 prefill h100-llama-8b, 4 decode h100-llama-8b",
        "capacity_requests_per_second": 10.6,
        "results": [
            {"policy": policy, "load": load} | dict.fromkeys(figures, 30_000 * load)
            for policy in (
                "random",
                "round-robin",
                "power-of-two",
                "least-loaded",
                "prefix-affinity",
                "least-work",
            )
            for load in (0.3, 0.95)
        ],
    }
    assert unreadable(route_replay_picture.picture(report)) == []


def test_one_far_sample_does_not_hide_the_bars() -> None:
    """A prompt of 29 s set the scale of the picture of NIXL, and a bar of 0.1 s could not be seen."""
    bar = Bar("a", 100.0, "100 ms", "#3b78b5", samples=(90.0, 29_000.0, -29_000.0))
    picture = Picture("title", "about", (Panel("", (bar,)),), cut_at=200.0)
    (axes,) = drawing.draw(picture).axes
    assert axes.get_xlim() == (-200.0, 200.0)
    assert [(line.get_marker(), *line.get_xdata()) for line in axes.lines] == [
        ("o", 90.0),
        (">", 200.0),
        ("<", -200.0),
    ]
