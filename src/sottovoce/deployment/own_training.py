"""Training on a node: one client of a simulation, with its functions, and words of the public grid at the end."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sottovoce.deployment.invitation import Invitation
from sottovoce.deployment.masks import Words
from sottovoce.deployment.own_speech import own_client
from sottovoce.deployment.payloads import words_of
from sottovoce.evaluation.evaluate import check_language
from sottovoce.federated.cohort import sum_part
from sottovoce.federated.engines.engine import Engine
from sottovoce.flat.layout import Layout
from sottovoce.models.saved import Recogniser
from sottovoce.privacy.plan import Plan
from sottovoce.store import Store
from sottovoce.training.engines import build_engine
from sottovoce.training.trained_part import trained_part


@dataclass(frozen=True, eq=False)
class OwnTraining:
    """What a node needs in every round: its plan, and an engine that knows one client, `index`."""

    plan: Plan
    engine: Engine
    index: int
    device: torch.device

    def update(self, server_P: Tensor, *, step: int) -> Words:
        """Train from the server's model, clip, and put on the grid. Zeros where anything goes wrong with it."""
        try:
            client = np.array([self.index], dtype=np.int64)
            part = sum_part(self.engine, server_P.to(self.device), client, plan=self.plan, step=step)
            return words_of(part.total, self.plan)
        except Exception:  # as in a release: whether, and how, a client fails tells of its speech
            return self.nothing()

    def nothing(self) -> Words:
        """The update of somebody who has learned nothing."""
        return words_of(self.plan.new_total(), self.plan)


def prepare(
    invitation: Invitation, start: Recogniser, store: Store, *, user: str | None, device: torch.device
) -> OwnTraining:
    """Everything that can be refused before the first round is refused here, in one line."""
    recipe = invitation.recipe
    check_language(start, store)
    plan = invitation.plan(Layout.of(trained_part(recipe, start).initial))
    population, index = own_client(recipe, store, user=user)
    engine = build_engine("sequential", recipe, population, start, plan, device=device)
    return OwnTraining(plan, engine, index, device)
