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
from tests.deployment.conftest import Settle
from tests.deployment.village import NAMES, NOW, RUN, Village, content, recipe_of

from sottovoce.base.errors import InputError
from sottovoce.deployment import keys, own_ledger, own_training
from sottovoce.deployment.invitation import SecureSums, sealed_letter
from sottovoce.deployment.messages import OVERHEAD, Answer, Code, Kind, Order, open_answer
from sottovoce.deployment.own_home import leave, pause, resume
from sottovoce.deployment.own_ledger import OwnLedger, Quota, account
from sottovoce.deployment.payloads import read_model, read_words
from sottovoce.deployment.sum_terms import Phase
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.noise_shares import NoiseShares

ANNA, BERT = NAMES[:2]


@pytest.fixture
def village(settle: Settle) -> Village:
    return settle()


def code(village: Village, order: Order, **options: Any) -> Code:
    """What Anna makes of an order; what is not done has no payload."""
    answer = village.ask(ANNA, order, **options)
    assert answer.code is Code.DONE or answer.payload == b""
    return answer.code


def written(village: Village) -> list[Mapping[str, Any]]:
    """All that Anna's own ledger says."""
    return list(read_chain(village.place / ANNA / "home" / "ledger.jsonl").records)


# Who is listened to.


def test_a_participant_joins_step_by_step(village: Village) -> None:
    participant = village.join(ANNA)
    assert code(village, village.train(ANNA)) is Code.UNEXPECTED
    assert code(village, village.terms(ANNA)) is Code.NOT_ACCEPTED
    assert participant.invited is not None
    assert participant.invited.digest == village.invitation.digest
    participant.accept(participant.invited.digest)
    terms = village.ask(ANNA, village.terms(ANNA))
    assert (terms.code, terms.payload) == (Code.DONE, b"")
    assert code(village, village.train(ANNA)) is Code.UNEXPECTED  # without the start model
    assert code(village, village.order(ANNA, Kind.START, village.start_bytes)) is Code.DONE
    assert village.ask(ANNA, village.terms(ANNA)).payload == village.invitation.start
    update = read_words(village.ask(ANNA, village.train(ANNA)).payload, village.plan)
    assert np.any(update)
    assert village.said == []


def test_the_start_model_is_kept(village: Village) -> None:
    village.welcome(ANNA)
    village.join(ANNA)
    assert village.ask(ANNA, village.terms(ANNA)).payload == village.invitation.start
    assert code(village, village.train(ANNA)) is Code.DONE


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=2 * OVERHEAD))
def test_any_bytes_are_one_refusal(village: Village, data: bytes) -> None:
    if ANNA not in village.joined:
        village.welcome(ANNA)
    sent = village.joined[ANNA].answer(data)
    assert len(sent) == OVERHEAD
    assert sent[5] == Code.UNREADABLE


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(kind=st.sampled_from([kind for kind in Kind if kind is not Kind.END]), payload=st.binary(max_size=300))
def test_any_signed_payload_is_one_answer(village: Village, kind: Kind, payload: bytes) -> None:
    """Also from the server itself."""
    if ANNA not in village.joined:
        village.welcome(ANNA)
    assert code(village, village.order(ANNA, kind, payload, attempt=10**6)) in {
        Code.UNREADABLE,
        Code.UNTRUSTED,
        Code.UNEXPECTED,
        Code.NOT_ACCEPTED,
    }


def test_nobody_elses_orders_are_followed(village: Village) -> None:
    village.welcome(ANNA)
    stranger = ec.generate_private_key(ec.SECP384R1())
    for order in (village.train(ANNA), village.terms(ANNA), village.order(ANNA, Kind.START, village.start_bytes)):
        assert code(village, order, key=stranger) is Code.UNTRUSTED
    assert code(village, village.train(ANNA), key=village.key(BERT)) is Code.UNTRUSTED


