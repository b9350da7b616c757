"""Strangers, and nodes that mean harm, at the door: what they can make the server hold is bounded, and nodes get in.

The server is a `FlowerLink` with TLS; they are sockets, and Flower's own client with a key of the roster or without.
Nothing here is measured in time: that something is given up in the end is seen by its being over.
"""

import contextlib
import gzip
import math
import resource
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

flower = pytest.importorskip(
    "sottovoce.network.transport.flower", reason="flwr is not installed (the extra `network`)", exc_type=ImportError
)

import httpx  # noqa: E402  # flwr brings it
from flwr.common.constant import TIMESTAMP_HEADER  # noqa: E402
from flwr.common.serde import message_from_proto, message_to_proto  # noqa: E402
from flwr.proto.fleet_pb2 import (  # noqa: E402
    ActivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import Message as ProtoMessage  # noqa: E402
from flwr.proto.message_pb2 import Metadata, ObjectTree, PushObjectRequest  # noqa: E402
from flwr.proto.node_pb2 import Node  # noqa: E402
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER  # noqa: E402
from flwr.supercore.date import now  # noqa: E402
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
from sottovoce.network.transport import chunks, fleet_client, listener  # noqa: E402
from sottovoce.network.transport.fleet_client import FleetClient  # noqa: E402
from sottovoce.network.transport.signed_requests import PROOF_HEADER, prove  # noqa: E402

LONG = 600.0  # seconds that nothing here ever needs
HEAD = b"POST /v1/fleet/%s HTTP/1.1\r\nhost: x\r\n"


class Door:
    """A link for Anna alone, and what knocks at it."""

    def __init__(self, folder: Path) -> None:
        today = datetime.now(UTC)
        make_authority(folder / "authority", now=today)
        make_server(folder / "server", authority=folder / "authority", hosts=["127.0.0.1"], now=today)
        for name in ("anna", "stranger"):
            make_node(folder / name)
        self._folder = folder
        self.anna = fingerprint(load_public_key(folder / "anna/node.pub")).hex()
        self.link = flower.FlowerLink(
            "127.0.0.1",
            0,
            certificate=str(folder / "server/server.pem"),
            key=str(folder / "server/server.key"),
            nodes={self.anna: load_public_key(folder / "anna/node.pub")},
        )
        self._context = ssl.create_default_context(cafile=str(folder / "authority/ca.pem"))

    def raw(self) -> socket.socket:
        """A connection, without TLS so far."""
        return socket.create_connection(("127.0.0.1", self.link.port))

    def connected(self) -> ssl.SSLSocket:
        return self._context.wrap_socket(self.raw(), server_hostname="127.0.0.1")

    @contextlib.contextmanager
    def node(self, name: str = "anna") -> Iterator[Any]:
        """A node's client with a key."""
        key = load_private_key(self._folder / name / "node.key")
        authority = (self._folder / "authority/ca.pem").read_bytes()
        with FleetClient(f"127.0.0.1:{self.link.port}", key=key, authority=authority) as client:
            yield client

    def activation(self, name: str = "anna") -> Any:
        public = load_public_key(self._folder / name / "node.pub")
        return ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=10.0)

    def check_open(self) -> None:
        """Anna gets in, as ever."""
        with self.node() as client:
            assert client.send(self.activation()).node_id
        assert self.link.present() == {self.anna}

    def status(self, path: str, content: Any, *, signed: bool = False) -> int:
        """What a stranger is answered who trusts the authority, or Anna."""
        headers = {"content-type": "application/protobuf"} | (self.signed(path, content) if signed else {})
        with httpx.Client(verify=self._context) as client:
            where = f"https://127.0.0.1:{self.link.port}/v1/fleet/{path}"
            return client.post(where, content=content, headers=headers).status_code

    def signed(self, path: str, content: bytes) -> dict[str, str]:
        """Anna's proofs in the head of a request: Flower's, and ours."""
        key, when = load_private_key(self._folder / "anna/node.key"), now().isoformat()
        given = {FLEET_HTTP_PUBLIC_KEY_HEADER: flower._caller(key.public_key())}
        given[FLEET_HTTP_SIGNATURE_HEADER] = b64encode(sign_message(key, when.encode()))
        given[PROOF_HEADER] = prove(
            key,
            session=self.link._requests.session,
            path=f"/v1/fleet/{path}",
            timestamp=when,
            body=content,
        ).encode()
        return {name: value.decode() for name, value in given.items()} | {TIMESTAMP_HEADER: when}


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(listener, "SECONDS", 1.0)  # that a test waits for a stranger to be given up
    monkeypatch.setattr(flower, "HELD_SECONDS", 0.2)  # and for an order that does not come
    found = Door(tmp_path)
    yield found
    found.link.close()


