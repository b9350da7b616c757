"""How unlike one another the clients of a store sound, and how well they are told apart (Gao et al. 2022, §4.2).

A client is a speaker. Each measure is taken in every frame, averaged over an utterance, and then over a client:

    U  utterances    C  clients    M  measures    D  dimensions of an embedding
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.errors import InputError
from sottovoce.papers.clusters import k_means, purity
from sottovoce.papers.embeddings import Embedding
from sottovoce.papers.signals import MEASURES, describe
from sottovoce.seeds import keyed_order
from sottovoce.store import Store
from sottovoce.users.groups import Groups, offsets_of, spans
from sottovoce.users.splits import select_speakers

Floats = NDArray[np.float64]

NOT_PRIVATE = "Computed from people's recordings without noise: these figures are not differentially private."
# One recording of hours must not decide how much memory is needed.
LONGEST_SECONDS = 60
PURITY = (
    "share of utterances that belong to their cluster's majority client; k-means++ over embeddings of utterances "
    f"(their first {LONGEST_SECONDS} s) with as many clusters as clients, of clients with at least two utterances"
)
STATISTICS = (
    "frame → mean of an utterance → mean and std of a client; then mean and std over clients. Every std is the "
    "population's, that of a client is of those with at least two utterances; kurtosis is of clients' means, 0 for a "
    "normal distribution"
)


@dataclass(frozen=True)
class Spread:
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
    client_U: NDArray[np.int64]
    values_UM: Floats
    embedding: Embedding
    points_UD: NDArray[np.float32]

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

    def spreads(self) -> dict[str, Spread]:
        """Of each measure, by its name."""
        without = np.isnan(self.values_UM).sum(axis=0)
        columns = zip(MEASURES, self.means_CM.T, self.stds_CM.T, without, strict=True)
        return {measure.name: _spread(means, stds, int(count)) for measure, means, stds, count in columns}

    @property
    def clients_heard_twice(self) -> int:
        return int((np.bincount(self.client_U) >= 2).sum())

    def purity(self, *, seed: int) -> float | None:
        """None with fewer than two clients to tell apart."""
        if self.clients_heard_twice < 2:
            return None
        counted_U = np.bincount(self.client_U)[self.client_U] >= 2
        clusters = k_means(self.points_UD[counted_U], count=self.clients_heard_twice, seed=seed)
        return purity(clusters, self.client_U[counted_U])


def measure(
    store: Store,
    *,
    embedding: Embedding,
    seed: int,
    users: int | None = None,
    utterances: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Heterogeneity:
    """Listen to a store, one utterance at a time; of very large ones to `users` people, `utterances` of each.

    Who and what is left out is decided by names and `seed` alone. In memory are four numbers and a point per utterance.
    """
    chosen, in_store = _choose(store, seed=seed, users=users, utterances=utterances)
    values, points, samples = [], [], 0
    for done, row in enumerate(chosen.members.tolist()):
        heard = store.samples(row)
        values.append(describe(heard))
        points.append(embedding.embed(heard[: LONGEST_SECONDS * SAMPLE_RATE]))
        samples += len(heard)
        on_progress(done + 1, len(chosen.members))
    points_UD = np.stack(points)
    if embedding.standardise:
        spread_D = points_UD.std(axis=0)
        points_UD = (points_UD - points_UD.mean(axis=0)) / np.where(spread_D > 0, spread_D, 1)
    return Heterogeneity(
        store=store.path.resolve().name,
        language=store.language,
        clients_in_store=in_store,
        audio_seconds=samples / SAMPLE_RATE,
        client_U=np.repeat(np.arange(len(chosen)), chosen.sizes),
        values_UM=np.stack(values),
        embedding=embedding,
        points_UD=points_UD,
    )


def as_json(found: list[Heterogeneity], *, seed: int) -> dict[str, Any]:
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
                "purity_clients": one.clients_heard_twice,
            }
            for one in found
        ],
    }


def excess_kurtosis(values: Floats) -> float | None:
    """The fourth central moment over the squared second, less 3; None where all values are the same.

    >>> excess_kurtosis(np.array([-1.0, 1.0]))
    -2.0
    """
    centred = values - values.mean()
    variance = np.square(centred).mean()
    return float((centred**4).mean() / variance**2) - 3.0 if variance > 0 else None


def _choose(store: Store, *, seed: int, users: int | None, utterances: int | None) -> tuple[Groups, int]:
    """The utterances of each client listened to, and how many clients the store has."""
    for name, limit in (("users", users), ("utterances", utterances)):
        if limit is not None and limit < 1:
            raise InputError(f"{name}={limit}: expected at least 1")
    speakers = select_speakers(store, tuple(store.splits))
    kept = speakers.take(np.sort(keyed_order(speakers.keys, seed, "heterogeneity", "users")[:users]))
    rows = []
    for client, key in enumerate(kept.keys.tolist()):
        people = kept.rows[client]
        spoken = spans(store.user_utterances[people], store.user_utterances[people + 1])
        numbers = np.arange(len(spoken), dtype=np.uint64)
        order = keyed_order(numbers, seed, "heterogeneity", "utterances", key)[:utterances]
        rows.append(spoken[np.sort(order)])
    return Groups(members=np.concatenate(rows), offsets=offsets_of(np.array([len(one) for one in rows]))), len(speakers)


def _spread(means_C: Floats, stds_C: Floats, without: int) -> Spread:
    means, stds = means_C[~np.isnan(means_C)], stds_C[~np.isnan(stds_C)]
    return Spread(
        clients=len(means),
        mean=float(means.mean()) if len(means) else None,
        std_of_means=float(means.std()) if len(means) > 1 else None,
        kurtosis_of_means=excess_kurtosis(means) if len(means) > 1 else None,
        clients_with_std=len(stds),
        mean_of_stds=float(stds.mean()) if len(stds) else None,
        std_of_stds=float(stds.std()) if len(stds) > 1 else None,
        utterances_without=without,
    )
