"""A target ε in a recipe: whether its run can keep it, and which noise followed from it."""

from sottovoce.base.errors import InputError
from sottovoce.config import Federation
from sottovoce.privacy.accounting import rdp_epsilon
from sottovoce.privacy.events import NoGuarantee
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Sampling


def met_target(settings: Federation, plan: Plan) -> str:
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
