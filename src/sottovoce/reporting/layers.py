"""Updates, noise and steps, layer by layer: the flagship paper's Figure 5 for a run, and what noise makes of it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sottovoce.models.family import Place
from sottovoce.reporting.drawings import Drawing, data_id, dress, label_decades, new_axes, pens, plot
from sottovoce.reporting.records import Record, RunRecord

Placing = Callable[[str], Place]
Kinds = Mapping[str, str]
Limits = tuple[float, float]


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
    return _norm_profile(diagnostics, "norm_before", place), _norm_profile(diagnostics, "norm_after", place)


def spread_profiles(diagnostics: Sequence[Record], *, place: Placing) -> tuple[Profile, Profile]:
    """Standard deviations of update norms over rounds and clients, before and after clipping.

    Where a kind has several tensors in a layer (a norm's weight and bias) it is the root of their summed squares: at
    least that of the norm of both, and as much where they grow and shrink together.
    """
    return _spread_profile(diagnostics, "before", place), _spread_profile(diagnostics, "after", place)


def has_spreads(diagnostics: Sequence[Record]) -> bool:
    """Whether it was written down how clients differ; older runs know their means alone."""
    return any("std_before" in layer for record in diagnostics for layer in (record.get("layers") or {}).values())


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
    found = [record["trust_ratios"] for record in metrics if record.get("trust_ratios")]
    if not found:
        return Profile({}, {})
    blocks, outside = {}, {}
    for kind, first in found[0].items():
        values = [record[kind] for record in found]
        if isinstance(first, list):
            blocks[kind] = tuple(fmean(layer) for layer in zip(*values, strict=True))
        else:
            outside[kind] = fmean(values)
    return Profile(blocks, outside)


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


def limits_of(profiles: Iterable[Profile]) -> Limits | None:
    """The ends of an axis on which all of them fit, with some room; None where there is nothing to draw."""
    values = [value for profile in profiles for _, _, value in profile.rows() if value > 0]
    return (min(values) / 1.5, max(values) * 1.5) if values else None


def layer_drawings(run: RunRecord, own: Profiles, *, prefix: str, among: Sequence[Profiles]) -> list[Drawing]:
    """The figures of one run; those it has no numbers for are left out. `prefix` begins their names.

    The same quantity has the same axis in all figures of a page: `among` are the profiles of all runs on it.
    """
    norm_kinds = run.kinds_apart if has_spreads(run.diagnostics) else run.kinds
    norms = limits_of(profile for one in among for profile in (one.before, one.after))
    several = among if len(among) > 1 else ()
    noises, trusts = limits_of(one.noise for one in several), limits_of(one.trust for one in several)
    over = "Mean over rounds and clients; what is outside the blocks stands before and after them."
    wanted = (
        (
            "norms-before",
            "Update norms before clipping",
            own.before,
            "norm of a client's update",
            f"{over} A wide gap between the kinds is the imbalance that per-layer clipping is made for (the paper's "
            "Figures 5, 10, 19 and 21 to 23).",
        ),
        (
            "norms-spread",
            "How far clients differ",
            own.spread,
            "deviation of update norms",
            "Standard deviation of the same norms over rounds and clients, on the same scale.",
        ),
        (
            "norms-after",
            "Update norms after clipping",
            own.after,
            "norm after clipping",
            "On the same scale as before clipping: how much of each kind is left is what the clients still say.",
        ),
        (
            "noise-to-signal",
            "Noise to signal",
            own.noise,
            "noise norm / signal norm",
            "Expected norm of the noise over the norm of the clients' summed updates. Above 1, a round's step in that "
            "layer is more noise than learning.",
        ),
        (
            "trust-ratios",
            "Trust ratios of the server's steps",
            own.trust,
            "trust ratio",
            "LAMB and LARS scale each layer's step by the norm of its weights over that of the step: small where noise "
            "has made the step long. Mean over rounds.",
        ),
    )
    found = []
    for name, title, profile, y, caption in wanted:
        is_norm = name.startswith("norms")
        kinds = norm_kinds if is_norm else run.kinds
        scale = norms if is_norm else noises if name == "noise-to-signal" else trusts
        if profile:
            found.append(profile_drawing(f"{prefix}{name}", title, profile, kinds, y=y, caption=caption, limits=scale))
    return found


def profile_drawing(
    name: str,
    title: str,
    profile: Profile,
    kinds: Kinds,
    *,
    y: str,
    caption: str,
    limits: Limits | None = None,
) -> Drawing:
    """One quantity over the layers, a line for each kind of parameter."""
    return Drawing(
        name, title, caption, _told(title, profile, kinds), partial(_figure, profile, kinds, y=y, limits=limits)
    )


def layer_rows(run: RunRecord) -> list[tuple[str, ...]]:
    """The same numbers as cells: kind, layer, norm before, after, noise to signal, trust ratio."""
    before, after = norm_profiles(run.diagnostics, place=run.place)
    profiles = (
        before,
        after,
        noise_profile(run.diagnostics, sizes=run.layer_sizes, place=run.place),
        trust_profile(run.metrics),
    )
    kinds = run.kinds
    values = [{(kind, layer): value for kind, layer, value in profile.rows()} for profile in profiles]
    places = list(dict.fromkeys(place for column in values for place in column))
    return [
        (kinds.get(kind, kind), layer, *(f"{v[kind, layer]:.4g}" if (kind, layer) in v else "–" for v in values))
        for kind, layer in sorted(places, key=lambda place: kind_order(place[0], kinds))
    ]


def spread_rows(run: RunRecord) -> list[tuple[str, ...]]:
    """Kinds apart, as cells: kind, layer, mean and deviation of norms before clipping, and after."""
    if not has_spreads(run.diagnostics):
        return []
    place, kinds = run.place_apart, run.kinds_apart
    means, spreads = norm_profiles(run.diagnostics, place=place), spread_profiles(run.diagnostics, place=place)
    values = [
        {(k, layer): value for k, layer, value in p.rows()} for pair in zip(means, spreads, strict=True) for p in pair
    ]
    return [
        (kinds.get(kind, kind), layer, *(f"{column[kind, layer]:.4g}" for column in values))
        for kind, layer in sorted(values[0], key=lambda found: kind_order(found[0], kinds))
    ]


def _spread_profile(diagnostics: Sequence[Record], when: str, place: Placing) -> Profile:
    """Rounds count alike, as they do in the means."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in diagnostics:
        for name, norms in (record.get("layers") or {}).items():
            if f"std_{when}" in norms:
                found.setdefault(name, []).append((norms[f"norm_{when}"], norms[f"std_{when}"]))
    return _profile({name: _variance(seen) for name, seen in found.items()}, place)


def _variance(rounds: Sequence[tuple[float, float]]) -> float:
    """Of all clients of all rounds, from each round's mean and deviation."""
    mean = fmean(own for own, _ in rounds)
    return fmean(deviation**2 + (own - mean) ** 2 for own, deviation in rounds)


def _norm_profile(diagnostics: Sequence[Record], which: str, place: Placing) -> Profile:
    found: dict[str, list[float]] = {}
    for record in diagnostics:
        for name, norms in (record.get("layers") or {}).items():
            found.setdefault(name, []).append(norms[which])
    return _profile({name: fmean(values) ** 2 for name, values in found.items()}, place)


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


def _told(title: str, profile: Profile, kinds: Kinds) -> str:
    parts = [f"{kinds.get(k, k)} {min(v):.3g} to {max(v):.3g}" for k, v in profile.blocks.items()]
    parts += [f"{kinds.get(k, k)} outside the blocks {v:.3g}" for k, v in profile.outside.items()]
    return f"{title} by kind of parameter over the layers: {'; '.join(parts)}."


def _figure(profile: Profile, named: Kinds, *, y: str, limits: Limits | None) -> Figure:
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
            axes.plot(
                [place],
                [alone],
                color=pen.colour,
                marker=pen.marker,
                markersize=5,
                linestyle="",
                label=label,
                gid=data_id(axes),
            )
    axes.set_yscale("log")
    if limits is not None:
        axes.set_ylim(*limits)
    label_decades(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    axes.set_xlim(-1.5, depth + 0.5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if 0 <= value < depth else "")
    dress(axes, x="layer", y=y)
    return figure
