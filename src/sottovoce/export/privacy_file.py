"""`privacy.json`: what is stated of a model's privacy, made from its ledger and from what only its sender knows.

One function makes it, for the sender who writes it and for the checker who compares: whatever follows from the ledger,
the recipe and the files of the folder has to come out the same. There is no clock, host or path in it.

    notice        what is to be known first, in one sentence
    url_slug …    an entry for the registry of DP deployments (`registry`)
    sottovoce     our own section: what a checker needs. `SCHEMA` changes with its keys and with all words of the file
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sottovoce.export.folder import AUDIT, RECIPE
from sottovoce.export.registry import RegistryFacts, registry_entry
from sottovoce.privacy.accounting import Epsilon
from sottovoce.privacy.events import CorrelatedRelease, GaussianRelease, NoGuarantee, repeated
from sottovoce.privacy.guarantee import Guarantee, guarantee_of
from sottovoce.privacy.ledger_report import LedgerReport, json_number
from sottovoce.privacy.profile import gaussian_mu, privacy_profile
from sottovoce.privacy.stated import CENTRAL, NOT_PRIVATE, remove_epsilon, state_guarantee
from sottovoce.privacy.strategies import strategy_to_json
from sottovoce.training.run_folder import LEDGER, NO_EPSILON

SCHEMA = 1
Section = dict[str, Any]

SIMULATION = (
    "This is a simulation and promises nothing to anybody: its noise comes from a seed, and whoever has the seed can "
    "take the noise out again."
)
NOT_COVERED_TUNING = (
    "settings that were chosen by runs on the same people, and other runs on them: ε is that of this run alone"
)
OTHER_CHANNELS = "time, memory, backups, a machine that somebody else controls"


@dataclass(frozen=True, kw_only=True)
class Asserted:
    """What is in no ledger: the sender says it, and nobody can compute it anew.

    `software` are versions, by name. `start_model` and `base_model` are what training began with: a digest of its
    parameters, and SHA-256 of the pretrained files by name. `tokens` says whose texts made them. `stand_in`: people and
    noise are not the recipe's (`run --smoke`).
    """

    software: Mapping[str, str | None]
    start_model: Mapping[str, str | None]
    base_model: Mapping[str, str]
    tokens: str | None
    publication_date: str | None = None
    stand_in: bool = False


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that `privacy.json` is made from. `ledger` is None for central training, `recipe` where none is known.

    `model` says whether the ledger knows the model's digests (`evidence`), `audit` is the content of `audit.json`.
    """

    title: str
    ledger: LedgerReport | None
    recipe: str | None
    model: Mapping[str, Any]
    files: Mapping[str, str]
    asserted: Asserted
    audit: Mapping[str, Any] | None = None


def guarantee_in(evidence: Evidence) -> Guarantee | None:
    """What the ledger promises; None for central training."""
    if evidence.ledger is None:
        return None
    found = guarantee_of(evidence.ledger)
    return replace(found, event=repeated(NoGuarantee(NO_EPSILON), found.steps)) if evidence.asserted.stand_in else found


def privacy_kind(guarantee: Guarantee | None) -> str:
    if guarantee is None or isinstance(guarantee.release, NoGuarantee):
        return "not private"
    return "simulation" if guarantee.simulated else "release"


def privacy_notice(guarantee: Guarantee | None, ledger: LedgerReport | None) -> str:
    """What is to be known first."""
    if guarantee is None or ledger is None:
        return f"{NOT_PRIVATE} {CENTRAL}"
    if isinstance(guarantee.release, NoGuarantee):
        return f"{NOT_PRIVATE} Federated, but without a guarantee: {guarantee.release.reason}."
    if guarantee.simulated:
        return SIMULATION
    return state_guarantee(guarantee, population_size=ledger.header["plan"].get("population_size")).headline


def describe_privacy(evidence: Evidence) -> Section:
    """The content of `privacy.json`."""
    guarantee, ledger = guarantee_in(evidence), evidence.ledger
    kind = privacy_kind(guarantee)
    title = evidence.title if kind == "release" else remove_epsilon(evidence.title)
    plan = {} if ledger is None else ledger.header["plan"]
    facts = RegistryFacts(kind, title, guarantee, plan, evidence.asserted.publication_date, _reason(guarantee))
    entry, not_stated = registry_entry(facts)
    own: Section = {"schema": SCHEMA, "kind": kind, "title": title}
    if guarantee is not None and ledger is not None and kind != "not private":
        own |= _describe_mechanism(guarantee, plan, ledger)
        own |= _describe_epsilon(guarantee)
        people = plan["population_size"]
        own["population"] = {"size": people, "is": "actual", "extrapolated": None}
        own["condition"] = guarantee.outside
    return {
        "notice": privacy_notice(guarantee, ledger),
        **entry,
        "sottovoce": {
            **own,
            "not_covered": _not_covered(evidence),
            "audits": [] if evidence.audit is None else [_describe_audit(evidence)],
            "ledger": None if ledger is None else _describe_ledger(ledger),
            "recipe": None if evidence.recipe is None else {"file": RECIPE, "sha256": evidence.recipe},
            "model": dict(evidence.model),
            "files": dict(sorted(evidence.files.items())),
            "software": dict(evidence.asserted.software),
            "stand_in": evidence.asserted.stand_in,
            "not_stated": not_stated,
        },
    }


