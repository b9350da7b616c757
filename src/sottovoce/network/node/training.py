"""What a node computes: an update or a word error rate as words of the public grid, and its part in a secure sum."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import numpy as np
import torch
from torch import Tensor

from sottovoce.base.signatures import PrivateKey, sign
from sottovoce.data.population import Population
from sottovoce.data.store import Store
from sottovoce.evaluation.score import check_language
from sottovoce.federated.client_wer import LocalEvaluationClients
from sottovoce.federated.cohort import CohortSum, PartialSum, sum_part
from sottovoce.federated.engines.engine import Engine
from sottovoce.models.recogniser import Recogniser
from sottovoce.network.invitation import Invitation
from sottovoce.network.messages import AnswerCode, Order, OrderKind, Refused
from sottovoce.network.node.speech import find_own_client
from sottovoce.network.secure_sum.protocol import SumClient
from sottovoce.network.secure_sum.terms import Phase, SumAttempt, Unsafe
from sottovoce.network.secure_sum.words import Words, add_noise_share, encode_update, terms_for_plan
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices
from sottovoce.training.client_wer import build_local_wer_clients
from sottovoce.training.engines import build_engine
from sottovoce.training.start_model import split_trained_part
from sottovoce.training.testing import check_can_transcribe


@dataclass(frozen=True, eq=False)
class NodeTraining:
    """What a node needs in every round: its plan, and a simulation's engine for one client, `index` of `population`.

    With `wer_plan` and `evaluation_clients` it can also measure that client's word error rate.
    """

    plan: Plan
    engine: Engine
    population: Population
    index: int
    start: Recogniser
    device: torch.device
    wer_plan: Plan | None = None
    evaluation_clients: LocalEvaluationClients | None = None

    def update(self, server_P: Tensor, *, step: int) -> Words:
        """Train from the server's model, clip, and put on the grid. Zeros where anything goes wrong with it."""

        def train() -> PartialSum:
            return sum_part(self.engine, server_P.to(self.device), self._client, plan=self.plan, step=step)

        return _words_or_zeros(train, self.plan)

    def wer(self, server_P: Tensor, *, step: int) -> Words:
        """Evaluate the server's model on held-out speech: a pair on the grid, or zeros."""
        plan, evaluation_clients = self.wer_plan, self.evaluation_clients
        assert plan is not None
        assert evaluation_clients is not None

        def evaluate() -> CohortSum:
            return evaluation_clients.wer(
                server_P.to(self.device), self._client, layout=self.plan.layout, plan=plan, step=step
            )

        return _words_or_zeros(evaluate, plan)

    @property
    def _client(self) -> Indices:
        return np.array([self.index], dtype=np.int64)


def zero_update(plan: Plan) -> Words:
    """What a client that did not train adds to a sum under `plan`."""
    return encode_update(plan.new_total(), plan)


def _words_or_zeros(compute: Callable[[], PartialSum | CohortSum], plan: Plan) -> Words:
    try:
        return encode_update(compute().total, plan)
    except Exception:  # as in a release: whether, and how, a client fails depends on its speech
        return zero_update(plan)


def prepare_training(
    invitation: Invitation, start: Recogniser, store: Store, *, user: str | None, device: torch.device
) -> NodeTraining:
    """Everything that can be refused before the first round is refused here, in one line."""
    recipe = invitation.recipe
    check_language(start, store)
    check_can_transcribe(recipe, start)
    part = split_trained_part(recipe, start)
    plan = invitation.plan(part.layout)
    invitation.check_frozen(part.frozen)
    population, index = find_own_client(recipe, store, user=user)
    engine = build_engine("sequential", recipe, population, start, plan, device=device)
    evaluation_clients = build_local_wer_clients(recipe, population, start, device=device)
    return NodeTraining(plan, engine, population, index, start, device, invitation.wer_plan, evaluation_clients)


@final
class NodeSecureSum:
    """A node's part in one attempt at a secure sum, with its share of the noise where clients add it.

    It holds `words` in memory until they have left, masked. `remember` writes an order down as answered, before its
    answer leaves; Refused where it was answered before. `say` is for the node's user, who alone is told why an unsafe
    order was refused. Where groups take turns, only members of the group whose turn `row` is are in it.
    """

    def __init__(
        self,
        order: Order,
        invitation: Invitation,
        words: Words,
        *,
        plan: Plan,
        key: PrivateKey,
        remember: Callable[[Order, int], None],
        say: Callable[[str], None],
        row: int | None = None,
    ) -> None:
        self._order, self._words, self._remember, self._say = order, words, remember, say
        self.is_over = self._has_warned = False
        terms = terms_for_plan(invitation.sum_terms, plan)
        attempt = SumAttempt(
            terms=terms,
            run=order.run,
            step=order.step,
            attempt=order.attempt,
            row=row,
            members=invitation.members(row),
        )
        if plan.noise_shares is not None:
            add_noise_share(words, plan=plan, terms=terms)
        place = terms.roster.index(key.public_key())
        self._client = SumClient(attempt, place=place, sign=partial(sign, key), remember=self._remember_phase)

    def answer(self, order: Order) -> bytes:
        """The answer to one phase of this attempt; Refused, and over, where it would not be safe."""
        if (order.run, order.step, order.attempt) != (self._order.run, self._order.step, self._order.attempt):
            raise Refused(AnswerCode.UNEXPECTED)
        client, payload = self._client, order.payload
        try:
            match order.kind:
                case OrderKind.KEYS:
                    return client.keys()
                case OrderKind.SHARES:
                    return client.shares(payload)
                case OrderKind.MASKED:
                    masked = client.masked(payload, self._words)
                    self._words = self._words[:0].copy()  # unmasked they are needed no more
                    return masked
                case OrderKind.SURVIVORS:
                    return client.survivors(payload)
                case OrderKind.UNMASK:
                    self.is_over = True
                    return client.unmask(payload)
        except Unsafe as unsafe:
            if not self._has_warned:  # once, however often it asks
                self._say(
                    f"round {order.step + 1:,}: the server's order to {order.kind.name} was not followed, as it would "
                    f"not be safe ({unsafe}): nothing more leaves this node in this attempt"
                )
            self.is_over = self._has_warned = True
        raise Refused(AnswerCode.UNEXPECTED)

    def _remember_phase(self, phase: Phase) -> None:
        size = self._words.nbytes if phase is Phase.MASKED else 0
        self._remember(replace(self._order, kind=OrderKind[phase.name]), size)
