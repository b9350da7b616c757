"""Small recognisers that have learned to read tones, and those tones: texts of untrained models would show little."""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tones import say

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.audio.waveforms import pad_waveforms
from sottovoce.data.text.tokens import CharacterTokens, train_sentence_pieces
from sottovoce.models.family import extract_float32_features, find_family
from sottovoce.models.recogniser import Recogniser, create_recogniser

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where exported models are run without torch

OPTIONS: dict[str, tuple[dict[str, Any], int, float]] = {  # of a tiny model, steps and rate
    "ctc_transformer": ({"layers": 2, "width": 48, "dropout": 0.0, "layer_drop": 0.0}, 90, 5e-3),
    "crdnn": ({"dropout": 0.0, "mu": 0.0}, 50, 5e-3),
    "transducer": ({}, 300, 5e-3),
}
WORDS = ("abc", "dead", "bee", "cab", "ace", "dab", "ebb", "add", "deed", "cede")


def tones(*, pitches: Sequence[float] = (1.0,), noise: int = 40) -> list[np.ndarray]:
    """The words, in noise of at most so much."""
    spoken = [say(word, pitch=pitch) for pitch in pitches for word in WORDS]
    added = stream(5, "noise")
    return [own + added.integers(-noise, noise, len(own)).astype(np.int16) for own in spoken]


def noisy_tones(**options: Any) -> list[np.ndarray]:
    """The same, to compare numbers by.

    Beside a clear tone, other filters of a frame hold little but what rounding leaves there: float32's 6e-8 of the
    peak is up to 3e-4 of their logarithm, in our features as in the graph's (float64 says so of both).
    """
    return tones(noise=2_500, **options)


@cache
def train(name: str, *, pieces: bool = False) -> Recogniser:
    family, (options, steps, rate) = find_family(name), OPTIONS[name]
    tokens = train_sentence_pieces(WORDS * 20, size=9) if pieces else CharacterTokens("abcde")
    settings = family.Options(family=name, size="tiny", **options).settings(tokens=tokens.size + 1)
    made = create_recogniser(family, settings, tokens, language="en", generator=torch_stream(2, "model", name))
    weights = {key: p.requires_grad_() for key, p in made.parameters.items()}
    speech = pad_waveforms(tones(), [tokens.encode(word) for word in WORDS])
    features = extract_float32_features(family, speech, settings=settings)
    optimiser = torch.optim.Adam(weights.values(), lr=rate)
    for _ in range(steps):
        optimiser.zero_grad()
        family.loss(weights, features, settings=settings, draws=None).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 5.0)
        optimiser.step()
    parameters = {key: p.detach() for key, p in weights.items()}
    return Recogniser(family, settings, tokens, parameters, "en")


@pytest.fixture(scope="session")
def trained() -> Callable[..., Recogniser]:
    """A recogniser of a family that reads most of the tones."""
    return train


def as_floats(samples: np.ndarray) -> np.ndarray:
    return samples.astype(np.float32) / 32_768
