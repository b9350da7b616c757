"""The chapters of a report, each from all of its runs; None where no run has anything for it."""

from collections.abc import Sequence
from html import escape

from sottovoce.reporting.cells import Table, said_once, slugs
from sottovoce.reporting.convergence import TERMS, Convergence, convergence
from sottovoce.reporting.curves import learning, privacy, speed
from sottovoce.reporting.html import Fold, Html, Part, Section
from sottovoce.reporting.layers import layer_drawings, layer_profiles
from sottovoce.reporting.noise_tables import noise_tables
from sottovoce.reporting.people import client_drawings, shared_tops, speaker_drawings
from sottovoce.reporting.populations import population_drawings
from sottovoce.reporting.records import RunRecord
from sottovoce.reporting.run_facts import settings_tables
from sottovoce.reporting.tables import (
    bound_tables,
    client_table,
    client_wer_table,
    error_table,
    group_table,
    layer_table,
    ledger_table,
    paper_tables,
    speed_table,
    spread_table,
)
from sottovoce.reporting.transcripts import transcript_list

# With more runs than this, what belongs to a single one is folded away.
UNFOLDED = 3
WITHHELD = (
    "was made in secure mode: norms, losses and times are by-products of private data that no ε covers, so such a run "
    "never writes them down."
)

MARKS = (
    "<p>What was said but not understood is <del>struck out</del>; what was heard instead is <ins>underlined</ins>.</p>"
)


def settings_section(runs: Sequence[RunRecord]) -> Section | None:
    apart, shared = settings_tables(runs)
    parts: list[Part] = [] if apart is None else [apart]
    if shared is not None:
        parts.append(shared if apart is None else Fold(shared.title, (shared,)))
    return Section("settings", "What was run", "", tuple(parts)) if parts else None


def learning_section(runs: Sequence[RunRecord]) -> Section | None:
    found = learning(runs)
    return Section("learning", "Learning", "", (*found, *_withheld(runs))) if found else None


def privacy_section(runs: Sequence[RunRecord]) -> Section | None:
    if not any(run.is_federated for run in runs):
        return None
    found = privacy(runs)  # of all runs, so that each keeps its colour
    if not found:
        none = "No run here adds noise: there is no guarantee, and no ε to draw."
        return Section("privacy", "Privacy and utility", none, ())
    intro = (
        "ε bounds what anybody can learn of one person from the model. A large ε promises next to nothing; what it "
        "would be for a larger population is drawn here, and had by nobody."
    )
    return Section("privacy", "Privacy and utility", intro, (*noise_tables(runs), *found, *population_drawings(runs)))


def layer_section(runs: Sequence[RunRecord]) -> Section | None:
    private = [run for run in runs if run.is_federated]
    if not private:
        return None
    intro = (
        "One bound on a whole update lets its largest layers speak for all; noise, in turn, drowns the layers with the "
        "smallest updates first. Both are visible here."
    )
    parts: list[Part] = []
    profiles = [layer_profiles(run) for run in private]
    for run, own, slug in zip(private, profiles, slugs(run.label for run in private).values(), strict=True):
        drawings = layer_drawings(run, own, prefix=f"{slug}-" if len(private) > 1 else "", among=profiles)
        suffix = f"-{slug}" if len(private) > 1 else ""
        tables = (layer_table(run, name=f"layers{suffix}"), spread_table(run, name=f"norms{suffix}"))
        inside: list[Part] = [*drawings]
        if numbers := tuple(table for table in tables if table is not None):
            inside.append(Fold("The numbers", numbers))
        if not run.diagnostics:
            why = WITHHELD if run.is_release else "has written no diagnostics: there are no norms to show."
            inside.insert(0, _notice(f"{run.label} {why}"))
        if len(private) == 1:
            parts += inside
        else:
            parts.append(Fold(run.label, tuple(inside), is_open=len(private) <= UNFOLDED))
    return Section("layers", "Layer by layer", intro, tuple(parts))


