"""People: how the error differs between those a model was tested on, and how much speech each client gave."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sottovoce.drawing import COLOURS
from sottovoce.evaluation.table import GROUPS_SHOWN
from sottovoce.report.drawings import (
    Drawing,
    Pen,
    data_id,
    dress,
    label_decades,
    new_axes,
    pens,
    percents,
    plot,
    sorted_rates,
)
from sottovoce.report.records import Record, RunRecord

ROOM = 1.05  # beyond the largest rate, as figures leave it by themselves


class Tops(NamedTuple):
    """Where axes of error rates end: of single speakers, and of groups. None leaves it to a figure."""

    speakers: float | None = None
    groups: float | None = None


def shared_tops(runs: Sequence[RunRecord], tests: Sequence[str]) -> Tops:
    """Ends that suit all test sets, whose figures are looked at side by side; one alone needs none."""
    if len(tests) < 2:
        return Tops()
    found = [run.tests[name] for run in runs for name in tests if name in run.tests]
    people = [rate for test in found for rate in _speaker_rates(test)]
    groups = [numbers for test in found for _, _, numbers in group_list(test)]
    ends = [
        max([rate for rate in (n["wer"], *(n.get("wer_interval") or ())) if rate is not None] or [0.0]) for n in groups
    ]
    return Tops(*(ROOM * max(rates) if rates and max(rates) > 0 else None for rates in (people, ends)))


def speaker_drawings(runs: Sequence[RunRecord], test: str, *, slug: str, tops: Tops) -> list[Drawing]:
    """WER of every speaker of a test set, and of groups of them, one line for each run. `slug` ends their names."""
    found = []
    rates = {run.label: _speaker_rates(run.tests.get(test, {})) for run in runs}
    if any(rates.values()):
        worst = [f"{label}: median {median(r):.1%}, worst {r[-1]:.1%}" for label, r in rates.items() if r]
        found.append(
            Drawing(
                f"speakers-{slug}",
                f"Every speaker of {test}",
                "Speakers in the order of their word error rate, from the best understood to the worst. A steep end on "
                "the right means that a few people are left behind.",
                f"Word error rate per speaker of {test}, sorted. {'; '.join(worst)}.",
                partial(sorted_rates, rates, x="speakers, best understood first", top=tops.speakers),
            )
        )
    groups = {run.label: group_list(run.tests.get(test, {})) for run in runs}
    if any(groups.values()) and len(runs) <= len(COLOURS):  # more than that nobody can tell apart in one row
        named = [f"{fact} {name} {g['wer']:.1%}" for fact, name, g in next(filter(None, groups.values())) if g["wer"]]
        found.append(
            Drawing(
                f"groups-{slug}",
                f"Groups of speakers of {test}",
                "Word error rate of speakers who share a fact, with the number of them. Bars hold 95 % of the rates of "
                "speakers drawn anew; a group of fewer than five people has none.",
                f"Word error rate by group: {', '.join(named)}.",
                partial(_group_rates, groups, top=tops.groups),
            )
        )
    return found


def client_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """How much speech the clients have: deciles, on a logarithmic axis."""
    deciles = {run.label: list(run.population.get("seconds_per_client_deciles") or []) for run in runs}
    known = {label: [max(value, 1e-3) for value in values] for label, values in deciles.items() if values}
    if not known:
        return []
    told = [f"{label}: from {v[0]:,.0f} s over {v[len(v) // 2]:,.0f} s to {v[-1]:,.0f} s" for label, v in known.items()]
    return [
        Drawing(
            "clients",
            "Speech per client",
            "Seconds of speech of each client, sorted, on a logarithmic axis. Few clients with very much and many with "
            "very little is what sets a federation apart from shuffled data.",
            f"Seconds of speech per client, sorted. {'; '.join(told)}.",
            partial(_client_seconds, known),
        )
    ]


def group_list(test: Record) -> list[tuple[str, str, Record]]:
    """(fact, value, numbers) of the groups of a test set: for each fact those with most words."""
    found = []
    for fact, groups in (test.get("groups") or {}).items():
        largest = sorted(groups, key=lambda name: -groups[name]["words"])[:GROUPS_SHOWN]
        found += [(fact, name, groups[name]) for name in groups if name in largest]
    return found


def _speaker_rates(test: Record) -> list[float]:
    return sorted(person["wer"] for person in test.get("per_speaker") or () if person["wer"] is not None)


def _group_rates(groups: Mapping[str, Sequence[tuple[str, str, Record]]], *, top: float | None) -> Figure:
    places = list(dict.fromkeys((fact, name) for found in groups.values() for fact, name, _ in found))
    sizes = {(fact, name): numbers["speakers"] for found in groups.values() for fact, name, numbers in found}
    figure, axes = new_axes(height=1.1 + 0.12 * len(groups) + 0.3 * len(places))
    shift = 0.5 / max(len(groups), 1)
    for number, (pen, found) in enumerate(zip(pens(list(groups)), groups.values(), strict=True)):
        for fact, name, numbers in found:
            if numbers["wer"] is not None:
                place = places.index((fact, name)) + shift * (number - (len(groups) - 1) / 2)
                _draw_group(axes, pen, numbers, place, labelled=(fact, name) == found[0][:2])
    axes.set_yticks(range(len(places)), [f"{fact}: {name} ({sizes[fact, name]:,})" for fact, name in places])
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xlim(0, top)
    axes.xaxis.set_major_formatter(percents())
    dress(axes, x="word error rate", y="", grid="x")
    axes.tick_params(axis="y", length=0)
    return figure


def _draw_group(axes: Axes, pen: Pen, numbers: Record, place: float, *, labelled: bool) -> None:
    if numbers.get("wer_interval"):
        axes.plot(numbers["wer_interval"], [place, place], color=pen.colour, linewidth=1.8, alpha=0.6)
    style: dict[str, Any] = {
        "color": pen.colour,
        "markersize": 5,
        "clip_on": False,
        "label": pen.label if labelled else None,
    }
    axes.plot(numbers["wer"], place, pen.marker, gid=data_id(axes), **style)


def _client_seconds(deciles: Mapping[str, Sequence[float]]) -> Figure:
    figure, axes = new_axes()
    for pen, values in zip(pens(list(deciles)), deciles.values(), strict=True):
        plot(axes, pen, [(rank / (len(values) - 1), value) for rank, value in enumerate(values)])
    axes.set_yscale("log")
    label_decades(axes.yaxis)
    axes.xaxis.set_major_formatter(percents())
    dress(axes, x="share of clients", y="seconds of speech")
    return figure
