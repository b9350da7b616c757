"""The privacy chain for any federation: no speech, no recipe, no command line (docs/guides/dp-in-your-own-loop.md).

    plan_run ─► start_run ─► PrivateRun.next_round ─► PrivateRound.add · release ─► state_run · audit_plan
    plan        ledger       sampler, stop            clip   noise                  statement  audit

What is named here is public and keeps its meaning (docs/decisions/039-dp-module.md). A name is loaded when it is first
asked for: planning, ledgers and statements never load torch. `sottovoce.dp.flower` is for apps of Flower.
"""

from importlib import import_module

# Where each name is at home; `__init__.pyi` says the same to type checkers.
_HOMES = {
    "Audit": "sottovoce.audit.canary_audit:Audit",
    "BudgetSpent": "sottovoce.privacy.ledger:BudgetSpent",
    "InputError": "sottovoce.base.errors:InputError",
    "Ledger": "sottovoce.privacy.ledger:Ledger",
    "LedgerReport": "sottovoce.privacy.ledger_report:LedgerReport",
    "Plan": "sottovoce.privacy.plan:Plan",
    "PlannedRun": "sottovoce.privacy.planner:PlannedRun",
    "PoissonSampler": "sottovoce.privacy.sampling:PoissonSampler",
    "PrivacySettings": "sottovoce.privacy.settings:PrivacySettings",
    "PrivacyStatement": "sottovoce.dp.statement:PrivacyStatement",
    "PrivateRound": "sottovoce.dp.run:PrivateRound",
    "PrivateRun": "sottovoce.dp.run:PrivateRun",
    "audit_plan": "sottovoce.dp.audit:audit_plan",
    "clip_update": "sottovoce.dp.arrays:clip_update",
    "plan_run": "sottovoce.privacy.planner:plan_run",
    "start_run": "sottovoce.dp.run:start_run",
    "state_run": "sottovoce.dp.statement:state_run",
    "verify_ledger": "sottovoce.privacy.ledger:verify",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    found = globals()[name] = getattr(import_module(module), attribute)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
