"""User-level privacy for an app of Flower, by its public API: a strategy for its ServerApp, a mod for its ClientApp.

    ServerApp   PrivateStrategy(planned, folder=…).start(grid, arrays)     one node is one user
    ClientApp   ClientApp(mods=[make_clip_mod()])                          clips where the data is, and sends no metrics

Messages are those of Flower's own strategies: a model in one ArrayRecord goes out, a trained model comes back. Clients
without the mod are clipped by the server alone. Metrics that clients send are private, and nobody looks at them; nor
are models evaluated by clients, whose figures no ε would cover. `evaluate_fn` is for data of the server's own.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from sottovoce.base.errors import InputError
from sottovoce.dp.arrays import ArrayForm, clip_update
from sottovoce.dp.run import PrivateRound, PrivateRun, start_run
from sottovoce.privacy.clipping import LARGEST_BOUND, SMALLEST_BOUND
from sottovoce.privacy.planner import PlannedRun

ARRAYS, CONFIG = "arrays", "config"  # the records' names in Flower's own strategies
CLIP_BOUND, ROUND = "clip-bound", "server-round"
TRAINING_FAILED = 6  # Flower's code for mods

Models = dict[str, Any]  # NumPy arrays by name
Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]
# Which node each user is, of those that are there: by the user's index below `population_size`.
Users = Callable[[Grid], Mapping[int, int]]

_log = logging.getLogger("flwr")
_WAIT_SECONDS = 3.0


def list_users(grid: Grid) -> dict[int, int]:
    """Each node is a user, in the order of their ids.

    Indices change when nodes come and go. That changes no guarantee where each round draws each user by a coin of their
    own; correlated noise needs users that keep theirs.
    """
    return dict(enumerate(sorted(grid.get_node_ids())))


def subtract_mean(parameters: Models, mean: Models) -> Models:
    """The server's step of federated averaging: θ − mean update."""
    return {name: (array - mean[name]).astype(array.dtype) for name, array in parameters.items()}


@final
class PrivateStrategy(Strategy):  # type: ignore[misc]  # flwr is skipped by mypy
    """A strategy whose models are private for each user, by `planned` (`sottovoce.dp.plan_run`).

    Guarantee: that of `PrivateRun`, whose folder and `options` (`start_run`) these are. Each round draws every one of
    the plan's users by a coin of their own, whether their node is there or not; who is not there, fails, sends no model
    of the right form or one that is not finite counts as zero, and the mean is over the *expected* number. A round that
    nobody answers is released all the same, as noise. `server_step` makes the next model of this one and of the noised
    mean update: that costs nothing.
    """

    def __init__(
        self,
        planned: PlannedRun,
        *,
        folder: Path | str,
        users: Users | None = None,
        server_step: Callable[[Models, Models], Models] = subtract_mean,
        min_available_nodes: int = 1,
        **options: Any,
    ) -> None:
        if options.get("mechanism") is not None and users is None:
            raise InputError("mechanism without users: groups that take turns need users that keep their index")
        self._planned, self._folder, self._options = planned, folder, options
        self._users, self._server_step, self._least = users or list_users, server_step, min_available_nodes
        self.run: PrivateRun | None = None
        self._round: PrivateRound | None = None
        self._asked: dict[int, int] = {}  # the user of each node that was asked
        self._parameters: Models = {}

    def summary(self) -> None:
        """Log what is promised."""
        promised = "as planned" if self.run is None else self.run.guarantee.words
        _log.info("\t└──> user-level privacy: %s", promised)

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int | None = None, **options: Any) -> Result:
        """Flower's `start`, for all planned rounds that are left and the budget allows, or for the next `num_rounds`.

        With the folder of an earlier run and one of its models it goes on from there.
        """
        self.run = start_run(self._planned, to_models(initial_arrays), folder=self._folder, **self._options)
        try:
            left = max(self.run.guarantee.steps - self.run.step, 0)
            rounds = left if num_rounds is None else min(num_rounds, left)
            result = super().start(grid, initial_arrays, rounds, **options)
        finally:
            self.run.close()
        _log.info("\t%s", self.run.guarantee.words)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw and charge a round, and ask those who are there. Nobody is asked where the budget is spent."""
        assert self.run is not None
        nodes = self._available(grid)  # before anybody is drawn: waiting for who was drawn would show it
        self._parameters = to_models(arrays)
        self._round = self.run.next_round(self._parameters)
        if self._round is None:
            _log.info("no further round: %s", self.run.stopped)
            return []
        self._asked = {nodes[user]: user for user in self._round.cohort if user in nodes}
        said = ConfigRecord({**config, ROUND: server_round, CLIP_BOUND: self._round.clip_bound})
        content = RecordDict({ARRAYS: arrays, CONFIG: said})
        return [Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node) for node in self._asked]

    def _available(self, grid: Grid) -> Mapping[int, int]:
        while len(nodes := self._users(grid)) < self._least:
            time.sleep(_WAIT_SECONDS)
        most = self._planned.population_size
        if not (len(set(nodes.values())) == len(nodes) and all(0 <= user < most for user in nodes)):
            raise InputError(f"{len(nodes):,} nodes: expected one for each user, and at most population_size={most:,}")
        return nodes

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clip, sum, add noise, and make the next model. The figures are ε so far, by Rényi accounting, and δ."""
        turn, self._round = self._round, None
        if turn is None:
            return None, None
        assert self.run is not None
        answers: dict[int, Message] = {}
        for reply in replies:
            user = self._asked.get(reply.metadata.src_node_id)
            if user is not None and reply.has_content():
                answers.setdefault(user, reply)
        for user in sorted(answers):  # so that sums do not depend on who was faster
            try:
                turn.add_trained(user, _model_in(answers[user]))
            except InputError:  # whether a round fails must not depend on one user
                continue
        following = self._server_step(self._parameters, turn.release())
        self.run.commit(following)  # before anybody can save it: from here a run can go on
        spent = {} if turn.epsilon is None else {"epsilon": turn.epsilon, "delta": self._planned.delta}
        return to_record(following), MetricRecord(spent)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody: what clients would measure is private."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None


