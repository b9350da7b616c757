"""Whether a ledger's header says one thing: mode, δ and events are those of the plan beside them. Without torch.

ε is computed from the events, and what people read (who, how many, by which noise) comes from the plan. A run writes
both from the same settings; a header in which they differ was written by nobody's run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.privacy.events import (
    CorrelatedRelease,
    Event,
    GaussianRelease,
    NoGuarantee,
    check_sizes,
    event_from_json,
    sampled_release,
)
from sottovoce.privacy.mechanism import correlated_from_json

SECURE = "secure"
# Of a plan: with one of these nothing is promised (`PrivacySettings.no_guarantee_reason`).
_WITHOUT_GUARANTEE = ("noise_scope", "sampler")
_PRIVATE_WEIGHTS = ("uniform", "utterances", "seconds")


def check_header(path: Path, header: Mapping[str, Any]) -> None:
    """Refuse, by name, a header of the ledger in `path` that contradicts itself."""
    try:
        _check_mode(header)
        event = event_from_json(header["event"])
        if not isinstance(event, NoGuarantee):
            _check_event(event, header["plan"])
            _check_measured(header)
            _check_accepted(header)
    except InputError as why:
        raise InputError(f"{path} line 1: {why}") from None
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as problem:
        raise InputError(f"{path} line 1: no header that a run has written ({problem!r})") from None


def _check_mode(header: Mapping[str, Any]) -> None:
    plan, mode = header["plan"], header["mode"]
    planned, delta = plan.get("mode", mode), plan.get("delta", header["delta"])
    if (mode == SECURE) != (planned == SECURE):
        raise InputError(f"mode={mode}, though its plan is of mode={planned}")
    if mode == SECURE and (plan.get("root_seed") is not None or header.get("inputs")):
        raise InputError("mode=secure, with the seed or the inputs of a simulation")
    if not isinstance(plan.get("privacy_unit"), str | None):
        raise InputError(f"privacy_unit={plan['privacy_unit']!r}: expected a name")
    if delta != header["delta"]:
        raise InputError(f"delta={header['delta']}, though its plan has delta={delta}")


def _check_accepted(header: Mapping[str, Any]) -> None:
    """People accept all planned rounds, and spare attempts besides: fewer would hide rounds that were planned."""
    accepted, steps = header.get("accepted"), header.get("central_steps")
    if accepted is not None and steps is not None and accepted["attempts"] < steps:
        raise InputError(f"accepted.attempts={accepted['attempts']}, though {steps} rounds are planned")


def _check_event(event: Event, plan: Mapping[str, Any]) -> None:
    """An event with a guarantee is what the plan releases in a round."""
    for name in _WITHOUT_GUARANTEE:
        if plan.get(name) is not None:
            raise InputError(f"an event with a guarantee, though its plan has {name}={plan[name]}")
    if plan.get("privacy_unit", "") is None or plan.get("users_also_in_seed"):
        raise InputError("an event with a guarantee, though its plan protects nobody")
    if plan.get("weighting", "uniform") not in _PRIVATE_WEIGHTS:
        raise InputError(f"an event with a guarantee, though its plan has weighting={plan['weighting']}")
    cohort, people = plan["cohort_size"], plan["population_size"]
    check_sizes(people, cohort_size=cohort)
    planned = _planned_event(plan, noise_multiplier=_noise_multiplier(plan))
    if event == planned:
        return
    drawn = f"{cohort:,} of {people:,} are drawn"
    match event, planned:
        case GaussianRelease(sampling_rate=float(rate)), GaussianRelease(sampling_rate=float(due)) if rate != due:
            raise InputError(f"a sampling rate of {rate:g}, though {drawn}")
        case CorrelatedRelease(sampling_rate=rate), CorrelatedRelease(sampling_rate=due) if rate != due:
            raise InputError(f"a sampling rate of {rate:g} in its groups, though {drawn}")
        case GaussianRelease(noise_multiplier=z), GaussianRelease(noise_multiplier=due) if z != due:
            raise InputError(f"an event of noise_multiplier={z:g}, though its plan has {due:g}")
    raise InputError(f"its event is not that of its plan, in which {drawn}: {event}")


def _planned_event(plan: Mapping[str, Any], *, noise_multiplier: float) -> Event:
    sizes = {"population_size": plan["population_size"], "cohort_size": plan["cohort_size"]}
    if plan.get("mechanism") is not None:
        return correlated_from_json(plan["mechanism"]).release(noise_multiplier, **sizes)
    return sampled_release(noise_multiplier, sampling=plan.get("sampling", "poisson"), **sizes)


def _noise_multiplier(plan: Mapping[str, Any]) -> float:
    if plan.get("noise_multiplier") is not None:
        return float(plan["noise_multiplier"])
    expected = plan.get("expected_answers")
    return float(plan["sigma_dp"] * (plan["cohort_size"] if expected is None else expected))  # z = σ_DP·S (Theorem 1)


def _check_measured(header: Mapping[str, Any]) -> None:
    """Clients' word error rates are measured on cohorts of the same size, of everybody."""
    if (measured := header.get("client_wer")) is None:
        return
    event, plan = event_from_json(measured["event"]), header["plan"]
    if not isinstance(event, GaussianRelease) or event != _planned_event(
        {**plan, "mechanism": None}, noise_multiplier=event.noise_multiplier
    ):
        raise InputError(f"client_wer: its event is not of the plan's cohorts: {event}")
