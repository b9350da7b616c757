"""Clients that are late in a simulation: they were drawn, and are not in the sum.

Over a network a round ends at its deadline, and who has not answered by then counts as zero. Where a recipe says how
many of a cohort are expected in time (`expected_answers`), a simulation leaves out as many, each by a coin that only
their place and the step decide. Guarantee: nobody's coin depends on who else was drawn, so that one client moves a sum
by their own update alone, as over a network with a deadline that is fixed beforehand.
"""

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import check_invariant
from sottovoce.base.seeds import keyed_group
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices

LATE = "late (simulated)"


def in_time(cohort: Indices, *, plan: Plan, step: int) -> NDArray[np.bool_]:
    """Who of `cohort` answers in time: each with probability `expected_answers` / `cohort_size`."""
    expected, root = plan.settings.expected_answers, plan.settings.root_seed
    if expected is None:
        return np.ones(len(cohort), dtype=np.bool_)
    check_invariant(root is not None, "expected_answers in a release without a network: nobody is late here")
    assert root is not None
    return keyed_group(cohort.astype(np.uint64), root, "late", step, count=plan.cohort_size) < expected