def test_another_authoritys_server_is_not_trusted(village: Village, tmp_path: Path) -> None:
    village.join(ANNA)
    keys.make_authority(tmp_path / "authority", now=NOW)
    keys.make_server(tmp_path / "server", authority=tmp_path / "authority", hosts=["localhost"], now=NOW)
    letter = sealed_letter(village.invitation, (tmp_path / "server" / "orders.pem").read_bytes())
    theirs = keys.load_private_key(tmp_path / "server" / "orders.key")
    assert code(village, village.order(ANNA, Kind.TERMS, letter), key=theirs) is Code.UNTRUSTED
    assert village.said == ["the server's orders are not signed under the authority that was given"]


@pytest.mark.parametrize("days", [-1, 400])
def test_a_wrong_clock_is_said_where_it_belongs(village: Village, days: int) -> None:
    village.join(ANNA, now=lambda: NOW + timedelta(days=days))
    assert code(village, village.terms(ANNA)) is Code.UNTRUSTED
    assert "set the clock, or have the certificate renewed" in village.said[0]


def test_a_renewed_certificate_is_followed(village: Village) -> None:
    village.welcome(ANNA)
    keys.renew(village.place / "server", authority=village.place / "authority", now=NOW)
    assert code(village, village.terms(ANNA)) is Code.DONE
    assert code(village, village.train(ANNA)) is Code.DONE


def test_its_user_hears_once_that_the_servers_certificate_expires(village: Village) -> None:
    days = [0]
    village.join(ANNA, now=lambda: NOW + timedelta(days=days[0])).accept(village.invitation.digest)
    for days[0], lines in ((0, 0), (334, 0), (336, 1), (364, 1)):
        assert code(village, village.terms(ANNA)) is Code.DONE
        assert len(village.said) == lines
    assert village.said[0].startswith("the server's certificate expires on 2032-04-30, 29 days from now: ")
    keys.renew(village.place / "server", authority=village.place / "authority", now=NOW + timedelta(days=364))
    assert code(village, village.terms(ANNA)) is Code.DONE
    assert len(village.said) == 1


def test_an_order_for_somebody_else_is_answered_in_its_own_name(village: Village) -> None:
    participant = village.welcome(ANNA)
    order = village.train(BERT)
    sent = participant.answer(order.signed(village.orders_key))
    own = replace(order, node=keys.fingerprint(village.key(ANNA).public_key()))
    assert open_answer(sent, order=own, key=village.key(ANNA).public_key(), limit=0).code is Code.MISDIRECTED


def test_who_is_not_on_the_roster_is_not_meant(village: Village, settle: Settle) -> None:
    village.join(ANNA)
    village.people = [name for name in village.people if name != ANNA]
    village.invitation = village.invite()
    assert code(village, village.terms(ANNA)) is Code.MISDIRECTED


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
def test_what_was_not_accepted_is_not_done(village: Village, change: dict[str, Any]) -> None:
    participant = village.welcome(ANNA)
    accepted = village.invitation
    village.invitation = village.invite(recipe_of(content(**change)))
    assert code(village, village.terms(ANNA)) is Code.NOT_ACCEPTED
    assert participant.invited is not None
    assert code(village, village.train(ANNA)) is Code.UNEXPECTED
    # A header that names what was accepted, around a letter that says something else:
    assert code(village, village.terms(ANNA, recipe=accepted.digest)) is Code.UNREADABLE
    village.invitation = accepted
    assert code(village, village.train(ANNA)) is Code.DONE


def test_secure_sums_and_their_least_are_part_of_it(village: Village) -> None:
    village.welcome(ANNA)
    for changed in (SecureSums(least=3), SecureSums(least=4), SecureSums(least=3, neighbours=4)):
        village.invitation = village.invite(secure=changed)
        assert code(village, village.terms(ANNA)) is Code.NOT_ACCEPTED


def test_no_more_rounds_than_were_accepted(village: Village) -> None:
    village.welcome(ANNA)
    assert code(village, village.train(ANNA, step=11)) is Code.DONE
    assert code(village, village.train(ANNA, step=12)) is Code.NOT_ACCEPTED


def test_an_acceptance_is_for_one_run(village: Village) -> None:
    participant = village.welcome(ANNA)
    assert code(village, village.train(ANNA)) is Code.DONE
    other = b"s" * 16
    assert code(village, village.train(ANNA, run=other)) is Code.NOT_ACCEPTED
    participant.accept(village.invitation.digest)
    assert code(village, village.train(ANNA, run=other)) is Code.DONE
    assert code(village, village.train(ANNA)) is Code.NOT_ACCEPTED


