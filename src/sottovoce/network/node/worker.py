"""A node's end of the link over Flower: it asks for orders, answers each in this process, and sends the answer.

Nothing that comes over the network is ever run. Connections are always made from here, so that a node needs no open
port. What breaks is tried again for as long as an order is worth it; a server that is gone is waited for.
"""

import email.utils
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, final

import httpx
from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2, node_pb2

from sottovoce.base.errors import InputError
from sottovoce.base.signatures import PrivateKey
from sottovoce.network.transport.chunks import (
    DEPARTURE_HEADER,
    HEARTBEAT_SECONDS,
    inflate_message,
    list_objects,
    max_objects,
    pack_bytes,
    silence_logs,
    split_message,
    unpack_bytes,
)
from sottovoce.network.transport.fleet_client import FleetClient
from sottovoce.network.transport.link import AnswerFunction
from sottovoce.network.transport.signed_requests import key_to_pem

SOONEST, LATEST = 0.02, 1.0  # seconds between two attempts: longer from one to the next
RECONNECT_SECONDS = 5.0  # between two attempts to reach a server that is gone
LONGEST = 86_400.0  # seconds that an order may take
CLOCKS = 4.0  # seconds that clocks may differ: Flower refuses a node that is 5 ahead
_OUT_OF_DATE = {9: "is not valid yet", 10: "has expired"}  # OpenSSL's codes


