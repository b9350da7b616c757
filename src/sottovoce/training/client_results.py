"""How well clients are understood before and after a federated run: each on its own held-out speech (Gao et al. 2022).

For simulations alone: what a model does for one client is private, and no ε covers it. Clients have no names here, and
stand in the order of their error rates.

Shapes: C clients, U utterances; columns as in `wer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.config import Recipe
from sottovoce.errors import promise
from sottovoce.evaluation.error_rates import Counts, compute_rates, count_word_errors, measure_spread, sum_by_owner
from sottovoce.federated.client_wer import held_out_speech
from sottovoce.models.saved import Recogniser
from sottovoce.privacy.settings import Mode
from sottovoce.seeds import derive, stream
from sottovoce.store import Store
from sottovoce.training.team import Team
from sottovoce.users.population import Client, Population

# A rate above 1 says that more was written down than was said.
LIMITS = (0.5, 1.0)
QUARTERS = 4  # of the clients, by how much speech they have

Rates = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TestedClients:
    """Clients with held-out speech that can be scored; `passed_over` of those asked for have none."""

    clients: tuple[Client, ...]
    rows: NDArray[np.int64]
    owners: NDArray[np.int64]
    texts: tuple[str, ...]
    passed_over: int


def choose_clients_to_test(recipe: Recipe, population: Population) -> TestedClients:
    """All clients with held-out speech, or as many of them as the recipe says: the same in repeats with one people."""
    asked = recipe.federated.test_clients
    order = stream(derive(recipe.people_seed, "tested clients")).permutation(len(population)).tolist()
    found: list[tuple[Client, list[tuple[int, str]]]] = []
    store, looked_at = population.store, 0
    assert isinstance(store, Store)
    for index in order if asked != "all" else range(len(population)):
        if len(found) == asked:
            break
        client, looked_at = population.client(index), looked_at + 1
        if spoken := held_out_speech(store, client):
            found.append((client, spoken))
    said = [(row, text, place) for place, (_, spoken) in enumerate(found) for row, text in spoken]
    return TestedClients(
        clients=tuple(client for client, _ in found),
        rows=np.array([row for row, _, _ in said], dtype=np.int64),
        owners=np.array([place for _, _, place in said], dtype=np.int64),
        texts=tuple(text for _, text, _ in said),
        passed_over=looked_at - len(found),
    )


def client_results(
    recipe: Recipe, population: Population, *, start: Recogniser, best: Recogniser, team: Team
) -> dict[str, Any] | None:
    """What `results.json` says of the clients under the `start` model and the `best` one; None where none is asked for.

    Rates are shares (0.05 is five per cent), and each client counts once in a mean.
    """
    if recipe.federated.test_clients is None:
        return None
    promise(recipe.federated.privacy.mode is not Mode.SECURE, "a release says nothing of single clients")
    tested = choose_clients_to_test(recipe, population)
    common = {
        "accounted": False,
        "clients": len(tested.clients),
        "population_size": len(population),
        "without_holdout": tested.passed_over,
        "utterances": len(tested.rows),
    }
    if not tested.clients:
        return common
    store = population.store
    assert isinstance(store, Store)
    before_C4, after_C4 = (_counts(tested, team.recognise(model, store, tested.rows)) for model in (start, best))
    before_C, after_C = compute_rates(before_C4), compute_rates(after_C4)
    seconds_C = np.array([client.seconds for client in tested.clients])
    order = np.lexsort((seconds_C, before_C, after_C))
    return common | {
        "before": summary(before_C4),
        "after": summary(after_C4),
        "better": int((after_C < before_C).sum()),
        "worse": int((after_C > before_C).sum()),
        "by_seconds": by_seconds(seconds_C, before_C, after_C),
        "per_client": [
            {
                "seconds": float(seconds_C[place]),
                "words": int(before_C4[place, 0]),
                "before": float(before_C[place]),
                "after": float(after_C[place]),
            }
            for place in order.tolist()
        ],
    }


def _counts(tested: TestedClients, heard: Sequence[str]) -> Counts:
    return sum_by_owner(count_word_errors(tested.texts, heard), tested.owners, owner_count=len(tested.clients))


def summary(counts_C4: Counts) -> dict[str, Any]:
    """The mean over clients, with and without those above 100 %, how many are above 50 % and 100 %, and the spread."""
    rates_C = compute_rates(counts_C4)
    within = rates_C[rates_C <= 1.0]
    return {
        "wer": float(counts_C4[:, 1:].sum() / counts_C4[:, 0].sum()),
        "mean": float(rates_C.mean()),
        "mean_without_above_100": float(within.mean()) if len(within) else None,
        **{f"share_above_{100 * limit:.0f}": float((rates_C > limit).mean()) for limit in LIMITS},
        "spread": measure_spread(counts_C4).as_json(),
    }


def by_seconds(seconds_C: Rates, before_C: Rates, after_C: Rates) -> list[dict[str, Any]]:
    """The means of quarters of the clients, from those with least speech to those with most."""
    order = np.argsort(seconds_C, kind="stable")
    return [
        {
            "clients": len(part),
            "seconds": [float(seconds_C[part].min()), float(seconds_C[part].max())],
            "before": float(before_C[part].mean()),
            "after": float(after_C[part].mean()),
        }
        for part in np.array_split(order, min(QUARTERS, len(order)))
    ]
