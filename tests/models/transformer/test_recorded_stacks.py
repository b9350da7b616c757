"""Stacks of clients through recorded graphs: few shapes, and the plain losses where nothing can be recorded.

`tests/federated/test_stacked.py` compares whole updates. The recorder is a stand-in (`replaying_recorder`), but for the
last test.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.replaying_recorder import ReplayingRecorder
from torch import Tensor

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.audio.waveforms import Features
from sottovoce.models.cuda_graphs import CudaRecorder
from sottovoce.models.transformer.draws import StackDraws, draw_several, join_draws
from sottovoce.models.transformer.family import stacked_losses
from sottovoce.models.transformer.recorded_stacks import RecordedStacks, pad_stack
from sottovoce.models.transformer.settings import Settings, init

CLIENTS = 3
SETTINGS = Settings(layers=3, width=16, tokens=7, heads=2, features=8, dropout=0.0, layer_drop=0.4)


def weights(settings: Settings = SETTINGS, *, device: str = "cpu", seed: int = 1) -> dict[str, Tensor]:
    """Of `CLIENTS` clients, each with its own."""
    made = [init(settings, generator=torch_stream(seed, "init", client)) for client in range(CLIENTS)]
    stacks = {name: torch.stack([own[name] for own in made]).to(device) for name in made[0]}
    return {name: own.requires_grad_() for name, own in stacks.items()}


def lock_step(number: int, counts: Sequence[int], *, device: str = "cpu", settings: Settings = SETTINGS) -> Any:
    """Features and all else of a step in which the clients have so many utterances each."""
    rng, total = stream(2, "batch", number), sum(counts)
    frames = torch.from_numpy(rng.integers(20, 60, total))
    features = torch.randn(total, int(frames.max()), settings.features, generator=torch_stream(3, "features", number))
    tokens = torch.from_numpy(rng.integers(1, settings.tokens, (total, 3)))
    batch = Features(features.to(device), frames, tokens, torch.full((total,), 3))
    generator = torch_stream(4, "draws", number)
    drawn = [draw_several(settings, batch_sizes=[n], generator=generator)[0] if n else None for n in counts]
    rows = [row for row, n in enumerate(counts) for _ in range(n)]
    return batch, {"rows_U": rows, "clients": CLIENTS, "settings": settings, "draws": join_draws(drawn)}


def gradients(losses: Callable[..., Tensor], own: dict[str, Tensor], step: Any) -> tuple[Tensor, list[Tensor]]:
    found_N = losses(own, step[0], **step[1])
    along = torch.autograd.grad(found_N.sum(), list(own.values()), allow_unused=True)
    zeros = (torch.zeros_like(p) if g is None else g.clone() for g, p in zip(along, own.values(), strict=True))
    return found_N.detach().clone(), list(zeros)


def assert_same(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> None:
    for a, b in zip([one[0], *one[1]], [other[0], *other[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def recorded(recorder: ReplayingRecorder) -> RecordedStacks:
    return RecordedStacks(stacked_losses, row_multiple=128, channel_bytes=48, record=lambda _: recorder)


def test_steps_of_many_sizes_have_few_shapes_and_the_plain_losses() -> None:
    recorder, own = ReplayingRecorder(), weights()
    losses = recorded(recorder)
    for number, counts in enumerate([(2, 1, 3), (1, 1, 1), (4, 0, 2), (0, 0, 5), (3, 3, 3), (2, 5, 1)]):
        step = lock_step(number, counts)
        assert_same(gradients(losses, own, step), gradients(stacked_losses, own, step))
    assert 98 <= recorder.room < 100  # all of them took two at most


def test_a_client_without_utterances_has_neither_loss_nor_gradient() -> None:
    losses_N, along = gradients(recorded(ReplayingRecorder()), weights(), lock_step(0, (4, 0, 2)))
    assert losses_N[1] == 0
    assert losses_N[0] > 0
    assert not any(gradient[1].any() for gradient in along)


def test_what_is_not_finite_stays_with_its_client() -> None:
    own = weights()
    with torch.no_grad():
        own["output.bias"][1] = torch.nan
    losses_N, along = gradients(recorded(ReplayingRecorder()), own, lock_step(0, (4, 1, 2)))
    assert losses_N.isfinite().tolist() == [True, False, True]
    for gradient in along:
        assert gradient[[0, 2]].isfinite().all()


def test_padding_adds_utterances_of_nobody() -> None:
    batch, _ = lock_step(0, (4, 1, 2))
    padded = pad_stack(batch)
    assert len(padded) == 16
    assert padded.frames_U[7:].tolist() == padded.token_lengths_U[7:].tolist() == [0] * 9
    assert padded.features_UTF.shape[1] % 192 == 0
    assert torch.equal(padded.features_UTF[:7, : batch.features_UTF.shape[1]], batch.features_UTF)


def test_new_weights_are_recorded_anew_and_old_ones_forgotten() -> None:
    made: list[ReplayingRecorder] = []

    def record(_: torch.device) -> ReplayingRecorder:
        made.append(ReplayingRecorder())
        return made[-1]

    losses = RecordedStacks(stacked_losses, row_multiple=128, channel_bytes=48, record=record)
    for seed in (1, 2):
        own = weights(seed=seed)
        for number in (0, 1):
            step = lock_step(number, (2, 1, 3))
            assert_same(gradients(losses, own, step), gradients(stacked_losses, own, step))
    assert len(made) == 2


def test_evaluation_and_models_trained_in_part_run_plainly() -> None:
    recorder, own = ReplayingRecorder(), weights()
    losses, step = recorded(recorder), lock_step(0, (2, 1, 3))
    with torch.no_grad():
        torch.testing.assert_close(losses(own, step[0], **step[1]), stacked_losses(own, step[0], **step[1]))
    frozen = {name: tensor.detach().requires_grad_(name != "output.bias") for name, tensor in own.items()}
    torch.testing.assert_close(losses(frozen, step[0], **step[1]), stacked_losses(frozen, step[0], **step[1]))
    assert recorder.room == 100


def test_full_memory_is_no_obstacle() -> None:
    own, step = weights(), lock_step(0, (2, 1, 3))
    assert_same(gradients(recorded(ReplayingRecorder(room=0)), own, step), gradients(stacked_losses, own, step))


def test_what_cannot_be_recorded_runs_plainly_from_then_on() -> None:
    class Broken(ReplayingRecorder):
        @contextmanager
        def recording(self, rehearsal: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")
            yield

    losses, own = recorded(Broken()), weights()
    step = lock_step(0, (2, 1, 3))
    with pytest.warns(UserWarning, match="stacks cannot be recorded, and are slower .operation not permitted"):
        first = gradients(losses, own, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(gradients(losses, own, step), first)
    assert_same(first, gradients(stacked_losses, own, step))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_on_cuda_graphs_give_the_plain_losses_and_gradients(dropout: float) -> None:
    """With dropout too: its masks follow from keys, which are the same."""
    settings = replace(SETTINGS, width=64, layers=4, features=80, dropout=dropout)
    own = weights(settings, device="cuda")
    losses = RecordedStacks(
        stacked_losses, row_multiple=128, channel_bytes=48, record=lambda d: CudaRecorder(d, keep_free_bytes=0)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, counts in enumerate([(2, 1, 3), (4, 0, 2), (2, 5, 1)]):
            step = lock_step(number, counts, device="cuda", settings=settings)
            assert isinstance(step[1]["draws"], StackDraws)
            assert_same(gradients(losses, own, step), gradients(stacked_losses, own, step))
