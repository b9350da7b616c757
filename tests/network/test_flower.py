"""The link over Flower, with nodes that are processes: who reaches what, and what becomes of those that break."""

import queue
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

flower = pytest.importorskip(
    "sottovoce.network.transport.flower", reason="flwr is not installed (the extra `network`)", exc_type=ImportError
)

import httpx  # noqa: E402  # flwr brings it
from flwr.proto.fleet_pb2 import PushMessagesRequest  # noqa: E402

from sottovoce.network.keys import (  # noqa: E402
    fingerprint,
    load_private_key,
    load_public_key,
    make_authority,
    make_node,
    make_server,
)
from sottovoce.network.node import worker  # noqa: E402
from sottovoce.network.transport import chunks  # noqa: E402
from sottovoce.network.transport.fleet_client import FleetClient  # noqa: E402

NODE = Path(__file__).with_name("echoing_node.py")
LONG = 600.0  # seconds that nothing here ever needs
NODES = ("anna", "bert")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of an authority, a server at 127.0.0.1, two nodes, a stranger and another authority."""
    folder = tmp_path_factory.mktemp("keys")
    now = datetime.now(UTC)
    for name in ("authority", "another"):
        make_authority(folder / name, now=now)
    make_server(folder / "server", authority=folder / "authority", hosts=["127.0.0.1"], now=now)
    for name in (*NODES, "stranger"):
        make_node(folder / name)
    return folder


def listening(keys: Path, *, port: int = 0) -> Any:
    return flower.FlowerLink(
        "127.0.0.1",
        port,
        certificate=str(keys / "server/server.pem"),
        key=str(keys / "server/server.key"),
        nodes={name(keys, node): load_public_key(keys / node / "node.pub") for node in NODES},
    )


def name(keys: Path, node: str) -> str:
    return fingerprint(load_public_key(keys / node / "node.pub")).hex()


@pytest.fixture
def link(keys: Path) -> Iterator[Any]:
    link = listening(keys)
    yield link
    link.close()


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(keys: Path) -> Iterator[Start]:
    """Start a node that behaves in some manner; all are ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(manner: str, link: Any, node: str = "anna", ca: str = "authority") -> subprocess.Popen[str]:
        arguments = [manner, f"127.0.0.1:{link.port}", str(keys / node / "node.key"), str(keys / ca / "ca.pem")]
        process = subprocess.Popen(
            [sys.executable, str(NODE), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def says(process: subprocess.Popen[str]) -> str:
    """The next line of a node; waits for it."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_orders_go_out_and_answers_come_back(keys: Path, link: Any, start: Start) -> None:
    for node in NODES:
        assert says(start("echo", link, node)) == f"connected to 127.0.0.1:{link.port}"
    assert link.present() == {name(keys, node) for node in NODES}
    orders = {name(keys, node): node.encode() * (1 << 21) for node in NODES}  # two chunks each
    answers = link.ask(orders, seconds=LONG, limit=1 << 24)
    assert answers == {node: order[::-1] for node, order in orders.items()}


def test_who_wants_to_be_away_is_not_here(keys: Path, link: Any, start: Start) -> None:
    """So that no round counts on them; and they are here again when they want to be."""
    anna = start("echo", link)
    assert says(anna) == f"connected to 127.0.0.1:{link.port}"
    away = keys / "anna" / "away"
    try:
        away.touch()
        assert says(anna) == f"not connected to 127.0.0.1:{link.port} any more"
        assert link.present() == frozenset()
    finally:
        away.unlink()
    assert says(anna) == f"connected to 127.0.0.1:{link.port}"
    assert link.present() == {name(keys, "anna")}


def test_orders_may_be_open_side_by_side_and_a_node_answers_older_ones_first(
    keys: Path, link: Any, start: Start
) -> None:
    """In whatever order their answers are taken; nothing is kept of them then."""
    says(start("numbered", link))
    anna = name(keys, "anna")
    opened = [link.send({anna: b"%d" % number}, seconds=LONG, limit=100) for number in range(4)]
    for number in (2, 0, 3, 1):
        assert opened[number].answers() == {anna: b"%d: %d" % (number + 1, number)}
    state = link._state
    assert (len(state.object_store), state.num_message_ins(), state.num_message_res()) == (0, 0, 0)
    assert (link._open, link._asked, state._object_push_sessions) == ([], {}, {})


def test_orders_that_are_given_up_take_nothing_of_others_with_them(keys: Path, link: Any, start: Start) -> None:
    """An answer of many parts is on its way while the orders before it, and after it, are closed."""
    says(start("large", link))
    anna = name(keys, "anna")
    before, between, after = (link.send({anna: b"train"}, seconds=LONG, limit=1 << 24) for _ in range(3))
    before.close()
    after.close()
    after.close()
    assert {node: len(answer) for node, answer in between.answers().items()} == {anna: 3 << 22}
    assert link.send({}, seconds=LONG, limit=100).answers() == {}
    assert len(link._state.object_store) == 0


def test_nothing_is_kept_of_what_was_said(keys: Path, link: Any, start: Start) -> None:
    says(start("echo", link))
    link.ask({name(keys, "anna"): b"a secret"}, seconds=LONG, limit=100)
    state = link._state
    assert (len(state.object_store), state.num_message_ins(), state.num_message_res()) == (0, 0, 0)


def test_who_is_away_is_not_waited_for(keys: Path, link: Any) -> None:
    assert link.present() == frozenset()
    assert link.ask({name(keys, "anna"): b"anybody?"}, seconds=LONG, limit=100) == {}


def test_an_answer_that_is_too_large_is_not_taken(keys: Path, link: Any, start: Start) -> None:
    """Twelve megabytes to an order that allows a hundred bytes: refused when it is announced, before a byte of it."""
    says(start("large", link))
    anna = name(keys, "anna")
    assert link.ask({anna: b"say little"}, seconds=1, limit=100) == {}
    assert len(link._state.object_store) == 0
    assert len(link.ask({anna: b"say more"}, seconds=LONG, limit=1 << 24)[anna]) == 3 << 22


def test_a_node_knows_which_of_its_answers_the_server_has_taken(keys: Path, link: Any) -> None:
    """One that comes in time, and one that comes when the server has stopped waiting for it."""
    stop, connected, asked, late = (threading.Event() for _ in range(4))
    taken = queue.Queue[bool]()

    def answer(order: bytes) -> bytes:
        if order == b"slowly":
            asked.set()
            late.wait()
        return order[::-1]

    node = worker.Worker(
        f"127.0.0.1:{link.port}",
        key=load_private_key(keys / "anna" / "node.key"),
        authority=(keys / "authority" / "ca.pem").read_bytes(),
        answer=answer,
        limit=1 << 20,
        stop=stop,
        on_sent=taken.put,
        say=lambda line: connected.set(),
    )
    working = threading.Thread(target=node.run)
    working.start()
    try:
        connected.wait()
        anna = name(keys, "anna")
        assert link.ask({anna: b"at once"}, seconds=LONG, limit=100) == {anna: b"ecno ta"}
        assert taken.get() is True
        with ThreadPoolExecutor(1) as others:
            asking = others.submit(link.ask, {anna: b"slowly"}, seconds=LONG, limit=100)
            asked.wait()
            link._drop_orders(anna)
            assert asking.result() == {}
        late.set()
        assert taken.get() is False
    finally:
        late.set()
        stop.set()
        working.join()


@pytest.mark.parametrize("manner", ["killed-in-training", "killed-in-upload", "silent"])
def test_a_node_that_breaks_is_missing_and_may_come_back_at_once(
    keys: Path, link: Any, start: Start, manner: str
) -> None:
    anna = name(keys, "anna")
    broken = start(manner, link)
    says(broken)
    assert link.ask({anna: b"an order"}, seconds=2, limit=1 << 24) == {}
    if manner == "silent":
        broken.kill()  # else both would be Anna, and which of them gets the order would depend on chance
    assert broken.wait() == -9
    assert says(start("echo", link)) == f"connected to 127.0.0.1:{link.port}"  # though nobody has missed it yet
    assert link.ask({anna: b"another"}, seconds=LONG, limit=100) == {anna: b"rehtona"}
    assert len(link._state.object_store) == 0


@pytest.mark.parametrize("manner", ["killed-in-training", "killed-in-upload"])
def test_a_node_that_comes_back_is_not_waited_for_with_what_it_was_to_do_before(
    keys: Path, link: Any, start: Start, manner: str
) -> None:
    anna = name(keys, "anna")
    broken = start(manner, link)
    says(broken)
    with ThreadPoolExecutor() as others:
        asking = others.submit(link.ask, {anna: b"an order"}, seconds=LONG, limit=1 << 24)
        assert broken.wait() == -9
        says(start("echo", link))
        assert asking.result() == {}
    assert len(link._state.object_store) == 0


def test_nodes_come_back_by_themselves_after_the_server_was_gone(keys: Path, start: Start) -> None:
    link = listening(keys)
    node = start("echo", link)
    says(node)
    link.close()
    again = listening(keys, port=link.port)  # knows nothing of before, and gives the node another id
    try:
        said = says(node)
        if said.endswith("cannot be reached: trying again until it can"):  # unless it has missed that
            said = says(node)
        assert said == f"connected to 127.0.0.1:{link.port}"
        anna = name(keys, "anna")
        assert again.ask({anna: b"still here?"}, seconds=LONG, limit=100) == {anna: b"?ereh llits"}
    finally:
        again.close()


# Who is refused.


@pytest.mark.parametrize(
    ("manner", "node", "ca", "why"),
    [
        ("echo", "stranger", "authority", "does not take this node: its key is not in the server's roster"),
        ("echo", "anna", "another", "is not the server that it should be: "),
        ("clock=120", "anna", "authority", " s ahead; set it right"),
        ("clock=-900", "anna", "authority", " s behind; set it right"),
    ],
    ids=["unknown key", "wrong authority", "clock ahead", "clock behind"],
)
def test_who_is_not_meant_gets_one_clear_line(
    link: Any, start: Start, manner: str, node: str, ca: str, why: str
) -> None:
    refused = start(manner, link, node, ca)
    said = says(refused)
    assert said.startswith(f"error: 127.0.0.1:{link.port} ")
    assert why in said
    assert refused.wait() == 2
    assert link.present() == frozenset()


@pytest.mark.parametrize(("days_ago", "why"), [(10, "has expired"), (-10, "is not valid yet")])
def test_a_certificate_that_is_not_valid_is_said_for_what_it_is(
    keys: Path, tmp_path: Path, start: Start, days_ago: int, why: str
) -> None:
    """Not as another server's: whoever runs this one has to renew it, or a clock is wrong."""
    made = datetime.now(UTC) - timedelta(days=days_ago)
    make_server(tmp_path / "server", authority=keys / "authority", hosts=["127.0.0.1"], now=made, days=5)
    link = flower.FlowerLink(
        "127.0.0.1",
        0,
        certificate=str(tmp_path / "server/server.pem"),
        key=str(tmp_path / "server/server.key"),
        nodes={},
    )
    try:
        refused = start("echo", link)
        said = says(refused)
        assert said.startswith(f"error: 127.0.0.1:{link.port}: its certificate {why}, by this machine's clock (")
        assert said.endswith("ask whoever runs the server to renew it (`sottovoce keys renew`)")
        assert refused.wait() == 2
    finally:
        link.close()


def asked(keys: Path, link: Any, path: str, **request: Any) -> int:
    """The status that a stranger gets who knows the authority's certificate."""
    context = ssl.create_default_context(cafile=str(keys / "authority/ca.pem"))
    with httpx.Client(verify=context) as client:
        method = request.pop("method", "POST")
        return client.request(method, f"https://127.0.0.1:{link.port}{path}", **request).status_code


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/list-nodes",
        "/v1/control/list-runs",
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/runtime/get-nodes",
        "/v1/fleet/register-node",
        "/v1/fleet/get-fab",
        "/v1/fleet/get-run",
        "/openapi.json",
        "/health",
    ],
)
def test_a_stranger_finds_only_the_nodes_api(keys: Path, link: Any, path: str) -> None:
    assert asked(keys, link, path, content=b"") == 403


