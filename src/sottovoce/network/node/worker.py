"""A node's end of the link over Flower: it asks for orders, hands each to `answer` in this process, and brings back
what that returns.

Nothing that comes over the network is ever run: of Flower, only its client for the Fleet API is used here, which
carries bytes and proves by the node's key who asks. Connections are always made from here, so that a node needs no
open port. What breaks is tried again for as long as an order is worth it; a server that is gone is waited for.
"""

import email.utils
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar, final

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app.message import Message
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufClient, ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from sottovoce.errors import InputError
from sottovoce.network.transport.chunks import (
    CHUNK,
    DEPARTURE_HEADER,
    HEARTBEAT_SECONDS,
    inflate_message,
    max_objects,
    pack_bytes,
    silence_logs,
    split_message,
    unpack_bytes,
)
from sottovoce.network.transport.link import AnswerFunction
from sottovoce.network.transport.signed_requests import PROOF_HEADER, SESSION_BYTES, SESSION_HEADER, prove

T = TypeVar("T")
Say = Callable[[str], None]

SOONEST, LATEST = 0.02, 1.0  # seconds between two attempts: longer from one to the next
PATIENCE = 5.0  # seconds between two attempts to reach a server that is gone
LONGEST = 86_400.0  # seconds that an order may take
CLOCKS = 4.0  # seconds that clocks may differ: Flower refuses a node that is 5 ahead
_OUT_OF_DATE = {9: "is not valid yet", 10: "has expired"}  # OpenSSL's codes
_MOST_BYTES = CHUNK + (1 << 20)  # of one reply of the server


class _Unknown(Exception):
    """The server does not know us: it was started anew, or our key is not, or no longer, in its roster."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__()
        self.ahead = _seconds_ahead(response)


class _Unwanted(Exception):
    """The server knows us, and does not want this: it has stopped waiting, or it is more than was asked for."""


def run_worker(
    server: str,
    *,
    key: EllipticCurvePrivateKey,
    authority: bytes,
    answer: AnswerFunction,
    limit: int,
    stop: threading.Event,
    is_here: Callable[[], bool] = lambda: True,
    departure: Callable[[], bytes | None] = lambda: None,
    say: Say = lambda _: None,
) -> None:
    """Answer orders of the server at `server` (host:port) until `stop` is set.

    Connected only while `is_here` says so, which is asked between orders: nobody counts on a node that is paused.
    `departure` is what tells the server that this node has left for good, once it has.
    `authority` is the certificate (PEM) that the server's must be signed by, `limit` the most bytes of an order.
    Raises InputError where the server is not the one that it should be, or does not take us.
    """
    silence_logs()
    context = ssl.create_default_context(cadata=authority.decode("ascii"))
    client = FleetHttpClient(f"https://{server}", interceptors=signing(key), verify=context)
    _trust_little(client)
    is_told = False

    def leave(node_id: int) -> None:
        nonlocal is_told
        words = departure()
        is_told |= _leave(client, node_id, words) and words is not None

    with client:
        while not stop.is_set():
            if not is_here():
                stop.wait(LATEST)
                continue
            try:
                with _activated(client, key, server=server, stop=stop, is_here=is_here, leave=leave, say=say) as node:
                    if node is not None:
                        _answer_orders(client, node, answer=answer, limit=limit, stop=stop, is_here=is_here)
            except _Unknown:
                continue  # once more from the start: whether it takes us is seen there
            except (httpx.TransportError, _Unwanted):
                stop.wait(SOONEST)
        if departure() is not None and not is_told:
            _come_to_leave(client, key, leave)
            say(
                "the server was told"
                if is_told
                else f"{server} could not be told: the same command tries again, or tell whoever runs it"
            )


def signing(key: EllipticCurvePrivateKey) -> list[Any]:
    """What adds a node's signatures to the requests of Flower's client: Flower's own, and then ours."""
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    return [version, NodeAuthHttpInterceptor(key, key.public_key()), _Proving(key)]


@final
class _Proving:
    """Proves each request (`signed_requests`); once more where the server names another session than ours."""

    def __init__(self, key: EllipticCurvePrivateKey) -> None:
        self._key, self._session = key, bytes(SESSION_BYTES)

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        session = self._session
        response = self._sent(context, call_next, session)
        named = _session_in(response)
        if named is None or named == session:
            return response
        self._session = named
        return self._sent(context, call_next, named)

    def _sent(self, context: ProtobufRequestContext, call_next: ProtobufCall, session: bytes) -> httpx.Response:
        request = context.request
        request.headers[PROOF_HEADER] = prove(
            self._key,
            session=session,
            path=request.url.path,
            timestamp=request.headers[TIMESTAMP_HEADER],
            body=request.content,
        )
        return call_next(context)


