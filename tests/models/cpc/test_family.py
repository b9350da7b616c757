"""Contrastive predictive coding as a family: sizes, no look-ahead, padding, draws, learning, and what it hands on."""

from math import log, prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.audio.waveforms import pad_waveforms
from sottovoce.data.text.tokens import NO_TOKENS, CharacterTokens
from sottovoce.models import speech_lstm
from sottovoce.models.cpc.family import FAMILY, Options, draw, loss, measure, unusable
from sottovoce.models.cpc.loss import accuracies, contrast
from sottovoce.models.cpc.settings import Settings, init, parameter_shapes
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, adapt_parameters
from sottovoce.models.speech_lstm import EncoderSettings, encode_features, encoder_shapes, extract_features

ENCODER = EncoderSettings(dense_layers=2, dense_width=12, lstm_layers=2, lstm_width=10)
SETTINGS = Settings(encoder=ENCODER, ahead=4, candidates=8)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64, and no sum of more than a few hundred products


def noise(samples: int, *, seed: int = 1) -> Any:
    """Louder and softer, some three times a second."""
    level = 10.0 ** (2 + 2 * np.sin(np.arange(samples) / 900 + seed))
    return (level * stream(seed, "noise").uniform(-1, 1, size=samples)).astype(np.int16)


def weights() -> dict[str, Tensor]:
    return {name: p.double().requires_grad_() for name, p in init(SETTINGS, generator=torch_stream(5, "init")).items()}


def features_of(*utterances: Any) -> Any:
    return extract_features(pad_waveforms(list(utterances)), settings=SETTINGS, dtype=torch.float64)


def test_the_papers_size_has_the_papers_parameters() -> None:
    """An encoder of 49,202,688, and 12 · (1,024 · 512 + 512) for predictions."""
    shapes = parameter_shapes(Options().settings())
    predictions = [prod(shape) for name, shape in shapes.items() if name.startswith("prediction.")]
    assert sum(predictions) == 6_297_600
    assert sum(map(prod, shapes.values())) == 49_202_688 + 6_297_600


@pytest.mark.parametrize("size", ["tiny", "small", "ramesh"])
def test_its_encoder_is_the_transducers_tensor_by_tensor(size: str) -> None:
    ours, theirs = (find_family(name).Options(size=size).settings(tokens=30) for name in ("cpc", "transducer"))
    names = find_family("transducer").transfer.inherited(ours, theirs)
    shapes = find_family("transducer").shapes(theirs)
    assert names == frozenset(encoder_shapes(ours.encoder))
    assert {name: parameter_shapes(ours)[name] for name in names} == {name: shapes[name] for name in names}


def test_a_transducer_starts_from_it() -> None:
    transducer = find_family("transducer")
    options: dict[str, Any] = {"size": "tiny"}
    ours, theirs = Options(**options).settings(), transducer.Options(**options).settings(tokens=6)
    seed = Recogniser(FAMILY, ours, NO_TOKENS, init(ours, generator=torch_stream(1, "init")), "en")
    tokens = CharacterTokens("abcde")
    found = adapt_parameters(seed, theirs, tokens, family=transducer, generator=torch_stream(2, "init"))
    for name in encoder_shapes(ours.encoder):
        assert torch.equal(found[name], seed.parameters[name])
    assert found.keys() == transducer.shapes(theirs).keys()


def test_no_context_looks_ahead() -> None:
    """Whatever is said after a step's last window changes nothing, and what is said in it does."""
    before, parameters = noise(16_000), weights()
    expected, lengths = encode_features(parameters, features_of(before), settings=SETTINGS)
    step = 12
    end = (step + 1) * 480 + 240  # a step of 30 ms, and 15 ms of its last frame's window
    after = before.copy()
    after[end:] = noise(16_000, seed=3)[end:]
    found, _ = encode_features(parameters, features_of(after), settings=SETTINGS)
    assert lengths.tolist() == [32]
    torch.testing.assert_close(found[:, : step + 1], expected[:, : step + 1], **CLOSE)
    assert not torch.allclose(found[:, step + 1], expected[:, step + 1])


