"""A statement on one run's privacy, for whoever signs: the facts from its ledger, and blanks for what people know.

It is Markdown (`templates/statement.md`), to be read, completed and signed. What stands in brackets is for people to
fill in; nothing else is.
"""

from collections.abc import Iterator
from pathlib import Path

from sottovoce import __version__
from sottovoce.base.drawing import fill_template
from sottovoce.base.errors import InputError
from sottovoce.base.files import encode_utf8, write_atomically
from sottovoce.privacy.events import CorrelatedRelease, GaussianRelease, NoGuarantee
from sottovoce.privacy.guarantee import Guarantee, format_epsilon
from sottovoce.privacy.membership_odds import strength_of
from sottovoce.report.audit import format_audit
from sottovoce.report.parts import show_count, show_percent
from sottovoce.report.records import Record, RunRecord
from sottovoce.report.run_facts import recipe_title, short_commit
from sottovoce.report.verdict import Verdict, format_odds


def write_statement(path: Path, run: RunRecord, verdict: Verdict) -> None:
    """Write the statement on `run` to `path`, whole or not at all. Refuses a run whose ledger is not valid."""
    if verdict.kind == "unsound":
        reason = run.unsound or f"{run.label} has no ledger"
        raise InputError(f"statement={path}: nobody can sign for this run: {reason}")
    if run.damaged:
        raise InputError(f"statement={path}: nobody can sign for this run: {run.damaged[0]}")
    if not path.parent.is_dir():
        raise InputError(f"statement={path}: the folder {path.parent} does not exist")
    try:
        with write_atomically(path) as file:
            file.write(encode_utf8(statement_text(run, verdict)))
    except OSError as error:
        raise InputError(f"statement={path}: cannot be written ({error.strerror})") from None


def statement_text(run: RunRecord, verdict: Verdict) -> str:
    """The whole of it."""
    signer = None if run.ledger is None else run.ledger.signature.signer
    facts = [(name, escape_cell(value)) for name, value in _facts(run, verdict)]
    base_name = escape_cell(run.base_model.get("name", "without a name"))
    given = {"verdict": verdict, "signer": signer, "facts": facts, "base_name": base_name, "version": __version__}
    return fill_template("statement.md", run=run, **given)


def escape_cell(value: str) -> str:
    """A run's name must not end a cell or begin HTML.

    >>> escape_cell("a | b <i>")
    'a \\\\| b &lt;i>'
    """
    return " ".join(value.split()).replace("|", "\\|").replace("<", "&lt;")


