"""What a cluster would take for the flagship's headline row, from one GPU's measured round.

The row: Pelikan et al. (2025), Table 1, σ_DP = 3e-6, `dim`, on Common Voice English: recipe
`pelikan2025/table01/sigma-3e-6-dim`. Its noise gives ε = 7.2 where both cohort and population are 200 and 2,000 times
as large, which is the other row.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from scipy.stats import binom


@dataclass(frozen=True)
class Row:
    """K, S and T."""

    people: int
    cohort: int
    rounds: int


TRAINED = Row(34_753, 1_024, 2_006)
EXTRAPOLATED = Row(70_000_000, 204_800, 2_034)
LOCAL_STEPS, BATCH_SECONDS = 10, 120.0
PARAMETERS = 255.8e6
GPUS = (1, 8, 64, 512)
# Assumed: bytes a second between machines of eight, for a broadcast and for a sum.
BANDWIDTH = 25e9


@dataclass(frozen=True)
class MeasuredRound:
    """A private round of the row's model on one GPU: audio a second, of so many clients, and what share it waited."""

    audio_seconds_per_second: float
    clients: int
    audio_seconds_per_client: float
    waited: float

    @property
    def seconds(self) -> float:
        return self.clients * self.audio_seconds_per_client / self.audio_seconds_per_second

    @property
    def fixed_seconds(self) -> float:
        """Of a round, whatever its cohort: training waits for the first client's speech."""
        return self.waited * self.seconds

    @property
    def client_seconds(self) -> float:
        """Of a client with `audio_seconds_per_client`."""
        return (self.seconds - self.fixed_seconds) / self.clients


def measured_round(kept: Mapping[str, Any]) -> MeasuredRound:
    return MeasuredRound(**{own.name: kept[own.name] for own in fields(MeasuredRound)})


def clients_on_fullest(gpus: int, row: Row) -> float:
    """The mean of the fullest GPU's clients, where all have as much speech: E⌈n / GPUs⌉, n ~ Bin(K, S/K)."""
    rate = row.cohort / row.people
    reach = math.ceil(12 * math.sqrt(row.cohort))  # standard deviations beyond which nothing happens
    drawn = np.arange(max(0, row.cohort - reach), min(row.people, row.cohort + reach) + 1)
    return float((binom.pmf(drawn, row.people, rate) * -(-drawn // gpus)).sum())


def exchange_seconds(gpus: int) -> float:
    """The model to all processes, and one sum of float32 from all: nothing where there is one machine."""
    return 0.0 if gpus <= 8 else 2 * 4 * PARAMETERS / BANDWIDTH


@dataclass(frozen=True)
class ClusterTime:
    """What so many GPUs take: seconds of a round, hours of all rounds, and GPU hours."""

    clients: float
    round_seconds: float
    hours: float
    gpu_hours: float


def cluster_time(gpus: int, row: Row, measured: MeasuredRound) -> ClusterTime:
    clients = clients_on_fullest(gpus, row)
    seconds = clients * measured.client_seconds + measured.fixed_seconds + exchange_seconds(gpus)
    hours = row.rounds * seconds / 3600
    return ClusterTime(clients, seconds, hours, gpus * hours)


def in_words(hours: float) -> str:
    """With two or three figures, in the unit that needs no others.

    >>> [in_words(hours) for hours in (15_000.0, 100.0, 7.25, 0.5, 0.0125, 0.0002)]
    ['625 days', '4.2 days', '7.2 h', '30 min', '45 s', '0.72 s']
    """
    if hours >= 48:
        return f"{hours / 24:.1f} days" if hours < 2400 else f"{hours / 24:,.0f} days"
    if hours >= 1:
        return f"{hours:.1f} h"
    seconds = 3600 * hours
    return f"{seconds / 60:.0f} min" if seconds >= 300 else f"{seconds:.3g} s"
