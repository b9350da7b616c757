"""A node that is killed, at any moment, and comes back never sends a second update for one attempt."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.deployment.conftest import Settle
from tests.deployment.village import NAMES, NOW, Village
from tests.points import Point, Watch
from tests.training.forked import forked

from sottovoce.deployment import keys
from sottovoce.deployment.invitation import SecureSums
from sottovoce.deployment.messages import Code, Kind
from sottovoce.deployment.participant import Participant
from sottovoce.store import Store

ANNA = NAMES[0]
WRITTEN = Point("sottovoce.deployment.own_ledger:OwnLedger.add")
TRAINED = Point("sottovoce.deployment.own_training:OwnTraining.update")
WRITING = Point("sottovoce.privacy.chain:ChainWriter.append", at="call")
SIGNING = Point("sottovoce.base.signatures:sign", at="call")


def serve(pipe: Connection, key: Path, authority: Path, home: Path, store: Path, point: Point | None) -> None:
    """A node that answers what comes through `pipe`, and is killed at `point`, or when the pipe is closed."""
    participant = Participant(
        home,
        key=keys.load_private_key(key),
        authority=keys.load_certificate(authority),
        store=Store(store),
        now=lambda: NOW,
    )
    with Watch(point):
        while (order := pipe.recv_bytes()) is not None:
            pipe.send_bytes(participant.answer(order))


class Elsewhere:
    """A participant in another process, as the village asks one."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def answer(self, data: bytes) -> bytes:
        self._pipe.send_bytes(data)
        return self._pipe.recv_bytes()

    def close(self) -> None:
        pass


@contextlib.contextmanager
def node(village: Village, *, point: Point | None = None) -> Iterator[None]:
    here, there = multiprocessing.get_context("forkserver").Pipe()
    place = village.place
    paths: tuple[Any, ...] = (
        place / ANNA / "key" / keys.NODE_KEY,
        place / "authority" / keys.AUTHORITY,
        place / ANNA / "home",
        village.stores / ANNA,
    )
    with here, forked(serve, there, *paths, point) as process:
        there.close()
        village.joined[ANNA] = Elsewhere(here)  # type: ignore[assignment]
        yield
        process.kill()
        process.join()


@pytest.fixture
def village(settle: Settle) -> Village:
    village = settle()
    village.welcome(ANNA)
    village.joined.pop(ANNA).close()
    return village


def killed(village: Village, order: Any, point: Point) -> None:
    """The order reaches a node that is killed at `point`: nothing comes back."""
    with node(village, point=point):
        assert village.ask(ANNA, village.terms(ANNA)).code is Code.DONE
        with pytest.raises((EOFError, ConnectionResetError)):
            village.ask(ANNA, order)


def test_written_down_and_not_sent_is_sent_no_more(village: Village) -> None:
    order = village.train(ANNA)
    killed(village, order, WRITTEN)
    with node(village):
        village.ask(ANNA, village.terms(ANNA))
        assert village.ask(ANNA, order).code is Code.REPEATED
        assert village.ask(ANNA, village.train(ANNA)).code is Code.DONE


def test_killed_before_its_signature_it_sends_nothing_else_either(village: Village) -> None:
    order = village.train(ANNA)
    killed(village, order, Point(SIGNING.name, nth=2, at="call"))  # the first was under the answer to the terms
    with node(village):
        village.ask(ANNA, village.terms(ANNA))
        assert village.ask(ANNA, order).code is Code.REPEATED


@pytest.mark.parametrize("point", [TRAINED, WRITING], ids=["trained", "about to write"])
def test_what_was_not_written_down_may_be_asked_again(village: Village, point: Point) -> None:
    order = village.train(ANNA)
    killed(village, order, point)
    with node(village):
        village.ask(ANNA, village.terms(ANNA))
        again = village.ask(ANNA, order)
        assert again.code is Code.DONE
        assert any(again.payload)
        assert village.ask(ANNA, order).code is Code.REPEATED


def test_killed_while_its_update_waits_to_be_masked_it_takes_no_further_part(settle: Settle) -> None:
    village = settle(secure=SecureSums(least=3))
    village.welcome(ANNA)
    village.joined.pop(ANNA).close()
    order = village.train(ANNA)
    with node(village):
        village.ask(ANNA, village.terms(ANNA))
        assert village.ask(ANNA, order).code is Code.DONE
        assert village.ask(ANNA, village.order(ANNA, Kind.KEYS, attempt=order.attempt)).code is Code.DONE
    with node(village):
        village.ask(ANNA, village.terms(ANNA))
        assert village.ask(ANNA, order).code is Code.REPEATED
        assert village.ask(ANNA, village.order(ANNA, Kind.KEYS, attempt=order.attempt)).code is Code.UNEXPECTED


@pytest.mark.parametrize("later", [1, 8, 16, 24, 32, 40])
def test_killed_at_any_call_while_it_writes(village: Village, later: int) -> None:
    """Whatever is left of the record, the answer that it tells of leaves at most once."""
    order = village.train(ANNA)
    codes = []
    with node(village, point=Point(TRAINED.name, later=later)):
        village.ask(ANNA, village.terms(ANNA))
        with contextlib.suppress(EOFError, ConnectionResetError):
            codes.append(village.ask(ANNA, order).code)  # where so many calls come only after it has left
    with node(village):
        village.ask(ANNA, village.terms(ANNA))
        codes += [village.ask(ANNA, order).code for _ in range(2)]
    assert codes.count(Code.DONE) <= 1
    assert set(codes) <= {Code.DONE, Code.REPEATED}
    assert codes[-1] is Code.REPEATED
