"""The sections of a report that several modules contribute to: verdict, privacy, speed, ledger."""

from collections.abc import Sequence
from statistics import median

from sottovoce.base.tables import NOTHING, Row, Table
from sottovoce.evaluation.tables import format_interval, format_points
from sottovoce.privacy.stated import format_odds
from sottovoce.report.comparisons import RateDifference
from sottovoce.report.curves import privacy_drawings, read_series, speed_drawings
from sottovoce.report.paper_comparison import noise_tables
from sottovoce.report.parts import (
    Fold,
    MacroPart,
    PagePart,
    PageSection,
    Paragraph,
    join_labels,
    make_section,
    make_table,
    notice,
    notices,
    show_count,
    show_epsilon,
    show_number,
    show_percent,
)
from sottovoce.report.populations import population_drawings
from sottovoce.report.records import RunRecord
from sottovoce.report.verdict import CERTAIN, Verdict, round_up_percent, summarise_verdicts

FOLDED_VERDICTS = 6  # runs, beyond which nobody reads a verdict on each
# Columns of the table of verdicts: four of words, then numbers. ε by RDP is shown where none by PLD is known.
VERDICT_COLUMNS = (
    *("", "verdict", "worst group", "twin without noise", "ε (PLD, else RDP)", "right guesses in 100"),
    *("odds of 1 : 1 become", "points from start", "95 % interval", "points from twin", "95 % interval"),
    *("worst group’s gap", "95 % interval"),
)


def verdict_section(found: Sequence[Verdict]) -> PageSection:
    """One run's verdict in full; of several a sentence and a table, and each one's words in a fold."""
    full: list[PagePart] = [MacroPart("verdict", one) for one in found]
    if len(found) == 1:
        return PageSection("verdict", "Verdict", "", tuple(full), is_printed=True)
    folds = [Fold(f"{one.label}, in words", (part,)) for one, part in zip(found, full, strict=True)]
    shown = folds if len(found) <= FOLDED_VERDICTS else []
    sentence = Paragraph(summarise_verdicts(found), "verdict-headline")
    return PageSection("verdict", "Verdict", "", (sentence, verdict_table(found), *shown))


def verdict_table(found: Sequence[Verdict]) -> Table:
    """One line a run: what it is, what its mechanism allows, what it costs. Columns without content are left out."""
    alike: dict[Row, list[str]] = {}
    for one in found:
        alike.setdefault(_cells(one), []).append(one.label)
    rows: list[Row] = [(join_labels(labels), *cells) for cells, labels in alike.items()]
    shown = [n for n in range(len(VERDICT_COLUMNS)) if n < 2 or any(row[n] != NOTHING for row in rows)]
    headings, *cells = (tuple(row[n] for n in shown) for row in (VERDICT_COLUMNS, *rows))
    costs = [one.cost for one in found if one.cost is not None]
    bases = ["the model that a run started from"] if any(one.start for one in costs) else []
    bases += ["the same run without noise"] if any(one.twin for one in costs) else []
    beside = f" Points are WER less that of {', or of '.join(bases)}." if bases else ""
    return make_table("verdicts", cells, headings=headings, words=sum(n < 4 for n in shown), beside=beside)


def _cells(one: Verdict) -> Row:
    private: Row = (NOTHING, "any", "any")
    if one.epsilon is not None and one.odds is not None:
        assert one.epsilon_of_one is not None
        right = "100" if one.odds.right >= CERTAIN else f"{round_up_percent(one.odds.right)}"
        inside = "" if one.epsilon_inside is None else f" (one inside: {show_epsilon(one.epsilon_inside)})"
        private = (show_epsilon(one.epsilon) + inside, right, format_odds(one.epsilon_of_one))
    start, twin = (None, None) if one.cost is None else (one.cost.start, one.cost.twin)
    group, gap = NOTHING, (NOTHING, NOTHING)
    if one.gap is not None:
        group, gap = f"{one.gap.fact} {one.gap.group}", (format_points(one.gap.gap), format_interval(one.gap.interval))
    return one.brief, group, NOTHING if twin is None else twin.base, *private, *_points(start), *_points(twin), *gap


def _points(beside: RateDifference | None) -> Row:
    if beside is None:
        return NOTHING, NOTHING
    return format_points(beside.difference), format_interval(beside.interval)


def privacy_section(runs: Sequence[RunRecord]) -> PageSection | None:
    if not any(run.is_federated for run in runs):
        return None
    found = privacy_drawings(runs)  # of all runs, so that each keeps its colour
    if not found:
        none = "No run here adds noise: there is no guarantee, and no ε to draw."
        return PageSection("privacy", "Privacy and utility", none, ())
    return make_section("privacy", [*noise_tables(runs), *found, *population_drawings(runs)])


def speed_section(runs: Sequence[RunRecord]) -> PageSection | None:
    return make_section("speed", [*speed_drawings(runs), speed_table(runs)])


def speed_table(runs: Sequence[RunRecord]) -> Table:
    """Time, throughput and memory."""
    names = ("audio_seconds_per_second", "seconds", "waited_for_data_seconds", "memory_mib", "device_memory_mib")
    rows = []
    for run in runs:
        rates, seconds, waited, memory, device = ([v for _, v in read_series(run.metrics, name)] for name in names)
        if rates:
            cells = (
                show_number(median(rates)),
                show_number(median(seconds) if seconds else None),
                show_number(sum(seconds) / 60 if seconds else None),
                show_percent(sum(waited) / sum(seconds) if sum(seconds) > 0 else None),
                show_count(max(memory, default=None)),
                show_count(max(device, default=None)),
            )
            rows.append((run.label, *cells))
    return make_table("speed", rows)


def ledger_section(runs: Sequence[RunRecord]) -> PageSection | None:
    """The verification of every ledger, made when the report was made."""
    rows = [row for run in runs for row in _verified(run)]
    missing = [run for run in runs if run.is_federated and run.ledger is None]
    notes = [(run.label, note) for run in runs if run.ledger is not None for note in run.ledger.notes]
    unverified = [notice(f"{run.label} has no ledger: nothing here can be verified.") for run in missing]
    return make_section("ledger", [make_table("ledger", rows), *unverified, *notices(notes)])


def _verified(run: RunRecord) -> list[Row]:
    if run.ledger is None:
        return []
    report = run.ledger.report
    if report is None:
        return [(run.label, f"NOT SOUND: {run.ledger.problem}", *[NOTHING] * 6)]
    pinned = "ends as the results say" if run.privacy.get("head") else "no results to compare its end with"
    torn = "; its last line was never finished" if report.torn_bytes else ""
    measured = f"; {report.measured_attempts:,} WERs of clients are in it" if report.measured else ""
    signer = run.ledger.signature.signer
    signed = "unsigned" if signer is None else f"signed by {signer[:16]}…"
    committed = 0 if report.committed_step is None else report.committed_step + 1
    cells = (
        f"sound; {pinned}{torn}{measured}; {signed}",
        show_count(report.mark.length),
        f"{report.steps:,} / {report.attempts:,} / {committed:,}",
        show_epsilon(run.ledger.epsilon),
        f"{report.header['delta']:g}",
        NOTHING if report.epsilon_budget is None else f"{report.epsilon_budget:g}",
        f"{report.mark.head[:12]}…",
    )
    return [(run.label, *cells)]
