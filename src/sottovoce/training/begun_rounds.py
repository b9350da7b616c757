"""Rounds over a network that have begun, and whose sums are not released yet: with staleness D there are up to D + 1.

    before step s   the cohort of step s + D is drawn, charged, and sent the model of now
    step s          the answers of its cohort, which was sent the model before step s - D, are summed and released

A run that ends or is killed loses the rounds that have begun: they were charged. A rehearsal makes them again as they
were, a release with new cohorts. Where no further round can begin, those that have begun are still released.

Shapes: P flat length.
"""

from collections import deque
from collections.abc import Callable
from typing import final

from sottovoce.federated.cohort import quantise_model
from sottovoce.federated.round import BegunRound, RoundState, begin_round
from sottovoce.privacy.ledger import BudgetSpent
from sottovoce.privacy.ledger_records import AttemptsUsed
from sottovoce.training.remote_clients import ConnectedClients, TooFewClients


@final
class BegunRounds:
    """Those of one process, in order. `steps` is how many there are in all."""

    def __init__(self, remote: ConnectedClients, *, staleness: int, steps: int, model_bits: int | None) -> None:
        self._remote, self.staleness, self._steps, self._model_bits = remote, staleness, steps, model_bits
        self._begun = deque[BegunRound]()
        self._no_more: TooFewClients | BudgetSpent | AttemptsUsed | None = None

    def begin(self, state: RoundState, *, step: int, interrupted: Callable[[], bool]) -> bool:
        """Begin all rounds that are due before `step`; False where that was interrupted.

        Raises why none can begin where there is none left to be released.
        """
        last = min(step + self.staleness, self._steps - 1)
        while self._no_more is None and step + len(self._begun) <= last:
            try:
                if not self._remote.ready(interrupted):
                    return False
                self._begin(state, step=step + len(self._begun), before=step)
            except (TooFewClients, BudgetSpent, AttemptsUsed) as why:
                self._no_more = why
        if not self._begun:
            assert self._no_more is not None
            raise self._no_more
        return True

    def _begin(self, state: RoundState, *, step: int, before: int) -> None:
        """Charge for `step` and ask its cohort, from the model that was current so many steps before."""
        assert state.recent is not None
        earlier = state.recent.models(step=before)
        sent_P = earlier.get(max(step - self.staleness, 0), state.server.parameters_P).clone()
        begun = begin_round(state, step=step, sent_P=sent_P)
        self._remote.begin(quantise_model(sent_P, self._model_bits), begun.cohort, plan=state.plan, step=step)
        self._begun.append(begun)

    def next(self) -> BegunRound:
        """The round that is to be released."""
        return self._begun.popleft()
