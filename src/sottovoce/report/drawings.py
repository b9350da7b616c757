"""What every figure of a report shares: its size, its line styles, its axes, and how it becomes part of a page.

Figures are narrow: a page shows two side by side on a laptop and one on a phone, with legible text.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from sottovoce.base.drawing import COLOURS, FAINT, INK, LINE_STYLES, MARKERS, Grid, in_theme, style_axes

WIDTH, HEIGHT = 4.8, 3.1  # inches
LEGEND_CHARACTERS = 62  # in one row of a legend; each entry's line and gaps take seven
REFERENCE_LINE: dict[str, Any] = {"color": FAINT, "linestyle": (0, (4, 3)), "linewidth": 1}
# Text stays text: it is small, can be searched and read aloud, and takes the page's font.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "sottovoce", "svg.fonttype": "none", "text.parse_math": False}
_IDS = re.compile(r'(\bid="|url\(#|href="#)')

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Drawing:
    """One figure. `caption` says what to see; `alt` is the alternative text."""

    macro: ClassVar[str] = "figure"

    name: str
    title: str
    caption: str
    alt: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class LineStyle:
    """What distinguishes one run, or one kind of parameter, from the others: more than colour alone."""

    label: str
    colour: str
    dashes: str
    marker: str


def line_styles(labels: Iterable[str]) -> Iterator[LineStyle]:
    """One for each label."""
    for number, label in enumerate(labels):
        again = number // len(COLOURS)
        dashes = LINE_STYLES[again % len(LINE_STYLES)]
        yield LineStyle(label, COLOURS[number % len(COLOURS)], dashes, MARKERS[(number + again) % len(MARKERS)])


def new_axes(*, height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def draw_lines(lines: Mapping[str, Points], *, markers: bool = True) -> tuple[Figure, Axes]:
    """A line for each label. One without points keeps its style: a run looks the same in every figure."""
    figure, axes = new_axes()
    for style, points in zip(line_styles(lines), lines.values(), strict=True):
        if points:
            plot_line(axes, style, points, markers=markers)
    return figure, axes


def plot_line(axes: Axes, style: LineStyle, points: Points, *, markers: bool = True) -> None:
    """A line through `points`, with a marker on each, or on the last alone where there are very many."""
    xs, ys = zip(*points, strict=True)
    axes.plot(
        xs,
        ys,
        color=style.colour,
        linestyle=style.dashes,
        linewidth=1.7,
        marker=style.marker,
        markersize=3.6,
        markevery=1 if markers and len(xs) <= 40 else [len(xs) - 1],
        label=style.label,
        gid=data_id(axes),
    )


def plot_marker(axes: Axes, style: LineStyle, x: float, y: float, *, is_labelled: bool, clip: bool = True) -> None:
    """One point of data."""
    axes.plot(
        [x],
        [y],
        color=style.colour,
        marker=style.marker,
        markersize=5,
        linestyle="",
        label=style.label if is_labelled else None,
        gid=data_id(axes),
        clip_on=clip,
    )


def sorted_rates(curves: Mapping[str, Sequence[float]], *, x: str, top: float | None = None) -> Figure:
    """Sorted word error rates of speakers, a line for each label."""
    figure, axes = draw_lines({label: list(enumerate(rates, start=1)) for label, rates in curves.items()})
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(percent_labels())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish_axes(axes, x=x, y="word error rate")
    return figure


def data_id(axes: Axes) -> str:
    """The id of the next line of data, which distinguishes it from axes and grid in an SVG."""
    return f"data-{len(axes.lines)}"


def finish_axes(axes: Axes, *, x: str, y: str, grid: Grid = "both") -> None:
    """Labels, a faint grid, no frame; a legend where more than one thing is drawn."""
    axes.set_xlabel(x, color=INK, fontsize=10)
    axes.set_ylabel(y, color=INK, fontsize=10)
    style_panel(axes, grid=grid)
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.figure
    if len(labels) > 1 and isinstance(figure, Figure):
        columns = max(1, min(len(labels), LEGEND_CHARACTERS // (max(map(len, labels)) + 7)))
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


def style_panel(axes: Axes, *, grid: Grid = "both") -> None:
    """A faint grid and no frame, with small labels on the ticks."""
    style_axes(axes, grid=grid, grid_alpha=0.25)
    axes.tick_params(labelsize=9)
    axes.tick_params(which="minor", labelsize=8)


def percent_labels() -> FuncFormatter:
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
    return in_theme(_IDS.sub(rf"\g<1>{drawing.name}-", svg))


def draw_with_title(drawing: Drawing) -> Figure:
    """The figure for a file of its own, which has no heading above it."""
    figure = drawing.draw()
    if figure.legends:  # it takes the title's place
        legend = figure.legends[0]
        legend.set_title(drawing.title, prop=FontProperties(size=11, weight="bold"))
        legend.get_title().set_color(INK)
        legend.set_alignment("left")
    else:
        figure.suptitle(drawing.title, color=INK, fontsize=11, fontweight="bold")
    return figure