def is_over(connection: socket.socket) -> bool:
    """Waits until the other side has ended a connection, whatever it says before."""
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass
    connection.close()
    return True


# Strangers.


def test_many_connections_leave_files_for_the_ledger_and_room_for_nodes(door: Door) -> None:
    """Three times as many as there may be, that say nothing: those above are turned away, the others given up."""
    most = 3 * (flower._SPARE_CONNECTIONS + flower.AT_ONCE)
    files = Path("/proc/self/fd")
    before = len(list(files.iterdir()))
    silent = [door.raw() for _ in range(most)]
    turned_away = sum(is_over(connection) for connection in silent[-100:])
    assert turned_away == 100
    assert len(list(files.iterdir())) <= before + most - 100 + flower._SPARE_CONNECTIONS + flower.AT_ONCE + 16
    assert all(is_over(connection) for connection in silent[:-100])
    door.check_open()


def test_the_ledger_has_files_even_where_few_may_be_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
        assert listener._limit_to_open_files(100) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(512, hard)
        wanted = hard + 1000 if hard != resource.RLIM_INFINITY else 10_000
        room = listener._limit_to_open_files(wanted)
        now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert room == (now - 256 if hard != resource.RLIM_INFINITY else wanted)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("said", [b"", b"POST /v1/fl", HEAD % b"pull-messages", HEAD % b"pull-messages" + b"a: b\r\n"])
def test_a_head_that_never_ends_is_given_up(door: Door, said: bytes) -> None:
    """Slowloris: some bytes, and then nothing."""
    connection = door.connected()
    connection.sendall(said)
    assert is_over(connection)


def test_a_second_head_that_never_ends_is_given_up_too(door: Door) -> None:
    connection = door.connected()
    connection.sendall(HEAD % b"register-node" + b"content-length: 0\r\n\r\n")
    assert connection.recv(1 << 12).startswith(b"HTTP/1.1 403")
    with contextlib.suppress(OSError):  # unless it was closed with the refusal
        connection.sendall(b"POST /v1")
    assert is_over(connection)


def test_a_long_head_is_refused(door: Door) -> None:
    connection = door.connected()
    with contextlib.suppress(OSError):  # it may be closed while we are still sending
        connection.sendall(HEAD % b"pull-messages")
        for number in range(1000):
            connection.sendall(b"x-%d: " % number + b"y" * 1000 + b"\r\n")
    assert is_over(connection)
    door.check_open()


@pytest.mark.parametrize("path", sorted(flower.PATHS))
def test_of_a_strangers_body_nothing_is_read(door: Door, path: str) -> None:
    """Refused by its head, while the body is still to come; with the public key of a node and without."""
    public = flower._caller(load_public_key(door._folder / "anna/node.pub"))
    for claimed in (b"", b"flwr-public-key: " + public + b"\r\nflwr-signature: AAAA\r\nflwr-timestamp: now\r\n"):
        connection = door.connected()
        head = HEAD % path.removeprefix("/v1/fleet/").encode() + claimed
        connection.sendall(head + b"content-type: application/protobuf\r\ncontent-length: 100\r\n\r\n")
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 401")
        assert is_over(connection)


def test_a_body_that_announces_too_much_or_never_says_how_much(door: Door) -> None:
    assert door.status("push-object", b"x" * (flower.PATHS["/v1/fleet/push-object"] + 1)) == 413
    assert door.status("pull-messages", iter([b"x" * 1000] * 3)) == 401  # in chunks


def test_registrations_in_bursts_by_a_strangers_key(door: Door) -> None:
    with door.node("stranger") as client:
        for _ in range(20):
            activation = door.activation("stranger")
            for request in (RegisterNodeFleetRequest(public_key=activation.public_key), activation):
                with pytest.raises(httpx.HTTPStatusError) as refused:
                    client.send(request)
                assert refused.value.response.status_code in (401, 403)
    assert len(door.link._state.node_public_key_to_node_id) == 1
    door.check_open()


def test_closing_waits_for_no_stranger(door: Door) -> None:
    held = [door.raw(), door.connected(), door.connected()]
    held[1].sendall(b"POST /v1")
    held[2].sendall(HEAD % b"push-object" + b"content-length: 1000\r\n\r\nabc")
    door.link.close()
    assert all(is_over(connection) for connection in held)


# Nodes of the roster.


