"""Test error over cohort sizes, by what runs start from and how data lie among clients: the paper's Figures 2 to 4."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from sottovoce.drawing import FAINT
from sottovoce.report.cells import text
from sottovoce.report.curves import LinePoints, told_ends
from sottovoce.report.drawings import Drawing, dress, new_axes, pens, percents, plot
from sottovoce.report.parts import Chapter, chapter
from sottovoce.report.records import RunRecord
from sottovoce.report.run_facts import RUN_FACTS
from sottovoce.users.rules import DEALT

_INTRO = "What a larger cohort is worth, and what a better start (the paper's Figures 2 to 4)."
# What may tell two lines apart; a line is named by as many of these as it takes, in this order.
TOLD: Mapping[str, Callable[[RunRecord], str]] = {
    "seed": lambda run: _start(run),
    "clients": lambda run: _clients(run),
    **{name: RUN_FACTS[name] for name in ("data", "model", "noise", "clipping", "server", "local training")},
}


def cohort_section(runs: Sequence[RunRecord]) -> Chapter | None:
    """A line for all runs that differ in nothing but their cohorts (and chance); None where no run has such a peer."""
    lines = cohort_lines(runs)
    if not lines:
        return None
    central = {run.label: rate for run in runs if not run.is_federated and (rate := _rate(run)) is not None}
    drawing = Drawing(
        "cohorts",
        "Error over the cohort's size",
        "Word error rate on the test set, mean over runs that differ by chance alone."
        + (" Dashed: training on one pile of data." if central else ""),
        told_ends("Test word error rate over cohort sizes", lines, as_percent=True),
        partial(_figure, lines, central),
    )
    return chapter("cohorts", "Cohorts and seeds", [drawing], _INTRO)


def cohort_lines(runs: Sequence[RunRecord]) -> dict[str, LinePoints]:
    """Test WER by cohort size, in lines of at least two sizes, each by what tells it from the others."""
    found: dict[tuple[str, ...], dict[int, list[float]]] = {}
    for run in runs:
        rate, size = _rate(run), run.federation.get("cohort_size")
        if rate is not None and size is not None:
            key = tuple(tell(run) for tell in TOLD.values())
            found.setdefault(key, {}).setdefault(size, []).append(rate)
    several = {key: sizes for key, sizes in found.items() if len(sizes) > 1}
    return {
        label: [(float(size), fmean(rates)) for size, rates in sorted(sizes.items())]
        for label, sizes in zip(_labels(list(several)), several.values(), strict=True)
    }


def _labels(keys: Sequence[tuple[str, ...]]) -> list[str]:
    """As few facts as tell all of them apart, of those in which they differ."""
    differing = [place for place in range(len(TOLD)) if len({key[place] for key in keys}) > 1]
    for count in range(1, len(differing) + 1):
        labels = [", ".join(key[place] for place in differing[:count]) for key in keys]
        if len(set(labels)) == len(keys):
            return labels
    return ["all"] if keys else []


def _rate(run: RunRecord) -> float | None:
    name = run.headline_test
    return None if name is None else run.tests[name].get("wer")


def _start(run: RunRecord) -> str:
    seed = run.federation.get("seed_model")
    return "no seed" if seed is None else f"from {text(seed).rpartition('/')[2]}"


def _clients(run: RunRecord) -> str:
    rule = (run.federation.get("clients") or {}).get("rule", "speaker")
    return "IID" if rule in DEALT else "by speaker" if rule == "speaker" else f"by {rule}"


def _figure(lines: Mapping[str, LinePoints], central: Mapping[str, float]) -> Figure:
    figure, axes = new_axes()
    for pen, points in zip(pens(list(lines)), lines.values(), strict=True):
        plot(axes, pen, points)
    for rate in central.values():
        axes.axhline(rate, color=FAINT, linestyle=(0, (4, 3)), linewidth=1)
    axes.set_xscale("log", base=2)
    sizes = sorted({size for points in lines.values() for size, _ in points})
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(percents())
    dress(axes, x="cohort size", y="word error rate, test")
    return figure
