"""Groups that take turns over a network: what a server draws, what nodes take, and what they refuse a liar."""

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from tests.network.conftest import MakeCluster
from tests.network.local_cluster import RUN, LocalCluster, content, recipe_of
from tests.network.nodes import LAYOUT, availability_of
from tests.network.test_availability import roster

from sottovoce.base.errors import InputError
from sottovoce.network.invitation import Invitation, SecureSums
from sottovoce.network.limits import accepted_limits
from sottovoce.network.messages import AnswerCode, OrderKind, Refused
from sottovoce.network.model_transfer import write_round_model
from sottovoce.network.node.consent import _epsilon_if_known, describe_invitation
from sottovoce.network.secure_sum.protocol import SumServer
from sottovoce.network.secure_sum.terms import NoSum, SumAttempt
from sottovoce.network.server.availability import LEFT, GroupsInTurn, NodesNeeded
from sottovoce.network.server.setup import default_least, nodes_needed
from sottovoce.network.turns import Turns, read_turn, write_turn
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.events import CorrelatedRelease, poisson_release, repeated
from sottovoce.privacy.guarantee import format_epsilons
from sottovoce.privacy.mechanism import Correlated
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.plan_sampling import drawn_from, groups_of
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.settings import Mode, PrivacySettings
from sottovoce.privacy.strategies import Banded, Blt
from sottovoce.training.remote_clients import TooFewClients
from sottovoce.training.start_model import split_trained_part

STEPS, SPARE, CYCLE = 6, 2, 3
BANDED = {"kind": "banded", "bands": 2, "cycle": CYCLE}
BLT = {"kind": "blt", "buffers": 2, "cycle": CYCLE}
Content = dict[str, Any]


def release(mechanism: Content, *, cohort_size: int = 3, **more: Any) -> Content:
    return content(steps=STEPS, cohort_size=cohort_size, privacy={"mode": "secure", "mechanism": mechanism}, **more)


# What a node takes.


@given(cycle=st.integers(1, 5), group=st.integers(0, 4), lost=st.lists(st.booleans(), max_size=12))
def test_an_honest_server_is_never_refused(cycle: int, group: int, lost: list[bool]) -> None:
    """Whatever attempts are lost: a step is made again, or from an earlier one on, and each attempt has a new row."""
    group %= cycle
    turns, last, step = Turns(cycle=cycle, group=group, rows=len(lost) + 1), None, 0
    for row, is_lost in enumerate(lost):
        if row % cycle == group:
            turns.check(row, step=step, last=last)
            last = row
        step = max(step - 1, 0) if is_lost else step + 1