def test_in_a_release_so_many_rounds_are_so_many_updates(settle: Settle) -> None:
    """A server that counts attempts instead of steps gets no more of them."""
    village = settle(content(steps=2, privacy={"mode": "secure"}))
    village.welcome(ANNA)
    assert code(village, village.train(ANNA, step=0)) is Code.DONE
    assert code(village, village.train(ANNA, step=0)) is Code.DONE
    assert code(village, village.train(ANNA, step=1)) is Code.ABOVE_ACCEPTED
    anna = village.join(ANNA)
    assert code(village, village.terms(ANNA)) is Code.ABOVE_ACCEPTED  # nor does it take part any more
    assert village.said[-1] == "all that was accepted for this run has been sent: nothing more is answered in it"
    anna.accept(village.invitation.digest)  # of the run that has had all of it: a second yes does not count anew
    assert code(village, village.terms(ANNA)) is Code.ABOVE_ACCEPTED
    assert code(village, village.train(ANNA, step=1)) is Code.UNEXPECTED


# Once.


def test_an_attempt_is_answered_once(village: Village) -> None:
    village.welcome(ANNA)
    order = village.train(ANNA)
    assert code(village, order) is Code.DONE
    assert code(village, order) is Code.REPEATED
    for again in ({"nonce": b"0" * 16}, {"step": 3}, {"attempt": 0}, {"payload": bytes(len(order.payload))}):
        assert code(village, replace(order, **again)) is Code.REPEATED
    village.join(ANNA)
    village.ask(ANNA, village.terms(ANNA))
    assert code(village, order) is Code.REPEATED
    assert code(village, village.train(ANNA)) is Code.DONE


def test_what_was_sent_is_written_down(village: Village) -> None:
    village.welcome(ANNA)
    village.ask(ANNA, village.train(ANNA, step=3))
    home = village.place / ANNA / "home"
    records = written(village)
    assert records[0] == {"accepted": village.invitation.digest.hex()}
    sent = records[1]
    assert (sent["answered"], sent["step"], sent["attempt"], sent["day"]) == ("train", 3, 1, "2031-05-01")
    assert sent["bytes"] == 8 * village.layout.dimension
    assert (home / "ledger.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_never_finished_is_cut_off(village: Village) -> None:
    village.welcome(ANNA)
    order = village.train(ANNA)
    village.ask(ANNA, order)
    village.joined[ANNA].close()
    with (village.place / ANNA / "home" / "ledger.jsonl").open("ab") as file:
        file.write(b'{"hash":"torn')
    village.join(ANNA)
    village.ask(ANNA, village.terms(ANNA))
    assert code(village, order) is Code.REPEATED


def test_a_changed_record_is_refused(village: Village) -> None:
    village.welcome(ANNA)
    village.ask(ANNA, village.train(ANNA))
    village.joined[ANNA].close()
    path = village.place / ANNA / "home" / "ledger.jsonl"
    path.write_text(path.read_text().replace('"attempt":1', '"attempt":0'))
    with pytest.raises(InputError, match="changed"):
        village.join(ANNA)


def test_a_record_of_something_else_is_refused_and_let_go(village: Village) -> None:
    home = village.place / ANNA / "home"
    home.mkdir()
    writer = own_ledger.ChainWriter(home / "ledger.jsonl")
    writer.append({"something": "else"})
    writer.close()
    for _ in range(2):  # the second time nobody holds the file
        with pytest.raises(InputError, match="line 1 is no record of this release"):
            OwnLedger(home)


def test_two_processes_cannot_be_one_node(village: Village) -> None:
    village.welcome(ANNA)
    with pytest.raises(InputError, match="one writer at a time"):
        OwnLedger(village.place / ANNA / "home")


def test_what_cannot_be_written_down_does_not_leave(village: Village, monkeypatch: pytest.MonkeyPatch) -> None:
    village.welcome(ANNA)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "ledger.jsonl")

    with monkeypatch.context() as patched:
        patched.setattr(own_ledger.ChainWriter, "append", full)
        assert code(village, village.train(ANNA)) is Code.UNABLE
    assert "No space left on device" in village.said[0]
    assert code(village, village.train(ANNA)) is Code.DONE


