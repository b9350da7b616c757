"""How much each client's update counts in the mean.

Under differential privacy, and for equal weights, a client's ω is a function of its own data and a public cap, and the
sum is divided by a public number: the plan's business, and so are weights from outside (`privacy.plugins`). Without
privacy, shares of the cohort are possible too:

    utterances, seconds    ω_k = n_k / Σ n            FedAvg (McMahan et al. 2017)
    loss                   ω = softmax(−loss)         Gao et al. 2022, Eq. 9
    wer                    ω = softmax(1 − WER)       Gao et al. 2022, Eq. 10
    loss_released          ω ∝ exp(−loss)             their released code: of the last local epoch
    wer_released           ω ∝ exp(100 − WER in %)    their released code: on shared speech, at most 100 %

The equations' WERs are shares, so their weights differ by e at most; the code's differ by e for each point, and nearly
all of the weight is the best client's.

All of these are exp(score) divided by its sum over the cohort, so they can be summed client by client: the sum is kept
in units of the heaviest client so far, and scaled down whenever a heavier one comes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

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