def test_padding_changes_no_loss_and_no_gradient() -> None:
    """With the same draws for each utterance, alone or beside a longer one."""
    short, long = noise(5_000), noise(9_000, seed=2)
    (draws,) = draw(SETTINGS, [2], samples=[9_000], generator=torch_stream(1, "draws"))
    found = []
    for utterances, own in (([short], draws[:1]), ([long], draws[1:]), ([short, long], draws)):
        parameters = weights()
        value = loss(parameters, features_of(*utterances), settings=SETTINGS, draws=own)
        found.append([value, *torch.autograd.grad(value, list(parameters.values()))])
    for one, other, both in zip(*found, strict=True):
        torch.testing.assert_close(both, (one + other) / 2, **CLOSE)


def test_what_chance_decides_is_drawn_before() -> None:
    """As large as the batch needs, the same for the same generator, and another for another step."""
    options: dict[str, Any] = {"settings": SETTINGS, "utterances": [2, 3], "samples": [9_000, 5_000]}
    first, again = (draw(**options, generator=torch_stream(1, "draws")) for _ in range(2))
    assert [tuple(own.shape) for own in first] == [(2, 18, 7), (3, 9, 7)]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    parameters, features = weights(), features_of(noise(9_000), noise(8_000, seed=2))
    values = [
        loss(parameters, features, settings=SETTINGS, draws=own)
        for own in (first[0], again[0], draw(**options, generator=torch_stream(2, "draws"))[0])
    ]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_all_predictions_need_a_step() -> None:
    """K = 4: five steps, fifteen frames, of which the last begins 14 hops after the first."""
    samples = 400 + 14 * 160
    assert unusable(SETTINGS, samples, []) is None
    assert unusable(SETTINGS, samples - 1, []) == "too short for all predictions"
    assert loss(weights(), features_of(noise(samples)), settings=SETTINGS, draws=None).item() > 0


def test_it_learns_to_tell_what_comes_next() -> None:
    """From chance, of which it knows."""
    features, parameters = features_of(noise(12_000), noise(10_000, seed=2)), weights()
    before = {name: value.item() for name, value in measure(parameters, features, settings=SETTINGS).items()}
    optimiser = torch.optim.Adam(parameters.values(), lr=0.01)
    generator = torch_stream(3, "draws")
    for _ in range(60):
        (draws,) = draw(SETTINGS, [2], samples=[12_000], generator=generator)
        optimiser.zero_grad()
        loss(parameters, features, settings=SETTINGS, draws=draws).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    after = {name: value.item() for name, value in measure(parameters, features, settings=SETTINGS).items()}
    assert before["chance"] == 1 / 8
    assert before["loss"] == pytest.approx(4 * log(8), rel=0.1)
    assert before["accuracy"] < 0.4
    assert after["accuracy"] > 0.7
    assert after["loss"] < before["loss"] / 2


def test_the_loss_among_its_figures_is_that_of_evaluation() -> None:
    parameters, features = weights(), features_of(noise(12_000), noise(10_000, seed=2))
    found = measure(parameters, features, settings=SETTINGS)
    assert torch.equal(found["loss"], loss(parameters, features, settings=SETTINGS, draws=None))
    accuracy_U = accuracies(*contrast(parameters, features, settings=SETTINGS, draws=None))
    assert torch.equal(found["accuracy"], accuracy_U.mean())


def test_half_precision_is_near() -> None:
    """bfloat16 as on a GPU: its rounding of 2⁻⁸, through two dense layers, two LSTMs and a product, on 4 log 8."""
    features, parameters = features_of(noise(12_000)), {name: p.detach() for name, p in weights().items()}
    rough = {name: p.bfloat16() for name, p in parameters.items()}
    found = loss(rough, features, settings=SETTINGS, draws=None)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(loss(parameters, features, settings=SETTINGS, draws=None)), rel=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": "huge"}, "size='huge', expected one of tiny, small, ramesh"),
        ({"ahead": 0}, "ahead=0, expected at least 1"),
        ({"candidates": 1}, "candidates=1, expected at least 2"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Options(**options)


def test_scores_are_divided_by_the_root_of_the_width() -> None:
    assert Options().settings().scale == pytest.approx(512**-0.5)
    assert speech_lstm.SIZES["ramesh"] == Options().settings().encoder
