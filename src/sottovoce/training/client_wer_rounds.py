"""Measuring clients' word error rate between the rounds of a run, where that is due and can be paid for."""

from collections.abc import Callable, Mapping
from typing import Any, final

from sottovoce.federated.client_wer import MeasuredWer, measure_wer
from sottovoce.federated.cohort import as_sent
from sottovoce.federated.round import RoundState
from sottovoce.privacy.fingerprint import fingerprint_tensor
from sottovoce.privacy.ledger import BudgetSpent
from sottovoce.privacy.ledger_records import AttemptsUsed
from sottovoce.training.assemble import Federation
from sottovoce.training.client_wer import listeners_here
from sottovoce.training.elsewhere import DistantClients, TooFewClients


@final
class ClientWers:
    """What a recipe's `client_wer` asks for; nothing where it asks for nothing. `remote` are clients elsewhere."""

    def __init__(self, federation: Federation, remote: DistantClients | None) -> None:
        self._settings, self._say, self._remote = federation.settings, federation.context.say, remote
        asked, start, device = self._settings.client_wer, federation.start, federation.context.device
        self._plan = None if asked is None else asked.plan(federation.plan)
        here = listeners_here(federation.recipe, federation.population, start, device=device)
        self._listeners = here if remote is None else remote

    @property
    def in_ledger(self) -> Mapping[str, Any] | None:
        """What the ledger's header says of it."""
        asked = self._settings.client_wer
        return None if asked is None or self._plan is None else asked.in_ledger(self._plan)

    def measure(self, state: RoundState, rounds: int, *, interrupted: Callable[[], bool]) -> MeasuredWer | None:
        """Where it is due after so many `rounds`: of the model as it stands now.

        What cannot be paid for is left out, and so is one that somebody does not want to wait for; ε of all of them is
        promised in any case.
        """
        asked, plan = self._settings.client_wer, self._plan
        if asked is None or plan is None or not asked.is_due(rounds, steps=self._settings.steps):
            return None
        assert self._listeners is not None
        try:
            is_ready = self._remote is None or self._remote.ready(interrupted)
        except TooFewClients as too_few:
            self._say(f"round {rounds}: clients' WER is not measured: {too_few}")
            return None
        if not is_ready:
            self._say(f"round {rounds}: stopped before clients' WER was measured; it is left out")
            return None
        model_P = as_sent(state.server.result_P, self._settings.model_bits)
        try:
            return measure_wer(
                model_P,
                layout=state.plan.layout,
                plan=plan,
                listeners=self._listeners,
                ledger=state.ledger,
                step=rounds,
                digest=fingerprint_tensor(model_P),
            )
        except BudgetSpent as spent:
            self._say(f"round {rounds}: clients' WER is not measured, the privacy budget does not allow it: {spent}")
        except AttemptsUsed as used:
            self._say(f"round {rounds}: clients' WER is not measured: {used}")
        return None
