"""What a check of an exported folder has found, in five plain lines and as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sottovoce.export.folder import ExportSigner
from sottovoce.export.privacy_file import Evidence, Section, privacy_kind
from sottovoce.export.recompute import CheckedClaim, dp_accounting_version
from sottovoce.models.hub import CARD
from sottovoce.privacy.events import CorrelatedRelease, NoGuarantee
from sottovoce.privacy.guarantee import Guarantee, format_epsilon, format_epsilons
from sottovoce.privacy.stated import Fact, population_fact, release_facts, state_guarantee

NOISE = "that the noise was really added, and drawn as the ledger says"
STATED = "Stated"
NO_AUDIT = "none: that the noise is there was not tested by attacks"


@dataclass(frozen=True)
class CheckedExport:
    """A folder in which nothing contradicts anything: what it was held against, and `stated`, made anew."""

    evidence: Evidence
    guarantee: Guarantee | None
    stated: Section
    claims: tuple[CheckedClaim, ...]
    signer: ExportSigner


@dataclass(frozen=True)
class VerifiedExport:
    """What is to be said of a folder. `is_proved`: its ε is a guarantee, and dp-accounting has proved the number.

    `lines` are five, each with what it is about; `facts` are those of a statement, in its words.
    """

    kind: str
    is_proved: bool
    lines: tuple[Fact, ...]
    facts: tuple[Fact, ...]
    checked: CheckedExport

    @property
    def headline(self) -> str:
        """What is stated, in a sentence."""
        return dict(self.lines)[STATED]

    def as_json(self) -> dict[str, Any]:
        own, ledger = self.checked.stated["sottovoce"], self.checked.evidence.ledger
        epsilon = own.get("epsilon") if self.kind == "release" else None
        return {
            "valid": True,
            "kind": self.kind,
            "proved": self.is_proved,
            "epsilon": None if epsilon is None else epsilon["headline"],
            "delta": None if epsilon is None else epsilon["delta"],
            "lines": dict(self.lines),
            "facts": dict(self.facts),
            "claims": [one.as_json() for one in self.checked.claims],
            "model": own["model"],
            "ledger": None if ledger is None else {"length": ledger.mark.length, "head": ledger.mark.head},
            "signature": self.checked.signer.as_json(),
        }


def judge_export(checked: CheckedExport) -> VerifiedExport:
    """What is proved, what is only asserted, and what an audit adds."""
    guarantee, ledger = checked.guarantee, checked.evidence.ledger
    kind = privacy_kind(guarantee)
    main = [one for one in checked.claims if one.name in ("epsilon.headline", "epsilon.inside")]
    is_proved = kind == "release" and bool(main) and all(one.is_proved for one in main)
    facts: tuple[Fact, ...] = ()
    headline = checked.stated["notice"]
    if guarantee is not None and ledger is not None and not isinstance(guarantee.release, NoGuarantee):
        plan, repeats = ledger.header["plan"], ledger.attempts - ledger.steps
        facts = (population_fact(guarantee, plan), *release_facts(guarantee, plan, repeats=repeats))
        headline = state_guarantee(guarantee, population_size=plan.get("population_size")).headline
    lines = (
        (STATED, headline),
        ("Proved", _proved(checked, kind)),
        ("Only asserted", _asserted(checked, kind)),
        ("Audit", _audit(checked.evidence.audit)),
        ("Signature", f"{checked.signer.words}."),
    )
    return VerifiedExport(kind, is_proved, lines, facts, checked)


def _proved(checked: CheckedExport, kind: str) -> str:
    evidence, guarantee = checked.evidence, checked.guarantee
    model = f"the model after step {evidence.model['step']}, " if evidence.model["in_ledger"] else ""
    if evidence.ledger is None or guarantee is None:
        return f"nothing is promised, so there is nothing to prove; the {len(evidence.files):,} files are those listed."
    recipe = "the recipe, " if evidence.ledger.header.get("recipe") else ""
    fits = f"the ledger's {evidence.ledger.mark.length:,} lines, {recipe}{model}all numbers here and "
    fits += f"{len(evidence.files):,} files fit together"
    if kind != "release":
        return f"nothing is promised, so no ε is proved; {fits}."
    return f"{_epsilons(checked.claims, guarantee)}; {fits}."


def _epsilons(claims: tuple[CheckedClaim, ...], guarantee: Guarantee) -> str:
    by, named = f"dp-accounting {dp_accounting_version()}", {one.name: one for one in claims}
    parts = []
    for name, stated, whom in (
        ("epsilon.headline", guarantee.epsilon, ""),
        (
            "epsilon.inside",
            guarantee.epsilon_inside,
            f" for one {guarantee.unit.inside} inside a {guarantee.unit.short}",
        ),
    ):
        if stated is None:
            continue
        claim, words = named[name], f"ε = {format_epsilons(stated)} at δ = {guarantee.delta:g}{whom}"
        if claim.is_proved:
            parts.append(f"{words} follows from the events in the ledger, by {by}")
        elif claim.found.bound is None:
            parts.append(f"{words} is NOT proved: {by} has no bound for these events")
        else:
            parts.append(f"{words} is NOT proved: {by} shows ε ≤ {format_epsilon(claim.found.bound)} and no less")
    if isinstance(guarantee.release, CorrelatedRelease):
        parts.append("what correlated noise is worth is computed by Sottovoce (docs/decisions/031)")
    return "; ".join(parts)


def _asserted(checked: CheckedExport, kind: str) -> str:
    evidence, guarantee = checked.evidence, checked.guarantee
    parts = []
    if kind == "release" and guarantee is not None:
        people = evidence.ledger.header["plan"]["population_size"] if evidence.ledger is not None else 0
        parts += [NOISE, f"that the {people:,} {guarantee.unit.several} were who they are said to be, each listed once"]
        parts += [f"that {guarantee.outside}"] if guarantee.outside else []
    if not evidence.model["in_ledger"]:
        step = evidence.model["step"]
        parts.append(f"that this model is made from the run's after step {step}: no ledger has its digest")
    parts.append("what the model began with, whose texts made its tokens, and which software was used")
    if CARD in evidence.files:
        parts.append(f"the words of {CARD}, in which no other ε is named")
    if kind == "release":
        parts.append("not covered at all: tuning on the same people, other runs on them, side channels")
    return f"{'; '.join(parts)}."


def _audit(audit: Mapping[str, Any] | None) -> str:
    if audit is None:
        return f"{NO_AUDIT}."
    bound, promised = audit["lower_bound"]["epsilon"], audit["promised"]
    known = [one for one in promised.values() if one is not None]
    beside = f"ε promised {format_epsilon(min(known))}, " if known else ""
    return (
        f"{audit['verdict']}: {beside}at least {format_epsilon(bound)} found by {audit['canaries']:,} canaries in "
        f"{audit['rounds']:,} rounds of “{audit['recipe']}”. It tests whether the code adds the noise; asserted, too."
    )
