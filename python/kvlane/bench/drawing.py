"""Pictures of bars. What is drawn is plain data (`Picture`); `draw` lays it out; `save` makes a PNG that holds it.

Every bar is a row of its own, with its name before it and its value behind it. All texts are measured before anything
is drawn, so that no two overlap, however many bars there are.
"""

from __future__ import annotations

import io
import json
import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlane.bench.extra import install, missing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# As wide as the text of a page on GitHub with 100 pixels an inch; more dots for screens that have them.
WIDTH = 8.3
_DOTS = 150
COLOURS = ("#3b78b5", "#e08a3c", "#5a9e6f", "#b5545f", "#8a6fb0", "#8c7a5b", "#4aa3a2", "#7f7f7f")
AT_LEAST, AT_MOST = "#3b78b5", "#e08a3c"
MISSED = "#b3202c"
_TEXT, _QUIET, _LINE = "#1f2328", "#59636e", "#1f2328"
_MARGIN, _GAP = 0.15, 0.3
# The name of the PNG's text that holds what was drawn.
_DATA = "kvlane-picture"


@dataclass(frozen=True)
class Bar:
    """One row."""

    name: str
    """Stands before it."""
    value: float | None
    """How long it is; None where nothing was measured: then only the text is written."""
    text: str
    """Stands behind it."""
    colour: str
    low: float | None = None
    """With `high`: the smallest and the largest sample, drawn as a thin line."""
    high: float | None = None
    samples: tuple[float, ...] = ()
    """Single samples, drawn as dots."""
    hatched: bool = False
    missed: bool = False
    """It missed its goal: the text is red."""


@dataclass(frozen=True)
class Panel:
    """Bars below one heading."""

    heading: str
    bars: tuple[Bar, ...]
    goal: float | None = None
    """Where a line stands that the bars have to reach, or not to pass."""


@dataclass(frozen=True)
class Picture:
    """All that is drawn. Bars of all panels have the same scale."""

    title: str
    about: str
    """Below the title: what was measured, and where."""
    panels: tuple[Panel, ...]
    columns: int = 1
    size: float = 1.0
    """Of the rows and their letters; 1 is 12.5 pixels high."""
    cut_at: float | None = None
    """Longer bars end here, with a gap before their end: their text says how long they are."""

    def facts(self) -> dict[str, Any]:
        """As JSON gives it back."""
        return json.loads(json.dumps(asdict(self)))


