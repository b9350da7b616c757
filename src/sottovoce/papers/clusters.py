"""Can clients be told apart by where their utterances lie? k-means from k-means++ starts, and its clusters' purity.

N  points    D  dimensions    K  clusters
"""

import numpy as np
from numpy.typing import NDArray

from sottovoce.seeds import stream

Points = NDArray[np.float32]
Labels = NDArray[np.int64]

RESTARTS = 10
LONGEST = 100  # iterations; k-means nearly always settles in fewer
_DISTANCES_AT_ONCE = 1 << 23  # 32 MB of float32


def purity(cluster_N: Labels, client_N: Labels) -> float:
    """The share of points that belong to the client with most points in their cluster.

    >>> purity(np.array([0, 0, 0, 1, 1]), np.array([7, 7, 8, 8, 8]))
    0.8
    """
    pairs, counts = np.unique(np.stack([cluster_N, client_N]), axis=1, return_counts=True)
    majority = np.zeros(int(cluster_N.max()) + 1, dtype=np.int64)
    np.maximum.at(majority, pairs[0], counts)
    return int(majority.sum()) / len(cluster_N)


def k_means(points_ND: Points, *, count: int, seed: int) -> Labels:
    """The cluster of each point: of ten starts (k-means++, stream "k-means" of `seed`) the one that fits best."""
    assert 0 < count <= len(points_ND), f"{count} clusters of {len(points_ND)} points"
    found = [_settle(points_ND, _spread_starts(points_ND, count, seed, number)) for number in range(RESTARTS)]
    return min(found, key=lambda one: one[1])[0]


def _spread_starts(points_ND: Points, count: int, seed: int, number: int) -> Points:
    """k-means++: each next centre is a point drawn by its squared distance to the nearest centre so far."""
    rng = stream(seed, "k-means", number)
    chosen = [int(rng.integers(len(points_ND)))]
    distance_N = _squared_distances(points_ND, points_ND[chosen[-1]])
    while len(chosen) < count:
        running = np.cumsum(distance_N)
        # Where all points coincide with centres, any will do.
        draw = np.searchsorted(running, rng.random() * running[-1], side="right") if running[-1] > 0 else len(chosen)
        chosen.append(min(int(draw), len(points_ND) - 1))
        distance_N = np.minimum(distance_N, _squared_distances(points_ND, points_ND[chosen[-1]]))
    return points_ND[chosen]


def _squared_distances(points_ND: Points, centre_D: Points) -> NDArray[np.float64]:
    return np.asarray(np.square(points_ND - centre_D).sum(axis=1, dtype=np.float64))


def _settle(points_ND: Points, centres_KD: Points) -> tuple[Labels, float]:
    """Lloyd's iterations until no point changes its cluster; a cluster that loses all its points keeps its centre."""
    cluster_N = _nearest(points_ND, centres_KD)
    for _ in range(LONGEST):
        centres_KD = _centres(points_ND, cluster_N, centres_KD)
        before, cluster_N = cluster_N, _nearest(points_ND, centres_KD)
        if np.array_equal(before, cluster_N):
            break
    return cluster_N, float(_squared_distances(points_ND, centres_KD[cluster_N]).sum())


def _centres(points_ND: Points, cluster_N: Labels, before_KD: Points) -> Points:
    order = np.argsort(cluster_N, kind="stable")
    present, starts, counts = np.unique(cluster_N[order], return_index=True, return_counts=True)
    centres_KD = before_KD.copy()
    centres_KD[present] = np.add.reduceat(points_ND[order], starts, axis=0, dtype=np.float64) / counts[:, None]
    return centres_KD


def _nearest(points_ND: Points, centres_KD: Points) -> Labels:
    """‖x − c‖² = ‖x‖² − 2x·c + ‖c‖², and ‖x‖² is the same for all centres."""
    squares_K = np.square(centres_KD).sum(axis=1)
    rows = max(1, _DISTANCES_AT_ONCE // len(centres_KD))
    blocks = (points_ND[first : first + rows] for first in range(0, len(points_ND), rows))
    return np.concatenate([np.argmin(squares_K - 2 * block @ centres_KD.T, axis=1) for block in blocks])
