"""What rounds that do not wait for the slowest cost in privacy: deadlines, over-selection, buffers without rounds.

    python benchmarks/late_nodes.py            # the tables of docs/late-nodes.md
    python benchmarks/late_nodes.py --write    # and write them there

Every number is computed here, by the project's own accountants (`sottovoce.privacy`), in seconds; nothing is trained.
docs/late-nodes.md says why each row is the event that it is taken for.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, norm

from sottovoce.base.seeds import stream
from sottovoce.flat.layout import Layout
from sottovoce.network.server.setup import default_least
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.calibration import calibrate_noise_multiplier
from sottovoce.privacy.events import Event, poisson_release, repeated
from sottovoce.privacy.mechanism import optimal_blt, relative_error
from sottovoce.privacy.mechanism_search import single_release
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.plan_sampling import over_selected
from sottovoce.privacy.pld import QUICK
from sottovoce.privacy.settings import Mode, PrivacySettings
from sottovoce.privacy.strategies import sensitivity

PAGE = Path(__file__).parents[1] / "docs/late-nodes.md"
TARGET, FACTOR, BUFFERS = 8.0, 1.3, 3


@dataclass(frozen=True, kw_only=True)
class Run:
    """K people, A answers a round, T rounds."""

    name: str
    people: int
    answers: int
    rounds: int
    delta: float

    @property
    def each(self) -> int:
        """How often each has to take part for as many answers as T rounds of A have."""
        return math.ceil(self.rounds * self.answers / self.people)

    @property
    def gap(self) -> int:
        """Rounds from one time to the next, where all take part as often."""
        return self.people // self.answers


RUNS = (
    Run(name="1,200 people", people=1_200, answers=100, rounds=240, delta=1e-6),
    Run(name="34,753 (Common Voice, English)", people=34_753, answers=1_024, rounds=2_006, delta=1e-9),
    Run(name="69.5 million (extrapolated)", people=69_506_000, answers=204_800, rounds=2_034, delta=1e-9),
)


def sampled(run: Run, *, factor: float = 1.0, moved: float = 1.0) -> Callable[[float], Event]:
    """All rounds by noise multiplier: `factor` times A are drawn, and one person moves a sum by `moved` times C."""
    rate = over_selected(run.answers, factor=factor) / run.people
    return lambda z: repeated(poisson_release(z / moved, sampling_rate=rate), run.rounds)


def spent(event: Event, delta: float) -> float:
    return epsilon(event, delta, cap=QUICK).headline


@lru_cache
def needed(run: Run, *, factor: float = 1.0, moved: float = 1.0) -> float:
    """The least noise multiplier of all rounds for the target."""
    events = sampled(run, factor=factor, moved=moved)
    return calibrate_noise_multiplier(TARGET, run_event=events, delta=run.delta, cap=QUICK)


def over_selection_table() -> str:
    """ε of the noise that has ε = 8 where A are drawn, and the noise for ε = 8."""
    rows = ["| K, A, T, δ | drawn | a round ends | ε at one noise | z for ε = 8 |", "|---|---|---|---|---|"]
    for run in RUNS:
        usual = needed(run)
        whom = f"{run.people:,}, {run.answers:,}, {run.rounds:,}, {run.delta:g}"
        for factor, moved, ends in _ENDINGS:
            events = sampled(run, factor=factor, moved=moved)
            drawn = over_selected(run.answers, factor=factor)
            found = f"{spent(events(usual), run.delta):.3g}", f"{needed(run, factor=factor, moved=moved):.3g}"
            rows.append(f"| {whom} | {drawn:,} | {ends} | {found[0]} | {found[1]} |")
            whom = ""
    return "\n".join(rows)


_BY_TIME, _BY_COUNT = "at its deadline", "with the A-th answer"
_ENDINGS = (
    (1.0, 1.0, _BY_TIME),
    (1.1, 1.0, _BY_TIME),
    (FACTOR, 1.0, _BY_TIME),
    (1.5, 1.0, _BY_TIME),
    (FACTOR, 2.0, _BY_COUNT),
)


def asynchronous_table() -> str:
    """Noise with ε = 8, as a multiple of that of rounds with a deadline, where as many updates are summed in all."""
    rows = [
        "| | " + " | ".join(run.name for run in RUNS) + " |",
        "|---|" + "---|" * len(RUNS),
        "| times each takes part, gap in rounds | " + _row(lambda run: f"{run.each}, {run.gap}") + " |",
    ]
    for name, noise in _ASYNCHRONOUS.items():
        rows.append(f"| {name} | " + _row(lambda run, noise=noise: _multiple(run, noise(run))) + " |")  # type: ignore[misc]
    return "\n".join(rows)


def _row(cell: Callable[[Run], str]) -> str:
    return " | ".join(cell(run) for run in RUNS)


def _multiple(run: Run, noise: float) -> str:
    times = noise / needed(run)
    return f"{noise:.3g} (×{times:.2f})" if times < 10 else f"{noise:.3g} (×{times:.0f})"


def _limited(run: Run) -> float:
    """Each at most so often, at times of their own: one Gaussian release that one person moves by √k."""
    return single_release(TARGET, delta=run.delta) * math.sqrt(run.each)


def _correlated(run: Run) -> float:
    """The same with noise that is correlated over buffers, and at least so many buffers between: effective."""
    strategy = optimal_blt(steps=run.rounds, buffers=BUFFERS, cycle=run.gap)
    moved = sensitivity(strategy, rows=run.rounds, cycle=run.gap)
    return single_release(TARGET, delta=run.delta) * moved * relative_error(strategy, steps=run.rounds)


def _displaced(run: Run) -> float:
    """Buffers that are full: one update more moves somebody in and somebody out of each later buffer."""
    return single_release(TARGET, delta=run.delta) * 2 * math.sqrt(run.rounds)


_ASYNCHRONOUS: Mapping[str, Callable[[Run], float]] = {
    "rounds with a deadline, Poisson": needed,
    f"the same, {FACTOR} times as many drawn": lambda run: needed(run, factor=FACTOR),
    "buffers by the clock, each person at most so often": _limited,
    "the same with the gap, correlated noise (BLT), effective": _correlated,
    "buffers that end when full, if nobody trained differently": _displaced,
}


LATE = (0.0, 0.1, 0.23, 0.3, 0.4, 0.5)


def opened_table(people: int = 1_000, answers: int = 100) -> str:
    """How often a secure sum is not opened, where all are here and a share of those drawn is late."""
    rows = [
        "| late | " + " | ".join(f"{share:.0%}" for share in LATE) + " |",
        "|---|" + "---|" * len(LATE),
    ]
    for drawn, expected in ((answers, None), (over_selected(answers, factor=FACTOR), answers)):
        private = PrivacySettings(
            population_size=people,
            privacy_unit="speaker",
            cohort_size=drawn,
            expected_answers=expected,
            clip_bound=1.0,
            noise_multiplier=1.0,
            delta=1e-6,
            mode=Mode.SECURE,
        )
        least = default_least(Plan(private, Layout(("w",), ((1,),)), sum_bits=32))
        chances = (binom.cdf(least - 1, people, drawn / people * (1 - share)) for share in LATE)
        what = f"{drawn} drawn" + ("" if expected is None else f" for {expected} answers")
        rows.append(f"| {what}, `least` {least} | " + " | ".join(f"{chance:.0e}" for chance in chances) + " |")
    return "\n".join(rows)


# Slow nodes: the time from an order to its answer is log-normal, and one in ten takes three times the median or longer.
ONE_IN_TEN = 3.0
NODES, DRAWS, RATE = 4_000, 60, 1 / 12
OVERLAPS = (0, 1, 3, 7)


@lru_cache
def _drawn() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How long each of many nodes takes, in medians, and the rounds from one time that it is drawn to the next."""
    spread = math.log(ONE_IN_TEN) / float(norm.isf(0.1))
    generator = stream(1, "slow nodes")
    taken = np.exp(spread * generator.standard_normal((DRAWS, NODES)))
    return taken, generator.geometric(RATE, (DRAWS, NODES)).astype(np.float64)


