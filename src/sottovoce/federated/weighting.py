"""How much each client's update counts in the mean.

Under differential privacy, and for equal weights, a client's ω is a function of its own data and a public cap, and the
sum is divided by a public number: the plan computes it, also for weights by plug-ins. Without privacy, shares of the
cohort are possible too:

    utterances, seconds    ω_k = n_k / Σ n            FedAvg (McMahan et al. 2017)
    loss                   ω = softmax(−loss)         Gao et al. 2022, Eq. 9
    wer                    ω = softmax(1 − WER)       Gao et al. 2022, Eq. 10: on clients' held-out or shared speech
    loss_released          ω ∝ exp(−loss)             their released code: of the last local epoch
    wer_released           ω ∝ exp(100 − WER in %)    their released code: on shared speech, at most 100 %

The equations' WERs are shares, so their weights differ by e at most; the code's differ by e for each point: the best
client has nearly all of the weight.

All of these are exp(score) divided by its sum over the cohort, so they can be summed client by client: the sum is kept
in units of the heaviest client so far, and scaled down whenever a heavier one comes. Losses and WERs are measured only
where the weighting needs them.

A client that holds out nothing has no WER. It weighs the mean of those of its cohort that have one: 1/n of a round of n
clients, as without weights, and Eq. 10 divides the rest among the others. Any WER in its place would favour people with
little speech, or put them at a disadvantage, for nothing that was measured. Where nobody has one all weigh the same.

Shapes: L local steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sottovoce.base.errors import check_invariant
from sottovoce.data.population import Client
from sottovoce.evaluation.error_rates import compute_wer
from sottovoce.evaluation.recognise import recognise_utterances
from sottovoce.federated.client import ClientContext
from sottovoce.models.family import Parameters
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Weighting


@dataclass(frozen=True)
class ClientFigures:
    """What a client's weight may depend on, and how many of its utterances could not be used, by reason. Private.

    `loss` and `wer` are measured as the weighting asks (`measured_loss`, `measured_wer`), and only where it does; `wer`
    is None also where a client has nothing that it could be measured on.
    """

    utterances: int
    seconds: float
    loss: float | None = None
    wer: float | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)


def _given(value: float | None) -> float:
    assert value is not None, "the engine did not measure what this weighting needs"
    return value


SCORES: Mapping[Weighting, Callable[[ClientFigures], float]] = {
    Weighting.UTTERANCES: lambda client: math.log(max(client.utterances, 1)),
    Weighting.SECONDS: lambda client: math.log(max(client.seconds, 1e-9)),
    Weighting.LOSS: lambda client: -_given(client.loss),
    Weighting.WER: lambda client: 1 - _given(client.wer),
    Weighting.LOSS_RELEASED: lambda client: -_given(client.loss),
    Weighting.WER_RELEASED: lambda client: 100 - 100 * min(_given(client.wer), 1.0),
}


def shares_cohort(plan: Plan) -> bool:
    """Whether a client's weight is its share of the cohort: then it depends on the others, and nothing is private."""
    return plan.settings.weighting is not Weighting.UNIFORM and plan.settings.weight_cap is None


