"""Word error rates of speakers and of groups of them: the `--plot` of `evaluate`."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sottovoce.base.drawing import COLOURS, INK, FigurePage, style_axes, write_drawing
from sottovoce.evaluation.error_rates import compute_rates
from sottovoce.evaluation.score import Evaluation, SpeakerGroup
from sottovoce.evaluation.tables import (
    format_evaluation_notes,
    format_rate,
    keep_largest_groups,
    tabulate_errors,
)

_BINS = (5, 40)
SPEAKERS, OVERALL, *FACT_COLOURS = COLOURS
_NOTE = "Intervals are 95 % bootstrap intervals over speakers. Every speaker counts once in the spread."


def draw_evaluation(evaluation: Evaluation, path: Path | str, *, title: str) -> None:
    """Draw the figure to `path`; its suffix says as what: .png, .svg, .pdf or .html."""
    write_drawing(path, lambda: _figure(evaluation, title=title), lambda: _page(evaluation, title=title))


def _page(evaluation: Evaluation, *, title: str) -> FigurePage:
    return FigurePage(
        title=title,
        description="Speakers by word error rate, and groups of speakers",
        table=tabulate_errors(evaluation),
        notes=(*format_evaluation_notes(evaluation), _NOTE),
    )


def _figure(evaluation: Evaluation, *, title: str) -> Figure:
    """Speakers by their error rate above; below, each group's rate with its interval."""
    lines = sum(1 + len(keep_largest_groups(groups)) for groups in evaluation.groups.values())
    heights = [3.4, 0.32 * lines + 0.5] if lines else [3.4]
    figure = Figure(figsize=(9, sum(heights) + 1.2), layout="constrained")
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_speakers(panels[0], evaluation)
    if lines:
        _draw_groups(panels[1], evaluation)
    figure.suptitle(title, color=INK, fontsize=14, fontweight="bold")
    return figure


def _draw_speakers(axes: Axes, evaluation: Evaluation) -> None:
    rates_S = compute_rates(evaluation.speaker_counts_S4)
    percents_S = 100 * rates_S[~np.isnan(rates_S)]
    highest = max(float(percents_S.max()), 1.0)
    heights, edges = np.histogram(
        percents_S, bins=int(np.clip(2 * len(percents_S) ** 0.5, *_BINS)), range=(0.0, highest)
    )
    axes.stairs(heights, edges, color=SPEAKERS, linewidth=1.8)
    axes.stairs(heights, edges, color=SPEAKERS, fill=True, alpha=0.12)
    median = f"median speaker: {format_rate(evaluation.spread.median)}"
    axes.axvline(100 * evaluation.spread.median, color=SPEAKERS, linestyle=(0, (1, 1.5)), linewidth=1.6, label=median)
    axes.axvline(100 * evaluation.wer, color=OVERALL, linewidth=1.6, label=f"all words: {format_rate(evaluation.wer)}")
    if evaluation.interval is not None:
        low, high = evaluation.interval
        axes.axvspan(100 * low, 100 * high, color=OVERALL, alpha=0.15, linewidth=0, label="its 95 % interval")
    axes.set_xlim(0, highest * 1.02)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"Word error rate of each of {len(percents_S):,} speakers", loc="left", color=INK, fontsize=11)
    axes.set_ylabel("number of speakers", color=INK)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    _finish(axes)


def _draw_groups(axes: Axes, evaluation: Evaluation) -> None:
    labels: list[str] = []
    for number, (fact, groups) in enumerate(evaluation.groups.items()):
        labels.append(f"{fact}:")
        for group in keep_largest_groups(groups):
            _draw_group(axes, group, place=len(labels), colour=FACT_COLOURS[number % len(FACT_COLOURS)])
            labels.append(f"{group.name} ({group.speakers:,})")
    axes.axvline(100 * evaluation.wer, color=OVERALL, linewidth=1.6, zorder=0.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_title("Groups of speakers, with 95 % intervals over speakers", loc="left", color=INK, fontsize=11)
    _finish(axes)
    axes.tick_params(axis="y", length=0)


def _draw_group(axes: Axes, group: SpeakerGroup, *, place: int, colour: str) -> None:
    if group.words.rate is None:
        return
    if group.interval is not None:
        axes.plot([100 * bound for bound in group.interval], [place, place], color=colour, linewidth=2.2)
    axes.plot(100 * group.words.rate, place, "o", color=colour, markersize=6, clip_on=False)


def _finish(axes: Axes) -> None:
    axes.set_xlabel("word error rate", color=INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    style_axes(axes, grid="x")
