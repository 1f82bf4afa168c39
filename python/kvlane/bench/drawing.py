"""Pictures of bars, and the page that pictures of lines begin with. matplotlib lays them out.

A picture of bars is plain data (`Picture`): `draw` turns it into a figure, `save` into a PNG that holds the data beside
the pixels. Each bar has a row with its name on the left and its value behind it.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from kvlane.bench.extra import install, missing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: as wide as the text of a page on GitHub at 100 pixels an inch. Screens with more pixels get more dots.
WIDTH = 8.3
_DOTS = 150
COLOURS = ("#3b78b5", "#e08a3c", "#5a9e6f", "#b5545f", "#8a6fb0", "#8c7a5b", "#4aa3a2", "#7f7f7f")
AT_LEAST, AT_MOST = "#3b78b5", "#e08a3c"
MISSED = "#b3202c"
_TEXT, _QUIET, _EDGE = "#1f2328", "#59636e", "#c5ccd3"
# Inches of a letter at one point, a little more than the mean of matplotlib's font.
_LETTER = 0.0083
# A line of text in a row, in multiples of its letters' height.
_SPACING = 1.35
# The longest names and values, as shares of a column; longer ones are wrapped.
_NAME, _VALUE = 0.34, 0.34
# The name of the PNG's text that holds what was drawn.
_DATA = "kvlane-picture"


@dataclass(frozen=True)
class Bar:
    """One row."""

    name: str
    """Stands before the bar."""
    value: float | None
    """The bar's length. None if nothing was measured: then the row has only its texts."""
    text: str
    """Stands behind the bar."""
    colour: str
    low: float | None = None
    """With `high`: the smallest and the largest sample, drawn as a thin line."""
    high: float | None = None
    samples: tuple[float, ...] = ()
    """Single samples, drawn as dots."""
    hatched: bool = False
    missed: bool = False
    """The figure missed its goal: the text is red."""


@dataclass(frozen=True)
class Panel:
    """Bars below one heading."""

    heading: str
    bars: tuple[Bar, ...]
    goal: float | None = None
    """A line that the bars have to reach, or not to pass."""


@dataclass(frozen=True)
class Picture:
    """Panels whose bars share one scale."""

    title: str
    about: str
    """The caption: what was measured, and where."""
    panels: tuple[Panel, ...]
    columns: int = 1
    size: float = 1.0
    """Scales rows and letters; at 1 a letter has 9 points."""
    cut_at: float | None = None
    """Longer bars end here with a gap before their end, and samples beyond become arrows. The text has the value."""

    def facts(self) -> dict[str, Any]:
        """The picture as JSON gives it back."""
        return json.loads(json.dumps(asdict(self)))


