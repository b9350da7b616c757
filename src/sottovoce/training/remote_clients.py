"""Clients on other machines, as a run sees them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from sottovoce.data.population import Population
from sottovoce.federated.client_wer import EvaluationClients
from sottovoce.federated.cohort import Clients
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices
from sottovoce.training.run_folder import RunFolder


class TooFewClients(Exception):
    """Too few clients are left in a run for another round; the message says what to do."""


class ConnectedClients(Clients, EvaluationClients, Protocol):
    """Clients that may not be there."""

    def ready(self, interrupted: Callable[[], bool], /, *, row: int | None = None) -> bool:
        """Wait until they can be asked; False where `interrupted` is true meanwhile.

        `row` of correlated noise is the turn of one group: then its members are waited for, else anybody. TooFewClients
        where they never will be enough again.
        """
        ...

    def begin(self, server_P: Tensor, cohort: Indices, /, *, plan: Plan, step: int) -> None:
        """Have a cohort begin to train, and wait for nothing; `sum` of the same step is asked for later."""
        ...

    def end(self, rounds: int, /) -> None:
        """Send them that the run has ended, after so many rounds, and is saved."""
        ...


DEPARTURES = "left.json"  # among a run's secrets: which clients on other machines have left for good


@dataclass(frozen=True)
class RemoteClients:
    """Who the clients on other machines are, and how a run reaches them.

    `planned` adds to a plan what their sums need. `spare_attempts` is how many attempts more than the recipe's
    steps (and as many more measurements of their word error rate) they have accepted; None where these are not counted.
    `identities` are digests of the clients' keys, in the population's order; None where they are named by their speech.
    `deadlines` are the times by which clients answer, as options name them; a release keeps them.
    """

    population: Population
    planned: Callable[[Plan], Plan]
    clients: Callable[[RunFolder, Plan, Recogniser], ConnectedClients]
    spare_attempts: int | None = None
    identities: tuple[bytes, ...] | None = None
    deadlines: Mapping[str, str] = field(default_factory=dict)
