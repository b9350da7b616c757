"""A store small enough to train on in a test: tones for letters."""

from pathlib import Path

import numpy as np
import pytest

from sottovoce.corpora.corpus import SAMPLE_RATE, Corpus, RenderedSpeaker, RenderedUtterance
from sottovoce.corpora.problems import ProblemLog
from sottovoce.seeds import stream
from sottovoce.store import pack


def say(text: str, *, pitch: float) -> np.ndarray:
    """A fifth of a second per letter, each letter a tone of its own."""
    seconds = np.arange(SAMPLE_RATE // 5) / SAMPLE_RATE
    tones = [np.sin(2 * np.pi * (200 + 180 * (ord(letter) - 97)) * pitch * seconds) for letter in text]
    return (np.concatenate(tones) * 8000).astype(np.int16)


def speaker(number: int) -> RenderedSpeaker:
    split = ("train", "train", "train", "dev", "test")[number % 5]
    rng = stream(1, "speaker", number)
    texts = ["".join(rng.choice(list("abcde"), size=rng.integers(3, 7))) for _ in range(4)]
    spoken = [
        RenderedUtterance(id=f"{number}-{i}", samples=say(text, pitch=1 + number / 100), text=text, raw_text=text)
        for i, text in enumerate(texts)
    ]
    return RenderedSpeaker(name=f"s{number:02}", split=split, utterances=spoken, metadata={"gender": "female"})


def identity(rendered: RenderedSpeaker) -> RenderedSpeaker:
    return rendered


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    speakers = sorted(map(speaker, range(15)), key=lambda s: (s.split, s.name))
    pack(Corpus("tones", "en", speakers, identity, ProblemLog()), folder / "tones", workers=1)
    return folder


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tones.yaml"
    path.write_text(
        """
about: tones
data: {store: tones}
model: {size: tiny, dropout: 0.1, layer_drop: 0.2}
central:
  steps: 12
  batch_seconds: 4
  optimiser: {name: lars}
  schedule: {name: constant, lr: 0.5}
  augment: {speeds: [0.9, 1.0], noise: {}}
  evaluate_every: 5
  checkpoint_every: 3
  log_every: 2
"""
    )
    return path
