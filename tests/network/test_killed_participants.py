"""A node that is killed, at any moment, and comes back never sends a second update for one attempt."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.network.conftest import MakeCluster
from tests.network.local_cluster import NAMES, NOW, LocalCluster
from tests.points import Point, Watch
from tests.training.forked import forked

from sottovoce.data.store import Store
from sottovoce.network import keys
from sottovoce.network.invitation import SecureSums
from sottovoce.network.messages import AnswerCode, OrderKind
from sottovoce.network.node.participant import Participant

ANNA = NAMES[0]
WRITTEN = Point("sottovoce.network.node.ledger:NodeLedger.add")
TRAINED = Point("sottovoce.network.node.training:NodeTraining.update")
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
    """A participant in another process, as the cluster asks one."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def answer(self, data: bytes) -> bytes:
        self._pipe.send_bytes(data)
        return self._pipe.recv_bytes()

    def close(self) -> None:
        pass


@contextlib.contextmanager
def node(local_cluster: LocalCluster, *, point: Point | None = None) -> Iterator[None]:
    here, there = multiprocessing.get_context("forkserver").Pipe()
    place = local_cluster.place
    paths: tuple[Any, ...] = (
        place / ANNA / "key" / keys.NODE_KEY,
        place / "authority" / keys.AUTHORITY,
        place / ANNA / "home",
        local_cluster.stores / ANNA,
    )
    with here, forked(serve, there, *paths, point) as process:
        there.close()
        local_cluster.joined[ANNA] = Elsewhere(here)  # type: ignore[assignment]
        yield
        process.kill()
        process.join()


@pytest.fixture
def local_cluster(make_cluster: MakeCluster) -> LocalCluster:
    local_cluster = make_cluster()
    local_cluster.welcome(ANNA)
    local_cluster.joined.pop(ANNA).close()
    return local_cluster


def killed(local_cluster: LocalCluster, order: Any, point: Point) -> None:
    """The order reaches a node that is killed at `point`: nothing comes back."""
    with node(local_cluster, point=point):
        assert local_cluster.ask(ANNA, local_cluster.terms(ANNA)).code is AnswerCode.DONE
        with pytest.raises((EOFError, ConnectionResetError)):
            local_cluster.ask(ANNA, order)


def test_written_down_and_not_sent_is_sent_no_more(local_cluster: LocalCluster) -> None:
    order = local_cluster.train(ANNA)
    killed(local_cluster, order, WRITTEN)
    with node(local_cluster):
        local_cluster.ask(ANNA, local_cluster.terms(ANNA))
        assert local_cluster.ask(ANNA, order).code is AnswerCode.REPEATED
        assert local_cluster.ask(ANNA, local_cluster.train(ANNA)).code is AnswerCode.DONE


def test_killed_before_its_signature_it_sends_nothing_else_either(local_cluster: LocalCluster) -> None:
    order = local_cluster.train(ANNA)
    killed(local_cluster, order, Point(SIGNING.name, nth=2, at="call"))  # the first was under the answer to the terms
    with node(local_cluster):
        local_cluster.ask(ANNA, local_cluster.terms(ANNA))
        assert local_cluster.ask(ANNA, order).code is AnswerCode.REPEATED


@pytest.mark.parametrize("point", [TRAINED, WRITING], ids=["trained", "about to write"])
def test_what_was_not_written_down_may_be_asked_again(local_cluster: LocalCluster, point: Point) -> None:
    order = local_cluster.train(ANNA)
    killed(local_cluster, order, point)
    with node(local_cluster):
        local_cluster.ask(ANNA, local_cluster.terms(ANNA))
        again = local_cluster.ask(ANNA, order)
        assert again.code is AnswerCode.DONE
        assert any(again.payload)
        assert local_cluster.ask(ANNA, order).code is AnswerCode.REPEATED


def test_killed_while_its_update_waits_to_be_masked_it_takes_no_further_part(make_cluster: MakeCluster) -> None:
    local_cluster = make_cluster(secure=SecureSums(least=3))
    local_cluster.welcome(ANNA)
    local_cluster.joined.pop(ANNA).close()
    order = local_cluster.train(ANNA)
    with node(local_cluster):
        local_cluster.ask(ANNA, local_cluster.terms(ANNA))
        assert local_cluster.ask(ANNA, order).code is AnswerCode.DONE
        assert (
            local_cluster.ask(ANNA, local_cluster.order(ANNA, OrderKind.KEYS, attempt=order.attempt)).code
            is AnswerCode.DONE
        )
    with node(local_cluster):
        local_cluster.ask(ANNA, local_cluster.terms(ANNA))
        assert local_cluster.ask(ANNA, order).code is AnswerCode.REPEATED
        assert (
            local_cluster.ask(ANNA, local_cluster.order(ANNA, OrderKind.KEYS, attempt=order.attempt)).code
            is AnswerCode.UNEXPECTED
        )


@pytest.mark.parametrize("later", [1, 8, 16, 24, 32, 40])
def test_killed_at_any_call_while_it_writes(local_cluster: LocalCluster, later: int) -> None:
    """Whatever is left of the record, the answer that it tells of leaves at most once."""
    order = local_cluster.train(ANNA)
    codes = []
    with node(local_cluster, point=Point(TRAINED.name, later=later)):
        local_cluster.ask(ANNA, local_cluster.terms(ANNA))
        with contextlib.suppress(EOFError, ConnectionResetError):
            codes.append(local_cluster.ask(ANNA, order).code)  # where so many calls come only after it has left
    with node(local_cluster):
        local_cluster.ask(ANNA, local_cluster.terms(ANNA))
        codes += [local_cluster.ask(ANNA, order).code for _ in range(2)]
    assert codes.count(AnswerCode.DONE) <= 1
    assert set(codes) <= {AnswerCode.DONE, AnswerCode.REPEATED}
    assert codes[-1] is AnswerCode.REPEATED
