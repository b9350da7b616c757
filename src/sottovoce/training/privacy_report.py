"""The privacy of a finished run: its ε by both accountants, and that of the same recipe in other populations."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.config import FederationSettings
from sottovoce.privacy.accounting import Epsilon, rdp_epsilon
from sottovoce.privacy.calibration import Accountant
from sottovoce.privacy.events import Measured, NoGuarantee
from sottovoce.privacy.guarantee import Guarantee, guarantee_of, guarantee_to_json
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.membership_odds import GUARANTEE
from sottovoce.privacy.noise import sigma_dp_of
from sottovoce.privacy.noise_length import NoiseLength
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.planner import PlannedRun, plan_run, smallest_population
from sottovoce.privacy.pld import QUICK
from sottovoce.privacy.settings import Mode, PrivacySettings, Sampling
from sottovoce.training.run_folder import LEDGER, RunFolder

COVERS = "ε covers this run alone: not the tuning before it, nor the seed model, which is trained without privacy"


def build_privacy_report(settings: FederationSettings, plan: Plan, run: RunFolder) -> dict[str, Any]:
    """Read back from the ledger, not from what the run believes."""
    ledger = verify(run.path / LEDGER)
    spent, promised = ledger.as_json(), guarantee_of(ledger, central_steps=settings.steps)
    released = ledger.released
    assert released is not None
    report = {
        "guarantee": settings.guarantee(plan),
        "simulated": plan.settings.mode is Mode.SEEDED,
        "covers": COVERS,
        **guarantee_to_json(promised, ledger),
        **{name: spent[name] for name in ("delta", "steps", "attempts", "epsilon_budget")},
        "head": released.head,
        "length": released.length,
        "population_size": plan.settings.population_size,
        "cohort_size": plan.cohort_size,
        "noise_multiplier": plan.settings.z,
        "sigma_dp": sigma_dp_of(plan.settings.z, cohort_size=plan.settings.answers),
        "clip_bound": plan.settings.clip_bound if plan.settings.z else None,
    }
    if plan.settings.expected_answers is not None:
        report |= {"expected_answers": plan.settings.expected_answers}
    adaptive = plan.settings.adaptive
    fixed_count_noise = adaptive is not None and adaptive.count_noise_std is not None  # it would not grow with S
    if plan.settings.mechanism is not None:
        return report | {"mechanism": plan.settings.mechanism.as_json()}
    if report["epsilon_rdp"] is None or plan.settings.sampling is not Sampling.POISSON or fixed_count_noise:
        return report
    return report | extrapolate_populations(settings, plan, promised)


def extrapolate_populations(settings: FederationSettings, plan: Plan, promised: Guarantee) -> dict[str, Any]:
    """What the same noise on the mean would be worth elsewhere; takes seconds."""
    return {"useful": _useful(settings, plan, promised), "extrapolated": _extrapolated(settings, plan, promised.steps)}


def describe_unfinished_promise(run: RunFolder, settings: FederationSettings, made: int) -> str | None:
    """What a run has promised that ended after `made` rounds; None where that is all of them, or nothing."""
    if made >= settings.steps:
        return None
    promised = guarantee_of(verify(run.path / LEDGER), central_steps=settings.steps)
    return promised.words if promised.made < promised.steps else None


def _useful(settings: FederationSettings, plan: Plan, promised: Guarantee) -> dict[str, Any]:
    """The smallest population for which the same recipe (σ_DP, q, T) reaches a useful ε: by RDP, and by PLD."""
    private, measured = plan.settings, settings.measured
    found = _smallest_useful(
        private.population_size,
        cohort_size=private.cohort_size,
        z=private.z,
        delta=private.delta,
        steps=promised.steps,
        measured=None if measured is None else replace(measured, count=promised.measured),
    )
    spent = promised.epsilon
    by_rdp = _no_more_than_here(found["rdp"], private, spent, by=spent.rdp)
    by_pld = _no_more_than_here(found["pld"], private, spent, by=spent.pld)
    # Where no PLD beats RDP there is none by PLD.
    also = {"pld": by_pld} if "unreachable" in by_pld or by_pld["epsilon_pld"] is not None else {}
    return {"target_epsilon": GUARANTEE, **by_rdp, **also}


def _no_more_than_here(
    found: Mapping[str, Any], private: PrivacySettings, spent: Epsilon, *, by: float | None
) -> Mapping[str, Any]:
    """Searches are quick, and may overstate ε: where the run's own `by` an accountant will do, its people do."""
    if by is None or by > GUARANTEE or found.get("population_size", math.inf) <= private.population_size:
        return found
    return _worth(private.population_size, private.cohort_size, spent, delta=private.delta)


