"""A statement on one run's privacy, for whoever signs: the facts from its ledger, and blanks for what people know.

It is Markdown, to be read, completed and signed. What stands in brackets is for people to fill in; nothing else is.
"""

from collections.abc import Iterator
from pathlib import Path

from sottovoce import __version__
from sottovoce.errors import InputError
from sottovoce.files import as_utf8, written_atomically
from sottovoce.privacy.events import CorrelatedRelease, GaussianRelease, NoGuarantee, Release
from sottovoce.privacy.promise import Promise, written_out
from sottovoce.privacy.scale import step_of
from sottovoce.report.audit import audit_words
from sottovoce.report.cells import integer, percent
from sottovoce.report.records import Record, RunRecord
from sottovoce.report.run_facts import short_commit
from sottovoce.report.titles import about_of
from sottovoce.report.verdict import Verdict, odds_words
from sottovoce.units import PrivacyUnit

NOT_COVERED = (
    "Settings that were chosen by trying runs on the same people which are not reported. Were there any? [yes or no; "
    "if yes, which, and their ε together with this run's]",
    "The model that training started from, and everything that was done with the speech before the run: recording, "
    "transcribing, choosing who is on the list, storing.",
    "That somebody is on the list of people who might take part; the list, and its length, are taken as public.",
    "Other runs on the same people: whoever has several models can combine them. `sottovoce ledger RUN RUN…` states ε "
    "of several together.",
    "People who are none of this run's clients, but on whom its model was chosen, whom its server has trained on, by "
    "whom noise was taken out, or whom the model that it started from has heard.",
    "Side channels: how long computations take, memory, swap files, backups, a machine that somebody else controls.",
    "What the model says of people in general: a recogniser that has learnt an accent tells that there are speakers of "
    "it, whether or not one of them took part.",
    "The test speakers, on whom the model was tried and not trained.",
)
BLANKS = {
    "Controller": "name and address of who decides why and how the speech is processed",
    "Data-protection officer": "name and contact",
    "Processors": "who else computes on the speech or the updates, and under which agreement",
    "Purpose": "what the recogniser is for, and for whom",
    "Whose speech": "who the people are, how they were told, and since when",
    "Legal basis": "for the training and, apart from it, for publishing the model",
    "Special categories": "whether what was said, or the voice itself, is under stricter rules, and what allows it",
    "Who gets the model": "published, or to whom it is given",
    "Retention": "how long speech, updates, this ledger and the model are kept, and who deletes them",
    "When people object": "what happens with their speech, and with models that are already released",
    "Risk assessment": "reference of the assessment in which this ε was judged to be enough, or not",
}


def write_statement(path: Path, run: RunRecord, verdict: Verdict) -> None:
    """Write the statement on `run` to `path`, whole or not at all. Refuses a run whose ledger does not hold."""
    if verdict.kind == "unsound":
        reason = run.unsound or f"{run.label} has no ledger"
        raise InputError(f"statement={path}: nobody can sign for this run: {reason}")
    if run.damaged:
        raise InputError(f"statement={path}: nobody can sign for this run: {run.damaged[0]}")
    if not path.parent.is_dir():
        raise InputError(f"statement={path}: the folder {path.parent} does not exist")
    try:
        with written_atomically(path) as file:
            file.write(as_utf8(statement(run, verdict)))
    except OSError as error:
        raise InputError(f"statement={path}: cannot be written ({error.strerror})") from None


