"""The flagship paper's Figure 1 for any store: how unevenly speech is spread over speakers.

Above, minutes per speaker; below, utterances per speaker; one line per split, on logarithmic axes, because most people
give very little and a few very much. Where speakers share devices, these are drawn beside them (Figure 2 of Gao et al.
2022).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from sottovoce.base.drawing import COLOURS, INK, LINE_STYLES, FigurePage, style_axes, write_drawing
from sottovoce.base.tables import Table
from sottovoce.data.speakers import UserIndex, select_speakers
from sottovoce.data.statistics import (
    compute_statistics,
    format_rows,
    make_device_population,
    minutes_per_speaker,
    utterances_of_clients,
)

BINS = 32
BINS_PER_DECADE = (8, 24)

HEADINGS = ("subset", "hours", "speakers", "utterances", "mean", "std", "min", "max")
NOTE = "std is the population's (divided by the number of speakers). A speaker in two splits counts once in the total."


@dataclass(frozen=True, eq=False, slots=True)
class _Curve:
    """One split in one panel."""

    split: str
    values: NDArray[np.float64]
    colour: str
    line_style: str


def draw_speakers(store: UserIndex, path: Path | str, *, speakers_per_device: int | None = None, seed: int = 1) -> None:
    """Draw the figure to `path`; its suffix says as what: .png, .svg, .pdf or .html.

    With `speakers_per_device`, devices are drawn beside speakers; `seed` decides who shares one.
    """
    write_drawing(
        path, partial(_figure, store, speakers_per_device=speakers_per_device, seed=seed), partial(_page, store)
    )


def _page(store: UserIndex) -> FigurePage:
    return FigurePage(
        title=f"Speakers of {store.name}",
        description="Speakers by minutes of speech and by number of utterances",
        table=Table(
            "speakers",
            "",
            HEADINGS,
            tuple(format_rows(compute_statistics(store))),
            total=-1,
            spans=(("", 4), ("minutes per speaker", 4)),
        ),
        notes=(NOTE,),
    )


def _figure(store: UserIndex, *, speakers_per_device: int | None, seed: int) -> Figure:
    """Minutes per speaker above, utterances per speaker below."""
    minutes, counts = [], []
    for number, split in enumerate(store.splits):
        speakers = select_speakers(store, (split,))
        style = COLOURS[number % len(COLOURS)], LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)]
        minutes.append(_Curve(split, minutes_per_speaker(speakers), *style))
        counts.append(_Curve(split, speakers.utterances.astype(np.float64), *style))
        if speakers_per_device is not None:
            shared = make_device_population(store, split, speakers_per_device=speakers_per_device, seed=seed)
            name, style = f"{split}, {speakers_per_device} a device", (style[0], LINE_STYLES[1])
            minutes.append(_Curve(name, shared.seconds / 60, *style))
            counts.append(_Curve(name, utterances_of_clients(shared).astype(np.float64), *style))
    figure = Figure(figsize=(10, 7.2), layout=ConstrainedLayoutEngine(hspace=0.08))
    above, below = figure.subplots(2, 1)
    whom = "speaker" if speakers_per_device is None else "speaker, and per device"
    _draw(above, minutes, edges=_edges(minutes), title=f"Minutes of speech per {whom}", unit="minutes")
    _draw(below, counts, edges=_whole_edges(counts), title=f"Utterances per {whom}", unit="utterances")
    # The axis begins at half an utterance, which nobody has.
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value) if value >= 1 else ""))
    figure.suptitle(f"{store.name}: how speech is spread over speakers", color=INK, fontsize=14, fontweight="bold")
    return figure


def _draw(axes: Axes, curves: list[_Curve], *, edges: NDArray[np.float64], title: str, unit: str) -> None:
    highest = 1
    for curve in curves:
        heights, _ = np.histogram(curve.values, bins=edges)
        highest = max(highest, heights.max())
        median = float(np.median(curve.values))
        # matplotlib leaves labels that begin with an underscore out of the legend, hence the blank.
        label = f" {curve.split} ({len(curve.values):,}): {_number(median)}"
        axes.stairs(heights, edges, color=curve.colour, linestyle=curve.line_style, linewidth=1.8, label=label)
        if len(curves) <= 3:
            axes.stairs(heights, edges, color=curve.colour, fill=True, alpha=0.12)
        axes.axvline(median, color=curve.colour, linestyle=(0, (1, 1.5)), linewidth=1.2, zorder=0.5)
        axes.plot(median, 1, "v", color=curve.colour, markersize=8, clip_on=False, transform=axes.get_xaxis_transform())
    axes.set(xscale="log", yscale="log", xlim=_room(edges[0], edges[-1]), ylim=(0.7, max(highest * 1.6, 12)))
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=12)
    axes.set_xlabel(f"{unit} (logarithmic)", color=INK)
    axes.set_ylabel("number of speakers", color=INK)
    _finish(axes)


def _finish(axes: Axes) -> None:
    style_axes(axes)
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,), numticks=12))
        axis.set_minor_locator(LogLocator(subs=range(2, 10), numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
        axis.set_minor_formatter(NullFormatter())
    # Beside the panel and not in it: with seven splits there is no free corner.
    legend = axes.legend(
        title="split (speakers): median ▼",
        loc="upper left",
        bbox_to_anchor=(1.01, 1.03),
        alignment="left",
        frameon=False,
        labelcolor=INK,
        fontsize=9,
        title_fontsize=9,
    )
    legend.get_title().set_color(INK)


def _edges(curves: list[_Curve]) -> NDArray[np.float64]:
    """Bins of equal width on a logarithmic axis that hold every value."""
    low, high, per_decade = _bins(curves)
    first, last = np.floor(np.log10(low) * per_decade), np.floor(np.log10(high) * per_decade) + 1
    edges = np.asarray(10.0 ** (np.arange(first, last + 1) / per_decade))
    # A power may be rounded to the wrong side of the value that it was made for.
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
    return edges


def _whole_edges(curves: list[_Curve]) -> NDArray[np.float64]:
    """The same for whole numbers: edges lie halfway between two, and bins never get narrower towards the right."""
    low, high, per_decade = _bins(curves)
    edges, width = [low], 1.0
    while edges[-1] <= high:
        width = max(width, np.round(edges[-1] * (10 ** (1 / per_decade) - 1)))
        edges.append(edges[-1] + width)
    return np.array(edges) - 0.5


def _bins(curves: list[_Curve]) -> tuple[float, float, float]:
    """The least and the largest value, and the number of bins per decade."""
    low, high = min(curve.values.min() for curve in curves), max(curve.values.max() for curve in curves)
    return low, high, float(np.clip(BINS / max(np.log10(high / low), 0.1), *BINS_PER_DECADE))


def _room(low: float, high: float) -> tuple[float, float]:
    """At least a decade and a half, so that a few speakers who are much alike do not look spread out."""
    missing = max(1.03, np.sqrt(10**1.5 * low / high))
    return low / missing, high * missing


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.2g}"