def _worth(population_size: int, cohort_size: int, found: Epsilon, *, delta: float) -> Mapping[str, Any]:
    return {
        "population_size": population_size,
        "cohort_size": cohort_size,
        "epsilon_rdp": found.rdp,
        "epsilon_pld": found.pld,
        "delta_too_large": delta * population_size >= 1,
    }


@lru_cache(maxsize=64)  # the runs of a suite often share it, and it takes seconds
def _smallest_useful(
    population_size: int, *, cohort_size: int, z: float, delta: float, steps: int, measured: Measured | None = None
) -> Mapping[str, Any]:
    planned = plan_run(
        population_size,
        cohort_size=cohort_size,
        central_steps=steps,
        delta=delta,
        noise_multiplier=z,
        cap=QUICK,
        measured=measured,
    )
    return {"rdp": _smallest_by(planned, "rdp"), "pld": _smallest_by(planned, "pld")}


def _smallest_by(planned: PlannedRun, accountant: Accountant) -> Mapping[str, Any]:
    try:
        found = smallest_population(planned, target_epsilon=GUARANTEE, accountant=accountant, cap=QUICK)
    except InputError as error:
        return {"unreachable": str(error)}
    return _worth(found.population_size, found.cohort_size, found.epsilon, delta=planned.delta)


def _extrapolated(settings: FederationSettings, plan: Plan, steps: int) -> list[dict[str, Any]]:
    found, measured = [], settings.measured
    for wanted in settings.privacy.extrapolate:
        if settings.client_wer is not None:  # with as much noise on the mean, and as often as so many steps have it
            often = settings.client_wer.measured(wanted.steps or steps)
            measured = replace(often, noise_multiplier=often.noise_multiplier * wanted.cohort_size / plan.cohort_size)
        planned = plan_run(
            wanted.population_size,
            cohort_size=wanted.cohort_size,
            central_steps=wanted.steps or steps,
            delta=plan.settings.delta,
            sigma_dp=sigma_dp_of(plan.settings.z, cohort_size=plan.cohort_size),
            cap=QUICK,
            measured=measured,
        )
        found.append(planned.to_json() | {"paper_epsilon": wanted.paper_epsilon})
    return found


# Whether anything can be learned under the noise.


def measure_noise(settings: FederationSettings, plan: Plan) -> NoiseLength | None:
    """The length of a round's noise; None without noise, and where it is not the same in every number or round."""
    private = plan.settings
    if not private.z or private.mechanism is not None or private.noise_scope is not None:
        return None
    return NoiseLength(
        noise_multiplier=private.z,
        cohort_size=private.answers,
        parameters=plan.layout.dimension,
        rounds=settings.steps,
    )


def describe_noise(found: NoiseLength) -> list[str]:
    """What binds, and where that is too much the nearest remedies."""
    remedies = found.remedies()
    if not remedies:
        return [found.describe()]
    return [f"{found.describe()}: little can be learned; any of these helps:", *(f"  - {line}" for line in remedies)]


# A target ε in a recipe: whether its run can keep it, and which noise followed from it.


def describe_target_noise(settings: FederationSettings, plan: Plan) -> str:
    """In one line, the noise that the target became. Refuses a target that nothing keeps, or that a budget ends."""
    private, z = settings.privacy, plan.settings.z
    if isinstance(plan.event, NoGuarantee):
        raise InputError(
            f"federation.privacy.target_epsilon={private.target_epsilon:g} cannot be kept: {plan.event.reason}"
        )
    accountant = private.accountant or "pld"
    by_rdp = rdp_epsilon(settings.whole_run(plan).event, private.delta)
    budget = private.epsilon_budget
    if budget is not None and by_rdp > budget:
        raise InputError(
            f"federation.privacy.target_epsilon={private.target_epsilon:g} by {accountant.upper()} with "
            f"epsilon_budget={budget:g}: a budget is kept by RDP, by which {settings.steps:,} rounds come to "
            f"{by_rdp:.4g}, so that it would end the run early; expected a budget of at least that, none, or "
            "accountant: rdp"
        )
    named = accountant.upper()
    if accountant == "pld" and private.sampling is Sampling.FIXED_SIZE:
        named = "RDP, as no tight PLD is known for cohorts of fixed size"
    return (
        f"noise_multiplier={z:g} follows from target_epsilon={private.target_epsilon:g} by {named}, over "
        f"{settings.steps:,} rounds of {plan.cohort_size:,} of {plan.settings.population_size:,} clients"
    )
