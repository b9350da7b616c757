"""Many clients at once: their weights in one tensor with a leading client axis, trained in lock-step on one device.

A small model leaves most of a GPU idle when its clients run one by one; stacked, one matrix product serves all of them.
Every client still has its own weights, batches and draws, so its update is what `sequential` computes, up to rounding
(on a GPU the masks of dropout are others than alone, but as much the client's own: see `models.dropout`). A client
whose numbers are not finite spoils its own row and no other.

Who shares a stack: clients with the same shared draw of layer-drop (`layerdrop_group`), so that a dropped block is
skipped for all of them, and among these clients with about as much speech, so that nobody waits.

Shapes: N clients of a stack, U utterances of a lock-step, P flat length.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from sottovoce.audio.features import MEL_COUNT
from sottovoce.evaluation.prefetch import ahead
from sottovoce.federated.client import (
    ClientRoom,
    LoadedClient,
    PlannedClient,
    gradients_of,
    held_out_wer,
    load_client,
    plan_client,
)
from sottovoce.federated.engines.engine import Dropped, Engine, Trained, excused
from sottovoce.federated.heard_before import HeardBefore, room_for_hearing
from sottovoce.federated.weighting import ClientFigures
from sottovoce.flat.layout import Layout
from sottovoce.models.ctc_transformer import STRIDE, Draws
from sottovoce.models.heard import joined
from sottovoce.models.positions import PositionDraws
from sottovoce.models.recogniser import PLAIN, Compute, StepDraws, stacked_losses
from sottovoce.optimisers.weights import Weights
from sottovoce.privacy.settings import Weighting


@dataclass(frozen=True, eq=False)
class _LockStep:
    """One local step of all clients of a stack: which utterances (`lines` of the stack's), and whose (`rows_U`)."""

    lines: Tensor
    rows_U: list[int]
    draws: StepDraws
    draws_by: list[Draws | None]  # what each client has drawn; None where it has no batch any more


@dataclass(frozen=True, eq=False)
class _Stack:
    members: list[LoadedClient]
    steps: list[_LockStep]

    @property
    def audio_seconds(self) -> float:
        return sum(member.audio_seconds for member in self.members)


class StackedEngine(Engine):
    """Trains `size` clients at once; None chooses what fits into half of the device's free memory."""

    def __init__(
        self,
        room: ClientRoom,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        compute: Compute = PLAIN,
        weighting: Weighting = Weighting.UNIFORM,
        size: int | None = None,
    ) -> None:
        self._room, self._layout, self._device, self._dtype = room.on(device, dtype), layout, device, dtype
        self._compute, self._weighting = compute, weighting
        self.size = size or fitting_size(room, layout, device)
        self._weights: dict[int, Weights] = {}
        self._before = HeardBefore(room_for_hearing(device))

    def train(self, server_P: Tensor, cohort: Sequence[int], *, step: int) -> Iterator[Trained | Dropped]:
        members: list[PlannedClient] = []
        for index in cohort:
            try:
                members.append(plan_client(self._room, index, step=step))
            except Exception as error:
                yield excused(index, error, forgiving=self._room.forgiving)
        groups = self._groups(members, step)
        with closing(ahead(self._loaded(groups, step), depth=1)) as loading:
            for loaded in self.awaited(loading):
                if isinstance(loaded, Dropped):
                    yield loaded
                else:
                    yield from self._train_stack(server_P, loaded, step)

    # What is loaded, and who together with whom.

    def _groups(self, members: Sequence[PlannedClient], step: int) -> list[list[PlannedClient]]:
        """Stacks of at most `size`: one shared draw of layer-drop each, then by local steps and seconds."""
        room = self._room
        shares = room.model.layer_drop > 0 and room.local.layerdrop_group > 1
        keyed = sorted(
            members,
            key=lambda m: (
                room.draw_group(m.client, step=step) if shares else 0,
                len(m.batches),
                m.padded_samples,
                m.client.index,
            ),
        )
        groups: list[list[PlannedClient]] = []
        for member in keyed:
            last = groups[-1] if groups else None
            if last is None or len(last) == self.size or not self._together(last[0], member, step, shares):
                groups.append([member])
            else:
                last.append(member)
        # The largest first: what the memory does not hold shows at once.
        return sorted(groups, key=lambda group: -sum(member.padded_samples for member in group))

    def _together(self, one: PlannedClient, other: PlannedClient, step: int, shares: bool) -> bool:
        room = self._room
        if shares and room.draw_group(one.client, step=step) != room.draw_group(other.client, step=step):
            return False
        # An optimiser with a memory would go on moving a client that has no batches left.
        return not room.local.optimiser_remembers or len(one.batches) == len(other.batches)

    def _loaded(self, groups: Sequence[Sequence[PlannedClient]], step: int) -> Iterator[_Stack | Dropped]:
        for group in groups:
            members = list(group)
            while members:
                try:
                    yield _stacked([self._load(client, step) for client in members])
                    break
                except _ClientFailure as failure:
                    yield failure.dropped
                    members.remove(failure.member)

    def _load(self, planned: PlannedClient, step: int) -> LoadedClient:
        try:
            return load_client(self._room, planned, step=step, device=self._device, before=self._before)
        except Exception as error:
            dropped = excused(planned.client.index, error, forgiving=self._room.forgiving)
            raise _ClientFailure(planned, dropped) from error

    # Training.

    def _train_stack(self, server_P: Tensor, stack: _Stack, step: int) -> Iterator[Trained | Dropped]:
        """A stack that fails is trained in halves, down to the one client that it fails for."""
        try:
            trained = self._trained(server_P, stack, step)
        except Exception as error:
            self._weights.clear()
            dropped = excused(stack.members[0].client.index, error, forgiving=self._room.forgiving)
            if len(stack.members) == 1:
                yield dropped
                return
        else:
            yield trained
            return
        half = len(stack.members) // 2
        for members in (stack.members[:half], stack.members[half:]):
            yield from self._train_stack(server_P, _stacked(members), step)

    def _trained(self, server_P: Tensor, stack: _Stack, step: int) -> Trained:
        weights, losses_N = self._fitted(server_P, stack, step)
        figures = self._figures(stack, weights, losses_N)
        indices = tuple(member.client.index for member in stack.members)
        with torch.no_grad():
            updates_NP = weights.master[: len(indices)].neg_().add_(server_P)
        return Trained(updates_NP, indices, losses_N, figures, stack.audio_seconds)

    def _fitted(self, server_P: Tensor, stack: _Stack, step: int) -> tuple[Weights, Tensor]:
        """The weights of all clients after their local steps, and their mean losses."""
        room, local = self._room, self._room.local
        count = self.size if self._compute.full_stacks else len(stack.members)
        weights = self._weights_for(count)
        weights.reset(server_P)
        total_N = torch.zeros(count, device=self._device)
        idle: list[None] = [None] * (count - len(stack.members))
        heard = joined(
            [member.heard(self._before, dtype=self._dtype, compute=self._compute) for member in stack.members]
        )
        for lock_step in stack.steps:
            losses_N = stacked_losses(
                room.frozen.joined(weights.working),
                heard.batch(lock_step.lines),
                rows_U=lock_step.rows_U,
                clients=count,
                settings=room.model,
                spec_augment=local.spec_augment_at(step),
                draws=lock_step.draws,
                draws_by=[*lock_step.draws_by, *idle],
                compute=self._compute,
            )
            leaves = list(weights.working.values())
            weights.set_gradients(gradients_of(losses_N.sum(), leaves))
            if local.proximal is not None:
                pull_NP = local.proximal.pull(weights.master, server_P)
                weights.add_to_gradients(pull_NP.mul_(self._active([*lock_step.draws_by, *idle])[:, None]))
            weights.step(lr=local.lr, max_norm=local.clip_gradients)
            total_N += losses_N.detach()
        steps_N = torch.tensor([float(len(member.lines)) for member in stack.members])
        return weights, total_N[: len(steps_N)] / steps_N.to(self._device, non_blocking=True)

    def _active(self, draws_by: Sequence[Draws | None]) -> Tensor:
        """1 for the clients that have a batch in this step, 0 for those that are done."""
        active_N = torch.tensor([float(drawn is not None) for drawn in draws_by])
        return active_N.to(self._device, non_blocking=True)

    def _weights_for(self, count: int) -> Weights:
        """Stacks of one size share their memory; the last, smaller one of a round takes the front of it."""
        if count not in self._weights:
            if len(self._weights) > 3:
                self._weights.clear()
            self._weights[count] = Weights(
                self._layout, self._room.local.built_optimiser(), device=self._device, dtype=self._dtype, rows=count
            )
        return self._weights[count]

    def _figures(self, stack: _Stack, weights: Weights, losses_N: Tensor) -> tuple[ClientFigures, ...]:
        losses = losses_N.tolist() if self._weighting is Weighting.LOSS else [None] * len(stack.members)
        figures = []
        for row, (member, loss) in enumerate(zip(stack.members, losses, strict=True)):
            wer = None
            if self._weighting is Weighting.WER:
                own = {name: stacked[row] for name, stacked in weights.working.items()}
                wer = held_out_wer(own, member.client, self._room, device=self._device)
            figures.append(
                ClientFigures(
                    len(member.speech.rows), member.client.seconds, loss, wer, left_out=member.speech.left_out
                )
            )
        return tuple(figures)


class _ClientFailure(Exception):
    def __init__(self, member: PlannedClient, dropped: Dropped) -> None:
        super().__init__(dropped.reason)
        self.member, self.dropped = member, dropped


def _stacked(members: list[LoadedClient]) -> _Stack:
    firsts = [0, *accumulate(len(member.sound.lengths_U) for member in members)]
    steps = max(len(member.lines) for member in members)
    return _Stack(members, [_lock_step(members, firsts, local_step) for local_step in range(steps)])


def _lock_step(members: Sequence[LoadedClient], firsts: Sequence[int], local_step: int) -> _LockStep:
    """The local step of that number of all clients that have one; `firsts` are their places in the stack's speech."""
    active = [row for row, member in enumerate(members) if local_step < len(member.lines)]
    lines = [members[row].lines[local_step] + firsts[row] for row in active]
    draws = [members[row].draws[local_step] for row in active]
    draws_by: list[Draws | None] = [None] * len(members)
    for row, drawn in zip(active, draws, strict=True):
        draws_by[row] = drawn.model
    rows_U = [row for row, places in zip(active, lines, strict=True) for _ in range(len(places))]
    return _LockStep(torch.cat(lines), rows_U, joined_draws(draws), draws_by)


def joined_draws(draws: Sequence[StepDraws]) -> StepDraws:
    """The draws of several clients as one batch's, but for dropout, whose seeds stay each client's own."""
    masks = [drawn.masks for drawn in draws if drawn.masks is not None]
    positions = [drawn.model.positions for drawn in draws if drawn.model.positions is not None]
    return StepDraws(
        masks=torch.cat(masks) if masks else None,
        model=Draws(
            kept=tuple(sorted({layer for drawn in draws for layer in drawn.model.kept})),
            positions=_joined_positions(positions) if positions else None,
            dropout_seed=None,
        ),
    )


def _joined_positions(positions: Sequence[PositionDraws]) -> PositionDraws:
    jitters = [p.jitter_BT for p in positions if p.jitter_BT is not None]
    widest = max((jitter.shape[1] for jitter in jitters), default=0)
    padded = [torch.nn.functional.pad(jitter, (0, widest - jitter.shape[1])) for jitter in jitters]
    return replace(
        positions[0],
        shift_B=torch.cat([p.shift_B for p in positions]),
        scale_B=torch.cat([p.scale_B for p in positions]),
        jitter_BT=torch.cat(padded) if padded else None,
    )


# Bytes of activations for each frame, block and channel: 24 numbers of two bytes, as measured for the blocks.
_ACTIVATION_BYTES = 48
_FRAMES_PER_SECOND = 100 / 3
_LARGEST_STACK = 128  # more gain little, and wait longer for the one with the most speech


def fitting_size(room: ClientRoom, layout: Layout, device: torch.device) -> int:
    """How many clients fit into half of the device's free memory."""
    if device.type != "cuda":
        return 8
    free, _ = torch.cuda.mem_get_info(device)
    frames = room.local.batch_seconds * _FRAMES_PER_SECOND
    activations = frames * room.model.layers * room.model.width * _ACTIVATION_BYTES
    weights = layout.flat_size * 16  # master, copy, gradients as they come and as they are kept
    steps = room.local.local_steps or 1
    features = frames * STRIDE * steps * MEL_COUNT * 8  # two bytes each, and padding to the longest utterance
    return max(1, min(_LARGEST_STACK, room.cohort_size, int(0.5 * free / (activations + weights + features))))
