"""How much each client's update counts in the mean.

Under differential privacy, and for equal weights, a client's ω is a function of its own data and a public cap, and the
sum is divided by a public number: the plan computes it, also for weights by plug-ins. Without privacy, shares of the
cohort are possible too:

    utterances, seconds    ω_k = n_k / Σ n            FedAvg (McMahan et al. 2017)
    loss                   ω = softmax(−loss)         Gao et al. 2022, Eq. 9
    wer                    ω = softmax(1 − WER)       Gao et al. 2022, Eq. 10
    loss_released          ω ∝ exp(−loss)             their released code: of the last local epoch
    wer_released           ω ∝ exp(100 − WER in %)    their released code: on shared speech, at most 100 %

The equations' WERs are shares, so their weights differ by e at most; the code's differ by e for each point: the best
client has nearly all of the weight.

All of these are exp(score) divided by its sum over the cohort, so they can be summed client by client: the sum is kept
in units of the heaviest client so far, and scaled down whenever a heavier one comes. Losses and WERs are measured only
where the weighting needs them.

Shapes: L local steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
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

    `loss` and `wer` are measured as the weighting asks (`federated.measured`), and only where it does.
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
    """A running sum of weighted updates; `weigh` before each one, `denominator` at the end."""

    def __init__(self, plan: Plan, total: Tensor) -> None:
        self._plan, self._total = plan, total
        self._shares = shares_cohort(plan)
        self.heaviest = -math.inf  # the largest score so far
        self.weight = 0.0  # Σ exp(score − heaviest)

    def weigh(self, clients: Sequence[ClientFigures]) -> list[float]:
        """ω of the next clients, each in [0, 1]."""
        weighting = self._plan.settings.weighting
        if self._plan.settings.weights is not None:
            return [self._plan.weigh(client) for client in clients]
        if not self._shares:
            by_seconds = weighting is Weighting.SECONDS
            return [self._plan.weight(client.seconds if by_seconds else float(client.utterances)) for client in clients]
        scores = [SCORES[weighting](client) for client in clients]
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


def measured_wer(
    parameters: Parameters, client: Client, context: ClientContext, *, device: torch.device
) -> float | None:
    """WER of a locally trained model on the client's held-out utterances (Gao et al., Eq. 10), or on shared ones."""
    if context.weighting is Weighting.WER:
        store, rows = context.store, client.held_out
        if not len(rows):
            raise InputError(f"client {client.id} has no held-out utterances to be weighted by")
        texts: Sequence[str] = [store.utterance(row).text or "" for row in rows.tolist()]
    elif context.weighting is Weighting.WER_RELEASED:
        assert context.shared_dev is not None, "weighting=wer_released without shared speech"
        store, rows, texts = context.shared_dev.store, context.shared_dev.rows, context.shared_dev.texts
    else:
        return None
    whole = context.frozen.with_trained(parameters)
    recogniser = Recogniser(context.family, context.model, context.tokens, whole, store.language)
    return compute_wer(texts, recognise_utterances(recogniser, store, rows, device=device))
