"""How few neighbours are enough: the counting argument on small rings, and the numbers that follow from it."""

from itertools import product

import pytest

from sottovoce.base.errors import InputError
from sottovoce.network.secure_sum.neighbours import log2_failure, neighbours_for
from sottovoce.network.secure_sum.terms import share_threshold


def connected(nodes: set[int], *, ring: int, half: int) -> bool:
    """Whether `nodes` of a ring hang together, each with those at most `half` places away."""
    reached, waiting = set[int](), set(list(nodes)[:1])
    while waiting:
        one = waiting.pop()
        reached.add(one)
        near = {(one + by) % ring for by in range(-half, half + 1)} & nodes
        waiting |= near - reached
    return reached == nodes


def opened(ring: int, half: int, *, colluders: set[int], survivors: set[int]) -> set[int]:
    """The honest people whose vectors a server can open: those who see enough of their group, and go on."""
    while True:
        near = {one: {(one + by) % ring for by in range(-half, half + 1)} for one in survivors - colluders}
        refusing = {one for one, group in near.items() if len(group & survivors) < share_threshold(2 * half + 1)}
        if not refusing:
            return set(near)
        survivors = survivors - refusing


def test_whoever_splits_the_honest_needs_colluders_in_two_gaps() -> None:
    """Every way to split a ring of ten by what survivors a lying server names, with every set of colluders."""
    ring, half, splits = 10, 2, 0
    needed = share_threshold(2 * half + 1) - half - 1
    windows = [{(start + by) % ring for by in range(half)} for start in range(ring)]
    for kinds in product("hcg", repeat=ring):  # honest, colluding, gone
        colluders = {place for place, kind in enumerate(kinds) if kind == "c"}
        if len(colluders) > 4 or kinds.count("h") < 2:
            continue
        survivors = {place for place, kind in enumerate(kinds) if kind != "g"}
        honest = opened(ring, half, colluders=colluders, survivors=survivors)
        if connected(honest, ring=ring, half=half):
            continue
        splits += 1
        full = [window for window in windows if len(window & colluders) >= needed and not window & honest]
        assert any(not one & other for one in full for other in full)
    assert splits > 0


def test_more_colluders_or_more_people_take_more_neighbours() -> None:
    needed = [[neighbours_for(n, colluding=share) for n in (1000, 100_000)] for share in (0.02, 0.1)]
    assert needed == [[50, 68], [158, 224]]
    assert neighbours_for(1000, colluding=0.1, log2_failure_at_most=-80) == 254  # 2⁴⁰ tries of a server that lies


@pytest.mark.parametrize("clients", [300, 10_000])
def test_failure_falls_with_neighbours_and_is_impossible_where_everybody_is_one(clients: int) -> None:
    chances = [log2_failure(k, clients=clients, colluding=0.1) for k in (20, 60, 100, 140)]
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] < -20
    assert log2_failure(clients, clients=clients, colluding=0.3) == float("-inf")
    assert log2_failure(clients, clients=clients, colluding=0.4) == 0.0


def test_against_a_third_nothing_helps() -> None:
    with pytest.raises(InputError, match="expected a share below a third"):
        neighbours_for(1000, colluding=0.34)
