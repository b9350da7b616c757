"""An ordinary app of Flower for tests: users who pull a small model to their own, some of them in trouble."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from flwr.supercore.task_identity import TaskIdentity

from sottovoce.base.seeds import stream
from sottovoce.dp import plan_run
from sottovoce.dp.flower import Mod, PrivateStrategy, to_models, to_record

NAN, FAILS, MISSING, MISSHAPEN = 1, 2, 3, 4  # users, by their index
PLANNED = plan_run(12, cohort_size=6, central_steps=4, delta=1e-2, noise_multiplier=1.0, clip_bound=0.5)
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


def ask_users(grid: Grid) -> dict[int, int]:
    """Which node each user is: nodes are asked, since the runtime names them at random. One of them is not there."""
    asked = [
        Message(content=RecordDict(), message_type=MessageType.QUERY, dst_node_id=node) for node in grid.get_node_ids()
    ]
    replies = grid.send_and_receive(asked)
    found = {int(reply.content["metrics"]["user"]): reply.metadata.src_node_id for reply in replies}
    return {user: node for user, node in found.items() if user != MISSING}


def serve(folder: Path, results: list[Result]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = PrivateStrategy(PLANNED, folder=folder, users=ask_users, root_seed=3)
        results.append(strategy.start(grid, to_record(START)))

    return app


class LocalGrid(Grid):
    """Nodes in this process, the last of them first to answer. Some never do. `replies` is all that they sent."""

    def __init__(self, app: ClientApp, *, nodes: int, missing: Iterable[int] = ()) -> None:
        self._app, self._nodes, self._missing = app, nodes, set(missing)
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # as a process of Flower has them
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
        node = message.metadata.dst_node_id
        config = {"partition-id": node - 100}
        try:
            return self._app(message, Context(1, node, config, RecordDict(), {}))
        except Exception as error:  # as a SuperNode does
            return Message(Error(2, repr(error)), reply_to=message)
