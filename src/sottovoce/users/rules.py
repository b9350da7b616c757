"""What a recipe says about its clients, checked on its own; what needs the store to be checked is checked there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from sottovoce.errors import InputError

ClientRule = Literal["speaker", "device", "silo", "iid", "iid_uniform"]
DEALT: frozenset[ClientRule] = frozenset({"iid", "iid_uniform"})  # rules that deal out utterances, and no speakers
Part = Literal["federation", "seed"]


@dataclass(frozen=True, kw_only=True)
class SeedPart:
    """Which speakers are set aside to train the seed model; exactly one of these is given.

    `fraction`: that share of the speakers, at random (CV-en-train-10 is 0.1), rounded down as in the paper.
    `most_data_share`: the fewest speakers who together hold that share of the audio.
    `most_utterances_share`: the fewest speakers who together hold that share of the utterances (0.5 in Gao et al., who
    count "samples").

    Guarantee: none for those in it, nor for which side somebody is on; both are decided, and public, before the run.
    """

    fraction: float | None = None
    most_data_share: float | None = None
    most_utterances_share: float | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise InputError(
                f"seed_part: expected exactly one of {', '.join(vars(self))}, found {' and '.join(given) or 'none'}"
            )
        for name in ("fraction", "most_data_share", "most_utterances_share"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise InputError(f"seed_part.{name}={value}: expected a number between 0 and 1, both excluded")


@dataclass(frozen=True, kw_only=True)
class PopulationSettings:
    """Who is a client.

    `split` is one split of the store or several, taken together. With a `seed_part`, `part` says which side this
    population is: the speakers of the seed model, or the rest. `speakers_per_device` and `silos` belong to the client
    rules of those names. `iid` deals all utterances out at random, to each client as many as a speaker had;
    `iid_uniform` draws a client for every utterance, as the paper's Tables 5 and 6 do. A client below `min_seconds` is
    left out (never a silo: how many there are is public); one above `max_seconds` keeps a random choice of its
    utterances. `holdout` is the share of each client's utterances kept to test on that client (Gao et al.: 0.1).
    """

    split: str | Sequence[str]
    clients: ClientRule = "speaker"
    speakers_per_device: int | None = None
    silos: int | None = None
    min_seconds: float | None = None
    max_seconds: float | None = None
    holdout: float | None = None
    seed_part: SeedPart | None = None
    part: Part = "federation"

    def __post_init__(self) -> None:
        if not self.splits:
            raise InputError("split: expected at least one name")
        if self.clients not in get_args(ClientRule):
            raise InputError(f"clients={self.clients}: expected one of {', '.join(get_args(ClientRule))}")
        if self.part not in get_args(Part):
            raise InputError(f"part={self.part}: expected one of {', '.join(get_args(Part))}")
        if self.part == "seed" and self.seed_part is None:
            raise InputError("part=seed: expected a seed_part that says who is in it")
        self._check_counts()
        self._check_amounts()

    @property
    def deals_utterances(self) -> bool:
        """Whether clients hold utterances of anybody, in place of people."""
        return self.clients in DEALT

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,) if isinstance(self.split, str) else tuple(dict.fromkeys(self.split))

    def _check_counts(self) -> None:
        for rule, name, least in (("device", "speakers_per_device", 2), ("silo", "silos", 1)):
            value = getattr(self, name)
            if (self.clients == rule) != (value is not None):
                raise InputError(f"{name}={value}: given exactly when clients={rule}, but clients={self.clients}")
            if value is not None and value < least:
                raise InputError(f"{name}={value}: expected at least {least}")

    def _check_amounts(self) -> None:
        for name in ("min_seconds", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"{name}={value}: expected a positive number of seconds")
        if self.clients == "silo" and self.min_seconds is not None:
            raise InputError(
                f"min_seconds={self.min_seconds} with clients=silo: every silo stays a client, whatever it holds; "
                "expected no floor"
            )
        if self.min_seconds is not None and self.max_seconds is not None and self.min_seconds > self.max_seconds:
            raise InputError(f"min_seconds={self.min_seconds}: expected no more than max_seconds={self.max_seconds}")
        if self.holdout is not None and not 0 < self.holdout <= 0.5:
            raise InputError(f"holdout={self.holdout}: expected a share above 0 and at most 0.5")


def exactly(number: float) -> Fraction:
    """The number as it was written: 0.29 of 100 speakers is 29 of them, and not 28.999… rounded down."""
    return Fraction(str(number))
