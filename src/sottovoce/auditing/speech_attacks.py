"""Attacks that people worry about, on the models before and after training: who took part, and what they said.

    membership   of a speaker: how much better the model has become on their speech, beside people it never heard
    exposure     of a sentence (Carlini et al. 2019): its rank among made-up ones, by how much likelier the model has
                 come to hold it for what is said where half of the sound is silenced, or played fast

No bounds: attacks that fail prove nothing. They say in plain words what a number like ε cannot.

Shapes: N of one group, M of the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sottovoce.auditing.secret_speech import secret_sentence
from sottovoce.errors import InputError
from sottovoce.evaluation.losses import compute_loss
from sottovoce.models.saved import Recogniser
from sottovoce.models.speech import load_speech, read_speech
from sottovoce.models.utterances import Recordings, record
from sottovoce.seeds import stream
from sottovoce.store import Store

Samples = NDArray[np.int16]

MOST_OF_SPEAKER = 4  # of a speaker: enough to know how well they are understood
ALTERNATIVES = 63  # of a secret sentence: six bits, with itself
SPEED = 1.5
_REACH = 1.96  # of a 95 % interval


@dataclass(frozen=True)
class Membership:
    """How often somebody who took part looks more like it than somebody who did not: a half is guessing."""

    auc: float
    low: float
    high: float
    members: int
    strangers: int

    def as_json(self) -> dict[str, Any]:
        return {
            "auc": self.auc,
            "interval": [self.low, self.high],
            "members": self.members,
            "strangers": self.strangers,
        }


@dataclass(frozen=True)
class Exposure:
    """Bits of the secrets of those who took part, and of those who did not; at most log2 of how many were compared.

    `low` and `high` are the 95 % interval of the difference.
    """

    how: str
    inside: float
    outside: float
    low: float
    high: float
    most: float
    secrets: int

    def as_json(self) -> dict[str, Any]:
        return {
            "how": self.how,
            "bits_in": self.inside,
            "bits_out": self.outside,
            "difference_interval": [self.low, self.high],
            "most_bits": self.most,
            "secrets": self.secrets,
        }


def membership(members_N: Sequence[float], strangers_M: Sequence[float]) -> Membership:
    """The area under the curve of these scores, with its interval (DeLong et al. 1988).

    >>> membership([2.0, 3.0, 4.0], [0.0, 1.0, 2.5]).auc.__round__(3)
    0.889
    """
    members, strangers = np.asarray(members_N, dtype=np.float64), np.asarray(strangers_M, dtype=np.float64)
    if min(len(members), len(strangers)) < 2:
        raise InputError(f"membership of {len(members)} beside {len(strangers)}: expected two or more of each")
    above_NM = np.sign(members[:, None] - strangers[None, :]) / 2 + 0.5
    auc = float(above_NM.mean())
    variance = above_NM.mean(1).var(ddof=1) / len(members) + above_NM.mean(0).var(ddof=1) / len(strangers)
    error = _REACH * math.sqrt(float(variance))
    return Membership(auc, max(auc - error, 0.0), min(auc + error, 1.0), len(members), len(strangers))


def speaker_gain(
    before: Recogniser, after: Recogniser, store: Store, rows: NDArray[np.int64], *, longest_seconds: float
) -> float | None:
    """How much less an utterance of these `rows` costs the model than before, per second; None if none is usable."""
    try:
        speech = load_speech(
            store,
            rows[:MOST_OF_SPEAKER],
            after.tokens,
            family=after.family,
            settings=after.settings,
            longest_seconds=longest_seconds,
        )
    except InputError:
        return None
    samples, tokens = read_speech(speech, np.arange(len(speech.rows)))
    recordings = record(samples, tokens, device=_device(after))
    gained = _loss(before, recordings) - _loss(after, recordings)
    return gained * len(recordings) / recordings.audio_seconds


def exposures(
    before: Recogniser, after: Recogniser, store: Store, rows: NDArray[np.int64], *, how: str, seed: int
) -> list[float]:
    """Bits of each secret of `rows` (one utterance of each), by its rank among sentences that nobody has said."""
    rng = stream(seed, "alternatives")
    others = [after.tokens.encode(secret_sentence(rng)) for _ in range(ALTERNATIVES)]
    found = []
    for row in rows.tolist():
        text = store.utterance(row).text
        assert text is not None
        heard = HOW[how](store.samples(row))
        scores = []
        for tokens in (after.tokens.encode(text), *others):
            recordings = record([heard], [tokens], device=_device(after))
            if after.family.unusable(after.settings, len(heard), tokens) is not None:
                scores.append(-math.inf)
                continue
            scores.append(_loss(before, recordings) - _loss(after, recordings))
        # Ties count half: a model that has learned nothing exposes nothing.
        own, rest = scores[0], np.array(scores[1:])
        rank = 1 + float((rest > own).sum()) + float((rest == own).sum()) / 2
        found.append(math.log2(len(scores)) - math.log2(rank))
    return found


def exposure(inside: Sequence[float], outside: Sequence[float], *, how: str) -> Exposure:
    """Both groups beside one another, by Welch's interval."""
    means, errors = zip(
        *((float(np.mean(one)), np.var(one, ddof=1) / len(one)) for one in (inside, outside)), strict=True
    )
    error = _REACH * math.sqrt(sum(errors))
    apart = means[0] - means[1]
    most = math.log2(ALTERNATIVES + 1)
    return Exposure(how, means[0], means[1], apart - error, apart + error, most, len(inside) + len(outside))


def half_silenced(samples: Samples) -> Samples:
    """Without its second half, which only somebody who remembers it can fill in."""
    heard = samples.copy()
    heard[len(heard) // 2 :] = 0
    return heard


def played_fast(samples: Samples) -> Samples:
    """At one and a half of its speed, by leaving samples out."""
    places = np.arange(0, len(samples) - 1, SPEED)
    heard: Samples = np.interp(places, np.arange(len(samples)), samples).astype(np.int16)
    return heard


HOW = {"half silenced": half_silenced, "played fast": played_fast}


def _loss(recogniser: Recogniser, recordings: Recordings) -> float:
    with torch.no_grad():
        return float(compute_loss(recogniser, recordings))


def _device(recogniser: Recogniser) -> torch.device:
    return next(iter(recogniser.parameters.values())).device
