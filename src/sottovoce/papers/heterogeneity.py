"""How much the clients of a store differ in sound, and how well they can be distinguished (Gao et al. 2022, §4.2).

A client is a speaker. Each measure is taken in every frame, averaged over an utterance, and then over a client:

    U  utterances    C  clients    M  measures    D  dimensions of an embedding    N  points
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.cluster.vq
import scipy.stats
from numpy.typing import NDArray
from rich.console import Group as Lines
from rich.text import Text

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import keyed_order, stream
from sottovoce.base.tables import Row, plain_table
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.speakers import Groups, expand_ranges, offsets_of, select_speakers
from sottovoce.data.store import Store
from sottovoce.papers.embeddings import Embedding
from sottovoce.papers.signals import MEASURES, measure_signal

Floats = NDArray[np.float64]
Points = NDArray[np.float32]
Labels = NDArray[np.int64]

RESTARTS, ITERATIONS = 10, 50  # k-means nearly always settles in fewer
NOT_PRIVATE = "Computed from people's recordings without noise: these figures are not differentially private."
LONGEST_SECONDS = 60  # of a recording are embedded: its length must not decide how much memory is needed
PURITY = (
    "share of utterances that belong to their cluster's majority client; k-means++ over embeddings of utterances "
    f"(their first {LONGEST_SECONDS} s) with as many clusters as clients, of clients with at least two utterances"
)
STATISTICS = (
    "frame → mean of an utterance → mean and std of a client; then mean and std over clients. Every std is the "
    "population's, that of a client is of those with at least two utterances; kurtosis is of clients' means, 0 for a "
    "normal distribution"
)
HEADINGS = ("measure", "store", "mean", "std of means", "kurtosis", "mean of stds", "std of stds")


@dataclass(frozen=True)
class ClientSpread:
    """One measure over clients; None where too few of them have a value."""

    clients: int
    mean: float | None
    std_of_means: float | None
    kurtosis_of_means: float | None
    clients_with_std: int
    mean_of_stds: float | None
    std_of_stds: float | None
    utterances_without: int


@dataclass(frozen=True, eq=False)
class Heterogeneity:
    """What was found in one store. No client is named: rows are in an order of their own."""

    store: str
    language: str
    clients_in_store: int
    audio_seconds: float
    client_U: Labels
    values_UM: Floats
    embedding: Embedding
    points_UD: Points

    @property
    def clients(self) -> int:
        return int(self.client_U[-1]) + 1

    @property
    def means_CM(self) -> Floats:
        return self._over_clients(np.nanmean, at_least=1)

    @property
    def stds_CM(self) -> Floats:
        return self._over_clients(np.nanstd, at_least=2)

    def _over_clients(self, statistic: Callable[..., Any], *, at_least: int) -> Floats:
        found = np.full((self.clients, len(MEASURES)), np.nan)
        edges = np.searchsorted(self.client_U, np.arange(self.clients + 1))
        for client, (first, last) in enumerate(pairwise(edges)):
            values = self.values_UM[first:last]
            enough = (~np.isnan(values)).sum(axis=0) >= at_least
            found[client, enough] = statistic(values[:, enough], axis=0)
        return found

    def spreads(self) -> dict[str, ClientSpread]:
        """Of each measure, by its name."""
        without = np.isnan(self.values_UM).sum(axis=0)
        columns = zip(MEASURES, self.means_CM.T, self.stds_CM.T, without, strict=True)
        return {measure.name: _spread(means, stds, int(count)) for measure, means, stds, count in columns}

    @property
    def clients_to_cluster(self) -> int:
        return int((np.bincount(self.client_U) >= 2).sum())

    def purity(self, *, seed: int) -> float | None:
        """None with fewer than two clients to distinguish."""
        if self.clients_to_cluster < 2:
            return None
        counted_U = np.bincount(self.client_U)[self.client_U] >= 2
        clusters = k_means(self.points_UD[counted_U], count=self.clients_to_cluster, seed=seed)
        return cluster_purity(clusters, self.client_U[counted_U])


def cluster_purity(cluster_N: Labels, client_N: Labels) -> float:
    """The share of points that belong to the client with most points in their cluster.

    >>> cluster_purity(np.array([0, 0, 0, 1, 1]), np.array([7, 7, 8, 8, 8]))
    0.8
    """
    pairs, counts = np.unique(np.stack([cluster_N, client_N]), axis=1, return_counts=True)
    majority = np.zeros(int(cluster_N.max()) + 1, dtype=np.int64)
    np.maximum.at(majority, pairs[0], counts)
    return int(majority.sum()) / len(cluster_N)


def k_means(points_ND: Points, *, count: int, seed: int) -> Labels:
    """The cluster of each point: of ten starts (k-means++, stream "k-means" of `seed`) the one that fits best."""
    assert 0 < count <= len(points_ND), f"{count} clusters of {len(points_ND)} points"
    points, found = points_ND.astype(np.float64), []
    for number in range(RESTARTS):
        starts = _spread_starts(points, count, rng=stream(seed, "k-means", number))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "One of the clusters is empty", UserWarning)  # it keeps its centre
            centres, clusters = scipy.cluster.vq.kmeans2(points, starts, iter=ITERATIONS, minit="matrix")
        found.append((float(np.square(points - centres[clusters]).sum()), number, clusters))
    return np.asarray(min(found, key=lambda one: one[:2])[2], dtype=np.int64)


def _spread_starts(points_ND: Floats, count: int, *, rng: np.random.Generator) -> Floats:
    """k-means++: each next centre is a point drawn by its squared distance to the nearest centre so far.

    SciPy's own compares every point with all centres again for each next one, which takes hours for many clients.
    """
    chosen = [int(rng.integers(len(points_ND)))]
    distance_N = np.square(points_ND - points_ND[chosen[-1]]).sum(axis=1)
    while len(chosen) < count:
        running = np.cumsum(distance_N)
        # Where all points coincide with centres, any will do.
        draw = np.searchsorted(running, rng.random() * running[-1], side="right") if running[-1] > 0 else len(chosen)
        chosen.append(min(int(draw), len(points_ND) - 1))
        distance_N = np.minimum(distance_N, np.square(points_ND - points_ND[chosen[-1]]).sum(axis=1))
    return points_ND[chosen]


def measure_heterogeneity(
    store: Store,
    *,
    embedding: Embedding,
    seed: int,
    users: int | None = None,
    utterances: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Heterogeneity:
    """Measure a store, one utterance at a time; of very large ones `users` people, `utterances` of each.

    Who and what is left out is decided by names and `seed` alone. In memory are four numbers and a point per utterance.
    """
    chosen, in_store = _choose(store, seed=seed, users=users, utterances=utterances)
    values, points, sample_count = [], [], 0
    for done, row in enumerate(chosen.members.tolist()):
        samples = store.samples(row)
        values.append(measure_signal(samples))
        points.append(embedding.embed(samples[: LONGEST_SECONDS * SAMPLE_RATE]))
        sample_count += len(samples)
        on_progress(done + 1, len(chosen.members))
    points_UD = np.stack(points)
    if embedding.standardise:
        spread_D = points_UD.std(axis=0)
        points_UD = (points_UD - points_UD.mean(axis=0)) / np.where(spread_D > 0, spread_D, 1)
    return Heterogeneity(
        store=store.path.resolve().name,
        language=store.language,
        clients_in_store=in_store,
        audio_seconds=sample_count / SAMPLE_RATE,
        client_U=np.repeat(np.arange(len(chosen)), chosen.sizes),
        values_UM=np.stack(values),
        embedding=embedding,
        points_UD=points_UD,
    )


def heterogeneity_json(found: list[Heterogeneity], *, seed: int) -> dict[str, Any]:
    """All figures of the stores, with what they mean."""
    return {
        "private": False,
        "note": NOT_PRIVATE,
        "seed": seed,
        "definitions": {one.name: f"{one.definition} ({one.unit})" for one in MEASURES}
        | {"purity": PURITY, "embedding": found[0].embedding.definition, "statistics": STATISTICS},
        "embedding": found[0].embedding.name,
        "stores": [
            {
                "store": one.store,
                "language": one.language,
                "clients": one.clients,
                "clients_in_store": one.clients_in_store,
                "utterances": len(one.client_U),
                "hours": one.audio_seconds / 3600,
                "measures": {name: vars(spread) for name, spread in one.spreads().items()},
                "purity": one.purity(seed=seed),
                "purity_clients": one.clients_to_cluster,
            }
            for one in found
        ],
    }


def _choose(store: Store, *, seed: int, users: int | None, utterances: int | None) -> tuple[Groups, int]:
    """The utterances of each client that are measured, and how many clients the store has."""
    for name, limit in (("users", users), ("utterances", utterances)):
        if limit is not None and limit < 1:
            raise InputError(f"{name}={limit}: expected at least 1")
    speakers = select_speakers(store, tuple(store.splits))
    kept = speakers.take(np.sort(keyed_order(speakers.keys, seed, "heterogeneity", "users")[:users]))
    rows = []
    for client, key in enumerate(kept.keys.tolist()):
        people = kept.rows[client]
        spoken = expand_ranges(store.user_utterances[people], store.user_utterances[people + 1])
        numbers = np.arange(len(spoken), dtype=np.uint64)
        order = keyed_order(numbers, seed, "heterogeneity", "utterances", key)[:utterances]
        rows.append(spoken[np.sort(order)])
    return Groups(members=np.concatenate(rows), offsets=offsets_of(np.array([len(one) for one in rows]))), len(speakers)


def _spread(means_C: Floats, stds_C: Floats, without: int) -> ClientSpread:
    means, stds = means_C[~np.isnan(means_C)], stds_C[~np.isnan(stds_C)]
    return ClientSpread(
        clients=len(means),
        mean=float(means.mean()) if len(means) else None,
        std_of_means=float(means.std()) if len(means) > 1 else None,
        kurtosis_of_means=excess_kurtosis(means) if len(means) > 1 else None,
        clients_with_std=len(stds),
        mean_of_stds=float(stds.mean()) if len(stds) else None,
        std_of_stds=float(stds.std()) if len(stds) > 1 else None,
        utterances_without=without,
    )


def excess_kurtosis(values: Floats) -> float | None:
    """None where all values are the same.

    >>> excess_kurtosis(np.array([-1.0, 1.0]))
    -2.0
    """
    return float(scipy.stats.kurtosis(values)) if np.square(values - values.mean()).mean() > 0 else None


# As a table for the terminal and the page.


def heterogeneity_table(figures: dict[str, Any]) -> Lines:
    """A row per measure and store, and below them what they mean."""
    printed = plain_table()
    for number, heading in enumerate(HEADINGS):
        # Two lines a heading and no break in a title: all of it fits 80 columns.
        lines = heading.replace(" of ", " of\n") if " of " in heading else f"\n{heading}"
        printed.add_column(lines, justify="left" if number < 2 else "right", no_wrap=number == 0, overflow="fold")
    for cells in heterogeneity_rows(figures):
        # Names are wrapped in Text: a bracket in them is no markup.
        printed.add_row(*map(Text, cells))
    return Lines(printed, Text(), *map(Text, heterogeneity_notes(figures)))


def heterogeneity_rows(figures: dict[str, Any]) -> list[Row]:
    """The cells of the table; purity, one number a store, stands in the column of means."""
    names = ("mean", "std_of_means", "kurtosis_of_means", "mean_of_stds", "std_of_stds")
    rows: list[Row] = []
    for measure in MEASURES:
        for number, store in enumerate(figures["stores"]):
            spread, title = store["measures"][measure.name], measure.title if number == 0 else ""
            rows.append((title, store["store"], *(_number(spread[name]) for name in names)))
    for number, store in enumerate(figures["stores"]):
        title = f"purity ({figures['embedding']})" if number == 0 else ""
        rows.append((title, store["store"], _number(store["purity"]), *("",) * 4))
    return rows


def heterogeneity_notes(figures: dict[str, Any]) -> list[str]:
    """Who was measured, what each row means, and that none of it is private."""
    lines = []
    for store in figures["stores"]:
        amount = f"{store['store']} ({store['language']}): {store['utterances']:,} utterances, {store['hours']:.2f} h"
        of_all = f"{store['clients']:,} of {store['clients_in_store']:,} clients"
        lines.append(f"{amount}, {of_all} ({store['purity_clients']:,} for purity), seed {figures['seed']}")
        lines += [
            f"{store['store']}: {without:,} utterances have no {measure.title}"
            for measure in MEASURES
            if (without := store["measures"][measure.name]["utterances_without"])
        ]
    titles = {measure.name: measure.title for measure in MEASURES}
    lines += [f"{titles.get(name, name)}: {meaning}." for name, meaning in figures["definitions"].items()]
    return [*lines, figures["note"]]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
