"""The synthetic corpora on offer. A further one is one more entry of `PRESETS`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sottovoce.corpora.synthetic.rooms import NOISES

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

PRESETS: Mapping[str, Preset] = {
    "crowd": _CROWD,
    "studio": _STUDIO,
    # For quick starts: a crowd in quieter rooms, whose amounts are less unequal, so that minutes of a CPU are enough.
    "digits": replace(
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
    ),
    "digits-studio": replace(_STUDIO, topics=(), words=(6, 14), utterance_seconds=(2.0, 15.0), mean_seconds=120.0),
    # Ten words that stay hard to hear: the crowd's rooms, noises and microphones. Half of the speech is a seventh of
    # the people's, as in Common Voice Italian (99 of 748, says Gao et al.): the normal quantile of 1 - 99 / 748.
    "digits-crowd": replace(_CROWD, topics=(), words=(3, 8), mean_seconds=30.0, amount_spread=1.12),
}
