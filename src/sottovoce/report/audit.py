"""What was measured of a run's privacy, beside what is promised; only where it was audited."""

from collections.abc import Mapping, Sequence
from typing import Any

from sottovoce.audit.canary_audit import Observer, describe_interval
from sottovoce.audit.recipe import audit_path, config_digest
from sottovoce.audit.speech_audit import format_attacks
from sottovoce.base.parsing import ParseError, parse_json
from sottovoce.base.tables import NOTHING, Row
from sottovoce.privacy.events import NoGuarantee, poisson_release
from sottovoce.report.parts import (
    PagePart,
    PageSection,
    Paragraph,
    make_section,
    make_table,
    notice,
    notices,
    show_epsilon,
    show_percent,
)
from sottovoce.report.records import RunRecord
from sottovoce.training.run_folder import CONFIG

SECURE_AUDIT_WITHHELD = (
    "was made in secure mode: its audit made more rounds with the same people, which no ledger charges, so nothing of "
    "it is shown here."
)
VERDICTS = {
    "consistent": "Nothing contradicts the promise.",
    "alarm": "More leaks than is promised, by the estimate: something is wrong.",
    "broken": "The promise is broken: more leaks than it allows.",
}
NO_ATTACKS: Mapping[str, Any] = {"membership": None, "exposure": [], "missing": {}}


def audit_section(runs: Sequence[RunRecord]) -> PageSection | None:
    """What audits of these runs found; None where there is none. Those of releases are left out."""
    withheld = [
        (run.label, SECURE_AUDIT_WITHHELD) for run in runs if run.is_release and audit_path(run.folder).is_file()
    ]
    parts: list[PagePart] = [*notices(withheld, "{} {}")]
    rows, lines = list[Row](), list[PagePart]()
    for run in runs:
        try:
            content = kept_audit(run)
        except ParseError as why:
            parts.append(notice(f"{run.label}: its audit cannot be read: {why}"))
            continue
        if content is not None:
            rows.append((run.label, *_cells(content)))
            attacks = format_attacks(content.get("speech") or NO_ATTACKS)
            found = [audit_verdict(content), *map(_sentence, (audit_interval(run, content), *attacks))]
            lines += [Paragraph(f"{run.label}: {line}") for line in found]
    return make_section("audit", [*parts, make_table("audit", rows), *lines])


def kept_audit(run: RunRecord) -> Mapping[str, Any] | None:
    """The audit that is kept beside a run; None where there is none, it is of another recipe, or of a release."""
    path, config = audit_path(run.folder), run.folder / CONFIG
    if run.is_release or not path.is_file() or not config.is_file():
        return None
    content = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("verdict") not in VERDICTS:
        raise ParseError("it holds no verdict")
    same = content.get("config_digest") == config_digest(config.read_text(encoding="utf-8"))
    return content if same else None


def _readable_audit(run: RunRecord) -> Mapping[str, Any] | None:
    try:
        return kept_audit(run)
    except ParseError:  # the section says so
        return None


def audit_alarm(run: RunRecord) -> str:
    """What its audit found against what `run` promises; empty where it found nothing, or cannot be read."""
    content = _readable_audit(run)
    return "" if content is None or content["verdict"] == "consistent" else audit_verdict(content)


def audit_interval(run: RunRecord, content: Mapping[str, Any]) -> str:
    """What the interval of its audit means, by the run's own ledger; without one, by the rate at which the audit says
    that people are sampled."""
    observer = content.get("observer", Observer.RELEASES)
    if run.guarantee is not None:
        return describe_interval(run.guarantee.release, observer)
    rate = (content.get("drawn") or {}).get("sampling_rate_accounted")
    drawn = poisson_release(1.0, sampling_rate=1.0) if rate == 1 else NoGuarantee("nothing shows who is drawn")
    return describe_interval(drawn, observer)


def audit_verdict(content: Mapping[str, Any]) -> str:
    """The verdict of an audit, and why."""
    return f"{VERDICTS[content['verdict']]} {_sentence(content['why'])}"


def format_audit(run: RunRecord) -> str | None:
    """What was measured of a run's privacy, in one line; None where nothing is kept, or may be shown."""
    content = _readable_audit(run)
    if content is None:
        return None
    promised, estimated, interval, bound, *_ = _cells(content)
    return (
        f"{content['verdict']}: ε promised {promised}, estimated {estimated} ({interval}), at least {bound}; "
        f"{audit_interval(run, content)}"
    )


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _cells(content: Mapping[str, Any]) -> Row:
    estimate, noise = content["estimate"], content["noise"]
    known = [one for one in content["promised"].values() if one is not None]
    return (
        show_epsilon(min(known, default=None)),
        show_unbounded(estimate["epsilon"]),
        " to ".join(show_unbounded(end) for end in estimate["interval"]),
        show_epsilon(content["lower_bound"]["epsilon"]),
        NOTHING if noise is None else show_percent(noise["least_share"]),
        f"{content['canaries']:,}",
        content["verdict"],
    )


def show_unbounded(value: float | None) -> str:
    """ε of an audit's file, in which null means infinite."""
    return "∞" if value is None else show_epsilon(value)
