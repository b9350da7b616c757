"""The report of one run or several: one HTML file that fetches nothing, and its figures and tables as files.

Everything comes from run folders: what was not written down cannot be claimed, and what is missing is named.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sottovoce import __version__
from sottovoce.drawing import Page, fill_template, write_drawing
from sottovoce.errors import InputError
from sottovoce.evaluation.measures import MEASURES
from sottovoce.files import as_utf8, written_atomically
from sottovoce.report.audit import audit_alarm, audit_section
from sottovoce.report.cells import epsilon_text, integer, number_text, percent, said_once
from sottovoce.report.clients import client_results_section
from sottovoce.report.cohorts import cohort_section
from sottovoce.report.drawings import Drawing, inline_svg, titled
from sottovoce.report.dynamics import dynamics_section
from sottovoce.report.gradients import gradient_section
from sottovoce.report.larger_population import accountant_of, larger_population
from sottovoce.report.opening import verdict_section
from sottovoce.report.parts import Chapter, MacroPart, PagePart, Paragraph, notice
from sottovoce.report.records import RunRecord
from sottovoce.report.result_tables import speaker_table
from sottovoce.report.sections import (
    bound_section,
    clients_section,
    layer_section,
    learning_section,
    ledger_section,
    paper_section,
    people_section,
    privacy_section,
    settings_section,
    speed_section,
    transcript_section,
)
from sottovoce.report.titles import about_of
from sottovoce.report.verdict import Verdict, verdicts
from sottovoce.tables import NOTHING, Table


@dataclass(frozen=True)
class Report:
    """What a page says, in order; `alarms` before all else. `extra_tables` are too long for a page: for files alone."""

    title: str
    lead: str
    alarms: tuple[str, ...]
    sections: tuple[Chapter, ...]
    extra_tables: tuple[Table, ...]

    @property
    def drawings(self) -> list[Drawing]:
        return [part for section in self.sections for part in section.all_parts if isinstance(part, Drawing)]

    @property
    def tables(self) -> list[Table]:
        shown = [part for section in self.sections for part in section.all_parts if isinstance(part, Table)]
        return [*shown, *self.extra_tables]


def build_report(
    runs: Sequence[RunRecord],
    *,
    title: str,
    judged: Sequence[Verdict] | None = None,
    headline: Table | None = None,
    differences: Table | None = None,
    together: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Put the report of `runs` together: the verdict on them first, worked out here unless it is `judged` already.

    `headline` is the table that follows, `differences` which of its runs are told apart, `together` what its runs
    promise together, `notes` what must be said of them.
    """
    assert runs
    judged = verdicts(runs) if judged is None else judged
    makers: tuple[Callable[[Sequence[RunRecord]], Chapter | None], ...] = (
        settings_section,
        learning_section,
        cohort_section,
        privacy_section,
        audit_section,
        layer_section,
        dynamics_section,
        gradient_section,
        bound_section,
        people_section,
        client_results_section,
        transcript_section,
        clients_section,
        speed_section,
        ledger_section,
        paper_section,
    )
    made = [section for section in (make(runs) for make in makers) if section is not None]
    return Report(
        title=title,
        lead=_lead(runs, title),
        alarms=tuple(f"{run.label}: {why}" for run in runs for why in (run.unsound, audit_alarm(run)) if why),
        sections=(
            verdict_section(judged),
            _headline(runs, judged, headline=headline, differences=differences, together=together, notes=notes),
            *made,
        ),
        extra_tables=tuple(table for table in (speaker_table(runs),) if table.rows),
    )


def write_page(path: Path, report: Report) -> None:
    """Write the page to `path`, whole or not at all."""
    _write(path, as_html(report))


def as_html(report: Report) -> str:
    """The whole page; alarms, in red, come before anything that they make worthless."""
    return fill_template("report.html", title=report.title, report=report, svg=inline_svg, version=__version__)


def write_figures(folder: Path, report: Report) -> list[Path]:
    """Every figure as PNG and SVG in `folder`, which is made if it is not there."""
    _make(folder)
    paths = [folder / f"{drawing.name}{suffix}" for drawing in report.drawings for suffix in (".png", ".svg")]
    for drawing in report.drawings:
        for suffix in (".png", ".svg"):
            write_drawing(folder / f"{drawing.name}{suffix}", partial(titled, drawing), _no_page)
    return paths


def write_tables(folder: Path, report: Report) -> list[Path]:
    """Every table as CSV in `folder`, which is made if it is not there."""
    _make(folder)
    for table in report.tables:
        _write(folder / f"{table.name}.csv", table.as_csv())
    return [folder / f"{table.name}.csv" for table in report.tables]


def _lead(runs: Sequence[RunRecord], title: str) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs: {', '.join(run.label for run in runs)}."
    about = about_of(runs[0])
    return f"One run, {runs[0].label}: {about}." if about and about != title else f"One run: {runs[0].label}."


