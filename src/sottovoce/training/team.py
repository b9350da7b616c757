"""The processes of a federated run: the first one leads, and asks the others for parts of cohorts and of evaluations.

The others hold no ledger, no checkpoint and no server. They learn from each order what they need, so whatever makes
the first one stop, go back or go on, they simply wait for what comes next.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from sottovoce.errors import InputError
from sottovoce.evaluation.losses import compute_mean_figures, select_speech
from sottovoce.evaluation.recognise import Progress, recognise_across_processes
from sottovoce.evaluation.score import Evaluation, score_hypotheses, select_utterances
from sottovoce.federated.ranks import ClientsOverRanks, RoundOrder
from sottovoce.flat.layout import Layout
from sottovoce.interrupts import interruptible
from sottovoce.models.decoding import greedy
from sottovoce.models.saved import Recogniser
from sottovoce.privacy.plan import Plan
from sottovoce.processes import Processes
from sottovoce.store import Store


@dataclass(frozen=True, eq=False)
class _RecogniseOrder:
    """Recognise `rows` of the store that lies at `store`, by CTC or as the family does; the model follows."""

    store: str
    rows: NDArray[np.int64]
    by_ctc: bool


@dataclass(frozen=True)
class _LossOrder:
    """Add up the losses of `split` of the store that lies at `store`; the model follows."""

    store: str
    split: str


@dataclass(frozen=True, eq=False)
class Team(AbstractContextManager["Team"]):
    """Made in every process. In the first one it is entered, and the others are sent home when it is left.

    `start` is a model of the kind that is evaluated, `stores` what it is evaluated on, by path.
    """

    processes: Processes
    start: Recogniser
    stores: Mapping[str, Store]
    device: torch.device

    def recognise(
        self,
        model: Recogniser,
        store: Store,
        rows: NDArray[np.int64],
        *,
        by_ctc: bool = False,
        on_collapse: Progress | None = None,
    ) -> list[str]:
        """The text of each utterance in `rows` of `store`, with the help of all."""
        order = _RecogniseOrder(str(store.path), rows, by_ctc)
        if self.processes.several:
            self._ask(order, model)
        return self._recognise_together(model, store, order, on_collapse=on_collapse)

    def evaluate(self, model: Recogniser, store: Store, *, split: str, by_ctc: bool = False) -> Evaluation:
        """What `evaluate` gives, with the help of all."""
        chosen, collapses = select_utterances(store, split=split), list[int]()
        texts = self.recognise(model, store, chosen.rows, by_ctc=by_ctc, on_collapse=collapses.append)
        return score_hypotheses(store, chosen, texts, collapses=collapses)

    def mean_figures(self, model: Recogniser, store: Store, *, split: str) -> dict[str, float]:
        """What `compute_mean_figures` gives, with the help of all."""
        if self.processes.several:
            self._ask(_LossOrder(str(store.path), split), model)
        return compute_mean_figures(
            model, select_speech(model, store, split=split), device=self.device, processes=self.processes
        )

    def follow(self, clients: ClientsOverRanks, plan: Plan) -> None:
        """In the others: do what is asked for, until nothing more is."""
        server_P = plan.layout.zeros(device=self.device)
        with interruptible() as interrupted:
            while (order := self._hear()) is not None:
                if isinstance(order, RoundOrder):
                    clients.take_part(order, server_P, plan=plan, interrupted=interrupted)
                else:
                    self._help(order)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After any other error nobody knows where the others stand: torchrun ends them.
        if error is None or isinstance(error, InputError):
            self.processes.share(None)

    def _ask(self, order: _RecogniseOrder | _LossOrder, model: Recogniser) -> None:
        """In the first: of all others, by `model`."""
        self.processes.share(order)
        layout = self._layout
        flat_P = layout.flatten({name: model.parameters[name] for name in layout.names})
        self.processes.spread(flat_P.to(self.device))

    def _hear(self) -> RoundOrder | _RecogniseOrder | _LossOrder | None:
        order: Any = self.processes.share(None)
        return cast(RoundOrder | _RecogniseOrder | _LossOrder | None, order)

    def _help(self, order: _RecogniseOrder | _LossOrder) -> None:
        parameters_P = self._layout.zeros(device=self.device)
        self.processes.spread(parameters_P)
        model = replace(self.start, parameters=self._layout.views(parameters_P))
        store = self.stores[order.store]
        if isinstance(order, _LossOrder):
            compute_mean_figures(
                model, select_speech(model, store, split=order.split), device=self.device, processes=self.processes
            )
        else:
            self._recognise_together(model, store, order)

    def _recognise_together(
        self, model: Recogniser, store: Store, order: _RecogniseOrder, *, on_collapse: Progress | None = None
    ) -> list[str]:
        decode = greedy if order.by_ctc else None
        around: dict[str, Any] = {"processes": self.processes, "device": self.device}
        return recognise_across_processes(model, store, order.rows, decode=decode, on_collapse=on_collapse, **around)

    @property
    def _layout(self) -> Layout:
        return Layout.of(self.start.parameters)
