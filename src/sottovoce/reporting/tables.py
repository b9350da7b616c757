"""The tables of a report: of what was measured, spent and verified."""

import math
from collections.abc import Sequence
from statistics import median

from sottovoce.reporting.cells import NOTHING, Row, Table, epsilon, integer, number, percent, said_once, text
from sottovoce.reporting.convergence import TERMS, convergence, verdict
from sottovoce.reporting.curves import series
from sottovoce.reporting.layers import layer_rows, spread_rows
from sottovoce.reporting.people import group_list
from sottovoce.reporting.records import LedgerCheck, Record, RunRecord

PAPER_WER = "paper-wer"


def error_table(runs: Sequence[RunRecord]) -> Table | None:
    """Errors on the test sets, by kind, with those of the model a run started from."""
    starts = {run.label: (run.results.get("start") or {}).get("test") or {} for run in runs}
    before = said_once(
        (label, (name, *_errors(test)))
        for label, start in starts.items()
        for name, test in start.items()
        if "wer" in test
    )
    rows = [(f"before: {labels}" if len(before) > 1 else "before", *cells) for labels, cells in before]
    rows += [(run.label, name, *_errors(test)) for run in runs for name, test in run.tests.items() if "wer" in test]
    headings = ("", "test set", "WER", "95 % interval", "CER", "subst.", "del.", "ins.", "words", "speakers")
    note = "Substitutions, deletions and insertions are shares of the reference words."
    return Table("tests", "Errors on the test sets", headings, tuple(rows), note, words=2) if rows else None


def group_table(runs: Sequence[RunRecord]) -> Table | None:
    """WER of groups of speakers, every run and test set."""
    rows = [
        (run.label, name, fact, group, integer(n["speakers"]), integer(n["words"]), percent(n["wer"]), _between(n))
        for run in runs
        for name, test in run.tests.items()
        for fact, group, n in group_list(test)
    ]
    headings = ("", "test set", "fact", "group", "speakers", "words", "WER", "95 % interval")
    return Table("groups", "Groups of speakers", headings, tuple(rows), words=4) if rows else None


def speaker_table(runs: Sequence[RunRecord]) -> Table | None:
    """WER of every test speaker: for the file; the page draws it."""
    rows = [
        (run.label, name, text(person["speaker"]), integer(person.get("words")), percent(person["wer"]))
        for run in runs
        for name, test in run.tests.items()
        for person in test.get("per_speaker") or ()
    ]
    headings = ("", "test set", "speaker", "words", "WER")
    return Table("speakers", "Speakers", headings, tuple(rows), words=3) if rows else None


def layer_table(run: RunRecord, *, name: str) -> Table | None:
    """Norms, noise and trust ratios of one run, layer by layer."""
    rows = layer_rows(run)
    headings = ("kind", "layer", "norm before", "norm after", "noise to signal", "trust ratio")
    return Table(name, f"{run.label}, layer by layer", headings, tuple(rows), words=2) if rows else None


def spread_table(run: RunRecord, *, name: str) -> Table | None:
    """How far clients differ, layer by layer, with norms and matrices of a block apart."""
    rows = spread_rows(run)
    headings = ("kind", "layer", "norm before", "deviation", "norm after", "deviation")
    note = "Means and standard deviations over rounds and clients; simulations alone."
    return (
        Table(name, f"{run.label}, update norms over clients", headings, tuple(rows), note, words=2) if rows else None
    )


def client_table(runs: Sequence[RunRecord]) -> Table | None:
    """Who took part."""
    rows = []
    for run in runs:
        found = run.population
        if found:
            seconds = found.get("seconds_per_client") or {}
            spread = (seconds.get("min"), seconds.get("median"), seconds.get("max"))
            rows.append(
                (
                    run.label,
                    text(found.get("privacy_unit")),
                    integer(found.get("population_size")),
                    number(found.get("hours")),
                    *(number(value) for value in spread),
                )
            )
    headings = ("", "a client is", "clients", "hours", "least s", "median s", "most s")
    return Table("clients", "Clients", headings, tuple(rows), words=2) if rows else None


def client_wer_table(runs: Sequence[RunRecord]) -> Table | None:
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
    headings = ("", "round", "WER", "95 % interval", "words, noised")
    note = (
        "Measured where the speech is, as noised sums over a cohort, and part of ε. A person counts for so many words "
        "at most, and for no more than 100 %. Noise, and who was drawn, are in the interval."
    )
    return (
        Table("client-wer", "Errors on clients’ held-out speech, noised", headings, tuple(rows), note) if rows else None
    )


def speed_table(runs: Sequence[RunRecord]) -> Table | None:
    """Time, throughput and memory."""
    rows = []
    for run in runs:
        rates = [rate for _, rate in series(run.metrics, "audio_seconds_per_second")]
        if rates:
            seconds = [value for _, value in series(run.metrics, "seconds")]
            waited = [value for _, value in series(run.metrics, "waited_for_data_seconds")]
            memory = [value for _, value in series(run.metrics, "memory_mib")]
            device = [value for _, value in series(run.metrics, "device_memory_mib")]
            rows.append(
                (
                    run.label,
                    number(median(rates)),
                    number(median(seconds)) if seconds else NOTHING,
                    number(sum(seconds) / 60) if seconds else NOTHING,
                    percent(sum(waited) / sum(seconds)) if sum(seconds) > 0 else NOTHING,
                    integer(max(memory)) if memory else NOTHING,
                    integer(max(device)) if device else NOTHING,
                )
            )
    headings = ("", "speech s / s", "s / round", "minutes in all", "waited for data", "memory MiB", "GPU MiB")
    note = "Medians over rounds; the largest memory. A release keeps no times: they tell who took part."
    return Table("speed", "Throughput", headings, tuple(rows), note) if rows else None


