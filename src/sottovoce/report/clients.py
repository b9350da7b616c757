"""The clients themselves, before and after a run: each on speech that it has held out (Gao et al. 2022, Figure 4)."""

from collections.abc import Mapping, Sequence
from functools import partial

from sottovoce.report.cells import integer, number_text, percent, said_once
from sottovoce.report.drawings import Drawing, sorted_rates
from sottovoce.report.parts import Chapter, PagePart, chapter
from sottovoce.report.records import Record, RunRecord
from sottovoce.tables import Row, Table

_INTRO = (
    "Clients, unlike test speakers, have been trained on; here is each on speech that it has held out. This is a "
    "simulation's privilege: no ε covers what is said of single clients, and a release never says it."
)


def client_results_section(runs: Sequence[RunRecord]) -> Chapter | None:
    found = {run.label: results for run in runs if (results := _results(run))}
    if not found:
        return None
    parts: list[PagePart] = [_error_table(found), error_drawing(found), _amount_table(found)]
    return chapter("client-results", "The clients themselves", parts, _INTRO)


def _results(run: RunRecord) -> Record:
    """What a run says of its clients; nothing of a release, whatever stands in its folder."""
    found: Record = {} if run.is_release else run.results.get("clients") or {}
    return found if found.get("per_client") else {}


def _curves(found: Mapping[str, Record]) -> dict[str, list[float]]:
    """Sorted rates: those of the models that runs started from, where several share one only once, then theirs."""
    starts = said_once((label, tuple(_sorted(one, "before"))) for label, one in found.items())
    before = {f"before: {labels}" if len(starts) > 1 else "before": list(rates) for labels, rates in starts}
    return before | {label: _sorted(one, "after") for label, one in found.items()}


def _sorted(results: Record, when: str) -> list[float]:
    return sorted(client[when] for client in results["per_client"])


def error_drawing(found: Mapping[str, Record]) -> Drawing:
    """Sorted rates of clients before and after, by run."""
    curves = _curves(found)
    told = [f"{label}: mean {sum(rates) / len(rates):.1%}, worst {rates[-1]:.1%}" for label, rates in curves.items()]
    return Drawing(
        "client-results",
        "Every client",
        "Clients in the order of their word error rate, each line in its own order. Above 100 % more was written down "
        "than was said, as happens with a handful of words.",
        f"Word error rate per client, sorted. {'; '.join(told)}.",
        partial(sorted_rates, curves, x="clients, best understood first"),
    )


def _error_table(found: Mapping[str, Record]) -> Table:
    before = said_once((label, _cells(one, "before")) for label, one in found.items())
    rows: list[Row] = [(f"before: {labels}" if len(before) > 1 else "before", *cells) for labels, cells in before]
    rows += [(label, *_cells(one, "after")) for label, one in found.items()]
    headings = ("", "clients", "mean WER", "without those above 100 %", "median", "above 50 %", "above 100 %", "better")
    note = (
        "Each client counts once. Those above 100 % are others before than after, so that means without them are not "
        "of the same clients. ‘Better’ is the share of clients whose error rate is lower than before."
    )
    return Table("client-results", "Errors on clients’ held-out speech", headings, tuple(rows), note)


def _cells(results: Record, when: str) -> Row:
    numbers, clients = results[when], results["clients"]
    return (
        integer(clients),
        percent(numbers["mean"]),
        percent(numbers["mean_without_above_100"]),
        percent(numbers["spread"]["median"]),
        percent(numbers["share_above_50"]),
        percent(numbers["share_above_100"]),
        percent(results["better"] / clients if when == "after" else None),
    )


def _amount_table(found: Mapping[str, Record]) -> Table:
    rows = [
        (
            label,
            integer(part["clients"]),
            "–".join(number_text(seconds) for seconds in part["seconds"]),
            percent(part["before"]),
            percent(part["after"]),
            f"{100 * (part['after'] - part['before']):+.1f}",
        )
        for label, one in found.items()
        for part in one["by_seconds"]
    ]
    headings = ("", "clients", "seconds of speech", "mean WER before", "after", "points")
    note = "Quarters of the clients, from those with least speech to those with most."
    return Table("client-amounts", "By amount of speech", headings, tuple(rows), note)
