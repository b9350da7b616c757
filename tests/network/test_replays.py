"""A node's requests, recorded by somebody who can read its TLS, and sent again byte for byte.

The one who records has the server's key for TLS, and so stands between node and server. What was sent once has no
effect a second time: not on the node's round, and not on the server that was started anew.
"""

import contextlib
import queue
import re
import select
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

flower = pytest.importorskip(
    "sottovoce.network.transport.flower", reason="flwr is not installed (the extra `network`)", exc_type=ImportError
)

from flwr.common.constant import TIMESTAMP_HEADER  # noqa: E402
from flwr.proto.fleet_pb2 import ActivateNodeRequest  # noqa: E402
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER  # noqa: E402
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message  # noqa: E402

from sottovoce.network.keys import (  # noqa: E402
    fingerprint,
    load_private_key,
    load_public_key,
    make_authority,
    make_node,
    make_server,
)
from sottovoce.network.node import worker  # noqa: E402
from sottovoce.network.transport.signed_requests import PROOF_HEADER, prove  # noqa: E402

LONG = 600.0  # seconds that nothing here ever needs
REPLAYED = 425
PATH = re.compile(rb"POST /v1/fleet/(\S+) ")
LENGTH = re.compile(rb"content-length: (\d+)\r\n", re.IGNORECASE)


class Place:
    """Keys of a server and of Anna's node, a link, and somebody between them who reads along."""

    def __init__(self, folder: Path, held: contextlib.ExitStack) -> None:
        today = datetime.now(UTC)
        make_authority(folder / "authority", now=today)
        make_server(folder / "server", authority=folder / "authority", hosts=["127.0.0.1"], now=today)
        make_node(folder / "anna")
        self.folder = folder
        self.anna = fingerprint(load_public_key(folder / "anna/node.pub")).hex()
        self.asking = ssl.create_default_context(cafile=str(folder / "authority/ca.pem"))
        self.link = self.listen()
        self.recorder = held.enter_context(recording(self))

    def listen(self, port: int = 0) -> Any:
        return flower.FlowerLink(
            "127.0.0.1",
            port,
            certificate=str(self.folder / "server/server.pem"),
            key=str(self.folder / "server/server.key"),
            nodes={self.anna: load_public_key(self.folder / "anna/node.pub")},
        )

    def connected(self) -> ssl.SSLSocket:
        raw = socket.create_connection(("127.0.0.1", self.link.port))
        return self.asking.wrap_socket(raw, server_hostname="127.0.0.1")

    def send(self, request: bytes) -> int:
        """The status that recorded bytes get."""
        with self.connected() as connection:
            connection.sendall(request)
            return int(connection.recv(1 << 12).split()[1])


class Recorder:
    """What has passed, request by request."""

    def __init__(self) -> None:
        self.streams: list[bytearray] = []
        self.port = 0

    def requests(self) -> list[bytes]:
        return [request for stream in list(self.streams) for request in split(bytes(stream))]

    def named(self, path: str) -> list[bytes]:
        return [request for request in self.requests() if path_of(request) == path]


def split(stream: bytes) -> list[bytes]:
    """The whole requests of a connection."""
    found = []
    while (end := stream.find(b"\r\n\r\n")) >= 0:
        length = LENGTH.search(stream[: end + 2])
        whole = end + 4 + (int(length[1]) if length else 0)
        if len(stream) < whole:
            break
        found.append(stream[:whole])
        stream = stream[whole:]
    return found


def path_of(request: bytes) -> str:
    found = PATH.match(request)
    assert found is not None, request
    return found[1].decode()


