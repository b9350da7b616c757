"""The reference engine: one client after another, on one copy of the model, while the next ones' data are read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sottovoce.evaluation.prefetch import ahead
from sottovoce.federated.client import ClientRoom, LoadedClient, load_client, plan_client, train_locally
from sottovoce.federated.engines.engine import Dropped, Engine, Trained, excuse, with_turns
from sottovoce.federated.heard_before import HeardBefore, room_for_hearing
from sottovoce.federated.measured import measured_loss, measured_wer
from sottovoce.federated.weighting import ClientFigures
from sottovoce.flat.layout import Layout
from sottovoce.models.family import Family, Parameters
from sottovoce.optimisers.weights import Weights
from sottovoce.privacy.settings import Weighting


class SequentialEngine(Engine):
    """Memory: one working model, whatever the cohort. `faster` may give a faster family for training that one."""

    def __init__(
        self,
        room: ClientRoom,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        faster: Callable[[Parameters], Family[Any, Any]] | None = None,
        weighting: Weighting = Weighting.UNIFORM,
    ) -> None:
        self._room, self._device, self._weighting = room.on(device, dtype), device, weighting
        self._before = HeardBefore(room_for_hearing(device))
        self.weights = Weights(
            layout,
            room.local.built_optimiser(),
            device=device,
            dtype=dtype,
            statistics=room.family.training.statistics(room.model),
        )
        if faster is not None:
            self._room = replace(self._room, family=faster(self.weights.working))

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, turns: Sequence[int] | None = None
    ) -> Iterator[Trained | Dropped]:
        with closing(ahead(self._load(with_turns(cohort, turns), step))) as loading:
            for loaded in self.time_waits(loading):
                yield loaded if isinstance(loaded, Dropped) else self._train_one(server_P, loaded)

    def _load(self, cohort: Iterable[tuple[int, int]], step: int) -> Iterator[LoadedClient | Dropped]:
        for client, turn in cohort:
            try:
                planned = plan_client(self._room, client, step=step, turn=turn)
                yield load_client(self._room, planned, step=step, device=self._device, before=self._before)
            except Exception as error:
                yield excuse(client, error, forgiving=self._room.forgiving)

    def _train_one(self, server_P: Tensor, loaded: LoadedClient) -> Trained | Dropped:
        try:
            return self._train(server_P, loaded)
        except Exception as error:
            return excuse(loaded.client.index, error, forgiving=self._room.forgiving)

    def _train(self, server_P: Tensor, loaded: LoadedClient) -> Trained:
        heard = loaded.hear(self._before, self._room, dtype=self.weights.dtype)
        losses_L, norms_L = train_locally(self.weights, loaded, heard, self._room, server_P=server_P)
        figures = self._figures(loaded, losses_L)
        # The working model is done with: it becomes the update.
        with torch.no_grad():
            update_P = self.weights.master.neg_().add_(server_P)
        return Trained(
            update_P,
            (loaded.client.index,),
            losses_L.mean(),
            (figures,),
            loaded.audio_seconds,
            gradient_norms=norms_L.mean(),
        )

    def _figures(self, loaded: LoadedClient, losses_L: Tensor) -> ClientFigures:
        room, weighting = self._room, self._weighting
        wer = measured_wer(self.weights.working, loaded.client, room, weighting=weighting, device=self._device)
        return ClientFigures(
            utterances=loaded.utterances,
            left_out=loaded.speech.left_out,
            seconds=loaded.seconds,
            loss=measured_loss(losses_L, room, weighting=weighting),
            wer=wer,
        )