def statement(run: RunRecord, verdict: Verdict) -> str:
    """The whole of it."""
    lines = ["# Statement on the privacy of a speech recogniser", "", f"**{verdict.headline}**", ""]
    if run.ledger is not None:
        lines += [f"Its ledger is {_signature(run)}", ""]
    if verdict.kind != "release":
        lines += [f"> {_caution(verdict)}", ""]
    verified = "" if run.promise is None else ", and verified its ledger line by line"
    lines += [
        f"Sottovoce {__version__} has read all this from the run's folder{verified}; what stands in [brackets] is for "
        "people to fill in. It states facts about one training run, and is no legal advice.",
        *("", "## 1. What it means", ""),
        *(f"- **{question}.** {answer}" for question, answer in verdict.points),
        *("", "## 2. The facts", "", "| | |", "|---|---|"),
        *(f"| {name} | {_cell(value)} |" for name, value in _facts(run, verdict)),
        *("", "## 3. What is not covered", ""),
        *(f"- {line}" for line in _not_covered(run)),
        *("", "## 4. For people to fill in", ""),
        *(f"- **{name}:** [{what}]" for name, what in BLANKS.items()),
        *("", "## 5. Decision", ""),
        "[ ] The model may be released as described above.  ",
        "[ ] The model may not be released.",
        *("", "Because: [reasons]", "", "[place, date]  ", "[name, role, signature]"),
    ]
    return "\n".join(lines) + "\n"


def _cell(value: str) -> str:
    """What somebody has called a run must not end a cell or begin HTML.

    >>> _cell("a | b <i>")
    'a \\\\| b &lt;i>'
    """
    return " ".join(value.split()).replace("|", "\\|").replace("<", "&lt;")


def _signature(run: RunRecord) -> str:
    """Who stands for the ledger, and what that means for all that follows."""
    assert run.ledger is not None
    found = run.ledger.signature
    if found.signer is None:
        return (
            "**unsigned**: that its lines and files fit together is checked; that nobody has written all of them anew "
            "cannot be. Compare its head with one that was kept elsewhere when the run ended."
        )
    return (
        f"**signed** by the key with the fingerprint `{found.signer}`. Whose key that is, this statement cannot know: "
        "compare the fingerprint with one that the signer has published."
    )


def _caution(verdict: Verdict) -> str:
    return {
        "not private": "This run promises nobody anything. A statement on its privacy can only say so.",
        "simulation": "This is a simulation. Its model must not be released as private; what follows is a draft for a "
        "run of the same recipe in secure mode.",
        "weak": "The guarantee is weak. Read section 1 before anything is decided.",
        "nothing": "The guarantee is so weak that it must not be called one. Read section 1 before deciding anything.",
    }[verdict.kind]