def _signed_by(check: LedgerCheck) -> str:
    signer = check.signature.signer
    return "unsigned" if signer is None else f"signed by {signer[:16]}…"


def ledger_table(runs: Sequence[RunRecord]) -> Table | None:
    """The verification of every ledger, made when the report was made."""
    rows: list[Row] = []
    for run in runs:
        check = run.ledger
        if check is not None and check.report is not None:
            report = check.report
            known = run.privacy.get("head")
            pinned = "ends as the results say" if known else "no results to compare its end with"
            torn = "; its last line was never finished" if report.torn_bytes else ""
            measured = f"; {report.measured_attempts:,} WERs of clients are in it" if report.measured else ""
            committed = 0 if report.committed_step is None else report.committed_step + 1
            rows.append(
                (
                    run.label,
                    f"sound; {pinned}{torn}{measured}; {_signed_by(check)}",
                    integer(report.mark.length),
                    f"{report.steps:,} / {report.attempts:,} / {committed:,}",
                    epsilon(check.epsilon),
                    f"{report.header['delta']:g}",
                    NOTHING if report.epsilon_budget is None else f"{report.epsilon_budget:g}",
                    f"{report.mark.head[:12]}…",
                )
            )
        elif check is not None:
            rows.append((run.label, f"NOT SOUND: {check.problem}", *[NOTHING] * 6))
    headings = ("", "verdict", "lines", "steps / attempts / committed", "ε spent (RDP), anew", "δ", "budget", "head")
    note = "Each line's hash covers the one before it, and ε was computed anew from the charged events."
    return Table("ledger", "Verification of the ledger", headings, tuple(rows), note, words=2) if rows else None


def bound_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """Terms of the convergence bound, and whether its premises hold."""
    found = {run.label: convergence(run).bound for run in runs if run.is_federated}
    bounds = {label: bound for label, bound in found.items() if bound is not None}
    if not bounds:
        return []
    names = [name for name in TERMS if any(name in bound.terms for bound in bounds.values())]
    unknown = [name for name in names if all(math.isnan(b.terms.get(name, math.nan)) for b in bounds.values())]
    known = [name for name in names if name not in unknown]
    terms = [(label, *(_term(b.terms.get(name)) for name in known), number(b.kappa)) for label, b in bounds.items()]
    within = " Variance over clients has that within them in it, which weighs the same." * ("inter_client" in known)
    premises = said_once(
        (label, (a.name, verdict(a), a.detail.replace("nan", "?")))
        for label, bound in bounds.items()
        for a in bound.assumptions
    )
    return [
        Table(
            "bound-terms",
            "Terms of the bound",
            ("", *(TERMS[name] for name in known), "κ"),
            tuple(terms),
            "Their sum bounds κ times the mean squared gradient norm. These are estimates from below; not measured: "
            f"{', '.join(TERMS[name] for name in unknown)}.{within}",
        ),
        Table(
            "bound-premises",
            "Premises",
            ("", "premise", "verdict", "because"),
            tuple((labels, *cells) for labels, cells in premises),
            all_words=True,
        ),
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
            ours = run.tests.get(name, {}).get("wer")
            printed_rate = f"{theirs:.1f} %"
            if (why := paper.get("unverified")) is not None:
                printed_rate += " (unverified)"
                unverified[text(why)] = None
            rates.append((run.label, text(paper.get("place")), name, printed_rate, percent(ours)))
        ours, theirs = run.population.get("population_size"), paper.get("population_size")
        if ours is not None and theirs is not None:
            clients.append((run.label, integer(theirs), integer(ours), f"{100 * (ours - theirs) / theirs:+.2g} %"))
        for plan in run.privacy.get("extrapolated") or ():
            extrapolated.append(
                (
                    run.label,
                    integer(plan.get("population_size")),
                    integer(plan.get("cohort_size")),
                    integer(plan.get("central_steps")),
                    epsilon(plan.get("paper_epsilon")),
                    epsilon(plan.get("epsilon_rdp")),
                    epsilon(plan.get("epsilon_pld")),
                )
            )
    tables = []
    if rates:
        printed = ("", "printed in", "test set", "paper's WER", "our WER")
        note = "".join(f"Unverified: {why}. " for why in unverified).strip()
        tables.append(Table(PAPER_WER, "WER beside the paper's", printed, tuple(rates), note, words=3))
    if clients:
        there = ("", "paper's clients", "our clients", "difference")
        note = "Sampling rates and ε of these runs are worked out for our clients."
        tables.append(Table("paper-clients", "Clients beside the paper's", there, tuple(clients), note))
    if extrapolated:
        headings = ("", "population", "cohort", "rounds", "paper's ε", "our ε (RDP)", "our ε (PLD)")
        note = "The same noise on the mean, sampling rate and rounds, for populations that are not there."
        tables.append(Table("paper-epsilon", "ε beside the paper's", headings, tuple(extrapolated), note))
    return tables


def _term(value: float | None) -> str:
    return NOTHING if value is None else "not measured" if math.isnan(value) else number(value)


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
