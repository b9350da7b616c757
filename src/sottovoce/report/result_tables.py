"""The tables of a report: of what was measured, spent and verified. Those without rows are not shown."""

import math
from collections.abc import Sequence
from statistics import median

from sottovoce.report.cells import epsilon_text, integer, number_text, percent, said_once, text
from sottovoce.report.convergence import TERMS, convergence, premise_words
from sottovoce.report.curves import series
from sottovoce.report.people import group_list
from sottovoce.report.records import LedgerCheck, Record, RunRecord
from sottovoce.tables import NOTHING, Row, Table

PAPER_WER = "paper-wer"


def error_table(runs: Sequence[RunRecord]) -> Table:
    """Errors on the test sets, by kind, with those of the model a run started from."""
    before = said_once(
        (run.label, (name, *_errors(test))) for run in runs for name, test in run.start_tests.items() if "wer" in test
    )
    rows = [(f"before: {labels}" if len(before) > 1 else "before", *cells) for labels, cells in before]
    rows += [(run.label, name, *_errors(test)) for run in runs for name, test in run.tests.items() if "wer" in test]
    headings = ("", "test set", "WER", "95 % interval", "CER", "subst.", "del.", "ins.", "words", "speakers")
    note = "Substitutions, deletions and insertions are shares of the reference words."
    return Table("tests", "Errors on the test sets", headings, tuple(rows), note, words=2)


def group_table(runs: Sequence[RunRecord]) -> Table:
    """WER of groups of speakers, every run and test set."""
    rows = [
        (run.label, name, fact, group, integer(n["speakers"]), integer(n["words"]), percent(n["wer"]), _between(n))
        for run in runs
        for name, test in run.tests.items()
        for fact, group, n in group_list(test)
    ]
    headings = ("", "test set", "fact", "group", "speakers", "words", "WER", "95 % interval")
    return Table("groups", "Groups of speakers", headings, tuple(rows), words=4)


def speaker_table(runs: Sequence[RunRecord]) -> Table:
    """WER of every test speaker: for the file; the page draws it."""
    rows = [
        (run.label, name, text(person["speaker"]), integer(person.get("words")), percent(person["wer"]))
        for run in runs
        for name, test in run.tests.items()
        for person in test.get("per_speaker") or ()
    ]
    return Table("speakers", "Speakers", ("", "test set", "speaker", "words", "WER"), tuple(rows), words=3)


def client_table(runs: Sequence[RunRecord]) -> Table:
    """Who took part."""
    rows = []
    for run in (run for run in runs if run.population):
        found, seconds = run.population, run.population.get("seconds_per_client") or {}
        spread = (number_text(seconds.get(name)) for name in ("min", "median", "max"))
        clients = integer(found.get("population_size")), number_text(found.get("hours"))
        rows.append((run.label, text(found.get("privacy_unit")), *clients, *spread))
    headings = ("", "a client is", "clients", "hours", "least s", "median s", "most s")
    return Table("clients", "Clients", headings, tuple(rows), words=2)


def client_wer_table(runs: Sequence[RunRecord]) -> Table:
    """How well clients were understood, where that was measured: noised sums, of a release as of a simulation."""
    rows = [
        (
            run.label,
            integer(record["step"]),
            percent(record["client_wer"]),
            "–".join(percent(rate) for rate in record["client_wer_interval"]),
            integer(round(record["client_words"])),
        )
        for run in runs
        for record in run.metrics
        if "client_wer" in record
    ]
    note = (
        "Measured where the speech is, as noised sums over a cohort, and part of ε. A person counts for so many words "
        "at most, and for no more than 100 %. Noise, and who was drawn, are in the interval."
    )
    headings = ("", "round", "WER", "95 % interval", "words, noised")
    return Table("client-wer", "Errors on clients’ held-out speech, noised", headings, tuple(rows), note)


def speed_table(runs: Sequence[RunRecord]) -> Table:
    """Time, throughput and memory."""
    names = ("audio_seconds_per_second", "seconds", "waited_for_data_seconds", "memory_mib", "device_memory_mib")
    rows = []
    for run in runs:
        rates, seconds, waited, memory, device = ([value for _, value in series(run.metrics, name)] for name in names)
        if rates:
            cells = (
                number_text(median(rates)),
                number_text(median(seconds) if seconds else None),
                number_text(sum(seconds) / 60 if seconds else None),
                percent(sum(waited) / sum(seconds) if sum(seconds) > 0 else None),
                integer(max(memory, default=None)),
                integer(max(device, default=None)),
            )
            rows.append((run.label, *cells))
    headings = ("", "speech s / s", "s / round", "minutes in all", "waited for data", "memory MiB", "GPU MiB")
    note = "Medians over rounds; the largest memory. A release keeps no times: they tell who took part."
    return Table("speed", "Throughput", headings, tuple(rows), note)


def ledger_table(runs: Sequence[RunRecord]) -> Table:
    """The verification of every ledger, made when the report was made."""
    headings = ("", "verdict", "lines", "steps / attempts / committed", "ε spent (RDP), anew", "δ", "budget", "head")
    note = "Each line's hash covers the one before it, and ε was computed anew from the charged events."
    rows = tuple((run.label, *_verified(run, run.ledger)) for run in runs if run.ledger is not None)
    return Table("ledger", "Verification of the ledger", headings, rows, note, words=2)


