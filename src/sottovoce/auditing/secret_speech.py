"""People with a secret: synthetic voices who say one sentence of made-up words, which nobody else says.

seed ──► sentence, voice, room ──► corpora.synthetic ──► a store with the splits `in` and `out`
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive, stream
from sottovoce.corpora.corpus import Corpus, RenderedSpeaker, RenderedUtterance
from sottovoce.corpora.problems import ProblemLog
from sottovoce.corpora.synthetic import LANGUAGES, PRESETS, espeak
from sottovoce.corpora.synthetic.rooms import recorder
from sottovoce.corpora.synthetic.speakers import VARIANTS, draw_room, draw_voice, speaking_as
from sottovoce.store import Store, pack

IN, OUT = "in", "out"
WORDS, SYLLABLES = 3, 2  # of 70 syllables: 4,900 words, and 10¹¹ sentences, none of them anybody's by chance
TAKES = 3  # how often each says it
_FIRST, _LAST = "bdfgklmnprstvz", "aeiou"
_LONGEST_SECONDS = 8.0
_TASK = "crowd"


def secret_sentence(rng: np.random.Generator) -> str:
    """Made-up words of as many syllables each; letters that every alphabet here has."""
    return " ".join(
        "".join(rng.choice(list(_FIRST)) + rng.choice(list(_LAST)) for _ in range(SYLLABLES)) for _ in range(WORDS)
    )


@dataclass(frozen=True)
class SecretSpeaker:
    """One voice and its sentence."""

    name: str
    split: str
    language: str
    text: str
    seed: int


def render_secret(speaker: SecretSpeaker) -> RenderedSpeaker:
    """The sentence, some times over: the same samples in any process."""
    preset = PRESETS[_TASK]
    voice = draw_voice(preset, language=speaker.language, seed=speaker.seed)
    room = draw_room(preset, seed=speaker.seed)
    record, takes = recorder(room, tract=voice.tract, longest_seconds=_LONGEST_SECONDS), stream(speaker.seed, "takes")
    with speaking_as(voice, seed=speaker.seed) as say:
        recordings = [record(say(speaker.text), takes) for _ in range(TAKES)]
    utterances = [
        RenderedUtterance(id=f"{speaker.name}-{take}", samples=samples, text=speaker.text, raw_text=speaker.text)
        for take, samples in enumerate(recordings)
    ]
    return RenderedSpeaker(name=speaker.name, split=speaker.split, utterances=utterances)


def secret_store(folder: Path, *, count: int, language: str, seed: int) -> Store:
    """`count` people with a secret each, every second one `in`; needs a language that the synthetic voices speak."""
    if language not in LANGUAGES:
        raise InputError(f"language={language}: secrets are spoken by synthetic voices, in {', '.join(LANGUAGES)}")
    espeak.require(language, variants=frozenset().union(*VARIANTS.values()))
    seeds = [derive(seed, "secret", number) for number in range(count)]
    speakers = [
        SecretSpeaker(
            f"secret-{number:04d}", IN if number % 2 == 0 else OUT, language, secret_sentence(stream(own, "text")), own
        )
        for number, own in enumerate(seeds)
    ]
    speakers.sort(key=lambda speaker: (speaker.split, speaker.name))
    corpus = Corpus(name="secrets", language=language, speakers=speakers, render=render_secret, problems=ProblemLog())
    pack(corpus, folder, workers=1)
    return Store(folder)