def _reason(guarantee: Guarantee | None) -> str:
    """Why no ε is stated; empty where one is."""
    if guarantee is None:
        return CENTRAL
    if isinstance(guarantee.release, NoGuarantee):
        return f"{guarantee.release.reason}."
    return SIMULATION if guarantee.simulated else ""


def _describe_mechanism(guarantee: Guarantee, plan: Mapping[str, Any], ledger: LedgerReport) -> Section:
    release, unit = guarantee.release, guarantee.unit
    assert not isinstance(release, NoGuarantee)
    z, bound = release.noise_multiplier, plan["clip_bound"]
    sampling: Section = {"cohort_size": plan["cohort_size"], "population_size": plan["population_size"]}
    if plan.get("expected_answers") is not None:
        sampling["expected_answers"] = plan["expected_answers"]
    mechanism: Section = {"name": "gaussian", "noise_multiplier": z, "noise_std_sum": z * bound, "strategy": None}
    if isinstance(release, CorrelatedRelease):
        strategy = strategy_to_json(release.strategy)
        mechanism |= {"name": "correlated gaussian", "strategy": strategy}
        sampling |= {"scheme": "groups in turn, poisson within", "rate": release.sampling_rate, "cycle": release.cycle}
    elif isinstance(release, GaussianRelease):
        rate = plan["cohort_size"] / plan["population_size"] if release.sampling_rate is None else release.sampling_rate
        sampling |= {"scheme": release.sampling, "rate": rate}
    return {
        "unit": {"name": unit.name, "one": unit.one, "covers": unit.holds, "inside": unit.inside},
        "adjacency": release.neighbouring,
        "clipping": {
            "bound": bound,
            "share": plan["share"],
            "alpha": plan["alpha"],
            "groups": plan["layer_groups"],
            "tensors": len(plan["layout"]),
            "normalise": plan["normalise"],
            "adaptive": plan["adaptive"],
        },
        "mechanism": mechanism,
        "sampling": sampling,
        "rounds": {
            "promised": guarantee.steps,
            "made": guarantee.made,
            "attempts_charged": ledger.attempts,
            "client_wers": guarantee.measured,
            "client_wer_attempts_charged": ledger.measured_attempts,
        },
        "epsilon_budget": ledger.epsilon_budget,
    }


def _describe_epsilon(guarantee: Guarantee) -> Section:
    inside, profile = guarantee.epsilon_inside, privacy_profile(guarantee.event)
    mu = gaussian_mu(guarantee.event, profile)
    holds = {"exact": "exact: everybody is in every round", "fitted": "at the points of the profile, not between them"}
    return {
        "epsilon": {
            "of": "a release of the same recipe, which this is not" if guarantee.simulated else "this release",
            "delta": guarantee.delta,
            **_both(guarantee.epsilon),
            "headline": guarantee.epsilon.headline,
            "inside": None if inside is None else {**_both(inside), "headline": inside.headline},
        },
        "gaussian_dp": None if mu is None else {"mu": mu.mu, "holds": holds[mu.how]},
        "profile": [{"delta": delta, "epsilon": json_number(epsilon)} for delta, epsilon in profile],
    }


def _both(found: Epsilon) -> Section:
    return {"pld": found.pld, "pld_reason": found.pld_reason, "rdp": found.rdp}


def _not_covered(evidence: Evidence) -> Section:
    asserted = evidence.asserted
    return {
        "tuning": NOT_COVERED_TUNING,
        "seed_model": dict(asserted.start_model),
        "base_model": dict(sorted(asserted.base_model.items())),
        "tokens": asserted.tokens,
        "other_channels": OTHER_CHANNELS,
    }


def _describe_audit(evidence: Evidence) -> Section:
    assert evidence.audit is not None
    return {"file": AUDIT, "sha256": evidence.files[AUDIT], **evidence.audit}


def _describe_ledger(ledger: LedgerReport) -> Section:
    return {
        "file": LEDGER,
        "length": ledger.mark.length,
        "head": ledger.mark.head,
        "mode": ledger.header["mode"],
        "signer": ledger.signer,
    }
