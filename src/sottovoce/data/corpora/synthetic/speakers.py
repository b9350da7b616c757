"""Who is in the crowd: every speaker's voice, room, split and amount of speech, each from a stream of their own.

Speaker number i has the same voice, room, split and words in a crowd of any size (a small crowd is the beginning of
a large one); only how much they say is scaled to the whole.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import resources

import numpy as np
import yaml
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive, stream
from sottovoce.data.corpora.synthetic import espeak
from sottovoce.data.corpora.synthetic.rooms import NOISES, Room

Range = tuple[float, float]


@dataclass(frozen=True)
class Preset:
    """What a task's speakers say, how, where, and how much. Ranges are drawn from uniformly, once per speaker."""

    topics: tuple[str, ...]  # none: digit strings
    topic_concentration: float  # of the Dirichlet from which each speaker's topic mix is drawn
    words: tuple[int, int]  # sentences are added until there are this many (or digits, in a digit task)
    utterance_seconds: Range
    mean_seconds: float  # per speaker, unless `hours` says otherwise
    amount_spread: float  # log-normal sigma of the seconds per speaker
    accents: int  # how many of the language's accents are heard, the first ones
    tract: tuple[int, int]  # vocal tract length, in 32nds of the usual
    pitch: Range
    pitch_range: Range
    words_per_minute: Range
    snr_db: Range
    rt60_seconds: Range
    direct_db: Range
    level_db: Range
    low_cut_hz: Range
    high_cut_hz: Range
    tilt_db: Range
    peak_db: Range
    noises: tuple[str, ...]


_CROWD = Preset(
    topics=(
        *("home", "music", "messages", "calls", "shopping", "times"),
        *("numbers", "travel", "weather", "cooking", "questions", "chat"),
    ),
    topic_concentration=0.5,
    words=(1, 1),
    utterance_seconds=(1.0, 8.0),
    mean_seconds=54.0,
    # Table 2 of Pelikan et al.: mean 2.8 and std 32.7 minutes, so sqrt(log(1 + (32.7 / 2.8)^2)).
    amount_spread=2.22,
    accents=99,
    tract=(29, 35),
    pitch=(25, 75),
    pitch_range=(20, 80),
    words_per_minute=(135, 205),
    snr_db=(5, 30),
    rt60_seconds=(0.15, 0.7),
    direct_db=(0, 15),
    level_db=(-34, -20),
    low_cut_hz=(50, 250),
    high_cut_hz=(3500, 8000),
    tilt_db=(-2.5, 2.5),
    peak_db=(-6, 6),
    noises=NOISES,
)

_STUDIO = replace(
    _CROWD,
    topics=("stories", "chat", "questions", "travel", "weather", "cooking"),
    topic_concentration=2.0,
    words=(20, 30),
    utterance_seconds=(6.0, 15.0),
    mean_seconds=600.0,
    amount_spread=0.2,
    accents=1,
    tract=(32, 32),
    pitch=(40, 60),
    pitch_range=(40, 60),
    words_per_minute=(150, 180),
    snr_db=(38, 50),
    rt60_seconds=(0.08, 0.15),
    direct_db=(18, 25),
    level_db=(-25, -23),
    low_cut_hz=(40, 60),
    high_cut_hz=(7500, 8000),
    tilt_db=(-0.5, 0.5),
    peak_db=(-1, 1),
    noises=("hiss", "pink"),
)

# For quick starts: a crowd in quieter rooms, whose amounts are less unequal, so that minutes of a CPU are enough.
_DIGITS = replace(
    _CROWD,
    topics=(),
    words=(3, 8),
    mean_seconds=30.0,
    amount_spread=1.0,
    accents=3,
    snr_db=(20, 40),
    rt60_seconds=(0.1, 0.3),
    direct_db=(6, 20),
    high_cut_hz=(5000, 8000),
)

PRESETS: Mapping[str, Preset] = {
    "crowd": _CROWD,
    "studio": _STUDIO,
    "digits": _DIGITS,
    # The same people in noise, which a seed from a studio takes for speech: much to learn, and the same for everybody.
    "digits-noise": replace(_DIGITS, snr_db=(5, 20)),
    "digits-studio": replace(_STUDIO, topics=(), words=(6, 14), utterance_seconds=(2.0, 15.0), mean_seconds=120.0),
    # Ten words that stay hard to hear: the crowd's rooms, noises and microphones. Half of the speech is a seventh of
    # the people's, as in Common Voice Italian (99 of 748, says Gao et al.): the normal quantile of 1 - 99 / 748.
    "digits-crowd": replace(_CROWD, topics=(), words=(3, 8), mean_seconds=30.0, amount_spread=1.12),
}


_VOICES = yaml.safe_load((resources.files(__package__) / "voices.yaml").read_text(encoding="utf-8"))
ACCENTS: Mapping[str, Mapping[str, float]] = _VOICES["accents"]
VARIANTS: Mapping[str, Sequence[str]] = {gender: names.split() for gender, names in _VOICES["variants"].items()}
AGES: Mapping[str, Mapping[str, float]] = _VOICES["ages"]
SHORTEST_SECONDS = 1.2  # Table 2's smallest user has 0.02 minutes
# Table 2's largest has 5,049 of 34,753 x 2.8 minutes: 5 % of all. A speaker is rendered in one piece, hence 4 hours.
LARGEST_SHARE = 0.05
LARGEST_SECONDS = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class Voice:
    accent: str
    variant: str
    gender: str
    age: str
    pitch: int
    pitch_range: int
    words_per_minute: int
    tract: int  # vocal tract length in 32nds of the usual


