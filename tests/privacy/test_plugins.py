"""Parts from outside the package: bounded here, named in every promise, refused where nobody could agree to them."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.config import as_yaml, load_recipe
from sottovoce.federated.weighting import ClientFigures, WeightedSum
from sottovoce.flat.layout import Layout
from sottovoce.network.client_recipe import check_loads_no_code, check_network_recipe, clients_part
from sottovoce.privacy.events import NoGuarantee
from sottovoce.privacy.guarantee import guarantee_of
from sottovoce.privacy.ledger import Ledger, verify
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings

LAYOUT = Layout.of({"w": torch.zeros(3, 5)})
HERE = __name__


@dataclass(frozen=True, kw_only=True)
class Grown:
    """A rule that only ever enlarges."""

    factor: float

    def __call__(self, update_P: Tensor, plan: Plan) -> Tensor:
        return update_P * self.factor


@dataclass(frozen=True, kw_only=True)
class Constant:
    weight: float

    def __call__(self, figures: ClientFigures) -> float:
        return self.weight


@dataclass(frozen=True, kw_only=True)
class BySeconds:
    def __call__(self, figures: ClientFigures) -> float:
        if figures.seconds < 0:
            raise ZeroDivisionError
        return figures.seconds / 10


@dataclass(frozen=True, kw_only=True)
class InTurn:
    """Round robin: nobody's chance is anybody's secret."""

    first: int = 0

    def __call__(self, step: int, plan: Plan, *, generator: np.random.Generator) -> Iterable[int]:
        size = plan.cohort_size
        return [(self.first + step * size + i) % plan.settings.population_size for i in range(size)]


@dataclass(frozen=True, kw_only=True)
class Says:
    cohort: Any

    def __call__(self, step: int, plan: Plan, *, generator: np.random.Generator) -> Any:
        return self.cohort


@dataclass(frozen=True, kw_only=True)
class ByChance:
    def __call__(self, step: int, plan: Plan, *, generator: np.random.Generator) -> Any:
        return generator.permutation(plan.settings.population_size)[: plan.cohort_size]


@dataclass
class Moving:
    def __call__(self, update_P: Tensor, plan: Plan) -> Tensor:
        return update_P


def named(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": f"{HERE}:{name}", **settings}


def settings(*, mode: Mode = Mode.SEEDED, **changes: Any) -> PrivacySettings:
    common: dict[str, Any] = {
        "population_size": 100,
        "privacy_unit": "speaker",
        "cohort_size": 10,
        "clip_bound": 0.5,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "mode": mode,
        "root_seed": 3 if mode is Mode.SEEDED else None,
    }
    return PrivacySettings(**(common | changes))


def plan(**changes: Any) -> Plan:
    return Plan(settings(**changes), LAYOUT)


def update() -> Tensor:
    return LAYOUT.flatten({"w": torch.full((3, 5), 2.0)})


numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(factor=numbers, weight=numbers, mode=st.sampled_from(Mode))
def test_whatever_they_return_one_user_adds_no_more_than_the_bound(factor: float, weight: float, mode: Mode) -> None:
    private = plan(clip_rule=named("Grown", factor=factor), weights=named("Constant", weight=weight), mode=mode)
    total = private.new_total()
    (found,) = WeightedSum(private, total).weigh([ClientFigures(utterances=1, seconds=1.0)])
    private.accumulate(total, update(), weight=found)
    assert float(total.double().norm()) <= 0.5


def test_each_user_is_weighed_by_their_own_figures() -> None:
    private = plan(weights=named("BySeconds"))
    summed = WeightedSum(private, private.new_total())
    figures = [ClientFigures(utterances=1, seconds=seconds) for seconds in (2.5, 50.0)]
    assert summed.weigh(figures) == [0.25, 1.0]
    assert summed.denominator == 10, "public, whatever the weights"
    assert plan().weigh(figures[0]) == 1.0


def test_in_a_release_weights_that_fail_on_one_user_cost_that_user_alone() -> None:
    odd = ClientFigures(utterances=1, seconds=-1.0)
    assert plan(weights=named("BySeconds"), mode=Mode.SECURE).weigh(odd) == 0
    with pytest.raises(ZeroDivisionError):
        plan(weights=named("BySeconds")).weigh(odd)


def test_a_guarantee_names_what_it_rests_on(tmp_path: Path) -> None:
    private = plan(clip_rule=named("Grown", factor=2.0), weights=named("Constant", weight=0.5))
    words = (
        f"clipping by {HERE}:Grown(factor=2.0) and weights by {HERE}:Constant(weight=0.5), which are not part of this "
        "package: this holds if they look at the data of one speaker alone"
    )
    assert private.guarantee == f"{plan().guarantee}; {words}"
    path = tmp_path / "ledger.jsonl"
    Ledger(path, header=private.ledger_header(run="outside", central_steps=1)).close()
    found = verify(path)
    assert found.header["plan"]["clip_rule"] == named("Grown", factor=2.0)
    assert found.as_json()["outside"] == words
    assert str(guarantee_of(found).words).endswith(f"; {words}")
    with pytest.raises(InputError, match=r"plan\.clip_rule\.factor=2\.0, this run has 3\.0"):
        Ledger(
            path,
            header=plan(clip_rule=named("Grown", factor=3.0), weights=named("Constant", weight=0.5)).ledger_header(
                run="outside", central_steps=1
            ),
        )


def test_a_plan_without_any_is_told_as_before() -> None:
    assert not {"clip_rule", "weights", "sampler"} & plan().describe().keys()
    assert "package" not in plan().guarantee


def test_a_rule_of_a_plan_in_python_is_named_too() -> None:
    assert (
        "clipping by Grown(factor=2.0), which is not part of this package"
        in dataclasses.replace(plan(), rule=Grown(factor=2.0)).guarantee
    )


def test_with_a_sampler_there_is_no_guarantee() -> None:
    private = plan(sampler=named("InTurn", first=95))
    assert isinstance(private.event, NoGuarantee)
    assert private.guarantee.startswith(
        f"no guarantee: cohorts are drawn by {HERE}:InTurn(first=95), which is not part"
    )
    assert private.sample(0).tolist() == [0, 1, 2, 3, 4, 95, 96, 97, 98, 99]
    for refused in ({"mode": Mode.SECURE}, {"epsilon_budget": 8.0}):
        with pytest.raises(InputError, match="cohorts are drawn by"):
            plan(sampler=named("InTurn"), **refused)


def test_chance_comes_from_the_plan() -> None:
    private = plan(sampler=named("ByChance"))
    assert private.sample(4).tolist() == plan(sampler=named("ByChance")).sample(4).tolist()
    assert private.sample(4).tolist() != private.sample(5).tolist()
    assert private.sample(4).tolist() != private.sample(4, attempt=2).tolist()


@pytest.mark.parametrize("cohort", [[100], [-1], [3, 3], [0.5], [[1, 2]], ["a"]])
def test_a_cohort_that_cannot_be_is_refused(cohort: Any) -> None:
    with pytest.raises(InputError, match="expected users from 0 to 99, each at most once"):
        plan(sampler=named("Says", cohort=cohort)).sample(0)
    assert plan(sampler=named("Says", cohort=[])).sample(0).tolist() == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"clip_rule": {"name": "grown"}}, "clip_rule: name='grown', expected module:Name"),
        ({"clip_rule": {"factor": 2}}, "clip_rule: name=None, expected module:Name"),
        ({"weights": {"name": "no_such_module:X"}}, "no_such_module:X: cannot be imported"),
        ({"clip_rule": named("Moving")}, "expected a frozen dataclass with a __call__"),
        ({"clip_rule": named("update")}, "expected a frozen dataclass with a __call__"),
        ({"clip_rule": named("Grown")}, "setting 'factor' is missing"),
        ({"clip_rule": named("Grown", faktor=2)}, "unknown setting 'faktor', did you mean 'factor'"),
        ({"weights": named("BySeconds"), "weighting": "seconds", "weight_cap": 9.0}, "weights with weighting=seconds"),
        ({"sampler": named("InTurn"), "sampling": "fixed_size"}, "sampler with sampling=fixed_size"),
        (
            {"sampler": named("InTurn"), "time_line": "skip", "noise_multiplier": 0.0},
            r"sampler with time_line\.dry=skip",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        plan(**changes)


def test_a_rule_twice_is_refused() -> None:
    with pytest.raises(InputError, match="expected one of them"):
        Plan(settings(clip_rule=named("Grown", factor=2.0)), LAYOUT, rule=Grown(factor=2.0))


# Recipes.


def recipe(**parts: Any) -> Any:
    return load_recipe(
        "demo-clipping/global", [f"federation.privacy.{name}={json.dumps(part)}" for name, part in parts.items()]
    )


def test_a_recipe_names_them_and_writes_them_down() -> None:
    found = recipe(clip_rule=named("Grown", factor=2.0))
    assert f"name: {HERE}:Grown\n" in as_yaml(found)
    assert "clip_rule" not in as_yaml(recipe())
    with pytest.raises(InputError, match="unknown setting 'faktor'"):
        recipe(clip_rule=named("Grown", faktor=2.0))


def test_a_target_that_nobody_can_keep_is_refused() -> None:
    with pytest.raises(InputError, match="nobody knows its ε"):
        load_recipe(
            "demo-clipping/global",
            [
                "federation.privacy.sigma_dp=null",
                "federation.privacy.target_epsilon=8",
                f"federation.privacy.sampler={json.dumps(named('InTurn'))}",
            ],
        )


@pytest.mark.parametrize(
    "part",
    [
        {"clip_rule": named("Grown", factor=2.0)},
        {"weights": named("Constant", weight=0.5)},
        {"sampler": named("InTurn")},
    ],
)
def test_nobody_over_a_network_is_asked_to_agree_to_them(part: dict[str, Any]) -> None:
    found, (name,) = recipe(**part), part
    with pytest.raises(InputError, match=f"federation.privacy.{name}: people accept what this package does"):
        check_network_recipe(found, population_size=100)
    with pytest.raises(InputError, match=f"the invitation's privacy: {name} is code that the server names"):
        check_loads_no_code(clients_part(found))
    check_network_recipe(recipe(), population_size=100)
    check_loads_no_code(clients_part(recipe()))
