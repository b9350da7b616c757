"""Clients on their own held-out speech, before and after a run: means over clients, and differences over the same.

Runs say nothing of who a client is. But repeats have the same clients, and how much each has said (seconds, and words
of the held-out part) puts them into one order.

Shapes: R runs, C clients, D draws.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from findings.kept import Kept
from findings.numbers import per_cent, unless_converged
from findings.rates import SEED, Difference
from findings.tables import CONVERGED, Repeats, converged_cell, markdown, rates_cell
from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream
from sottovoce.evaluation.converged import Converged
from sottovoce.evaluation.error_rates import DRAWS, percentile_interval
from sottovoce.report.drawings import Drawing
from sottovoce.report.people import client_error_drawing
from sottovoce.report.records import Record, RunRecord
from sottovoce.report.run_facts import has_converged, start_converged

WHEN = ("before", "after")
COLUMNS: Mapping[str, Callable[[Record], float]] = {
    "before, WER %": lambda found: found["before"]["mean"],
    "after, WER %": lambda found: found["after"]["mean"],
    "after, without those above 100 %": lambda found: found["after"]["mean_without_above_100"],
    "above 50 % WER, %": lambda found: found["after"]["share_above_50"],
    "above 100 % WER, %": lambda found: found["after"]["share_above_100"],
    "better, %": lambda found: found["better"] / found["clients"],
    "worse, %": lambda found: found["worse"] / found["clients"],
}


def tested(run: RunRecord) -> Record:
    """What a run says of its clients."""
    found: Record = run.results.get("clients") or {}
    if not found.get("per_client"):
        raise InputError(f"{run.label}: its results say nothing of single clients, expected federation.test_clients")
    return found


def mean_rate(run: RunRecord, when: str) -> float:
    """Each client counts once."""
    if when not in WHEN:
        raise InputError(f"when={when}: expected one of {', '.join(WHEN)}")
    return float(tested(run)[when]["mean"])


def gain(runs: Repeats, *, name: str) -> Difference:
    """The mean over clients after less that before, over seeds."""
    after_C, before_C = (_mean_rates(list(runs.values()), when) for when in ("after", "before"))
    return _difference(after_C - before_C, seeds=tuple(runs), names=("gain", name))


def difference(first: Repeats, second: Repeats, *, names: tuple[str, str]) -> Difference:
    """Of the means after, the first's less the second's, over common seeds and the same clients."""
    seeds = tuple(sorted(first.keys() & second.keys()))
    if not seeds:
        raise InputError(f"clients' difference {' '.join(names)}: expected runs with the same seeds")
    both = [[runs[seed] for seed in seeds] for runs in (first, second)]
    if _identities(both[0][0]) != _identities(both[1][0]):
        raise InputError(f"clients' difference {' '.join(names)}: expected runs with the same clients")
    one_C, other_C = (_mean_rates(runs, "after") for runs in both)
    return _difference(one_C - other_C, seeds=seeds, names=("difference", *names))


def table(kept: Kept, suite: str, *, only: Sequence[str]) -> str:
    """One row for each setting: means over seeds, in per cent."""
    rows, starts = [], list[Converged]()
    for name in kept.settings(suite, only=only):
        runs = kept.repeats(name)
        found = [tested(run) for run in runs.values()]
        starts += map(start_converged, runs.values())
        cells = [rates_cell([tell(one) for one in found]) for tell in COLUMNS.values()]
        links = " ".join(kept.link(run, str(seed)) for seed, run in runs.items())
        rows.append([name.partition("/")[2], str(found[0]["clients"]), *cells, converged_cell(runs), links])
    before, *after = COLUMNS
    headings = ["setting", "clients", before + unless_converged(starts), *after, CONVERGED, "runs by seed"]
    return markdown(headings, rows, words=1)


def by_amount(run: RunRecord) -> str:
    """Quarters of the clients, from those with least speech to those with most."""
    rows = [
        [
            "–".join(f"{seconds:.0f}" for seconds in part["seconds"]),
            str(part["clients"]),
            per_cent(part["before"]),
            per_cent(part["after"]),
        ]
        for part in tested(run)["by_seconds"]
    ]
    before, after = unless_converged([start_converged(run)]), unless_converged([has_converged(run)])
    return markdown(["seconds of speech", "clients", f"before, %{before}", f"after, %{after}"], rows, words=1)


def drawing(runs: Mapping[str, RunRecord], *, name: str) -> Drawing:
    """Sorted rates of clients before and after, by run: the paper's Figure 4."""
    return replace(client_error_drawing({label: tested(run) for label, run in runs.items()}), name=name)


def _amounts(client: Record) -> tuple[float, int]:
    return client["seconds"], client["words"]


def _identities(run: RunRecord) -> list[tuple[float, int]]:
    return sorted(map(_amounts, tested(run)["per_client"]))


def _mean_rates(runs: Sequence[RunRecord], when: str) -> NDArray[np.float64]:
    """Of each client, over runs."""
    if any(_identities(run) != _identities(runs[0]) for run in runs):
        raise InputError(f"{runs[0].label}: expected repeats with the same clients")
    in_order = [sorted(tested(run)["per_client"], key=_amounts) for run in runs]
    rates_RC = np.array([[client[when] for client in clients] for clients in in_order])
    means_C: NDArray[np.float64] = rates_RC.mean(axis=0)
    return means_C


def _difference(differences_C: NDArray[np.float64], *, seeds: tuple[int, ...], names: Sequence[str]) -> Difference:
    count = len(differences_C)
    drawn_DC = stream(SEED, "clients", *names).integers(count, size=(DRAWS, count))
    return Difference(fmean(differences_C.tolist()), percentile_interval(differences_C[drawn_DC].mean(axis=1)), seeds)
