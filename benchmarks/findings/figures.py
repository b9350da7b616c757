"""Figures of the results, drawn from kept runs with the report's own line styles."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from findings.kept import Kept, each, find_path, settings_of
from findings.numbers import norm_ratio, per_cent
from findings.numbers import points as in_points
from findings.rates import Difference, difference, mean_interval, scored
from sottovoce.base.drawing import COLOURS, write_drawing
from sottovoce.base.errors import InputError
from sottovoce.evaluation.error_rates import Interval
from sottovoce.models.family import DEFAULT, find_family
from sottovoce.report.curves import dynamics_section, learning_drawings
from sottovoce.report.drawings import (
    WIDTH,
    Drawing,
    data_id,
    finish_axes,
    label_decades,
    line_styles,
    new_axes,
    percent_labels,
    plot_line,
)
from sottovoce.report.gradients import gradient_section
from sottovoce.report.layers import (
    Kinds,
    Profile,
    axis_limits,
    has_spreads,
    layer_drawings,
    layer_profiles,
    norm_profiles,
    plot_profile,
    spread_profiles,
)
from sottovoce.report.paper_comparison import cohort_section
from sottovoce.report.records import RunRecord

KINDS = find_family(DEFAULT).presentation.kinds


def svg(drawing: Drawing) -> bytes:
    """The drawing as a file, the same bytes every time. The text has its title; letters stay letters: it is small."""
    with tempfile.TemporaryDirectory() as folder, mpl.rc_context({"svg.fonttype": "none"}):
        path = Path(folder) / "drawing.svg"
        write_drawing(path, drawing.draw)
        return path.read_bytes()


def by_setting(kept: Kept, suites: Sequence[str], *, name: str, only: Sequence[str]) -> Drawing:
    """The test WER of every setting of some suites."""
    settings = {n: kept.repeats(n) for suite in suites for n in kept.settings(suite, only=only)}
    shown = {n if suites[1:] else n.partition("/")[2]: list(runs.values()) for n, runs in settings.items()}
    intervals = {label: mean_interval(runs, names=["figure", label]) for label, runs in shown.items()}
    told = [f"{label} {per_cent(fmean(_rates(runs)))} %" for label, runs in shown.items()]
    return Drawing(
        name,
        f"Word error rate by setting: {', '.join(suites)}",
        "A filled mark is the mean over seeds, open ones are single seeds, bars are 95 % intervals over test speakers.",
        f"Test word error rate: {'; '.join(told)}.",
        partial(_by_setting, shown, intervals),
    )


def norms(runs: Sequence[RunRecord], *, name: str) -> Drawing:
    """Update norms per layer and kind before clipping, runs side by side on one scale: the paper's Figure 5."""
    profiles = {run.label: norm_profiles(run.diagnostics, place=run.place)[0] for run in runs}
    if without := [label for label, profile in profiles.items() if not profile]:
        raise InputError(f"no diagnostics in {', '.join(without)}")
    told = [
        f"{label}: " + ", ".join(f"{KINDS.get(k, k)} {min(v):.2g} to {max(v):.2g}" for k, v in profile.blocks.items())
        for label, profile in profiles.items()
    ]
    return Drawing(
        name,
        "Norms of clients' updates before clipping",
        "Mean over clients and over the rounds kept; convolution and output stand before and after the blocks.",
        f"Update norms by kind of parameter over the layers. {'; '.join(told)}.",
        partial(_norms, {"norm of a client's update": profiles}, KINDS),
    )


def spreads(runs: Sequence[RunRecord], *, name: str) -> Drawing:
    """Means above, standard deviations over clients below, norms and matrices apart: Figures 5, 10, 19 ff."""
    if without := [run.label for run in runs if not has_spreads(run.diagnostics)]:
        raise InputError(f"no spreads over clients in {', '.join(without)}")
    means = {_short(run): norm_profiles(run.diagnostics, place=run.place_apart)[0] for run in runs}
    deviations = {_short(run): spread_profiles(run.diagnostics, place=run.place_apart)[0] for run in runs}
    kinds = runs[0].kinds_apart
    told = [
        f"{label}: "
        + ", ".join(
            f"{kind} {fmean(v):.2g} ± {fmean(deviations[label].blocks[kind]):.2g}" for kind, v in p.blocks.items()
        )
        for label, p in means.items()
    ]
    return Drawing(
        name,
        "Norms of clients' updates before clipping",
        "Means above, standard deviations below, over clients and over the rounds kept; what is outside the blocks "
        "stands before and after them.",
        f"Update norms by kind of parameter, mean over the layers. {'; '.join(told)}.",
        partial(_norms, {"norm of an update": means, "deviation over clients": deviations}, kinds),
    )


def _short(run: RunRecord) -> str:
    return run.label.rpartition("/")[2]


def reported(runs: Sequence[RunRecord], *, drawing: str, name: str) -> Drawing:
    """A figure of the report of some runs, by its name there, under a name of its own."""
    short = [replace(run, label=_short(run)) for run in runs]
    sections = [make(short) for make in (cohort_section, dynamics_section, gradient_section)]
    found = [part for section in sections if section is not None for part in section.all_parts]
    profiles = [layer_profiles(run) for run in short[:1]]
    layers = [layer_drawings(short[0], own, prefix="", among=profiles) for own in profiles]
    found += [*learning_drawings(short), *(part for drawings in layers for part in drawings)]
    known = {part.name: part for part in found if isinstance(part, Drawing)}
    if drawing not in known:
        raise InputError(f"drawing={drawing}: expected one that these runs have: {', '.join(known)}")
    return replace(known[drawing], name=name)


