"""The report of one run or several: one HTML file that fetches nothing, and its figures and tables as files.

Everything comes from run folders: what was not recorded cannot be claimed, and what is missing is named.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sottovoce import __version__
from sottovoce.base.drawing import fill_template, write_drawing
from sottovoce.base.errors import InputError
from sottovoce.base.files import encode_utf8, write_atomically
from sottovoce.base.tables import NOTHING, Table
from sottovoce.evaluation.measures import MEASURES
from sottovoce.report.audit import audit_alarm, audit_section
from sottovoce.report.bound_section import bound_section
from sottovoce.report.curves import dynamics_section, learning_section
from sottovoce.report.drawings import Drawing, draw_with_title, inline_svg
from sottovoce.report.first_screen import FirstScreen, first_screen
from sottovoce.report.gradients import gradient_section
from sottovoce.report.layers import layer_section
from sottovoce.report.paper_comparison import cohort_section, paper_section
from sottovoce.report.parts import (
    MacroPart,
    PagePart,
    PageSection,
    Paragraph,
    join_labels,
    merge_labels,
    notice,
    show_count,
    show_epsilon,
    show_number,
    show_percent,
)
from sottovoce.report.people import (
    client_results_section,
    clients_section,
    people_section,
    speaker_table,
    transcript_section,
)
from sottovoce.report.personal import personal_section
from sottovoce.report.populations import common_accountant, larger_population
from sottovoce.report.records import RunRecord
from sottovoce.report.run_facts import recipe_title, settings_section
from sottovoce.report.sections import ledger_section, privacy_section, speed_section, verdict_section
from sottovoce.report.verdict import Verdict, judge_runs

# Each from all runs; None where no run has anything for it.
SECTIONS: tuple[Callable[[Sequence[RunRecord]], PageSection | None], ...] = (
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
    personal_section,
    transcript_section,
    clients_section,
    speed_section,
    ledger_section,
    paper_section,
)


@dataclass(frozen=True)
class ReportPage:
    """What a page says, in order: `alarms` before all else, the first screen, and folded sections.

    `extra_tables` are too long for a page: for files alone.
    """

    title: str
    lead: str
    alarms: tuple[str, ...]
    screen: FirstScreen
    sections: tuple[PageSection, ...]
    extra_tables: tuple[Table, ...]

    @property
    def drawings(self) -> list[Drawing]:
        first = [] if self.screen.drawing is None else [self.screen.drawing]
        shown = [part for section in self.sections for part in section.all_parts if isinstance(part, Drawing)]
        return first + shown

    @property
    def tables(self) -> list[Table]:
        shown = [part for section in self.sections for part in section.all_parts if isinstance(part, Table)]
        return [*shown, *self.extra_tables]


@dataclass(frozen=True)
class Opening:
    """How a page opens: the verdicts, a table of results, the differences between runs, what they promise together."""

    verdicts: Sequence[Verdict]
    headline: Table | None = None
    differences: Table | None = None
    together: Sequence[str] = ()
    notes: Sequence[str] = ()


def build_report(runs: Sequence[RunRecord], *, title: str, opening: Opening | None = None) -> ReportPage:
    """Put the report of `runs` together: the verdict on them first, worked out here unless `opening` has it."""
    assert runs
    opening = opening or Opening(judge_runs(runs))
    made = [section for section in (make(runs) for make in SECTIONS) if section is not None]
    people = speaker_table(runs)
    return ReportPage(
        title=title,
        lead=_lead(runs, title),
        alarms=tuple(f"{run.label}: {why}" for run in runs for why in (run.unsound, audit_alarm(run)) if why),
        screen=first_screen(runs, opening.verdicts),
        sections=(verdict_section(opening.verdicts), _headline_section(runs, opening), *made),
        extra_tables=(people,) if people.rows else (),
    )


def write_page(path: Path, report: ReportPage) -> None:
    """Write the page to `path`, whole or not at all."""
    _write(path, as_html(report))


def as_html(report: ReportPage) -> str:
    """The whole page; alarms, in red, come before anything that they invalidate."""
    return fill_template("report.html", title=report.title, report=report, svg=inline_svg, version=__version__)


def write_figures(folder: Path, report: ReportPage) -> list[Path]:
    """Every figure as PNG and SVG in `folder`, which is made if it is not there."""
    _make_folder(folder)
    paths = []
    for drawing in report.drawings:
        for suffix in (".png", ".svg"):
            paths.append(folder / f"{drawing.name}{suffix}")
            write_drawing(paths[-1], partial(draw_with_title, drawing))
    return paths


def write_tables(folder: Path, report: ReportPage) -> list[Path]:
    """Every table as CSV in `folder`, which is made if it is not there."""
    _make_folder(folder)
    for table in report.tables:
        _write(folder / f"{table.name}.csv", table.as_csv())
    return [folder / f"{table.name}.csv" for table in report.tables]


def _lead(runs: Sequence[RunRecord], title: str) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs: {join_labels([run.label for run in runs])}."
    about = recipe_title(runs[0])
    return f"One run, {runs[0].label}: {about}." if about and about != title else f"One run: {runs[0].label}."


def _headline_section(runs: Sequence[RunRecord], opening: Opening) -> PageSection:
    parts: list[PagePart] = []
    if len(runs) == 1 and runs[0].tests:
        parts.append(MacroPart("key_figures", list(_key_figures(runs[0], opening.verdicts[0]))))
    parts += [table for table in (opening.headline, opening.differences) if table is not None and table.rows]
    parts += [Paragraph(line, "strong") for line in opening.together]
    parts += [Paragraph(note, "quiet") for note in _merge_notes(runs, opening.notes)]
    for run in runs:
        if not run.results:
            promised = "" if run.guarantee is None or run.guarantee.words is None else f" {run.guarantee.words}."
            parts.append(notice(f"{run.label} is not finished: there are no results yet.{promised}"))
        parts += [notice(f"{run.label}: {problem}") for problem in run.problems]
    return PageSection("headline", "In short", "", tuple(parts), is_printed=True)


def _merge_notes(runs: Sequence[RunRecord], notes: Sequence[str]) -> list[str]:
    """Notes that begin with a run's label, once for all runs of which they are true; then the others."""
    labels = {run.label for run in runs}
    split = [(note, *note.partition(": ")[::2]) for note in notes]
    merged = merge_labels((label, words) for _, label, words in split if label in labels)
    return [f"{label}: {words}" for label, words in merged] + [n for n, label, _ in split if label not in labels]