class _Unknown(Exception):
    """The server does not know us: it was started anew, or our key is not, or no longer, in its roster."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__()
        self.seconds_ahead = _seconds_ahead(response)


class _Unwanted(Exception):
    """The server knows us, and does not want this: it has stopped waiting, or it is more than was asked for."""


@final
class Worker:
    """Answers orders of the server at `server` (host:port) until `stop` is set.

    Connected only while `is_here`, which is asked between orders: servers count on nodes that are connected.
    `departure` is the message that this node has left for good, once it has. `authority` is the certificate (PEM) that
    the server's must be signed by, `limit` the most bytes of an order. `on_sent` is told after each answer whether the
    server has taken it.
    """

    def __init__(
        self,
        server: str,
        *,
        key: PrivateKey,
        authority: bytes,
        answer: AnswerFunction,
        limit: int,
        stop: threading.Event,
        is_here: Callable[[], bool] = lambda: True,
        departure: Callable[[], bytes | None] = lambda: None,
        on_sent: Callable[[bool], None] = lambda is_taken: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._server, self._answer, self._limit, self._stop = server, answer, limit, stop
        self._is_here, self._departure, self._on_sent, self._say = is_here, departure, on_sent, say
        self._client = FleetClient(server, key=key, authority=authority)
        self._activation = fleet_pb2.ActivateNodeRequest(
            public_key=key_to_pem(key.public_key()), heartbeat_interval=HEARTBEAT_SECONDS
        )
        self._has_sent_departure = False

    def run(self) -> None:
        """InputError where the server is not the one that it should be, or does not take us."""
        silence_logs()
        with self._client:
            while not self._stop.is_set():
                if not self._is_here():
                    self._stop.wait(LATEST)
                    continue
                try:
                    with self._activated() as node:
                        if node is not None:
                            self._answer_orders(node)
                except _Unknown:
                    continue  # once more from the start: whether it takes us is seen there
                except (httpx.TransportError, _Unwanted):
                    self._stop.wait(SOONEST)
            if self._departure() is not None and not self._has_sent_departure:
                self._reconnect_to_leave()

    # Connecting.

    @contextmanager
    def _activated(self) -> Iterator[Any | None]:
        """Within, the server counts on us. None where we were stopped, or went, before it could be reached."""
        node_id = self._activate()
        if node_id is None:
            yield None
            return
        self._say(f"connected to {self._server}")
        gone = threading.Event()
        beating = threading.Thread(target=self._send_heartbeats, args=(node_id, gone), name="heartbeat", daemon=True)
        beating.start()
        try:
            yield node_pb2.Node(node_id=node_id)
        finally:
            gone.set()
            beating.join()
            if self._stop.is_set() or not self._is_here():
                self._deactivate(node_id)
            if not self._stop.is_set() and not self._is_here():
                self._say(f"not connected to {self._server} any more")

    def _activate(self) -> int | None:
        has_said = False
        while not self._stop.is_set() and self._is_here():
            try:
                return int(self._call(self._activation).node_id)
            except _Unknown as unknown:
                raise InputError(f"{self._server} does not take this node: {_why(unknown)}") from None
            except httpx.TransportError as error:
                _check_certificate(error, self._server)
                if not has_said:
                    self._say(f"{self._server} cannot be reached: trying again until it can")
                    has_said = True
                self._stop.wait(RECONNECT_SECONDS)
        return None

    def _send_heartbeats(self, node_id: int, gone: threading.Event) -> None:
        """What goes wrong is seen by whoever asks for orders."""
        node = node_pb2.Node(node_id=node_id)
        request = heartbeat_pb2.SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_SECONDS)
        while not gone.wait(HEARTBEAT_SECONDS / 2):
            with suppress(httpx.HTTPError):
                self._client.send(request, seconds=HEARTBEAT_SECONDS / 2)

    def _deactivate(self, node_id: int) -> None:
        """Take leave, so that nobody waits for us; for good where there is a departure to send."""
        departure = self._departure()
        headers = None if departure is None else {DEPARTURE_HEADER: b64encode(departure).decode("ascii")}
        with suppress(httpx.HTTPError):
            self._client.send(fleet_pb2.DeactivateNodeRequest(node_id=node_id), headers=headers)
            self._has_sent_departure |= departure is not None

    def _reconnect_to_leave(self) -> None:
        """Connect once more, to say that it is for good."""
        with suppress(httpx.HTTPError, _Unknown, _Unwanted):
            self._deactivate(self._call(self._activation).node_id)
        self._say(
            "the server was told"
            if self._has_sent_departure
            else f"{self._server} could not be told: the same command tries again, or tell whoever runs it"
        )

    # Orders.

    def _answer_orders(self, node: Any) -> None:
        pause = 0.0
        while not self._stop.wait(pause) and self._is_here():
            begun = time.monotonic()
            found = self._call(fleet_pb2.PullMessagesRequest(node=node))
            if not found.messages_list:
                was_held = time.monotonic() - begun > LATEST  # the server has waited with us
                pause = 0.0 if was_held else min(2 * pause or SOONEST, LATEST)
                continue
            pause = 0.0
            message, tree, order = _read_message(found)
            until = time.monotonic() + (ttl if 0 <= (ttl := message.metadata.ttl) <= LONGEST else 0.0)
            if order is None:
                order = self._fetch_order(node, message, tree, until=until)
            if order is not None and (reply := self._answer(order)) is not None:
                is_taken = False
                try:
                    with suppress(_Unwanted):
                        is_taken = self._send_answer(node, Message(pack_bytes(reply), reply_to=message), until=until)
                finally:
                    self._on_sent(is_taken)

    def _fetch_order(self, node: Any, message: Message, tree: Any, *, until: float) -> bytes | None:
        """The bytes of an order; None where they are more than the limit, or do not come."""
        run, message_id = message.metadata.run_id, message.metadata.message_id
        names = list(dict.fromkeys(list_objects(tree)))
        if len(names) > max_objects(self._limit):
            return None
        objects: dict[str, bytes] = {}
        pause = SOONEST
        while len(objects) < len(names):
            for name in names[len(objects) :]:
                request = message_pb2.PullObjectRequest(node=node, run_id=run, object_id=name)
                found = self._retry(request, until=until)
                if not found.object_found or time.monotonic() > until:
                    return None
                if not found.object_available:  # the server is still writing it
                    time.sleep(pause)
                    pause = min(2 * pause, LATEST)
                    break
                objects[name] = found.object_content
        received = message_pb2.ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=message_id)
        self._retry(received, until=until)
        order = inflate_message(message_id, objects)
        return order if order is not None and len(order) <= self._limit else None

    def _send_answer(self, node: Any, reply: Message, *, until: float) -> bool:
        """Whether the server took it. After a break, only what it has not got yet is sent again."""
        bare, tree, objects = split_message(reply)
        pushed = self._retry(
            fleet_pb2.PushMessagesRequest(
                node=node, messages_list=[message_to_proto(bare)], message_object_trees=[tree]
            ),
            until=until,
        )
        for name in objects.keys() & set(pushed.objects_to_push):
            part = message_pb2.PushObjectRequest(
                node=node,
                run_id=bare.metadata.run_id,
                object_id=name,
                object_content=objects[name],
                session_id=pushed.session_id,
            )
            if not self._retry(part, until=until).stored:
                return False  # too late: the server has stopped waiting
        return True

    # Requests.

    def _retry(self, request: Any, *, until: float) -> Any:
        """Send again and again while the network breaks, as long as an answer is waited for."""
        pause = SOONEST
        while True:
            try:
                return self._call(request)
            except httpx.TransportError:
                if time.monotonic() + pause > until:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, LATEST)

    def _call(self, request: Any) -> Any:
        """The server's response, with its refusals as what they are, and its own troubles as a break in the network."""
        try:
            return self._client.send(request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.UNAUTHORIZED:
                raise _Unknown(error.response) from None
            # Somebody else has sent it before us, or our clock was set back: it is signed anew.
            is_replayed = error.response.status_code == httpx.codes.TOO_EARLY
            if error.response.is_client_error and not is_replayed:
                raise _Unwanted from None
            raise httpx.RemoteProtocolError(f"status {error.response.status_code}") from None


def _read_message(found: Any) -> tuple[Message, Any, bytes | None]:
    """A message, the tree of its objects, and its bytes if they came with it."""
    try:
        message = message_from_proto(found.messages_list[0])
        return message, found.message_object_trees[0], unpack_bytes(message)
    except Exception:  # whatever Flower's reader of untrusted bytes raises
        raise httpx.RemoteProtocolError("no message") from None


def _seconds_ahead(response: httpx.Response) -> float | None:
    """How far our clock is ahead of the server's, by what it says the time is."""
    try:
        return time.time() - email.utils.parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None


def _why(unknown: _Unknown) -> str:
    ahead = unknown.seconds_ahead
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
