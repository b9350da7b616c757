"""Each planted fault is found, by an audit or by a check that needs no chance; docs/audit.md says which and by what."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.audit import planted
from tests.audit.linear import EVERYBODY, LAYOUT, PEOPLE, SOME, LinearPeople, audit_of, plan_of
from tests.audit.planted import Plant, is_far

from sottovoce.audit.canary_audit import AuditVerdict
from sottovoce.base.errors import InvariantError
from sottovoce.federated.cohort import LocalClients
from sottovoce.privacy.clipping import AdaptiveClipping
from sottovoce.privacy.ledger import Charge
from sottovoce.privacy.plan import Plan

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"
WEIGHTED = {"weighting": "seconds", "weight_cap": 4.0}
CAUGHT = {AuditVerdict.ALARM, AuditVerdict.BROKEN}
# Enough that none of them would be missed with other draws, four standard errors and more off: what counts less than
# twice takes more.
FEW, MANY = 600, 2000

# By what the page calls it: what is planted, in which federation, and by what it is found.
AUDITED: dict[str, tuple[Plant, dict[str, Any], str]] = {
    "no clipping": (planted.no_clipping, {}, "estimate"),
    "clipping by the wrong norm (the largest element)": (planted.wrong_norm, {}, "estimate"),
    "every layer clipped to the whole bound": (planted.each_layer_by_the_whole_bound, {}, "who is drawn"),
    "half of the noise": (planted.less_noise(2), {}, "noise found"),
    "a quarter of the noise": (planted.less_noise(4), {}, "noise found"),
    "a plan that works its noise out wrong": (planted.quieter_plan, {}, "noise found"),
    "no noise on one layer": (planted.no_noise_in("output"), {"share": "dim"}, "noise found, that layer's estimate"),
    "no noise on LoRA's part": (planted.no_noise_in("blocks.0.lora_a"), {}, "noise found, that layer's estimate"),
    "the same noise in every round": (planted.noise_used_again, {}, "noise found, estimate"),
    "everybody sampled": (planted.everybody_sampled, {}, "estimate, who is drawn"),
    "an update added twice": (planted.added_twice, {}, "who is drawn"),
    "weights above the cap, unchecked": (planted.weights_above_the_cap_unchecked, WEIGHTED, "estimate"),
}


def canaries_for(by: str) -> int:
    return MANY if by == "who is drawn" else FEW


@pytest.mark.parametrize("name", AUDITED)
def test_an_audit_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tenth is drawn in each round, which hides most."""
    plant, changes, by = AUDITED[name]
    plant(monkeypatch)
    found = audit_of(canaries=canaries_for(by), **SOME, **changes)
    assert found.verdict in CAUGHT, found.why
    told = {
        "estimate": found.fit.low > found.promised,
        "that layer's estimate": found.worst[1].low > found.promised
        and found.worst[0] in ("output", "blocks.0.lora_a"),
        "noise found": found.noise is not None and found.noise.is_missing,
        "who is drawn": found.drawn is not None and (found.drawn.stands_out or found.drawn.too_often),
    }
    assert all(told[one] for one in by.split(", ")), told


@pytest.mark.parametrize("name", [name for name in AUDITED if name != "everybody sampled"])
def test_an_audit_finds_it_where_everybody_is_in_every_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, changes, by = AUDITED[name]
    plant(monkeypatch)
    found = audit_of(canaries=canaries_for(by), **EVERYBODY, **changes)
    assert found.verdict in CAUGHT, found.why


# What is checked without canaries: each check passes, and fails once its fault is planted.


def weights_are_capped() -> None:
    try:
        plan = plan_of(**WEIGHTED)
        plan.accumulate(plan.new_total(), LAYOUT.zeros(), weight=plan.weight(400.0))
    except InvariantError:
        raise AssertionError("a weight above the cap") from None


def a_later_attempt_has_other_noise() -> None:
    plan = plan_of()
    first, second = (
        plan.add_noise(plan.new_total(), Charge(plan.event, step=0, clip_bound=plan.clip_bound, attempt=attempt))
        for attempt in (1, 2)
    )
    assert float((first - second).norm()) > float(first.norm())