def _session_in(response: httpx.Response) -> bytes | None:
    """The session that a server names as it refuses us."""
    if response.status_code != httpx.codes.UNAUTHORIZED:
        return None
    try:
        named = bytes.fromhex(response.headers.get(SESSION_HEADER, ""))
    except ValueError:
        return None
    return named if len(named) == SESSION_BYTES else None


@contextmanager
def _activated(
    client: Any,
    key: EllipticCurvePrivateKey,
    *,
    server: str,
    stop: threading.Event,
    is_here: Callable[[], bool],
    leave: Callable[[int], None],
    say: Say,
) -> Iterator[Any | None]:
    """Within, the server counts on us. None where we were stopped, or went, before it could be reached."""
    request = _activation(key)
    node_id: int | None = None
    told = False
    while node_id is None and not stop.is_set() and is_here():
        try:
            node_id = _authentic(partial(client.ActivateNode, request)).node_id
        except _Unknown as unknown:
            raise InputError(f"{server} does not take this node: {_why(unknown)}") from None
        except httpx.TransportError as error:
            _check_certificate(error, server)
            if not told:
                say(f"{server} cannot be reached: trying again until it can")
                told = True
            stop.wait(PATIENCE if told else SOONEST)
    if node_id is None:
        yield None
        return
    say(f"connected to {server}")
    gone = threading.Event()
    beating = threading.Thread(target=_beat, args=(client, node_id, gone), name="heartbeat", daemon=True)
    beating.start()
    try:
        yield Node(node_id=node_id)
    finally:
        gone.set()
        beating.join()
        if stop.is_set() or not is_here():
            leave(node_id)
        if not stop.is_set() and not is_here():
            say(f"not connected to {server} any more")


def _beat(client: Any, node_id: int, gone: threading.Event) -> None:
    """Let the server know, again and again, that we are there. What goes wrong is seen by whoever asks for orders."""
    request = SendNodeHeartbeatRequest(node=Node(node_id=node_id), heartbeat_interval=HEARTBEAT_SECONDS)
    while not gone.wait(HEARTBEAT_SECONDS / 2):
        try:
            client.SendNodeHeartbeat(request)
        except httpx.HTTPError:
            continue


def _activation(key: EllipticCurvePrivateKey) -> Any:
    return ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=HEARTBEAT_SECONDS)


def _leave(client: Any, node_id: int, departure: bytes | None) -> bool:
    """Say goodbye, so that nobody waits for us: for now, or with a `departure` for good. Whether it was heard."""
    if departure is not None:
        client._client.headers[DEPARTURE_HEADER] = b64encode(departure).decode("ascii")
    try:
        client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))
    except httpx.HTTPError:
        return False
    return True


def _come_to_leave(client: Any, key: EllipticCurvePrivateKey, leave: Callable[[int], None]) -> None:
    """Connect once more, to say that it is for good; what goes wrong is seen by whoever looks whether it was heard."""
    with suppress(httpx.HTTPError, _Unknown, _Unwanted):
        leave(_authentic(partial(client.ActivateNode, _activation(key))).node_id)


def _answer_orders(
    client: Any, node: Any, *, answer: AnswerFunction, limit: int, stop: threading.Event, is_here: Callable[[], bool]
) -> None:
    pause = 0.0
    while not stop.wait(pause) and is_here():
        begun = time.monotonic()
        found = _authentic(partial(client.PullMessages, PullMessagesRequest(node=node)))
        if not found.messages_list:
            held = time.monotonic() - begun > LATEST  # the server has waited with us
            pause = 0.0 if held else min(2 * pause or SOONEST, LATEST)
            continue
        pause = 0.0
        message, tree, order = _read(found)
        until = time.monotonic() + (ttl if 0 <= (ttl := message.metadata.ttl) <= LONGEST else 0.0)
        if order is None:
            order = _fetched(client, node, message, tree, limit=limit, until=until)
        if order is not None and (reply := answer(order)) is not None:
            _bring(client, node, Message(pack_bytes(reply), reply_to=message), until=until)


def _read(found: Any) -> tuple[Message, Any, bytes | None]:
    """A message, the tree of its objects, and its bytes if they came with it."""
    try:
        message = message_from_proto(found.messages_list[0])
        return message, found.message_object_trees[0], unpack_bytes(message)
    except Exception:  # whatever Flower's reader of untrusted bytes stumbles over
        raise httpx.RemoteProtocolError("no message") from None