# What its user wants.


def test_pausing_and_leaving(village: Village) -> None:
    village.welcome(ANNA)
    home = village.place / ANNA / "home"
    pause(home)
    assert code(village, village.train(ANNA)) is Code.PAUSED
    assert code(village, village.terms(ANNA)) is Code.PAUSED
    resume(home)
    assert code(village, village.train(ANNA)) is Code.DONE
    leave(home)
    assert code(village, village.train(ANNA)) is Code.LEFT
    with pytest.raises(InputError, match="has left for good"):
        resume(home)
    village.join(ANNA)
    assert code(village, village.terms(ANNA)) is Code.LEFT


def test_who_is_paused_or_has_left_is_not_here(village: Village) -> None:
    anna, home = village.welcome(ANNA), village.place / ANNA / "home"
    assert anna.is_here()
    pause(home)
    assert not anna.is_here()
    resume(home)
    assert anna.is_here()
    assert not anna.has_left
    leave(home)
    assert not anna.is_here()
    assert anna.has_left


@pytest.mark.parametrize("quota", [Quota(rounds=2), Quota(seconds=1e-9)], ids=["rounds", "seconds"])
def test_above_a_days_limit_of_training_zeros_are_sent(village: Village, quota: Quota) -> None:
    """To the server they are an update like any other, and the node is here as before."""
    today = [NOW]
    anna = village.welcome(ANNA, quota=quota, now=lambda: today[0])

    def sends_something() -> bool:
        answer = village.ask(ANNA, village.train(ANNA))
        assert (answer.code, len(answer.payload)) == (Code.DONE, 8 * village.layout.dimension)
        return any(answer.payload)

    before = quota.rounds or 1
    assert [sends_something() for _ in range(before + 1)] == [True] * before + [False]
    assert anna.is_here()
    village.join(ANNA, quota=quota, now=lambda: today[0])
    village.ask(ANNA, village.terms(ANNA))
    assert not sends_something()
    assert village.said == ["today's limit is reached: what is sent is zeros"] * 2
    today[0] = NOW + timedelta(days=1)
    assert sends_something()
    records = [record for record in written(village) if "answered" in record]
    assert [record.get("idle", False) for record in records] == [False] * before + [True, True, False]


def test_above_a_days_limit_of_bytes_nothing_is_sent_and_nobody_is_here(village: Village) -> None:
    today, quota = [NOW], Quota(bytes=2 * 8 * village.layout.dimension + 1)
    anna = village.welcome(ANNA, quota=quota, now=lambda: today[0])
    assert [code(village, village.train(ANNA)) for _ in range(3)] == [Code.DONE, Code.DONE, Code.OVER_QUOTA]
    assert not anna.is_here()
    assert code(village, village.terms(ANNA)) is Code.OVER_QUOTA
    anna = village.join(ANNA, quota=quota, now=lambda: today[0])
    assert code(village, village.terms(ANNA)) is Code.OVER_QUOTA
    today[0] = NOW + timedelta(days=1)
    assert anna.is_here()
    assert code(village, village.terms(ANNA)) is Code.DONE
    assert code(village, village.train(ANNA)) is Code.DONE


# The end of a run.


def end(village: Village, **changes: Any) -> Order:
    return village.order(ANNA, Kind.END, step=12, **changes)


def test_a_run_that_is_over_is_noted_and_nothing_of_it_is_answered_any_more(village: Village) -> None:
    anna = village.welcome(ANNA)
    assert code(village, village.train(ANNA)) is Code.DONE
    assert code(village, end(village)) is Code.DONE
    assert anna.ended == 12
    note = written(village)[-1]
    assert (note["ended"], note["rounds"], note["day"]) == (RUN.hex(), 12, "2031-05-01")
    for _ in range(2):  # the second time after a new start
        assert code(village, village.terms(ANNA)) is Code.NOT_ACCEPTED
        assert code(village, village.train(ANNA)) is Code.UNEXPECTED
        assert code(village, end(village)) is Code.UNEXPECTED
        village.join(ANNA)


