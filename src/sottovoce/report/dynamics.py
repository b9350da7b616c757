"""Norms over the rounds of a simulation: of local gradients, of updates, of their mean before noise and after it.

The flagship paper's Figures 7, 13 and 14. All but the last are by-products of private data: a release has none of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from sottovoce.report.curves import LinePoints, series, told_ends
from sottovoce.report.drawings import Drawing, dress, label_decades, new_axes, number_labels, pens, plot, shade
from sottovoce.report.parts import Chapter, chapter
from sottovoce.report.records import Record, RunRecord

SHADED = 3  # runs, beyond which the spread of each would hide the others
WIDE = 20  # largest over smallest value, beyond which an axis is logarithmic
_INTRO = (
    "What becomes of clients' gradients on their way to the model (the paper's Figures 7, 13 and 14). These are "
    "by-products of private data that no ε covers: simulations keep them, releases never do."
)
NOISED = "pseudo_gradient_noised"


@dataclass(frozen=True)
class _Quantity:
    """What is drawn: a number of a round's diagnostics, and the one beside it that says how clients differ.

    Those of one `scale` are before and after the same thing, and have the same axis.
    """

    key: str
    name: str
    title: str
    axis: str
    caption: str
    spread: str = ""
    scale: str = ""


QUANTITIES = (
    _Quantity(
        "gradient_norm",
        "gradients-local",
        "Gradients in local training",
        "gradient norm of clients",
        "Norm of a local step's gradient before it is clipped locally, mean over a client's steps and over the cohort.",
        "gradient_norm_std",
    ),
    _Quantity(
        "norm",
        "updates-before",
        "Updates before clipping",
        "norm of clients' updates",
        "Norm of a client's update before clipping, mean over the cohort.",
        "norm_std",
        "updates",
    ),
    _Quantity(
        "norm_after",
        "updates-after",
        "Updates after clipping",
        "norm after clipping",
        "The same after clipping, on the same scale: at most the bound. With a bound on each layer it is mostly "
        "less, because layers below theirs leave some of it unused.",
        "norm_after_std",
        "updates",
    ),
    _Quantity(
        "pseudo_gradient_norm",
        "pseudo-gradient",
        "The mean update before noise",
        "norm before noise",
        "Norm of the clipped updates' mean, which the server's optimiser takes as its gradient. The less clients "
        "agree, the further it lies below the norm of one update.",
        scale="mean",
    ),
    _Quantity(
        NOISED,
        "pseudo-gradient-noised",
        "The mean update after noise",
        "norm after noise",
        "The same after noise, on the same scale. Where it lies far above the figure before, most of a round's step is "
        "noise.",
        scale="mean",
    ),
)


def dynamics_section(runs: Sequence[RunRecord]) -> Chapter | None:
    """Norms over rounds, one figure a quantity, one line a run."""
    if not any(run.diagnostics and not run.is_release for run in runs):
        return None
    drawings = [drawing for quantity in QUANTITIES if (drawing := _drawing(quantity, runs)) is not None]
    return chapter("dynamics", "Norms over the rounds", drawings, _INTRO)


def noised_norms(metrics: Sequence[Record]) -> LinePoints:
    """The norm of every round's noised mean, from those of its kinds of parameters."""
    found = ((record["step"], record["server_norms"]) for record in metrics if record.get("server_norms"))
    return [(step, math.hypot(*_flattened(kinds))) for step, kinds in found]


def _flattened(kinds: Mapping[str, float | list[float]]) -> list[float]:
    return [norm for one in kinds.values() for norm in (one if isinstance(one, list) else [one])]


def _lines(quantity: _Quantity, runs: Sequence[RunRecord]) -> dict[str, LinePoints]:
    """Of all runs, so that each keeps its colour; nothing of releases."""
    found = {}
    for run in runs:
        seen = [] if run.is_release else run.diagnostics
        found[run.label] = noised_norms(run.metrics) if quantity.key == NOISED and seen else series(seen, quantity.key)
    return found


def _spreads(quantity: _Quantity, runs: Sequence[RunRecord]) -> dict[str, LinePoints]:
    """How far clients differ, likewise."""
    return {run.label: series([] if run.is_release else run.diagnostics, quantity.spread) for run in runs}


def _drawing(quantity: _Quantity, runs: Sequence[RunRecord]) -> Drawing | None:
    lines = _lines(quantity, runs)
    if not any(lines.values()):
        return None
    spreads = _spreads(quantity, runs)
    shaded = len([label for label in lines if lines[label]]) <= SHADED and any(spreads.values())
    caption = quantity.caption + (" The band is one standard deviation over clients to either side." if shaded else "")
    return Drawing(
        quantity.name,
        quantity.title,
        caption,
        told_ends(quantity.title, lines),
        partial(_figure, lines, spreads if shaded else {}, y=quantity.axis, among=_values_beside(quantity, runs)),
    )


def _values_beside(quantity: _Quantity, runs: Sequence[RunRecord]) -> list[float]:
    """All that has to fit on its axis: its values and those of what it is compared with, with the bands around them.

    None where it is compared with nothing.
    """
    alike = [other for other in QUANTITIES if quantity.scale and other.scale == quantity.scale]
    found = []
    for one in alike:
        spreads = _spreads(one, runs)
        for label, points in _lines(one, runs).items():
            deviations = dict(spreads[label])
            found += [end for step, value in points for end in (value, value + deviations.get(step, 0.0))]
    return [value for value in found if value > 0]


def _figure(
    lines: Mapping[str, LinePoints], spreads: Mapping[str, LinePoints], *, y: str, among: Sequence[float]
) -> Figure:
    figure, axes = new_axes()
    for pen, (label, points) in zip(pens(list(lines)), lines.items(), strict=True):
        if not points:
            continue
        deviations = dict(spreads.get(label, ()))
        if deviations:
            shade(axes, pen, [(step, value, deviations.get(step, 0.0)) for step, value in points])
        plot(axes, pen, points, marks=False)
    values = among or [value for points in lines.values() for _, value in points if value > 0]
    if values and max(values) > WIDE * min(values):
        axes.set_yscale("log")
        if among:
            axes.set_ylim(min(among) / 1.5, max(among) * 1.5)
        label_decades(axes.yaxis)
    else:
        top = 1.15 * max(among) if among else max(axes.get_ylim()[1], 1.05 * max(values, default=1.0))
        axes.set_ylim(0, top)  # a level line is not the frame
        axes.yaxis.set_major_formatter(number_labels())
    dress(axes, x="rounds", y=y)
    return figure
