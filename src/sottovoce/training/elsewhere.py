"""A run whose clients are on other machines: what it must be told of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sottovoce.federated.client_wer import Listeners
from sottovoce.federated.cohort import Clients
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.plan import Plan
from sottovoce.training.run_folder import RunFolder
from sottovoce.users.population import Population


class TooFewClients(Exception):
    """So many clients are out of a run for good that it can make no more rounds; in words, with what to do."""


class DistantClients(Clients, Listeners, Protocol):
    """Clients that may not be there."""

    def ready(self, interrupted: Callable[[], bool], /) -> bool:
        """Wait until they can be asked; False where `interrupted` is true meanwhile.

        TooFewClients where they never will be enough again.
        """
        ...

    def end(self, rounds: int, /) -> None:
        """Tell them that it is over, after so many rounds: all of it is saved."""
        ...


DEPARTURES = "left.json"  # among a run's secrets: which clients on other machines have left for good


@dataclass(frozen=True)
class Elsewhere:
    """Clients whose speech is on other machines: who they are, and what reaches them from the run in a folder.

    `planned` is a plan with what their sums need besides. `spare_attempts` is how many attempts more than the recipe's
    steps (and as many more measurements of their word error rate) they have accepted; None where nobody counts them.
    """

    population: Population
    planned: Callable[[Plan], Plan]
    clients: Callable[[RunFolder, Plan, Recogniser], DistantClients]
    spare_attempts: int | None = None
