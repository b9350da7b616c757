"""Updates, noise and steps, layer by layer: the flagship paper's Figure 5 for a run, and what noise makes of it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sottovoce.models.family import Place
from sottovoce.report.drawings import Drawing, data_id, dress, label_decades, new_axes, pens, plot
from sottovoce.report.records import Record, RunRecord
from sottovoce.tables import NOTHING, Table

Placing = Callable[[str], Place]
Kinds = Mapping[str, str]
AxisLimits = tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """One quantity for each kind of parameter: over the blocks, and outside of them before or after."""

    blocks: Mapping[str, tuple[float, ...]]
    outside: Mapping[str, float]

    def __bool__(self) -> bool:
        return any(value > 0 for values in (*self.blocks.values(), self.outside.values()) for value in values)

    def rows(self) -> list[tuple[str, str, float]]:
        """(kind, layer, value), for a table."""
        inside = [
            (kind, str(layer), value) for kind, values in self.blocks.items() for layer, value in enumerate(values)
        ]
        return inside + [(kind, "outside the blocks", value) for kind, value in self.outside.items()]


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
    """Whether it was written down how clients differ; older runs know their means alone."""
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
        {kind: tuple(map(_over, over.blocks[kind], under.blocks[kind])) for kind in over.blocks},
        {kind: _over(over.outside[kind], under.outside[kind]) for kind in over.outside},
    )


def trust_profile(metrics: Sequence[Record]) -> Profile:
    """Mean trust ratios over the rounds."""
    return mean_profile([record["trust_ratios"] for record in metrics if record.get("trust_ratios")])


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
    """What a run has written down of its layers; empty where it has nothing."""
    apart = has_spreads(run.diagnostics)
    place = run.place_apart if apart else run.place
    before, after = norm_profiles(run.diagnostics, place=place)
    return Profiles(
        before,
        after,
        spread_profiles(run.diagnostics, place=place)[0] if apart else Profile({}, {}),
        noise_profile(run.diagnostics, sizes=run.layer_sizes, place=run.place),
        trust_profile(run.metrics),
    )


def axis_limits(profiles: Iterable[Profile]) -> AxisLimits | None:
    """The ends of an axis on which all of them fit, with some room; None where there is nothing to draw."""
    values = [value for profile in profiles for _, _, value in profile.rows() if value > 0]
    return (min(values) / 1.5, max(values) * 1.5) if values else None


def layer_drawings(run: RunRecord, own: Profiles, *, prefix: str, among: Sequence[Profiles]) -> list[Drawing]:
    """The figures of one run; those it has no numbers for are left out. `prefix` begins their names.

    The same quantity has the same axis in all figures of a page: `among` are the profiles of all runs on it.
    """
    norm_kinds = run.kinds_apart if has_spreads(run.diagnostics) else run.kinds
    norms = axis_limits(profile for one in among for profile in (one.before, one.after))
    several = among if len(among) > 1 else ()
    noises, trusts = axis_limits(one.noise for one in several), axis_limits(one.trust for one in several)
    wanted = (
        (
            "norms-before",
            "Update norms before clipping",
            (own.before, norm_kinds, norms),
            "norm of a client's update",
            "Mean over rounds and clients; what is outside the blocks stands before and after them. A wide gap between "
            "the kinds is the imbalance that per-layer clipping is made for (the paper's Figures 5, 10, 19 and 21 to "
            "23).",
        ),
        (
            "norms-spread",
            "How far clients differ",
            (own.spread, norm_kinds, norms),
            "deviation of update norms",
            "Standard deviation of the same norms over rounds and clients, on the same scale.",
        ),
        (
            "norms-after",
            "Update norms after clipping",
            (own.after, norm_kinds, norms),
            "norm after clipping",
            "On the same scale as before clipping: how much of each kind is left is what the clients still say.",
        ),
        (
            "noise-to-signal",
            "Noise to signal",
            (own.noise, run.kinds, noises),
            "noise norm / signal norm",
            "Expected norm of the noise over the norm of the clients' summed updates. Above 1, a round's step in that "
            "layer is more noise than learning.",
        ),
        (
            "trust-ratios",
            "Trust ratios of the server's steps",
            (own.trust, run.kinds, trusts),
            "trust ratio",
            "LAMB and LARS scale each layer's step by the norm of its weights over that of the step: small where noise "
            "has made the step long. Mean over rounds.",
        ),
    )
    return [
        profile_drawing(f"{prefix}{name}", title, profile, kinds, y=y, caption=caption, limits=limits)
        for name, title, (profile, kinds, limits), y, caption in wanted
        if profile
    ]


def profile_drawing(
    name: str,
    title: str,
    profile: Profile,
    kinds: Kinds,
    *,
    y: str,
    caption: str,
    limits: AxisLimits | None = None,
) -> Drawing:
    """One quantity over the layers, a line for each kind of parameter."""
    parts = [f"{kinds.get(k, k)} {min(v):.3g} to {max(v):.3g}" for k, v in profile.blocks.items()]
    parts += [f"{kinds.get(k, k)} outside the blocks {v:.3g}" for k, v in profile.outside.items()]
    told = f"{title} by kind of parameter over the layers: {'; '.join(parts)}."
    return Drawing(name, title, caption, told, partial(_figure, profile, kinds, y=y, limits=limits))


def layer_tables(run: RunRecord, own: Profiles, *, suffix: str) -> list[Table]:
    """The same numbers: norms, noise and trust ratios; and how far clients differ, with more kinds apart."""
    before, after = norm_profiles(run.diagnostics, place=run.place)
    columns = [
        ("norm before", before),
        ("norm after", after),
        ("noise to signal", own.noise),
        ("trust ratio", own.trust),
    ]
    found = [profile_table(f"layers{suffix}", f"{run.label}, layer by layer", columns, run.kinds)]
    if has_spreads(run.diagnostics):
        means = norm_profiles(run.diagnostics, place=run.place_apart)
        spreads = spread_profiles(run.diagnostics, place=run.place_apart)
        columns = [
            ("norm before", means[0]),
            ("deviation", spreads[0]),
            ("norm after", means[1]),
            ("deviation", spreads[1]),
        ]
        table = profile_table(f"norms{suffix}", f"{run.label}, update norms over clients", columns, run.kinds_apart)
        note = "Means and standard deviations over rounds and clients; simulations alone."
        found.append(replace(table, note=note))
    return [table for table in found if table.rows]


def profile_table(
    name: str,
    title: str,
    columns: Sequence[tuple[str, Profile]],
    kinds: Kinds,
    *,
    show: Callable[[float], str] = "{:.4g}".format,
) -> Table:
    """Quantities side by side: a row for each kind and layer."""
    values = [{(kind, layer): value for kind, layer, value in profile.rows()} for _, profile in columns]
    places = sorted(
        dict.fromkeys(place for column in values for place in column), key=lambda p: kind_order(p[0], kinds)
    )
    rows = [
        (kinds.get(kind, kind), layer, *(show(v[kind, layer]) if (kind, layer) in v else NOTHING for v in values))
        for kind, layer in places
    ]
    return Table(name, title, ("kind", "layer", *(heading for heading, _ in columns)), tuple(rows), words=2)


def _norms_by_tensor(diagnostics: Sequence[Record]) -> dict[str, list[Record]]:
    """What each round says of a tensor's norms."""
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


