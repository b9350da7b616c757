"""Optimisers and schedules from outside, by `module:Class`."""

from dataclasses import dataclass

import pytest

from sottovoce.base.errors import InputError
from sottovoce.optimisers import SGD, build_optimiser, build_schedule
from sottovoce.optimisers.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Halving(Schedule):
    lr: float

    def __call__(self, step: int) -> float:
        return self.lr * 0.5**step


def test_a_class_is_found_by_its_place_and_gets_its_settings() -> None:
    assert build_optimiser("sottovoce.optimisers.elementwise:SGD", momentum=0.9) == SGD(momentum=0.9)
    schedule = build_schedule(f"{__name__}:Halving", lr=8.0)
    assert [schedule(step) for step in range(3)] == [8.0, 4.0, 2.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such_module:SGD",
            r"cannot be imported \(.*; is its folder in PYTHONPATH\? `python -m sottovoce` also looks .*\)",
        ),
        (
            "no_such.module:SGD",
            r"cannot be imported \(.*; is its folder in PYTHONPATH\? `python -m sottovoce` also looks .*\)",
        ),
        ("sottovoce.optimisers.elementwise:GDS", "cannot be imported"),
        (":SGD", "cannot be imported"),
        (".x:SGD", "cannot be imported"),
        (["sgd"], "expected one of sgd, adam"),
        ({}, "expected one of sgd, adam"),
        ("", "unknown optimiser ''"),
        ("sottovoce.optimisers.elementwise:", "cannot be imported"),
        ("sottovoce.optimisers.schedules:Constant", "expected a frozen dataclass derived from Optimiser"),
        ("math:sqrt", "expected a frozen dataclass derived from Optimiser"),
    ],
)
def test_what_is_no_optimiser_is_one_line(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_optimiser(name)


def test_settings_of_a_class_from_outside_are_checked_like_ours() -> None:
    with pytest.raises(InputError, match="did you mean 'momentum'"):
        build_optimiser("sottovoce.optimisers.elementwise:SGD", momentun=0.9)