def one_user_moves_the_sum_by_the_own_update_alone() -> None:
    plan, clients = plan_of(clip_bound=50.0), LocalClients(LinearPeople())
    others = np.arange(10)

    def total(cohort: Any) -> torch.Tensor:
        return clients.sum(LAYOUT.zeros(), np.asarray(cohort), plan=plan, step=0).total.double()

    together = total(others)
    apart = sum((total([one]) for one in others), LAYOUT.zeros(dtype=torch.float64))
    assert float((together - apart).norm()) < 1e-5 * float(apart.norm())


def the_count_has_the_noise_that_is_accounted() -> None:
    """Read off the clip bounds, which are public: a count of nobody, noised."""
    adaptive = AdaptiveClipping(target_quantile=0.5, learning_rate=0.01)
    plan: Plan = plan_of(cohort_size=PEOPLE, adaptive=adaptive)
    steps = 400
    bounds = [plan.adapt(0.0, Charge(plan.event, step=t, clip_bound=plan.clip_bound)).clip_bound for t in range(steps)]
    counts = -np.log(np.array(bounds) / plan.clip_bound) / adaptive.learning_rate * PEOPLE
    assert not is_far(float(counts.std()), adaptive.count_noise(PEOPLE), draws=steps)


CHECKED: dict[str, tuple[Plant, Any]] = {
    "weights above the cap": (planted.weights_above_the_cap, weights_are_capped),
    "the same noise after a resume": (planted.noise_used_again_after_a_resume, a_later_attempt_has_other_noise),
    "a bystander effect": (planted.bystander, one_user_moves_the_sum_by_the_own_update_alone),
    "adaptive clipping's count without noise": (
        planted.count_without_noise,
        the_count_has_the_noise_that_is_accounted,
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_check_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = CHECKED[name]
    check()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()


# Elsewhere: it takes processes.
ELSEWHERE = {"one rank's plan differing": "tests/training/test_agreement.py::test_another_clip_bound"}


def test_the_page_tells_the_kept_calibration() -> None:
    """And that is as it must be: intervals hold the truth, bounds stay below it, and no honest run alarms."""
    kept = json.loads((PAGE.parents[1] / "benchmarks" / "audit.json").read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    for row in kept["rows"]:
        verdicts = " / ".join(str(row["verdicts"][name]) for name in ("consistent", "alarm", "broken"))
        who = row["in_each_round"]
        cells = (
            *(who, row["noise"], f"{row['promised']:.0f}", f"{row['estimate_mean']:.2f} ({row['estimate_std']:.2f})"),
            *(f"{row['interval_holds_it']} of {row['runs']}", row["interval_above_it"]),
            *(f"{row['bound_mean']:.2f}, {row['bound_largest']:.2f}", row["noise_missing"], verdicts),
        )
        assert f"| {' | '.join(map(str, cells))} |" in text
        if row["noise"] == "half":
            assert row["verdicts"]["consistent"] == 0
            continue
        assert row["runs"] == 30
        # One honest run in a hundred alarms; where noise is independent none of these did.
        assert row["verdicts"]["consistent"] >= (28 if who == "groups, banded" else 30)
        assert row["bound_largest"] <= row["promised"]
        assert who == "a tenth" or row["interval_holds_it"] >= 0.9 * row["runs"]


def test_the_page_lists_each_fault_with_what_finds_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("## Planted faults")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", table, flags=re.MULTILINE))
    rows = {name: by for name, by in rows.items() if name != "fault" and not name.startswith("-")}
    expected = {name: f"audit: {by}" for name, (_, _, by) in AUDITED.items()}
    expected |= {name: f"test: `{check.__name__}`" for name, (_, check) in CHECKED.items()}
    expected |= {name: f"test: `{where.rpartition('::')[2]}`" for name, where in ELSEWHERE.items()}
    assert rows == expected
    for where in ELSEWHERE.values():
        file, _, test = where.partition("::")
        assert f"def {test}(" in (PAGE.parents[1] / file).read_text(encoding="utf-8")
