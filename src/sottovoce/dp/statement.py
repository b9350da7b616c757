"""What a run of one's own guarantees, for whoever answers for it: from its ledger alone, without torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sottovoce.export.recompute import CheckedClaim, dp_accounting_version, recompute_epsilons
from sottovoce.privacy.events import NoGuarantee
from sottovoce.privacy.guarantee import Guarantee, format_epsilon, guarantee_of
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.ledger_header import check_header
from sottovoce.privacy.ledger_report import LedgerReport, check_ledger_signature
from sottovoce.privacy.stated import Fact, population_fact, release_facts, state_guarantee

AGAINST = (
    "whoever sees all that was ever released, the settings, the ledger and the list of users, and computes for as long "
    "as they like; not whoever sees updates before the noise, as the server does; no other channels (time, memory)"
)
NOT_COVERED = (
    "settings chosen by looking at the same users' data, other runs on them, rounds made again because of what was "
    "released, and whatever else was published of them"
)


@dataclass(frozen=True)
class PrivacyStatement:
    """`kind` is "release", "weak", "simulation", "nothing" or "none"; `headline` says it in a sentence.

    `proof` is ε as dp-accounting's own accountants compute it from the ledger's events. As text it is Markdown.
    """

    kind: str
    headline: str
    facts: tuple[Fact, ...]
    guarantee: Guarantee
    ledger: LedgerReport
    proof: CheckedClaim | None

    @property
    def epsilon(self) -> float:
        """The smaller of both bounds, of all rounds that were planned; infinite without a guarantee."""
        return self.guarantee.epsilon.headline

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "headline": self.headline,
            "facts": dict(self.facts),
            "ledger": self.ledger.as_json(),
            "proof": None if self.proof is None else self.proof.as_json(),
        }

    def __str__(self) -> str:
        rows = [f"| {name} | {value} |" for name, value in self.facts]
        return "\n".join([f"# {self.headline}", "", "| | |", "|---|---|", *rows, ""])


def state_run(folder: Path | str) -> PrivacyStatement:
    """The statement on the run in `folder`, or on a ledger. InputError where the ledger or its signature is not sound.

    Guarantee: its ε is of all rounds that were planned before the first, with those that were repeated after a crash.
    """
    path = Path(folder) / "ledger.jsonl" if Path(folder).is_dir() else Path(folder)
    ledger = verify(path)
    check_header(path, ledger.header)
    signature = check_ledger_signature(ledger, path)
    guarantee, people = guarantee_of(ledger), ledger.header["plan"]["population_size"]
    kind, headline, proof = "none", "Not private: nothing is promised to anybody.", None
    if not isinstance(guarantee.release, NoGuarantee):
        stated = state_guarantee(guarantee, population_size=people)
        kind, headline = stated.kind, stated.headline
        (found,) = recompute_epsilons(guarantee.event, [guarantee.delta])
        proof = CheckedClaim("epsilon", guarantee.epsilon.headline, found)
    facts = tuple(_facts(ledger, guarantee, proof))
    return PrivacyStatement(kind, headline, (*facts, ("signature", signature.words)), guarantee, ledger, proof)


def _facts(ledger: LedgerReport, guarantee: Guarantee, proof: CheckedClaim | None) -> Iterator[Fact]:
    plan = ledger.header["plan"]
    yield "run", str(ledger.header["run"]).replace("|", "\\|")
    yield population_fact(guarantee, plan)
    yield from release_facts(guarantee, plan, repeats=ledger.attempts - ledger.steps)
    if ledger.epsilon_budget is not None:
        yield "budget", f"ε = {ledger.epsilon_budget:g} by Rényi accounting, above which no round is made"
    if proof is not None:
        by = f"dp-accounting {dp_accounting_version()}"
        bound = "has no bound" if proof.found.bound is None else f"computes ε ≤ {format_epsilon(proof.found.bound)}"
        yield "proof", f"{by} {bound} from the ledger's events: {'proved' if proof.is_proved else 'NOT proved'}"
    yield "against", AGAINST
    yield "not covered", NOT_COVERED
    yield "ledger", f"{ledger.mark.length:,} lines, sound; its head is `{ledger.mark.head}`"