def test_what_a_node_has_done_is_told_to_its_user(village: Village) -> None:
    home = village.place / ANNA / "home"
    with pytest.raises(InputError, match="no node has joined from here"):
        account(home)
    village.welcome(ANNA, quota=Quota(rounds=2))
    for _ in range(3):
        village.ask(ANNA, village.train(ANNA))
    village.ask(ANNA, end(village))
    pause(home)
    seconds = sum(record.get("seconds", 0) for record in written(village))
    digest = village.invitation.digest.hex()
    assert account(home) == [
        f"{home}: paused",
        f"accepted {digest}",
        f"2031-05-01: the run of {digest} was over after 12 rounds",
        f"2031-05-01: trained in 2 rounds for {seconds:,.1f} s; zeros in 1 more; "
        f"sent {3 * 8 * village.layout.dimension / 1e6:,.2f} MB",
    ]


def test_another_run_of_the_same_recipe_needs_another_yes_and_an_old_end_does_not_end_it(village: Village) -> None:
    anna = village.welcome(ANNA)
    first = end(village)
    assert village.ask(ANNA, first).code is Code.DONE
    anna.ended = None
    other = {"run": b"s" * 16}
    assert code(village, village.terms(ANNA, **other)) is Code.NOT_ACCEPTED
    assert anna.invited is not None
    anna.accept(anna.invited.digest)
    assert code(village, village.terms(ANNA, **other)) is Code.DONE
    assert code(village, first) is Code.UNEXPECTED  # a replay
    assert code(village, village.terms(ANNA)) is Code.NOT_ACCEPTED  # of old terms
    assert code(village, first) is Code.UNEXPECTED
    assert anna.ended is None
    assert code(village, village.train(ANNA, **other)) is Code.DONE
    assert code(village, end(village, **other)) is Code.DONE
    assert anna.ended == 12


def test_nobody_but_its_server_ends_a_node(village: Village) -> None:
    anna = village.welcome(ANNA)
    stranger = ec.generate_private_key(ec.SECP384R1())
    assert code(village, end(village), key=stranger) is Code.UNTRUSTED
    assert code(village, end(village), key=village.key(BERT)) is Code.UNTRUSTED
    for changes, why in (
        ({"run": b"s" * 16}, Code.UNEXPECTED),
        ({"recipe": bytes(32)}, Code.UNEXPECTED),
        ({"payload": b"?"}, Code.UNEXPECTED),
    ):
        assert code(village, end(village, **changes)) is why
    to_bert = replace(end(village), node=keys.fingerprint(village.key(BERT).public_key()))
    assert anna.answer(to_bert.signed(village.orders_key))[5] == Code.MISDIRECTED
    village.join(ANNA)
    assert code(village, end(village)) is Code.UNEXPECTED  # before it knows whose orders to follow
    assert anna.ended is None


def test_a_quota_of_nothing_is_a_pause() -> None:
    with pytest.raises(InputError, match="rounds=0, expected a positive number, or none; pausing is for zero"):
        Quota(rounds=0)


# What leaves.


def test_a_failure_in_training_is_zeros(village: Village, monkeypatch: pytest.MonkeyPatch) -> None:
    village.welcome(ANNA)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("'my secret words' cannot be heard")

    monkeypatch.setattr(own_training, "sum_part", fails)
    answer = village.ask(ANNA, village.train(ANNA))
    assert answer.code is Code.DONE
    assert answer.payload == bytes(8 * village.layout.dimension)
    assert village.said == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_model_that_breaks_training_gives_zeros_or_a_clipped_update(village: Village, value: float) -> None:
    village.welcome(ANNA)
    model_P = village.layout.zeros() + value
    answer = village.ask(ANNA, village.train(ANNA, model_P))
    assert answer.code is Code.DONE
    cells = read_words(answer.payload, village.plan).view("<i8").astype(np.float64)
    assert np.linalg.norm(cells * (village.plan.grid or 0)) <= village.plan.clip_bound


