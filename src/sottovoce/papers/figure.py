"""Gao et al.'s Figure 1 for any stores: a strip of clients for each measure, and a map of their utterances."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sottovoce.drawing import COLOURS, FAINT, INK, MARKERS, Page, write_drawing
from sottovoce.papers.heterogeneity import Heterogeneity
from sottovoce.papers.maps import choose_method, flatten
from sottovoce.papers.signals import MEASURES
from sottovoce.papers.table import HEADINGS, notes, rows
from sottovoce.seeds import keyed_order, stream
from sottovoce.tables import Table

# More would be one grey cloud, and hours of t-SNE.
MAP_POINTS = 2000
MAP_NOTE = (
    "Map: one point an utterance, colour and form by client, at most {points:,} utterances of whole clients, {method}."
)


def draw(found: list[Heterogeneity], figures: dict[str, Any], path: Path | str) -> None:
    """Draw to `path`; its suffix says as what: .png, .svg, or .html (one self-contained page)."""
    write_drawing(path, lambda: _figure(found, seed=figures["seed"]), lambda: _page(found, figures))


def _page(found: list[Heterogeneity], figures: dict[str, Any]) -> Page:
    method = choose_method(min(len(one.client_U) for one in found))
    return Page(
        title="Heterogeneity of " + " and ".join(one.store for one in found),
        description="Clients by loudness, log-HNR, permutation entropy and blind SNR, and a map of their utterances",
        table=Table("heterogeneity", "", HEADINGS, tuple(rows(figures)), words=2),
        notes=(*notes(figures), MAP_NOTE.format(points=MAP_POINTS, method=method)),
    )


def _figure(found: list[Heterogeneity], *, seed: int) -> Figure:
    figure = Figure(figsize=(10, 2 + 1.2 * len(found) + 4.6), layout="constrained")
    parts = figure.subfigures(2, 1, squeeze=False, height_ratios=(2 + 1.2 * len(found), 4.6))[:, 0]
    for part in parts:
        part.set_facecolor("none")
    for number, axes in enumerate(parts[0].subplots(2, 2).flat):
        _draw_strips(axes, found, number, seed=seed)
    for axes, one in zip(parts[1].subplots(1, len(found), squeeze=False)[0], found, strict=True):
        _draw_map(axes, one, seed=seed)
    return figure


def _draw_strips(axes: Axes, found: list[Heterogeneity], number: int, *, seed: int) -> None:
    measure = MEASURES[number]
    for place, one in enumerate(found):
        means = one.means_CM[:, number]
        heights = place + stream(seed, "strip", place).uniform(-0.28, 0.28, len(means))
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(means, heights, "o", color=colour, markersize=4, alpha=0.6, markeredgewidth=0)
    # The blank keeps a name that begins with an underscore.
    axes.set_yticks(range(len(found)), [f" {one.store}" for one in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_title(f"{measure.title}, mean of each client", loc="left", color=INK, fontsize=11)
    axes.set_xlabel(measure.unit, color=INK)
    axes.grid(axis="x", color=FAINT, alpha=0.3, linewidth=0.6)
    _dress(axes)


def _draw_map(axes: Axes, one: Heterogeneity, *, seed: int) -> None:
    shown_U = _shown(one, seed=seed)
    client_U = one.client_U[shown_U]
    method = choose_method(len(client_U))
    places = flatten(one.points_UD[shown_U], method=method, seed=seed)
    for number, client in enumerate(np.unique(client_U)):
        its = places[client_U == client]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]
        axes.plot(its[:, 0], its[:, 1], marker, color=colour, markersize=4, alpha=0.8, markeredgewidth=0)
    title = f"{one.store}: utterances by {one.embedding.name}, {method}"
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set(xticks=[], yticks=[])
    _dress(axes)


def _shown(one: Heterogeneity, *, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """As many whole clients, in a seeded order, as fit on the map; of a single larger one its first utterances."""
    order = keyed_order(np.arange(one.clients, dtype=np.uint64), seed, "map")
    fits = np.cumsum(np.bincount(one.client_U)[order]) <= MAP_POINTS
    chosen = order[fits] if fits[0] else order[:1]
    shown_U = np.isin(one.client_U, chosen)
    return np.asarray(shown_U & (np.cumsum(shown_U) <= MAP_POINTS))


def _dress(axes: Axes) -> None:
    axes.set_facecolor("none")
    axes.tick_params(color=FAINT, labelcolor=INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
