"""Points of many dimensions on a flat map: t-SNE with scikit-learn (extra `analysis`), else principal axes."""

import importlib.util
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sottovoce.seeds import derive

Method = Literal["t-SNE", "PCA"]
INSTALL = "pip install 'sottovoce[analysis]'"


def has_neighbourhoods() -> bool:
    """Is there t-SNE?"""
    return importlib.util.find_spec("sklearn") is not None


def choose_method(points: int) -> Method:
    """A neighbourhood needs a few points; below that, and without scikit-learn, the principal axes serve."""
    return "t-SNE" if points >= 8 and has_neighbourhoods() else "PCA"


def flatten(points_ND: NDArray[np.float32], *, method: Method, seed: int) -> NDArray[np.float64]:
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
