"""A plan described: its guarantee in one line for people, its settings as data for the ledger."""

import dataclasses
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sottovoce.base.errors import InputError
from sottovoce.privacy.events import NoGuarantee
from sottovoce.privacy.ledger_records import Header
from sottovoce.privacy.ledger_report import EXHAUSTED_CLIENTS
from sottovoce.privacy.plugins import PLUGIN_KEYS, format_plugin_condition
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.settings import Mode

if TYPE_CHECKING:
    from sottovoce.privacy.plan import Plan


def describe_guarantee(plan: "Plan") -> str:
    """The guarantee in one line, without its ε (which grows with the steps), or why there is none."""
    return _guarantee(plan, f"{_drawn(plan)}, z={plan.settings.z:g}")


def describe_run_guarantee(plan: "Plan", *, rounds: int, wer_plan: "Plan | None" = None, measured: int = 0) -> str:
    """The same of a whole run: so many `rounds`, and WERs of clients `measured` so often by `wer_plan`."""
    released = f"{rounds:,} rounds with {_drawn(plan)}, z={plan.settings.z:g}"
    if wer_plan is not None:
        released += f"; {measured:,} WERs of clients with {_drawn(wer_plan)}, z={wer_plan.settings.z:g}"
    return _guarantee(plan, released)


def _guarantee(plan: "Plan", released: str) -> str:
    settings = plan.settings
    if isinstance(plan.event, NoGuarantee):
        return f"no guarantee: {plan.event.reason}"
    relation = "adding or removing one" if plan.event.neighbouring == "add_remove" else "replacing one"
    simulated = " (simulated)" if settings.mode is Mode.SEEDED else ""
    return (
        f"δ={settings.delta:g} for each {settings.privacy_unit} against {relation}: "
        f"{released}{simulated}"
        + ("" if settings.time_line is None else f"; {EXHAUSTED_CLIENTS}")
        + ("" if plan.server_event is None else f"; to the server, z={plan.server_event.noise_multiplier:g} each time")
        + ("" if (condition := format_plugin_condition(plan.describe())) is None else f"; {condition}")
    )


def _drawn(plan: "Plan") -> str:
    sampler, correlated, expected = plan.sampler, plan.settings.mechanism, plan.settings.expected_answers
    late = "" if expected is None else f" ({plan.cohort_size:,} drawn for {expected:,} answers)"
    if correlated is None or not isinstance(sampler, CyclicSampler):
        return f"{sampler.sampling} q={plan.sampling_rate:g}{late}"
    groups = f"q={sampler.sampling_rate:g} of one of {sampler.cycle} groups in turn"
    return f"poisson {groups}{late}, {correlated.kind} noise"


def describe_plan(plan: "Plan") -> dict[str, object]:
    """All settings that decide what is released, as JSON takes them; the layout by its shapes."""
    settings, mechanism = dataclasses.asdict(plan.settings), plan.settings.mechanism
    settings["mechanism"] = None if mechanism is None else mechanism.as_json()
    for later in ("time_line", "mechanism", "expected_answers", *PLUGIN_KEYS):  # as before there were any
        if settings[later] is None:
            del settings[later]
    described = {name: _plain(value) for name, value in settings.items() if name != "epsilon_budget"}
    layout = {name: list(shape) for name, shape in zip(plan.layout.names, plan.layout.shapes, strict=True)}
    held = {"held": _plain(plan.layout.held)} if plan.layout.held else {}
    rule = {} if plan.rule is None else {"rule": _name(plan.rule)}
    sums = {} if plan.sum_bits is None else {"sum_bits": plan.sum_bits}
    shares = {} if plan.noise_shares is None else {"noise_shares": dataclasses.asdict(plan.noise_shares)}
    return {**described, "layout": layout, **held, **rule, **sums, **shares}


def ledger_header(
    plan: "Plan",
    *,
    run: str,
    inputs: str = "",
    repeatable: bool = True,
    central_steps: int | None = None,
    client_wer: Mapping[str, Any] | None = None,
    accepted: Mapping[str, int] | None = None,
    begun_ahead: int | None = None,
    recipe: str | None = None,
) -> Header:
    """The header of the run's ledger (see `Header`); `inputs` are kept by simulations only.

    `repeatable`: whether the run's arithmetic repeats itself to the bit, so that lost steps can be done again.
    """
    seeded = plan.settings.mode is Mode.SEEDED
    return Header(
        run=run,
        mode="secure" if not seeded else "seeded" if repeatable else "unrepeated",
        plan=describe_plan(plan),
        event=plan.event,
        delta=plan.settings.delta,
        epsilon_budget=plan.settings.epsilon_budget,
        inputs=inputs if seeded else "",
        central_steps=central_steps,
        client_wer=client_wer,
        accepted=accepted,
        begun_ahead=begun_ahead,
        recipe=recipe,
    )


def _name(rule: Any) -> str:
    """The same in every process, for the ledger: a dataclass with its settings, a function by its name."""
    if dataclasses.is_dataclass(rule):
        return repr(rule)
    name = getattr(rule, "__qualname__", "<")
    if "<" in name:  # a lambda, a function inside another, a partial: two different ones may look the same
        raise InputError(f"rule={rule!r}: expected a function of a module, or a dataclass with a __call__")
    return f"{rule.__module__}.{name}"


def _plain(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case StrEnum():
            return str(value)
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value
