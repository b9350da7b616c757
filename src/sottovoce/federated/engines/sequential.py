"""The reference engine: one client after another, on one copy of the model, while the next ones' data are read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sottovoce.evaluation.prefetch import ahead
from sottovoce.federated.client import ClientContext, LoadedClient, load_client, plan_client, train_locally
from sottovoce.federated.engines.engine import Dropped, Engine, Trained, drop_or_raise, with_positions
from sottovoce.federated.feature_cache import FeatureCache, feature_cache_bytes
from sottovoce.federated.weighting import ClientFigures, measured_loss, measured_wer
from sottovoce.flat.layout import Layout
from sottovoce.models.family import Family, Parameters
from sottovoce.optimisers.weights import Weights
from sottovoce.privacy.settings import Weighting


class SequentialEngine(Engine):
    """Memory: one working model, whatever the cohort. `faster` may give a faster family for training that one."""

    def __init__(
        self,
        context: ClientContext,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        faster: Callable[[Parameters], Family[Any, Any]] | None = None,
        weighting: Weighting = Weighting.UNIFORM,
    ) -> None:
        self._context, self._device, self._weighting = context.on(device, dtype), device, weighting
        self._before = FeatureCache(feature_cache_bytes(device))
        self.weights = Weights(
            layout,
            context.local.built_optimiser(),
            device=device,
            dtype=dtype,
            statistics=context.family.statistics(context.model),
        )
        if faster is not None:
            self._context = replace(self._context, family=faster(self.weights.working))

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | Dropped]:
        with closing(ahead(self._load(with_positions(cohort, positions), step))) as loading:
            for loaded in self.time_waits(loading):
                yield loaded if isinstance(loaded, Dropped) else self._train_one(server_P, loaded)

    def _load(self, cohort: Iterable[tuple[int, int]], step: int) -> Iterator[LoadedClient | Dropped]:
        for client, position in cohort:
            try:
                planned = plan_client(self._context, client, step=step, position=position)
                yield load_client(self._context, planned, step=step, device=self._device, before=self._before)
            except Exception as error:
                yield drop_or_raise(client, error, forgiving=self._context.forgiving)

    def _train_one(self, server_P: Tensor, loaded: LoadedClient) -> Trained | Dropped:
        try:
            return self._train(server_P, loaded)
        except Exception as error:
            return drop_or_raise(loaded.client.index, error, forgiving=self._context.forgiving)

    def _train(self, server_P: Tensor, loaded: LoadedClient) -> Trained:
        heard = loaded.hear(self._before, self._context, dtype=self.weights.dtype)
        losses_L, norms_L = train_locally(self.weights, loaded, heard, self._context, server_P=server_P)
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
        context, weighting = self._context, self._weighting
        wer = measured_wer(self.weights.working, loaded.client, context, weighting=weighting, device=self._device)
        return ClientFigures(
            utterances=loaded.utterances,
            left_out=loaded.speech.left_out,
            seconds=loaded.seconds,
            loss=measured_loss(losses_L, context, weighting=weighting),
            wer=wer,
        )