def make_clip_mod(clip_bound: float | None = None) -> Mod:
    """A mod that clips what a client has learned before it leaves, and sends nothing else: no metrics, no error texts.

    Guarantee: in answer to each message of type `train` (and `train.…`) the model that is sent differs from the one
    received by at most the bound in L2 norm: that of the server's order or `clip_bound`, whichever is smaller. Rounding
    to the model's types comes on top; a server that sends numbers beside which the bound is small can make it twice the
    bound. Training that fails, or whose model is not finite or of another form, cannot be told from one that has
    learned nothing, but by how long it takes. An order without a finite, positive bound, or whose model is none, is
    refused before anything is learned. Put it first: mods behind it see more.

    Not covered: messages of type `evaluate` and `query` pass as they are, and what the app answers to them is sent
    unclipped, with the texts of its errors. Nor does it count: a server may ask to train as often as it likes, with any
    model, and learns up to the bound each time. ε is for those who see released models, not against such a server.
    """

    def clip_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        if not message.metadata.message_type.startswith(MessageType.TRAIN):
            return call_next(message, context)
        try:  # all that a server may get wrong, before anything is learned: a refusal then says nothing of the data
            name, before = _received_model(message)
            bound = _smallest_bound(message, clip_bound)
        except InputError as refused:
            return Message(Error(TRAINING_FAILED, str(refused)), reply_to=message)
        after = _trained_and_clipped(before, message, context, call_next, clip_bound=bound)
        return Message(RecordDict({name: to_record(after)}), reply_to=message)

    return clip_mod


def _received_model(message: Message) -> tuple[str, Models]:
    """The first array record of an order and its name; a copy, since training may change the record itself."""
    name, received = next(iter(message.content.array_records.items()), ("", ArrayRecord()))
    try:
        before = to_models(received)
    except Exception:
        raise InputError("a model that cannot be read") from None
    ArrayForm.of(before)
    return name, before


def _smallest_bound(message: Message, own: float | None) -> float:
    """Of those that the order names, and the client's `own`; InputError for none, and where one bounds nothing."""
    asked = [record[CLIP_BOUND] for record in message.content.config_records.values() if CLIP_BOUND in record]
    bounds = [bound for bound in (*asked, own) if bound is not None]
    if not bounds:
        raise InputError("no clip bound")
    # `min` alone would let a NaN pass, or not, by its place.
    are_numbers = all(isinstance(bound, int | float) and bound >= SMALLEST_BOUND for bound in bounds)
    if not (are_numbers and min(bounds) <= LARGEST_BOUND):
        raise InputError(f"no clip bound from {SMALLEST_BOUND:g} to {LARGEST_BOUND:g}")
    return float(min(bounds))


def _trained_and_clipped(
    before: Models,
    message: Message,
    context: Context,
    call_next: Callable[[Message, Context], Message],
    *,
    clip_bound: float,
) -> Models:
    """The model that is sent: as it came where nothing was learned, or something of another form."""
    try:
        after = _model_in(call_next(message, context))
        if {name: one.shape for name, one in after.items()} != {name: one.shape for name, one in before.items()}:
            raise InputError("training has made a model of another form")
        update = {name: array - after[name] for name, array in before.items()}
        return subtract_mean(before, clip_update(update, clip_bound=clip_bound))
    except Exception as error:  # its text may hold what it was trained on
        _log.error("training failed: %r; the model is sent back as it came", error)
        return before


def _model_in(reply: Message) -> Models:
    records = list(reply.content.array_records.values()) if reply.has_content() else []
    if len(records) != 1:
        raise InputError(f"{len(records)} ArrayRecords in a reply: expected one")
    try:
        return to_models(records[0])
    except Exception as unreadable:
        raise InputError(f"an ArrayRecord that cannot be read ({type(unreadable).__name__})") from None


def to_models(record: ArrayRecord) -> Models:
    """The arrays of a record, by name; copies."""
    return {name: array.numpy().copy() for name, array in record.items()}


def to_record(models: Models) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in models.items()})
