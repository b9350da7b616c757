"""Gradients of central training, layer by layer: the flagship paper's Figures 8, 9, 17, 18 and 20 for any run."""

from collections.abc import Sequence
from functools import partial
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sottovoce.base.drawing import COLOURS, INK
from sottovoce.report.drawings import WIDTH, Drawing, data_id, label_decades, style_panel
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
from sottovoce.report.parts import (
    Fold,
    PagePart,
    PageSection,
    fold_by_run,
    make_drawing,
    make_section,
    show_number,
    unique_slugs,
)
from sottovoce.report.records import Record, RunRecord

NORMS, DEVIATIONS = "gradient_norms", "gradient_deviations"
PANELS = 3  # side by side
FAINTEST = 0.2  # opacity of the first layer's line; the last one's is 1


def gradient_section(runs: Sequence[RunRecord]) -> PageSection | None:
    """Of every central run that has recorded them, with means over all of their steps; older runs have single steps."""
    found = {run.label: (run, w) for run in runs if not run.is_federated and (w := _windows(run.metrics))}
    limits = along = None  # a run alone needs no common axis
    if len(found) > 1:
        limits = axis_limits(gradient_profile(windows) for _, windows in found.values())
        along = axis_limits(gradient_profile([window]) for _, windows in found.values() for window in windows)
    parts: dict[str, Sequence[PagePart]] = {}
    for (label, (run, windows)), slug in zip(found.items(), unique_slugs(found).values(), strict=True):
        suffix, kinds, mean = "" if len(found) == 1 else f"-{slug}", run.kinds_apart, gradient_profile(windows)
        columns = [("norm", mean), ("deviation over steps", gradient_profile(windows, DEVIATIONS))]
        table = profile_table("gradients", columns, kinds, suffix=suffix, label=label, show=show_number)
        drawn = [profile_drawing(f"gradients{suffix}", mean, kinds, kind="gradients", limits=limits)]
        if mean.blocks:  # an output layer alone has none
            drawn.append(_along_drawing(windows, kinds, name=f"gradients-along{suffix}", limits=along))
        parts[label] = (*drawn, Fold("The numbers", (table,)))
    return make_section("gradients", fold_by_run(parts))


def _windows(metrics: Sequence[Record]) -> list[Record]:
    return [record for record in metrics if record.get(DEVIATIONS)]


def gradient_profile(windows: Sequence[Record], which: str = NORMS) -> Profile:
    """The mean over windows for each kind and layer; windows in which a tensor never had a gradient do not count."""
    return mean_profile([window[which] for window in windows], _mean_of_positive)


def _mean_of_positive(values: Sequence[float]) -> float:
    return fmean(seen) if (seen := [value for value in values if value > 0]) else 0.0


def _along_drawing(windows: Sequence[Record], kinds: Kinds, *, name: str, limits: AxisLimits | None) -> Drawing:
    first, last = (gradient_profile([window]) for window in (windows[0], windows[-1]))
    ends = [
        f"{kinds.get(kind, kind)} from {fmean(first.blocks[kind]):.3g} to {fmean(last.blocks[kind]):.3g}"
        for kind in first.blocks
    ]
    alt = f"Gradient norms over the steps, mean over layers: {'; '.join(ends)}."
    return make_drawing(name, alt, partial(_along_figure, windows, kinds, limits=limits), kind="gradients-along")


def _along_figure(windows: Sequence[Record], named: Kinds, *, limits: AxisLimits | None) -> Figure:
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
            opacity = 1 - (1 - FAINTEST) * (depth - layer - 1) / depth
            if points := [point for point in seen if point[1] > 0]:
                axes.plot(*zip(*points, strict=True), color=COLOURS[0], alpha=opacity, linewidth=1.1, gid=data_id(axes))
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
        style_panel(axes)
    if limits is not None:
        panels[0].set_ylim(*limits)
    label_decades(panels[0].yaxis)
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    figure.supxlabel("steps", color=INK, fontsize=10)
    figure.supylabel("gradient norm", color=INK, fontsize=10)
    return figure
