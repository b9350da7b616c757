"""How many people a release over a network waits for, so that nothing hangs on who was drawn."""

from dataclasses import replace

import pytest

from sottovoce.flat.layout import Layout
from sottovoce.network.secure_sum.terms import FEWEST
from sottovoce.network.server.setup import default_least, nodes_needed
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings

MANY = PrivacySettings(
    population_size=34_753,
    privacy_unit="speaker",
    cohort_size=1024,
    clip_bound=1.0,
    noise_multiplier=1.0,
    delta=1e-9,
    mode=Mode.SECURE,
)
LAYOUT = Layout(("w",), ((16,),))


def planned(settings: PrivacySettings) -> Plan:
    return Plan(settings, LAYOUT, sum_bits=32)


def test_a_release_waits_until_no_cohort_is_too_small_to_be_opened() -> None:
    plan, least = planned(MANY), 512
    assert plan.fewest_available(least) > 1024
    needed = nodes_needed(plan, 1024, least=least, is_secure=True)
    assert [needed.of(still_in) for still_in in (34_753, 30_000, 5)] == [plan.fewest_available(least)] * 3
    assert nodes_needed(plan, 30_000, least=least, is_secure=True).of(34_753) == 30_000


def test_others_wait_for_whom_they_are_told_to() -> None:
    assert nodes_needed(planned(MANY), 7, least=None, is_secure=False).of(34_753) == 7  # every update by itself
    rehearsal = replace(MANY, mode=Mode.SEEDED, root_seed=1)
    assert nodes_needed(planned(rehearsal), 7, least=512, is_secure=True).of(34_753) == 7


def test_who_is_out_for_good_is_not_waited_for_down_to_the_least_of_a_sum() -> None:
    rehearsal = planned(replace(MANY, mode=Mode.SEEDED, root_seed=1, population_size=6, cohort_size=6, delta=1e-2))
    by_default, least = (
        nodes_needed(rehearsal, 6, least=None, is_secure=False),
        nodes_needed(rehearsal, 6, least=3, is_secure=True),
    )
    assert [by_default.of(still_in) for still_in in (6, 5, 1, 0)] == [6, 5, 1, 1]
    assert [least.of(still_in) for still_in in (6, 5, 3, 2)] == [6, 5, 3, 3]


@pytest.mark.parametrize(("people", "cohort"), [(34_753, 1024), (5_000, 200), (1_000, 100)])
def test_by_default_a_release_opens_sums_of_as_many_as_it_can_with_a_quarter_away(people: int, cohort: int) -> None:
    plan = planned(replace(MANY, population_size=people, cohort_size=cohort))
    least, here = default_least(plan), people * 3 // 4
    assert FEWEST <= least <= cohort // 2
    assert plan.fewest_available(least) <= here
    assert least == cohort // 2 or plan.fewest_available(least + 1) > here


def test_where_everybody_is_drawn_half_of_them_will_do() -> None:
    assert default_least(planned(replace(MANY, population_size=8, cohort_size=8, delta=1e-2))) == 4


def test_a_rehearsal_opens_sums_of_half_a_cohort() -> None:
    assert default_least(planned(replace(MANY, mode=Mode.SEEDED, root_seed=1))) == 512
