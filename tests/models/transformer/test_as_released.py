"""The transformer with what only the released code of Pelikan et al. has: other features, and a learned input scale."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sottovoce.data.audio.features import frame_count, normalise_features
from sottovoce.data.audio.waveforms import Features, pack_waveforms
from sottovoce.models import ctc
from sottovoce.models.transformer import family
from sottovoce.models.transformer.draws import Draws
from sottovoce.models.transformer.features import amplitude_mel, extract_features
from sottovoce.models.transformer.network import forward
from sottovoce.models.transformer.settings import init, named_settings, parameter_kind, parameter_shapes

RELEASED = named_settings("tiny", tokens=5, dropout=0.0, layer_drop=0.0, positions="sinusoidal", as_released=True)
PLAIN = replace(RELEASED, as_released=False)


def mel_by_hand(samples: np.ndarray) -> np.ndarray:
    """One frame at a time, one filter at a time, in float64; samples are 16-bit numbers."""

    def hertz(mel: float) -> float:
        return 700 * (10 ** (mel / 2595) - 1)

    top = 2595 * np.log10(1 + 8000 / 700)
    edges = [hertz(top * i / 81) * 256 * 2 / 16_000 for i in range(82)]
    rows = []
    for start in range(0, len(samples) - 399, 160):
        frame = samples[start : start + 400].astype(np.float64)
        emphasised = frame - 0.97 * np.concatenate([frame[:1], frame[:-1]])
        amplitude = np.abs(np.fft.rfft(emphasised * np.hamming(400), 512))
        row = []
        for low, middle, high in zip(edges, edges[1:], edges[2:], strict=False):
            weights = [max(0.0, min((b - low) / (middle - low), (high - b) / (high - middle))) for b in range(257)]
            row.append(np.log(max(1.0, float(amplitude @ weights))))
        rows.append(row)
    return np.array(rows)


@pytest.fixture
def speech() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(2, 4_000, generator=generator) * 3000).to(torch.int16)


def test_features_are_the_released_ones(speech: torch.Tensor) -> None:
    found = amplitude_mel(speech[:1], torch.tensor([4_000]))[0]
    expected = mel_by_hand(speech[0].numpy())
    assert found.shape == (frame_count(4_000), 80)
    # float32 over sums of 257 amplitudes: a few units in the seventh digit of numbers near 10.
    assert np.abs(found.numpy() - expected).max() < 1e-4
    as_floats = amplitude_mel(speech[:1].float() / 32_768, torch.tensor([4_000]))[0]
    assert torch.allclose(as_floats, found, atol=1e-5)


def test_an_utterance_sounds_the_same_in_any_batch_and_is_normalised(speech: torch.Tensor) -> None:
    def features_of(*lengths: int) -> Features:
        sounds = [line[:length].numpy() for line, length in zip(speech, lengths, strict=False)]
        return extract_features(pack_waveforms(sounds, [[1]] * len(sounds)), settings=RELEASED)

    alone, together = features_of(2_500), features_of(2_500, 4_000)
    frames = frame_count(2_500)
    assert torch.allclose(together.features_UTF[0, :frames], alone.features_UTF[0], atol=1e-5)
    assert not together.features_UTF[0, frames:].any()
    own = together.features_UTF[0, :frames]
    assert (own.mean().item(), own.std(correction=0).item()) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-3))


def test_two_tensors_more_than_in_the_text() -> None:
    shapes = parameter_shapes(named_settings("base", tokens=30, as_released=True))
    assert len(shapes) == 296
    assert [*shapes][:2] == ["input.weight", "input.bias"]
    assert parameter_kind("input.weight") == "input"
    assert parameter_shapes(named_settings("base", tokens=30)) == {
        name: shape for name, shape in shapes.items() if not name.startswith("input.")
    }


def parameters_of(seed: int, *, weight: float, bias: float) -> dict[str, torch.Tensor]:
    fresh = init(RELEASED, generator=torch.Generator().manual_seed(seed))
    assert (fresh["input.weight"].item(), fresh["input.bias"].item()) == (1, 0)
    fresh |= {"input.weight": torch.tensor([weight]), "input.bias": torch.tensor([bias])}
    return {name: tensor.double() for name, tensor in fresh.items()}


FEATURES = torch.randn(3, 40, 80, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
LENGTHS = torch.tensor([40, 22, 31])


def test_the_input_is_normalised_again_then_scaled_and_moved() -> None:
    parameters = parameters_of(1, weight=1.7, bias=-0.4)
    inside = (torch.arange(40) < LENGTHS[:, None])[..., None]
    by_hand = torch.where(inside, normalise_features(FEATURES, LENGTHS) * 1.7 - 0.4, 0.0)
    expected, _ = forward(parameters, by_hand, LENGTHS, settings=PLAIN)
    found, lengths = forward(parameters, FEATURES, LENGTHS, settings=RELEASED)
    for line, length in enumerate(lengths.tolist()):
        assert torch.allclose(found[line, :length], expected[line, :length], atol=1e-12)


def test_stacked_clients_have_their_own_scales_and_gradients() -> None:
    clients = [parameters_of(1, weight=1.7, bias=-0.4), parameters_of(2, weight=0.6, bias=0.9)]
    tokens, token_lengths = torch.tensor([[1, 2], [3, 1], [2, 4]]), torch.tensor([2, 1, 2])
    rows = [0, 1, 1]
    nothing = Draws(kept=tuple(range(RELEASED.layers)), positions=None, dropout_seed=7)
    stacked = {name: torch.stack([own[name] for own in clients]).requires_grad_() for name in clients[0]}
    losses = family.stacked_losses(
        stacked,
        Features(FEATURES, LENGTHS, tokens, token_lengths),
        rows_U=rows,
        clients=2,
        settings=RELEASED,
        draws=family.join_draws([nothing, nothing]),
    )
    losses.sum().backward()
    for number, own in enumerate(clients):
        lines = [line for line, row in enumerate(rows) if row == number]
        alone = {name: tensor.clone().requires_grad_() for name, tensor in own.items()}
        log_probs, lengths = forward(alone, FEATURES[lines], LENGTHS[lines], settings=RELEASED)
        loss = ctc.mean_ctc_loss(log_probs, lengths, tokens[lines], token_lengths[lines])
        loss.backward()
        assert losses[number].item() == pytest.approx(loss.item(), rel=1e-9)
        for name in ("input.weight", "input.bias", "conv.weight"):
            gradient = stacked[name].grad
            assert gradient is not None
            assert alone[name].grad is not None
            assert torch.allclose(gradient[number], alone[name].grad, rtol=1e-6, atol=1e-9)
            assert alone[name].grad.any()
