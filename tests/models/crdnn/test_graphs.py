"""A recorded decoder computes what the plain one computes: loss, gradients, chance, whatever the padding.

Without a GPU the recorder does the work again (`ReplayingRecorder`): what is tested then is everything but CUDA
itself. On a CUDA device the same tests run on real graphs, and the whole model against the CPU.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.models.crdnn.test_crdnn import PLAIN, golden_batch, own_weights
from tests.models.replaying_recorder import ReplayingRecorder
from torch import Tensor

from sottovoce.data.audio.waveforms import Features
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.crdnn import graphs
from sottovoce.models.crdnn.family import FAMILY, Draws, loss, search
from sottovoce.models.crdnn.settings import Settings
from sottovoce.models.cuda_graphs import CudaRecorder

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64


def leaves(settings: Settings, device: torch.device = DEVICE) -> dict[str, Tensor]:
    return {name: tensor.to(device).requires_grad_() for name, tensor in own_weights(settings).items()}


def batch(*utterances: int, padding: int = 0, device: torch.device = DEVICE) -> Features:
    made = golden_batch(*utterances, padding=padding)
    return replace(made, features_UTF=made.features_UTF.to(device))


def gradients(parameters: dict[str, Tensor], given: Features, *, settings: Settings, **options: object) -> list[Tensor]:
    value = loss(parameters, given, settings=settings, draws=Draws(3), **options)  # type: ignore[arg-type]
    return [value, *torch.autograd.grad(value, list(parameters.values()))]


def recorded(parameters: dict[str, Tensor], settings: Settings, *, room: int = 100) -> dict[str, Any]:
    made: list[Any] = []
    for record in (graphs.recorded_encoder, graphs.recorded_decoder):
        recorder = (
            CudaRecorder(torch.device("cuda", 0), keep_free_bytes=0) if CUDA and room else ReplayingRecorder(room=room)
        )
        made.append(record(parameters, settings=settings, recorder=recorder))
    return dict(zip(("encode", "log_probs"), made, strict=True))


def close(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


BATCHES = ((0, 1), (1,), (1, 0), (0, 1))


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("room", [100, 0])
def test_a_recorded_model_gives_the_same_loss_and_gradients(norm: str, room: int) -> None:
    settings = replace(PLAIN, norm=norm)  # type: ignore[arg-type]
    parameters = leaves(settings)
    functions = recorded(parameters, settings, room=room)
    for utterances in BATCHES:
        with torch.no_grad():  # the same addresses, other values
            parameters["gru.input.weight"].mul_(0.9)
            parameters["rnn.1.backward.recurrent.weight"].mul_(0.9)
        plain = gradients(parameters, batch(*utterances), settings=settings)
        close(gradients(parameters, batch(*utterances), settings=settings, **functions), plain)


def test_dropout_follows_its_seed() -> None:
    """In the decoder as in a plain run; in the encoder, whose lines are padded, at least the same every time."""
    settings = replace(PLAIN, dropout=0.4)
    parameters = leaves(settings)
    functions = recorded(parameters, settings)
    for utterances in BATCHES:
        plain = gradients(parameters, batch(*utterances), settings=settings)
        close(gradients(parameters, batch(*utterances), settings=settings, log_probs=functions["log_probs"]), plain)
        found = [gradients(parameters, batch(*utterances), settings=settings, **functions) for _ in range(2)]
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_evaluation_runs_plainly() -> None:
    parameters = leaves(PLAIN)
    functions = recorded(parameters, PLAIN, room=0)
    for scope in (torch.no_grad(), torch.enable_grad()):
        with scope:
            value = loss(parameters, batch(0, 1), settings=PLAIN, draws=None, **functions)
            torch.testing.assert_close(value, loss(parameters, batch(0, 1), settings=PLAIN, draws=None), **CLOSE)


def test_it_is_recorded_for_long_training_on_a_gpu_alone() -> None:
    asked = partial(FAMILY.training.accelerate, FAMILY, leaves(PLAIN), settings=PLAIN, batch_seconds=64)  # type: ignore[arg-type]
    assert asked(steps=10**6, device=torch.device("cpu")) is FAMILY
    assert asked(steps=10, device=torch.device("cuda", 0)) is FAMILY


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_a_gpu_computes_what_a_cpu_computes(norm: str) -> None:
    settings = replace(PLAIN, norm=norm)  # type: ignore[arg-type]
    here, there = torch.device("cpu"), torch.device("cuda", 0)
    found = [
        gradients(leaves(settings, device), batch(0, 1, padding=3, device=device), settings=settings)
        for device in (here, there)
    ]
    for on_cpu, on_gpu in zip(*found, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, **CLOSE)
    how = SearchOptions(width=4, ctc_weight=0.3)
    texts = [
        search(leaves(settings, device), batch(0, 1, device=device), settings=settings, how=how)
        for device in (here, there)
    ]
    assert [[found.tokens for found in own] for own in texts[0]] == [
        [found.tokens for found in own] for own in texts[1]
    ]
