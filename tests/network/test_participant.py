"""A participant does what its user accepted, once, for the server that the authority vouches for; and says no words."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.network.conftest import MakeCluster
from tests.network.local_cluster import NAMES, NOW, RUN, LocalCluster, content, recipe_of

from sottovoce.base.errors import InputError
from sottovoce.network import keys
from sottovoce.network.invitation import SecureSums, pack_invitation
from sottovoce.network.messages import OVERHEAD, AnswerCode, Order, OrderAnswer, OrderKind, fresh_nonce, open_answer
from sottovoce.network.model_transfer import read_round_model
from sottovoce.network.node import ledger, training
from sottovoce.network.node.home import leave_federation, pause_node, resume_node
from sottovoce.network.node.ledger import NodeLedger, Quota, describe_node
from sottovoce.network.secure_sum.terms import Phase
from sottovoce.network.secure_sum.words import read_update
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.noise_shares import NoiseShares

ANNA, BERT = NAMES[:2]


@pytest.fixture
def local_cluster(make_cluster: MakeCluster) -> LocalCluster:
    return make_cluster()


def code(local_cluster: LocalCluster, order: Order, **options: Any) -> AnswerCode:
    """What Anna makes of an order; what is not done has no payload."""
    answer = local_cluster.ask(ANNA, order, **options)
    assert answer.code is AnswerCode.DONE or answer.payload == b""
    return answer.code


def written(local_cluster: LocalCluster) -> list[Mapping[str, Any]]:
    """All that Anna's own ledger says."""
    return list(read_chain(local_cluster.place / ANNA / "home" / "ledger.jsonl").records)


# Who is listened to.


def test_a_participant_joins_step_by_step(local_cluster: LocalCluster) -> None:
    participant = local_cluster.join(ANNA)
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.UNEXPECTED
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.NOT_ACCEPTED
    assert participant.invited is not None
    assert participant.invited.digest == local_cluster.invitation.digest
    participant.accept(participant.invited.digest)
    terms = local_cluster.ask(ANNA, local_cluster.terms(ANNA))
    assert (terms.code, terms.payload) == (AnswerCode.DONE, b"")
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.UNEXPECTED  # without the start model
    assert code(local_cluster, local_cluster.order(ANNA, OrderKind.START, local_cluster.start_bytes)) is AnswerCode.DONE
    assert local_cluster.ask(ANNA, local_cluster.terms(ANNA)).payload == local_cluster.invitation.start
    update = read_update(local_cluster.ask(ANNA, local_cluster.train(ANNA)).payload, local_cluster.plan)
    assert np.any(update)
    assert local_cluster.said == []


def test_the_start_model_is_kept(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    local_cluster.join(ANNA)
    assert local_cluster.ask(ANNA, local_cluster.terms(ANNA)).payload == local_cluster.invitation.start
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=2 * OVERHEAD))
def test_any_bytes_are_one_refusal(local_cluster: LocalCluster, data: bytes) -> None:
    if ANNA not in local_cluster.joined:
        local_cluster.welcome(ANNA)
    sent = local_cluster.joined[ANNA].answer(data)
    assert len(sent) == OVERHEAD
    assert sent[5] == AnswerCode.UNREADABLE


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(kind=st.sampled_from([kind for kind in OrderKind if kind is not OrderKind.END]), payload=st.binary(max_size=300))
def test_any_signed_payload_is_one_answer(local_cluster: LocalCluster, kind: OrderKind, payload: bytes) -> None:
    """Also from the server itself."""
    if ANNA not in local_cluster.joined:
        local_cluster.welcome(ANNA)
    assert code(local_cluster, local_cluster.order(ANNA, kind, payload, attempt=10**6)) in {
        AnswerCode.UNREADABLE,
        AnswerCode.UNTRUSTED,
        AnswerCode.UNEXPECTED,
        AnswerCode.NOT_ACCEPTED,
    }