def _facts(run: RunRecord, verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "run", f"{run.label}: {recipe_title(run) or 'no description'}"
    commit = f", commit {found}" if (found := short_commit(run)) else ""
    yield "made with", f"Sottovoce {run.environment.get('sottovoce', 'of an unknown release')}{commit}"
    yield "tokens", _tokens(run)
    if base := run.base_model:
        yield "base model", "; ".join(f"{name} {value}" for name, value in base.items())
    guarantee = run.guarantee
    if guarantee is None:
        yield "mechanism", "none: training without differential privacy"
        return
    plan, ledger, unit = run.header["plan"], run.ledger, guarantee.unit
    assert ledger is not None
    assert ledger.report is not None
    yield "population", f"{show_count(plan['population_size'])} {unit.several} on a list that was fixed before the run"
    if unit.inside is not None:
        yield f"{unit.inside}s in these {unit.several}", "[how many; the ledger counts them nowhere]"
    yield "sampling", _sampling(guarantee, plan)
    yield "rounds", f"{guarantee.steps:,} promised before the first model was released, {guarantee.made:,} made"
    repeats = ledger.report.attempts - ledger.report.steps
    if repeats:
        yield "repeated after a crash", f"{repeats:,} attempts; each is in ε"
    yield from _mechanism(guarantee, plan)
    secure = (
        "of the operating system, anew for every draw; sums and noise lie on a public grid, on which float64 is exact. "
        "That the noise is an exact rounded Gaussian is not claimed (docs/privacy.md, Secure mode)"
    )
    yield "randomness", "of a seed: a simulation" if guarantee.simulated else secure
    if verdict.cost is not None:
        yield f"word error rate ({verdict.cost.test})", show_percent(verdict.cost.wer)
    if (audited := format_audit(run)) is not None:
        yield "audit", audited
    mark = ledger.report.mark
    yield "ledger", f"{mark.length:,} lines, sound; its head is `{mark.head}`"
    for note in ledger.notes:
        yield "not held against the ledger", note
    signer = ledger.signature.signer
    option = f"--expect-head {mark.head}" if signer is None else f"--key {signer}"
    yield "to verify", f"`sottovoce ledger {run.label} {option}`, with the run's folder"


def _tokens(run: RunRecord) -> str:
    """What the model writes with, and whose texts made that."""
    found = run.results.get("tokens")
    if not isinstance(found, dict):
        return "not recorded: whose texts made them? [name]"
    size = f"{show_count(found['size'])} " if isinstance(found.get("size"), int) and found["size"] else ""
    return f"{size}{found.get('kind')}, made from {found.get('made_from')}"


def _mechanism(guarantee: Guarantee, plan: Record) -> Iterator[tuple[str, str]]:
    release, stated, people = guarantee.release, guarantee.epsilon, plan["population_size"]
    if isinstance(release, NoGuarantee):
        yield "mechanism", f"none that bounds anything: {release.reason}"
        return
    bound = "a norm that follows theirs, privately" if plan.get("adaptive") else f"an L2 norm of {plan['clip_bound']:g}"
    yield "clipping", f"each client's update to {bound}"
    chained = ", correlated over rounds" if isinstance(release, CorrelatedRelease) else ""
    yield "noise", f"Gaussian{chained}, {release.noise_multiplier:g} times that bound, on the sum of a round, once"
    relation = "added or removed" if release.neighbouring == "add_remove" else "replaced by another"
    unit, inside = guarantee.unit, guarantee.epsilon_inside
    yield "unit of privacy", f"{unit.one}, {relation}, {unit.holds}"
    if guarantee.measured:
        yield "measured besides", f"clients' word error rate, {guarantee.measured:,} times, with noise; in ε"
    below = "below" if guarantee.delta * people < 1 else "NOT BELOW"
    counted = "the population" if unit.inside is None else f"the number of {unit.several}"
    yield "δ", f"{guarantee.delta:g}, {below} one over {counted} ({1 / people:.2g})"
    tight = f"none: {stated.pld_reason}" if stated.pld is None else format_epsilon(stated.pld)
    yield "ε by privacy loss distributions", tight
    yield "ε by Rényi accounting", format_epsilon(stated.rdp)
    yield "ε that counts", f"{format_epsilon(stated.headline)}: both are upper bounds, so the smaller one holds"
    worst = stated.headline
    if inside is not None:
        worst = inside.headline
        by_pld = "" if inside.pld is None else f"{format_epsilon(inside.pld)} by privacy loss distributions, "
        yield (
            f"ε that counts for one {unit.inside} inside a {unit.short}",
            f"{format_epsilon(worst)} ({by_pld}{format_epsilon(inside.rdp)} by Rényi accounting): what they said moves "
            f"the {unit.short}’s update by up to twice the clip bound. For who is in one {unit.short} alone",
        )
    yield "on the scale of ε", f"{strength_of(worst).words} (docs/privacy.md, One scale of ε)"
    yield "odds of 1 : 1 become", f"at most {format_odds(worst)}, but for a chance of δ"


def _sampling(guarantee: Guarantee, plan: Record) -> str:
    release, unit, cohort, people = guarantee.release, guarantee.unit, plan["cohort_size"], plan["population_size"]
    one = "person" if unit.inside is None and unit.is_known else unit.short
    if isinstance(release, CorrelatedRelease):
        rate = release.sampling_rate
        whom = f"each {one} of it" if rate == 1 else f"each of it with probability {rate:.4g}"
        return f"one of {release.cycle:,} groups after the other, {whom}"
    if isinstance(release, GaussianRelease) and release.sampling == "fixed_size":
        return f"{show_count(cohort)} different {unit.several} in each round, every set of them equally likely"
    return f"each {one} alone, with probability {cohort / people:.4g} in each round ({show_count(cohort)} expected)"