@given(
    cycle=st.integers(1, 5),
    group=st.integers(0, 4),
    rows=st.integers(1, 30),
    asked=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60),
)
def test_whatever_a_liar_asks_answers_lie_a_cycle_apart(
    cycle: int, group: int, rows: int, asked: list[tuple[int, int]]
) -> None:
    group %= cycle
    turns, taken = Turns(cycle=cycle, group=group, rows=rows), list[int]()
    for row, step in asked:
        with contextlib.suppress(Refused):
            turns.check(row, step=step, last=taken[-1] if taken else None)
            taken.append(row)
    assert all(later - sooner >= cycle for sooner, later in itertools.pairwise(taken))
    assert all(row % cycle == group and row < rows for row in taken)
    limits = accepted_limits(rounds=rows, measurements=0, spare_attempts=0, sampling_rate=0.1, cycle=cycle, draw_rate=1)
    assert len(taken) <= limits.updates == -(-rows // cycle)


def test_in_a_rehearsal_a_row_may_be_asked_for_again_but_by_its_own_group() -> None:
    turns = Turns(cycle=3, group=1, rows=None)
    for row in (4, 4, 1):
        turns.check(row, step=row, last=4)
    with pytest.raises(Refused, match="out_of_turn"):
        turns.check(5, step=5, last=None)


@pytest.mark.parametrize("payload", [b"", b"1234567"])
def test_an_order_without_a_row_is_refused(payload: bytes) -> None:
    with pytest.raises(Refused, match="unreadable"):
        read_turn(payload)


def train(local_cluster: LocalCluster, name: str, row: int, **changes: Any) -> int:
    """The code of the answer to an order to train at `row`, in a new attempt at step 0 unless it is said.

    The number of one that was refused is used again: a liar would else run out of those that were accepted.
    """
    honest = local_cluster.train(name, **changes)
    code = local_cluster.ask(name, replace(honest, payload=write_turn(row, honest.payload))).code
    local_cluster.attempt -= code is not AnswerCode.DONE
    return int(code)


def answered_rows(local_cluster: LocalCluster, name: str) -> list[int]:
    records = read_chain(local_cluster.place / name / "home" / "ledger.jsonl").records
    return [record["row"] for record in records if record.get("answered") == "train"]


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> LocalCluster:
    found = make_cluster(release(BANDED))
    found.invitation = found.invite(spare_attempts=SPARE)
    found.plan = found.invitation.plan(found.layout)
    return found


def group_of(local_cluster: LocalCluster, name: str) -> int:
    (group,) = (n for n, of in enumerate(groups_of(local_cluster.plan)) if local_cluster.people.index(name) in of)
    return group


def test_a_server_that_lies_about_turns_is_refused_also_after_a_restart(cluster: LocalCluster) -> None:
    anna = cluster.people[0]
    own, others = group_of(cluster, anna), {*range(CYCLE)} - {group_of(cluster, anna)}
    cluster.welcome(anna)
    for row in others:
        assert train(cluster, anna, row) == AnswerCode.OUT_OF_TURN
    assert train(cluster, anna, own, step=own + 1) == AnswerCode.OUT_OF_TURN  # no row is before its step
    assert train(cluster, anna, own) == AnswerCode.DONE
    assert train(cluster, anna, own) == AnswerCode.OUT_OF_TURN  # the same once more
    cluster.welcome(anna)  # started again: its ledger knows
    for row in (own, own + 1, own + 2):
        assert train(cluster, anna, row, step=1) == AnswerCode.OUT_OF_TURN
    assert train(cluster, anna, own + CYCLE, step=own + CYCLE) == AnswerCode.DONE
    assert train(cluster, anna, own, step=own) == AnswerCode.OUT_OF_TURN  # back again
    beyond = next(row for row in range(STEPS + SPARE, STEPS + SPARE + CYCLE) if row % CYCLE == own)
    assert train(cluster, anna, beyond) == AnswerCode.ABOVE_ACCEPTED
    assert answered_rows(cluster, anna) == [own, own + CYCLE]
    told = [line for line in cluster.said if "an order to train was refused" in line]
    assert told[0] == f"round 1: an order to train was refused (out of turn: row {min(others)} of the noise)"
    assert told[-1] == f"round 1: an order to train was refused (above accepted: row {beyond} of the noise)"
    assert len(told) == 9  # each is another


def test_a_model_without_a_row_is_no_order(cluster: LocalCluster) -> None:
    anna = cluster.people[0]
    cluster.welcome(anna)
    answer = cluster.ask(anna, cluster.train(anna))
    assert answer.code in (AnswerCode.OUT_OF_TURN, AnswerCode.ABOVE_ACCEPTED)
    assert answered_rows(cluster, anna) == []


def test_other_groups_in_the_same_run_bring_nobody_a_second_turn_too_soon(cluster: LocalCluster) -> None:
    """A roster in another order, which its user accepts for the run that has begun: its last row is not forgotten."""
    anna = cluster.people[0]
    own = group_of(cluster, anna)
    cluster.welcome(anna)
    assert train(cluster, anna, own) == AnswerCode.DONE
    for _ in cluster.people[1:]:
        cluster.people = [*cluster.people[1:], cluster.people[0]]
        cluster.invitation = cluster.invite(spare_attempts=SPARE)
        if (other := group_of(cluster, anna)) != own:
            break
    cluster.welcome(anna)
    sooner = next(row for row in range(own + 1, own + CYCLE) if row % CYCLE == other)
    assert train(cluster, anna, sooner) == AnswerCode.OUT_OF_TURN
    assert train(cluster, anna, sooner + CYCLE) == AnswerCode.DONE


def test_measurements_are_of_anybody_and_have_no_row(make_cluster: MakeCluster, four_each: Path) -> None:
    asked: Content = {"client_wer": {"words": 5, "noise_multiplier": 8.0}, "clients": {"holdout": 0.5}}
    local_cluster = make_cluster(release(BANDED, **asked), stores=four_each)
    anna = local_cluster.people[0]
    local_cluster.welcome(anna)
    model_P = local_cluster.layout.flatten(split_trained_part(local_cluster.recipe, local_cluster.start).initial)
    payload = write_round_model(model_P, local_cluster.layout)
    order = local_cluster.order(anna, OrderKind.WER, payload, step=STEPS, attempt=1)
    assert local_cluster.ask(anna, order).code == AnswerCode.DONE


# A secure sum.


@pytest.fixture
def masked(make_cluster: MakeCluster) -> LocalCluster:
    found = make_cluster(release(BANDED), secure=SecureSums(least=3))
    for name in found.people:
        found.welcome(name)
    return found


def asked_at(local_cluster: LocalCluster, rows: dict[int, int]) -> None:
    """Everybody trains in one attempt, at the row that each of them is given."""
    local_cluster.attempt += 1
    for place, row in rows.items():
        name = local_cluster.people[place]
        assert train(local_cluster, name, row, attempt=local_cluster.attempt) == AnswerCode.DONE
        local_cluster.attempt -= 1


def keys_of(local_cluster: LocalCluster, attempt: SumAttempt, places: list[int]) -> tuple[SumServer, dict[int, bytes]]:
    server = SumServer(attempt)
    found = dict[int, bytes]()
    for place, payload in server.begin(places).items():
        name = local_cluster.people[place]
        when = {"step": attempt.step, "attempt": attempt.attempt}
        found[place] = local_cluster.ask(name, local_cluster.order(name, OrderKind.KEYS, payload, **when)).payload
    return server, found


def test_people_who_were_given_different_rows_make_no_sum(masked: LocalCluster) -> None:
    """Two groups in one sum: the keys of one are signed for another attempt than those of the other."""
    first, second, _ = (sorted(group) for group in groups_of(masked.plan))
    asked_at(masked, dict.fromkeys(first, 0) | dict.fromkeys(second, 1))
    attempt = SumAttempt(terms=masked.invitation.sum_terms, run=RUN, step=0, attempt=masked.attempt, row=0)
    server, found = keys_of(masked, attempt, sorted([*first, *second]))
    assert [place for place in found if server.take(place, found[place])] == first
    # A liar shows them to each other all the same: nobody goes on.
    orders = server.advance()
    listing = orders[first[0]] + b"".join(place.to_bytes(4, "little") + found[place] for place in second)
    for place in first:
        name = masked.people[place]
        order = masked.order(name, OrderKind.SHARES, listing, step=0, attempt=masked.attempt)
        assert masked.ask(name, order).code == AnswerCode.UNEXPECTED
    assert any("would not be safe (unreadable)" in line for line in masked.said)


def test_a_colluder_of_another_group_does_not_make_a_sum_large_enough(masked: LocalCluster) -> None:
    """They sign for whatever row the server wants; the honest count members of their own group alone."""
    first, second, _ = (sorted(group) for group in groups_of(masked.plan))
    asked_at(masked, dict.fromkeys(first[:2], 0))
    attempt = SumAttempt(terms=masked.invitation.sum_terms, run=RUN, step=0, attempt=masked.attempt, row=0)
    with pytest.raises(NoSum):
        SumServer(attempt).begin(first[:2])
    _, found = keys_of(masked, attempt, [*first[:2], second[0]])
    places = sorted([*first[:2], second[0]])
    found[second[0]] = found[first[0]][:64] + found[first[0]][64:]
    listing = b"".join(place.to_bytes(4, "little") + found[place] for place in places)
    for place in first[:2]:
        name = masked.people[place]
        order = masked.order(name, OrderKind.SHARES, listing, step=0, attempt=masked.attempt)
        assert masked.ask(name, order).code == AnswerCode.UNEXPECTED


# The invitation.


@pytest.mark.parametrize("mechanism", [BANDED, BLT])
def test_an_invitation_has_the_numbers_of_the_noise_and_nodes_search_for_none(
    make_cluster: MakeCluster, mechanism: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_cluster = make_cluster(release(mechanism))
    ours = local_cluster.invite(spare_attempts=SPARE)

    def searched(*_: Any, **__: Any) -> None:
        raise AssertionError("a node has searched for a strategy")

    monkeypatch.setattr("sottovoce.privacy.mechanism.MechanismSettings.for_run", searched)
    theirs = Invitation.read(ours.content)
    assert theirs.digest == ours.digest
    assert theirs.plan(local_cluster.layout).describe() == ours.plan(local_cluster.layout).describe()
    event = ours.outline.event
    assert isinstance(event, CorrelatedRelease)
    assert theirs.epsilon == epsilon(repeated(event, STEPS + SPARE), ours.private.delta)
    assert theirs.epsilon_without_spare == epsilon(repeated(event, STEPS), ours.private.delta)


def doctored(invitation: Invitation, **changes: Any) -> bytes:
    known = json.loads(invitation.content)
    return json.dumps(known | changes, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (None, "another than its recipe's mechanism"),
        ({"cycle": 3, "strategy": {"kind": "blt", "decays": [0.5], "scales": [0.5]}}, "another than its recipe's"),
        ({"cycle": 2, "strategy": {"kind": "banded", "column": [1.0, 0.5]}}, "another than its recipe's mechanism"),
        ({"cycle": 3, "strategy": {"kind": "banded", "column": [1.0, "a"]}}, "correlated noise"),
        ({"cycle": 3, "strategy": {"kind": "banded", "column": [2.0]}}, "banded: a column"),
        ({"cycle": 3, "strategy": {"kind": "banded", "column": [1]}}, "canonical"),
        ({"cycle": 3, "strategy": {"kind": "banded"}}, "strategy"),
        ({"cycle": 3, "strategy": []}, "correlated noise"),
        ({"cycle": True, "strategy": {"kind": "banded", "column": [1.0, 0.5]}}, "another than its recipe's mechanism"),
        ({"cycle": 3, "strategy": {"kind": "banded", "column": [1.0, 0.5]}, "more": 1}, "correlated noise"),
        ({"cycle": 3, "strategy": {"kind": "banded", "column": [1.0, 0.1, -0.05, 0.02]}}, "no more bands than the cy"),
        ({"cycle": 3, "strategy": {"kind": "banded", "column": [1.0, 0.9, -0.5]}}, "its noise grows without end"),
    ],
)
def test_numbers_that_are_none_of_the_recipe_are_refused(cluster: LocalCluster, noise: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        Invitation.read(doctored(cluster.invitation, correlated=noise))
    assert "\n" not in str(refused.value)


def test_numbers_where_the_recipe_has_no_mechanism_are_refused(make_cluster: MakeCluster) -> None:
    plain = make_cluster(content()).invitation
    assert b"correlated" not in plain.content
    noise = {"cycle": 3, "strategy": {"kind": "banded", "column": [1.0, 0.5]}}
    for given_noise, words in ((noise, "another than its recipe's mechanism"), (None, "canonical")):
        with pytest.raises(InputError, match=words):
            Invitation.read(doctored(plain, correlated=given_noise))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (release({"kind": "blt", "buffers": 1, "cycle": 10}, cohort_size=1), "expected no more groups than people"),
        (release(BANDED, cohort_size=4), "expected a cycle of at most 2"),
    ],
)
def test_groups_that_cannot_be_are_refused(make_cluster: MakeCluster, given: Content, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_cluster(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (release(BANDED, cohort_size=2), "least=3: of 3 people, cohorts of about 2 are smaller too often"),
        (release(BLT | {"cycle": 4}, cohort_size=3), "least=3: of 2 people, cohorts of about 3"),
        (
            release(BANDED, client_wer={"words": 5, "noise_multiplier": 8.0}, clients={"holdout": 0.5}),
            "client_wer with least=3: of 9 people, cohorts of about 3 are smaller too often",
        ),
    ],
)
def test_a_release_whose_cohorts_may_be_too_small_to_open_is_refused(
    make_cluster: MakeCluster, given: Content, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        make_cluster(given, secure=SecureSums(least=3))


def test_people_are_told_the_rule(make_cluster: MakeCluster) -> None:
    local_cluster = make_cluster(release(BANDED, cohort_size=2))
    text = "\n".join(describe_invitation(local_cluster.invite(spare_attempts=SPARE)))
    assert (
        "How often: 6 rounds, and up to 2 attempts more where rounds are lost. The 9 people are in 3 groups that take "
        "turns, and yours is always the same. In its rounds you are asked with probability 0.667: about 1.33 times, "
        "never more than 3: above that your machine refuses. Between two of your rounds lie at least 2 others. What is "
        "promised holds only then, so your machine refuses in the turn of another group, and too soon after your last."
    ) in text
    assert "the server adds it to the sum, which it has seen by then. Later rounds take some of it back, so" in text


def test_who_takes_whole_groups_promises_nothing_that_sampling_hides(make_cluster: MakeCluster) -> None:
    masked = make_cluster(release(BLT), secure=SecureSums(least=3))
    assert "and not who took part" not in "\n".join(describe_invitation(masked.invitation))


def test_measurements_are_of_anybody_also_where_whole_groups_take_turns() -> None:
    """There sampling hides who is in a sum of word counts, but not from the others in it."""
    asked: Content = {"client_wer": {"words": 5, "noise_multiplier": 8.0}, "clients": {"holdout": 0.5}}
    nodes = [ec.generate_private_key(ec.SECP384R1()).public_key() for _ in range(80)]
    recipe = recipe_of(release({"kind": "blt", "buffers": 1, "cycle": 2}, cohort_size=40, **asked))
    invitation = Invitation.of(recipe, nodes, start=b"", layout=LAYOUT, secure=SecureSums(least=3))
    plan = invitation.wer_plan
    assert plan is not None
    alone = format_epsilons(epsilon(poisson_release(8.0, sampling_rate=1.0), plan.settings.delta))
    assert (
        "of the rounds that you are both in, each one tells them nothing more, each sum of words right and wrong "
        f"ε = {alone}"
    ) in "\n".join(describe_invitation(invitation))


def test_people_in_a_sum_are_told_what_others_in_it_learn(make_cluster: MakeCluster) -> None:
    """One round of a chain, without amplification: what it moves is as long as the strategy's column."""
    rehearsal = content(steps=STEPS, cohort_size=2, privacy={"mechanism": BANDED})
    local_cluster = make_cluster(rehearsal, secure=SecureSums(least=3))
    settings = replace(local_cluster.invitation.private, mode=Mode.SECURE, root_seed=None)
    event = Plan(settings, LAYOUT, sum_bits=32).event
    assert isinstance(event, CorrelatedRelease)
    alone = epsilon(repeated(replace(event, sampling_rate=1.0), CYCLE), settings.delta)
    assert _epsilon_if_known(local_cluster.invitation.outline) == format_epsilons(alone)


# How many are waited for.


def planned(mechanism: Correlated, *, people: int, cohort_size: int, mode: Mode = Mode.SECURE) -> Plan:
    settings = PrivacySettings(
        population_size=people,
        privacy_unit="speaker",
        cohort_size=cohort_size,
        clip_bound=1.0,
        noise_multiplier=1.0,
        delta=1e-9,
        mode=mode,
        root_seed=1 if mode is Mode.SEEDED else None,
        mechanism=mechanism,
    )
    return Plan(settings, LAYOUT, sum_bits=32)


SAMPLED = Correlated(cycle=10, strategy=Banded(column=(1.0, 0.5)))
WHOLE = Correlated(cycle=10, strategy=Blt(decays=(0.9,), scales=(0.4,)))


def test_enough_of_the_group_whose_turn_it_is_are_waited_for() -> None:
    plan = planned(SAMPLED, people=30_004, cohort_size=1000)
    sampler = plan.sampler
    assert isinstance(sampler, CyclicSampler)
    assert drawn_from(plan) == 3000
    assert min(map(len, groups_of(plan))) == 3000
    least = 512
    needed = nodes_needed(plan, 1000, least=least, is_secure=True)
    # As of a population of the group alone, with the group's own rate.
    alone = replace(
        plan.settings, mechanism=None, population_size=3000, cohort_size=round(3000 * sampler.sampling_rate)
    )
    assert needed.fewest == pytest.approx(Plan(alone, LAYOUT, sum_bits=32).fewest_available(least), abs=2)
    assert least < needed.fewest <= 3000
    assert plan.fewest_available(default_least(plan)) <= 3000 * 3 // 4


def test_of_a_group_some_may_be_late() -> None:
    """Drawn at the rate in a group, and in time as often as stated: enough are waited for where both are coins."""
    plan = planned(SAMPLED, people=30_004, cohort_size=1000)
    late = Plan(replace(plan.settings, expected_answers=800), LAYOUT, sum_bits=32)
    fewer = planned(SAMPLED, people=30_004, cohort_size=800)
    assert late.denominator == fewer.denominator == 800
    assert late.fewest_available(400) == pytest.approx(fewer.fewest_available(400), abs=2)
    assert late.fewest_available(400) > plan.fewest_available(400)
    assert late.event == plan.event  # of all who are drawn
    assert default_least(late) < default_least(plan)


def test_of_a_group_that_is_taken_whole_the_least_are_enough() -> None:
    plan = planned(WHOLE, people=300, cohort_size=30)
    assert nodes_needed(plan, 30, least=20, is_secure=True).fewest == 20
    assert default_least(plan) == 15


def in_turn(folder: Path) -> Any:
    groups = (frozenset({0, 2}), frozenset({1, 3, 4}))
    found = availability_of(roster(5), folder, wanted=5, fewest=3)
    found._groups = GroupsInTurn(places=groups, needed=NodesNeeded(wanted=2, fewest=2))
    return found


def test_nobody_takes_the_place_of_somebody_in_another_group(tmp_path: Path) -> None:
    found = in_turn(tmp_path)
    found.draw_from(4)
    assert (found.drawn, found.still_in, found.needed) == (frozenset({0, 2}), 2, 2)
    assert found.describe_waiting({0, 1, 3}, {}) == (
        "waiting until at least 2 of 2 nodes of group 1 of 2 are here: 1 are; away: p2 (not seen yet)"
    )
    found.mark_out([2], LEFT)
    found.draw_from(7)
    found.check_enough()  # of the other group all are in
    found.draw_from(6)
    with pytest.raises(
        TooFewClients, match=r"only 1 of 2 nodes of group 1 of 2 can still take part, and a round needs 2"
    ):
        found.check_enough()
    found.draw_from(None)  # clients' word error rates are measured on anybody
    assert (found.still_in, found.needed) == (4, 4)
