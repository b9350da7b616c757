"""An ordinary app of Flower for tests: users who pull a small model to their own, some of them in trouble."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from sottovoce.base.seeds import stream
from sottovoce.dp.flower import Mod, to_models, to_record

NAN, FAILS, MISSING, MISSHAPEN = 1, 2, 3, 4  # users, by their index
START = {"w": np.zeros((3, 2), dtype=np.float32), "b": np.zeros(2, dtype=np.float32)}


def train_locally(user: int, model: dict[str, Any]) -> dict[str, Any]:
    """What a user makes of a model: half the way to their own, and nothing useful where they are in trouble."""
    own = {name: stream(5, "own", user, name).normal(1.0, 1.0, one.shape) for name, one in model.items()}
    if user == NAN:
        own["w"][0, 0] = np.nan
    return {name: (one + 0.5 * (own[name] - one)).astype(one.dtype) for name, one in model.items()}


def make_client_app(mods: list[Mod], *, trouble: bool = True) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        user = int(context.node_config["partition-id"])
        if trouble and user == FAILS:
            raise RuntimeError("what this user said")
        after = train_locally(user, to_models(message.content["arrays"]))
        if trouble and user == MISSHAPEN:
            after["w"] = after["w"][:1]
        metrics = MetricRecord({"num-examples": user + 1, "loss": 0.5})
        return Message(RecordDict({"arrays": to_record(after), "metrics": metrics}), reply_to=message)

    @app.query()
    def who(message: Message, context: Context) -> Message:
        own = MetricRecord({"user": int(context.node_config["partition-id"])})
        return Message(RecordDict({"metrics": own}), reply_to=message)

    return app


class LocalGrid(Grid):
    """Nodes in this process, the last of them first to answer. Some never do. `replies` is all that they sent."""

    def __init__(self, app: ClientApp, *, nodes: int, missing: Iterable[int] = ()) -> None:
        self._app, self._nodes, self._missing = app, nodes, set(missing)
        self.replies: list[Message] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [100 + user for user in range(self._nodes)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = [self._answer(one) for one in messages if one.metadata.dst_node_id - 100 not in self._missing]
        self.replies += replies
        return reversed(replies)

    def _answer(self, message: Message) -> Message:
        from flwr.app import Error

        node = message.metadata.dst_node_id
        config = {"partition-id": node - 100}
        try:
            return self._app(message, Context(1, node, config, RecordDict(), {}))
        except Exception as error:  # as a SuperNode does
            return Message(Error(2, repr(error)), reply_to=message)