def test_closing_waits_for_no_node_that_stops_in_the_middle(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door.link._listener._server.config, "timeout_graceful_shutdown", 0)
    connection = door.connected()
    signed = "".join(f"{name}: {value}\r\n" for name, value in door.signed("push-object", b"").items()).encode()
    connection.sendall(HEAD % b"push-object" + signed + b"content-length: 1000\r\n\r\nabc")
    door.check_open()  # by now it is being read
    door.link.close()
    assert is_over(connection)


def test_malformed_protobuf_by_a_node(door: Door) -> None:
    nested = b""
    for _ in range(200):  # deeper than protobuf reads
        nested = b"\x12" + bytes([len(nested) & 127 | 128, len(nested) >> 7]) + nested
    for path in flower.PATHS:
        for content in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", nested, b""):
            assert 400 <= door.status(path.removeprefix("/v1/fleet/"), content, signed=True) < 500
    door.check_open()


def test_a_node_that_activates_again_and_again_is_one_node(door: Door) -> None:
    with door.node() as client:
        ids = {client.send(door.activation()).node_id for _ in range(20)}
    assert len(ids) == 1
    assert door.link.present() == {door.anna}


def test_who_came_back_is_not_handed_orders_by_its_old_line(door: Door) -> None:
    """What it asked for before it broke down is answered to nobody: an order would be lost with it."""
    with door.node() as client, ThreadPoolExecutor(1) as threads:
        node = Node(node_id=client.send(door.activation()).node_id)

        def pull() -> int:
            try:
                client.send(PullMessagesRequest(node=node))
            except httpx.HTTPStatusError as refused:
                return refused.response.status_code
            return 200

        held = threads.submit(pull)
        while not held.done():  # it may not have asked yet when it comes back for the first time
            client.send(door.activation())
        assert held.result() == httpx.codes.CONFLICT
    door.check_open()


def test_a_node_that_asks_for_orders_many_times_at_once(door: Door) -> None:
    """So many are held as it may have; the others are told to come again, and it can still bring an answer."""
    with door.node() as client, ThreadPoolExecutor(3 * flower.AT_ONCE) as threads:
        node = Node(node_id=client.send(door.activation()).node_id)

        def pull(_: int) -> int:
            try:
                client.send(PullMessagesRequest(node=node))
            except httpx.HTTPStatusError as refused:
                return refused.response.status_code
            return 200

        assert {*threads.map(pull, range(3 * flower.AT_ONCE))} <= {200, 503}
    door.check_open()


Change = Callable[[Any, Any], Any]


def set_in(**fields: Any) -> Change:
    def change(message: Any, tree: Any) -> Any:
        for name, value in fields.items():
            setattr(message.metadata, name, value)
        return tree

    return change


def an_error(message: Any, tree: Any) -> Any:
    message.ClearField("content")
    message.error.code = 1
    return tree


