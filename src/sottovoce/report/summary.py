"""The short report of one run or several: a table and notes, which open the page as well.

Everything comes from run folders: what was not recorded cannot be claimed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table as TerminalTable

from sottovoce.base.files import encode_utf8, write_atomically
from sottovoce.base.tables import Row, Table
from sottovoce.evaluation.score import MANY_COLLAPSED, format_collapsed
from sottovoce.privacy.calibration import Accountant
from sottovoce.report.comparisons import difference_table
from sottovoce.report.joint import NOBODY, Declared, joint_sentences
from sottovoce.report.page import Opening, ReportPage, build_report, write_page
from sottovoce.report.paper_comparison import PAPER_WER, PAPER_WERR, noise_tables, paper_tables
from sottovoce.report.parts import show_epsilon
from sottovoce.report.populations import common_accountant, larger_population
from sottovoce.report.records import Record, RunRecord, read_run
from sottovoce.report.run_facts import has_converged, report_title, start_converged
from sottovoce.report.verdict import Verdict, judge_runs, summarise_verdicts
from sottovoce.training.run_folder import RESULTS, reset_file_times
from sottovoce.training.start_model import format_bytes, format_communication

REPORT, TEXT = "report.html", "report.txt"
START = "before federation"
TITLE = "On unseen speakers"
ERRORS, FIGURES = ("WER", "95 % interval"), ("loss", "accuracy")
CONVERGED = "converged"
EPSILON = "ε here (PLD / RDP)"
POPULATION = "population for ε ≤ 8 ({})"


@dataclass(frozen=True)
class Summary:
    """The report of some runs, and where its page lies. `together` is what they promise to somebody in all of them.

    `tables` are those of a paper, with its numbers beside ours. `differences` compares the runs pair by pair.
    """

    path: Path
    headings: Row
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    together: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    differences: Table | None = None
    verdicts: tuple[Verdict, ...] = ()

    @property
    def verdict(self) -> str:
        """What ε means, in a few sentences."""
        return summarise_verdicts(self.verdicts)

    def report(self, records: Sequence[RunRecord], *, title: str) -> ReportPage:
        """The page that opens with it."""
        opening = Opening(self.verdicts, self.headline, self.differences, self.together, self.notes)
        return build_report(records, title=report_title(title, records), opening=opening)

    @property
    def tables_below(self) -> tuple[Table, ...]:
        """What follows the table, in the terminal and in the text."""
        return self.tables if self.differences is None else (self.differences, *self.tables)

    @property
    def headline(self) -> Table:
        """For the page. There as in the terminal, the name of an only test set takes no column."""
        table, tests = Table("headline", TITLE, self.headings, self.rows, words=3), {row[1] for row in self.rows}
        return table if len(tests) != 1 else replace(table.without_column(1), title=f"{TITLE} ({tests.pop()})")

    def for_terminal(self, *, brief: bool = False) -> TerminalTable:
        """A `brief` one is for narrow terminals: of populations their number alone, under headings of two lines."""
        table = replace(self.headline, title=TITLE)
        if brief:
            short = {EPSILON: EPSILON.replace(" (", "\n(")}
            headings = tuple(short.get(h, h.replace("population for", "population\nfor")) for h in table.headings)
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
    lines = [report_title(title, records), "", summary.verdict, "", *table.as_lines(), ""]
    lines += [*(line for table in below for line in table), *summary.together, *summary.notes]
    with write_atomically(out / TEXT) as file:
        file.write(encode_utf8("\n".join(lines) + "\n"))
    if any(record.is_release for record in records):
        for place in (summary.path, out / TEXT, *(record.folder for record in records if record.is_release)):
            reset_file_times(place)
    return summary


def summarise_runs(records: Sequence[RunRecord], *, path: Path, declared: Declared = NOBODY) -> Summary:
    """The table and the notes of the finished runs among `records`; `path` is where their page will lie.

    What is promised together is promised by the unfinished ones as well: they have released models, too. Of runs that
    are `declared` to have nobody in common, the declaration is quoted.
    """
    runs = [record for record in records if record.tests]
    federated = [run for run in runs if run.privacy]
    accountant = common_accountant(federated)
    found = {name for run in runs for result in run.tests.values() for name in _scores(result)}
    figures = tuple(name for name in (*ERRORS, *FIGURES) if name in found) or ERRORS
    rows = _start_rows(federated, figures)
    for run in runs:
        private = (_epsilon(run.privacy), _population(run.privacy, accountant)) if federated else ()
        rows += [
            (run.label, run.test_title(n), has_converged(run), *_cells(run.tests[n], figures), *private)
            for n in _tests_first(run)
        ]
    return Summary(
        path,
        ("", "test set", CONVERGED, *figures, *((EPSILON, POPULATION.format(accountant.upper())) if federated else ())),
        tuple(rows),
        tuple(_notes(runs, accountant)),
        together=joint_sentences(records, declared),
        tables=_of_papers(runs),
        differences=difference_table(runs, start=START),
        verdicts=judge_runs(records),
    )


def _of_papers(runs: Sequence[RunRecord]) -> tuple[Table, ...]:
    """Several runs as a paper prints them: in the layout of its table of noise and clipping, or cell by cell."""
    if len(runs) < 2:
        return ()
    cells = (PAPER_WER, PAPER_WERR)
    return tuple(noise_tables(runs) or [table for table in paper_tables(runs) if table.name in cells])


def _start_rows(federated: Sequence[RunRecord], figures: Row) -> list[Row]:
    """One row per test set for the model they all started from; nothing where they started from different ones."""
    # Without single speakers, for whom every release has pseudonyms of its own.
    starts = [
        {name: {k: v for k, v in test.items() if k != "per_speaker"} for name, test in run.start_tests.items()}
        for run in federated
    ]
    if not starts or any(start != starts[0] for start in starts):
        return []
    names = [name for name in _tests_first(federated[0]) if name in starts[0]]
    titles = [federated[0].test_title(name) for name in names]
    scores = [_cells(starts[0][name], figures) for name in names]
    converged = start_converged(federated[0])
    return [(START, title, converged, *cells, "not private", "") for title, cells in zip(titles, scores, strict=True)]


def _tests_first(run: RunRecord) -> list[str]:
    """Its test sets, the headline one first; that which the model was chosen on, if it is among them, last."""
    return sorted(run.tests, key=lambda name: (run.is_chosen_on(name), name != run.headline_test))


def _cells(result: Mapping[str, Any], figures: Row) -> list[str]:
    scores = _scores(result)
    return [scores.get(name, "") for name in figures]


def _scores(result: Mapping[str, Any]) -> dict[str, str]:
    """A test set by column: errors, or the figures of a model that writes no text."""
    if "wer" in result:
        ends = result["wer_interval"]
        interval = "" if ends is None else f"{ends[0]:.1%} to {ends[1]:.1%}"
        return dict(zip(ERRORS, (f"{result['wer']:.1%}", interval), strict=True))
    found = {"loss": f"{result['loss']:.3f}"}
    if "accuracy" in result:
        found["accuracy"] = f"{result['accuracy']:.1%} (chance {result['chance']:.1%})"
    return found


def _epsilon(privacy: Record) -> str:
    if not privacy or privacy["epsilon_rdp"] is None:
        return "not private"
    return f"{show_epsilon(privacy['epsilon_pld'])} / {show_epsilon(privacy['epsilon_rdp'])}"


def _population(privacy: Record, accountant: Accountant) -> str:
    useful = larger_population(privacy, accountant)
    if useful is None:
        return ""
    if "unreachable" in useful:
        return "none"
    too_large = "; δ is too large for it" if useful.get("delta_too_large") else ""
    return f"{useful['population_size']:,} (cohort {useful['cohort_size']:,}, ε = {useful['epsilon']:.2g}{too_large})"


def _notes(runs: Sequence[RunRecord], accountant: Accountant) -> Iterator[str]:
    for run in runs:
        for note in (*_testing_notes(run), *(_privacy_notes(run) if run.privacy else ())):
            yield f"{run.label}: {note}"
    found = [run.privacy for run in runs if run.privacy]
    if any(privacy["epsilon_rdp"] is not None for privacy in found):
        yield found[0]["covers"] + "."
        yield (
            "Scale of ε: up to 1 strong, up to 8 moderate, up to 20 weak, above that next to nothing. The last column "
            "is the population at which the same recipe (noise on the mean, sampling rate, rounds) reaches ε ≤ 8 by "
            f"{accountant.upper()}, with a cohort that grows in proportion."
        )


def _testing_notes(run: RunRecord) -> Iterator[str]:
    """How test sets were decoded, those on which an attention decoder often stopped early, and clients not tested."""
    if (decoding := run.results.get("decoding")) is not None:
        yield f"test sets are decoded by {decoding}"
    of_clients = {} if run.is_release else run.results.get("clients") or {}
    if missing := of_clients.get("without_holdout"):
        yield f"{missing:,} of {of_clients['population_size']:,} clients hold out nothing and are not tested"
    for name, test in run.results.get("test", {}).items():
        if test.get("collapsed") and test["collapsed"] >= MANY_COLLAPSED * test["utterances"]:
            yield f"{format_collapsed(test['collapsed'], test['utterances'])} of {name}"


def _privacy_notes(run: RunRecord) -> Iterator[str]:
    """Rounds and guarantee, ε of one person inside a unit that holds several, and clients' word error rate."""
    privacy, ended = run.privacy, run.results["ended"]
    steps = f"{ended['step']:,} rounds" + (f" ({ended['words']})" if ended.get("words") else "")
    cohort = f"cohort {privacy['cohort_size']:,} of {privacy['population_size']:,}"
    yield f"{steps}, {cohort}{_sent(run.results)}; {privacy['guarantee']}{_promised(privacy)}"
    inside = None if run.guarantee is None else run.guarantee.words_inside
    if inside is not None:
        yield f"ε in the table: {inside}"
    if measured := run.results.get("client_wer"):
        last = measured[-1]
        rate = "hidden by noise" if last["wer"] is None else f"{last['wer']:.1%}"
        low, high = last["wer_interval"]
        often = "" if len(measured) == 1 else f", the last of {len(measured)} times"
        yield (
            f"WER of clients’ held-out speech {rate} ({low:.1%} to {high:.1%} with its noise) after round "
            f"{last['step']:,}{often}; ε covers it"
        )


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
    first = f"{format_bytes(sent['bytes_down_first'])} down the first time"
    return f"{each_way} ({trained:,} of {total:,} parameters are trained; {first})"
