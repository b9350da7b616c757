"""A crowd of synthetic speakers: the corpus that is always at hand, of any size and from one seed.

    seed ──► speakers.py (voice, room, amount) ──► sentences.py ──► espeak.py ──► rooms.py ──► int16 at 16 kHz

`studio` is what a server might own (few clean voices, long read sentences), `crowd` what its users hold (thousands,
a little noisy speech each); `digits` and `digits-studio` are the same with ten words, for quick starts,
`digits-noise` has them in noise, and `digits-crowd` in the crowd's noise and rooms.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive, stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Corpus, RenderedSpeaker, RenderedUtterance
from sottovoce.data.corpora.synthetic import espeak
from sottovoce.data.corpora.synthetic.rooms import BLOCK, make_recorder
from sottovoce.data.corpora.synthetic.sentences import LANGUAGES, draw_digits, draw_sentence, load_grammar
from sottovoce.data.corpora.synthetic.speakers import (
    LARGEST_SECONDS,
    PRESETS,
    VARIANTS,
    Preset,
    SyntheticSpeaker,
    assign_splits,
    draw_amounts,
    draw_room,
    draw_voice,
    open_voice,
)
from sottovoce.data.text.normalisation import normalise_text

__all__ = ["LANGUAGES", "PRESETS", "SyntheticSpeaker", "read_synthetic", "render_speaker"]

SPLITS: Mapping[str, float] = {"train": 0.8, "dev": 0.1, "test": 0.1}
# Sentences in a row that may turn out too long or too short for the task before it is our mistake.
MOST_REDRAWS = 200
MOST_USERS = 1_000_000  # their names have six digits, and listing more takes minutes and gigabytes
SAMPLE_BYTES = 2


def read_synthetic(
    task: str,
    *,
    users: int,
    hours: float | None = None,
    seed: int,
    language: str = "en",
    splits: Mapping[str, float] = SPLITS,
    out: Path | None = None,
) -> Corpus[SyntheticSpeaker]:
    """List the speakers of a synthetic corpus; nothing is spoken before `render_speaker`.

    `task` names a preset, `hours` is the whole corpus's speech (by default `users` times the preset's mean), and
    `splits` shares the users out: fractions or numbers of users. Hours are shared in proportion to users. So much
    speech must fit on the disk of `out`, the store to be written.

    >>> corpus = read_synthetic("digits", users=20, seed=1)
    >>> [speaker.name for speaker in corpus.speakers if speaker.split == "dev"]
    ['digits-000001', 'digits-000013']
    """
    preset = _preset(task)
    load_grammar(language)
    if not 1 <= users <= MOST_USERS:
        raise InputError(f"users={users}: expected at least 1, and at most {MOST_USERS:,}")
    if hours is not None and not 0 < hours < float("inf"):
        raise InputError(f"hours={hours}: expected a positive number")
    mean_seconds = preset.mean_seconds if hours is None else hours * 3600 / users
    shortest, _ = preset.utterance_seconds
    if mean_seconds > LARGEST_SECONDS:
        raise InputError(f"hours={hours}, users={users}: expected at most {LARGEST_SECONDS / 3600:g} hours per user")
    if mean_seconds < shortest:
        least = users * shortest / 3600
        raise InputError(
            f"hours={hours}, users={users}: expected at least {least:.3g} hours, one utterance of {shortest:g} s each"
        )
    if out is not None:
        _check_disk_space(users * mean_seconds, out)
    espeak.require_espeak(language, variants=frozenset().union(*VARIANTS.values()))

    seeds = [derive(seed, "synthetic", task, language, index) for index in range(users)]
    assigned = assign_splits(users, splits)
    seconds = np.zeros(users)
    # Each split is a heavy-tailed crowd in itself, or a single speaker could decide the test score.
    for split in splits:
        members = [index for index, name in enumerate(assigned) if name == split]
        seconds[members] = draw_amounts(
            [seeds[index] for index in members], spread=preset.amount_spread, mean_seconds=mean_seconds
        )
    speakers = [
        SyntheticSpeaker(
            name=f"{task}-{index:06d}",
            split=assigned[index],
            task=task,
            language=language,
            seconds=float(seconds[index]),
            voice=draw_voice(preset, language=language, seed=seeds[index]),
            room=draw_room(preset, seed=seeds[index]),
            seed=seeds[index],
        )
        for index in range(users)
    ]
    speakers.sort(key=lambda speaker: (speaker.split, speaker.name))
    return Corpus(f"synthetic-{task}", language, speakers, render_speaker)


def render_speaker(speaker: SyntheticSpeaker) -> RenderedSpeaker:
    """Synthesise one speaker: the same samples in any process, whatever was rendered before."""
    preset = _preset(speaker.task)
    voice = speaker.voice
    shortest, longest = preset.utterance_seconds
    record = make_recorder(speaker.room, tract=voice.tract, longest_seconds=longest)
    texts, takes = stream(speaker.seed, "texts"), stream(speaker.seed, "takes")
    topics = texts.dirichlet([preset.topic_concentration] * len(preset.topics)) if preset.topics else np.ones(1)
    utterances: list[RenderedUtterance] = []
    spoken, redraws = 0.0, 0
    with open_voice(voice, seed=speaker.seed) as say:
        # Stop where one more utterance would miss the amount by more than it now does.
        while not utterances or spoken + spoken / len(utterances) / 2 < speaker.seconds:
            raw_text = _utterance_text(preset, language=speaker.language, topics=topics, rng=texts)
            samples = say(raw_text)
            seconds = len(samples) / BLOCK * 10 * voice.tract / SAMPLE_RATE
            if not shortest <= seconds <= longest:
                redraws += 1
                assert redraws <= MOST_REDRAWS, f"{speaker.name}: nothing between {shortest} and {longest} seconds"
                continue
            redraws = 0
            recording = record(samples, takes)
            spoken += len(recording) / SAMPLE_RATE
            utterances.append(
                RenderedUtterance(
                    id=f"{speaker.name}-{len(utterances):05d}",
                    samples=recording,
                    text=normalise_text(raw_text, speaker.language),
                    raw_text=raw_text,
                )
            )
    return RenderedSpeaker(name=speaker.name, split=speaker.split, utterances=utterances, metadata=speaker.metadata)


def _check_disk_space(seconds: float, out: Path) -> None:
    """Refuse what the disk cannot hold now, rather than after days of synthesis."""
    needed = seconds * SAMPLE_RATE * SAMPLE_BYTES
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(
            f"{seconds / 3600:,.0f} hours of speech take {needed / 1e9:,.1f} GB, {place} has {free / 1e9:,.1f} GB left"
        )


def _utterance_text(preset: Preset, *, language: str, topics: NDArray[np.float64], rng: np.random.Generator) -> str:
    count = int(rng.integers(preset.words[0], preset.words[1] + 1))
    if not preset.topics:
        return draw_digits(language, count=count, rng=rng)
    topic = preset.topics[int(rng.choice(len(preset.topics), p=topics))]
    text = draw_sentence(load_grammar(language), topic=topic, rng=rng)
    while text.count(" ") + 1 < count:
        text += " " + draw_sentence(load_grammar(language), topic=topic, rng=rng)
    return text


def _preset(task: str) -> Preset:
    if task not in PRESETS:
        raise InputError(f"task={task!r}: expected one of {', '.join(PRESETS)}")
    return PRESETS[task]