HOSTILE: dict[str, Change] = {
    "as it should be": lambda message, tree: tree,
    "created at NaN": set_in(created_at=math.nan),
    "created at infinity": set_in(created_at=math.inf),
    "to live for NaN": set_in(ttl=math.nan),
    "to live for ever": set_in(ttl=math.inf),
    "dead on arrival": set_in(ttl=-1e300),
    "of no type": set_in(message_type="x" * 1000),
    "of another run": set_in(run_id=7),
    "to another node": set_in(dst_node_id=7),
    "under another name": set_in(message_id="ab" * 32),
    "an error": an_error,
    "nothing in it": lambda message, tree: message.ClearField("content") or tree,
    "made of something else": lambda message, tree: ObjectTree(object_id="ab" * 32),
    "made of no object": lambda message, tree: ObjectTree(),
    "made of many": lambda message, tree: ObjectTree(
        object_id=tree.object_id, children=[ObjectTree(object_id=f"{number:064x}") for number in range(100)]
    ),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_answer_that_is_anything_else_is_an_answer_or_none_and_leaves_nothing(door: Door, change: Change) -> None:
    with door.node() as client:
        node, asking, answers = Node(node_id=client.send(door.activation()).node_id), None, dict[str, bytes]()
        over = threading.Event()

        def ask() -> None:
            answers.update(door.link.ask({door.anna: b"an order"}, seconds=LONG, limit=100))
            over.set()

        asking = threading.Thread(target=ask)
        asking.start()
        found = client.send(PullMessagesRequest(node=node))
        order = message_from_proto(found.messages_list[0])
        bare, tree, _ = chunks.split_message(chunks.Message(chunks.pack_bytes(b"an answer"), reply_to=order))
        message = message_to_proto(bare)
        tree = change(message, tree)
        request = PushMessagesRequest(node=node, messages_list=[message], message_object_trees=[tree])
        for _ in range(2):
            with contextlib.suppress(httpx.HTTPStatusError):
                client.send(request)
        client.send(door.activation())  # back: what was not answered is waited for no more
        asking.join()
    assert answers in ({}, {door.anna: b"an answer"})
    state = door.link._state
    assert (len(state.object_store), state.num_message_ins(), state.num_message_res()) == (0, 0, 0)


def test_an_answer_announced_once_more_with_other_objects_is_refused(door: Door) -> None:
    """Each time with a few more, none of which anybody would ever delete: the first announcement counts."""
    with door.node() as client:
        node = Node(node_id=client.send(door.activation()).node_id)
        sent = door.link.send({door.anna: b"an order"}, seconds=LONG, limit=chunks.CHUNK)
        (order_id,) = sent.own
        client.send(PullMessagesRequest(node=node))
        order = door.link._state.message_ins_store[order_id]
        bare, tree, _ = chunks.split_message(chunks.Message(chunks.pack_bytes(b"an answer"), reply_to=order))
        statuses = []
        for number in range(10):
            more = ObjectTree(object_id=tree.object_id, children=[ObjectTree(object_id=f"{number:064x}")])
            announced = PushMessagesRequest(
                node=node, messages_list=[message_to_proto(bare)], message_object_trees=[more]
            )
            try:
                client.send(announced)
                statuses.append(200)
            except httpx.HTTPStatusError as refused:
                statuses.append(refused.response.status_code)
        assert statuses == [200] + 9 * [403]
        unknown = PushObjectRequest(node=node, run_id=1, object_id="cd" * 32, object_content=b"x", session_id="s")
        with pytest.raises(httpx.HTTPStatusError):  # nor is an object taken that was not announced
            client.send(unknown)
        sent.close()
    assert len(door.link._state.object_store) == 0


# A server that means harm to nodes.


@contextlib.contextmanager
def answering(folder: Path, head: str, body: bytes) -> Iterator[int]:
    """A server with the right certificate that answers everything with `head` and `body`; its port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server/server.pem", folder / "server/server.key")
    listening_at = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listening_at.accept()
                with contextlib.suppress(OSError), context.wrap_socket(near, server_side=True) as connection:
                    connection.recv(1 << 16)
                    whole = f"HTTP/1.1 {head}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
                    connection.sendall(whole.encode() + body)

    threading.Thread(target=serve, daemon=True).start()
    yield listening_at.getsockname()[1]
    listening_at.shutdown(socket.SHUT_RDWR)
    listening_at.close()


@pytest.mark.parametrize("lie", ["elsewhere", "a bomb", "too much", "no protobuf"])
def test_a_server_that_sends_a_node_elsewhere_or_too_much_is_not_followed(door: Door, lie: str) -> None:
    """Another server never hears of it, and nothing is unpacked: to the node its server is away, and it tries again."""

    with socket.create_server(("127.0.0.1", 0)) as another:
        another.setblocking(False)
        head, body = {
            "elsewhere": (f"307 Temporary Redirect\r\nlocation: http://127.0.0.1:{another.getsockname()[1]}/", b""),
            "a bomb": ("200 OK\r\ncontent-encoding: gzip", gzip.compress(bytes(1 << 24))),
            "too much": ("200 OK", bytes(fleet_client.MOST_REPLY_BYTES + 1)),
            "no protobuf": ("200 OK\r\ncontent-type: text/plain", b"hello"),
        }[lie]
        said, stop = list[str](), threading.Event()

        def say(line: str) -> None:
            said.append(line)
            stop.set()

        with answering(door._folder, head, body) as port:
            worker.Worker(
                f"127.0.0.1:{port}",
                key=load_private_key(door._folder / "anna/node.key"),
                authority=(door._folder / "authority/ca.pem").read_bytes(),
                answer=lambda order: None,
                limit=100,
                stop=stop,
                say=say,
            ).run()
        assert said == [f"127.0.0.1:{port} cannot be reached: trying again until it can"]
        with pytest.raises(BlockingIOError):
            another.accept()


@pytest.mark.parametrize("messages", [[], [ProtoMessage()], [ProtoMessage(metadata=Metadata(message_type="train"))]])
def test_a_message_that_is_none_is_a_break_in_the_network(messages: list[Any]) -> None:

    with pytest.raises(httpx.RemoteProtocolError):
        worker._read_message(PullMessagesResponse(messages_list=messages))
