"""Named random streams: the same everywhere, and none like another."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base import seeds
from sottovoce.base.seeds import derive, keyed_order, stream, torch_stream

names = st.lists(st.integers(-(2**70), 2**70) | st.text(max_size=5), max_size=3)


@given(first=names, second=names)
def test_names_that_differ_are_streams_that_differ(first: list, second: list) -> None:
    assert (derive(1, *first) == derive(1, *second)) == (first == second)


def test_a_stream_is_the_same_on_every_machine() -> None:
    # Pinned: these decide who is in which split of every store and run there is.
    assert derive(1, "cohort", 7) == 7770209931730676191
    assert stream(1, "cohort", 7).integers(1000, size=4).tolist() == [424, 214, 396, 328]
    assert torch.randint(1000, (4,), generator=torch_stream(1, "cohort", 7)).tolist() == [632, 517, 212, 107]


def test_a_number_that_is_no_int_is_refused() -> None:
    with pytest.raises(AssertionError, match="expected a str or an int"):
        derive(1, "cohort", np.int64(7))  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**63 - 1))
def test_torch_streams_carry_every_bit_of_their_seed(seed: int) -> None:
    other = seed ^ (1 << 40)  # equal in the 32 bits that torch's own seeding keeps
    drawn = []
    for value in (seed, seed, other):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(seeds, "derive", lambda *_, value=value: value)
            drawn.append(torch.randint(2**20, (700,), generator=torch_stream(1)).numpy())
    # The same twister in NumPy, which has used up all but one of its first 624 words when it is fresh.
    assert np.array_equal(drawn[0], np.random.MT19937(seed).random_raw(701)[1:] % 2**20)
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


@given(keys=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=20, unique=True), data=st.data())
def test_whoever_leaves_moves_nobody_else(keys: list[int], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(keys))
    left = [key for key in keys if key != gone]

    def ordered(people: list[int]) -> list[int]:
        return [people[i] for i in keyed_order(np.array(people, dtype=np.uint64), 6, "split").tolist()]

    assert [key for key in ordered(keys) if key != gone] == ordered(left)
