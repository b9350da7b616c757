"""Secure sums give the exact sum of those who stayed, whoever goes when, and nothing where too few are left."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.network.fleet import Fleet, attempt_of, client_of, node_keys, terms_of, vector, vectors_sum

from sottovoce.base.errors import InputError
from sottovoce.network.secure_sum.protocol import SumServer
from sottovoce.network.secure_sum.terms import Cohort, NoSum, Phase, Reason, SumTerms, share_threshold


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("count", [3, 4, 9])
def test_the_sum_of_all_is_exact(count: int, bits: int) -> None:
    attempt = attempt_of(terms_of(count, bits=bits))
    opened = Fleet(attempt).opened()
    assert opened.survivors == tuple(range(count))
    assert np.array_equal(opened.total, vectors_sum(attempt, range(count)))


@pytest.mark.parametrize("phase", Phase)
def test_who_goes_in_any_phase_costs_nobody_else_anything(phase: Phase) -> None:
    attempt = attempt_of(terms_of(9))
    opened = Fleet(attempt, gone={2: phase, 5: phase}).opened()
    stayed = set(range(9)) - ({2, 5} if phase <= Phase.MASKED else set())
    assert set(opened.survivors) == stayed  # whose vector has arrived is in the sum, also where they go afterwards
    assert np.array_equal(opened.total, vectors_sum(attempt, stayed))


@settings(max_examples=40)
@given(st.data())
def test_random_dropouts_give_the_sum_of_the_survivors_or_none(data: st.DataObject) -> None:
    count = data.draw(st.integers(3, 10))
    neighbours = data.draw(st.sampled_from([None, 4, 6]))
    attempt = attempt_of(terms_of(count, neighbours=neighbours))
    gone = data.draw(st.dictionaries(st.integers(0, count - 1), st.sampled_from(Phase), max_size=count))
    fleet = Fleet(attempt, gone=gone)
    try:
        opened = fleet.opened()
    except NoSum as none:
        if none.why is Reason.TOO_FEW and gone:
            return
        raise
    said = {place for place in range(count) if gone.get(place, Phase.UNMASK) > Phase.MASKED}
    assert set(opened.survivors) <= said
    assert set(opened.survivors) == said or Reason.TOO_FEW in fleet.refusals.values()
    assert np.array_equal(opened.total, vectors_sum(attempt, opened.survivors))


@pytest.mark.parametrize("phase", Phase)
def test_below_the_threshold_there_is_no_sum(phase: Phase) -> None:
    gone = dict.fromkeys(range(9 - share_threshold(9) + 1), phase)
    with pytest.raises(NoSum, match="too_few"):
        Fleet(attempt_of(terms_of(9, least=7)), gone=gone).opened()


@pytest.mark.parametrize("phase", [Phase.KEYS, Phase.SHARES, Phase.MASKED])
def test_below_what_was_accepted_there_is_no_sum_whatever_the_threshold(phase: Phase) -> None:
    with pytest.raises(NoSum, match="too_few"):
        Fleet(attempt_of(terms_of(9, least=9)), gone={0: phase}).opened()


def test_a_masked_vector_is_another_every_time() -> None:
    attempt, sent = attempt_of(terms_of(4)), []
    for _ in range(2):
        fleet = Fleet(attempt, answers={Phase.MASKED: lambda place, answer: sent.append(answer) or answer})
        fleet.opened()
    assert len(set(sent)) == 8


def test_neighbours_are_mutual_and_as_many_as_was_said() -> None:
    attempt = attempt_of(terms_of(20, neighbours=6))
    cohort = Cohort(attempt, {place: client_of(attempt, place).keys() for place in range(20)})
    groups = {place: cohort.group(place) for place in range(20)}
    assert all(len(group) == 7 and place in group for place, group in groups.items())
    assert all(one in groups[other] for one, group in groups.items() for other in group)


def test_with_few_neighbours_a_vector_takes_few_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    from sottovoce.network.secure_sum import protocol

    counted = []
    real = protocol.add_mask
    monkeypatch.setattr(protocol, "add_mask", lambda *args, **named: (counted.append(1), real(*args, **named)))
    attempt = attempt_of(terms_of(20, neighbours=6))
    opened = Fleet(attempt).opened()
    assert np.array_equal(opened.total, vectors_sum(attempt, range(20)))
    assert len(counted) == 20 * 7 + 20


def test_answers_that_are_no_good_count_as_none() -> None:
    attempt = attempt_of(terms_of(6))
    server = SumServer(attempt)
    server.begin(range(6))
    good = client_of(attempt, 0).keys()
    assert not server.take(1, good)  # another's
    assert not server.take(0, good[:-1])
    assert not server.take(0, bytes(len(good)))
    assert server.take(0, good)
    assert not server.take(0, good)
    assert not server.take(6, good)


def test_a_vector_of_another_length_counts_as_none() -> None:
    attempt = attempt_of(terms_of(6))
    fleet = Fleet(attempt, answers={Phase.MASKED: lambda place, answer: answer[4:] if place == 3 else answer})
    opened = fleet.opened()
    assert opened.survivors == (0, 1, 2, 4, 5)
    assert np.array_equal(opened.total, vectors_sum(attempt, opened.survivors))


def test_the_vector_handed_in_stays_as_it_was() -> None:
    fleet = Fleet(attempt_of(terms_of(3)))
    orders = fleet.until(Phase.MASKED)
    words = vector(fleet.attempt, 0)
    fleet.clients[0].masked(orders[0], words)
    assert np.array_equal(words, vector(fleet.attempt, 0))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"least": 2}, "least=2: expected from 3 people"),
        ({"least": 5}, "least=5: expected from 3 people to the roster's 4"),
        ({"bits": 16}, "bits=16"),
        ({"neighbours": 5}, "neighbours=5: expected an even number"),
        ({"roster": (node_keys(4)[0].public_key(),) * 4}, "twice in the roster"),
    ],
)
def test_terms_that_protect_nobody_are_refused(changed: dict[str, object], message: str) -> None:
    usual = {"roster": terms_of(4).roster, "least": 3, "length": 5}
    with pytest.raises(InputError, match=message):
        SumTerms(**{**usual, **changed})  # type: ignore[arg-type]


def test_two_sets_that_open_anything_share_more_than_a_third() -> None:
    for size in range(3, 200):
        assert 2 * share_threshold(size) - size > size / 3
    assert all(len(set(a) & set(b)) >= 3 for a, b in combinations(combinations(range(7), share_threshold(7)), 2))
