"""What a finished run may say of its privacy: the ε it promised by both accountants, and that of other populations."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sottovoce.config import Federation
from sottovoce.errors import InputError
from sottovoce.privacy.events import Measured
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.noise import sigma_dp_of
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.planner import plan_run, smallest_population
from sottovoce.privacy.pld import QUICK
from sottovoce.privacy.promise import figures, promise_of
from sottovoce.privacy.scale import GUARANTEE
from sottovoce.privacy.settings import Mode, Sampling
from sottovoce.training.run_folder import LEDGER, RunFolder

COVERS = "ε covers this run alone: not the tuning before it, nor the seed model, which is trained without privacy"


def privacy_report(settings: Federation, plan: Plan, run: RunFolder) -> dict[str, Any]:
    """Read back from the ledger, not from what the run believes."""
    ledger = verify(run.path / LEDGER)
    spent, promised = ledger.as_json(), promise_of(ledger, central_steps=settings.steps)
    report = {
        "guarantee": plan.guarantee,
        "simulated": plan.settings.mode is Mode.SEEDED,
        "covers": COVERS,
        **figures(promised, ledger),
        **{name: spent[name] for name in ("delta", "steps", "attempts", "epsilon_budget", "head", "length")},
        "population_size": plan.settings.population_size,
        "cohort_size": plan.cohort_size,
        "noise_multiplier": plan.settings.z,
        "sigma_dp": sigma_dp_of(plan.settings.z, cohort_size=plan.cohort_size),
        "clip_bound": plan.settings.clip_bound if plan.settings.z else None,
    }
    adaptive = plan.settings.adaptive
    fixed_count_noise = adaptive is not None and adaptive.count_noise_std is not None  # it would not grow with S
    if plan.settings.mechanism is not None:
        return report | {"mechanism": plan.settings.mechanism.as_json()}
    if report["epsilon_rdp"] is None or plan.settings.sampling is not Sampling.POISSON or fixed_count_noise:
        return report
    return report | other_populations(settings, plan, promised.steps)


def other_populations(settings: Federation, plan: Plan, steps: int) -> dict[str, Any]:
    """What the same noise on the mean would be worth elsewhere; takes seconds."""
    return {"useful": _useful(settings, plan, steps), "extrapolated": _extrapolated(settings, plan, steps)}


def promise_in(run: RunFolder, settings: Federation) -> str | None:
    """What a run has promised that has not made all of it, in words; None where it has, or promised nothing."""
    promised = promise_of(verify(run.path / LEDGER), central_steps=settings.steps)
    return promised.words if promised.made < promised.steps else None


def _useful(settings: Federation, plan: Plan, steps: int) -> dict[str, Any]:
    """The smallest population for which the same recipe (σ_DP, q, T) is worth something."""
    private = plan.settings
    found = _smallest_useful(
        private.population_size,
        cohort_size=private.cohort_size,
        z=private.z,
        delta=private.delta,
        steps=steps,
        measured=settings.measured,
    )
    return dict(found)


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
    try:
        found = smallest_population(planned, target_epsilon=GUARANTEE, accountant="rdp", cap=QUICK)
    except InputError as error:
        return {"target_epsilon": GUARANTEE, "unreachable": str(error)}
    return {
        "target_epsilon": GUARANTEE,
        "population_size": found.population_size,
        "cohort_size": found.cohort_size,
        "epsilon_rdp": found.epsilon.rdp,
        "epsilon_pld": found.epsilon.pld,
        "delta_too_large": delta * found.population_size >= 1,
    }


def _extrapolated(settings: Federation, plan: Plan, steps: int) -> list[dict[str, Any]]:
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
