"""One local step from one model: the gradient is the update, and nobody needs weights of their own.

After one step of plain SGD θ_server − θ_local = lr·clip(∇L_k(θ_server)), so all of a cohort share the server's weights:

    summed  nothing is clipped: Σ ω_k·lr·∇L_k = lr·∇ Σ ω_k·L_k, the gradient of many clients as one large batch
    each    something is: every client's own gradient, of many at once where the family's models can be stacked

L_k is a client's own loss, however its family averages it, with its own draws, so that this is what `sequential` comes
to, up to rounding.

A family without losses of many clients goes client by client, and saves but the walks over the model. What is not
finite, or does not fit into memory, is computed again in halves, down to the one client that it comes from.

Shapes: N clients of a group, U utterances, P flat length.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.waveforms import concatenate_features
from sottovoce.data.loading import prefetch
from sottovoce.federated.client import ClientContext, LoadedClient, gradients_of
from sottovoce.federated.engines.engine import Dropped, InProcessEngine, JointlyTrained, JointSum, Member, Trained
from sottovoce.federated.engines.stacked import fitting_size, lock_step
from sottovoce.federated.weighting import ClientFigures
from sottovoce.flat.layout import Layout
from sottovoce.models.family import Family, Parameters, Stacked, augment_features, step_loss
from sottovoce.optimisers import SGD
from sottovoce.privacy.settings import BY_DATA, Weighting

NOT_FINITE = "its update was not finite"


def check_shared(context: ClientContext) -> None:
    """Refuse local training whose update is not one gradient of the server's model."""
    local, engine = context.local, "federation.engine=shared"
    if local.local_steps != 1:
        raise InputError(
            f"{engine} with local_steps={local.local_steps}, local_epochs={local.local_epochs}: after one local step "
            "clients' weights differ; expected local_steps=1"
        )
    if local.built_optimiser() != SGD():
        raise InputError(f"{engine} with optimiser={dict(local.optimiser)}: expected sgd, whose step is the gradient")
    if context.weighting not in (Weighting.UNIFORM, *BY_DATA):
        raise InputError(
            f"{engine} with weighting={context.weighting}: no client has a model to be weighed by; expected data"
        )
    if context.family.training.statistics(context.model):
        raise InputError(
            f"{engine}: models of family={context.family.name} keep statistics here, which are no gradients"
        )