def bound_section(runs: Sequence[RunRecord]) -> Section | None:
    private = [run for run in runs if run.is_federated]
    if not private:
        return None
    intro = (
        "The paper bounds how far a run is from standing still by a sum of terms. They say what holds a run back; "
        "where a premise does not hold, they bound nothing, and that is said."
    )
    parts: list[Part] = [*bound_tables(private)]
    found = {run.label: convergence(run) for run in private}
    lacking = said_once((label, one.why) for label, one in found.items() if one.bound is None)
    parts += [_notice(f"{label}: no bound; {why}.") for label, why in lacking]
    largest = said_once((label, words) for label, one in found.items() if (words := _largest_term(one)))
    parts += [Html(f"<p>{escape(label)}: {escape(words)}</p>") for label, words in largest]
    return Section("bound", "The convergence bound", intro, tuple(parts))


def people_section(runs: Sequence[RunRecord]) -> Section | None:
    tests = list(dict.fromkeys(name for run in runs for name in run.tests))
    tops = shared_tops(runs, tests)
    drawings = [
        drawing for test, slug in slugs(tests).items() for drawing in speaker_drawings(runs, test, slug=slug, tops=tops)
    ]
    tables: list[Table] = [table for table in (error_table(runs), group_table(runs)) if table is not None]
    if not drawings and not tables:
        return None
    parts: list[Part] = [*tables[:1], *drawings]
    if len(tables) > 1:
        parts.append(Fold("The numbers of the groups", (tables[1],)))
    intro = "The speakers of the test sets. Clients are never among them."
    return Section("people", "Who is understood", intro, tuple(parts))


def transcript_section(runs: Sequence[RunRecord]) -> Section | None:
    parts: list[Part] = []
    for run in runs:
        for name, test in run.tests.items():
            if test.get("samples"):
                title = f"{run.label}, {name}" if len(runs) > 1 else name
                listed = Html(transcript_list(test["samples"]))
                parts.append(Fold(title, (listed,), is_open=len(parts) < UNFOLDED))
    if not parts:
        return None
    intro = "A few utterances of synthetic test speakers, evenly spread over the set."
    return Section("transcripts", "Transcripts", intro, (Html(MARKS), *parts))


def clients_section(runs: Sequence[RunRecord]) -> Section | None:
    tables = [table for table in (client_table(runs), client_wer_table(runs)) if table is not None]
    parts: list[Part] = [*client_drawings(runs), *tables]
    if not parts:
        return None
    intro = "Of a release, only what its plan has made public. A simulation tells more, and no ε covers that."
    return Section("clients", "The clients’ data", intro, tuple(parts))


def speed_section(runs: Sequence[RunRecord]) -> Section | None:
    table = speed_table(runs)
    parts: list[Part] = [*speed(runs), *([table] if table is not None else [])]
    return Section("speed", "Speed", "", tuple(parts)) if parts else None


def ledger_section(runs: Sequence[RunRecord]) -> Section | None:
    table = ledger_table(runs)
    parts: list[Part] = [] if table is None else [table]
    for run in runs:
        if run.is_federated and run.ledger is None:
            parts.append(_notice(f"{run.label} has no ledger: nothing here can be verified."))
    notes = [(run.label, note) for run in runs if run.ledger is not None for note in run.ledger.notes]
    parts += [_notice(f"{labels}: {note}") for labels, note in said_once(notes)]
    intro = "Every release was written down before it was made. The ledgers were verified line by line for this page."
    return Section("ledger", "The ledger", intro, tuple(parts)) if parts else None


def paper_section(runs: Sequence[RunRecord]) -> Section | None:
    tables = paper_tables(runs)
    sources = list(dict.fromkeys(str((run.config.get("paper") or {}).get("source")) for run in runs))
    intro = f"Printed in {', '.join(source for source in sources if source != 'None')}."
    return Section("paper", "Beside the paper", intro, tuple(tables)) if tables else None


def _largest_term(found: Convergence) -> str:
    name = next(iter(found.measured), None)
    if found.bound is None or name is None or not found.measured[name] > 0:
        return ""
    holds = "All premises hold." if found.bound.holds else "Not all premises hold: the sum bounds nothing here."
    return f"by {found.bound.theorem}, the largest known term is that of {TERMS[name]}. {holds}"


def _withheld(runs: Sequence[RunRecord]) -> list[Html]:
    told = said_once((run.label, WITHHELD) for run in runs if run.is_release and not run.diagnostics)
    return [_notice(f"{labels} {words}") for labels, words in told]


def _notice(words: str) -> Html:
    return Html(f'<p class="notice">{escape(words)}</p>')
