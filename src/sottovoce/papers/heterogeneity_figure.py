"""Gao et al.'s Figure 1 for any stores: a strip of clients for each measure, and a map of their utterances.

The map is t-SNE with scikit-learn (extra `analysis`), else two principal components.
"""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from sottovoce.base.drawing import COLOURS, INK, MARKERS, FigurePage, style_axes, write_drawing
from sottovoce.base.seeds import derive, keyed_order, stream
from sottovoce.base.tables import Table
from sottovoce.papers.heterogeneity import HEADINGS, Heterogeneity, heterogeneity_notes, heterogeneity_rows
from sottovoce.papers.signals import MEASURES

MapMethod = Literal["t-SNE", "PCA"]
INSTALL = "pip install 'sottovoce[analysis]'"
# More would be one grey cloud, and hours of t-SNE.
MAP_POINTS = 2000
MAP_NOTE = (
    "Map: one point an utterance, colour and form by client, at most {points:,} utterances of whole clients, {method}."
)


def draw_heterogeneity(found: list[Heterogeneity], figures: dict[str, Any], path: Path | str) -> None:
    """Draw to `path`; its suffix says as what: .png, .svg, .pdf or .html."""
    write_drawing(path, partial(_figure, found, seed=figures["seed"]), partial(_page, found, figures))


def has_tsne() -> bool:
    return importlib.util.find_spec("sklearn") is not None


def choose_method(points: int) -> MapMethod:
    """t-SNE needs a few points; below that, and without scikit-learn, principal components."""
    return "t-SNE" if points >= 8 and has_tsne() else "PCA"


def project_points(points_ND: NDArray[np.float32], *, method: MapMethod, seed: int) -> NDArray[np.float64]:
    """[N, 2]."""
    if method == "PCA":
        return principal_axes(points_ND)
    from sklearn.manifold import TSNE

    # As scikit-learn has it by default, in smaller neighbourhoods where there are few points.
    perplexity = min(30.0, (len(points_ND) - 1) / 4)
    places = TSNE(perplexity=perplexity, init="pca", random_state=derive(seed, "t-SNE") % 2**32)
    return np.asarray(places.fit_transform(points_ND), dtype=np.float64)


def principal_axes(points_ND: NDArray[np.float32]) -> NDArray[np.float64]:
    """The two directions along which points differ most, each turned so that its largest weight is positive."""
    centred = points_ND.astype(np.float64) - points_ND.mean(axis=0, dtype=np.float64)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    axes = np.pad(axes, ((0, 2), (0, 0)))[:2]  # a single point has one axis
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)
    return np.asarray(centred @ (axes * np.where(largest < 0, -1.0, 1.0)).T)


def _page(found: list[Heterogeneity], figures: dict[str, Any]) -> FigurePage:
    method = choose_method(min(len(one.client_U) for one in found))
    return FigurePage(
        title="Heterogeneity of " + " and ".join(one.store for one in found),
        description="Clients by loudness, log-HNR, permutation entropy and blind SNR, and a map of their utterances",
        table=Table("heterogeneity", "", HEADINGS, tuple(heterogeneity_rows(figures)), words=2),
        notes=(*heterogeneity_notes(figures), MAP_NOTE.format(points=MAP_POINTS, method=method)),
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
    style_axes(axes, grid="x")


def _draw_map(axes: Axes, one: Heterogeneity, *, seed: int) -> None:
    shown_U = _shown(one, seed=seed)
    client_U = one.client_U[shown_U]
    method = choose_method(len(client_U))
    places = project_points(one.points_UD[shown_U], method=method, seed=seed)
    for number, client in enumerate(np.unique(client_U)):
        its = places[client_U == client]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]
        axes.plot(its[:, 0], its[:, 1], marker, color=colour, markersize=4, alpha=0.8, markeredgewidth=0)
    title = f"{one.store}: utterances by {one.embedding.name}, {method}"
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    style_axes(axes)
    axes.set(xticks=[], yticks=[])


def _shown(one: Heterogeneity, *, seed: int) -> NDArray[np.bool_]:
    """As many whole clients, in a seeded order, as fit on the map; of a single larger one its first utterances."""
    order = keyed_order(np.arange(one.clients, dtype=np.uint64), seed, "map")
    fits = np.cumsum(np.bincount(one.client_U)[order]) <= MAP_POINTS
    chosen = order[fits] if fits[0] else order[:1]
    shown_U = np.isin(one.client_U, chosen)
    return np.asarray(shown_U & (np.cumsum(shown_U) <= MAP_POINTS))