def _key_figures(run: RunRecord, verdict: Verdict) -> Iterator[tuple[str, str, str]]:
    """The numbers that everybody asks for first: term, value and note."""
    assert run.headline_test is not None
    yield _score(run, run.headline_test)
    if not run.is_federated:
        return
    privacy, accountant = run.privacy, common_accountant([run])
    by_rdp, by_pld = privacy.get("epsilon_rdp"), privacy.get("epsilon_pld")
    if by_rdp is None:
        yield "ε at this population", "none", "no noise, no guarantee"
    else:
        note = f"PLD {show_epsilon(by_pld)}, RDP {show_epsilon(by_rdp)}; δ = {privacy.get('delta', 0):g}"
        if privacy.get("promised_steps", privacy.get("steps")) != privacy.get("steps"):
            note += f"; promised for {privacy['promised_steps']:,} rounds, {privacy['steps']:,} made"
        best, by = (by_rdp, "RDP") if by_pld is None else (by_pld, "PLD")
        yield f"ε at this population ({by})", show_epsilon(best), note
    useful = larger_population(privacy, accountant) or {}
    heading = f"population for ε ≤ 8 ({accountant.upper()})"
    if "population_size" in useful:
        note = f"with a cohort of {show_count(useful['cohort_size'])}; same noise, rate and rounds"
        note += "; δ would have to be smaller there" if useful.get("delta_too_large") else ""
        yield heading, show_count(useful["population_size"]), note
    elif useful:
        yield heading, NOTHING, "no population is large enough for this recipe"
    yield "status", *verdict.status


def _score(run: RunRecord, name: str) -> tuple[str, str, str]:
    """Its errors on a test set, or the score of a model that writes no text; and how the model was chosen."""
    test = run.tests[name]
    people = f"{name}, speakers never trained on" + (", but chosen on" if run.is_chosen_on(name) else "")
    model, chosen = run.results.get("model") or {}, ""
    measure = next((one for one in MEASURES.values() if model.get(one.key("dev")) is not None), None)
    if measure is not None:
        score = model[measure.key("dev")]
        chosen = f"; chosen on dev ({measure.title} {show_percent(score) if measure.is_rate else show_number(score)})"
    if "accuracy" in test:
        guessed = f"by guessing {show_percent(test.get('chance'))}"
        return "contrastive accuracy", show_percent(test["accuracy"]), f"{people}; {guessed}{chosen}"
    if "loss" in test:
        return "loss", f"{test['loss']:.3f}", f"{people}{chosen}"
    ends = test.get("wer_interval")
    interval = f"95 % interval {show_percent(ends[0])} to {show_percent(ends[1])}" if ends else "no interval"
    title = f"{name.rpartition(':')[2]} word error rate"
    return title, show_percent(test.get("wer")), f"{people}; {interval}{chosen}"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"folder={folder}: cannot be made ({error.strerror})") from None


def _write(path: Path, content: str) -> None:
    if not path.parent.is_dir():
        raise InputError(f"out={path}: the folder {path.parent} does not exist")
    try:
        with write_atomically(path) as file:
            file.write(encode_utf8(content))
    except OSError as error:
        raise InputError(f"out={path}: cannot be written ({error.strerror})") from None