def gain(kept: Kept, settings: Sequence[str], *, kinds: tuple[str, str], name: str) -> Drawing:
    """What a way of clipping changes against global clipping, over how unbalanced updates are.

    Of each setting, `suite/dim-6` say, the label's first word gives place to `global` for what it is compared with.
    """
    pairs = {setting: compared_with(setting) for setting in settings}
    each(kept.repeats, [name for pair in pairs.items() for name in pair])
    lines: dict[str, list[tuple[float, Difference]]] = {}
    for setting, other in pairs.items():
        share = setting.partition("/")[2].partition("-")[0]
        first, second = kept.repeats(setting), kept.repeats(other)
        base = next(iter(second.values()))
        recipe = settings_of(base)
        start = str(recipe[find_path("seed_model", recipe)]).rpartition("/")[2]
        found = difference(first, second, names=(setting, other))
        lines.setdefault(f"{share}, from {start}", []).append((norm_ratio(base, *kinds), found))
    ordered = {line: sorted(points, key=lambda point: point[0]) for line, points in lines.items()}
    told = [f"{line}: " + ", ".join(f"{in_points(d.mean)} at {at:.2g}" for at, d in p) for line, p in ordered.items()]
    title = " over ".join(KINDS.get(kind, kind) for kind in kinds)
    return Drawing(
        name,
        "What per-layer clipping changes against global clipping, by how unbalanced updates are",
        f"Below zero it helps. Unbalanced: norms before clipping, {title}. Bars are 95 % intervals over test speakers.",
        f"Difference of test word error rates in points against the norms of {title}. {'; '.join(told)}.",
        partial(_gain, ordered, f"norm of updates, {title}"),
    )


def compared_with(setting: str) -> str:
    """The same with global clipping."""
    return re.sub("/[^-]+", "/global", setting)


def _rates(runs: Sequence[RunRecord]) -> list[float]:
    return [scored(run)["wer"] for run in runs]


def _by_setting(settings: Mapping[str, Sequence[RunRecord]], intervals: Mapping[str, Interval | None]) -> Figure:
    figure, axes = new_axes(height=1.0 + 0.3 * len(settings))
    for place, (label, runs) in enumerate(settings.items()):
        rates, interval = _rates(runs), intervals[label]
        if interval is not None:
            axes.plot(interval, [place, place], color=COLOURS[0], linewidth=1.8, alpha=0.5)
        if len(rates) > 1:
            axes.plot(rates, [place] * len(rates), "o", color=COLOURS[1], markersize=4, fillstyle="none")
        axes.plot(fmean(rates), place, "o", color=COLOURS[0], markersize=5, gid=data_id(axes))
    axes.set_yticks(range(len(settings)), list(settings))
    axes.set_ylim(len(settings) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(percent_labels())
    finish_axes(axes, x="word error rate, test", y="", grid="x")
    axes.tick_params(axis="y", length=0)
    return figure


def _norms(rows: Mapping[str, Mapping[str, Profile]], named: Kinds) -> Figure:
    """A panel for each run, in a row for each quantity, on one scale."""
    (first, *_), runs = rows.values(), len(next(iter(rows.values())))
    size = (1.0 + (WIDTH - 1.0) * runs, 3.8 + 2.6 * (len(rows) - 1))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), runs, sharey="row", squeeze=False)
    limits = axis_limits(profile for profiles in rows.values() for profile in profiles.values())
    kinds = {kind: named[kind] for kind in named if any(kind in {*p.blocks, *p.outside} for p in first.values())}
    for row, (y, profiles) in enumerate(rows.items()):
        for number, (axes, (label, profile)) in enumerate(zip(panels[row], profiles.items(), strict=True)):
            plot_profile(axes, profile, kinds, limits=limits)
            axes.set_title(label if row == 0 else "", fontsize=10, loc="left")
            _dress_panel(axes, first=row == number == 0, y=y if number == 0 else "")
    return figure


def _dress_panel(axes: Axes, *, first: bool, y: str) -> None:
    """One legend for all panels: the first one's."""
    if not first:
        for line in axes.lines:
            line.set_label("")
    finish_axes(axes, x="layer", y=y)


def _gain(lines: Mapping[str, Sequence[tuple[float, Difference]]], x: str) -> Figure:
    figure, axes = new_axes()
    axes.axhline(0.0, color="0.5", linewidth=1.0)
    for pen, points in zip(line_styles(list(lines)), lines.values(), strict=True):
        plot_line(axes, pen, [(at, 100 * found.mean) for at, found in points])
        for at, found in points:
            if found.interval is not None:
                axes.plot(
                    [at, at], [100 * bound for bound in found.interval], color=pen.colour, linewidth=1.8, alpha=0.5
                )
    axes.set_xscale("log")
    label_decades(axes.xaxis)
    finish_axes(axes, x=x, y="points against global")
    return figure
