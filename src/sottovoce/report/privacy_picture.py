"""Word error rate against ε, one point a run: between the model before training and the same run without noise.

The axis has a range for each word of the scale of ε, equally wide: a guarantee is judged by these words, and an ε of
thousands would leave no room for those that protect somebody.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sottovoce.base.drawing import COLOURS, FAINT, INK, MARKERS
from sottovoce.evaluation.error_rates import Interval
from sottovoce.privacy.guarantee import format_epsilon
from sottovoce.privacy.membership_odds import SCALE
from sottovoce.report.comparisons import find_noiseless_twin
from sottovoce.report.drawings import (
    REFERENCE_LINE,
    Drawing,
    LineStyle,
    finish_axes,
    new_axes,
    percent_labels,
    plot_marker,
)
from sottovoce.report.parts import make_drawing, screen_text, show_percent
from sottovoce.report.records import Record, RunRecord
from sottovoce.report.verdict import Verdict

SMALLEST, LARGEST = 0.01, 1000.0  # ε at the ends of the first and of the last range, at least
BEFORE, NO_NOISE, NOT_KNOWN = "before\ntraining", "no\nnoise", "ε not\nknown"
START = "before training"
OTHERS = "other runs here"
BESIDE = 0.13  # of a range, between points that would lie on one another
HEIGHT = 3.5  # inches


@dataclass(frozen=True)
class PicturePoint:
    """A run or its start: where it lies on the axis of ε, or the column it has instead, and its error rate."""

    label: str
    place: float | str
    wer: float
    interval: Interval | None
    style: LineStyle
    is_main: bool


@dataclass(frozen=True)
class EpsilonAxis:
    """An axis on which every range of ε is one wide, with as wide `columns` for what has no ε beside them.

    `before` is how many of these stand on the left, `largest` the ε at the right end of the last range.
    """

    columns: Mapping[str, float]
    before: int
    ranges: int
    largest: float

    @classmethod
    def of(cls, points: Sequence[PicturePoint]) -> "EpsilonAxis":
        """With the ranges and columns that `points` need."""
        epsilons = [one.place for one in points if not isinstance(one.place, str)]
        before, ranges = int(any(one.place == BEFORE for one in points)), len(SCALE) if epsilons else 0
        after = [name for name in (NO_NOISE, NOT_KNOWN) if any(one.place == name for one in points)]
        columns = {name: before + ranges + n + 0.5 for n, name in enumerate(after)} | ({BEFORE: 0.5} if before else {})
        return cls(columns, before, ranges, 10 * max([LARGEST, *epsilons]))

    @property
    def width(self) -> int:
        return self.ranges + len(self.columns)

    @property
    def words(self) -> dict[float, str]:
        """What stands below each range and column, by its middle."""
        steps = [(step.words.replace(" to ", " to\n"), step.most) for step in SCALE[: self.ranges]]
        named = [words if math.isinf(most) else f"{words}\nε ≤ {most:g}" for words, most in steps]
        return {self.before + n + 0.5: words for n, words in enumerate(named)} | {
            x: name for name, x in self.columns.items()
        }

    @property
    def bounds(self) -> list[int]:
        """Between all of them."""
        return list(range(1, self.width))

    def locate(self, place: float | str) -> float:
        """In the middle of a column, or within a range logarithmically.

        >>> axis = EpsilonAxis({BEFORE: 0.5}, before=1, ranges=4, largest=1000.0)
        >>> [round(axis.locate(place), 3) for place in (BEFORE, 0.001, 1.0, 8.0, 20.0, 1000.0)]
        [0.5, 1.0, 2.0, 3.0, 4.0, 5.0]
        """
        if isinstance(place, str):
            return self.columns[place]
        ends = [SMALLEST, *(step.most for step in SCALE[:-1]), self.largest]
        number = next(n for n, step in enumerate(SCALE) if place <= step.most)
        low, high = ends[number : number + 2]
        return (
            self.before + number + max(math.log(place / low) / math.log(high / low), 0.0) if place > 0 else self.before
        )


def privacy_picture(run: RunRecord, runs: Sequence[RunRecord], verdicts: Sequence[Verdict]) -> Drawing | None:
    """`run` beside its start, its twin without noise and the other runs with the same test set.

    None without a word error rate, and where there is nothing to compare it with.
    """
    test = run.headline_test
    if test is None or "wer" not in run.tests[test]:
        return None
    points = _points(run, runs, verdicts, test)
    is_private = any(not isinstance(one.place, str) for one in points)
    if not is_private and len(points) == 1:
        return None
    main, others = [one for one in points if one.is_main], [one for one in points if not one.is_main]
    alt = f"Word error rate on {test}{' against ε' if is_private else ''}: {'; '.join(_tell(one) for one in main)}."
    if others:
        rates = [one.wer for one in others]
        alt += f" {len(others):,} other runs: {show_percent(min(rates))} to {show_percent(max(rates))}."
    return make_drawing(
        "wer-epsilon",
        alt,
        partial(_figure, points),
        test=test,
        better="Down and to the left" if is_private else "Down",
        before=f" {screen_text('before')}" if any(one.place == BEFORE for one in points) else "",
        ranges=f" {screen_text('ranges-shared' if others else 'ranges')}" if is_private else "",
    )


def _points(run: RunRecord, runs: Sequence[RunRecord], verdicts: Sequence[Verdict], test: str) -> list[PicturePoint]:
    """The start first, then the run, its twin, and the others."""
    twin = find_noiseless_twin(run, runs)
    found = []
    if "wer" in run.start_tests.get(test, {}):
        found.append(_point(START, BEFORE, run.start_tests[test], style=1))
    for one, style in ((run, 0), (twin, 2)):
        if one is not None:
            found.append(_point(one.label, _place(verdicts[_index(runs, one)]), one.tests[test], style=style))
    others = [
        (one, verdict)
        for one, verdict in zip(runs, verdicts, strict=True)
        if one is not run and one is not twin and "wer" in one.tests.get(test, {})
    ]
    for number, (one, verdict) in enumerate(others):
        named = number + 3 if len(others) <= len(COLOURS) - 3 else None
        found.append(_point(one.label, _place(verdict), one.tests[test], style=named, is_main=False))
    return found


def _index(runs: Sequence[RunRecord], run: RunRecord) -> int:
    return next(n for n, one in enumerate(runs) if one is run)


def _place(verdict: Verdict) -> float | str:
    if verdict.epsilon_of_one is not None:
        return verdict.epsilon_of_one
    return NOT_KNOWN if verdict.kind == "unsound" else NO_NOISE


def _point(label: str, place: float | str, test: Record, *, style: int | None, is_main: bool = True) -> PicturePoint:
    """With the colour and mark of that number, or faint."""
    ends = test.get("wer_interval")
    interval = None if ends is None else (float(ends[0]), float(ends[1]))
    drawn = LineStyle(OTHERS, FAINT, "", ".")
    if style is not None:
        drawn = LineStyle(label, COLOURS[style], "", MARKERS[style])
    return PicturePoint(label, place, test["wer"], interval, drawn, is_main)


def _tell(point: PicturePoint) -> str:
    ends = point.interval
    interval = "" if ends is None else f" (95 % interval {show_percent(ends[0])} to {show_percent(ends[1])})"
    where = point.place.replace("\n", " ") if isinstance(point.place, str) else f"ε = {format_epsilon(point.place)}"
    at = "" if point.label == where else f" at {where}" if not isinstance(point.place, str) else f", {where}"
    return f"{point.label}{at}: {show_percent(point.wer)}{interval}"


def _figure(points: Sequence[PicturePoint]) -> Figure:
    figure, axes = new_axes(height=HEIGHT)
    axis = EpsilonAxis.of(points)
    groups: dict[float, list[PicturePoint]] = {}
    for one in points:
        groups.setdefault(round(axis.locate(one.place), 1), []).append(one)
    for group in groups.values():
        ends = [end for one in group for end in (one.wer, *(one.interval or ()))]
        # A number above all that lies beside it; a second one below.
        free = [(max(ends), 3, "bottom"), (min(ends), -3, "top")]
        for number, one in enumerate(group):
            x = axis.locate(one.place) + min(BESIDE, 0.8 / len(group)) * _alternate(number)
            _plot(axes, one, x)
            if one.is_main and free:
                y, offset, side = free.pop(0)
                # To the right of a point on the bound between two ranges, whose line would go through it.
                beside, ha = (5, "left") if abs(x - round(x)) < BESIDE else (0, "center")
                place: dict[str, Any] = {"ha": ha, "va": side, "textcoords": "offset points", "zorder": 4}
                axes.annotate(show_percent(one.wer), (x, y), (beside, offset), fontsize=9.5, color=INK, **place)
    top = max(end for one in points for end in (one.wer, *(one.interval or ())))
    axes.set_ylim(0, 1.15 * top if top > 0 else 1)
    axes.yaxis.set_major_formatter(percent_labels())
    axes.set_xlim(0, axis.width)
    axes.set_xticks(list(axis.words), list(axis.words.values()))
    for x in axis.bounds:
        axes.axvline(x, **REFERENCE_LINE)
    finish_axes(axes, x="", y="word error rate", grid="y")
    axes.tick_params(axis="x", length=0)
    return figure


def _plot(axes: Axes, point: PicturePoint, x: float) -> None:
    colour = point.style.colour
    if point.interval is not None:
        width = 1.8 if point.is_main else 1
        axes.plot([x, x], point.interval, color=colour, linewidth=width, alpha=0.6)
    labels = axes.get_legend_handles_labels()[1]
    plot_marker(axes, point.style, x, point.wer, is_labelled=point.style.label not in labels)
    if point.is_main and isinstance(point.place, str):
        axes.axhline(point.wer, color=colour, linestyle=(0, (1, 2)), linewidth=1, alpha=0.8, zorder=0.5)


def _alternate(number: int) -> int:
    """0, 1, -1, 2, -2 and so on.

    >>> [_alternate(number) for number in range(5)]
    [0, 1, -1, 2, -2]
    """
    return (number + 1) // 2 * (1 if number % 2 else -1)
