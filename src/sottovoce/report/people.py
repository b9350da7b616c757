"""Errors by person: test speakers and their groups, clients on held-out speech, sample transcripts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import jiwer
from matplotlib.figure import Figure

from sottovoce.base.drawing import COLOURS
from sottovoce.base.tables import NOTHING, Row, Table
from sottovoce.evaluation.tables import GROUPS_SHOWN
from sottovoce.report.drawings import (
    Drawing,
    draw_lines,
    finish_axes,
    label_decades,
    line_styles,
    new_axes,
    percent_labels,
    plot_marker,
    sorted_rates,
)
from sottovoce.report.parts import (
    OPEN_FOLDS,
    Fold,
    MacroPart,
    PagePart,
    PageSection,
    make_drawing,
    make_section,
    make_table,
    merge_starts,
    show_count,
    show_number,
    show_percent,
    show_text,
    unique_slugs,
)
from sottovoce.report.records import Record, RunRecord

MARGIN = 1.05  # beyond the largest rate, as figures leave it by themselves


# Test speakers.


class AxisTops(NamedTuple):
    """Where axes of error rates end: of single speakers, and of groups. None leaves it to a figure."""

    speakers: float | None = None
    groups: float | None = None


def people_section(runs: Sequence[RunRecord]) -> PageSection | None:
    tests = list(dict.fromkeys(name for run in runs for name in run.tests))
    tops = shared_tops(runs, tests)
    parts: list[PagePart] = [error_table(runs)]
    for test, slug in unique_slugs(tests).items():
        parts += speaker_drawings(runs, test, slug=slug, tops=tops)
    groups = group_table(runs)
    if groups.rows:
        parts.append(Fold("The numbers of the groups", (groups,)))
    return make_section("people", parts)


def error_table(runs: Sequence[RunRecord]) -> Table:
    """Errors on the test sets, by kind, with those of the model a run started from."""
    before = merge_starts(
        (run.label, (name, *_errors(test))) for run in runs for name, test in run.start_tests.items() if "wer" in test
    )
    rows = [(label, *cells) for label, cells in before]
    rows += [(run.label, name, *_errors(test)) for run in runs for name, test in run.tests.items() if "wer" in test]
    return make_table("tests", rows)


def group_table(runs: Sequence[RunRecord]) -> Table:
    """WER of groups of speakers, every run and test set."""
    rows = [
        (*(run.label, name, fact, group), show_count(n["speakers"]), show_count(n["words"]), *_rate(n))
        for run in runs
        for name, test in run.tests.items()
        for fact, group, n in group_list(test)
    ]
    return make_table("groups", rows)


def speaker_table(runs: Sequence[RunRecord]) -> Table:
    """WER of every test speaker: for the file; the page draws it."""
    rows = [
        (run.label, name, show_text(person["speaker"]), show_count(person.get("words")), show_percent(person["wer"]))
        for run in runs
        for name, test in run.tests.items()
        for person in test.get("per_speaker") or ()
    ]
    return make_table("speakers", rows)


def _rate(numbers: Record) -> Row:
    found = numbers.get("wer_interval")
    interval = f"{100 * found[0]:.1f} to {100 * found[1]:.1f} %" if found else NOTHING
    return show_percent(numbers.get("wer")), interval


def _errors(test: Record) -> Row:
    words = test.get("words") or 0
    shares = (test.get(name) for name in ("substitutions", "deletions", "insertions"))
    return (
        *_rate(test),
        show_percent(test.get("cer")),
        *(show_percent(share / words if words and share is not None else None) for share in shares),
        show_count(test.get("words")),
        show_count(test.get("speakers")),
    )


def shared_tops(runs: Sequence[RunRecord], tests: Sequence[str]) -> AxisTops:
    """Ends that suit all test sets, whose figures are looked at side by side; one alone needs none."""
    if len(tests) < 2:
        return AxisTops()
    found = [run.tests[name] for run in runs for name in tests if name in run.tests]
    people = [rate for test in found for rate in _speaker_rates(test)]
    groups = [numbers for test in found for _, _, numbers in group_list(test)]
    ends = [rate for n in groups for rate in (n["wer"], *(n.get("wer_interval") or ())) if rate is not None]
    return AxisTops(*(MARGIN * max(rates) if rates and max(rates) > 0 else None for rates in (people, ends)))


def speaker_drawings(runs: Sequence[RunRecord], test: str, *, slug: str, tops: AxisTops) -> list[Drawing]:
    """WER of every speaker of a test set, and of groups of them, one line for each run. `slug` ends their names."""
    found = []
    rates = {run.label: _speaker_rates(run.tests.get(test, {})) for run in runs}
    if any(rates.values()):
        worst = [f"{label}: median {median(r):.1%}, worst {r[-1]:.1%}" for label, r in rates.items() if r]
        alt = f"Word error rate per speaker of {test}, sorted. {'; '.join(worst)}."
        draw = partial(sorted_rates, rates, x="speakers, lowest rate first", top=tops.speakers)
        found.append(make_drawing(f"speakers-{slug}", alt, draw, kind="speakers", test=test))
    groups = {run.label: group_list(run.tests.get(test, {})) for run in runs}
    if any(groups.values()) and len(runs) <= len(COLOURS):  # more than that nobody can distinguish in one row
        named = [f"{fact} {name} {g['wer']:.1%}" for fact, name, g in next(filter(None, groups.values())) if g["wer"]]
        alt = f"Word error rate by group: {', '.join(named)}."
        draw = partial(_group_figure, groups, top=tops.groups)
        found.append(make_drawing(f"groups-{slug}", alt, draw, kind="groups", test=test))
    return found


def group_list(test: Record) -> list[tuple[str, str, Record]]:
    """(fact, value, numbers) of the groups of a test set: for each fact those with most words."""
    found = []
    for fact, groups in (test.get("groups") or {}).items():
        largest = sorted(groups, key=lambda name: -groups[name]["words"])[:GROUPS_SHOWN]
        found += [(fact, name, groups[name]) for name in groups if name in largest]
    return found


def _speaker_rates(test: Record) -> list[float]:
    return sorted(person["wer"] for person in test.get("per_speaker") or () if person["wer"] is not None)


def _group_figure(groups: Mapping[str, Sequence[tuple[str, str, Record]]], *, top: float | None) -> Figure:
    sizes = {(fact, name): numbers["speakers"] for found in groups.values() for fact, name, numbers in found}
    places = list(sizes)
    figure, axes = new_axes(height=1.1 + 0.12 * len(groups) + 0.3 * len(places))
    shift = 0.5 / max(len(groups), 1)
    for number, (style, found) in enumerate(zip(line_styles(groups), groups.values(), strict=True)):
        for fact, name, numbers in found:
            place = places.index((fact, name)) + shift * (number - (len(groups) - 1) / 2)
            if numbers["wer"] is None:
                continue
            if numbers.get("wer_interval"):
                axes.plot(numbers["wer_interval"], [place, place], color=style.colour, linewidth=1.8, alpha=0.6)
            is_first = (fact, name) == found[0][:2]
            plot_marker(axes, style, numbers["wer"], place, is_labelled=is_first, clip=False)
    axes.set_yticks(range(len(places)), [f"{fact}: {name} ({sizes[fact, name]:,})" for fact, name in places])
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xlim(0, top)
    axes.xaxis.set_major_formatter(percent_labels())
    finish_axes(axes, x="word error rate", y="", grid="x")
    axes.tick_params(axis="y", length=0)
    return figure


# Clients: their data, and each on speech that it has held out (Gao et al. 2022, Figure 4).


def clients_section(runs: Sequence[RunRecord]) -> PageSection | None:
    return make_section("clients", [*client_drawings(runs), client_table(runs), client_wer_table(runs)])


def client_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """How much speech the clients have: deciles, on a logarithmic axis."""
    deciles = {run.label: list(run.population.get("seconds_per_client_deciles") or []) for run in runs}
    known = {label: [max(value, 1e-3) for value in values] for label, values in deciles.items() if values}
    if not known:
        return []
    ends = [f"{label}: from {v[0]:,.0f} s over {v[len(v) // 2]:,.0f} s to {v[-1]:,.0f} s" for label, v in known.items()]
    alt = f"Seconds of speech per client, sorted. {'; '.join(ends)}."
    return [make_drawing("clients", alt, partial(_client_figure, known))]


def client_table(runs: Sequence[RunRecord]) -> Table:
    """Who took part."""
    rows = []
    for run in (run for run in runs if run.population):
        found, seconds = run.population, run.population.get("seconds_per_client") or {}
        spread = (show_number(seconds.get(name)) for name in ("min", "median", "max"))
        clients = show_count(found.get("population_size")), show_number(found.get("hours"))
        rows.append((run.label, show_text(found.get("privacy_unit")), *clients, *spread))
    return make_table("clients", rows)


def client_wer_table(runs: Sequence[RunRecord]) -> Table:
    """WER of clients, where it was measured: noised sums, of a release as of a simulation."""
    rows = [
        (
            run.label,
            show_count(record["step"]),
            show_percent(record["client_wer"]),
            "–".join(show_percent(rate) for rate in record["client_wer_interval"]),
            show_count(round(record["client_words"])),
        )
        for run in runs
        for record in run.metrics
        if "client_wer" in record
    ]
    return make_table("client-wer", rows)


def _client_figure(deciles: Mapping[str, Sequence[float]]) -> Figure:
    figure, axes = draw_lines(
        {label: [(rank / (len(v) - 1), value) for rank, value in enumerate(v)] for label, v in deciles.items()}
    )
    axes.set_yscale("log")
    label_decades(axes.yaxis)
    axes.xaxis.set_major_formatter(percent_labels())
    finish_axes(axes, x="share of clients", y="seconds of speech")
    return figure


def client_results_section(runs: Sequence[RunRecord]) -> PageSection | None:
    found = {run.label: results for run in runs if (results := _client_results(run))}
    if not found:
        return None
    return make_section("client-results", [_client_errors(found), client_error_drawing(found), _client_amounts(found)])


def _client_results(run: RunRecord) -> Record:
    """What a run records of its clients; nothing of a release, whatever is in its folder."""
    found: Record = {} if run.is_release else run.results.get("clients") or {}
    return found if found.get("per_client") else {}


def client_error_drawing(found: Mapping[str, Record]) -> Drawing:
    """Sorted rates of clients: first of the models that runs started from, each once, then of the runs."""

    def rates(results: Record, when: str) -> tuple[float, ...]:
        return tuple(sorted(client[when] for client in results["per_client"]))

    curves = dict(merge_starts((label, rates(one, "before")) for label, one in found.items()))
    curves |= {label: rates(one, "after") for label, one in found.items()}
    means = [f"{label}: mean {sum(found) / len(found):.1%}, worst {found[-1]:.1%}" for label, found in curves.items()]
    alt = f"Word error rate per client, sorted. {'; '.join(means)}."
    return make_drawing("client-results", alt, partial(sorted_rates, curves, x="clients, lowest rate first"))


def _client_errors(found: Mapping[str, Record]) -> Table:
    def cells(results: Record, when: str) -> Row:
        numbers, clients = results[when], results["clients"]
        rates = (numbers[name] for name in ("share_above_50", "share_above_100"))
        means = (numbers["mean"], numbers["mean_without_above_100"], numbers["spread"]["median"], *rates)
        better = results["better"] / clients if when == "after" else None
        return (show_count(clients), *map(show_percent, (*means, better)))

    rows = [(label, *row) for label, row in merge_starts((label, cells(one, "before")) for label, one in found.items())]
    return make_table("client-results", [*rows, *((label, *cells(one, "after")) for label, one in found.items())])


def _client_amounts(found: Mapping[str, Record]) -> Table:
    rows = [
        (
            label,
            show_count(part["clients"]),
            "–".join(show_number(seconds) for seconds in part["seconds"]),
            show_percent(part["before"]),
            show_percent(part["after"]),
            f"{100 * (part['after'] - part['before']):+.1f}",
        )
        for label, one in found.items()
        for part in one["by_seconds"]
    ]
    return make_table("client-amounts", rows)


# Sample transcripts.


@dataclass(frozen=True)
class AlignedWords:
    """Words that were recognised; or not, if `reference` words became other `hypothesis` words."""

    reference: str
    hypothesis: str
    is_error: bool


def transcript_section(runs: Sequence[RunRecord]) -> PageSection | None:
    parts: list[PagePart] = []
    for run in runs:
        for name, test in run.tests.items():
            if test.get("samples"):
                aligned = [align_words(sample["reference"], sample["hypothesis"]) for sample in test["samples"]]
                title = f"{run.label}, {name}" if len(runs) > 1 else name
                parts.append(Fold(title, (MacroPart("transcripts", aligned),), is_open=len(parts) < OPEN_FOLDS))
    return make_section("transcripts", [MacroPart("legend"), *parts]) if parts else None


def align_words(reference: str, hypothesis: str) -> list[AlignedWords]:
    """The shortest edit from what was said to what was recognised.

    >>> [(w.reference, w.hypothesis, w.is_error) for w in align_words("one two three", "one too three four")]
    [('one', 'one', False), ('two', 'too', True), ('three', 'three', False), ('', 'four', True)]
    """
    said, recognised = reference.split(), hypothesis.split()
    if not said or not recognised:
        return [AlignedWords(" ".join(said), " ".join(recognised), is_error=True)] if said or recognised else []
    return [
        AlignedWords(
            " ".join(said[step.ref_start_idx : step.ref_end_idx]),
            " ".join(recognised[step.hyp_start_idx : step.hyp_end_idx]),
            is_error=step.type != "equal",
        )
        for step in jiwer.process_words(" ".join(said), " ".join(recognised)).alignments[0]
    ]
