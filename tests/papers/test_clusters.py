"""k-means against the best partition there is, and purity by hand."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import pdist

from sottovoce.base.seeds import stream
from sottovoce.papers.heterogeneity import cluster_purity, k_means
from sottovoce.papers.heterogeneity_figure import choose_method, principal_axes, project_points


def cloud(*, points=60, dimensions=5, name="cloud"):
    return stream(1, name).normal(size=(points, dimensions)).astype(np.float32)


def within(points, labels):
    """The sum of squared distances to the mean of one's cluster."""
    return sum(((points[labels == one] - points[labels == one].mean(axis=0)) ** 2).sum() for one in set(labels))


def test_purity_by_hand():
    # Cluster 0 holds a, a, b; cluster 1 holds b, c; cluster 2 is empty: 2 + 1 of 5.
    assert cluster_purity(np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 1, 2])) == 3 / 5


@given(pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40))
def test_purity_is_at_least_the_share_of_the_largest_client(pairs):
    found, true = np.array(pairs).T
    assert np.bincount(true).max() / len(true) <= cluster_purity(found, true) <= 1
    assert cluster_purity(true, true) == 1


def test_k_means_finds_the_best_partition():
    points = cloud(points=7, dimensions=2)
    best = min(within(points, np.array(labels)) for labels in product(range(3), repeat=7))
    # Float32 points: sums of seven squares near one.
    assert within(points, k_means(points, count=3, seed=1)) == pytest.approx(best, rel=1e-5)


def test_well_apart_clients_are_told_apart_and_the_seed_decides():
    client = np.repeat(np.arange(12), 5)
    points = cloud() + 100 * cloud(points=12, name="centres")[client]
    assert cluster_purity(k_means(points, count=12, seed=1), client) == 1
    assert np.array_equal(k_means(cloud(), count=12, seed=3), k_means(cloud(), count=12, seed=3))


def test_as_many_clusters_as_points_and_points_that_coincide():
    assert len(set(k_means(cloud(), count=60, seed=1).tolist())) == 60
    assert set(k_means(np.ones((5, 3), np.float32), count=3, seed=1).tolist()) <= {0, 1, 2}


def test_principal_axes_keep_distances_in_the_plane():
    flat = cloud(dimensions=2)
    turned = np.linalg.qr(cloud(points=5).astype(np.float64))[0][:, :2] @ flat.T
    # Float32 coordinates of a few units.
    assert pdist(principal_axes(turned.T.astype(np.float32))) == pytest.approx(pdist(flat), abs=1e-5)
    assert principal_axes(np.ones((1, 4), np.float32)).tolist() == [[0, 0]]


def test_t_sne_keeps_neighbours_together():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra analysis): no t-SNE to test")
    client = np.repeat(np.arange(12), 5)
    points = cloud() + 100 * cloud(points=12, name="centres")[client]
    assert choose_method(len(points)) == "t-SNE"
    places = project_points(points, method="t-SNE", seed=1)
    distances = np.square(places[:, None] - places).sum(axis=2) + np.diag([np.inf] * 60)
    assert (client[distances.argmin(axis=1)] == client).all()


def test_without_scikit_learn_or_points_the_map_has_principal_axes(monkeypatch):
    assert choose_method(7) == "PCA"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_method(1000) == "PCA"
