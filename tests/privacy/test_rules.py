"""A rule of the user's own cannot break a plan's guarantee, whatever it returns."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.flat.layout import Layout
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.plan import Plan, Rule
from sottovoce.privacy.settings import Mode, PrivacySettings

LAYOUT = Layout.of({"w": torch.zeros(3, 5), "b": torch.zeros(7)})
BOUND = 0.5


def plan(rule: Rule | None, *, mode: Mode = Mode.SEEDED) -> Plan:
    settings = PrivacySettings(
        population_size=100,
        privacy_unit="speaker",
        cohort_size=10,
        clip_bound=BOUND,
        noise_multiplier=1.0,
        delta=1e-5,
        mode=mode,
        root_seed=3 if mode is Mode.SEEDED else None,
    )
    return Plan(settings, LAYOUT, rule=rule)


def updates(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return LAYOUT.flatten(
        {
            name: torch.randn(count, *shape, generator=generator)
            for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True)
        }
    )


@dataclass(frozen=True)
class Affine:
    """Not even zero stays zero, nor the padding."""

    factor: float
    offset: float

    def __call__(self, update_P: Tensor, plan: Plan) -> Tensor:
        return update_P * self.factor + self.offset


numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(factor=numbers, offset=numbers, mode=st.sampled_from(Mode))
def test_what_is_added_is_within_the_bound(factor: float, offset: float, mode: Mode) -> None:
    private = plan(Affine(factor, offset), mode=mode)
    total = private.new_total()
    private.accumulate(total, updates(1)[0])
    assert float(total.double().norm()) <= BOUND  # padding included: it must stay empty
    assert float(private.clip(updates(1)[0]).double().norm()) <= BOUND


def test_a_rule_within_the_bound_is_left_as_it_is() -> None:
    update_P = updates(1)[0]
    shrunk = plan(lambda u, p: u * (0.9 * p.clip_bound / u.norm())).clip(update_P)
    assert torch.equal(shrunk, update_P * (0.9 * BOUND / update_P.norm()))


def test_stacked_users_are_ruled_one_by_one() -> None:
    private = plan(lambda u, p: u / u.abs().max())
    together, alone = private.new_total(), private.new_total()
    private.accumulate(together, updates(4))
    for update_P in updates(4):
        private.accumulate(alone, update_P)
    assert torch.equal(together, alone)


def test_a_cohort_of_nobody_adds_nothing() -> None:
    private = plan(lambda u, p: u)
    total = private.new_total()
    private.accumulate(total, updates(4)[:0])
    assert not total.any()


def test_another_shape_is_refused() -> None:
    with pytest.raises(InputError, match="expected an update of the shape"):
        plan(lambda u, p: u[:3]).clip(updates(1)[0])


def fails_on_large_ones(update_P: Tensor, plan: Plan) -> Tensor:
    if update_P.abs().max() > 50:
        raise ZeroDivisionError
    return update_P


def test_in_a_release_a_rule_that_fails_on_one_users_update_costs_that_user_alone() -> None:
    private = plan(fails_on_large_ones, mode=Mode.SECURE)
    given, others = updates(4), private.new_total()
    private.accumulate(others, given[[0, 1, 3]])
    given[2] *= 1000
    total = private.new_total()
    stats = private.accumulate(total, given)
    assert torch.equal(total, others)
    assert stats.non_finite.tolist() == [False, False, True, False]
    with pytest.raises(ZeroDivisionError):
        plan(fails_on_large_ones).clip(given)


def test_a_ledger_knows_its_rule(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path, header=plan(Affine(0.5, 0.0)).ledger_header(run="ruled")).close()
    Ledger(path, header=plan(Affine(0.5, 0.0)).ledger_header(run="ruled")).close()
    for other in (Affine(0.6, 0.0), math.hypot, None):
        with pytest.raises(InputError):
            Ledger(path, header=plan(other).ledger_header(run="ruled"))  # type: ignore[arg-type]  # only its name counts
