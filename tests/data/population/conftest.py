from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sottovoce.base.seeds import name_key
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.store import Store, pack_corpus

# (split, name) → the length in samples of each utterance
Crowd = Mapping[tuple[str, str], Sequence[int]]


@dataclass(frozen=True)
class Named:
    name: str


class IndexInMemory:
    """The part of a store that populations read, without the audio: quick enough for property tests."""

    name, digest = "crowd", "0123"

    def __init__(self, crowd: Crowd) -> None:
        people = sorted(crowd)
        self.names = [name for _, name in people]
        self.splits = {}
        for row, (split, _) in enumerate(people):
            self.splits[split] = range(self.splits.get(split, range(row, row)).start, row + 1)
        self.user_keys = np.array([name_key(name) for name in self.names], dtype=np.uint64)
        self.user_utterances = np.cumsum([0, *(len(crowd[person]) for person in people)], dtype=np.int64)
        self.audio_offsets = np.cumsum([0, *(n for person in people for n in crowd[person])], dtype=np.int64)

    def user(self, row: int) -> Named:
        return Named(self.names[row])


@pytest.fixture(scope="session")
def index() -> Callable[[Crowd], IndexInMemory]:
    return IndexInMemory


@pytest.fixture
def packed(tmp_path: Path) -> Callable[[Crowd], Store]:
    """A real store of silence."""

    def pack_silence(crowd: Crowd) -> Store:
        speakers = [
            RenderedSpeaker(
                name=name,
                split=split,
                utterances=[RenderedUtterance(f"{i}", np.zeros(n, np.int16), "", "") for i, n in enumerate(lengths)],
            )
            for (split, name), lengths in sorted(crowd.items())
        ]
        corpus = Corpus(name="crowd", language="en", speakers=speakers, render=_same, problems=ProblemLog())
        pack_corpus(corpus, tmp_path / "store", workers=1)
        return Store(tmp_path / "store")

    return pack_silence


def _same(speaker: RenderedSpeaker) -> RenderedSpeaker:
    return speaker
