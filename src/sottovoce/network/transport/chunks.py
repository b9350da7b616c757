"""Bytes as Flower carries them, for both ends of the link.

A message is a few records of at most `CHUNK` bytes, which Flower knows by their hashes: what is lost on the way is sent
again chunk by chunk, and the model of a round, the same for all, is held once. A small one travels whole.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

CHUNK = 1 << 22  # bytes of a message that travel together
INLINE = 1 << 16  # bytes that travel with the message itself: a request instead of five
DEPARTURE_HEADER = "sottovoce-departure"  # of a node's last request: that its user has left for good, signed
HEARTBEAT_SECONDS = 10.0  # the least that Flower takes; who misses two is away

_RECORD = "bytes"
_OBJECTS = 2  # of a message besides its chunks: itself, and the record of its records


def silence_logs() -> None:
    """Flower and its server log nothing beside our own messages."""
    for name in ("flwr", "uvicorn", "uvicorn.error", "httpx"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def pack_bytes(content: bytes, known: dict[bytes, ConfigRecord] | None = None) -> RecordDict:
    """`content` as records of at most `CHUNK` bytes each; chunks that were packed before are taken from `known`."""
    known = {} if known is None else known
    chunks = [content[first : first + CHUNK] for first in range(0, len(content), CHUNK)]
    for chunk in chunks:
        if chunk not in known:
            known[chunk] = _record(chunk)
    return RecordDict({f"{number:08}": known[chunk] for number, chunk in enumerate(chunks)})


def _record(chunk: bytes) -> ConfigRecord:
    """A chunk that is serialised once: Flower would do it for its hash, and again to send it, for every node."""
    record = ConfigRecord({_RECORD: chunk})
    written = record.deflate()
    record.__dict__["deflate"] = lambda: written
    return record


def unpack_bytes(message: Message) -> bytes | None:
    """What was packed into `message`; None where it holds anything else, or nothing."""
    if not message.has_content() or not message.content.config_records:
        return None
    records = message.content.config_records
    chunks: list[Any] = [dict(records[name]).get(_RECORD) for name in sorted(records)]
    return b"".join(chunks) if all(isinstance(chunk, bytes) for chunk in chunks) else None


def max_objects(limit: int) -> int:
    """How many objects a message of up to `limit` bytes is made of at most."""
    return _OBJECTS + math.ceil(limit / CHUNK)


def list_objects(tree: Any) -> Iterator[str]:
    """The names of all objects in a tree, children first."""
    for child in tree.children:
        yield from list_objects(child)
    yield tree.object_id


def split_message(message: Message) -> tuple[Message, Any, dict[str, bytes]]:
    """A message without its content, the tree of its objects, and those by their hashes; a small one is left whole."""
    with no_object_id_recompute():
        message.metadata.__dict__["_message_id"] = message.object_id
        if len(unpack_bytes(message) or b"") <= INLINE:
            return message, ObjectTree(object_id=message.object_id), {}
        objects: dict[str, bytes] = {}
        tree = _deflate(message, objects)
        return Message(metadata=message.metadata, content=RecordDict()), tree, objects


def _deflate(found: Any, objects: dict[str, bytes]) -> Any:
    """The tree of `found`, all of whose objects are added to `objects`."""
    children = [_deflate(child, objects) for child in (found.children or {}).values()]
    objects[found.object_id] = found.deflate()
    return ObjectTree(object_id=found.object_id, children=children)


def inflate_message(message_id: str, objects: dict[str, bytes]) -> bytes | None:
    """What a message of these objects holds; None where it is none of ours. Whoever sent it may have sent anything."""
    try:
        message = inflate_object_from_contents(message_id, objects)
        return unpack_bytes(message) if isinstance(message, Message) else None
    except Exception:  # whatever Flower's reader of untrusted bytes raises
        return None