def _facts(run: RunRecord, verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "run", f"{run.label}: {about_of(run) or 'no description'}"
    yield (
        "made with",
        f"Sottovoce {run.environment.get('sottovoce', 'of an unknown release')}"
        + (f", commit {commit}" if (commit := short_commit(run)) else ""),
    )
    yield "tokens", _tokens(run)
    promise = run.promise
    if promise is None:
        yield "mechanism", "none: training without differential privacy"
        return
    plan, ledger = run.header["plan"], run.ledger
    assert ledger is not None
    assert ledger.report is not None
    people, cohort = plan["population_size"], plan["cohort_size"]
    unit = promise.unit
    yield "population", f"{integer(people)} {unit.several} on a list that was fixed before the run"
    if unit.inside is not None:
        yield f"{unit.inside}s in these {unit.several}", "[how many; the ledger counts them nowhere]"
    yield "sampling", _sampling(promise.release, cohort=cohort, people=people, unit=unit)
    yield "rounds", f"{promise.steps:,} promised before the first model was released, {promise.made:,} made"
    repeats = ledger.report.attempts - ledger.report.steps
    if repeats:
        yield "repeated after a crash", f"{repeats:,} attempts; each is in ε"
    yield from _mechanism(promise, plan)
    yield (
        "randomness",
        (
            "of a seed: a simulation"
            if promise.simulated
            else "of the operating system, anew for every draw; sums and noise lie on a public grid, on which float64 "
            "is exact. That the noise is an exact rounded Gaussian is not claimed (docs/privacy.md, Secure mode)"
        ),
    )
    if verdict.cost is not None:
        yield f"word error rate ({verdict.cost.test})", percent(verdict.cost.wer)
    if (audited := audit_words(run)) is not None:
        yield "audit", audited
    mark = ledger.report.mark
    yield "ledger", f"{mark.length:,} lines, sound; its head is `{mark.head}`"
    for note in ledger.notes:
        yield "not held against the ledger", note
    if (signer := ledger.signature.signer) is not None:
        yield "to verify", f"`sottovoce ledger {run.label} --key {signer}`, with the run's folder"
    else:
        yield "to verify", f"`sottovoce ledger {run.label} --expect-head {mark.head}`, with the run's folder"


def _tokens(run: RunRecord) -> str:
    """What the model writes with, and whose texts made that."""
    told = run.results.get("tokens")
    if not isinstance(told, dict):
        return "not recorded: whose texts made them? [name]"
    size = f"{integer(told['size'])} " if isinstance(told.get("size"), int) and told["size"] else ""
    return f"{size}{told.get('kind')}, made from {told.get('made_from')}"


def _mechanism(promise: Promise, plan: Record) -> Iterator[tuple[str, str]]:
    release, stated, people = promise.release, promise.epsilon, plan["population_size"]
    if isinstance(release, NoGuarantee):
        yield "mechanism", f"none that bounds anything: {release.reason}"
        return
    bound = "a norm that follows theirs, privately" if plan.get("adaptive") else f"an L2 norm of {plan['clip_bound']:g}"
    yield "clipping", f"each client's update to {bound}"
    chained = ", correlated over rounds" if isinstance(release, CorrelatedRelease) else ""
    yield "noise", f"Gaussian{chained}, {release.noise_multiplier:g} times that bound, on the sum of a round, once"
    relation = "added or removed" if release.neighbouring == "add_remove" else "replaced by another"
    unit, inside = promise.unit, promise.epsilon_inside
    yield "unit of privacy", f"{unit.one}, {relation}, {unit.holds}"
    if promise.measured:
        yield "measured besides", f"clients' word error rate, {promise.measured:,} times, with noise; in ε"
    below = "below" if promise.delta * people < 1 else "NOT BELOW"
    counted = "the population" if unit.inside is None else f"the number of {unit.several}"
    yield "δ", f"{promise.delta:g}, {below} one over {counted} ({1 / people:.2g})"
    tight = f"none: {stated.pld_reason}" if stated.pld is None else written_out(stated.pld)
    yield "ε by privacy loss distributions", tight
    yield "ε by Rényi accounting", written_out(stated.rdp)
    yield "ε that counts", f"{written_out(stated.headline)}: both are upper bounds, so the smaller one holds"
    if inside is not None:
        yield f"ε that counts for one {unit.inside} inside a {unit.short}", _inside(promise)
    worst = stated.headline if inside is None else inside.headline
    yield "on the scale of ε", f"{step_of(worst).words} (docs/privacy.md, One scale of ε)"
    yield "odds of 1 : 1 become", f"at most {odds_words(worst)}, but for a chance of δ"


def _inside(promise: Promise) -> str:
    """Of one person in a unit that holds several."""
    inside, unit = promise.epsilon_inside, promise.unit
    assert inside is not None
    tight = "" if inside.pld is None else f"{written_out(inside.pld)} by privacy loss distributions, "
    return (
        f"{written_out(inside.headline)} ({tight}{written_out(inside.rdp)} by Rényi accounting): what they said moves "
        f"the {unit.short}’s update by up to twice the clip bound. For who is in one {unit.short} alone"
    )


def _sampling(release: Release | NoGuarantee, *, cohort: int, people: int, unit: PrivacyUnit) -> str:
    one = "person" if unit.inside is None and unit.is_known else unit.short
    if isinstance(release, CorrelatedRelease):
        whom = (
            f"each {one} of it"
            if release.sampling_rate == 1
            else f"each of it with probability {release.sampling_rate:.4g}"
        )
        return f"one of {release.cycle:,} groups after the other, {whom}"
    if isinstance(release, GaussianRelease) and release.sampling == "fixed_size":
        return f"{integer(cohort)} different {unit.several} in each round, every set of them equally likely"
    return f"each {one} alone, with probability {cohort / people:.4g} in each round ({integer(cohort)} expected)"


def _not_covered(run: RunRecord) -> Iterator[str]:
    yield from NOT_COVERED
    if run.promise is not None and run.promise.outside is not None:
        yield f"{run.promise.outside}. Who has looked at that code? [name]"
