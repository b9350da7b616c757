"""Who takes part in a round of a plan."""

import math
from typing import TYPE_CHECKING

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.privacy.events import NoGuarantee
from sottovoce.privacy.plugins import check_cohort
from sottovoce.privacy.sampling import CyclicSampler, FixedSizeSampler, Indices, PoissonSampler
from sottovoce.privacy.settings import Sampling

if TYPE_CHECKING:
    from sottovoce.privacy.plan import Plan


def build_sampler(sampling: Sampling, *, cohort_size: int, population_size: int) -> PoissonSampler | FixedSizeSampler:
    """A sampler for rounds that are independent of each other."""
    if sampling is Sampling.POISSON:
        return PoissonSampler(sampling_rate=cohort_size / population_size)
    return FixedSizeSampler(cohort_size=cohort_size)


def over_selected(answers: int, *, factor: float) -> int:
    """How many to draw so that `answers` of them are in time: `factor` times as many, to the nearest whole number.

    >>> over_selected(10, factor=1.3), over_selected(1024, factor=1.1)
    (13, 1126)
    """
    if not 1 <= factor < math.inf:
        raise InputError(f"over-selection by {factor:g}: expected a factor of at least 1")
    return round(answers * factor)


def draw_rate(plan: "Plan") -> float:
    """The probability with which each of those is drawn whom a cohort is drawn from: q, or q′ within a group."""
    return plan.sampler.sampling_rate if isinstance(plan.sampler, CyclicSampler) else plan.sampling_rate


def drawn_from(plan: "Plan") -> int:
    """How many a cohort is drawn from: all users, or the smallest of the groups that take turns."""
    people = plan.settings.population_size
    return people // plan.sampler.cycle if isinstance(plan.sampler, CyclicSampler) else people


def groups_of(plan: "Plan") -> tuple[frozenset[int], ...]:
    """The users of each group, in the order of their turns; none where everybody may be in every round."""
    if not isinstance(plan.sampler, CyclicSampler):
        return ()
    return tuple(frozenset(group.tolist()) for group in plan.sampler.groups(plan.settings.population_size))


def draw_cohort(plan: "Plan", step: int, *, attempt: int, row: int | None, among: Indices | None) -> Indices:
    """See `Plan.sample`."""
    settings, random = plan.settings, plan.noise.random
    if plan.plugins.sampler is not None:
        check_invariant(among is None, "a plug-in sampler among some of all users")
        drawn = plan.plugins.sampler(step, plan, generator=random.plugin_cohort(step, attempt))
        return check_cohort(drawn, population_size=settings.population_size)
    words = random.cohort_words(step, attempt)
    if isinstance(plan.sampler, CyclicSampler):
        check_invariant(among is None, "a cohort of some, where groups take turns")
        return plan.sampler.sample(settings.population_size, row=step if row is None else row, words=words)
    if among is None:
        return plan.sampler.sample(settings.population_size, words=words)
    check_invariant(isinstance(plan.event, NoGuarantee) and settings.z == 0, "a cohort of some, accounted as of all")
    if not len(among):
        return among
    size = min(plan.cohort_size, len(among))
    some = build_sampler(settings.sampling, cohort_size=size, population_size=len(among))
    return among[some.sample(len(among), words=words)]
