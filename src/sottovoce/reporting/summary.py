"""The short report of one run or several: a table and notes, which open the page as well.

Everything comes from run folders: what was not written down cannot be claimed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table as TerminalTable

from sottovoce.evaluation.evaluate import MANY_COLLAPSED, told_collapsed
from sottovoce.files import as_utf8, written_atomically
from sottovoce.privacy.calibration import Accountant
from sottovoce.reporting.cells import epsilon_text
from sottovoce.reporting.differences import difference_table
from sottovoce.reporting.joint import together
from sottovoce.reporting.larger_population import accountant_of, larger_population
from sottovoce.reporting.noise_tables import noise_tables
from sottovoce.reporting.page import Report, build_report, write_page
from sottovoce.reporting.records import Record, RunRecord, read_run
from sottovoce.reporting.result_tables import PAPER_WER, paper_tables
from sottovoce.reporting.shared_people import NOBODY, Declared
from sottovoce.reporting.titles import title_for
from sottovoce.reporting.verdict import Verdict, told_together, verdicts
from sottovoce.tables import Table
from sottovoce.training.run_folder import RESULTS, reset_file_times
from sottovoce.training.start_model import format_communication

REPORT, TEXT = "report.html", "report.txt"
START = "before federation"
TITLE = "On unseen speakers"
ERRORS, FIGURES = ("WER", "95 % interval"), ("loss", "accuracy")
EPSILON = "ε here (PLD / RDP)"
POPULATION: Mapping[Accountant, str] = {"pld": "population for ε ≤ 8 (PLD)", "rdp": "population for ε ≤ 8 (RDP)"}
BRIEFLY = {
    EPSILON: "ε here\n(PLD / RDP)",
    **{heading: heading.replace(" for", "\nfor") for heading in POPULATION.values()},
}


@dataclass(frozen=True)
class Summary:
    """The report of some runs, and where its page lies. `together` is what they promise to somebody in all of them.

    `tables` are those of a paper, with its numbers beside ours. `differences` says which runs are told apart.
    """

    path: Path
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    together: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    differences: Table | None = None
    verdicts: tuple[Verdict, ...] = ()

    @property
    def verdict(self) -> str:
        """What ε is worth, in a few sentences."""
        return told_together(self.verdicts)

    def report(self, records: Sequence[RunRecord], *, title: str) -> Report:
        """The page that opens with it."""
        return build_report(
            records,
            title=title_for(title, records),
            judged=self.verdicts,
            headline=self.headline,
            differences=self.differences,
            together=self.together,
            notes=self.notes,
        )

    @property
    def tables_below(self) -> tuple[Table, ...]:
        """What follows the table, in the terminal and in the text."""
        return self.tables if self.differences is None else (self.differences, *self.tables)

    @property
    def headline(self) -> Table:
        """For the page. There as in the terminal, the name of an only test set takes no column."""
        table, tests = Table("headline", TITLE, self.headings, self.rows, words=2), {row[1] for row in self.rows}
        return table if len(tests) != 1 else replace(table.without_column(1), title=f"{TITLE} ({tests.pop()})")

    def for_terminal(self, *, brief: bool = False) -> TerminalTable:
        """A `brief` one is for narrow terminals: of populations their number alone, under headings of two lines."""
        table = replace(self.headline, title=TITLE)
        if brief:
            headings = tuple(BRIEFLY.get(heading, heading) for heading in table.headings)
            rows = tuple(tuple(cell.partition(" (cohort")[0] for cell in row) for row in table.rows)
            table = replace(table, headings=headings, rows=rows)
        return table.for_terminal(breaking=brief)


def write_report(folders: Mapping[str, Path], out: Path, *, title: str) -> Summary:
    """Write `report.html` and `report.txt` for the finished runs in `folders`, by label, into `out`."""
    records = [read_run(label, folder) for label, folder in folders.items()]
    for record in records:
        if not record.results:
            raise FileNotFoundError(record.folder / RESULTS)
    summary = summarise_runs(records, path=out / REPORT)
    write_page(summary.path, summary.report(records, title=title))
    below = [(table.title, *table.as_lines(), table.note, "") for table in summary.tables_below]
    table = Table("headline", TITLE, summary.headings, summary.rows)
    lines = [title_for(title, records), "", summary.verdict, "", *table.as_lines(), ""]
    lines += [*(line for table in below for line in table), *summary.together, *summary.notes]
    with written_atomically(out / TEXT) as file:
        file.write(as_utf8("\n".join(lines) + "\n"))
    if any(record.is_release for record in records):
        for place in (summary.path, out / TEXT, *(record.folder for record in records if record.is_release)):
            reset_file_times(place)
    return summary


def summarise_runs(records: Sequence[RunRecord], *, path: Path, declared: Declared = NOBODY) -> Summary:
    """The table and the notes of the finished runs among `records`; `path` is where their page will lie.

    What is promised together is promised by the unfinished ones as well: they have released models, too. Of runs that
    are `declared` to have nobody in common it is said that somebody says so.
    """
    runs = [record for record in records if record.tests]
    federated = [run for run in runs if run.privacy]
    accountant = accountant_of(federated)
    private = (EPSILON, POPULATION[accountant]) if federated else ()
    figures = _figures_of(runs)
    headings = ("", "test set", *figures, *private)
    rows = [
        *_start_rows(federated, figures),
        *(row for run in runs for row in _rows(run, figures, accountant=accountant if federated else None)),
    ]
    return Summary(
        path,
        headings,
        tuple(rows),
        tuple(_notes(runs, accountant)),
        together=together(records, declared),
        tables=_of_papers(runs),
        differences=difference_table(runs, start=START),
        verdicts=verdicts(records),
    )


def _of_papers(runs: Sequence[RunRecord]) -> tuple[Table, ...]:
    """Several runs as a paper prints them: in the layout of its table of noise and clipping, or cell by cell."""
    if len(runs) < 2:
        return ()
    return tuple(noise_tables(runs) or [table for table in paper_tables(runs) if table.name == PAPER_WER])


def _figures_of(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """The columns that some test set has something for."""
    found = {name for run in runs for result in run.tests.values() for name in _cells(result)}
    return tuple(name for name in (*ERRORS, *FIGURES) if name in found) or ERRORS


def _start_rows(federated: Sequence[RunRecord], figures: tuple[str, ...]) -> list[tuple[str, ...]]:
    """One row per test set for the model they all started from; nothing where they started from different ones."""
    starts = [_without_people(run.start_tests) for run in federated]
    if not starts or any(start != starts[0] for start in starts):
        return []
    first = federated[0]
    names = [name for name in _tests_first(first) if name in starts[0]]
    return [(START, first.named(name), *_row(starts[0][name], figures), "not private", "") for name in names]


def _tests_first(run: RunRecord) -> list[str]:
    """Its test sets, the one that it is known by before the others; that which it was chosen on, if it is among them,
    last."""
    return sorted(run.tests, key=lambda name: (run.is_chosen_on(name), name != run.headline_test))


def _without_people(tests: Mapping[str, Any]) -> dict[str, Any]:
    """Every release has pseudonyms of its own for the same speakers."""
    return {name: {key: value for key, value in test.items() if key != "per_speaker"} for name, test in tests.items()}


def _rows(run: RunRecord, figures: tuple[str, ...], *, accountant: Accountant | None) -> list[tuple[str, ...]]:
    privacy = () if accountant is None else (_epsilon(run.privacy), _population(run.privacy, accountant))
    return [(run.label, run.named(name), *_row(run.tests[name], figures), *privacy) for name in _tests_first(run)]


def _row(result: Mapping[str, Any], figures: tuple[str, ...]) -> list[str]:
    cells = _cells(result)
    return [cells.get(name, "") for name in figures]


def _cells(result: Mapping[str, Any]) -> dict[str, str]:
    """A test set by column: errors, or the figures of a model that writes nothing down."""
    if "wer" in result:
        interval = result["wer_interval"]
        between = "" if interval is None else f"{interval[0]:.1%} to {interval[1]:.1%}"
        return dict(zip(ERRORS, (f"{result['wer']:.1%}", between), strict=True))
    loss, accuracy = FIGURES
    told = {} if "accuracy" not in result else {accuracy: f"{result['accuracy']:.1%} (chance {result['chance']:.1%})"}
    return {loss: f"{result['loss']:.3f}", **told}


def _epsilon(privacy: Record) -> str:
    if not privacy or privacy["epsilon_rdp"] is None:
        return "not private"
    return f"{epsilon_text(privacy['epsilon_pld'])} / {epsilon_text(privacy['epsilon_rdp'])}"


def _population(privacy: Record, accountant: Accountant) -> str:
    useful = larger_population(privacy, accountant)
    if useful is None:
        return ""
    if "unreachable" in useful:
        return "none"
    too_large = "; δ is too large for it" if useful.get("delta_too_large") else ""
    return f"{useful['population_size']:,} (cohort {useful['cohort_size']:,}, ε = {useful['epsilon']:.2g}{too_large})"


def _notes(runs: Sequence[RunRecord], accountant: Accountant) -> list[str]:
    notes = []
    for run in runs:
        notes += _deaf(run)
        privacy = run.privacy
        if not privacy:
            continue
        ended = run.results["ended"]
        steps = f"{ended['step']:,} rounds" + (f" ({ended['words']})" if ended.get("words") else "")
        notes.append(
            f"{run.label}: {steps}, cohort {privacy['cohort_size']:,} of {privacy['population_size']:,}"
            f"{_sent(run.results)}; "
            f"{privacy['guarantee']}{_promised(privacy)}"
        )
        notes += _inside(run)
        notes += _understood(run)
    found = [run.privacy for run in runs if run.privacy]
    if any(privacy["epsilon_rdp"] is not None for privacy in found):
        notes.append(found[0]["covers"] + ".")
        notes.append(
            "A large ε promises next to nothing. The last column is the population at which the same recipe (noise on "
            f"the mean, sampling rate, rounds) reaches ε ≤ 8 by {accountant.upper()}, with a cohort that grows along."
        )
    return notes


def _inside(run: RunRecord) -> list[str]:
    """Of units that hold several people: what one of those is promised."""
    words = None if run.promise is None else run.promise.words_inside
    return [] if words is None else [f"{run.label}: ε in the table: {words}"]


def _understood(run: RunRecord) -> list[str]:
    """The last time that clients' word error rate was measured."""
    found = run.results.get("client_wer")
    if not found:
        return []
    last = found[-1]
    rate = "drowned in noise" if last["wer"] is None else f"{last['wer']:.1%}"
    low, high = last["wer_interval"]
    often = "" if len(found) == 1 else f", the last of {len(found)} times"
    return [
        f"{run.label}: WER of clients’ held-out speech {rate} ({low:.1%} to {high:.1%} with its noise) after round "
        f"{last['step']:,}{often}; ε covers it"
    ]


