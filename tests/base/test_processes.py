"""Work is dealt out whole, evenly, and the same way everywhere."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.processes import split_by_load

AMOUNTS = st.lists(st.floats(0, 1e6), max_size=60).map(np.array)


@given(AMOUNTS, st.integers(1, 9))
def test_everything_is_dealt_out_once(amounts: np.ndarray, parts: int) -> None:
    dealt = split_by_load(amounts, parts)
    assert len(dealt) == parts
    assert sorted(place for part in dealt for place in part.tolist()) == [*range(len(amounts))]
    assert all(part.tolist() == sorted(part.tolist()) for part in dealt)


@given(AMOUNTS.filter(len), st.integers(1, 9))
def test_nobody_has_more_than_another_by_more_than_one_item(amounts: np.ndarray, parts: int) -> None:
    """Whoever has most had least when the last item came."""
    loads = [float(amounts[part].sum()) for part in split_by_load(amounts, parts)]
    assert max(loads) - min(loads) <= amounts.max() * (1 + 1e-9)


def test_equal_amounts_are_dealt_out_in_turn() -> None:
    assert [part.tolist() for part in split_by_load(np.ones(5), 2)] == [[0, 2, 4], [1, 3]]
