"""An entry for the public registry of DP deployments: the only place that knows the names of its schema.

The schema is that of July 2026. Its enumerations are not known here, so its own words are used where it gives any. What
a ledger cannot know (who, for what, where) is null; why stands in the key's own `_details` where the schema has one,
else in `sottovoce.not_stated`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sottovoce.privacy.events import CorrelatedRelease, NoGuarantee
from sottovoce.privacy.guarantee import Guarantee
from sottovoce.privacy.stated import SECURE_RANDOMNESS, SEEDED_RANDOMNESS, describe_adversary

PEOPLE_KNOW = "no ledger knows it: for the curators to fill in"
NOTES = (
    "`sottovoce verify FOLDER` computes ε anew from the ledger beside this file and compares everything else with it; "
    "the section `sottovoce` has what it needs."
)
Entry = dict[str, Any]


@dataclass(frozen=True)
class RegistryFacts:
    """What an entry is made from: `kind` of `privacy_file`, the plan of the ledger's header, why there is no ε."""

    kind: str
    title: str
    guarantee: Guarantee | None
    plan: Mapping[str, Any]
    publication_date: str | None
    reason: str


def registry_entry(facts: RegistryFacts) -> tuple[Entry, dict[str, str]]:
    """The entry, and why some of its keys are null, by their paths."""
    entry: Entry = {
        "url_slug": slug(facts.title),
        "status": "draft",
        "tier": None,
        "deployment": {
            "basic": _basic(facts),
            "dp_variant": _variant(facts),
            "privacy_loss": _loss(facts),
            "deployment_model": _model(facts),
            "accounting": _accounting(facts),
            "implementation": _implementation(facts),
            "administrative": {"sources": None, "notes": NOTES, "registry_authors": []},
        },
    }
    reasons = {
        "tier": "the registry's editors assign it",
        **{f"deployment.basic.{name}": PEOPLE_KNOW for name in ("intended_use", "data_product_region")},
        "deployment.basic.data_curators": PEOPLE_KNOW,
        "deployment.basic.data_product_sector": PEOPLE_KNOW,
        "deployment.implementation.justification": PEOPLE_KNOW,
        "deployment.administrative.sources": PEOPLE_KNOW,
        "deployment.administrative.registry_authors": PEOPLE_KNOW,
    }
    if facts.publication_date is None:
        reasons["deployment.basic.publication_date"] = "no date was given, and no clock is read (export --published)"
    if facts.kind != "release":
        reasons["deployment.dp_variant.variant_name"] = facts.reason
    return entry, dict(sorted(reasons.items()))


def slug(title: str) -> str:
    """A title as part of an address.

    >>> slug("680 real people, ε = 8")
    '680-real-people-8'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "recogniser"


def _basic(facts: RegistryFacts) -> Entry:
    return {
        "name": f"Speech recogniser: {facts.title}",
        "data_curators": [],
        "description": "A speech recogniser, trained by Sottovoce: federated learning with user-level differential "
        "privacy." if facts.guarantee is not None else "A speech recogniser, trained by Sottovoce without privacy.",
        "intended_use": None,
        "data_product_type": "Machine learning model",
        "data_product_region": None,
        "publication_date": facts.publication_date,
        "data_product_sector": None,
    }  # fmt: skip


def _variant(facts: RegistryFacts) -> Entry:
    unprotected = (
        "the list of those who might take part, and its length; all settings; the seed model, tokens and people that "
        "are none of the clients, such as those whom it was tested on; how many attempts a crash has lost"
    )
    return {
        "variant_name": "approximate" if facts.kind == "release" else None,
        "data_domain": "speech and texts of the clients on a list that was fixed before the run",
        "unprotected_quantities": unprotected if facts.kind == "release" else facts.reason,
    }


def _loss(facts: RegistryFacts) -> Entry:
    none = {"epsilon": None, "delta": None, "rho": None}
    guarantee = facts.guarantee
    if facts.kind != "release" or guarantee is None or isinstance(guarantee.release, NoGuarantee):
        return {
            "privacy_unit": None,
            "privacy_unit_details": facts.reason,
            "privacy_parameters": none,
            "privacy_parameters_details": facts.reason,
        }
    unit = guarantee.unit
    relation = "adding or removing" if guarantee.release.neighbouring == "add_remove" else "replacing"
    inside = (
        ""
        if unit.inside is None
        else f" One {unit.inside} inside a {unit.short} has a larger ε: sottovoce.epsilon.inside."
    )
    return {
        "privacy_unit": unit.name,
        "privacy_unit_details": f"Adjacent are populations that differ by {relation} {unit.one}, {unit.holds}.{inside}",
        "privacy_parameters": {"epsilon": guarantee.epsilon.headline, "delta": guarantee.delta, "rho": None},
        "privacy_parameters_details": (
            "ε is the smaller of two upper bounds, by privacy loss distributions and by Rényi accounting; both, the "
            "profile ε(δ) and μ of Gaussian DP are in sottovoce. It is of all rounds that were promised before the "
            "first model was released. rho is null: under sampling it would not be tight."
        ),
    }


def _model(facts: RegistryFacts) -> Entry:
    is_served = bool(facts.plan.get("sum_bits") or facts.plan.get("noise_shares"))
    where = (
        "clients train on their own machines"
        if is_served
        else "one machine trained for all clients, and had their speech"
    )
    return {
        "model_name": "Federated" if is_served else "Central",
        "model_name_details": f"Federated learning; {where}.",
        "actors": describe_adversary(facts.plan) if facts.kind == "release" else facts.reason,
        "release_type": "one-shot",
        "release_type_details": "One run. Its ε covers the models of all rounds, not only this one.",
        "data_source_type": "static",
        "data_source_type_details": "The list of clients is fixed before the run.",
        "access_type": None,
        "access_type_details": "Who gets the model is for its publisher to say.",
    }


def _accounting(facts: RegistryFacts) -> Entry:
    guarantee = facts.guarantee
    composition = facts.reason
    if facts.kind == "release" and guarantee is not None:
        kind = (
            "rows of correlated noise" if isinstance(guarantee.release, CorrelatedRelease) else "sampled Gaussian sums"
        )
        measured = f", {guarantee.measured:,} measurements of clients' word error rate" if guarantee.measured else ""
        composition = (
            f"{guarantee.steps:,} rounds of {kind}{measured} and every repeated attempt are composed by dp-accounting. "
            "Other runs on the same people are not in it."
        )
    return {
        "post_processing": "Averaging, choice of a checkpoint by people who are no clients, conversion of the model.",
        "composition": composition,
    }


def _implementation(facts: RegistryFacts) -> Entry:
    guarantee = facts.guarantee
    mechanisms = facts.reason
    if guarantee is not None and facts.kind != "not private":
        drawn = SEEDED_RANDOMNESS if guarantee.simulated else SECURE_RANDOMNESS
        mechanisms = (
            f"Sottovoce. Gaussian noise on sums of clipped updates; randomness {drawn}. Side channels such as time and "
            "memory are not covered."
        )
    return {
        "preprocessing_and_hyperparameter_tuning": (
            "Not charged: ε covers this run alone, not the tuning before it, nor the seed model, which is trained "
            "without privacy."
        ),
        "mechanisms": mechanisms,
        "justification": None,
    }
