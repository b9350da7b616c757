"""Orders that are open over Flower, and what their nodes may announce as answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sottovoce.network.transport.chunks import list_objects

TREE = 1 << 7  # bytes that a request needs to name one object
_ANNOUNCEMENTS = 1000  # of one answer: a node tries again when the network breaks


class FlowerOrderLink(Protocol):
    """The link that orders were sent over."""

    def wait_for(self, sent: "FlowerOrders") -> None: ...

    def forget(self, sent: "FlowerOrders") -> None: ...


@dataclass
class AwaitedOrder:
    """An order that waits for its answer; `announced` is what that is made of, once its node has said so."""

    name: str
    max_objects: int
    announced: bytes | None = None
    announcements: int = 0
    lost: bool = False


@dataclass(eq=False, kw_only=True)
class FlowerOrders:
    """Orders that were sent together, in a run of Flower's that is theirs alone while they are open.

    `waiting` are those without an answer, `coming` those of which objects are still on the way.
    """

    link: "FlowerOrderLink"
    run: int
    deadline: float
    limit: int
    own: list[str] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    coming: dict[str, str] = field(default_factory=dict)
    found: dict[str, bytes] = field(default_factory=dict)

    def answers(self) -> Mapping[str, bytes]:
        try:
            self.link.wait_for(self)
        finally:
            self.close()
        return self.found

    def close(self) -> None:
        self.link.forget(self)


def more_than(most: int, tree: Any) -> bool:
    """Whether `tree` names more objects than `most`, or is deeper than a message."""
    return tree.ByteSize() > most * TREE or sum(1 for _ in list_objects(tree)) > most


def may_announce(order: AwaitedOrder, tree: Any, message_id: str) -> bool:
    """Whether an answer to `order` may be made of the objects of `tree`: of few enough, and the same as ever.

    They are deleted by the answer's name, so that nothing else may be their root.
    """
    order.announcements += 1
    if tree.object_id != message_id or more_than(order.max_objects, tree) or order.announcements > _ANNOUNCEMENTS:
        return False
    announced: bytes = tree.SerializeToString(deterministic=True)
    if order.announced is None:
        order.announced = announced
    return order.announced == announced
