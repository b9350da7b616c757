"""Small recognisers that have learned to read tones, and those tones: texts of untrained models would show little."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tones import say

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.audio.waveforms import pad_waveforms
from sottovoce.data.text.tokens import CharacterTokens, Tokens, train_sentence_pieces
from sottovoce.models.family import DEFAULT, extract_float32_features, find_family
from sottovoce.models.recogniser import Recogniser, create_recogniser

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where exported models are run without torch

STREAMED: dict[str, Any] = {"family": "transducer", "input": "filterbanks", "prediction": "stateless"}
OPTIONS: dict[str, tuple[dict[str, Any], int]] = {  # of a tiny model, and steps
    "ctc_transformer": ({"layers": 2, "width": 48, "dropout": 0.0, "layer_drop": 0.0}, 90),
    "crdnn": ({"family": "crdnn", "dropout": 0.0, "mu": 0.0}, 50),
    "transducer": ({"family": "transducer"}, 300),
    "streamed": (STREAMED, 300),
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
    options, steps = OPTIONS[name]
    tokens = train_sentence_pieces(WORDS * 20, size=9) if pieces else CharacterTokens("abcde")
    return teach(tones(), WORDS, tokens=tokens, options=options, steps=steps)


def teach(
    spoken: Sequence[np.ndarray], texts: Sequence[str], *, tokens: Tokens, options: Mapping[str, Any], steps: int
) -> Recogniser:
    """A tiny recogniser that has learned so much by heart."""
    family = find_family(options.get("family", DEFAULT))
    settings = family.Options(size="tiny", **options).settings(tokens=tokens.size + 1)
    made = create_recogniser(family, settings, tokens, language="en", generator=torch_stream(2, "model", family.name))
    weights = {key: p.requires_grad_() for key, p in made.parameters.items()}
    speech = pad_waveforms(list(spoken), [tokens.encode(text) for text in texts])
    features = extract_float32_features(family, speech, settings=settings)
    optimiser = torch.optim.Adam(weights.values(), lr=5e-3)
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