def test_a_model_of_another_shape_is_unreadable(village: Village) -> None:
    village.welcome(ANNA)
    order = village.train(ANNA)
    assert code(village, replace(order, payload=order.payload[:-4])) is Code.UNREADABLE
    assert code(village, replace(order, payload=order.payload + bytes(4))) is Code.UNREADABLE
    assert code(village, order) is Code.DONE  # nothing was written down for those


def test_an_order_larger_than_agreed_is_not_read(village: Village) -> None:
    village.welcome(ANNA)
    participant = village.join(ANNA, largest_order=1000)
    assert participant.answer(village.train(ANNA).signed(village.orders_key))[5] == Code.UNREADABLE


def test_an_update_never_exceeds_its_bound(village: Village) -> None:
    village.welcome(ANNA)
    cells = read_words(village.ask(ANNA, village.train(ANNA)).payload, village.plan).view("<i8").astype(np.float64)
    assert 0 < np.linalg.norm(cells * (village.plan.grid or 0)) <= village.plan.clip_bound


# What a server might have a node load.


def test_another_start_model_than_was_accepted_is_refused(village: Village) -> None:
    participant = village.join(ANNA)
    participant.accept(village.invitation.digest)
    village.ask(ANNA, village.terms(ANNA))
    changed = village.start_bytes[:-1] + bytes([village.start_bytes[-1] ^ 1])
    assert code(village, village.order(ANNA, Kind.START, changed)) is Code.UNREADABLE
    assert code(village, village.train(ANNA)) is Code.UNEXPECTED


@pytest.mark.parametrize("content", [b"", b"x" * 15, b"\xff" * 64, bytes(16)])
def test_a_start_model_that_is_none_is_said(village: Village, content: bytes) -> None:
    village.start_bytes = content
    village.invitation = village.invite()
    village.join(ANNA).accept(village.invitation.digest)
    village.ask(ANNA, village.terms(ANNA))
    assert code(village, village.order(ANNA, Kind.START, content)) is Code.UNABLE
    assert len(village.said) == 1
    assert not (village.place / ANNA / "home" / "start").exists()


def test_a_kept_start_model_that_was_changed_is_asked_for_again(village: Village) -> None:
    village.welcome(ANNA)
    kept = village.place / ANNA / "home" / "start" / village.invitation.start.hex()
    kept.write_bytes(kept.read_bytes()[:-1])
    village.join(ANNA)
    assert village.ask(ANNA, village.terms(ANNA)).payload == b""
    assert code(village, village.order(ANNA, Kind.START, village.start_bytes)) is Code.DONE
    assert code(village, village.train(ANNA)) is Code.DONE


# Sums that the server cannot open.


@pytest.fixture
def secure(settle: Settle) -> Village:
    village = settle(secure=SecureSums(least=3))
    for name in village.people[:5]:
        village.welcome(name)
    return village


def begin(village: Village, count: int = 5) -> dict[str, int]:
    """So many people train; when that was."""
    village.attempt += 1
    when = {"step": 2, "attempt": village.attempt}
    for name in village.people[:count]:
        answer = village.ask(name, replace(village.train(name), **when))
        assert (answer.code, answer.payload) == (Code.DONE, b"")
    village.attempt = when["attempt"]
    return when


def open_update(village: Village, name: str) -> Any:
    """What somebody has trained, which no answer has shown."""
    service = village.joined[name]._service
    assert service is not None
    assert service.secure_sum is not None
    return service.secure_sum._words


@pytest.mark.parametrize("phase", [*Phase, None], ids=lambda phase: "nobody" if phase is None else phase.name.lower())
def test_who_drops_out_is_left_out_of_the_sum(secure: Village, phase: Phase | None) -> None:
    when = begin(secure)
    updates = {name: open_update(secure, name) for name in secure.people[:5]}
    gone = secure.people[0]
    if phase is not None:
        secure.gone[gone] = phase
    total = secure.opened(list(range(5)), **when)
    counted = [name for name in updates if name != gone or phase is None or phase > Phase.MASKED]
    assert np.array_equal(total, sum(updates[name] for name in counted))


