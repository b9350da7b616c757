"""The link over Flower (flwr 1.41): nodes with keys ask for their orders over TLS, and send answers.

    server ─ FlowerLink ─ Flower's state, in memory ◄─ Flower's Fleet API ◄─ RequestLimits ◄─ TLS ◄─ nodes (`worker`)

Flower carries and authenticates. Its API for nodes is served from this process, out of the state that `ask` writes to
and reads from; there is no Control API, no Runtime API and no code to ship. Nodes are registered here, by the public
keys of a roster, and cannot register themselves. decisions/026 lists the names inside Flower that are used, and why.
"""

import asyncio
import threading
import time
from base64 import b64decode, b64encode
from collections import Counter, deque
from collections.abc import Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, final

from fastapi import Depends, FastAPI, HTTPException, Request
from flwr.app import ConfigRecord, Message, Metadata
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, NodeStatus, TaskType
from flwr.supercore.error import http_error_translator
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.object_store import NoObjectInStoreError
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router as fleet_router
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import Response

from sottovoce.base.signatures import PublicKey
from sottovoce.network.transport.chunks import (
    CHUNK,
    DEPARTURE_HEADER,
    HEARTBEAT_SECONDS,
    INLINE,
    inflate_message,
    list_objects,
    max_objects,
    pack_bytes,
    silence_logs,
    split_message,
    unpack_bytes,
)
from sottovoce.network.transport.listener import Listener
from sottovoce.network.transport.open_orders import TREE, AwaitedOrder, FlowerOrders, may_announce
from sottovoce.network.transport.request_limits import AT_ONCE, UNKNOWN, Caller, Receive, RequestLimits, Scope, Send
from sottovoce.network.transport.signed_requests import (
    PROOF_HEADER,
    PUBLIC_KEY_HEADER,
    SESSION_HEADER,
    TIMESTAMP_HEADER,
    SignedRequests,
    key_to_pem,
)

HELD_SECONDS = 3.0  # a node's question whether there is an order is answered when there is one, or after so long

_FRAME = 1 << 12  # bytes of a request besides what it carries

_SPARE_CONNECTIONS = 64  # for others, where every node has all of its own

_PULL = "/v1/fleet/pull-messages"
_DEACTIVATE = "/v1/fleet/deactivate-node"
_POLL_SECONDS = 0.02

# What a node may ask for, and with how many bytes. Registering and fetching code are not allowed.
PATHS = {
    "/v1/fleet/activate-node": _FRAME,
    _DEACTIVATE: _FRAME,
    "/v1/fleet/send-node-heartbeat": _FRAME,
    _PULL: _FRAME,
    "/v1/fleet/pull-object": _FRAME,
    "/v1/fleet/confirm-message-received": _FRAME,
    "/v1/fleet/push-messages": _FRAME + TREE * 1024 + INLINE,
    "/v1/fleet/push-object": _FRAME + CHUNK,
}