def _deaf(run: RunRecord) -> list[str]:
    """The test sets on which an attention stopped listening often."""
    tests = run.results.get("test", {})
    return [
        f"{run.label}: {told_collapsed(test['collapsed'], test['utterances'])} of {name}"
        for name, test in tests.items()
        if test.get("collapsed") and test["collapsed"] >= MANY_COLLAPSED * test["utterances"]
    ]


def _promised(privacy: Record) -> str:
    """Where fewer rounds were made than promised: the ε that holds is of all of them."""
    made, promised = privacy.get("steps"), privacy.get("promised_steps")
    if made == promised or promised is None or privacy["epsilon_rdp"] is None:
        return ""
    spent = f"; what is spent by then, {_epsilon(privacy['spent'])}, is no promise: the outputs decided when to stop"
    return f"; ε = {_epsilon(privacy)} (PLD / RDP) promised for {promised:,} rounds; {made:,} made{spent}"


def _sent(results: Mapping[str, Any]) -> str:
    """What travels; and how much of the model is trained, where that is not all of it."""
    if (sent := results.get("communication")) is None:
        return ""
    trained, total = sent["trained_parameters"], sent["trained_parameters"] + sent["frozen_parameters"]
    each_way = f", {format_communication(sent)}"
    if trained == total:
        return each_way
    first = f"{sent['bytes_down_first'] / 1e6:,.2f} MB down the first time"
    return f"{each_way} ({trained:,} of {total:,} parameters are trained; {first})"
