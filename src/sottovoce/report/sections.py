"""The chapters of a report, each from all of its runs; None where no run has anything for it."""

from collections.abc import Sequence

from sottovoce.report.cells import said_once, slugs
from sottovoce.report.convergence import TERMS, Convergence, convergence
from sottovoce.report.curves import learning_drawings, privacy_drawings, speed_drawings
from sottovoce.report.layers import layer_drawings, layer_profiles, layer_tables
from sottovoce.report.noise_tables import noise_tables
from sottovoce.report.parts import UNFOLDED, Chapter, Fold, MacroPart, PagePart, Paragraph, by_run, chapter, notice
from sottovoce.report.people import client_drawings, shared_tops, speaker_drawings
from sottovoce.report.populations import population_drawings
from sottovoce.report.records import RunRecord
from sottovoce.report.result_tables import (
    bound_tables,
    client_table,
    client_wer_table,
    error_table,
    group_table,
    ledger_table,
    paper_tables,
    speed_table,
)
from sottovoce.report.run_facts import settings_tables
from sottovoce.report.transcripts import align_words

SECURE_KEEPS_NOTHING = (
    "was made in secure mode: norms, losses and times are by-products of private data that no ε covers, so such a run "
    "never writes them down."
)


def settings_section(runs: Sequence[RunRecord]) -> Chapter | None:
    apart, shared = settings_tables(runs)
    parts: list[PagePart] = [apart]
    if shared.rows:
        parts.append(Fold(shared.title, (shared,)) if apart.rows else shared)
    return chapter("settings", "What was run", parts)


def learning_section(runs: Sequence[RunRecord]) -> Chapter | None:
    found = learning_drawings(runs)
    silent = said_once((run.label, SECURE_KEEPS_NOTHING) for run in runs if run.is_release and not run.diagnostics)
    why = [notice(f"{labels} {words}") for labels, words in silent]
    return chapter("learning", "Learning", [*found, *why]) if found else None


def privacy_section(runs: Sequence[RunRecord]) -> Chapter | None:
    if not any(run.is_federated for run in runs):
        return None
    found = privacy_drawings(runs)  # of all runs, so that each keeps its colour
    if not found:
        none = "No run here adds noise: there is no guarantee, and no ε to draw."
        return Chapter("privacy", "Privacy and utility", none, ())
    intro = (
        "ε bounds what anybody can learn of one person from the model. A large ε promises next to nothing; what it "
        "would be for a larger population is drawn here, and had by nobody."
    )
    return chapter("privacy", "Privacy and utility", [*noise_tables(runs), *found, *population_drawings(runs)], intro)


def layer_section(runs: Sequence[RunRecord]) -> Chapter | None:
    private = [run for run in runs if run.is_federated]
    intro = (
        "One bound on a whole update lets its largest layers speak for all; noise, in turn, drowns the layers with the "
        "smallest updates first. Both are visible here."
    )
    parts: dict[str, Sequence[PagePart]] = {}
    profiles = [layer_profiles(run) for run in private]
    for run, own, slug in zip(private, profiles, slugs(run.label for run in private).values(), strict=True):
        several = len(private) > 1
        inside: list[PagePart] = [*layer_drawings(run, own, prefix=f"{slug}-" if several else "", among=profiles)]
        if numbers := layer_tables(run, own, suffix=f"-{slug}" if several else ""):
            inside.append(Fold("The numbers", tuple(numbers)))
        if not run.diagnostics:
            unwritten = "has written no diagnostics: there are no norms to show."
            inside.insert(0, notice(f"{run.label} {SECURE_KEEPS_NOTHING if run.is_release else unwritten}"))
        parts[run.label] = inside
    return Chapter("layers", "Layer by layer", intro, tuple(by_run(parts))) if private else None


def bound_section(runs: Sequence[RunRecord]) -> Chapter | None:
    private = [run for run in runs if run.is_federated]
    intro = (
        "The paper bounds how far a run is from standing still by a sum of terms. They say what holds a run back; "
        "where a premise does not hold, they bound nothing, and that is said."
    )
    found = {run.label: convergence(run) for run in private}
    lacking = said_once((label, one.why) for label, one in found.items() if one.bound is None)
    largest = said_once((label, words) for label, one in found.items() if (words := _largest_term(one)))
    parts: list[PagePart] = [*bound_tables(private)]
    parts += [notice(f"{label}: no bound; {why}.") for label, why in lacking]
    parts += [Paragraph(f"{label}: {words}") for label, words in largest]
    return Chapter("bound", "The convergence bound", intro, tuple(parts)) if private else None


def people_section(runs: Sequence[RunRecord]) -> Chapter | None:
    tests = list(dict.fromkeys(name for run in runs for name in run.tests))
    tops = shared_tops(runs, tests)
    tables = [table for table in (error_table(runs), group_table(runs)) if table.rows]
    parts: list[PagePart] = [*tables[:1]]
    for test, slug in slugs(tests).items():
        parts += speaker_drawings(runs, test, slug=slug, tops=tops)
    parts += [Fold("The numbers of the groups", (groups,)) for groups in tables[1:]]
    return chapter("people", "Who is understood", parts, "The speakers of the test sets. Clients are never among them.")


def transcript_section(runs: Sequence[RunRecord]) -> Chapter | None:
    parts: list[PagePart] = []
    for run in runs:
        for name, test in run.tests.items():
            if test.get("samples"):
                aligned = [align_words(sample["reference"], sample["hypothesis"]) for sample in test["samples"]]
                title = f"{run.label}, {name}" if len(runs) > 1 else name
                parts.append(Fold(title, (MacroPart("transcripts", aligned),), is_open=len(parts) < UNFOLDED))
    intro = "A few utterances of synthetic test speakers, evenly spread over the set."
    return chapter("transcripts", "Transcripts", [MacroPart("legend"), *parts], intro) if parts else None


def clients_section(runs: Sequence[RunRecord]) -> Chapter | None:
    intro = "Of a release, only what its plan has made public. A simulation tells more, and no ε covers that."
    parts: list[PagePart] = [*client_drawings(runs), client_table(runs), client_wer_table(runs)]
    return chapter("clients", "The clients’ data", parts, intro)


def speed_section(runs: Sequence[RunRecord]) -> Chapter | None:
    return chapter("speed", "Speed", [*speed_drawings(runs), speed_table(runs)])


def ledger_section(runs: Sequence[RunRecord]) -> Chapter | None:
    parts: list[PagePart] = [ledger_table(runs)]
    for run in runs:
        if run.is_federated and run.ledger is None:
            parts.append(notice(f"{run.label} has no ledger: nothing here can be verified."))
    notes = [(run.label, note) for run in runs if run.ledger is not None for note in run.ledger.notes]
    parts += [notice(f"{labels}: {note}") for labels, note in said_once(notes)]
    intro = "Every release was written down before it was made. The ledgers were verified line by line for this page."
    return chapter("ledger", "The ledger", parts, intro)


def paper_section(runs: Sequence[RunRecord]) -> Chapter | None:
    sources = list(dict.fromkeys(str((run.config.get("paper") or {}).get("source")) for run in runs))
    intro = f"Printed in {', '.join(source for source in sources if source != 'None')}."
    return chapter("paper", "Beside the paper", paper_tables(runs), intro)


def _largest_term(found: Convergence) -> str:
    name = next(iter(found.measured), None)
    if found.bound is None or name is None or not found.measured[name] > 0:
        return ""
    holds = "All premises hold." if found.bound.holds else "Not all premises hold: the sum bounds nothing here."
    return f"by {found.bound.theorem}, the largest known term is that of {TERMS[name]}. {holds}"
