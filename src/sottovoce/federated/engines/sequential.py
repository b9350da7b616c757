"""The reference engine: one client after another, on one copy of the model, while the next ones' data are read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sottovoce.data.loading import prefetch
from sottovoce.federated.client import ClientContext, LoadedClient, plan_client, train_locally
from sottovoce.federated.engines.engine import Dropped, InProcessEngine, Trained, with_positions
from sottovoce.federated.weighting import ClientFigures, measured_loss, measured_wer
from sottovoce.flat.layout import Layout
from sottovoce.models.family import Family, Parameters
from sottovoce.optimisers.weights import Weights


class SequentialEngine(InProcessEngine):
    """Memory: one working model, whatever the cohort. `faster` may give a faster family for training that one."""

    def __init__(
        self,
        context: ClientContext,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        faster: Callable[[Parameters], Family[Any, Any]] | None = None,
    ) -> None:
        super().__init__(context, device, dtype)
        statistics = context.family.training.statistics(context.model)
        self.weights = Weights(
            layout, context.local.built_optimiser(), device=device, dtype=dtype, statistics=statistics
        )
        if faster is not None:
            self._context = replace(self._context, family=faster(self.weights.working))

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | Dropped]:
        def load() -> Iterator[LoadedClient | Dropped]:
            for client, position in with_positions(cohort, positions):
                try:
                    planned = plan_client(self._context, client, step=step, position=position)
                except Exception as error:
                    yield self._drop(client, error)
                else:
                    yield self._load(planned, step)

        self.weights.hold(self.weights.layout.held_at(step))
        with closing(prefetch(load())) as loading:
            for loaded in self._time_waits(loading):
                yield loaded if isinstance(loaded, Dropped) else self._train_or_drop(server_P, loaded)

    def _train_or_drop(self, server_P: Tensor, loaded: LoadedClient) -> Trained | Dropped:
        try:
            return self._train_client(server_P, loaded)
        except Exception as error:
            return self._drop(loaded.client.index, error)

    def _train_client(self, server_P: Tensor, loaded: LoadedClient) -> Trained:
        context, client = self._context, loaded.client
        losses_L, norms_L = train_locally(self.weights, loaded, self._features(loaded), context, server_P=server_P)
        figures = ClientFigures(
            utterances=loaded.utterances,
            seconds=loaded.seconds,
            left_out=loaded.speech.left_out,
            loss=measured_loss(losses_L, context),
            wer=measured_wer(self.weights.working, client, context, device=self._device),
        )
        # The working model is done with: it becomes the update.
        with torch.no_grad():
            update_P = torch.sub(server_P, self.weights.master, out=self.weights.master)
        norm = norms_L.mean()
        return Trained(update_P, (client.index,), losses_L.mean(), (figures,), loaded.audio_seconds, norm)
