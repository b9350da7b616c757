"""Gradients of central training, layer by layer: the flagship paper's Figures 8, 9, 17, 18 and 20 for a run."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sottovoce.drawing import COLOURS, INK
from sottovoce.report.cells import number_text, slugs
from sottovoce.report.drawings import WIDTH, Drawing, bare, data_id, label_decades
from sottovoce.report.layers import (
    AxisLimits,
    Kinds,
    Profile,
    axis_limits,
    kind_order,
    mean_profile,
    profile_drawing,
    profile_table,
)
from sottovoce.report.parts import Chapter, Fold, PagePart, by_run, chapter
from sottovoce.report.records import Record, RunRecord
from sottovoce.tables import Table

NORMS, DEVIATIONS = "gradient_norms", "gradient_deviations"
PANELS = 3  # beside one another
FAINTEST = 0.2  # of the first layer's line; the last one's is 1
_INTRO = (
    "Norms of central training's gradients by layer and kind of parameter (the paper's Figures 8, 9, 17, 18 and 20), "
    "before clipping, over all steps. A block that layer-drop leaves out of a step has no gradient there, and counts "
    "for nothing in it."
)


def gradient_section(runs: Sequence[RunRecord]) -> Chapter | None:
    """Of every central run that has written them down."""
    found = {run.label: (run, windows) for run in runs if (windows := _windows(run))}
    if not found:
        return None
    limits = along = None  # a run alone has nothing beside it
    if len(found) > 1:
        limits = axis_limits(gradient_profile(windows) for _, windows in found.values())
        along = axis_limits(gradient_profile([window]) for _, windows in found.values() for window in windows)
    parts: dict[str, Sequence[PagePart]] = {}
    for (label, (run, windows)), slug in zip(found.items(), slugs(found).values(), strict=True):
        suffix = "" if len(found) == 1 else f"-{slug}"
        parts[label] = (
            _mean_drawing(windows, run.kinds_apart, name=f"gradients{suffix}", limits=limits),
            _along_drawing(windows, run.kinds_apart, name=f"gradients-along{suffix}", limits=along),
            Fold("The numbers", (_table(label, windows, run.kinds_apart, name=f"gradients{suffix}"),)),
        )
    return chapter("gradients", "Gradients, layer by layer", by_run(parts), _INTRO)


def _windows(run: RunRecord) -> list[Record]:
    """The records with means over all of their steps; older runs have written down single steps."""
    return [] if run.is_federated else [record for record in run.metrics if record.get(DEVIATIONS)]


def gradient_profile(windows: Sequence[Record], which: str = NORMS) -> Profile:
    """The mean over windows for each kind and layer; windows in which a tensor never had a gradient do not count."""
    return mean_profile([window[which] for window in windows], _mean_of_seen)


def _mean_of_seen(values: Sequence[float]) -> float:
    return fmean(seen) if (seen := [value for value in values if value > 0]) else 0.0


def _mean_drawing(windows: Sequence[Record], kinds: Kinds, *, name: str, limits: AxisLimits | None) -> Drawing:
    caption = (
        "Mean over all steps of training; what is outside the blocks stands before and after them. Where norms of "
        "layers lie far above the matrices', one bound on the whole gradient is theirs alone."
    )
    profile, title = gradient_profile(windows), "Gradient norms by layer"
    return profile_drawing(name, title, profile, kinds, y="gradient norm", caption=caption, limits=limits)


def _along_drawing(windows: Sequence[Record], kinds: Kinds, *, name: str, limits: AxisLimits | None) -> Drawing:
    first, last = (gradient_profile([window]) for window in (windows[0], windows[-1]))
    told = [
        f"{kinds.get(kind, kind)} from {fmean(first.blocks[kind]):.3g} to {fmean(last.blocks[kind]):.3g}"
        for kind in first.blocks
    ]
    return Drawing(
        name,
        "Gradient norms along the training",
        "One line a layer, the first the faintest. Each point is the mean over the steps since the last evaluation.",
        f"Gradient norms over the steps, mean over layers: {'; '.join(told)}.",
        partial(_along, windows, kinds, limits=limits),
    )


def _along(windows: Sequence[Record], named: Kinds, *, limits: AxisLimits | None) -> Figure:
    """A panel for each kind that the blocks have, on one scale."""
    kinds = sorted(gradient_profile(windows).blocks, key=lambda kind: kind_order(kind, named))
    rows = -(-len(kinds) // PANELS)
    figure = Figure(figsize=(WIDTH, 0.6 + 1.35 * rows), layout="constrained")
    panels = figure.subplots(rows, PANELS, sharex=True, sharey=True, squeeze=False).reshape(-1)
    for axes, kind in zip(panels, kinds, strict=False):
        axes.set_title(named.get(kind, kind), fontsize=8.5, color=INK, loc="left")
        depth = len(windows[0][NORMS][kind])
        for layer in range(depth):
            seen = [(window["step"], window[NORMS][kind][layer]) for window in windows]
            points = [point for point in seen if point[1] > 0]
            shade = 1 - (1 - FAINTEST) * (depth - layer - 1) / depth
            if points:
                axes.plot(*zip(*points, strict=True), color=COLOURS[0], alpha=shade, linewidth=1.1, gid=data_id(axes))
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
        bare(axes)
    if limits is not None:
        panels[0].set_ylim(*limits)
    label_decades(panels[0].yaxis)
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    figure.supxlabel("steps", color=INK, fontsize=10)
    figure.supylabel("gradient norm", color=INK, fontsize=10)
    return figure


def _table(label: str, windows: Sequence[Record], kinds: Kinds, *, name: str) -> Table:
    columns = [("norm", gradient_profile(windows)), ("deviation over steps", gradient_profile(windows, DEVIATIONS))]
    note = "Means over the evaluations' windows, and of the standard deviations within each."
    return replace(profile_table(name, f"{label}: gradients", columns, kinds, show=number_text), note=note)