class SharedEngine(InProcessEngine):
    """`summed`: nothing is clipped, neither here nor by the plan.

    `size` clients are computed at once, by `stacked` in place of the family's own (`stacking.shared` where they are
    summed); None chooses what fits into half of a GPU's free memory, on a CPU 1.
    """

    def __init__(
        self,
        context: ClientContext,
        layout: Layout,
        *,
        device: torch.device,
        summed: bool,
        dtype: torch.dtype = torch.float32,
        stacked: Stacked[Any, Any] | None = None,
        faster: Callable[[Parameters], Family[Any, Any]] | None = None,
        size: int | None = None,
    ) -> None:
        check_shared(context)
        super().__init__(context, device, dtype)
        self._layout, self._summed = layout, summed
        found = stacked or (context.family.stacking.shared if summed else context.family.stacking.stacked)
        if found is None or found.unfit(context.model) is not None:
            size = 1
        elif size is None:  # on a CPU one by one is quicker
            size = fitting_size(found, context, layout, device) if device.type == "cuda" else 1
        self.size, self._stacked = size, found if size > 1 else None
        self._flat_P = layout.zeros(device=device, dtype=dtype)
        self._parameters = {name: view.requires_grad_() for name, view in layout.views(self._flat_P).items()}
        self._rows: dict[int, Parameters] = {}
        self._held: tuple[str, ...] = ()
        if faster is not None and self._stacked is None:
            self._context = replace(self._context, family=faster(self._parameters))

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | JointlyTrained | Dropped]:
        with torch.no_grad():
            self._flat_P.copy_(server_P)
        self._held = self._layout.held_at(step)
        members, dropped = self._plan_cohort(cohort, positions, step)
        yield from dropped
        # Neighbours are about as long; the largest first: what the memory does not hold shows at once.
        members.sort(key=lambda member: (-member.padded_samples, member.client))
        with closing(prefetch(self._load_groups(members, step), depth=1)) as loading:
            for loaded in self._time_waits(loading):
                if isinstance(loaded, Dropped):
                    yield loaded
                elif self._summed:
                    yield self._together(loaded)
                else:
                    yield from self._each(loaded)

    def _load_groups(self, members: Sequence[Member], step: int) -> Iterator[list[LoadedClient] | Dropped]:
        group: list[LoadedClient] = []
        for member in members:
            loaded = self._load_member(member, step)
            if isinstance(loaded, Dropped):
                yield loaded
            else:
                group.append(loaded)
            if len(group) == self.size:
                yield group
                group = []
        if group:
            yield group

    # The gradient of all of them at once.

    def _together(self, members: list[LoadedClient]) -> JointlyTrained:
        return JointlyTrained(
            tuple(member.client.index for member in members),
            _figures(members),
            sum(member.audio_seconds for member in members),
            lambda weights: self._sum(members, weights),
        )

    def _sum(self, members: list[LoadedClient], weights: Sequence[float]) -> JointSum:
        """Σ ω·lr·∇L. Who cannot be part of it is left out and named, as an update that counts as zero."""
        try:
            losses_N = self._losses(members, self._parameters)
            weights_N = torch.tensor(weights, dtype=losses_N.dtype).to(losses_N.device, non_blocking=True)
            gradients = gradients_of((losses_N * weights_N).sum(), list(self._parameters.values()))
            sum_P = self._flattened(gradients).mul_(self._context.local.lr)
        except Exception as error:
            dropped = self._drop(members[0].client.index, error)
        else:
            if bool(sum_P.isfinite().all()):
                return JointSum(sum_P, losses_N.detach(), ())
            dropped = Dropped(members[0].client.index, NOT_FINITE)
        if len(members) == 1:
            return JointSum(self._layout.zeros(device=self._device), torch.empty(0, device=self._device), (dropped,))
        half = len(members) // 2
        one, other = self._sum(members[:half], weights[:half]), self._sum(members[half:], weights[half:])
        losses_N = torch.cat([one.losses_N, other.losses_N])
        return JointSum(one.sum_P.add_(other.sum_P), losses_N, (*one.dropped, *other.dropped))

    # Each one's own.

    def _each(self, members: list[LoadedClient]) -> Iterator[Trained | Dropped]:
        try:
            trained = self._trained(members)
        except Exception as error:
            dropped = self._drop(members[0].client.index, error)
            if len(members) == 1:
                yield dropped
                return
        else:
            yield trained
            return
        half = len(members) // 2
        yield from self._each(members[:half])
        yield from self._each(members[half:])

    def _trained(self, members: list[LoadedClient]) -> Trained:
        rows = None if self._stacked is None else self._height(members)
        leaves = self._leaves(rows)
        losses_N = self._losses(members, leaves)
        updates_NP = self._flattened(gradients_of(losses_N.sum(), list(leaves.values())), rows=rows)
        norms = torch.linalg.vector_norm(updates_NP, dim=-1, keepdim=True)
        updates_NP.mul_((self._context.local.clip_gradients / norms).clamp(max=1.0).mul_(self._context.local.lr))
        return Trained(
            updates_NP if rows is None else updates_NP[: len(members)],
            tuple(member.client.index for member in members),
            losses_N.detach() if rows is not None else losses_N.detach()[0],
            _figures(members),
            sum(member.audio_seconds for member in members),
            gradient_norms=norms[: len(members)].reshape(-1),
        )

    def _leaves(self, rows: int | None) -> Parameters:
        """The server's weights, or as many clients' of each, which all are the server's: so each has a gradient."""
        if rows is None:
            return self._parameters
        if rows not in self._rows:
            views = self._parameters.items()
            self._rows[rows] = {name: v.detach().expand(rows, *v.shape).requires_grad_() for name, v in views}
        return self._rows[rows]

    def _losses(self, members: list[LoadedClient], parameters: Parameters) -> Tensor:
        """Every client's own loss at the server's model, [N]."""
        context, whole = self._context, self._context.frozen.with_trained(parameters)
        if self._stacked is None:
            (member,) = members
            batch = self._features(member).take(member.lines[0])
            return step_loss(context.family, whole, batch, settings=context.model, draws=member.draws[0])[None]
        features = concatenate_features([self._features(member) for member in members])
        together = lock_step(members, 0, self._stacked, self._height(members))
        losses_N = self._stacked.losses(
            whole,
            augment_features(context.family, features.take(together.lines), together.draws, settings=context.model),
            rows_U=together.rows_U,
            clients=self._height(members),
            settings=context.model,
            draws=together.draws.model,
        )
        return losses_N[: len(members)]

    def _height(self, members: Sequence[LoadedClient]) -> int:
        assert self._stacked is not None
        return self.size if self._stacked.full else len(members)

    @torch.no_grad()
    def _flattened(self, gradients: Sequence[Tensor | None], *, rows: int | None = None) -> Tensor:
        """One vector, [P] or [N, P], of a gradient for each parameter, None where nothing depends on it."""
        lead = () if rows is None else (rows,)
        dtype = torch.promote_types(self._dtype, torch.float32)
        flat = self._layout.zeros(*lead, device=self._device, dtype=dtype)
        for view, gradient in zip(self._layout.views(flat).values(), gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
        self._layout.clear(flat, self._held)
        return flat


def _figures(members: Sequence[LoadedClient]) -> tuple[ClientFigures, ...]:
    return tuple(ClientFigures(m.utterances, m.seconds, left_out=m.speech.left_out) for m in members)