def _headline(
    runs: Sequence[RunRecord],
    judged: Sequence[Verdict],
    *,
    headline: Table | None,
    differences: Table | None,
    together: Sequence[str],
    notes: Sequence[str],
) -> Chapter:
    parts: list[PagePart] = []
    if len(runs) == 1 and runs[0].tests:
        parts.append(MacroPart("key_figures", _key_figures(runs[0], judged[0])))
    if headline is not None and headline.rows:
        parts.append(headline)
    if differences is not None:
        parts.append(differences)
    parts += [Paragraph(line, "strong") for line in together]
    parts += [Paragraph(note, "quiet") for note in _gathered(runs, notes)]
    for run in runs:
        if not run.results:
            promised = "" if run.promise is None or run.promise.words is None else f" {run.promise.words}."
            parts.append(notice(f"{run.label} is not finished: there are no results yet.{promised}"))
        parts += [notice(f"{run.label}: {problem}") for problem in run.problems]
    return Chapter("headline", "In short", "", tuple(parts))


def _gathered(runs: Sequence[RunRecord], notes: Sequence[str]) -> list[str]:
    """Notes that begin with a run's label, once for all runs of which they are true; then the others."""
    labels = {run.label for run in runs}
    split = [(note, *note.partition(": ")[::2]) for note in notes]
    gathered = said_once((label, words) for _, label, words in split if label in labels)
    return [f"{label}: {words}" for label, words in gathered] + [n for n, label, _ in split if label not in labels]


def _first_figure(run: RunRecord, name: str) -> tuple[str, str, str]:
    """Its errors on a test set, or how well it does what it does instead of writing."""
    test = run.tests[name]
    people = f"{name}, speakers never trained on" + (", but chosen on" if run.is_chosen_on(name) else "")
    if "accuracy" in test:
        guessed = f"by guessing {percent(test.get('chance'))}"
        return "contrastive accuracy", percent(test["accuracy"]), f"{people}; {guessed}{_chosen_on(run)}"
    if "loss" in test:
        return "loss", f"{test['loss']:.3f}", f"{people}{_chosen_on(run)}"
    interval = test.get("wer_interval")
    between = f"95 % interval {percent(interval[0])} to {percent(interval[1])}" if interval else "no interval"
    told = f"{people}; {between}{_chosen_on(run)}"
    return f"{name.rpartition(':')[2]} word error rate", percent(test.get("wer")), told


def _chosen_on(run: RunRecord) -> str:
    """By which dev score the tested model was chosen: named as that, for it is no result."""
    model = run.results.get("model") or {}
    for measure in MEASURES.values():
        if (score := model.get(measure.key("dev"))) is not None:
            told = percent(score) if measure.is_rate else number_text(score)
            return f"; chosen on dev ({measure.title} {told})"
    return ""


def _key_figures(run: RunRecord, judged: Verdict) -> list[tuple[str, str, str]]:
    """The numbers that everybody asks for first."""
    assert run.headline_test is not None
    cells = [_first_figure(run, run.headline_test)]
    privacy = run.privacy
    if run.is_federated:
        if privacy.get("epsilon_rdp") is None:
            cells.append(("ε at this population", "none", "no noise, no guarantee"))
        else:
            tight = privacy.get("epsilon_pld")
            best, by = (privacy["epsilon_rdp"], "RDP") if tight is None else (tight, "PLD")
            told = f"PLD {epsilon_text(privacy.get('epsilon_pld'))}, RDP {epsilon_text(privacy['epsilon_rdp'])}"
            told += f"; δ = {privacy.get('delta', 0):g}"
            if privacy.get("promised_steps", privacy.get("steps")) != privacy.get("steps"):
                told += f"; promised for {privacy['promised_steps']:,} rounds, {privacy['steps']:,} made"
            cells.append((f"ε at this population ({by})", epsilon_text(best), told))
        accountant = accountant_of([run])
        useful = larger_population(privacy, accountant) or {}
        heading = f"population for ε ≤ 8 ({accountant.upper()})"
        if "population_size" in useful:
            needs = f"with a cohort of {integer(useful['cohort_size'])}; same noise, rate and rounds"
            needs += "; δ would have to be smaller there" if useful.get("delta_too_large") else ""
            cells.append((heading, integer(useful["population_size"]), needs))
        elif useful:
            cells.append((heading, NOTHING, "no population is large enough for this recipe"))
        cells.append(("status", *judged.status))
    return cells


def _no_page() -> Page:
    raise AssertionError("figures are written as .png and .svg alone")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"folder={folder}: cannot be made ({error.strerror})") from None


def _write(path: Path, content: str) -> None:
    if not path.parent.is_dir():
        raise InputError(f"out={path}: the folder {path.parent} does not exist")
    try:
        with written_atomically(path) as file:
            file.write(as_utf8(content))
    except OSError as error:
        raise InputError(f"out={path}: cannot be written ({error.strerror})") from None