def share_late(interval: float, *, staleness: int) -> float:
    """Of answers, where rounds begin at this `interval` and have staleness + 1 of them; a node's older orders first.

    An order that it has not begun when its time is over is withdrawn.
    """
    taken, gaps = _drawn()
    deadline, late = (staleness + 1) * interval, 0
    waits = np.zeros(NODES)
    for of_all, until_next in zip(taken, gaps, strict=True):
        late += int((waits + of_all > deadline).sum())
        busy = waits + np.where(waits < deadline, of_all, 0.0)
        waits = np.maximum(busy - until_next * interval, 0.0)
    return late / taken.size


def least_interval(share: float, *, staleness: int) -> float:
    """The shortest interval, in medians, with at most this share of answers late."""
    found = brentq(lambda log: share_late(math.exp(log), staleness=staleness) - share, -4.0, 4.0, xtol=1e-3)
    return math.exp(float(found))


def overlap_table() -> str:
    """What staleness brings where some nodes are slow."""
    rows = [
        "| staleness D | an answer is in time for | late where a round lasts one median time | "
        "median times that a round lasts where 10 % are late | where 1 % are |",
        "|---|---|---|---|---|",
    ]
    for staleness in OVERLAPS:
        least = [least_interval(share, staleness=staleness) for share in (0.1, 0.01)]
        what = "one round" if staleness == 0 else f"{staleness + 1} rounds"
        at_median = share_late(1.0, staleness=staleness)
        rows.append(f"| {staleness} | {what} | {at_median:.2%} | {least[0]:.2f} | {least[1]:.2f} |")
    return "\n".join(rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "over-selection": over_selection_table,
    "asynchronous": asynchronous_table,
    "opened": opened_table,
    "overlap": overlap_table,
}


def with_table(page: str, name: str, table: str) -> str:
    """`page` with the table between its marks."""
    begin, end = f"<!-- table: {name} -->\n", f"\n<!-- end: {name} -->"
    before, found, rest = page.partition(begin)
    assert found, f"docs/late-nodes.md has no table {name}"
    _, found, after = rest.partition(end)
    assert found, f"docs/late-nodes.md: the table {name} has no end"
    return before + begin + table + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/late-nodes.md")
    asked = parser.parse_args()
    for name, table in TABLES.items():
        found = table()
        print(f"{name}\n\n{found}\n")
        if asked.write:
            PAGE.write_text(with_table(PAGE.read_text(), name, found))


if __name__ == "__main__":
    main()
