"""Speech small enough to train on in a test: tones for letters, spoken by people who differ in pitch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from sottovoce.base.seeds import stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.store import pack_corpus


def say(text: str, *, pitch: float) -> np.ndarray:
    """A fifth of a second per letter, each letter a tone of its own."""
    seconds = np.arange(SAMPLE_RATE // 5) / SAMPLE_RATE
    tones = [np.sin(2 * np.pi * (200 + 180 * (ord(letter) - 97)) * pitch * seconds) for letter in text]
    return (np.concatenate(tones) * 8000).astype(np.int16)


def speaker(number: int, *, letters: tuple[int, int] = (3, 6), utterances: int = 4) -> RenderedSpeaker:
    """Speaker `number` with words of so many letters; of every five, three train, one is dev and one test."""
    split = ("train", "train", "train", "dev", "test")[number % 5]
    rng = stream(1, "speaker", number)
    texts = ["".join(rng.choice(list("abcde"), size=rng.integers(letters[0], letters[1] + 1))) for _ in range(4)]
    spoken = [
        RenderedUtterance(id=f"{number}-{i}", samples=say(text, pitch=1 + number / 100), text=text, raw_text=text)
        for i, text in enumerate(texts[:utterances])
    ]
    return RenderedSpeaker(name=f"s{number:02}", split=split, utterances=spoken, metadata={"gender": "female"})


def identity(rendered: RenderedSpeaker) -> RenderedSpeaker:
    return rendered


def rename(name: str, other: str) -> Callable[[RenderedSpeaker], RenderedSpeaker]:
    """The speaker called `name` is called `other`."""
    return lambda rendered: replace(rendered, name=other) if rendered.name == name else rendered


FEW_WORDS: dict[str, Any] = {"letters": (2, 3), "utterances": 2}  # each person's


def pack_tones(
    place: Path,
    *,
    people: Sequence[int] = range(15),
    language: str = "en",
    letters: tuple[int, int] = (3, 6),
    utterances: int = 4,
    change: Callable[[RenderedSpeaker], RenderedSpeaker] = identity,
) -> None:
    """A store of the speakers numbered `people`, three in five of them to train on, each with a `change` made to it."""
    rendered = [change(speaker(number, letters=letters, utterances=utterances)) for number in people]
    rendered.sort(key=lambda one: (one.split, one.name))
    pack_corpus(Corpus("tones", language, rendered, identity, ProblemLog()), place, workers=1)


def write_recordings(place: Path, rendered: RenderedSpeaker) -> None:
    """Somebody's speech as they have it themselves: audio files with their texts beside them."""
    place.mkdir(parents=True)
    for said in rendered.utterances:
        soundfile.write(place / f"{said.id}.wav", said.samples, SAMPLE_RATE)
        (place / f"{said.id}.txt").write_text(said.text or "")