class WeightedSum:
    """A running sum of weighted updates; `weigh` before each one, `settle` after the last, then `denominator`.

    Whoever `has_no_wer` is summed apart, unweighted: what they weigh is known when all others are (`settle`).
    """

    def __init__(self, plan: Plan, total: Tensor) -> None:
        self._plan, self._total = plan, total
        self._shares = shares_cohort(plan)
        self.heaviest = -math.inf  # the largest score so far
        self.weight = 0.0  # Σ exp(score − heaviest)
        self.measured = self.unmeasured = 0  # clients
        self._apart: Tensor | None = None

    @property
    def may_sum_apart(self) -> bool:
        """Whether some clients may have no WER."""
        return self._shares and self._plan.settings.weighting is Weighting.WER

    @property
    def apart(self) -> Tensor:
        """Σ of the updates of clients without a WER, [P]."""
        if self._apart is None:
            self._apart = self._plan.new_total(device=self._total.device)
        return self._apart

    def has_no_wer(self, client: ClientFigures) -> bool:
        return self.may_sum_apart and client.wer is None

    def weigh(self, clients: Sequence[ClientFigures]) -> list[float]:
        """ω of the next clients, each in [0, 1]; 0 for those that are summed apart."""
        weighting = self._plan.settings.weighting
        if self._plan.settings.weights is not None:
            return [self._plan.weigh(client) for client in clients]
        if not self._shares:
            by_seconds = weighting is Weighting.SECONDS
            return [self._plan.weight(client.seconds if by_seconds else float(client.utterances)) for client in clients]
        scores = [-math.inf if self.has_no_wer(client) else SCORES[weighting](client) for client in clients]
        apart = sum(self.has_no_wer(client) for client in clients)
        self.unmeasured, self.measured = self.unmeasured + apart, self.measured + len(clients) - apart
        self.rescale(max((score for score in scores if math.isfinite(score)), default=-math.inf))
        weights = [math.exp(score - self.heaviest) if math.isfinite(score) else 0.0 for score in scores]
        self.weight += math.fsum(weights)
        return weights

    def rescale(self, score: float) -> None:
        """Keep the sum in units of `score` if it is the largest so far."""
        if score > self.heaviest:
            factor = math.exp(self.heaviest - score)
            self._total.mul_(factor)
            self.weight *= factor
            self.heaviest = score

    def settle(self) -> None:
        """Add those that were summed apart, once all clients have come, each with the mean weight of the others."""
        if self.unmeasured:
            mean = self.weight / self.measured if self.measured else 1.0
            self._total.add_(self.apart, alpha=mean)
            self.weight += self.unmeasured * mean

    @property
    def denominator(self) -> float:
        """What the sum is divided by: public, but where weights are shares of the cohort."""
        return (self.weight or 1.0) if self._shares else self._plan.denominator


def measured_loss(losses_L: Tensor, context: ClientContext) -> float | None:
    """The mean loss of a client's local steps, or of those of its last local epoch. Reading it waits for the device."""
    match context.weighting:
        case Weighting.LOSS:  # Gao et al., Eq. 9
            return float(losses_L.mean())
        case Weighting.LOSS_RELEASED:
            return float(last_epoch(losses_L, context).mean())
        case _:
            return None


def last_epoch(losses_L: Tensor, context: ClientContext) -> Tensor:
    """Those of the last pass over a client's speech: all passes have as many batches, since their shapes are fixed."""
    epochs = context.local.local_epochs
    assert epochs is not None, "the recipe's check refuses this weighting without local epochs"
    return losses_L[-(len(losses_L) // epochs) :]


def weighs_by_wer(context: ClientContext) -> bool:
    """Whether clients' weights depend on the WER of their models."""
    return context.weighting in (Weighting.WER, Weighting.WER_RELEASED)


def measured_wer(
    parameters: Parameters, client: Client, context: ClientContext, *, device: torch.device
) -> float | None:
    """WER of a locally trained model on speech that all clients share, or else on the client's held-out utterances.

    Decoded greedily. None where no weight depends on it, and for a client that holds out no word.
    """
    if not weighs_by_wer(context):
        return None
    if context.shared_dev is not None:
        store, rows, texts = context.shared_dev.store, context.shared_dev.rows, context.shared_dev.texts
    else:
        check_invariant(context.weighting is Weighting.WER, "weighting=wer_released without shared speech")
        store, rows = context.store, client.held_out
        texts = tuple(store.utterance(row).text or "" for row in rows.tolist())
        if not any(text.split() for text in texts):
            return None
    whole = context.frozen.with_trained(parameters)
    recogniser = Recogniser(context.family, context.model, context.tokens, whole, store.language)
    return compute_wer(texts, recognise_utterances(recogniser, store, rows, device=device))
