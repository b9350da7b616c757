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
from sottovoce.privacy.stated import population_fact, release_facts
from sottovoce.report.audit import format_audit
from sottovoce.report.parts import show_count, show_percent
from sottovoce.report.records import RunRecord
from sottovoce.report.run_facts import recipe_title, short_commit
from sottovoce.report.verdict import Verdict


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
    yield population_fact(guarantee, plan)
    if unit.inside is not None:
        yield f"{unit.inside}s in these {unit.several}", "[how many; the ledger counts them nowhere]"
    yield from release_facts(guarantee, plan, repeats=ledger.report.attempts - ledger.report.steps)
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