def test_noise_of_its_own_is_in_what_is_masked(settle: Settle) -> None:
    """A share of so many cells in every coordinate: their mean square has a relative deviation of √(2/n)."""
    village = settle(content(privacy={"mode": "secure"}, cohort_size=9), secure=SecureSums(least=5))
    plain = village.welcome(ANNA)
    service = plain._service
    assert service is not None
    assert service.training is not None
    order = village.train(ANNA)
    bare = service.training.update(read_model(order.payload, village.layout), step=0).view("<i8")
    village.invitation = village.invite(noise_shares=NoiseShares(most=9, least=5, colluding=1))
    village.welcome(ANNA)
    assert code(village, village.train(ANNA)) is Code.DONE
    share = (open_update(village, ANNA).view("<i8") - bare).astype(np.float64)
    variance = village.invitation.plan(village.layout).noise.share_variance
    assert abs(np.mean(share**2) / variance - 1) < 8 * (2 / len(share)) ** 0.5


def test_an_update_is_masked_once(secure: Village) -> None:
    when = begin(secure)
    secure.opened(list(range(5)), **when)
    assert len(open_update(secure, ANNA)) == 0  # nor is it kept
    for kind in (Kind.KEYS, Kind.SHARES, Kind.MASKED, Kind.SURVIVORS, Kind.UNMASK):
        assert code(secure, secure.order(ANNA, kind, b"", **when)) is Code.UNEXPECTED
    assert code(secure, replace(secure.train(ANNA), **when)) is Code.REPEATED


def test_an_order_that_is_not_safe_is_told_to_its_user_once(secure: Village) -> None:
    when = begin(secure)
    for _ in range(4):
        code(secure, secure.order(ANNA, Kind.KEYS, **when))
    assert secure.said == [
        "round 3: the server's order to KEYS was not followed, as it would not be safe (out_of_turn): nothing more "
        "leaves this node in this attempt"
    ]


def test_of_many_threads_one_has_its_attempt_answered(village: Village) -> None:
    """Each sees a node that has not answered yet, unless orders are followed one at a time."""
    village.welcome(ANNA)
    order = village.train(ANNA)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: village.ask(ANNA, order.to(order.node)).code, range(4)))
    assert sorted(answers) == [Code.DONE, *[Code.REPEATED] * 3]


def test_another_attempt_has_no_part_in_a_sum(secure: Village) -> None:
    when = begin(secure)
    assert code(secure, secure.order(ANNA, Kind.KEYS, step=2, attempt=when["attempt"] + 1)) is Code.UNEXPECTED
    assert code(secure, secure.order(ANNA, Kind.KEYS, step=3, attempt=when["attempt"])) is Code.UNEXPECTED
    assert code(secure, secure.order(ANNA, Kind.KEYS, **when)) is Code.DONE


def test_zeros_above_a_limit_are_masked_like_anything(secure: Village) -> None:
    secure.welcome(ANNA, quota=Quota(rounds=1))
    for is_idle in (False, True):
        when = begin(secure)
        updates = {name: open_update(secure, name) for name in secure.people[:5]}
        assert (not updates[ANNA].any()) is is_idle
        assert np.array_equal(secure.opened(list(range(5)), **when), sum(updates.values()))


def test_nobody_goes_in_the_middle_of_a_sum_because_of_its_bytes(secure: Village) -> None:
    anna = secure.welcome(ANNA, quota=Quota(bytes=8 * secure.layout.dimension))
    when = begin(secure)
    secure.gone[ANNA] = Phase.UNMASK
    secure.opened(list(range(5)), **when)
    assert anna.is_here()  # its vector has left, and others need its shares
    assert code(secure, secure.order(ANNA, Kind.UNMASK, b"", **when)) is Code.UNEXPECTED  # it is over for her, too
    assert not anna.is_here()


def test_a_server_never_gets_the_bare_update(secure: Village) -> None:
    begin(secure)
    answer: Answer = secure.ask(ANNA, secure.train(ANNA, step=3))
    assert (answer.code, answer.payload) == (Code.DONE, b"")
