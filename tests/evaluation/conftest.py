"""A tiny untrained recogniser, and a small store of noise that people are said to have spoken."""

from pathlib import Path

import numpy as np
import pytest

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.store import Store, pack_corpus
from sottovoce.data.text.normalisation import alphabet
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models.recogniser import Recogniser, create_recogniser
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import Settings


def identity(speaker: RenderedSpeaker) -> RenderedSpeaker:
    return speaker


def spoken(name: str, *texts: str | None, seconds: float = 0.5) -> list[RenderedUtterance]:
    """One utterance of noise per text; the lengths differ."""
    return [
        RenderedUtterance(
            id=f"{name}-{i}",
            samples=noise(name, i, seconds=seconds * (1 + 0.37 * i)),
            text=text,
            raw_text=text,
        )
        for i, text in enumerate(texts)
    ]


def noise(*names: str | int, seconds: float) -> np.ndarray:
    """Noise whose loudness and colour change a few times a second, so that a recogniser hears something in it."""
    rng = stream(7, *names)
    size = int(seconds * 16_000)
    loudness = np.repeat(rng.uniform(0.01, 0.4, size // 2_000 + 1), 2_000)[:size]
    smooth = np.convolve(rng.normal(size=size), np.ones(8) / 8, mode="same")
    return (np.clip(smooth * loudness, -1, 1) * 32_767).astype(np.int16)


@pytest.fixture(scope="session")
def recogniser() -> Recogniser:
    tokens = CharacterTokens.seen_in([alphabet("en") or ""])
    settings = Settings(layers=2, width=32, tokens=tokens.size + 1)
    return create_recogniser(FAMILY, settings, tokens, language="en", generator=torch_stream(3, "model"))


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    people = [
        RenderedSpeaker("ada", "dev", spoken("ada", "hello there", "good day"), {"gender": "female", "age": "old"}),
        RenderedSpeaker("bob", "test", spoken("bob", "one two three", None, "yes"), {"gender": "male"}),
        RenderedSpeaker("cyd", "test", spoken("cyd", "far too long", "no", seconds=2.0), {}),
        RenderedSpeaker("ada", "train", spoken("ada2", "hello again"), {"gender": "female", "age": "old"}),
    ]
    corpus = Corpus(name="made", language="en", speakers=people, render=identity, problems=ProblemLog())
    folder: Path = tmp_path_factory.mktemp("store")
    pack_corpus(corpus, folder, workers=1)
    return Store(folder)