@dataclass(frozen=True, slots=True)
class SyntheticSpeaker:
    """All it takes to synthesise one speaker."""

    name: str
    split: str
    task: str
    language: str
    seconds: float
    voice: Voice
    room: Room
    seed: int

    @property
    def metadata(self) -> dict[str, str]:
        return {
            "gender": self.voice.gender,
            "age": self.voice.age,
            "accent": self.voice.accent,
            "domain": self.task,
            "noise": self.room.noise,
            "snr_db": str(round(self.room.snr_db)),
        }


def draw_voice(preset: Preset, *, language: str, seed: int) -> Voice:
    rng = stream(seed, "voice")
    gender = "female" if rng.random() < 0.5 else "male"
    accents = dict(list(ACCENTS[language].items())[: preset.accents])
    age = _weighted({name: age["share"] for name, age in AGES.items()}, rng)
    return Voice(
        accent=_weighted(accents, rng),
        variant=VARIANTS[gender][int(rng.integers(len(VARIANTS[gender])))],
        gender=gender,
        age=age,
        pitch=round(float(np.clip(rng.uniform(*preset.pitch) + AGES[age]["pitch"], 0, 99))),
        pitch_range=round(rng.uniform(*preset.pitch_range)),
        words_per_minute=round(rng.uniform(*preset.words_per_minute) * AGES[age]["rate"]),
        tract=int(rng.integers(preset.tract[0], preset.tract[1] + 1)),
    )


def open_voice(voice: Voice, *, seed: int) -> AbstractContextManager[espeak.Say]:
    """espeak-ng with this voice, for the speaker with this seed."""
    return espeak.open_espeak(
        f"{voice.accent}+{voice.variant}",
        words_per_minute=voice.words_per_minute,
        pitch=voice.pitch,
        pitch_range=voice.pitch_range,
        seed=derive(seed, "espeak"),
    )


def _weighted(shares: Mapping[str, float], rng: np.random.Generator) -> str:
    """One of the names, each as often as its share."""
    names, bounds = list(shares), np.cumsum(list(shares.values()))
    return names[int(np.searchsorted(bounds, rng.random() * bounds[-1], side="right"))]


def draw_room(preset: Preset, *, seed: int) -> Room:
    rng = stream(seed, "room")

    def draw(limits: Range) -> float:
        return round(float(rng.uniform(*limits)), 3)

    return Room(
        rt60_seconds=draw(preset.rt60_seconds),
        direct_db=draw(preset.direct_db),
        noise=preset.noises[int(rng.integers(len(preset.noises)))],
        snr_db=draw(preset.snr_db),
        level_db=draw(preset.level_db),
        low_cut_hz=draw(preset.low_cut_hz),
        high_cut_hz=draw(preset.high_cut_hz),
        tilt_db=draw(preset.tilt_db),
        peak_hz=round(float(np.exp(rng.uniform(np.log(500), np.log(5000)))), 1),
        peak_db=draw(preset.peak_db),
        seed=derive(seed, "acoustics"),
    )


def assign_splits(users: int, splits: Mapping[str, float]) -> list[str]:
    """A split for each speaker: one each first, then always the split furthest behind its share.

    Speaker i's split never depends on how many come after.

    >>> assign_splits(5, {"train": 0.6, "dev": 0.2, "test": 0.2})
    ['train', 'dev', 'test', 'train', 'train']
    """
    names = list(splits)
    if not names or any(share <= 0 for share in splits.values()):
        raise InputError(f"splits={dict(splits)}: expected a positive share (or number of users) for each split")
    if users < len(names):
        raise InputError(f"users={users}: expected at least one for each of {', '.join(names)}")
    shares = np.array(list(splits.values())) / sum(splits.values())
    counts = np.zeros(len(names))
    assigned = []
    for user in range(users):
        chosen = user if user < len(names) else int(np.argmax(shares * (user + 1) - counts))
        counts[chosen] += 1
        assigned.append(names[chosen])
    return assigned


def draw_amounts(seeds: Sequence[int], *, spread: float, mean_seconds: float) -> NDArray[np.float64]:
    """Seconds of speech for each speaker: log-normal, within limits, and `mean_seconds` on average exactly.

    The heavy tail makes a plain sample's mean worthless (the largest of 2,000 draws can be half the total), so the
    draws are scaled until their mean fits, with nobody above `LARGEST_SHARE` of all speech.
    """
    raw = np.array([np.exp(spread * stream(seed, "amount").normal()) for seed in seeds])
    shortest = min(SHORTEST_SECONDS, mean_seconds)
    largest = min(max(LARGEST_SHARE * len(seeds), 10.0) * mean_seconds, LARGEST_SECONDS)

    def amounts(scale: float) -> NDArray[np.float64]:
        return np.clip(scale * raw, shortest, largest)

    low, high = 0.0, largest / raw.min()
    for _ in range(100):  # bisection: the mean grows with the scale, from `shortest` to `largest`
        middle = (low + high) / 2
        low, high = (middle, high) if amounts(middle).mean() < mean_seconds else (low, middle)
    return amounts(high)
