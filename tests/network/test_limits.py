"""No more than people accepted: a server charges no more attempts, and a node answers no oftener than sampling asks."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.network.local_cluster import RUN, LocalCluster, content
from tests.network.places import Place

from sottovoce.base.errors import InputError
from sottovoce.network.limits import RARE, Limits, accepted_limits, default_spare_attempts, max_times_asked
from sottovoce.network.messages import AnswerCode, Order, OrderKind, Refused, parse_order
from sottovoce.network.node.consent import describe_invitation
from sottovoce.network.node.ledger import NodeLedger
from sottovoce.network.transport.link import AnswerFunction
from sottovoce.privacy.accounting import rdp_epsilon
from sottovoce.privacy.events import poisson_release, repeated
from sottovoce.privacy.guarantee import guarantee_of
from sottovoce.privacy.ledger import Ledger, verify
from sottovoce.privacy.ledger_records import AttemptsUsed, Header
from sottovoce.training.federation import ATTEMPTS
from sottovoce.training.run_folder import LEDGER

MakeCluster = Callable[..., LocalCluster]

# A hundred rounds at q = 0.1: ε = 8.1, and 9.8, 11.4, 18.9 with 50, 100, 400 attempts more.
ROUNDS, RATE, RELEASE, DELTA = 100, 0.1, poisson_release(0.99, sampling_rate=0.1), 1e-5
SPARE = default_spare_attempts(ROUNDS)


def spent(attempts: int) -> float:
    return rdp_epsilon(repeated(RELEASE, attempts), DELTA)


# The server.


def test_a_server_that_repeats_attempts_spends_no_more_than_was_accepted(tmp_path: Path) -> None:
    """Killed after every ten charges, it starts each time from nothing; without a bound it paid for all of them."""
    assert [round(spent(ROUNDS + more), 1) for more in (0, 50, 100, 400)] == [8.1, 9.8, 11.4, 18.9]
    accepted = {"attempts": ROUNDS + SPARE, "client_wers": 0}
    told: dict[str, Any] = {"central_steps": ROUNDS, "accepted": accepted}
    header = Header(run="r", mode="secure", plan={}, event=RELEASE, delta=DELTA, **told)

    def charge() -> None:
        with closing(Ledger(tmp_path / "l", header=header)) as ledger:
            for step in range(10):
                ledger.intend(RELEASE, step=step, clip_bound=1.0, parameters="", cohort="")

    for _ in range((ROUNDS + SPARE) // 10):
        charge()
    with pytest.raises(AttemptsUsed, match="all 105 attempts at rounds that people accepted have been made"):
        charge()
    found = verify(tmp_path / "l")
    assert found.attempts == ROUNDS + SPARE
    assert found.epsilon.rdp == pytest.approx(spent(ROUNDS + SPARE))
    assert found.epsilon.rdp < spent(ROUNDS + 50)
    assert guarantee_of(found).epsilon.rdp == pytest.approx(spent(ROUNDS + SPARE))  # nor does it promise more


def test_a_ledger_with_more_attempts_than_were_accepted_is_refused(tmp_path: Path) -> None:
    header = Header(run="r", mode="secure", plan={}, event=RELEASE, delta=DELTA, central_steps=1)
    with closing(Ledger(tmp_path / "l", header=header)) as ledger:
        ledger.intend(RELEASE, step=0, clip_bound=1.0, parameters="", cohort="")
        state = ledger._state
        state.header = {**state.header, "accepted": {"attempts": 1, "client_wers": 0}}
        with pytest.raises(InputError, match="one more attempt, though all 1 attempts at rounds"):
            ledger._write({"kind": "intent", "step": 0})


@pytest.mark.parametrize(("crashes", "rounds"), [(1, 3), (2, 2)])
def test_a_run_ends_before_the_attempt_that_nobody_accepted(
    tmp_path: Path, cluster_stores: Path, crashes: int, rounds: int
) -> None:
    """Three rounds and one spare attempt are four, whatever becomes of the server; it ends in order all the same."""
    place = Place(tmp_path, cluster_stores)
    place.write_files(cohort_size=9, privacy={"mode": "secure"})

    def breaks(answer: AnswerFunction) -> AnswerFunction:
        trained = 0

        def breaking(data: bytes) -> bytes | None:
            nonlocal trained
            trained += parse_order(data, limit=1 << 30).kind is OrderKind.TRAIN
            if trained == 2:
                raise RuntimeError("the server breaks")
            return answer(data)

        return breaking

    for number in range(crashes):
        with pytest.raises(RuntimeError, match="the server breaks"):
            place.run_here("served", secure=False, spare=1, resume=number > 0, meddle={place.people[0]: breaks})
    outcome = place.run_here("served", secure=False, spare=1, resume=True)
    found = verify(outcome.folder / LEDGER)
    assert found.attempts == 4
    assert outcome.results is not None
    ended = outcome.results["ended"]
    assert ended["step"] == rounds
    if rounds < 3:
        assert ended["reason"] == ATTEMPTS
        assert ended["words"] == (
            "the run ends after 2 rounds: all 4 attempts at rounds that people accepted have been made; more rounds "
            "are a new run, with a new yes"
        )


# A node.


@pytest.mark.parametrize(("attempts", "rate"), [(105, 0.1), (105, 0.5), (500, 0.03125), (7, 1.0), (0, 0.3)])
def test_a_node_s_limit_is_a_quantile_of_what_it_is_asked(attempts: int, rate: float) -> None:
    most = max_times_asked(attempts, sampling_rate=rate)
    exact = Fraction(rate)
    chances = [math.comb(attempts, n) * exact**n * (1 - exact) ** (attempts - n) for n in range(most, attempts + 1)]
    assert sum(chances[1:]) <= RARE
    assert attempts == 0 or sum(chances) > RARE


def ask(ledger: NodeLedger, attempt: int, limits: Limits, *, step: int = 0) -> None:
    order = Order(
        kind=OrderKind.TRAIN, run=RUN, step=step, attempt=attempt, nonce=bytes(16), node=bytes(32), recipe=bytes(32)
    )
    ledger.check_attempt(order, is_accepted=order.step < ROUNDS, limits=limits)
    ledger.add(order, size=1, seconds=0.0, now=datetime(2031, 5, 1, tzinfo=UTC))


@pytest.mark.parametrize("lies", [False, True], ids=["says how many attempts there were", "counts anew for everybody"])
def test_a_node_refuses_more_than_honest_sampling_asks_of_it(tmp_path: Path, lies: bool) -> None:
    """Of 500 attempts in which it is drawn as it should be, of which a liar tells only those that it is asked in."""
    limits = accepted_limits(rounds=ROUNDS, measurements=0, spare_attempts=SPARE, sampling_rate=RATE)
    drawn = np.flatnonzero(np.random.default_rng(1).random(ROUNDS + 400) < RATE).tolist()
    asked = [number if lies else at + 1 for number, at in enumerate(drawn, start=1)]
    expected = limits.updates if lies else sum(at < ROUNDS + SPARE for at in drawn)
    assert expected < len(drawn)
    with closing(NodeLedger(tmp_path)) as ledger:
        ledger.accept(bytes(32))
        for attempt in asked[:expected]:
            ask(ledger, attempt, limits)
        with pytest.raises(Refused, match="above_accepted"):
            ask(ledger, asked[expected], limits)
    with closing(NodeLedger(tmp_path)) as ledger:  # started again, and with a second yes to the same run
        assert ledger.has_sent_all(RUN, limits) == lies
        ledger.accept(bytes(32))
        with pytest.raises(Refused, match="above_accepted"):
            ask(ledger, asked[expected], limits)


# What people are shown.


def test_the_epsilon_that_people_accept_includes_the_spare_attempts(make_cluster: MakeCluster) -> None:
    measured = {"client_wer": {"words": 5, "noise_multiplier": 8.0, "every": 2}, "clients": {"holdout": 0.5}}
    local_cluster = make_cluster(
        content(cohort_size=4, privacy={"mode": "secure", "noise_multiplier": 2.0}, **measured)
    )
    invitation = local_cluster.invite(spare_attempts=3)
    private, rate = invitation.private, 4 / 9
    rounds = repeated(poisson_release(2.0, sampling_rate=rate), 12 + 3)
    pairs = repeated(poisson_release(8.0, sampling_rate=rate), 6 + 3)
    assert invitation.epsilon is not None
    assert invitation.epsilon.rdp == pytest.approx(
        rdp_epsilon(replace(rounds, parts=(*rounds.parts, *pairs.parts)), private.delta)
    )
    assert local_cluster.invitation.epsilon == invitation.epsilon_without_spare
    assert local_cluster.invitation.digest != invitation.digest
    assert invitation.limits == Limits(updates=15, measurements=9, attempts=24)
    text = "\n".join(describe_invitation(invitation))
    assert "for all rounds and word counts together with 3 spare attempts (ε = " in text
    assert "12 rounds, and up to 3 attempts more where rounds are lost, in each of which you are asked" in text
    assert "never more than 15, and 9 times for those numbers: above that your machine refuses" in text


@pytest.mark.parametrize(("mode", "spare"), [("seeded", 1), ("secure", -1)])
def test_spare_attempts_that_make_no_sense_are_refused(make_cluster: MakeCluster, mode: str, spare: int) -> None:
    local_cluster = make_cluster(content(privacy={"mode": mode}))
    with pytest.raises(InputError, match=f"spare_attempts={spare}: "):
        local_cluster.invite(spare_attempts=spare)


def test_a_node_answers_as_often_as_it_says(make_cluster: MakeCluster) -> None:
    local_cluster = make_cluster(content(steps=2, cohort_size=9, privacy={"mode": "secure"}))
    local_cluster.invitation = local_cluster.invite(spare_attempts=1)
    anna = local_cluster.people[0]
    local_cluster.welcome(anna)
    found: list[Any] = [local_cluster.ask(anna, local_cluster.train(anna, step=min(step, 1))).code for step in range(4)]
    assert found == [AnswerCode.DONE] * 3 + [AnswerCode.ABOVE_ACCEPTED]
