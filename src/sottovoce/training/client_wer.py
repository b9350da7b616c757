"""Clients' word error rates: between rounds under noise that is charged for, and in simulations for each client.

Shapes: C clients, U utterances; columns as in `wer`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from sottovoce.base.errors import check_invariant
from sottovoce.base.seeds import derive, stream
from sottovoce.config import Recipe
from sottovoce.data.population import Client, Population
from sottovoce.data.store import Store
from sottovoce.evaluation.error_rates import Counts, compute_rates, count_word_errors, measure_spread, sum_by_owner
from sottovoce.federated.client_wer import LocalEvaluationClients, MeasuredWer, held_out_speech, measure_wer
from sottovoce.federated.cohort import quantise_model
from sottovoce.federated.round import RoundState
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.ledger import BudgetSpent
from sottovoce.privacy.ledger_records import AttemptsUsed
from sottovoce.privacy.settings import Mode
from sottovoce.training.assemble import Federation
from sottovoce.training.remote_clients import ConnectedClients, TooFewClients
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.start_model import split_trained_part
from sottovoce.training.testing import RankGroup


def build_local_wer_clients(
    recipe: Recipe, population: Population, start: Recogniser, *, device: torch.device
) -> LocalEvaluationClients | None:
    """Clients that are measured in this process; None where that is not asked for."""
    if recipe.federated.client_wer is None:
        return None
    return LocalEvaluationClients(population, start, split_trained_part(recipe, start).frozen, device)


def read_client_wers(run: RunFolder) -> list[dict[str, Any]]:
    """Every measurement, by step, for `results.json`; of a release too, since ε covers it."""
    return [
        {
            "step": record["step"],
            "wer": record["client_wer"],
            "wer_interval": record["client_wer_interval"],
            "words": record["client_words"],
        }
        for record in run.metrics.read()
        if "client_wer" in record
    ]


@final
class ClientWerRounds:
    """The measurements that a recipe's `client_wer` asks for. `remote` are clients on other machines."""

    def __init__(self, federation: Federation, remote: ConnectedClients | None) -> None:
        self._settings, self._say, self._remote = federation.settings, federation.context.say, remote
        asked, start, device = self._settings.client_wer, federation.start, federation.context.device
        self._plan = None if asked is None else asked.plan(federation.plan)
        here = build_local_wer_clients(federation.recipe, federation.population, start, device=device)
        self._listeners = here if remote is None else remote

    @property
    def in_ledger(self) -> Mapping[str, Any] | None:
        """What the ledger's header says of it."""
        asked = self._settings.client_wer
        return None if asked is None or self._plan is None else asked.in_ledger(self._plan)

    def measure(self, state: RoundState, rounds: int, *, interrupted: Callable[[], bool]) -> MeasuredWer | None:
        """The WER of the present model, where one is due after so many `rounds`.

        One that the budget does not allow, or that was interrupted, is left out; the ε of all of them is promised in
        any case.
        """
        asked, plan = self._settings.client_wer, self._plan
        if asked is None or plan is None or not asked.is_due(rounds, steps=self._settings.steps):
            return None
        assert self._listeners is not None
        try:
            is_ready = self._remote is None or self._remote.ready(interrupted)
        except TooFewClients as too_few:
            self._say(f"round {rounds}: clients' WER is not measured: {too_few}")
            return None
        if not is_ready:
            self._say(f"round {rounds}: stopped before clients' WER was measured; it is left out")
            return None
        model_P = quantise_model(state.server.result_P, self._settings.model_bits)
        try:
            return measure_wer(
                model_P,
                layout=state.plan.layout,
                plan=plan,
                evaluation_clients=self._listeners,
                ledger=state.ledger,
                step=rounds,
            )
        except BudgetSpent as spent:
            self._say(f"round {rounds}: clients' WER is not measured, the privacy budget does not allow it: {spent}")
        except AttemptsUsed as used:
            self._say(f"round {rounds}: clients' WER is not measured: {used}")
        return None


# Each client's own held-out speech, before and after a run (Gao et al. 2022). For simulations alone: what a model does
# for one client is private, and no ε covers it. Clients have no names here, and are ordered by their error rates.

# A rate above 1 says that more was written down than was said.
LIMITS = (0.5, 1.0)
QUARTERS = 4  # of the clients, by how much speech they have

Rates = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TestedClients:
    """Clients with held-out speech that can be scored; `without_holdout` of those asked for have none."""

    clients: tuple[Client, ...]
    rows: NDArray[np.int64]
    owners: NDArray[np.int64]
    texts: tuple[str, ...]
    without_holdout: int


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
        without_holdout=looked_at - len(found),
    )


def score_clients(
    recipe: Recipe, population: Population, *, start: Recogniser, best: Recogniser, ranks: RankGroup
) -> dict[str, Any] | None:
    """What `results.json` says of the clients under the `start` model and the `best` one; None where none is asked for.

    Rates are shares (0.05 is five per cent), and each client counts once in a mean. They are decoded as test sets are.
    """
    if recipe.federated.test_clients is None:
        return None
    check_invariant(recipe.federated.privacy.mode is not Mode.SECURE, "a release says nothing of single clients")
    tested = choose_clients_to_test(recipe, population)
    common = {
        "accounted": False,
        "clients": len(tested.clients),
        "population_size": len(population),
        "without_holdout": tested.without_holdout,
        "utterances": len(tested.rows),
    }
    if not tested.clients:
        return common
    store = population.store
    assert isinstance(store, Store)
    before_C4, after_C4 = (
        _counts(tested, ranks.recognise(model, store, tested.rows, decoding=recipe.decoding)) for model in (start, best)
    )
    before_C, after_C = compute_rates(before_C4), compute_rates(after_C4)
    seconds_C = np.array([client.seconds for client in tested.clients])
    order = np.lexsort((seconds_C, before_C, after_C))
    return common | {
        "before": summarise_clients(before_C4),
        "after": summarise_clients(after_C4),
        "better": int((after_C < before_C).sum()),
        "worse": int((after_C > before_C).sum()),
        "by_seconds": group_by_seconds(seconds_C, before_C, after_C),
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


def _counts(tested: TestedClients, hypotheses: Sequence[str]) -> Counts:
    return sum_by_owner(count_word_errors(tested.texts, hypotheses), tested.owners, owner_count=len(tested.clients))


def summarise_clients(counts_C4: Counts) -> dict[str, Any]:
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


def group_by_seconds(seconds_C: Rates, before_C: Rates, after_C: Rates) -> list[dict[str, Any]]:
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