def _verified(run: RunRecord, check: LedgerCheck) -> Row:
    report = check.report
    if report is None:
        return (f"NOT SOUND: {check.problem}", *[NOTHING] * 6)
    pinned = "ends as the results say" if run.privacy.get("head") else "no results to compare its end with"
    torn = "; its last line was never finished" if report.torn_bytes else ""
    measured = f"; {report.measured_attempts:,} WERs of clients are in it" if report.measured else ""
    signer = check.signature.signer
    signed = "unsigned" if signer is None else f"signed by {signer[:16]}…"
    committed = 0 if report.committed_step is None else report.committed_step + 1
    return (
        f"sound; {pinned}{torn}{measured}; {signed}",
        integer(report.mark.length),
        f"{report.steps:,} / {report.attempts:,} / {committed:,}",
        epsilon_text(check.epsilon),
        f"{report.header['delta']:g}",
        NOTHING if report.epsilon_budget is None else f"{report.epsilon_budget:g}",
        f"{report.mark.head[:12]}…",
    )


def bound_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """Terms of the convergence bound, and whether its premises hold."""
    found = {run.label: convergence(run).bound for run in runs if run.is_federated}
    bounds = {label: bound for label, bound in found.items() if bound is not None}
    if not bounds:
        return []
    names = [name for name in TERMS if any(name in bound.terms for bound in bounds.values())]
    unknown = [name for name in names if all(math.isnan(b.terms.get(name, math.nan)) for b in bounds.values())]
    known = [name for name in names if name not in unknown]
    terms = [
        (label, *(_term(b.terms.get(name)) for name in known), number_text(b.kappa)) for label, b in bounds.items()
    ]
    within = " Variance over clients has that within them in it, which weighs the same." * ("inter_client" in known)
    note = (
        "Their sum bounds κ times the mean squared gradient norm. These are estimates from below; not measured: "
        f"{', '.join(TERMS[name] for name in unknown)}.{within}"
    )
    premises = said_once(
        (label, (a.name, premise_words(a), a.detail.replace("nan", "?")))
        for label, bound in bounds.items()
        for a in bound.assumptions
    )
    rows = tuple((labels, *cells) for labels, cells in premises)
    headings = ("", *(TERMS[name] for name in known), "κ")
    return [
        Table("bound-terms", "Terms of the bound", headings, tuple(terms), note),
        Table("bound-premises", "Premises", ("", "premise", "verdict", "because"), rows, all_words=True),
    ]


def paper_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """Published numbers beside ours, where a recipe names where they are printed."""
    rates: list[Row] = []
    clients: list[Row] = []
    extrapolated: list[Row] = []
    unverified: dict[str, None] = {}
    for run in runs:
        paper = run.config.get("paper") or {}
        for name, theirs in (paper.get("wer") or {}).items():
            printed = f"{theirs:.1f} %"
            if (why := paper.get("unverified")) is not None:
                printed += " (unverified)"
                unverified[text(why)] = None
            rates.append(
                (run.label, text(paper.get("place")), name, printed, percent(run.tests.get(name, {}).get("wer")))
            )
        ours, theirs = run.population.get("population_size"), paper.get("population_size")
        if ours is not None and theirs is not None:
            clients.append((run.label, integer(theirs), integer(ours), f"{100 * (ours - theirs) / theirs:+.2g} %"))
        for plan in run.privacy.get("extrapolated") or ():
            sizes = (integer(plan.get(name)) for name in ("population_size", "cohort_size", "central_steps"))
            epsilons = (epsilon_text(plan.get(name)) for name in ("paper_epsilon", "epsilon_rdp", "epsilon_pld"))
            extrapolated.append((run.label, *sizes, *epsilons))
    doubts = "".join(f"Unverified: {why}. " for why in unverified).strip()
    found = [
        Table(
            PAPER_WER,
            "WER beside the paper's",
            ("", "printed in", "test set", "paper's WER", "our WER"),
            tuple(rates),
            doubts,
            words=3,
        ),
        Table(
            "paper-clients",
            "Clients beside the paper's",
            ("", "paper's clients", "our clients", "difference"),
            tuple(clients),
            "Sampling rates and ε of these runs are worked out for our clients.",
        ),
        Table(
            "paper-epsilon",
            "ε beside the paper's",
            ("", "population", "cohort", "rounds", "paper's ε", "our ε (RDP)", "our ε (PLD)"),
            tuple(extrapolated),
            "The same noise on the mean, sampling rate and rounds, for populations that are not there.",
        ),
    ]
    return [table for table in found if table.rows]


def _term(value: float | None) -> str:
    return NOTHING if value is None else "not measured" if math.isnan(value) else number_text(value)


def _between(numbers: Record) -> str:
    found = numbers.get("wer_interval")
    return NOTHING if not found else f"{100 * found[0]:.1f} to {100 * found[1]:.1f} %"


def _errors(test: Record) -> Row:
    words = test.get("words") or 0
    shares = (test.get(name) for name in ("substitutions", "deletions", "insertions"))
    return (
        percent(test.get("wer")),
        _between(test),
        percent(test.get("cer")),
        *(percent(share / words if words and share is not None else None) for share in shares),
        integer(test.get("words")),
        integer(test.get("speakers")),
    )
