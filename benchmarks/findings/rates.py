"""Word error rates of settings: means over their seeds, and differences between settings that were tested on the same
people, with intervals over those people.

Shapes: R runs, S speakers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream
from sottovoce.evaluation.compare import count_errors_by_speaker, count_words_by_speaker
from sottovoce.evaluation.error_rates import FEWEST_SPEAKERS, Interval, bootstrap_rates, percentile_interval
from sottovoce.evaluation.measures import MeasureName
from sottovoce.report.records import Record, RunRecord

SEED = 1  # of the draws; every difference has a stream of its own, named by what is compared


@dataclass(frozen=True)
class Difference:
    """Of two settings' rates, the first less the second; `seeds` are those both were run with."""

    mean: float
    interval: Interval | None
    seeds: tuple[int, ...]


def scored(run: RunRecord, name: str | None = None) -> Record:
    """The results on a test set; without a name, on the first."""
    if not run.tests:
        raise InputError(f"{run.label}: its results hold no test")
    if name is not None and name not in run.tests:
        raise InputError(f"test={name}: expected one of {', '.join(run.tests)} ({run.label})")
    return run.tests[name or next(iter(run.tests))]


def start_wer(run: RunRecord, test: str | None = None) -> float | None:
    """Of the model a run started from, on the same test set; None for central training and for a start from nothing."""
    found = _start_tests(run, test)
    return None if found is None else found["wer"]


def _start_tests(run: RunRecord, test: str | None) -> Record | None:
    starts = (run.results.get("start") or {}).get("test") or {}
    found: Record | None = starts.get(test or next(iter(run.tests), ""))
    return found


def dev_wer(run: RunRecord, measure: MeasureName = "wer") -> float | None:
    """Of the model that was tested, which was chosen by it; None where it was chosen by another measure."""
    found: float | None = (run.results.get("model") or {}).get(f"dev_{measure}")
    return found


def mean_interval(runs: Sequence[RunRecord], *, names: Sequence[str], test: str | None = None) -> Interval | None:
    """Over speakers, for the mean rate of `runs`; a single run has written its own down."""
    if len(runs) == 1:
        found = scored(runs[0], test).get("wer_interval")
        return None if found is None else (found[0], found[1])
    drawn = _drawn([(scored(run, test), None) for run in runs], names=("mean", *names))
    return None if drawn is None else percentile_interval(drawn)


def difference(
    first: Mapping[int, RunRecord], second: Mapping[int, RunRecord], *, names: tuple[str, str], test: str | None = None
) -> Difference:
    """Of the mean rates over the seeds that both settings were run with, paired over speakers.

    Speakers are drawn anew with all they said to every one of the models. The interval so says how sure the difference
    is for other people; how far it moves with other seeds is another question, which repeats answer.
    """
    seeds = tuple(sorted(first.keys() & second.keys()))
    if not seeds:
        raise InputError(f"difference {' '.join(names)}: expected runs with the same seeds")
    pairs = {seed: (scored(first[seed], test), scored(second[seed], test)) for seed in seeds}
    return _subtract(pairs, names=("difference", *names))


def gain(runs: Mapping[int, RunRecord], *, name: str, test: str | None = None) -> Difference:
    """Of the mean rate over seeds, less that of the models that the runs started from, paired over speakers."""
    starts = {seed: _start_tests(run, test) for seed, run in runs.items()}
    if missing := [run.label for seed, run in runs.items() if starts[seed] is None]:
        raise InputError(f"gain {name}: expected a tested start of {', '.join(missing)}")
    pairs = {seed: (scored(run, test), start) for seed, run in runs.items() if (start := starts[seed]) is not None}
    return _subtract(pairs, names=("gain", name))


def _subtract(pairs: Mapping[int, tuple[Record, Record]], *, names: Sequence[str]) -> Difference:
    """Of means over seeds, the first of each pair less the second."""
    for one, other in pairs.values():
        if count_words_by_speaker(one) != count_words_by_speaker(other):
            raise InputError(f"{' '.join(names)}: expected runs that were tested on the same speakers")
    drawn = _drawn(list(pairs.values()), names=names)
    return Difference(
        fmean(one["wer"] - other["wer"] for one, other in pairs.values()),
        None if drawn is None else percentile_interval(drawn),
        tuple(sorted(pairs)),
    )


def _drawn(pairs: Sequence[tuple[Record, Record | None]], *, names: Sequence[str]) -> NDArray[np.float64] | None:
    """Means over `pairs` of rates (less those of the other, if there is one), for speakers drawn anew."""
    crowd = count_words_by_speaker(pairs[0][0])
    if len(crowd) < FEWEST_SPEAKERS or any(count_words_by_speaker(one) != crowd for one, _ in pairs):
        return None  # seeds that divide the test speakers differently cannot be drawn together
    words_S = np.array([words for _, words in crowd])
    errors_RS = np.stack(
        [
            count_errors_by_speaker(one) - (0 if other is None else count_errors_by_speaker(other))
            for one, other in pairs
        ]
    )
    return bootstrap_rates(words_S, errors_RS.mean(axis=0), generator=stream(SEED, *names))
