"""The word error rate of a model on clients' held-out speech, released as one more noised sum.

    client     errors, words ─► at most 100 % wrong ─► at most `words` words ─► (errors, correct)
    sum        over a Poisson cohort, on the public grid ─► noise ─► errors / (errors + correct)

A client's two numbers are never negative and add up to `words` (W) at most, so the pair's norm is at most W: the clip
bound. (Errors and words themselves could be √2 as long.) The rate weights people by their words, up to W each, with
nobody above 100 %; decisions/027 has the bias. Sampling, clipping, grid, noise and charge are a `Plan`'s.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive
from sottovoce.flat.layout import Layout
from sottovoce.privacy.clipping import Normalise, Share
from sottovoce.privacy.events import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER, Measured, event_to_json
from sottovoce.privacy.guarantee import count_measurements, is_measurement_due
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Weighting

PAIR = Layout(("errors", "correct"), ((1,), (1,)))
LARGEST_WORDS = 10**9
_STANDARD_ERRORS = 1.959964  # of a normal distribution: 95 % of it
_RATES = np.linspace(0.0, 1.0, 10_001)  # the resolution of an interval


@dataclass(frozen=True, kw_only=True)
class ClientWer:
    """Measure clients' word error rate after every so many rounds, and after the last one (alone, if `every` is None).

    One client counts for at most `words` words; the noise on the sums has `noise_multiplier`·`words` as its standard
    deviation. Cohorts are drawn as those of rounds are.
    """

    words: float
    noise_multiplier: float
    every: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.words <= LARGEST_WORDS:
            raise InputError(
                f"client_wer: words={self.words}, expected from 1 to {LARGEST_WORDS:,}: a bound on anybody"
            )
        if not SMALLEST_MULTIPLIER <= self.noise_multiplier <= LARGEST_MULTIPLIER:
            raise InputError(f"client_wer: noise_multiplier={self.noise_multiplier}, expected a positive number")
        if self.every is not None and self.every < 1:
            raise InputError(
                f"client_wer: every={self.every}, expected at least 1 round, or none for the last one alone"
            )

    def is_due(self, rounds: int, *, steps: int) -> bool:
        """Whether it is measured after `rounds` of `steps`."""
        return is_measurement_due(rounds, steps=steps, every=self.every)

    def measured(self, steps: int) -> Measured:
        """All that a run of `steps` rounds measures."""
        return Measured(count=count_measurements(steps, every=self.every), noise_multiplier=self.noise_multiplier)

    def plan(self, training: Plan) -> Plan:
        """For the people, cohorts and noise shares of `training`, with a bound, noise and random streams of its own.

        Its sums are of words of 64 bits in a simulation, too: the same wherever clients are.
        """
        root = training.settings.root_seed
        settings = replace(
            training.settings,
            clip_bound=float(self.words),
            noise_multiplier=self.noise_multiplier,
            sigma_dp=None,
            share=Share.GLOBAL,
            normalise=Normalise.NEVER,
            layer_groups={},
            alpha={},
            adaptive=None,
            noise_scope=None,
            clip_rule=None,
            weighting=Weighting.UNIFORM,
            weights=None,
            weight_cap=None,
            denominator=None,
            time_line=None,
            mechanism=None,
            epsilon_budget=None,
            root_seed=None if root is None else derive(root, "client wer"),
        )
        return Plan(settings, PAIR, sum_bits=64, noise_shares=training.noise_shares)

    def in_ledger(self, plan: Plan) -> Mapping[str, Any]:
        """What a ledger's header says of it: the event, and what decides how often it happens and to what."""
        return {"event": event_to_json(plan.event), "words": float(self.words), "every": self.every}


def contribution(errors: int, words: int, *, most_words: float) -> Tensor:
    """What one client adds, [P] in float64: wrong and correct words, `most_words` of them at most.

    Guarantee: neither is negative, and together they are at most `most_words`, up to a rounding that the plan's clip
    takes back. Without words both are zero.
    """
    wrong = min(max(errors, 0), max(words, 0))
    scale = min(most_words / words, 1.0) if words > 0 else 0.0
    pair_P = PAIR.zeros(dtype=torch.float64)
    for part, value in zip(PAIR.parts(pair_P), (wrong * scale, (words - wrong) * scale), strict=True):
        part.fill_(value)
    return pair_P


@dataclass(frozen=True)
class WerEstimate:
    """A rate from two noised sums; None where the noise leaves nothing of them.

    `interval` holds the rate of all clients' held-out speech, 95 times in 100: noise and who was drawn are in it.
    `words` is how many (at most W a person) it was measured on, noised as well.
    """

    rate: float | None
    interval: tuple[float, float]
    words: float

    def as_record(self) -> dict[str, Any]:
        """For `metrics.jsonl`."""
        return {"client_wer": self.rate, "client_wer_interval": list(self.interval), "client_words": self.words}


def estimate_client_wer(noised_P: Tensor, plan: Plan) -> WerEstimate:
    """The rate from noised sums under `plan`: post-processing alone. A sum below zero counts as zero."""
    errors, correct = (max(float(part), 0.0) for part in PAIR.parts(noised_P))
    words = errors + correct
    return WerEstimate(errors / words if words else None, _interval(errors, correct, plan), words)


def _interval(errors: float, correct: float, plan: Plan) -> tuple[float, float]:
    """All rates r for which (1 − r)·errors − r·correct, whose mean is zero at the true one, is not too far off.

    Fieller (1954). Its variance is the noise's, ((1 − r)² + r²)·std², and that of who was drawn: with a person's part
    g = (1 − r)·m − r·u, Σ g² ≤ max|g|·Σ|g| ≤ W·max(r, 1 − r)·2r(1 − r)·words, of which a share 1 − q is chance (q of
    those who answer in time). So no more has to be released to know it, and it is an upper bound.
    """
    r, words = _RATES, errors + correct
    noise = ((1 - r) ** 2 + r**2) * plan.released_std_sum**2
    share = plan.settings.answers / plan.settings.population_size
    drawn = (1 - share) * plan.clip_bound * np.maximum(r, 1 - r) * 2 * r * (1 - r) * words
    away = np.abs((1 - r) * errors - r * correct)
    outwards = _RATES[1] * words  # to the next of the rates that are looked at
    possible = r[away <= _STANDARD_ERRORS * np.sqrt(noise + drawn) + outwards]
    return float(possible[0]), float(possible[-1])
