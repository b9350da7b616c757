"""Many clients at once: their weights in one tensor with a leading client axis, trained in lock-step on one device.

A small model leaves most of a GPU idle when its clients run one by one; stacked, one matrix product serves all of them.
Every client still has its own weights, batches and draws, so its update is what `sequential` computes, up to rounding
(where a family draws dropout's masks otherwise in a stack, they are as much the client's own). A client whose numbers
are not finite spoils its own row and no other.

Who shares a stack: clients with about as much speech, so that nobody waits.

Shapes: N clients of a stack, L local steps, U utterances of a lock-step, P flat length.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.waveforms import concatenate_features
from sottovoce.data.loading import prefetch
from sottovoce.federated.client import ClientContext, LoadedClient, gradients_of
from sottovoce.federated.engines.engine import Dropped, InProcessEngine, Member, Trained
from sottovoce.federated.feature_cache import features_bytes
from sottovoce.federated.weighting import ClientFigures, last_epoch, measured_wer, weighs_by_wer
from sottovoce.flat.layout import Layout
from sottovoce.models.family import Stacked, StepDraws, augment_features, stacking_obstacle
from sottovoce.optimisers.weights import Weights
from sottovoce.privacy.settings import Weighting


@dataclass(frozen=True, eq=False)
class LockStep:
    """One local step of all clients of a stack: which utterances (`lines` of the stack's), and whose (`rows_U`)."""

    lines: Tensor
    rows_U: list[int]
    draws: StepDraws  # of all of them as one
    active_N: Tensor  # 1 for the clients that have a batch in this step, 0 for those that are done


@dataclass(frozen=True, eq=False)
class _Stack:
    """Clients that are trained together, in a stack of `size` rows; the last ones may be idle."""

    members: list[LoadedClient]
    steps: list[LockStep]
    size: int

    @property
    def audio_seconds(self) -> float:
        return sum(member.audio_seconds for member in self.members)


class StackedEngine(InProcessEngine):
    """Trains `size` clients at once; None chooses what fits into half of the device's free memory."""

    def __init__(
        self,
        context: ClientContext,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        stacked: Stacked[Any, Any] | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(context, device, dtype)
        if (why := stacking_obstacle(context.family, context.model)) is not None:
            raise InputError(f"federation.engine=stacked: {why}")
        assert context.family.stacking.stacked is not None
        self._layout, self._stacked = layout, stacked or context.family.stacking.stacked
        self.size = size or fitting_size(self._stacked, context, layout, device)
        self._weights: dict[int, Weights] = {}
        self._held: tuple[str, ...] = ()
        self._expected: tuple[Sequence[int], int] = (), 0

    def expect(self, cohort: Sequence[int], *, step: int) -> None:
        self._expected = cohort, step

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | Dropped]:
        self._held = self._layout.held_at(step)
        members, dropped = self._plan_cohort(cohort, positions, step)
        yield from dropped
        with closing(prefetch(self._load_stacks(self._groups(members), step), depth=1)) as loading:
            for loaded in self._time_waits(loading):
                if isinstance(loaded, Dropped):
                    yield loaded
                else:
                    yield from self._train_stack(server_P, loaded)

    def _groups(self, members: Sequence[Member]) -> list[list[Member]]:
        """Stacks of at most `size`, by local steps and seconds."""

        def similarity(m: Member) -> tuple[int, int, int]:
            return m.steps, m.padded_samples, m.client

        groups: list[list[Member]] = []
        for member in sorted(members, key=similarity):
            last = groups[-1] if groups else None
            if last is None or len(last) == self.size or not self._together(last[0], member):
                groups.append([member])
            else:
                last.append(member)
        # The largest first: what the memory does not hold shows at once.
        return sorted(groups, key=lambda group: -sum(member.padded_samples for member in group))

    def _together(self, one: Member, other: Member) -> bool:
        # An optimiser with a memory would go on moving a client that has no batches left.
        return not self._context.local.optimiser_remembers or one.steps == other.steps

    def _load_stacks(self, groups: Sequence[Sequence[Member]], step: int) -> Iterator[_Stack | Dropped]:
        for group in groups:
            loaded = [self._load_member(member, step) for member in group]
            yield from (one for one in loaded if isinstance(one, Dropped))
            if members := [one for one in loaded if isinstance(one, LoadedClient)]:
                yield self._stack(members)
        self._read_ahead({member.client for group in groups for member in group})

    def _read_ahead(self, in_training: set[int]) -> None:
        """Have features of the cohort that is expected next, while the last stack of this one is trained.

        They take half of what may be kept at most: this cohort's are not to make room for them.
        """
        (cohort, step), self._expected = self._expected, ((), 0)
        local = self._context.local
        if local.augments_waveforms or local.time_line is not None:
            return  # no features are used twice
        room = self._cache.limit // 2
        for index in cohort:
            if room <= 0:
                return
            if index in in_training or self._cache.get(index) is not None:
                continue
            for member in self._plan_cohort([index], None, step)[0]:
                loaded = self._load_member(member, step)
                if isinstance(loaded, Dropped) or not loaded.whole:
                    continue
                try:
                    room -= features_bytes(self._features(loaded))
                except torch.OutOfMemoryError:  # of no client that is trained now
                    return

    def _train_stack(self, server_P: Tensor, stack: _Stack) -> Iterator[Trained | Dropped]:
        """A stack that fails is trained in halves, down to the one client that it fails for."""
        try:
            trained = self._train(server_P, stack)
        except Exception as error:
            self._weights.clear()
            dropped = self._drop(stack.members[0].client.index, error)
            if len(stack.members) == 1:
                yield dropped
                return
        else:
            yield trained
            return
        half = len(stack.members) // 2
        for members in (stack.members[:half], stack.members[half:]):
            yield from self._train_stack(server_P, self._stack(members))

    def _train(self, server_P: Tensor, stack: _Stack) -> Trained:
        weights, losses_N, norms_N, by_step = self._train_locally(server_P, stack)
        figures = self._figures(stack, weights, self._weighed_by(stack, losses_N, by_step))
        indices = tuple(member.client.index for member in stack.members)
        with torch.no_grad():
            masters_NP = weights.master[: len(indices)]
            updates_NP = torch.sub(server_P, masters_NP, out=masters_NP)
        return Trained(updates_NP, indices, losses_N, figures, stack.audio_seconds, gradient_norms=norms_N)

    def _stack(self, members: list[LoadedClient]) -> _Stack:
        size = self.size if self._stacked.full else len(members)
        steps = max(len(member.lines) for member in members)
        return _Stack(members, [lock_step(members, step, self._stacked, size) for step in range(steps)], size)

    def _train_locally(self, server_P: Tensor, stack: _Stack) -> tuple[Weights, Tensor, Tensor, list[Tensor]]:
        """The weights of all clients after their local steps, their mean losses and, if they count, those by step.

        Between the two, the mean norms of their gradients: who is done has none, which adds nothing.
        """
        context, local, count = self._context, self._context.local, stack.size
        weights = self._weights_for(count)
        weights.reset(server_P)
        total_N, norms_N = torch.zeros(count, device=self._device), torch.zeros(count, device=self._device)
        by_step: list[Tensor] = []
        features = concatenate_features([self._features(member) for member in stack.members])
        for lock_step in stack.steps:
            losses_N = self._stacked.losses(
                context.frozen.with_trained(weights.working),
                augment_features(
                    context.family, features.take(lock_step.lines), lock_step.draws, settings=context.model
                ),
                rows_U=lock_step.rows_U,
                clients=count,
                settings=context.model,
                draws=lock_step.draws.model,
            )
            leaves = list(weights.working.values())
            weights.set_gradients(gradients_of(losses_N.sum(), leaves))
            if local.proximal is not None:
                pull_NP = local.proximal.pull(weights.master, server_P)
                active_N = lock_step.active_N.to(self._device, non_blocking=True)
                weights.add_to_gradients(pull_NP.mul_(active_N[:, None]))
            step_norms_N, _ = weights.step(lr=local.lr, max_norm=local.clip_gradients)
            total_N += losses_N.detach()
            norms_N += step_norms_N
            if context.weighting is Weighting.LOSS_RELEASED:
                by_step.append(losses_N.detach().clone())
        lengths = [float(len(member.lines)) for member in stack.members]
        steps_N = torch.tensor(lengths).to(self._device, non_blocking=True)
        return weights, total_N[: len(lengths)] / steps_N, norms_N[: len(lengths)] / steps_N, by_step

    def _weights_for(self, count: int) -> Weights:
        """Stacks of one size share their memory; the last, smaller one of a round takes the front of it."""
        if count not in self._weights:
            if len(self._weights) > 3:
                self._weights.clear()
            self._weights[count] = Weights(
                self._layout, self._context.local.built_optimiser(), device=self._device, dtype=self._dtype, rows=count
            )
        self._weights[count].hold(self._held)
        return self._weights[count]

    def _weighed_by(self, stack: _Stack, losses_N: Tensor, by_step: list[Tensor]) -> list[float] | list[None]:
        """The losses that weights depend on, if they do: reading them waits for the device."""
        match self._context.weighting:
            case Weighting.LOSS:
                return losses_N.tolist()
            case Weighting.LOSS_RELEASED:
                losses_LN = torch.stack(by_step)
                own = [losses_LN[: len(member.lines), row] for row, member in enumerate(stack.members)]
                return [float(last_epoch(losses_L, self._context).mean()) for losses_L in own]
            case _:
                return [None] * len(stack.members)

    def _figures(self, stack: _Stack, weights: Weights, losses: Sequence[float | None]) -> tuple[ClientFigures, ...]:
        figures, wanted = [], weights.working if weighs_by_wer(self._context) else {}
        for row, (member, loss) in enumerate(zip(stack.members, losses, strict=True)):
            own = {name: stacked[row] for name, stacked in wanted.items()}
            wer = measured_wer(own, member.client, self._context, device=self._device)
            figures.append(ClientFigures(member.utterances, member.seconds, loss, wer, left_out=member.speech.left_out))
        return tuple(figures)


def lock_step(members: Sequence[LoadedClient], local_step: int, stacked: Stacked[Any, Any], size: int) -> LockStep:
    """The local step of that number of all clients that have one, whose speech lies end to end."""
    firsts = [0, *accumulate(len(member.sound) for member in members)]
    active = [row for row, member in enumerate(members) if local_step < len(member.lines)]
    lines = [members[row].lines[local_step] + firsts[row] for row in active]
    draws = {row: members[row].draws[local_step] for row in active}
    masks = [drawn.masks for drawn in draws.values() if drawn.masks is not None]
    bands = [drawn.bands for drawn in draws.values() if drawn.bands is not None]
    joined = StepDraws(
        stacked.join([draws[row].model if row in draws else None for row in range(size)]),
        torch.cat(masks) if masks else None,
        draws[active[0]].spec_augment,
        torch.cat(bands) if bands else None,
    )
    rows_U = [row for row, places in zip(active, lines, strict=True) for _ in range(len(places))]
    return LockStep(torch.cat(lines), rows_U, joined, torch.tensor([float(row in draws) for row in range(size)]))


_LARGEST_STACK = 128  # more gain little, and wait longer for the one with the most speech


def fitting_size(stacked: Stacked[Any, Any], context: ClientContext, layout: Layout, device: torch.device) -> int:
    """How many clients fit into half of the device's free memory."""
    if device.type != "cuda":
        return 8
    free, _ = torch.cuda.mem_get_info(device)
    seconds, steps = context.local.batch_seconds, context.local.local_steps or 1
    own = stacked.bytes(context.model, seconds=seconds, steps=steps)
    weights = layout.flat_size * 16  # master, copy, gradients as they come and as they are kept
    return max(1, min(_LARGEST_STACK, context.cohort_size, int(0.5 * free / (own + weights))))