@final
class FlowerLink:
    """A `Link` that listens at `host:port`, for `nodes` alone: public keys by name.

    `certificate` and `key` are the server's, in files. Port 0 is any that is free; `port` is the one it got.
    """

    def __init__(self, host: str, port: int, *, certificate: str, key: str, nodes: Mapping[str, PublicKey]) -> None:
        silence_logs()
        self._state: Any = InMemoryLinkState(NoOpFederationManager(), InMemoryObjectStore())
        self._ids = {name: self._register(public_key) for name, public_key in nodes.items()}
        self._names = {node_id: name for name, node_id in self._ids.items()}
        self._free_runs: list[int] = []
        self._open: list[FlowerOrders] = []
        self._callers = {_caller(public_key): name for name, public_key in nodes.items()}
        self._requests = SignedRequests(nodes, now=lambda: datetime.now(UTC))
        self._waiting = {name: deque[str]() for name in nodes}  # orders that they have not fetched
        self._asked: dict[str, AwaitedOrder] = {}
        self._activations = Counter[str]()  # how often each of them was activated
        self._departures: dict[str, bytes] = {}
        self._arrived = threading.Event()
        self._closing = False
        most = _SPARE_CONNECTIONS + AT_ONCE * len(nodes)
        self._listener = Listener(self._application(), host, port, certificate=certificate, key=key, connections=most)
        self.port = self._listener.port

    def _register(self, public_key: PublicKey) -> int:
        node_id: int = self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key_to_pem(public_key), 0)
        return node_id

    def _start_run(self) -> int:
        """Messages belong to a run, which must be running; ours has no code, and needs no token."""
        state = self._state
        run: int = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        (found,) = state.get_run_info(run_ids=[run])
        token = state.claim_task(found.primary_task_id)
        state.activate_task(found.primary_task_id)
        state.task_token_store.pop(found.primary_task_id)
        state.task_token_to_task_id.pop(token)
        return run

    def _application(self) -> RequestLimits:
        """Flower's API for nodes, and nothing else of it, behind the limits on requests."""
        app = FastAPI(
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            middleware=[
                Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
                Middleware(ProtobufTranslationMiddleware),
                Middleware(NodeAuthMiddleware),
            ],
        )
        app.state.linkstate_factory = SimpleNamespace(state=lambda: self._state)
        app.state.enable_supernode_auth = True
        app.include_router(fleet_router, dependencies=[Depends(self._admit)])

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == _PULL and not await self._hold(scope):
                await Response(status_code=409)(scope, receive, send)
                return
            if scope["path"] == _DEACTIVATE:
                self._note_departure(scope)
            await app(scope, receive, send)
            if scope["path"].startswith("/v1/fleet/push-"):
                self._arrived.set()

        challenge = (SESSION_HEADER.encode(), self._requests.session.hex().encode())
        return RequestLimits(watched, paths=PATHS, authenticate=self._authenticate, challenge=challenge)

    def _note_departure(self, scope: Scope) -> None:
        """Keep a node's message that it has left for good; its signature is checked later."""
        try:
            said = b64decode(_header(scope, DEPARTURE_HEADER), validate=True)
        except ValueError:
            return
        if said:
            self._departures[self._callers[_header(scope, PUBLIC_KEY_HEADER)]] = said

    async def _hold(self, scope: Scope) -> bool:
        """Let a node that asks for orders wait until there is one: it gets it at once, and asks less often.

        False where it has connected again meanwhile: the order would go to a connection that nobody reads any more.
        """
        name = self._callers[_header(scope, PUBLIC_KEY_HEADER)]
        until, activation = time.monotonic() + HELD_SECONDS, self._activations[name]
        while not self._waiting[name] and time.monotonic() < until and not self._closing:
            await asyncio.sleep(_POLL_SECONDS)
            if self._activations[name] != activation:
                return False
        if self._waiting[name]:
            self._waiting[name].popleft()
        return True

    def _authenticate(self, scope: Scope) -> Caller | int:
        """Who asks, if somebody of the roster has signed this request, and it is here for the first time.

        Flower checks that they ask in their own name, when it has read the rest.
        """
        name = self._callers.get(_header(scope, PUBLIC_KEY_HEADER))
        if name is None:
            return UNKNOWN
        timestamp, proof = _header(scope, TIMESTAMP_HEADER), _header(scope, PROOF_HEADER)
        return self._requests.caller(name, path=scope["path"], timestamp=timestamp, proof=proof)

    def _admit(self, request: Request) -> None:
        """Refuse what Flower lets an authenticated node do, and should not."""
        asked = request.state.protobuf_request
        if isinstance(asked, ActivateNodeRequest):
            node_id = self._state.get_node_id_by_public_key(asked.public_key)
            if node_id is None:
                raise HTTPException(401)
            # Back after a crash: it need not wait until Flower gives it up, nor we for its old orders.
            self._state.deactivate_node(node_id)
            self._drop_orders(self._names[node_id])
        if isinstance(asked, PushMessagesRequest):
            if not len(asked.messages_list) == len(asked.message_object_trees) == 1:
                raise HTTPException(403)
            metadata, tree = asked.messages_list[0].metadata, asked.message_object_trees[0]
            order = self._asked.get(metadata.reply_to_message_id)
            sender = self._names.get(asked.node.node_id)
            own = metadata.src_node_id == asked.node.node_id and order is not None and order.name == sender
            if order is None or not own or not may_announce(order, tree, metadata.message_id):
                raise HTTPException(403)

    def _drop_orders(self, name: str) -> None:
        """Wait no longer for what `name` was handed by now."""
        self._activations[name] += 1
        for order_id, order in list(self._asked.items()):
            message = self._state.message_ins_store.get(order_id)
            if order.name == name and message is not None and message.metadata.delivered_at:
                order.lost = True  # whatever becomes of the rest
                self._delete(order_id)
        self._arrived.set()

    def _delete(self, order_id: str) -> None:
        """An order, and what there is of its answer."""
        reply_id = self._state.message_ins_id_to_message_res_id.get(order_id)
        self._state.delete_messages({order_id})
        for object_id in (order_id, reply_id):
            if object_id is not None:
                self._state.object_store.delete(object_id)

    def present(self) -> frozenset[str]:
        online = self._state.get_node_info(statuses=[NodeStatus.ONLINE])
        return frozenset(self._names[node.node_id] for node in online)

    def ask(self, orders: Mapping[str, bytes], *, seconds: float, limit: int) -> Mapping[str, bytes]:
        return self.send(orders, seconds=seconds, limit=limit).answers()

    def send(self, orders: Mapping[str, bytes], *, seconds: float, limit: int) -> FlowerOrders:
        """As `Link` says. Flower's state hands a node its messages in the order in which they were stored."""
        run = self._free_runs.pop() if self._free_runs else self._start_run()
        sent = FlowerOrders(link=self, run=run, deadline=time.monotonic() + seconds, limit=limit)
        self._open.append(sent)
        try:
            known: dict[bytes, ConfigRecord] = {}  # a model is the same for all
            for name in orders.keys() & self.present():
                order_id = self._send(name, orders[name], run=run, seconds=seconds, limit=limit, known=known)
                sent.own.append(order_id)
                sent.waiting.add(order_id)
        except BaseException:
            sent.close()
            raise
        return sent

    def wait_for(self, sent: FlowerOrders) -> None:
        """Until all have answered, or the time is over. Answers to other open orders are taken meanwhile, too."""
        while sent.waiting or sent.coming:
            self._arrived.clear()
            now = time.monotonic()
            for each in self._open:
                if each is sent or now <= each.deadline:
                    self._collect(each)
            left = sent.deadline - time.monotonic()
            if left <= 0 or not (sent.waiting or sent.coming):
                break
            self._arrived.wait(min(left, HEARTBEAT_SECONDS))

    def _send(
        self,
        name: str,
        order: bytes,
        *,
        run: int,
        seconds: float,
        limit: int,
        known: dict[bytes, ConfigRecord] | None = None,
    ) -> str:
        """Store the order where its node finds it; the message's name."""
        metadata = Metadata(
            run_id=run,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=self._ids[name],
            reply_to_message_id="",
            group_id="",
            created_at=datetime.now(UTC).timestamp(),
            ttl=seconds + 60,  # we stop asking before Flower gives up
            message_type="train",
        )
        bare, tree, objects = split_message(Message(metadata=metadata, content=pack_bytes(order, known)))
        message_id: str = bare.metadata.message_id
        self._asked[message_id] = AwaitedOrder(name, max_objects(limit))
        session = self._state.start_session(run)
        _, missing = self._state.store_message_and_object_tree(bare, tree, session)
        for object_id in missing:
            if object_id in objects:
                self._state.store_object(run, session, object_id, objects[object_id])
        self._waiting[name].append(message_id)
        return message_id

    def _collect(self, sent: FlowerOrders) -> None:
        """Move orders that are answered from `waiting` to `coming`, where objects of the answer are still on the way,
        and to `found`. Those of nodes that are away, or sent something else, are in none of them then."""
        waiting, coming, answers, limit = sent.waiting, sent.coming, sent.found, sent.limit
        for order_id in [each for each in (*waiting, *coming) if self._asked[each].lost]:
            waiting.discard(order_id)
            coming.pop(order_id, None)
        with self._state.lock:  # an order that is given up in between would be a KeyError
            waiting.intersection_update(self._state.message_ins_store)  # a clock that jumps ahead makes Flower forget
            replies = self._state.get_message_res(set(waiting), sent.run)
        for reply in replies:
            order_id = reply.metadata.reply_to_message_id
            waiting.discard(order_id)
            if reply.has_error():  # Flower's own: the node is gone
                self._state.object_store.delete(reply.metadata.message_id)
                continue
            if (answer := unpack_bytes(reply)) is None:
                coming[order_id] = reply.metadata.message_id
            elif len(answer) <= limit:
                answers[self._asked[order_id].name] = answer
        present = self.present()
        for order_id, reply_id in list(coming.items()):
            objects = self._objects_of(reply_id, sent.run)
            if any(found == b"" for found in objects.values()) and self._asked[order_id].name in present:
                continue
            del coming[order_id]
            answer = inflate_message(reply_id, objects)
            if answer is not None and len(answer) <= limit:
                answers[self._asked[order_id].name] = answer

    def _objects_of(self, reply_id: str, run: int) -> dict[str, bytes]:
        """Those that a reply is made of by their hashes, empty where they have not come; none where Flower gave up."""
        try:
            tree = self._state.object_store.get_object_tree(reply_id)
        except NoObjectInStoreError:
            return {}
        found = {object_id: self._state.get_object(run, object_id) for object_id in list_objects(tree)}
        return {object_id: content for object_id, content in found.items() if content is not None}

    def forget(self, sent: FlowerOrders) -> None:
        """Orders and answers are deleted, and what comes later is refused. Once: the same again does nothing."""
        if sent not in self._open:
            return
        self._open.remove(sent)
        for order_id in sent.own:
            del self._asked[order_id]
            self._delete(order_id)
        self._state.delete_sessions_in_run(sent.run)
        self._free_runs.append(sent.run)

    def departures(self) -> Mapping[str, bytes]:
        found, self._departures = self._departures, {}
        return found

    def close(self) -> None:
        self._closing = True
        self._listener.close()


def _header(scope: Scope, name: str) -> bytes:
    """Empty where it is not there once: of two, Flower might read the other."""
    found: list[bytes] = [value for each, value in scope["headers"] if each == name.encode()]
    return found[0] if len(found) == 1 else b""


def _caller(public_key: PublicKey) -> bytes:
    """How a node with this key names itself in a request."""
    return b64encode(key_to_pem(public_key))
