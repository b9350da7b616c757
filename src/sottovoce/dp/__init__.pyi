from sottovoce.audit.canary_audit import Audit as Audit
from sottovoce.base.errors import InputError as InputError
from sottovoce.dp.arrays import clip_update as clip_update
from sottovoce.dp.audit import audit_plan as audit_plan
from sottovoce.dp.run import PrivateRound as PrivateRound
from sottovoce.dp.run import PrivateRun as PrivateRun
from sottovoce.dp.run import start_run as start_run
from sottovoce.dp.statement import PrivacyStatement as PrivacyStatement
from sottovoce.dp.statement import state_run as state_run
from sottovoce.privacy.ledger import BudgetSpent as BudgetSpent
from sottovoce.privacy.ledger import Ledger as Ledger
from sottovoce.privacy.ledger import verify as verify_ledger
from sottovoce.privacy.ledger_report import LedgerReport as LedgerReport
from sottovoce.privacy.plan import Plan as Plan
from sottovoce.privacy.planner import PlannedRun as PlannedRun
from sottovoce.privacy.planner import plan_run as plan_run
from sottovoce.privacy.sampling import PoissonSampler as PoissonSampler
from sottovoce.privacy.settings import PrivacySettings as PrivacySettings

__all__ = [
    "Audit",
    "BudgetSpent",
    "InputError",
    "Ledger",
    "LedgerReport",
    "Plan",
    "PlannedRun",
    "PoissonSampler",
    "PrivacySettings",
    "PrivacyStatement",
    "PrivateRound",
    "PrivateRun",
    "audit_plan",
    "clip_update",
    "plan_run",
    "start_run",
    "state_run",
    "verify_ledger",
]
