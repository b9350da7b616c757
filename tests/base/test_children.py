"""Processes give back what they are asked for, in order; one that dies is noticed, and none is left.

Deaths of the first process: tests/data/store/test_signals.py, tests/training/test_suite_deaths.py.
"""

import multiprocessing
from collections.abc import Iterator

import pytest
from tests import calls

from sottovoce.base.children import ChildKilled, ChildPool, child_pool, map_in_order
from sottovoce.base.errors import InputError


@pytest.fixture
def two() -> Iterator[ChildPool]:
    others = {*multiprocessing.active_children()}
    with child_pool(2, multiprocessing.get_context("forkserver")) as crew:
        yield crew
    assert {*multiprocessing.active_children()} == others


def test_results_come_in_order(two: ChildPool) -> None:
    assert [*map_in_order(two, calls.tenfold, range(12), ahead=3)] == [10 * n for n in range(12)]
    assert not two.busy


def test_an_error_comes_back_as_it_was(two: ChildPool) -> None:
    with pytest.raises(InputError) as raised:
        [*map_in_order(two, calls.tenfold, [1, 13, 2], ahead=4)]
    assert str(raised.value) == "13 brings bad luck"
    assert any("in a process of its own" in note for note in raised.value.__notes__)


def test_what_cannot_be_sent_is_an_error_and_no_death(two: ChildPool) -> None:
    two.submit("a", calls.unsendable)
    (answer,) = two.answers()
    assert "cannot be sent" in str(answer.error)


def wait_for(crew: ChildPool) -> None:
    while crew.busy:
        crew.answers()


@pytest.mark.parametrize("call", [calls.killed, calls.killed_in_the_middle_of_its_answer])
def test_one_that_is_killed_is_noticed(two: ChildPool, call: object) -> None:
    two.submit("a", call)  # type: ignore[arg-type]
    two.submit("b", calls.tenfold, 1)
    with pytest.raises(ChildKilled):
        wait_for(two)
