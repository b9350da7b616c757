"""Updates, noise and steps, layer by layer: the flagship paper's Figures 5, 10, 19 and 21 to 23 for any run."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sottovoce.base.tables import NOTHING, Table
from sottovoce.models.family import ParameterPlace
from sottovoce.report.drawings import (
    Drawing,
    finish_axes,
    label_decades,
    line_styles,
    new_axes,
    plot_line,
    plot_marker,
)
from sottovoce.report.parts import (
    Fold,
    PagePart,
    PageSection,
    figure_text,
    fold_by_run,
    make_drawing,
    make_section,
    make_table,
    notice,
    unique_slugs,
)
from sottovoce.report.records import Record, RunRecord
from sottovoce.report.run_facts import SECURE_KEEPS_NOTHING

Placing = Callable[[str], ParameterPlace]
Kinds = Mapping[str, str]
AxisLimits = tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """One quantity for each kind of parameter: over the blocks, and outside of them before or after."""

    blocks: Mapping[str, tuple[float, ...]]
    outside: Mapping[str, float]

    def __bool__(self) -> bool:
        return any(value > 0 for _, _, value in self.rows())

    def rows(self) -> list[tuple[str, str, float]]:
        """(kind, layer, value), for a table."""
        inside = [(kind, str(n), value) for kind, values in self.blocks.items() for n, value in enumerate(values)]
        return inside + [(kind, "outside the blocks", value) for kind, value in self.outside.items()]


EMPTY = Profile({}, {})


def norm_profiles(diagnostics: Sequence[Record], *, place: Placing) -> tuple[Profile, Profile]:
    """Mean update norms before and after clipping, over rounds and clients."""
    seen = _norms_by_tensor(diagnostics)
    before, after = (
        {name: fmean(norms[when] for norms in rounds) ** 2 for name, rounds in seen.items()}
        for when in ("norm_before", "norm_after")
    )
    return _profile(before, place), _profile(after, place)


def spread_profiles(diagnostics: Sequence[Record], *, place: Placing) -> tuple[Profile, Profile]:
    """Standard deviations of update norms over rounds and clients, before and after clipping. Rounds count alike.

    Where a kind has several tensors in a layer (a norm's weight and bias) it is the root of their summed squares: at
    least that of the norm of both, and as much where they grow and shrink together.
    """
    seen = _norms_by_tensor(diagnostics)
    before, after = (
        {
            name: _variance([(norms[f"norm_{when}"], norms[f"std_{when}"]) for norms in known])
            for name, rounds in seen.items()
            if (known := [norms for norms in rounds if f"std_{when}" in norms])
        }
        for when in ("before", "after")
    )
    return _profile(before, place), _profile(after, place)


def has_spreads(diagnostics: Sequence[Record]) -> bool:
    """Whether it is recorded how clients differ; older runs know their means alone."""
    return any("std_before" in norms for rounds in _norms_by_tensor(diagnostics).values() for norms in rounds)


def noise_profile(diagnostics: Sequence[Record], *, sizes: Mapping[str, int], place: Placing) -> Profile:
    """Noise-to-signal: the expected norm of the noise over that of the summed updates, whose squares are averaged.

    Several tensors of one kind in a layer are one vector here: squares add up, weighted by their sizes, because
    the noise of a tensor grows with the root of its size.
    """
    ratios: dict[str, list[float]] = {}
    for record in diagnostics:
        for name, ratio in (record.get("signal_to_noise") or {}).items():
            if ratio:
                ratios.setdefault(name, []).append(ratio)
    signal = {name: fmean(r**2 for r in found) * sizes.get(name, 1) for name, found in ratios.items()}
    noise = {name: float(sizes.get(name, 1)) for name in ratios}
    over, under = _profile(noise, place), _profile(signal, place)
    return Profile(
        {kind: tuple(map(_ratio, over.blocks[kind], under.blocks[kind])) for kind in over.blocks},
        {kind: _ratio(over.outside[kind], under.outside[kind]) for kind in over.outside},
    )


def mean_profile(records: Sequence[Record], mean: Callable[[Sequence[float]], float] = fmean) -> Profile:
    """The mean over records, each with one number a kind, or one for each of its layers."""
    by_kind = {kind: [record[kind] for record in records] for kind in (records[0] if records else ())}
    in_blocks = {kind for kind, values in by_kind.items() if isinstance(values[0], list)}
    return Profile(
        {kind: tuple(map(mean, zip(*by_kind[kind], strict=True))) for kind in by_kind if kind in in_blocks},
        {kind: mean(values) for kind, values in by_kind.items() if kind not in in_blocks},
    )


@dataclass(frozen=True)
class Profiles:
    """All that is drawn of one run, over its layers."""

    before: Profile
    after: Profile
    spread: Profile
    noise: Profile
    trust: Profile


def layer_profiles(run: RunRecord) -> Profiles:
    """What a run has recorded of its layers; empty where it has nothing."""
    apart = has_spreads(run.diagnostics)
    place = run.place_apart if apart else run.place
    return Profiles(
        *norm_profiles(run.diagnostics, place=place),
        spread_profiles(run.diagnostics, place=place)[0] if apart else EMPTY,
        noise_profile(run.diagnostics, sizes=run.layer_sizes, place=run.place),
        mean_profile([record["trust_ratios"] for record in run.metrics if record.get("trust_ratios")]),
    )


def axis_limits(profiles: Iterable[Profile]) -> AxisLimits | None:
    """The ends of an axis on which all of them fit; None where there is nothing to draw."""
    values = [value for profile in profiles for _, _, value in profile.rows() if value > 0]
    return (min(values) / 1.5, max(values) * 1.5) if values else None


# Each figure by its name: the profile that it draws. Those of norms share one axis.
NORM_FIGURES: Mapping[str, Callable[[Profiles], Profile]] = {
    "norms-before": lambda profiles: profiles.before,
    "norms-spread": lambda profiles: profiles.spread,
    "norms-after": lambda profiles: profiles.after,
}
OTHER_FIGURES: Mapping[str, Callable[[Profiles], Profile]] = {
    "noise-to-signal": lambda profiles: profiles.noise,
    "trust-ratios": lambda profiles: profiles.trust,
}


def layer_section(runs: Sequence[RunRecord]) -> PageSection | None:
    private = [run for run in runs if run.is_federated]
    parts: dict[str, Sequence[PagePart]] = {}
    profiles = [layer_profiles(run) for run in private]
    for run, own, slug in zip(private, profiles, unique_slugs(run.label for run in private).values(), strict=True):
        several = len(private) > 1
        inside: list[PagePart] = [*layer_drawings(run, own, prefix=f"{slug}-" * several, among=profiles)]
        if numbers := layer_tables(run, own, suffix=f"-{slug}" * several):
            inside.append(Fold("The numbers", tuple(numbers)))
        if not run.diagnostics:
            unwritten = "has written no diagnostics: there are no norms to show."
            inside.insert(0, notice(f"{run.label} {SECURE_KEEPS_NOTHING if run.is_release else unwritten}"))
        parts[run.label] = inside
    return make_section("layers", fold_by_run(parts))


def layer_drawings(run: RunRecord, own: Profiles, *, prefix: str, among: Sequence[Profiles]) -> list[Drawing]:
    """The figures of one run; those it has no numbers for are left out. `prefix` begins their names.

    The same quantity has the same axis in all figures of a page: `among` are the profiles of all runs on it.
    """
    norm_kinds = run.kinds_apart if has_spreads(run.diagnostics) else run.kinds
    norm_limits = axis_limits(profile for one in among for profile in (one.before, one.after))
    found = []
    for name, select in {**NORM_FIGURES, **OTHER_FIGURES}.items():
        kinds, limits = norm_kinds, norm_limits
        if name in OTHER_FIGURES:
            kinds, limits = run.kinds, axis_limits(map(select, among)) if len(among) > 1 else None
        if profile := select(own):
            found.append(profile_drawing(f"{prefix}{name}", profile, kinds, kind=name, limits=limits))
    return found


def profile_drawing(name: str, profile: Profile, kinds: Kinds, *, kind: str, limits: AxisLimits | None) -> Drawing:
    """One quantity over the layers, a line for each kind of parameter."""
    parts = [f"{kinds.get(k, k)} {min(v):.3g} to {max(v):.3g}" for k, v in profile.blocks.items()]
    parts += [f"{kinds.get(k, k)} outside the blocks {v:.3g}" for k, v in profile.outside.items()]
    alt = f"{figure_text(kind, 'title')} by kind of parameter over the layers: {'; '.join(parts)}."
    draw = partial(_profile_figure, profile, kinds, y=figure_text(kind, "axis"), limits=limits)
    return make_drawing(name, alt, draw, kind=kind)


def layer_tables(run: RunRecord, own: Profiles, *, suffix: str) -> list[Table]:
    """The same numbers: norms, noise and trust ratios; and how far clients differ, with more kinds apart."""
    before, after = norm_profiles(run.diagnostics, place=run.place)
    columns = [
        *(("norm before", before), ("norm after", after)),
        *(("noise to signal", own.noise), ("trust ratio", own.trust)),
    ]
    found = [profile_table("layers", columns, run.kinds, suffix=suffix, label=run.label)]
    if has_spreads(run.diagnostics):
        means = norm_profiles(run.diagnostics, place=run.place_apart)
        spreads = spread_profiles(run.diagnostics, place=run.place_apart)
        columns = [
            *(("norm before", means[0]), ("deviation", spreads[0])),
            *(("norm after", means[1]), ("deviation", spreads[1])),
        ]
        found.append(profile_table("norms", columns, run.kinds_apart, suffix=suffix, label=run.label))
    return [table for table in found if table.rows]


def profile_table(
    kind: str,
    columns: Sequence[tuple[str, Profile]],
    kinds: Kinds,
    *,
    suffix: str,
    label: str,
    show: Callable[[float], str] = "{:.4g}".format,
) -> Table:
    """Quantities side by side: a row for each kind and layer."""
    values = [{(name, layer): value for name, layer, value in profile.rows()} for _, profile in columns]
    places = dict.fromkeys(place for column in values for place in column)
    rows = [
        (kinds.get(place[0], place[0]), place[1], *(show(v[place]) if place in v else NOTHING for v in values))
        for place in sorted(places, key=lambda place: kind_order(place[0], kinds))
    ]
    headings = ("kind", "layer", *(heading for heading, _ in columns))
    return make_table(f"{kind}{suffix}", rows, kind=kind, headings=headings, words=2, label=label)


def _norms_by_tensor(diagnostics: Sequence[Record]) -> dict[str, list[Record]]:
    """The norms of each tensor, round by round."""
    found: dict[str, list[Record]] = {}
    for record in diagnostics:
        for name, norms in (record.get("layers") or {}).items():
            found.setdefault(name, []).append(norms)
    return found


def _variance(rounds: Sequence[tuple[float, float]]) -> float:
    """Of all clients of all rounds, from each round's mean and deviation."""
    mean = fmean(own for own, _ in rounds)
    return fmean(deviation**2 + (own - mean) ** 2 for own, deviation in rounds)


def _profile(squares: Mapping[str, float], place: Placing) -> Profile:
    """Roots of sums of squares of the tensors of one kind in one layer."""
    blocks: dict[str, dict[int, float]] = {}
    outside: dict[str, float] = {}
    for name, square in squares.items():
        kind, layer = place(name)
        if layer is None:
            outside[kind] = outside.get(kind, 0.0) + square
        else:
            of_kind = blocks.setdefault(kind, {})
            of_kind[layer] = of_kind.get(layer, 0.0) + square
    return Profile(
        # Layers that are not trained keep their place.
        {kind: tuple(math.sqrt(found.get(n, 0.0)) for n in range(max(found) + 1)) for kind, found in blocks.items()},
        {kind: math.sqrt(square) for kind, square in outside.items()},
    )


def _ratio(noise: float, signal: float) -> float:
    return noise / signal if signal else 0.0


def kind_order(kind: str, kinds: Kinds) -> int:
    """Where a kind stands in the network; those that it does not name come last."""
    return list(kinds).index(kind) if kind in kinds else len(kinds)


def _profile_figure(profile: Profile, named: Kinds, *, y: str, limits: AxisLimits | None) -> Figure:
    figure, axes = new_axes(height=3.5)
    kinds = sorted(dict.fromkeys([*profile.blocks, *profile.outside]), key=lambda kind: kind_order(kind, named))
    plot_profile(axes, profile, {kind: named.get(kind, kind) for kind in kinds}, limits=limits)
    finish_axes(axes, x="layer", y=y)
    return figure


def plot_profile(axes: Axes, profile: Profile, kinds: Kinds, *, limits: AxisLimits | None) -> None:
    """A line over the blocks for each of `kinds`; what lies outside of them stands before or after."""
    depth, order = max((len(values) for values in profile.blocks.values()), default=0), list(kinds)
    first_block = min((order.index(kind) for kind in profile.blocks), default=0)
    for kind, style in zip(kinds, line_styles(kinds.values()), strict=True):
        values = [(layer, value) for layer, value in enumerate(profile.blocks.get(kind, ())) if value > 0]
        if values:
            plot_line(axes, style, values)
        if (alone := profile.outside.get(kind, 0.0)) > 0:
            place = -1 if order.index(kind) < first_block else depth
            plot_marker(axes, style, place, alone, is_labelled=not values)
    axes.set_yscale("log")
    if limits is not None:
        axes.set_ylim(*limits)
    label_decades(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    axes.set_xlim(-1.5, depth + 0.5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if 0 <= value < depth else "")