def _fetched(client: Any, node: Any, message: Message, tree: Any, *, limit: int, until: float) -> bytes | None:
    """The bytes of an order; None where they are more than `limit`, or do not come."""
    run, message_id = message.metadata.run_id, message.metadata.message_id
    names = list(dict.fromkeys(each.object_id for each in iterate_object_tree(tree)))
    if len(names) > max_objects(limit):
        return None
    objects: dict[str, bytes] = {}
    pause = SOONEST
    while len(objects) < len(names):
        for name in names[len(objects) :]:
            request = PullObjectRequest(node=node, run_id=run, object_id=name)
            found = _retried(partial(client.PullObject, request), until=until)
            if not found.object_found or time.monotonic() > until:
                return None
            if not found.object_available:  # the server is still putting it down
                time.sleep(pause)
                pause = min(2 * pause, LATEST)
                break
            objects[name] = found.object_content
    received = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=message_id)
    _retried(partial(client.ConfirmMessageReceived, received), until=until)
    order = inflate_message(message_id, objects)
    return order if order is not None and len(order) <= limit else None


def _bring(client: Any, node: Any, reply: Message, *, until: float) -> None:
    """Bring an answer. After a break, only what the server has not got yet is sent again."""
    bare, tree, objects = split_message(reply)
    run = bare.metadata.run_id
    request = PushMessagesRequest(node=node, messages_list=[message_to_proto(bare)], message_object_trees=[tree])
    try:
        pushed = _retried(partial(client.PushMessages, request), until=until)
        for name in objects.keys() & set(pushed.objects_to_push):
            part = PushObjectRequest(
                node=node, run_id=run, object_id=name, object_content=objects[name], session_id=pushed.session_id
            )
            if not _retried(partial(client.PushObject, part), until=until).stored:
                return  # too late: the server has stopped waiting
    except _Unwanted:
        return


def _retried(call: Callable[[], T], *, until: float) -> T:
    """`call` again and again while the network breaks, as long as an answer is waited for."""
    pause = SOONEST
    while True:
        try:
            return _authentic(call)
        except httpx.TransportError:
            if time.monotonic() + pause > until:
                raise
            time.sleep(pause)
            pause = min(2 * pause, LATEST)


def _authentic(call: Callable[[], T]) -> T:
    """`call`, with the server's refusals as what they are, and its own troubles as a break in the network."""
    try:
        return call()
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            raise _Unknown(error.response) from None
        # Somebody else has sent it before us, or our clock was set back: it is signed anew.
        is_replayed = error.response.status_code == httpx.codes.TOO_EARLY
        if error.response.is_client_error and not is_replayed:
            raise _Unwanted from None
        raise httpx.RemoteProtocolError(f"status {error.response.status_code}") from None
    except ValueError:  # Flower's word for what is no protobuf
        raise httpx.RemoteProtocolError("no answer") from None


def _seconds_ahead(response: httpx.Response) -> float | None:
    """How far our clock is ahead of the server's, by what it says the time is."""
    try:
        return time.time() - email.utils.parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None


def _why(unknown: _Unknown) -> str:
    ahead = unknown.ahead
    if ahead is not None and abs(ahead) > CLOCKS:
        return f"this machine's clock is {abs(ahead):,.0f} s {'ahead' if ahead > 0 else 'behind'}; set it right"
    return "its key is not in the server's roster, or was revoked"


def _check_certificate(error: Exception, server: str) -> None:
    """Refuse a server that cannot prove who it is; that does not go away by trying again."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            if seen.verify_code in _OUT_OF_DATE:
                raise InputError(
                    f"{server}: its certificate {_OUT_OF_DATE[seen.verify_code]}, by this machine's clock "
                    f"({datetime.now(UTC):%Y-%m-%d %H:%M} UTC). Where the clock is right, ask whoever runs the server "
                    "to renew it (`sottovoce keys renew`)"
                ) from None
            raise InputError(
                f"{server} is not the server that it should be: {seen.verify_message}; expected a certificate of the "
                "authority given by --ca"
            ) from None
        seen = seen.__cause__ or seen.__context__


def _trust_little(client: ProtobufClient) -> None:
    """A server, too, sends no more than was agreed, nor us elsewhere: looked at before it is read, or unpacked."""

    def check(response: httpx.Response) -> None:
        packed = "content-encoding" in response.headers  # however little it says that it is
        if packed or int(response.headers.get("content-length", _MOST_BYTES + 1)) > _MOST_BYTES:
            raise httpx.RemoteProtocolError("more than was agreed")

    client._client.follow_redirects = False
    client._client.event_hooks["response"].append(check)