@contextlib.contextmanager
def recording(place: Place) -> Iterator[Recorder]:
    """Listens with the server's own certificate, and hands on what comes to whatever `place.link` is then."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(place.folder / "server/server.pem", place.folder / "server/server.key")
    recorder, listening = Recorder(), socket.create_server(("127.0.0.1", 0))
    recorder.port = listening.getsockname()[1]

    def hand_on(node: ssl.SSLSocket, server: ssl.SSLSocket, kept: bytearray) -> None:
        """One thread for both ways: a TLS connection is not for two."""
        with node, server, contextlib.suppress(OSError):
            while True:
                ready = [end for end in (node, server) if end.pending()] or select.select([node, server], [], [])[0]
                for end in ready:
                    end.setblocking(False)
                    try:
                        data = end.recv(1 << 16)
                    except ssl.SSLWantReadError:  # a record of TLS's own
                        continue
                    finally:
                        end.setblocking(True)
                    if not data:
                        return
                    if end is node:
                        kept += data
                    (server if end is node else node).sendall(data)

    def accept() -> None:
        with ThreadPoolExecutor(16) as handing_on:
            while True:
                try:
                    raw, _ = listening.accept()
                except OSError:
                    return
                try:
                    server = place.connected()
                except OSError:
                    raw.close()
                    continue
                try:
                    node = serving.wrap_socket(raw, server_side=True)
                except OSError:
                    server.close()
                    continue
                recorder.streams.append(bytearray())
                handing_on.submit(hand_on, node, server, recorder.streams[-1])

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield recorder
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join()
        listening.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(flower, "HELD_SECONDS", 0.2)
    monkeypatch.setattr(worker, "RECONNECT_SECONDS", 0.1)
    with contextlib.ExitStack() as held:
        found = Place(tmp_path, held)
        try:
            yield found
        finally:
            found.link.close()


@contextlib.contextmanager
def node_at(place: Place, answer: Callable[[bytes], bytes | None]) -> Iterator["queue.Queue[str]"]:
    """Anna's node, through the one who records; within, it is connected, and says where it is connected again."""
    stop, connected = threading.Event(), queue.Queue[str]()

    def say(line: str) -> None:
        if line.startswith("connected"):
            connected.put(line)

    def run() -> None:
        worker.Worker(
            f"127.0.0.1:{place.recorder.port}",
            key=load_private_key(place.folder / "anna/node.key"),
            authority=(place.folder / "authority/ca.pem").read_bytes(),
            answer=answer,
            limit=1 << 26,
            stop=stop,
            say=say,
        ).run()

    working = threading.Thread(target=run)
    working.start()
    try:
        connected.get()
        yield connected
    finally:
        stop.set()
        working.join()


def test_recorded_requests_that_are_sent_again_do_not_take_a_node_out_of_its_round(place: Place) -> None:
    """In the middle of its training: each is refused, and the answer comes and counts."""
    training, trained = threading.Event(), threading.Event()

    def answer(order: bytes) -> bytes:
        training.set()
        trained.wait()
        return order[::-1]

    with node_at(place, answer), ThreadPoolExecutor(1) as others:
        asking: Future[Any] = others.submit(
            place.link.ask, {place.anna: b"train" * 20_000}, seconds=LONG, limit=1 << 20
        )
        training.wait()
        seen = place.recorder.requests()
        try:
            statuses = {path_of(request): place.send(request) for request in seen}
        finally:
            trained.set()
        assert asking.result() == {place.anna: (b"train" * 20_000)[::-1]}
    assert {"activate-node", "pull-messages", "pull-object", "confirm-message-received"} <= statuses.keys()
    assert {*statuses.values()} <= {REPLAYED, 401}  # 401: what was refused to begin with


def test_a_server_that_was_started_anew_takes_nothing_that_was_recorded_before(place: Place) -> None:
    """Neither when its node is away nor when it is back; and the node comes back by itself."""
    with node_at(place, lambda order: order[::-1]) as connected:
        assert place.link.ask({place.anna: b"first"}, seconds=LONG, limit=100) == {place.anna: b"tsrif"}
        recorded = place.recorder.requests()
        place.link.close()
        place.link = place.listen(place.link.port)
        assert {place.send(request) for request in recorded} == {401}
        connected.get()
        assert {place.send(request) for request in recorded} == {401}
        assert place.link.ask({place.anna: b"again"}, seconds=LONG, limit=100) == {place.anna: b"niaga"}


def test_the_head_of_one_request_is_no_head_for_another(place: Place) -> None:
    """One that was never used, as it was held back from the server: it is for one path and one body."""
    key, timestamp = load_private_key(place.folder / "anna/node.key"), datetime.now(UTC).isoformat()
    body = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=10.0)
    content = body.SerializeToString()
    head = {
        "content-type": "application/protobuf",
        "content-length": str(len(content)),
        FLEET_HTTP_PUBLIC_KEY_HEADER: flower._caller(key.public_key()).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, timestamp.encode())).decode(),
        TIMESTAMP_HEADER: timestamp,
        PROOF_HEADER: prove(
            key,
            session=place.link._requests.session,
            path="/v1/fleet/activate-node",
            timestamp=timestamp,
            body=content,
        ),
    }

    def sent(path: str, head: dict[str, str], content: bytes) -> int:
        lines = [f"POST /v1/fleet/{path} HTTP/1.1", "host: x", *(f"{name}: {value}" for name, value in head.items())]
        return place.send("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    assert sent("deactivate-node", head, content) == 401
    without_ours = {name: value for name, value in head.items() if name != PROOF_HEADER}
    assert sent("activate-node", without_ours, content) == 401
    assert sent("activate-node", head, content) == 200
    assert sent("activate-node", head, content) == REPLAYED
    place.link._state.deactivate_node(place.link._ids[place.anna])
    for nonce in range(2):  # a body that was changed on its way uses the head up, and has no other effect
        head[PROOF_HEADER] = prove(
            key,
            session=place.link._requests.session,
            path="/v1/fleet/activate-node",
            timestamp=timestamp,
            body=content + bytes([nonce]),
        )
        assert sent("activate-node", head, content) == 401
    assert place.link.present() == frozenset()
