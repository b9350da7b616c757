"""What every figure of a report shares: its size, its dress, and how it becomes part of a page.

Figures are narrow, because a page shows two side by side on a laptop and one on a phone, with letters still legible.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from sottovoce.drawing import COLOURS, FAINT, INK, LINE_STYLES, MARKERS, in_theme

WIDTH, HEIGHT = 4.8, 3.1  # inches
LETTERS = 62  # that fit beside one another in a legend; its lines and gaps take seven for each entry
# Text stays text: it is small, can be found and read aloud, and takes the page's own letters.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "sottovoce", "svg.fonttype": "none", "text.parse_math": False}
_IDS = re.compile(r'(\bid="|url\(#|href="#)')


@dataclass(frozen=True)
class Drawing:
    """One figure. `caption` says what to see; `alt` says what is drawn, for whoever cannot see it."""

    macro: ClassVar[str] = "figure"

    name: str
    title: str
    caption: str
    alt: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Pen:
    """How one run, or one kind of parameter, is told from the others: by more than colour alone."""

    label: str
    colour: str
    line_style: str
    marker: str


def pens(labels: Sequence[str]) -> Iterator[Pen]:
    """One for each label."""
    for number, label in enumerate(labels):
        again = number // len(COLOURS)
        yield Pen(
            label,
            COLOURS[number % len(COLOURS)],
            LINE_STYLES[again % len(LINE_STYLES)],
            MARKERS[(number + again) % len(MARKERS)],
        )


def new_axes(*, height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def plot(axes: Axes, pen: Pen, points: Iterable[tuple[float, float]], *, marks: bool = True) -> None:
    """A line through `points`, with a mark on each, or on the last alone where there are very many."""
    xs, ys = zip(*points, strict=True)
    every = 1 if marks and len(xs) <= 40 else None
    axes.plot(
        xs,
        ys,
        color=pen.colour,
        linestyle=pen.line_style,
        linewidth=1.7,
        marker=pen.marker,
        markersize=3.6,
        markevery=every or [len(xs) - 1],
        label=pen.label,
        gid=data_id(axes),
    )


def shade(axes: Axes, pen: Pen, points: Iterable[tuple[float, float, float]]) -> None:
    """A band around a line, from points and how far it reaches to either side of each; never below zero."""
    xs, ys, reach = zip(*points, strict=True)
    low = [max(y - r, 0.0) for y, r in zip(ys, reach, strict=True)]
    high = [y + r for y, r in zip(ys, reach, strict=True)]
    axes.fill_between(xs, low, high, color=pen.colour, alpha=0.18, linewidth=0)


def sorted_rates(curves: Mapping[str, Sequence[float]], *, x: str, top: float | None = None) -> Figure:
    """Word error rates of people in the order they have them, a line for each label."""
    figure, axes = new_axes()
    for pen, rates in zip(pens(list(curves)), curves.values(), strict=True):
        if rates:
            plot(axes, pen, list(enumerate(rates, start=1)))
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(percents())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    dress(axes, x=x, y="word error rate")
    return figure


def data_id(axes: Axes) -> str:
    """The id of the next line of data, by which it is told from axes and grid in an SVG."""
    return f"data-{len(axes.lines)}"


def dress(axes: Axes, *, x: str, y: str, grid: Literal["both", "x", "y"] = "both") -> None:
    """Labels, a faint grid, no box; a legend where more than one thing is drawn."""
    axes.set_xlabel(x, color=INK, fontsize=10)
    axes.set_ylabel(y, color=INK, fontsize=10)
    bare(axes, grid=grid)
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.figure
    if len(labels) > 1 and isinstance(figure, Figure):
        columns = max(1, min(len(labels), LETTERS // (max(map(len, labels)) + 7)))
        # A long legend makes the figure taller, not the plot flatter.
        figure.set_figheight(figure.get_figheight() + 0.18 * max(math.ceil(len(labels) / columns) - 3, 0))
        figure.legend(
            handles,
            labels,
            frameon=False,
            labelcolor=INK,
            fontsize=9,
            loc="outside upper left",
            ncols=columns,
            handlelength=2.4,
        )


def bare(axes: Axes, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """A faint grid and no box."""
    axes.set_facecolor("none")
    axes.tick_params(color=FAINT, labelcolor=INK, labelsize=9)
    axes.tick_params(which="minor", color=FAINT, labelcolor=INK, labelsize=8)
    axes.grid(axis=grid, color=FAINT, alpha=0.25, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)


def percents() -> FuncFormatter:
    return FuncFormatter(lambda value, _: f"{100 * value:g} %")


def number_labels() -> FuncFormatter:
    """1,000 rather than 10³, as far as that is readable."""
    return FuncFormatter(lambda value, _: f"{value:,g}" if 1e-3 <= abs(value) < 1e6 or not value else f"{value:.0e}")


def label_decades(axis: Axis) -> None:
    """Readable labels on a logarithmic axis, also on one that spans less than a decade."""
    low, high = sorted(axis.get_view_interval())
    span = high / low if low > 0 else math.inf
    if span < 8:
        axis.set_major_locator(MaxNLocator(nbins=5))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 200 else (1,), numticks=8))
    axis.set_major_formatter(number_labels())
    axis.set_minor_formatter(NullFormatter())


def inline_svg(drawing: Drawing) -> str:
    """The figure as part of a page: its colours follow the page's theme, its ids clash with no other figure's."""
    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        drawing.draw().savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator")))
    svg = buffer.getvalue().decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # A size in points would win over the page's; the view box alone keeps the proportions.
    svg = re.sub(r'^<svg ([^>]*?)height="[^"]*" ?|^<svg ', r"<svg \1", svg)
    svg = re.sub(r'^(<svg [^>]*?)width="[^"]*" ?', r"\1", svg)
    svg = _IDS.sub(rf"\g<1>{drawing.name}-", svg)
    return in_theme(svg)


def titled(drawing: Drawing) -> Figure:
    """The figure for a file of its own, where no heading stands above it."""
    figure = drawing.draw()
    if figure.legends:  # it stands where the title would
        legend = figure.legends[0]
        legend.set_title(drawing.title, prop=FontProperties(size=11, weight="bold"))
        legend.get_title().set_color(INK)
        legend.set_alignment("left")
    else:
        figure.suptitle(drawing.title, color=INK, fontsize=11, fontweight="bold")
    return figure