def test_nobody_elses_orders_are_followed(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    stranger = ec.generate_private_key(ec.SECP384R1())
    for order in (
        local_cluster.train(ANNA),
        local_cluster.terms(ANNA),
        local_cluster.order(ANNA, OrderKind.START, local_cluster.start_bytes),
    ):
        assert code(local_cluster, order, key=stranger) is AnswerCode.UNTRUSTED
    assert code(local_cluster, local_cluster.train(ANNA), key=local_cluster.key(BERT)) is AnswerCode.UNTRUSTED


def test_another_authoritys_server_is_not_trusted(local_cluster: LocalCluster, tmp_path: Path) -> None:
    local_cluster.join(ANNA)
    keys.make_authority(tmp_path / "authority", now=NOW)
    keys.make_server(tmp_path / "server", authority=tmp_path / "authority", hosts=["localhost"], now=NOW)
    letter = pack_invitation(local_cluster.invitation, (tmp_path / "server" / "orders.pem").read_bytes())
    theirs = keys.load_private_key(tmp_path / "server" / "orders.key")
    assert code(local_cluster, local_cluster.order(ANNA, OrderKind.TERMS, letter), key=theirs) is AnswerCode.UNTRUSTED
    assert local_cluster.said == ["the server's orders are not signed under the authority that was given"]


@pytest.mark.parametrize("days", [-1, 400])
def test_a_wrong_clock_is_said_where_it_belongs(local_cluster: LocalCluster, days: int) -> None:
    local_cluster.join(ANNA, now=lambda: NOW + timedelta(days=days))
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.UNTRUSTED
    assert "set the clock, or have the certificate renewed" in local_cluster.said[0]


def test_a_renewed_certificate_is_followed(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    keys.renew_keys(local_cluster.place / "server", authority=local_cluster.place / "authority", now=NOW)
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.DONE
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE


def test_its_user_hears_once_that_the_servers_certificate_expires(local_cluster: LocalCluster) -> None:
    days = [0]
    local_cluster.join(ANNA, now=lambda: NOW + timedelta(days=days[0])).accept(local_cluster.invitation.digest)
    for days[0], lines in ((0, 0), (334, 0), (336, 1), (364, 1)):
        assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.DONE
        assert len(local_cluster.said) == lines
    assert local_cluster.said[0].startswith("the server's certificate expires on 2032-04-30, 29 days from now: ")
    keys.renew_keys(
        local_cluster.place / "server", authority=local_cluster.place / "authority", now=NOW + timedelta(days=364)
    )
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.DONE
    assert len(local_cluster.said) == 1


def test_an_order_for_somebody_else_is_answered_in_its_own_name(local_cluster: LocalCluster) -> None:
    participant = local_cluster.welcome(ANNA)
    order = local_cluster.train(BERT)
    sent = participant.answer(order.signed(local_cluster.orders_key))
    own = replace(order, node=keys.fingerprint(local_cluster.key(ANNA).public_key()))
    assert (
        open_answer(sent, order=own, key=local_cluster.key(ANNA).public_key(), limit=0).code is AnswerCode.MISDIRECTED
    )


def test_who_is_not_on_the_roster_is_not_meant(local_cluster: LocalCluster, make_cluster: MakeCluster) -> None:
    local_cluster.join(ANNA)
    local_cluster.people = [name for name in local_cluster.people if name != ANNA]
    local_cluster.invitation = local_cluster.invite()
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.MISDIRECTED


# What is accepted.


@pytest.mark.parametrize(
    "change",
    [
        {"privacy": {"clip_bound": 0.1}},
        {"privacy": {"noise_multiplier": 7.0}},
        {"steps": 13},
        {"cohort_size": 5},
        {"local": {"batch_seconds": 2, "lr": 0.1, "local_steps": 3}},
    ],
    ids=["clip bound", "noise", "rounds", "cohort", "local steps"],
)
def test_what_was_not_accepted_is_not_done(local_cluster: LocalCluster, change: dict[str, Any]) -> None:
    participant = local_cluster.welcome(ANNA)
    accepted = local_cluster.invitation
    local_cluster.invitation = local_cluster.invite(recipe_of(content(**change)))
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.NOT_ACCEPTED
    assert participant.invited is not None
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.UNEXPECTED
    # A header that names what was accepted, around a letter that says something else:
    assert code(local_cluster, local_cluster.terms(ANNA, recipe=accepted.digest)) is AnswerCode.UNREADABLE
    local_cluster.invitation = accepted
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE


def test_secure_sums_and_their_least_are_part_of_it(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    for changed in (SecureSums(least=3), SecureSums(least=4), SecureSums(least=3, neighbours=4)):
        local_cluster.invitation = local_cluster.invite(secure=changed)
        assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.NOT_ACCEPTED


def test_no_more_rounds_than_were_accepted(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    assert code(local_cluster, local_cluster.train(ANNA, step=11)) is AnswerCode.DONE
    assert code(local_cluster, local_cluster.train(ANNA, step=12)) is AnswerCode.NOT_ACCEPTED


def test_an_acceptance_is_for_one_run(local_cluster: LocalCluster) -> None:
    participant = local_cluster.welcome(ANNA)
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE
    other = b"s" * 16
    assert code(local_cluster, local_cluster.train(ANNA, run=other)) is AnswerCode.NOT_ACCEPTED
    participant.accept(local_cluster.invitation.digest)
    assert code(local_cluster, local_cluster.train(ANNA, run=other)) is AnswerCode.DONE
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.NOT_ACCEPTED


def test_in_a_release_so_many_rounds_are_so_many_updates(make_cluster: MakeCluster) -> None:
    """A server that counts attempts instead of steps gets no more of them."""
    local_cluster = make_cluster(content(steps=2, privacy={"mode": "secure"}))
    local_cluster.welcome(ANNA)
    assert code(local_cluster, local_cluster.train(ANNA, step=0)) is AnswerCode.DONE
    assert code(local_cluster, local_cluster.train(ANNA, step=0)) is AnswerCode.DONE
    assert code(local_cluster, local_cluster.train(ANNA, step=1)) is AnswerCode.ABOVE_ACCEPTED
    anna = local_cluster.join(ANNA)
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.ABOVE_ACCEPTED  # nor does it take part any more
    assert local_cluster.said[-1] == "all that was accepted for this run has been sent: nothing more is answered in it"
    anna.accept(local_cluster.invitation.digest)  # of the run that has had all of it: a second yes does not count anew
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.ABOVE_ACCEPTED
    assert code(local_cluster, local_cluster.train(ANNA, step=1)) is AnswerCode.UNEXPECTED


# Once.


def test_an_attempt_is_answered_once(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    order = local_cluster.train(ANNA)
    assert code(local_cluster, order) is AnswerCode.DONE
    assert code(local_cluster, order) is AnswerCode.REPEATED
    for again in ({"nonce": b"0" * 16}, {"step": 3}, {"attempt": 0}, {"payload": bytes(len(order.payload))}):
        assert code(local_cluster, replace(order, **again)) is AnswerCode.REPEATED
    local_cluster.join(ANNA)
    local_cluster.ask(ANNA, local_cluster.terms(ANNA))
    assert code(local_cluster, order) is AnswerCode.REPEATED
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE


def test_what_was_sent_is_written_down(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    local_cluster.ask(ANNA, local_cluster.train(ANNA, step=3))
    home = local_cluster.place / ANNA / "home"
    records = written(local_cluster)
    assert records[0] == {"accepted": local_cluster.invitation.digest.hex()}
    sent = records[1]
    assert (sent["answered"], sent["step"], sent["attempt"], sent["day"]) == ("train", 3, 1, "2031-05-01")
    assert sent["bytes"] == 8 * local_cluster.layout.dimension
    assert (home / "ledger.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_never_finished_is_cut_off(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    order = local_cluster.train(ANNA)
    local_cluster.ask(ANNA, order)
    local_cluster.joined[ANNA].close()
    with (local_cluster.place / ANNA / "home" / "ledger.jsonl").open("ab") as file:
        file.write(b'{"hash":"torn')
    local_cluster.join(ANNA)
    local_cluster.ask(ANNA, local_cluster.terms(ANNA))
    assert code(local_cluster, order) is AnswerCode.REPEATED


def test_a_changed_record_is_refused(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    local_cluster.ask(ANNA, local_cluster.train(ANNA))
    local_cluster.joined[ANNA].close()
    path = local_cluster.place / ANNA / "home" / "ledger.jsonl"
    path.write_text(path.read_text().replace('"attempt":1', '"attempt":0'))
    with pytest.raises(InputError, match="changed"):
        local_cluster.join(ANNA)


def test_a_record_of_something_else_is_refused_and_let_go(local_cluster: LocalCluster) -> None:
    home = local_cluster.place / ANNA / "home"
    home.mkdir()
    writer = ledger.ChainWriter(home / "ledger.jsonl")
    writer.append({"something": "else"})
    writer.close()
    for _ in range(2):  # the second time nobody holds the file
        with pytest.raises(InputError, match="line 1 is no record of this release"):
            NodeLedger(home)


def test_two_processes_cannot_be_one_node(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    with pytest.raises(InputError, match="one writer at a time"):
        NodeLedger(local_cluster.place / ANNA / "home")


def test_what_cannot_be_written_down_does_not_leave(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_cluster.welcome(ANNA)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "ledger.jsonl")

    with monkeypatch.context() as patched:
        patched.setattr(ledger.ChainWriter, "append", full)
        assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.UNABLE
    assert "No space left on device" in local_cluster.said[0]
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE


# What its user wants.


def test_pausing_and_leaving(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    home = local_cluster.place / ANNA / "home"
    pause_node(home)
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.PAUSED
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.PAUSED
    resume_node(home)
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE
    leave_federation(home)
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.LEFT
    with pytest.raises(InputError, match="has left for good"):
        resume_node(home)
    local_cluster.join(ANNA)
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.LEFT


def test_who_is_paused_or_has_left_is_not_here(local_cluster: LocalCluster) -> None:
    anna, home = local_cluster.welcome(ANNA), local_cluster.place / ANNA / "home"
    assert anna.is_here()
    pause_node(home)
    assert not anna.is_here()
    resume_node(home)
    assert anna.is_here()
    assert not anna.has_left
    leave_federation(home)
    assert not anna.is_here()
    assert anna.has_left


@pytest.mark.parametrize("quota", [Quota(rounds=2), Quota(seconds=1e-9)], ids=["rounds", "seconds"])
def test_above_a_days_limit_of_training_zeros_are_sent(local_cluster: LocalCluster, quota: Quota) -> None:
    """To the server they are an update like any other, and the node is here as before."""
    today = [NOW]
    anna = local_cluster.welcome(ANNA, quota=quota, now=lambda: today[0])

    def sends_something() -> bool:
        answer = local_cluster.ask(ANNA, local_cluster.train(ANNA))
        assert (answer.code, len(answer.payload)) == (AnswerCode.DONE, 8 * local_cluster.layout.dimension)
        return any(answer.payload)

    before = quota.rounds or 1
    assert [sends_something() for _ in range(before + 1)] == [True] * before + [False]
    assert anna.is_here()
    local_cluster.join(ANNA, quota=quota, now=lambda: today[0])
    local_cluster.ask(ANNA, local_cluster.terms(ANNA))
    assert not sends_something()
    assert local_cluster.said == ["today's limit is reached: what is sent is zeros"] * 2
    today[0] = NOW + timedelta(days=1)
    assert sends_something()
    records = [record for record in written(local_cluster) if "answered" in record]
    assert [record.get("idle", False) for record in records] == [False] * before + [True, True, False]


def test_above_a_days_limit_of_bytes_nothing_is_sent_and_nobody_is_here(local_cluster: LocalCluster) -> None:
    today, quota = [NOW], Quota(bytes=2 * 8 * local_cluster.layout.dimension + 1)
    anna = local_cluster.welcome(ANNA, quota=quota, now=lambda: today[0])
    assert [code(local_cluster, local_cluster.train(ANNA)) for _ in range(3)] == [
        AnswerCode.DONE,
        AnswerCode.DONE,
        AnswerCode.OVER_QUOTA,
    ]
    assert not anna.is_here()
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.OVER_QUOTA
    anna = local_cluster.join(ANNA, quota=quota, now=lambda: today[0])
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.OVER_QUOTA
    today[0] = NOW + timedelta(days=1)
    assert anna.is_here()
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.DONE
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE


# The end of a run.


def end(local_cluster: LocalCluster, **changes: Any) -> Order:
    return local_cluster.order(ANNA, OrderKind.END, step=12, **changes)


def test_a_run_that_is_over_is_noted_and_nothing_of_it_is_answered_any_more(local_cluster: LocalCluster) -> None:
    anna = local_cluster.welcome(ANNA)
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE
    assert code(local_cluster, end(local_cluster)) is AnswerCode.DONE
    assert anna.ended == 12
    note = written(local_cluster)[-1]
    assert (note["ended"], note["rounds"], note["day"]) == (RUN.hex(), 12, "2031-05-01")
    for _ in range(2):  # the second time after a new start
        assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.NOT_ACCEPTED
        assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.UNEXPECTED
        assert code(local_cluster, end(local_cluster)) is AnswerCode.UNEXPECTED
        local_cluster.join(ANNA)


def test_what_a_node_has_done_is_told_to_its_user(local_cluster: LocalCluster) -> None:
    home = local_cluster.place / ANNA / "home"
    with pytest.raises(InputError, match="no node has joined from here"):
        describe_node(home)
    local_cluster.welcome(ANNA, quota=Quota(rounds=2))
    for _ in range(3):
        local_cluster.ask(ANNA, local_cluster.train(ANNA))
    local_cluster.ask(ANNA, end(local_cluster))
    pause_node(home)
    seconds = sum(record.get("seconds", 0) for record in written(local_cluster))
    digest = local_cluster.invitation.digest.hex()
    assert describe_node(home) == [
        f"{home}: paused",
        f"accepted {digest}",
        f"2031-05-01: the run of {digest} was over after 12 rounds",
        f"2031-05-01: trained in 2 rounds for {seconds:,.1f} s; zeros in 1 more; "
        f"sent {3 * 8 * local_cluster.layout.dimension / 1e6:,.2f} MB",
    ]


def test_another_run_of_the_same_recipe_needs_another_yes_and_an_old_end_does_not_end_it(
    local_cluster: LocalCluster,
) -> None:
    anna = local_cluster.welcome(ANNA)
    first = end(local_cluster)
    assert local_cluster.ask(ANNA, first).code is AnswerCode.DONE
    anna.ended = None
    other = {"run": b"s" * 16}
    assert code(local_cluster, local_cluster.terms(ANNA, **other)) is AnswerCode.NOT_ACCEPTED
    assert anna.invited is not None
    anna.accept(anna.invited.digest)
    assert code(local_cluster, local_cluster.terms(ANNA, **other)) is AnswerCode.DONE
    assert code(local_cluster, first) is AnswerCode.UNEXPECTED  # a replay
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.NOT_ACCEPTED  # of old terms
    assert code(local_cluster, first) is AnswerCode.UNEXPECTED
    assert anna.ended is None
    assert code(local_cluster, local_cluster.train(ANNA, **other)) is AnswerCode.DONE
    assert code(local_cluster, end(local_cluster, **other)) is AnswerCode.DONE
    assert anna.ended == 12


def test_nobody_but_its_server_ends_a_node(local_cluster: LocalCluster) -> None:
    anna = local_cluster.welcome(ANNA)
    stranger = ec.generate_private_key(ec.SECP384R1())
    assert code(local_cluster, end(local_cluster), key=stranger) is AnswerCode.UNTRUSTED
    assert code(local_cluster, end(local_cluster), key=local_cluster.key(BERT)) is AnswerCode.UNTRUSTED
    for changes, why in (
        ({"run": b"s" * 16}, AnswerCode.UNEXPECTED),
        ({"recipe": bytes(32)}, AnswerCode.UNEXPECTED),
        ({"payload": b"?"}, AnswerCode.UNEXPECTED),
    ):
        assert code(local_cluster, end(local_cluster, **changes)) is why
    to_bert = replace(end(local_cluster), node=keys.fingerprint(local_cluster.key(BERT).public_key()))
    assert anna.answer(to_bert.signed(local_cluster.orders_key))[5] == AnswerCode.MISDIRECTED
    local_cluster.join(ANNA)
    assert code(local_cluster, end(local_cluster)) is AnswerCode.UNEXPECTED  # before it knows whose orders to follow
    assert anna.ended is None


def test_a_quota_of_nothing_is_a_pause() -> None:
    with pytest.raises(InputError, match="rounds=0, expected a positive number, or none; pausing is for zero"):
        Quota(rounds=0)


# What leaves.


def test_a_failure_in_training_is_zeros(local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    local_cluster.welcome(ANNA)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("'my secret words' cannot be heard")

    monkeypatch.setattr(training, "sum_part", fails)
    answer = local_cluster.ask(ANNA, local_cluster.train(ANNA))
    assert answer.code is AnswerCode.DONE
    assert answer.payload == bytes(8 * local_cluster.layout.dimension)
    assert local_cluster.said == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_model_that_breaks_training_gives_zeros_or_a_clipped_update(
    local_cluster: LocalCluster, value: float
) -> None:
    local_cluster.welcome(ANNA)
    model_P = local_cluster.layout.zeros() + value
    answer = local_cluster.ask(ANNA, local_cluster.train(ANNA, model_P))
    assert answer.code is AnswerCode.DONE
    cells = read_update(answer.payload, local_cluster.plan).view("<i8").astype(np.float64)
    assert np.linalg.norm(cells * (local_cluster.plan.grid or 0)) <= local_cluster.plan.clip_bound


def test_a_model_of_another_shape_is_unreadable(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    order = local_cluster.train(ANNA)
    assert code(local_cluster, replace(order, payload=order.payload[:-4])) is AnswerCode.UNREADABLE
    assert code(local_cluster, replace(order, payload=order.payload + bytes(4))) is AnswerCode.UNREADABLE
    assert code(local_cluster, order) is AnswerCode.DONE  # nothing was written down for those


def test_an_order_larger_than_agreed_is_not_read(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    participant = local_cluster.join(ANNA, largest_order=1000)
    assert participant.answer(local_cluster.train(ANNA).signed(local_cluster.orders_key))[5] == AnswerCode.UNREADABLE


def test_an_update_never_exceeds_its_bound(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    cells = (
        read_update(local_cluster.ask(ANNA, local_cluster.train(ANNA)).payload, local_cluster.plan)
        .view("<i8")
        .astype(np.float64)
    )
    assert 0 < np.linalg.norm(cells * (local_cluster.plan.grid or 0)) <= local_cluster.plan.clip_bound


# What a server might have a node load.


def test_another_start_model_than_was_accepted_is_refused(local_cluster: LocalCluster) -> None:
    participant = local_cluster.join(ANNA)
    participant.accept(local_cluster.invitation.digest)
    local_cluster.ask(ANNA, local_cluster.terms(ANNA))
    changed = local_cluster.start_bytes[:-1] + bytes([local_cluster.start_bytes[-1] ^ 1])
    assert code(local_cluster, local_cluster.order(ANNA, OrderKind.START, changed)) is AnswerCode.UNREADABLE
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.UNEXPECTED


@pytest.mark.parametrize("content", [b"", b"x" * 15, b"\xff" * 64, bytes(16)])
def test_a_start_model_that_is_none_is_said(local_cluster: LocalCluster, content: bytes) -> None:
    local_cluster.start_bytes = content
    local_cluster.invitation = local_cluster.invite()
    local_cluster.join(ANNA).accept(local_cluster.invitation.digest)
    local_cluster.ask(ANNA, local_cluster.terms(ANNA))
    assert code(local_cluster, local_cluster.order(ANNA, OrderKind.START, content)) is AnswerCode.UNABLE
    assert len(local_cluster.said) == 1
    assert not (local_cluster.place / ANNA / "home" / "start").exists()


def test_a_kept_start_model_that_was_changed_is_asked_for_again(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    kept = local_cluster.place / ANNA / "home" / "start" / local_cluster.invitation.start.hex()
    kept.write_bytes(kept.read_bytes()[:-1])
    local_cluster.join(ANNA)
    assert local_cluster.ask(ANNA, local_cluster.terms(ANNA)).payload == b""
    assert code(local_cluster, local_cluster.order(ANNA, OrderKind.START, local_cluster.start_bytes)) is AnswerCode.DONE
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE


# Sums that the server cannot open.


@pytest.fixture
def secure(make_cluster: MakeCluster) -> LocalCluster:
    local_cluster = make_cluster(secure=SecureSums(least=3))
    for name in local_cluster.people[:5]:
        local_cluster.welcome(name)
    return local_cluster


def begin(local_cluster: LocalCluster, count: int = 5) -> dict[str, int]:
    """So many people train; when that was."""
    local_cluster.attempt += 1
    when = {"step": 2, "attempt": local_cluster.attempt}
    for name in local_cluster.people[:count]:
        answer = local_cluster.ask(name, replace(local_cluster.train(name), **when))
        assert (answer.code, answer.payload) == (AnswerCode.DONE, b"")
    local_cluster.attempt = when["attempt"]
    return when


def open_update(local_cluster: LocalCluster, name: str) -> Any:
    """What somebody has trained, which no answer has shown."""
    service = local_cluster.joined[name]._service
    assert service is not None
    assert service.secure_sum is not None
    return service.secure_sum._words


@pytest.mark.parametrize("phase", [*Phase, None], ids=lambda phase: "nobody" if phase is None else phase.name.lower())
def test_who_drops_out_is_left_out_of_the_sum(secure: LocalCluster, phase: Phase | None) -> None:
    when = begin(secure)
    updates = {name: open_update(secure, name) for name in secure.people[:5]}
    gone = secure.people[0]
    if phase is not None:
        secure.gone[gone] = phase
    total = secure.opened(list(range(5)), **when)
    counted = [name for name in updates if name != gone or phase is None or phase > Phase.MASKED]
    assert np.array_equal(total, sum(updates[name] for name in counted))


def test_noise_of_its_own_is_in_what_is_masked(make_cluster: MakeCluster) -> None:
    """A share of so many cells in every coordinate: their mean square has a relative deviation of √(2/n)."""
    local_cluster = make_cluster(content(privacy={"mode": "secure"}, cohort_size=9), secure=SecureSums(least=5))
    plain = local_cluster.welcome(ANNA)
    service = plain._service
    assert service is not None
    assert service.training is not None
    order = local_cluster.train(ANNA)
    bare = service.training.update(read_round_model(order.payload, local_cluster.layout), step=0).view("<i8")
    local_cluster.invitation = local_cluster.invite(noise_shares=NoiseShares(most=9, least=5, colluding=1))
    local_cluster.welcome(ANNA)
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE
    share = (open_update(local_cluster, ANNA).view("<i8") - bare).astype(np.float64)
    variance = local_cluster.invitation.plan(local_cluster.layout).noise.share_variance
    assert abs(np.mean(share**2) / variance - 1) < 8 * (2 / len(share)) ** 0.5


def test_an_update_is_masked_once(secure: LocalCluster) -> None:
    when = begin(secure)
    secure.opened(list(range(5)), **when)
    assert len(open_update(secure, ANNA)) == 0  # nor is it kept
    for kind in (OrderKind.KEYS, OrderKind.SHARES, OrderKind.MASKED, OrderKind.SURVIVORS, OrderKind.UNMASK):
        assert code(secure, secure.order(ANNA, kind, b"", **when)) is AnswerCode.UNEXPECTED
    assert code(secure, replace(secure.train(ANNA), **when)) is AnswerCode.REPEATED


def test_an_order_that_is_not_safe_is_told_to_its_user_once(secure: LocalCluster) -> None:
    when = begin(secure)
    for _ in range(4):
        code(secure, secure.order(ANNA, OrderKind.KEYS, **when))
    assert secure.said == [
        "round 3: the server's order to KEYS was not followed, as it would not be safe (out_of_turn): nothing more "
        "leaves this node in this attempt"
    ]


def test_of_many_threads_one_has_its_attempt_answered(local_cluster: LocalCluster) -> None:
    """Each sees a node that has not answered yet, unless orders are followed one at a time."""
    local_cluster.welcome(ANNA)
    order = local_cluster.train(ANNA)
    with ThreadPoolExecutor(4) as threads:
        answers = list(
            threads.map(lambda _: local_cluster.ask(ANNA, replace(order, nonce=fresh_nonce())).code, range(4))
        )
    assert sorted(answers) == [AnswerCode.DONE, *[AnswerCode.REPEATED] * 3]


def test_another_attempt_has_no_part_in_a_sum(secure: LocalCluster) -> None:
    when = begin(secure)
    assert (
        code(secure, secure.order(ANNA, OrderKind.KEYS, step=2, attempt=when["attempt"] + 1)) is AnswerCode.UNEXPECTED
    )
    assert code(secure, secure.order(ANNA, OrderKind.KEYS, step=3, attempt=when["attempt"])) is AnswerCode.UNEXPECTED
    assert code(secure, secure.order(ANNA, OrderKind.KEYS, **when)) is AnswerCode.DONE


def test_zeros_above_a_limit_are_masked_like_anything(secure: LocalCluster) -> None:
    secure.welcome(ANNA, quota=Quota(rounds=1))
    for is_idle in (False, True):
        when = begin(secure)
        updates = {name: open_update(secure, name) for name in secure.people[:5]}
        assert (not updates[ANNA].any()) is is_idle
        assert np.array_equal(secure.opened(list(range(5)), **when), sum(updates.values()))


def test_nobody_goes_in_the_middle_of_a_sum_because_of_its_bytes(secure: LocalCluster) -> None:
    anna = secure.welcome(ANNA, quota=Quota(bytes=8 * secure.layout.dimension))
    when = begin(secure)
    secure.gone[ANNA] = Phase.UNMASK
    secure.opened(list(range(5)), **when)
    assert anna.is_here()  # its vector has left, and others need its shares
    assert (
        code(secure, secure.order(ANNA, OrderKind.UNMASK, b"", **when)) is AnswerCode.UNEXPECTED
    )  # it is over for her, too
    assert not anna.is_here()


def test_a_server_never_gets_the_bare_update(secure: LocalCluster) -> None:
    begin(secure)
    answer: OrderAnswer = secure.ask(ANNA, secure.train(ANNA, step=3))
    assert (answer.code, answer.payload) == (AnswerCode.DONE, b"")