def test_a_stranger_finds_the_nodes_api_locked(keys: Path, link: Any) -> None:
    headers = {"content-type": "application/x-protobuf"}
    for path in flower.PATHS:
        assert asked(keys, link, path, content=b"", headers=headers) in (400, 401, 415)


def test_a_request_that_is_too_large_is_not_read(keys: Path, link: Any) -> None:
    assert asked(keys, link, "/v1/fleet/pull-messages", content=b"x" * (1 << 20)) == 413


def test_nobody_answers_in_the_name_of_another(keys: Path, link: Any, start: Start) -> None:
    """What Flower lets pass: a node that has proved who it is, with a reply whose sender is somebody else."""
    says(start("silent", link, "anna"))
    says(start("silent", link, "bert"))
    ids = link._ids
    anna, bert = name(keys, "anna"), name(keys, "bert")
    (order_id,) = link.send({anna: b"for anna"}, seconds=LONG, limit=100).own
    order = link._state.message_ins_store[order_id]
    bare, tree, _ = chunks.split_message(chunks.Message(chunks.pack_bytes(b"anna says"), reply_to=order))
    key = load_private_key(keys / "bert" / "node.key")
    authority = (keys / "authority/ca.pem").read_bytes()
    from flwr.common.serde import message_to_proto
    from flwr.proto.node_pb2 import Node

    with FleetClient(f"127.0.0.1:{link.port}", key=key, authority=authority) as client:
        for claimed, status in ((ids[bert], 403), (ids[anna], 401)):
            request = PushMessagesRequest(
                node=Node(node_id=claimed), messages_list=[message_to_proto(bare)], message_object_trees=[tree]
            )
            with pytest.raises(httpx.HTTPStatusError) as refused:
                client.send(request)
            assert refused.value.response.status_code == status
    assert link._state.num_message_res() == 0
