"""Training on a node: one client of a simulation, with its functions, and words of the public grid at the end."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sottovoce.deployment.invitation import Invitation
from sottovoce.deployment.masks import Words
from sottovoce.deployment.own_speech import own_client
from sottovoce.deployment.payloads import words_of
from sottovoce.evaluation.evaluate import check_language
from sottovoce.federated.client_wer import ListenersHere
from sottovoce.federated.cohort import CohortSum, PartialSum, sum_part
from sottovoce.federated.engines.engine import Engine
from sottovoce.flat.layout import Layout
from sottovoce.models.saved import Recogniser
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices
from sottovoce.store import Store
from sottovoce.training.client_wer import build_local_wer_clients
from sottovoce.training.engines import build_engine
from sottovoce.training.start_model import split_trained_part
from sottovoce.training.testing import check_can_transcribe


@dataclass(frozen=True, eq=False)
class OwnTraining:
    """What a node needs in every round: its plan, and an engine that knows one client, `index`.

    With `wer_plan` and `listeners` it can also say how well that client is understood.
    """

    plan: Plan
    engine: Engine
    index: int
    device: torch.device
    wer_plan: Plan | None = None
    listeners: ListenersHere | None = None

    def update(self, server_P: Tensor, *, step: int) -> Words:
        """Train from the server's model, clip, and put on the grid. Zeros where anything goes wrong with it."""

        def train() -> PartialSum:
            return sum_part(self.engine, server_P.to(self.device), self._client, plan=self.plan, step=step)

        return _words_or_zeros(train, self.plan)

    def wer(self, server_P: Tensor, *, step: int) -> Words:
        """Try the server's model on what is held out, the same way: a pair on the grid, or zeros."""
        plan, listeners = self.wer_plan, self.listeners
        assert plan is not None
        assert listeners is not None

        def listen() -> CohortSum:
            return listeners.wer(server_P.to(self.device), self._client, layout=self.plan.layout, plan=plan, step=step)

        return _words_or_zeros(listen, plan)

    @property
    def _client(self) -> Indices:
        return np.array([self.index], dtype=np.int64)


def nothing(plan: Plan) -> Words:
    """What somebody adds to a sum under `plan` who has learned, or heard, nothing."""
    return words_of(plan.new_total(), plan)


def _words_or_zeros(compute: Callable[[], PartialSum | CohortSum], plan: Plan) -> Words:
    try:
        return words_of(compute().total, plan)
    except Exception:  # as in a release: whether, and how, a client fails tells of its speech
        return nothing(plan)


def prepare(
    invitation: Invitation, start: Recogniser, store: Store, *, user: str | None, device: torch.device
) -> OwnTraining:
    """Everything that can be refused before the first round is refused here, in one line."""
    recipe = invitation.recipe
    check_language(start, store)
    check_can_transcribe(recipe, start)
    plan = invitation.plan(Layout.of(split_trained_part(recipe, start).initial))
    population, index = own_client(recipe, store, user=user)
    engine = build_engine("sequential", recipe, population, start, plan, device=device)
    listeners = build_local_wer_clients(recipe, population, start, device=device)
    return OwnTraining(plan, engine, index, device, invitation.wer_plan, listeners)
