"""A recorded decoder computes what the plain one computes: loss, gradients, chance, whatever the padding.

Without a GPU the recorder does the work again (`Again`): what is tested then is everything but CUDA itself. On a CUDA
device the same tests run on real graphs, and the whole model against the CPU.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.models.again import Again
from tests.models.crdnn.test_crdnn import PLAIN, heard, own_weights
from torch import Tensor

from sottovoce.models.attention_search import Search
from sottovoce.models.crdnn import fast
from sottovoce.models.crdnn.family import FAMILY, Draws, loss, search
from sottovoce.models.crdnn.settings import Settings
from sottovoce.models.utterances import Features

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64


def leaves(settings: Settings, device: torch.device = DEVICE) -> dict[str, Tensor]:
    return {name: tensor.to(device).requires_grad_() for name, tensor in own_weights(settings).items()}


def batch(*utterances: int, padding: int = 0, device: torch.device = DEVICE) -> Features:
    made = heard(*utterances, padding=padding)
    return replace(made, features_UTF=made.features_UTF.to(device))


def gradients(parameters: dict[str, Tensor], given: Features, *, settings: Settings, **options: object) -> list[Tensor]:
    value = loss(parameters, given, settings=settings, draws=Draws(3), **options)  # type: ignore[arg-type]
    return [value, *torch.autograd.grad(value, list(parameters.values()))]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_recorded_decoder_gives_the_same_loss_and_gradients(dropout: float) -> None:
    settings, recorder = replace(PLAIN, dropout=dropout), None if CUDA else Again()
    parameters = leaves(settings)
    recorded = fast.recorded_decoder(parameters, settings=settings, recorder=recorder, keep_free_bytes=0)
    for utterances in ((0, 1), (1,), (1, 0), (0, 1)):
        with torch.no_grad():  # the same addresses, other values
            parameters["gru.input.weight"].mul_(0.9)
        plain = gradients(parameters, batch(*utterances), settings=settings)
        for ours, expected in zip(
            gradients(parameters, batch(*utterances), settings=settings, log_probs=recorded), plain, strict=True
        ):
            torch.testing.assert_close(ours, expected, **CLOSE)


def test_without_room_and_without_gradients_it_runs_plainly() -> None:
    parameters, recorder = leaves(PLAIN), Again(room=0)
    recorded = fast.recorded_decoder(parameters, settings=PLAIN, recorder=recorder)
    expected = gradients(parameters, batch(0, 1), settings=PLAIN)
    for ours, plain in zip(
        gradients(parameters, batch(0, 1), settings=PLAIN, log_probs=recorded), expected, strict=True
    ):
        torch.testing.assert_close(ours, plain, **CLOSE)
    with torch.no_grad():
        value = loss(parameters, batch(0, 1), settings=PLAIN, draws=None, log_probs=recorded)
    torch.testing.assert_close(value, loss(parameters, batch(0, 1), settings=PLAIN, draws=None), **CLOSE)
    assert recorder.room == -1  # asked once


def test_it_is_recorded_for_long_training_on_a_gpu_alone() -> None:
    asked = partial(FAMILY.faster, FAMILY, leaves(PLAIN), settings=PLAIN, batch_seconds=64)  # type: ignore[arg-type]
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
    how = Search(width=4, ctc_weight=0.3)
    texts = [
        search(leaves(settings, device), batch(0, 1, device=device), settings=settings, how=how)
        for device in (here, there)
    ]
    assert [[found.tokens for found in own] for own in texts[0]] == [
        [found.tokens for found in own] for own in texts[1]
    ]
