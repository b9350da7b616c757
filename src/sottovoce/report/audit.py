"""The chapter on what was measured of a run's privacy, beside what is promised; only where there is an audit of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from sottovoce.auditing.audit import Observer, interval_words
from sottovoce.auditing.of_recipe import config_digest, kept_at
from sottovoce.auditing.speech_audit import attack_words
from sottovoce.parsing import Unreadable, parse_json
from sottovoce.privacy.events import NoGuarantee, poisson_release
from sottovoce.report.cells import epsilon_text, percent, said_once
from sottovoce.report.parts import Chapter, PagePart, Paragraph, chapter, notice
from sottovoce.report.records import RunRecord
from sottovoce.tables import NOTHING, Table
from sottovoce.training.run_folder import CONFIG

_INTRO = (
    "ε is a promise worked out on paper. Here it was tried: canaries, made-up users, took part in the same rounds, and "
    "the attacker was asked which of them did. The estimate is what the attacker's success looks like as an ε, and no "
    "more than that where people are drawn by chance; the bound is what it proves. Both should be below what is "
    "promised."
)
SECURE_AUDIT_WITHHELD = (
    "was made in secure mode: its audit made more rounds with the same people, which no ledger charges, so nothing of "
    "it is told here."
)
VERDICTS = {
    "consistent": "Nothing speaks against the promise.",
    "alarm": "More leaks than is promised, by the estimate: something is wrong.",
    "broken": "The promise is broken: more leaks than it allows.",
}


def audit_section(runs: Sequence[RunRecord]) -> Chapter | None:
    """What audits of these runs found; None where there is none. Those of releases are left out."""
    found: dict[str, Mapping[str, Any]] = {}
    records = {run.label: run for run in runs}
    withheld = said_once(
        (run.label, SECURE_AUDIT_WITHHELD) for run in runs if run.is_release and kept_at(run.folder).is_file()
    )
    parts: list[PagePart] = [notice(f"{labels} {words}") for labels, words in withheld]
    for run in runs:
        try:
            content = kept_audit(run)
        except Unreadable as why:
            parts.append(notice(f"{run.label}: its audit cannot be read: {why}"))
            continue
        if content is not None:
            found[run.label] = content
    if not found:
        return chapter("audit", "Audit", parts)
    rows = tuple(_row(label, content) for label, content in found.items())
    headings = ("run", "ε promised", "ε estimated", "interval", "ε at least", "noise found", "canaries", "verdict")
    note = (
        "Promised for the rounds audited, by the ledger's better accountant. Noise found is the least in any tensor, "
        "as a share of what is accounted."
    )
    parts.append(Table("audit", "What leaks, measured", headings, rows, note=note))
    for label, content in found.items():
        lines = [
            audit_verdict(content),
            _sentence(interval_of(records[label], content)),
            *map(_sentence, attack_words(content.get("speech") or NO_ATTACKS)),
        ]
        parts += [Paragraph(f"{label}: {line}") for line in lines]
    return chapter("audit", "Audit", parts, _INTRO)


NO_ATTACKS: Mapping[str, Any] = {"membership": None, "exposure": [], "missing": {}}


def kept_audit(run: RunRecord) -> Mapping[str, Any] | None:
    """The audit that is kept beside a run; None where there is none, it is of another recipe, or of a release."""
    path, config = kept_at(run.folder), run.folder / CONFIG
    if run.is_release or not path.is_file() or not config.is_file():
        return None
    content = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("verdict") not in VERDICTS:
        raise Unreadable("it holds no verdict")
    same = content.get("config_digest") == config_digest(config.read_text(encoding="utf-8"))
    return content if same else None


def audit_alarm(run: RunRecord) -> str:
    """What its audit says against what `run` promises; empty where it says nothing, or cannot be read."""
    try:
        content = kept_audit(run)
    except Unreadable:  # the chapter says so
        return ""
    return "" if content is None or content["verdict"] == "consistent" else audit_verdict(content)


def interval_of(run: RunRecord, content: Mapping[str, Any]) -> str:
    """What the interval of its audit is worth, in words, by the run's own ledger; without one, by the rate at which the
    audit says that people are drawn."""
    observer = content.get("observer", Observer.RELEASES)
    if run.promise is not None:
        return interval_words(run.promise.release, observer)
    rate = (content.get("drawn") or {}).get("sampling_rate_accounted")
    drawn = poisson_release(1.0, sampling_rate=1.0) if rate == 1 else NoGuarantee("nothing shows who is drawn")
    return interval_words(drawn, observer)


def audit_verdict(content: Mapping[str, Any]) -> str:
    """The verdict of an audit, and why."""
    return f"{VERDICTS[content['verdict']]} {_sentence(content['why'])}"


def audit_words(run: RunRecord) -> str | None:
    """What was measured of a run's privacy, in one line; None where nothing is kept, or may be told."""
    try:
        content = kept_audit(run)
    except Unreadable:
        return None
    if content is None:
        return None
    _, promised, estimated, interval, bound, *_ = _row(run.label, content)
    return (
        f"{content['verdict']}: ε promised {promised}, estimated {estimated} ({interval}), at least {bound}; "
        f"{interval_of(run, content)}"
    )


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _row(label: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    promised, estimate = content["promised"], content["estimate"]
    known = [one for one in promised.values() if one is not None]
    noise = content["noise"]
    return (
        label,
        epsilon_text(min(known)) if known else NOTHING,
        or_infinite(estimate["epsilon"]),
        " to ".join(or_infinite(end) for end in estimate["interval"]),
        epsilon_text(content["lower_bound"]["epsilon"]),
        NOTHING if noise is None else percent(noise["least_share"]),
        f"{content['canaries']:,}",
        content["verdict"],
    )


def or_infinite(value: float | None) -> str:
    """ε of an audit's file, which has nothing for what is beyond all bounds."""
    return "∞" if value is None else epsilon_text(value)
