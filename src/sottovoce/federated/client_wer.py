"""Measuring a model on clients' held-out speech, wherever that is: a round that trains nothing.

    draw ─► charge ─► model out ─► everybody recognises what they hold out ─► a sum of pairs ─► noise ─► a rate

What a client says of itself is a pair of numbers under a public bound (`privacy.client_wer`), and goes no further than
its cohort's sum.

Shapes: P flat length, of what is trained or of a pair.
"""

from dataclasses import dataclass, replace
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.population import Client, Population
from sottovoce.data.store import Store
from sottovoce.evaluation.error_rates import count_word_errors, sum_counts
from sottovoce.evaluation.recognise import place_for_evaluation, recognise_utterances
from sottovoce.evaluation.score import LONGEST_SECONDS
from sottovoce.federated.cohort import CohortSum
from sottovoce.flat.layout import Layout
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.trainable import Frozen
from sottovoce.privacy.client_wer import WerEstimate, contribution, estimate_client_wer
from sottovoce.privacy.fingerprint import fingerprint_tensor
from sottovoce.privacy.ledger import Ledger, cohort_commitment
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices
from sottovoce.privacy.settings import Mode


class EvaluationClients(Protocol):
    """A population with held-out speech, wherever it is."""

    def wer(self, server_P: Tensor, cohort: Indices, *, layout: Layout, plan: Plan, step: int) -> CohortSum:
        """Have every client of `cohort` try a model, whose trained parameters lie in `layout`, after `step` rounds.

        The sum is of pairs that are clipped by `plan` (`ClientWer.plan`).
        """
        ...


@final
@dataclass(frozen=True, eq=False)
class LocalEvaluationClients:
    """All clients of `population` in this process. `start` is a model of the kind that is tried, `frozen` its rest."""

    population: Population
    start: Recogniser
    frozen: Frozen
    device: torch.device

    def wer(self, server_P: Tensor, cohort: Indices, *, layout: Layout, plan: Plan, step: int) -> CohortSum:
        """One after another, so that nobody's words hang on who else is in the cohort."""
        model = replace(self.start, parameters=self.frozen.merged(layout.views(server_P)))
        model, total = place_for_evaluation(model, self.device), plan.new_total()
        # In a release whatever goes wrong with one client is theirs, and private.
        forgiven = Exception if plan.settings.mode is Mode.SECURE else (InputError, OSError)
        for index in cohort.tolist():
            try:
                pair_P = self._pair(model, index, most_words=plan.clip_bound)
            except forgiven:
                continue
            plan.accumulate(total, pair_P)
        return CohortSum(total, plan.denominator)

    def _pair(self, model: Recogniser, index: int, *, most_words: float) -> Tensor:
        store = self.population.store
        assert isinstance(store, Store)
        spoken = held_out_speech(store, self.population.client(index))
        rows = np.array([row for row, _ in spoken], dtype=np.int64)
        recognised = recognise_utterances(model, store, rows, device=self.device) if spoken else []
        found = sum_counts(count_word_errors([text for _, text in spoken], recognised))
        return contribution(found.errors, found.length, most_words=most_words)


def held_out_speech(store: Store, client: Client) -> list[tuple[int, str]]:
    """The held-out utterances of `client` that can be scored, by row, with what is said in them."""
    seconds = (store.audio_offsets[client.held_out + 1] - store.audio_offsets[client.held_out]) / SAMPLE_RATE
    texts = [(row, store.utterance(row).text or "") for row in client.held_out[seconds <= LONGEST_SECONDS].tolist()]
    return [(row, text) for row, text in texts if text.split()]


@dataclass(frozen=True)
class MeasuredWer:
    """What was found, and ε so far, this included."""

    estimate: WerEstimate
    epsilon: float | None


def measure_wer(
    server_P: Tensor, *, layout: Layout, plan: Plan, evaluation_clients: EvaluationClients, ledger: Ledger, step: int
) -> MeasuredWer:
    """Measure the model `server_P` after `step` rounds.

    Raises BudgetSpent, before anybody is asked, where the budget does not allow it; it is charged before that, too.
    """
    cohort = plan.sample(step, attempt=ledger.next_measurement(step))
    commitment = cohort_commitment(cohort, nonce=plan.cohort_nonce(step))
    digest, bound = fingerprint_tensor(server_P), plan.clip_bound
    charge = ledger.measure(plan.event, step=step, clip_bound=bound, parameters=digest, cohort=commitment)
    summed = evaluation_clients.wer(server_P, cohort, layout=layout, plan=plan, step=step)
    noised_P = plan.add_noise(summed.total, charge, shares=summed.noise_shares)
    return MeasuredWer(estimate_client_wer(noised_P, plan), charge.epsilon)