def number(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def finite(value: float | None) -> float | None:
    """None for infinities and NaN, which JSON does not have."""
    return None if value is None or not math.isfinite(value) else value


def page(
    title: str, height: float, rows: int = 1, columns: int = 1, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of this height in inches with a title, and its axes row by row. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=_DOTS, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12)  # pyright: ignore[reportOptionalMemberAccess]
    every: list[Axes] = list(figure.subplots(rows, columns, squeeze=False, **grid).flat)
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_prop_cycle(color=COLOURS)
    figure.suptitle(fill(title, 84), fontsize=11, x=0.02, ha="left", weight="bold", color=_TEXT)
    return figure, every


def draw(picture: Picture) -> Figure:
    """The picture as a figure. Needs matplotlib."""
    import matplotlib

    points = 9 * picture.size
    letters = (WIDTH / picture.columns - 0.4) / (_LETTER * points)
    tables = [[_Row(bar, letters) for bar in panel.bars] for panel in picture.panels]
    headings = [fill(panel.heading, int(0.5 * letters)) for panel in picture.panels]
    firsts = range(0, len(tables), picture.columns)
    # In lines: panels beside each other are as high as the highest.
    heights = [
        max(sum(row.lines for row in table) for table in tables[at : at + picture.columns]) for at in firsts
    ]
    above = sum(
        max(heading.count("\n") + 1.6 if heading else 0.3 for heading in headings[at : at + picture.columns])
        for at in firsts
    )
    about = fill(picture.about, int((WIDTH - 0.4) / (_LETTER * 8.5)))
    height = (sum(heights) + above) * _SPACING * points / 72 + 0.16 * (2 + about.count("\n")) + 0.3
    with matplotlib.rc_context({"text.parse_math": False}):
        figure, every = page(
            picture.title,
            height + 0.19 * fill(picture.title, 84).count("\n"),
            len(heights),
            picture.columns,
            sharex=True,
            height_ratios=heights,
        )
        for at, (axes, panel, rows) in enumerate(zip(every, picture.panels, tables, strict=False)):
            axes.set_ylim(heights[at // picture.columns], 0)
            axes.set_title(headings[at], fontsize=points, loc="left", weight="bold", color=_TEXT)
            _panel(axes, panel, rows, picture.cut_at, points)
        for axes in every:
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0, labelbottom=False, labelsize=points, labelcolor=_TEXT)
        for axes in every[len(tables) :]:
            axes.set_axis_off()
        bars = [bar for panel in picture.panels for bar in panel.bars]
        begin = max(
            min((sample for bar in bars for sample in bar.samples), default=0.0),
            -(picture.cut_at or math.inf),
        )
        end = max(
            (_end(bar, panel, picture.cut_at) for panel in picture.panels for bar in panel.bars), default=0.0
        )
        every[0].set_xlim(min(begin, 0.0), end or 1.0)
        figure.supxlabel(about, fontsize=8.5, x=0.02, ha="left", color=_QUIET)
        # Each pass sees how far texts stand out of their panels, which depends on the pass before.
        for _ in range(6):
            figure.draw_without_rendering()
    return figure


class _Row:
    """A bar with its texts in lines."""

    def __init__(self, bar: Bar, letters: float) -> None:
        self.bar = bar
        self.name = fill(bar.name.replace("\n", " "), int(_NAME * letters))
        self.text = fill(bar.text, int(_VALUE * letters))
        self.lines = max(self.name.count("\n"), self.text.count("\n")) + 1.15


def _panel(axes: Axes, panel: Panel, rows: Sequence[_Row], cut_at: float | None, points: float) -> None:
    """Its bars from top to bottom. The vertical axis counts lines."""
    most = math.inf if cut_at is None else cut_at
    middles, bottom = [], 0.0
    for row in rows:
        bar, middle = row.bar, bottom + row.lines / 2
        middles.append(middle)
        bottom += row.lines
        if bar.value is not None:
            hatch = {"hatch": "////", "edgecolor": "white"} if bar.hatched else {}
            axes.barh(middle, min(bar.value, most), 0.8, color=bar.colour, linewidth=0, **hatch)
            if bar.value > most:
                axes.barh(middle, 0.012 * most, 1.0, left=0.95 * most, color="white")
            if bar.low is not None and bar.high is not None:
                axes.plot([bar.low, bar.high], [middle, middle], "|-", color=_TEXT, linewidth=1, markersize=4)
            dots = {"color": _TEXT, "markerfacecolor": "white", "markeredgewidth": 0.7, "clip_on": False}
            marks = {
                sample: "o" if abs(sample) <= most else ">" if sample > 0 else "<" for sample in bar.samples
            }
            for sample, marker in marks.items():
                axes.plot(
                    max(-most, min(sample, most)),
                    middle,
                    marker,
                    markersize=3.3 if marker == "o" else 5,
                    **dots,
                )
        axes.annotate(
            row.text,
            (_end(bar, panel, cut_at), middle),
            xytext=(5, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=points,
            color=MISSED if bar.missed else _TEXT,
            weight="bold" if bar.missed else "normal",
        )
    axes.set_yticks(middles, [row.name for row in rows])
    axes.vlines(0, 0, bottom, color=_EDGE, linewidth=1)
    if panel.goal is not None:
        axes.vlines(panel.goal, 0, bottom, color=_TEXT, linewidth=1.4)


def _end(bar: Bar, panel: Panel, cut_at: float | None) -> float:
    """How far to the right bar, dots and goal reach."""
    known = [each for each in (bar.value, bar.high, *bar.samples) if each is not None]
    end = max([*known, 0.0])
    return max(end if cut_at is None else min(end, cut_at), panel.goal or 0.0)


def save(picture: Picture, path: Path) -> None:
    """Draw it into a PNG, with `Picture.facts` beside the pixels."""
    write(draw(picture), picture.facts(), path)


def from_stdin(
    picture: Callable[[Mapping[str, Any]], Figure],
    facts: Callable[[Mapping[str, Any]], dict[str, Any]],
    arguments: Sequence[str],
) -> int:
    """Draws the report that comes in by stdin, as JSON, into the PNG that the arguments name."""
    (path,) = arguments
    if lacks := missing(("matplotlib",)):
        sys.exit(f"a picture needs matplotlib: {install(lacks)}")
    report = json.load(sys.stdin)
    write(picture(report), facts(report), Path(path))
    return 0


def write(figure: Figure, facts: dict[str, Any], path: Path) -> None:
    """A PNG of `figure` with `facts`, which `facts_in` reads back."""
    # matplotlib depends on it.
    from PIL import Image, PngImagePlugin

    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=_DOTS, format="png")
    texts = PngImagePlugin.PngInfo()
    texts.add_text(_DATA, json.dumps(facts))
    # Pictures are committed again and again: with a palette they take a third of the bytes.
    few_colours = Image.open(pixels).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    path.parent.mkdir(parents=True, exist_ok=True)
    few_colours.save(path, format="png", optimize=True, dpi=(_DOTS, _DOTS), pnginfo=texts)


def facts_in(path: Path) -> Any:
    """The facts that `write` put beside the pixels, or None. Raises ValueError if it is no PNG."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path, formats=("PNG",)) as image:
            return json.loads(image.info.get(_DATA, "null"))
    except UnidentifiedImageError:
        raise ValueError(f"{path} is not a PNG") from None
