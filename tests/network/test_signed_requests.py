"""A request is good once, for one path, body, time and session; what is remembered of them is bounded."""

import hashlib
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.network.fleet import node_keys

from sottovoce.network.transport import signed_requests
from sottovoce.network.transport.request_limits import REPLAYED, UNKNOWN, Caller
from sottovoce.network.transport.signed_requests import AHEAD_SECONDS, BEHIND_SECONDS, SignedRequests, prove

ANNA, BERT = node_keys(2)
NOW = datetime(2031, 5, 1, 12, tzinfo=UTC)
PATH, BODY = "/v1/fleet/pull-messages", b"a question"


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


class Server:
    def __init__(self) -> None:
        self.clock = Clock()
        self.requests = SignedRequests({"anna": ANNA.public_key(), "bert": BERT.public_key()}, now=self.clock)

    def sign(self, *, after: float = 0.0, path: str = PATH, body: bytes = BODY) -> tuple[str, str]:
        """A request of Anna's, signed by her clock so many seconds after NOW: its time and its proof."""
        timestamp = (NOW + timedelta(seconds=after)).isoformat()
        proof = prove(ANNA, session=self.requests.session, path=path, timestamp=timestamp, body=body)
        return timestamp, proof

    def take(self, request: tuple[str, str], *, name: str = "anna", path: str = PATH) -> Caller | int:
        timestamp, proof = request
        return self.requests.caller(name, path=path, timestamp=timestamp.encode(), proof=proof.encode())


def test_a_request_is_taken_once() -> None:
    server = Server()
    request = server.sign()
    assert server.take(request) == Caller("anna", hashlib.sha256(BODY).digest())
    assert [server.take(request) for _ in range(3)] == [REPLAYED] * 3
    assert isinstance(server.take(server.sign()), Caller)  # the same again, signed anew


def changed_in(request: tuple[str, str], place: int) -> tuple[str, str]:
    content = bytearray(b64decode(request[1]))
    content[place] ^= 1
    return request[0], b64encode(content).decode()


def test_what_was_not_signed_so_is_not_known() -> None:
    server = Server()
    request = server.sign()
    assert server.take(request, path="/v1/fleet/activate-node") == UNKNOWN
    assert server.take(request, name="bert") == UNKNOWN
    later = (NOW + timedelta(seconds=1)).isoformat()
    assert server.take((later, request[1])) == UNKNOWN
    for place in (0, 15, 16, 47, 48, 143):  # nonce, digest of the body, signature
        assert server.take(changed_in(request, place)) == UNKNOWN
    assert isinstance(server.take(request), Caller)  # and nothing of it was used up


def test_a_server_that_was_started_anew_knows_no_request_of_before() -> None:
    before, after = Server(), Server()
    recorded = before.sign()
    assert isinstance(before.take(recorded), Caller)
    assert after.take(recorded) == UNKNOWN


@pytest.mark.parametrize(
    ("seconds", "known"),
    [
        (0.0, True),
        (AHEAD_SECONDS - 1, True),
        (AHEAD_SECONDS, False),
        (1 - BEHIND_SECONDS, True),
        (-BEHIND_SECONDS, False),
        (-1e9, False),
    ],
)
def test_a_request_is_valid_for_a_while(seconds: float, known: bool) -> None:
    server = Server()
    assert isinstance(server.take(server.sign(after=seconds)), Caller) is known


@pytest.mark.parametrize("timestamp", ["", "now", "2031-05-01T12:00:00", "9" * 4000, "2031-05-01T12:00:00+00:00\n"])
def test_a_time_that_is_none_is_refused(timestamp: str) -> None:
    server = Server()
    proof = prove(ANNA, session=server.requests.session, path=PATH, timestamp=timestamp, body=BODY)
    assert server.take((timestamp, proof)) == UNKNOWN


@settings(max_examples=50)
@given(timestamp=st.binary(max_size=40), proof=st.binary(max_size=300))
def test_any_bytes_are_refused(timestamp: bytes, proof: bytes) -> None:
    server = Server()
    assert server.requests.caller("anna", path=PATH, timestamp=timestamp, proof=proof) == UNKNOWN
    assert server.requests.caller("anna", path=PATH, timestamp=timestamp, proof=b64encode(proof)) == UNKNOWN


def test_no_clock_that_is_set_back_makes_a_request_valid_again() -> None:
    server = Server()
    first = server.sign()
    assert isinstance(server.take(first), Caller)
    server.clock.now = NOW + timedelta(seconds=2 * BEHIND_SECONDS)
    assert isinstance(server.take(server.sign(after=2 * BEHIND_SECONDS)), Caller)
    assert len(server.requests._seen["anna"].nonces) == 1  # the first was forgotten
    server.clock.now = NOW
    assert server.take(first) == REPLAYED


def test_what_is_remembered_is_bounded_and_forgets_nothing_that_could_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signed_requests, "MOST_REMEMBERED", 8)
    server = Server()
    recorded = [server.sign(after=number / 10) for number in range(20)]
    assert all(isinstance(server.take(request), Caller) for request in recorded)
    seen = server.requests._seen["anna"]
    assert len(seen.by_time) == len(seen.nonces) == 8
    assert [server.take(request) for request in recorded] == [REPLAYED] * 20
    assert isinstance(server.take(server.sign(after=2.0)), Caller)  # who is signing now is not in the way of it


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(-400, 800)), max_size=40),
    st.integers(1, 6),
)
def test_nothing_is_ever_taken_twice(steps: list[tuple[int, float]], most: int) -> None:
    """Whatever is sent again, in any order, while the server's clock goes forth and back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signed_requests, "MOST_REMEMBERED", most)
        seen, taken = signed_requests._Seen(), set[int]()
        for nonce, now in steps:
            if seen.is_new(bytes([nonce]), when=nonce * 50.0, now=now):
                assert nonce not in taken
                taken.add(nonce)
            assert len(seen.by_time) == len(seen.nonces) <= most


def test_its_bounds_are_those_of_flower() -> None:
    constant = pytest.importorskip("flwr.common.constant", reason="flwr is not installed (the extra `network`)")
    assert constant.SYSTEM_TIME_TOLERANCE == AHEAD_SECONDS
    assert constant.TIMESTAMP_TOLERANCE + constant.SYSTEM_TIME_TOLERANCE == BEHIND_SECONDS