def number(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def draw(picture: Picture) -> Figure:
    """The picture, laid out. Needs matplotlib."""
    pen = _Pen()
    points = 9 * picture.size
    column = (WIDTH - 2 * _MARGIN - _GAP * (picture.columns - 1)) / picture.columns
    bars = [bar for panel in picture.panels for bar in panel.bars]
    widest = max((pen.width(bar.name, points) for bar in bars), default=0.0)
    names = min(widest, 0.45 * column)
    wrapped = {bar.name: pen.wrapped(bar.name, points, names) for bar in bars}
    # A name that is one long word may be wider than was asked for.
    names = max((pen.width(line, points) for lines in wrapped.values() for line in lines), default=0.0)
    line = points / 72 * 1.25
    length = column - names - 0.1
    scale = _scale(picture, pen, points, length)

    top = _MARGIN
    title = pen.wrapped(picture.title, 12, WIDTH - 2 * _MARGIN, bold=True)
    top = pen.lines(_MARGIN, top, title, 12, bold=True)
    about = pen.wrapped(picture.about, 8.5, WIDTH - 2 * _MARGIN)
    top = pen.lines(_MARGIN, top + 0.03, about, 8.5, colour=_QUIET) + 0.12
    for first in range(0, len(picture.panels), picture.columns):
        below = top
        for place, panel in enumerate(picture.panels[first : first + picture.columns]):
            left = _MARGIN + place * (column + _GAP)
            y = top
            if panel.heading:
                heading = pen.wrapped(panel.heading, points, column, bold=True)
                y = pen.lines(left, y, heading, points, bold=True) + 0.04
            start = left + names + 0.1
            begin = y
            for bar in panel.bars:
                lines = wrapped[bar.name]
                height = line * max(len(lines), 1) + 0.09 * picture.size
                _row(
                    pen,
                    bar,
                    lines,
                    (left, start),
                    (y, height, line),
                    scale,
                    points,
                    panel.goal,
                    picture.cut_at,
                )
                y += height
            pen.line(start, begin, start, y, "#c5ccd3", 0.8)
            if panel.goal is not None:
                pen.line(start + panel.goal * scale, begin, start + panel.goal * scale, y, _LINE, 1.4)
            below = max(below, y)
        top = below + 0.14
    return pen.finish(top - 0.14 + _MARGIN)


def _end(bar: Bar, goal: float | None, cut_at: float | None) -> float:
    """How far to the right bar, dots and goal reach."""
    known = [each for each in (bar.value, bar.high, goal, *bar.samples) if each is not None]
    end = max(known, default=0.0)
    return end if cut_at is None else min(end, max(cut_at, goal or 0.0))


def _scale(picture: Picture, pen: _Pen, points: float, length: float) -> float:
    """Inches of one unit: the largest for which all texts find their place behind their bars."""
    scales = [
        max(length - pen.width(bar.text, points, bold=bar.missed) - 0.12, 0.2) / end
        for panel in picture.panels
        for bar in panel.bars
        if (end := _end(bar, panel.goal, picture.cut_at)) > 0
    ]
    return min(scales, default=1.0)


def _row(
    pen: _Pen,
    bar: Bar,
    name: Sequence[str],
    x: tuple[float, float],
    y: tuple[float, float, float],
    scale: float,
    points: float,
    goal: float | None,
    cut_at: float | None,
) -> None:
    (left, start), (top, height, line) = x, y
    middle = top + height / 2
    pen.lines(left, middle - line * len(name) / 2, name, points)
    if bar.value is not None:
        cut = cut_at is not None and bar.value > cut_at
        length = min(bar.value, cut_at if cut_at is not None else bar.value) * scale
        pen.box(start, middle - line * 0.42, length, line * 0.84, bar.colour, bar.hatched)
        if cut:
            pen.box(start + length - 0.16, middle - line * 0.5, 0.05, line, "white", False)
        if bar.low is not None and bar.high is not None:
            pen.line(start + bar.low * scale, middle, start + bar.high * scale, middle, _LINE, 1.0)
            for end in (bar.low, bar.high):
                pen.line(start + end * scale, middle - 0.04, start + end * scale, middle + 0.04, _LINE, 1.0)
        pen.dots([start + sample * scale for sample in bar.samples], middle)
    behind = start + _end(bar, goal, cut_at) * scale + 0.07
    colour = MISSED if bar.missed else _TEXT
    pen.lines(behind, middle - line / 2, [bar.text], points, colour=colour, bold=bar.missed)


class _Pen:
    """Writes on a page in inches from its upper left corner, and knows how wide its letters are."""

    def __init__(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._figure = Figure(figsize=(WIDTH, 1), dpi=_DOTS, facecolor="white")
        self._renderer = FigureCanvasAgg(self._figure).get_renderer()
        self._axes = self._figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self._axes.set_axis_off()

    def width(self, text: str, points: float, *, bold: bool = False) -> float:
        """In inches."""
        from matplotlib.font_manager import FontProperties

        font = FontProperties(size=points, weight="bold" if bold else "normal")
        return self._renderer.get_text_width_height_descent(text, font, False)[0] / _DOTS

    def wrapped(self, text: str, points: float, width: float, *, bold: bool = False) -> list[str]:
        """The text in lines of at most `width` inches, as long as its words allow that."""
        lines: list[str] = []
        for part in filter(None, text.split("\n")):
            lines.append("")
            for word in part.split(" "):
                longer = f"{lines[-1]} {word}" if lines[-1] else word
                if lines[-1] and self.width(longer, points, bold=bold) > width + 0.001:
                    lines.append(word)
                else:
                    lines[-1] = longer
        return lines

    def lines(
        self,
        x: float,
        y: float,
        lines: Sequence[str],
        points: float,
        *,
        colour: str = _TEXT,
        bold: bool = False,
    ) -> float:
        """Lines from (x, y) on. Gives where the next one would begin."""
        step = points / 72 * 1.25
        for number, text in enumerate(lines):
            self._axes.text(
                x,
                y + (number + 0.5) * step,
                text,
                fontsize=points,
                color=colour,
                weight="bold" if bold else "normal",
                verticalalignment="center_baseline",
                parse_math=False,
            )
        return y + len(lines) * step

    def box(self, x: float, y: float, width: float, height: float, colour: str, hatched: bool) -> None:
        from matplotlib.patches import Rectangle

        hatch = "////" if hatched else None
        edge = "white" if hatched else "none"
        self._axes.add_patch(
            Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, hatch=hatch, linewidth=0)
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str, width: float) -> None:
        self._axes.plot([x, to_x], [y, to_y], color=colour, linewidth=width, solid_capstyle="butt")

    def dots(self, at: Sequence[float], y: float) -> None:
        if at:
            self._axes.scatter(
                at, [y] * len(at), s=11, facecolor="white", edgecolor=_LINE, linewidth=0.7, zorder=3
            )

    def finish(self, height: float) -> Figure:
        self._figure.set_size_inches(WIDTH, height)
        self._axes.set_xlim(0, WIDTH)
        self._axes.set_ylim(height, 0)
        return self._figure


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
    # matplotlib cannot do without it.
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
    """What `write` put beside the pixels; None where nothing is. Needs no matplotlib. ValueError if it is no PNG."""
    data = path.read_bytes()
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError(f"{path} is not a PNG")
    at = 8
    while at + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        name, _, text = data[at + 8 : at + 8 + size].partition(b"\0")
        if kind == b"tEXt" and name == _DATA.encode():
            return json.loads(text)
        at += 12 + size
    return None


def finite(value: float | None) -> float | None:
    """None for what is not a number, which JSON does not know."""
    return None if value is None or not math.isfinite(value) else value