def _over(noise: float, signal: float) -> float:
    return noise / signal if signal else 0.0


def kind_order(kind: str, kinds: Kinds) -> int:
    """Where a kind stands in the network; those that it does not name come last."""
    return list(kinds).index(kind) if kind in kinds else len(kinds)


def _figure(profile: Profile, named: Kinds, *, y: str, limits: AxisLimits | None) -> Figure:
    """A line over the blocks for each kind; what lies outside of them stands before or after."""
    figure, axes = new_axes(height=3.5)
    depth = max((len(values) for values in profile.blocks.values()), default=0)
    kinds = sorted(dict.fromkeys([*profile.blocks, *profile.outside]), key=lambda kind: kind_order(kind, named))
    first_block = min((kinds.index(kind) for kind in profile.blocks), default=0)
    for kind, pen in zip(kinds, pens([named.get(kind, kind) for kind in kinds]), strict=True):
        if values := [(layer, value) for layer, value in enumerate(profile.blocks.get(kind, ())) if value > 0]:
            plot(axes, pen, values)
        alone = profile.outside.get(kind, 0.0)
        if alone > 0:
            place = -1 if kinds.index(kind) < first_block else depth
            label = None if values else pen.label
            style: dict[str, Any] = {
                "color": pen.colour,
                "marker": pen.marker,
                "markersize": 5,
                "linestyle": "",
                "label": label,
            }
            axes.plot([place], [alone], gid=data_id(axes), **style)
    axes.set_yscale("log")
    if limits is not None:
        axes.set_ylim(*limits)
    label_decades(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    axes.set_xlim(-1.5, depth + 0.5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if 0 <= value < depth else "")
    dress(axes, x="layer", y=y)
    return figure
