"""Apps of Flower with user-level privacy: the same cohorts, ε and model as a run of ours, whatever its clients do."""

import importlib.util
import json
import logging
import math
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.dp.own_run import Models, run_ours
from tests.guides import DOCS, blocks

from sottovoce import dp

pytest.importorskip("flwr", reason="the extra flower is not installed")
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from tests.dp.flower_app import (
    FAILS,
    MISSHAPEN,
    MISSING,
    NAN,
    PLANNED,
    START,
    LocalGrid,
    ask_users,
    make_client_app,
    serve,
    train_locally,
)
from tests.dp.flower_simulation import simulate

from sottovoce.dp.flower import CLIP_BOUND, Mod, PrivateStrategy, make_clip_mod, to_models, to_record

MODS = [pytest.param([], id="clipped by the server"), pytest.param([make_clip_mod()], id="clipped by clients too")]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Flower logs every round."""
    log = logging.getLogger("flwr")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


def tolerance(model: Models) -> float:
    """A model that was sent is rounded once more than ours, and sums may be in another order: a few units in the last
    place of float32 in each of the rounds, for each of the users; and no step enlarges what earlier ones left."""
    largest = max(1.0, *(float(np.abs(one).max()) for one in model.values()))
    return 2.0**-23 * largest * (PLANNED.population_size + 4) * PLANNED.central_steps


def check_same(folder: Path, arrays: ArrayRecord, *, root_seed: int) -> None:
    drawn: set[int] = set()

    def train_or_fail(user: int, model: Models) -> Models | None:
        drawn.add(user)
        return None if user in (FAILS, MISSING, MISSHAPEN) else train_locally(user, model)

    ours, ledger = run_ours(PLANNED, START, train_or_fail, folder=folder, root_seed=root_seed)
    assert drawn >= {NAN, FAILS, MISSING, MISSHAPEN}  # or nothing would be shown of them
    theirs = to_models(arrays)
    for name, one in ours.items():
        np.testing.assert_allclose(theirs[name], one, rtol=0, atol=tolerance(ours))
        assert np.isfinite(one).all()
    stated = dp.state_run(folder)
    assert stated.epsilon == ledger.epsilon.headline
    assert stated.guarantee.epsilon == ledger.epsilon
    assert stated.ledger.spent == ledger.spent
    assert stated.ledger.header | {"epsilon_budget": None} == ledger.header
    cohorts = [[one["record"]["cohort"] for one in _intents(path)] for path in folder.glob("*.jsonl")]
    assert cohorts[0] == cohorts[1]


def _intents(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [one for one in lines if one["record"]["kind"] == "intent"]


@pytest.mark.parametrize("mods", MODS)
def test_an_app_is_a_run_of_ours_whatever_its_clients_do(tmp_path: Path, mods: list[Mod]) -> None:
    """One sends NaN, one fails, one never answers, one sends another shape."""
    grid = LocalGrid(make_client_app(mods), nodes=12, missing=[MISSING])
    strategy = PrivateStrategy(PLANNED, folder=tmp_path, root_seed=3)
    result = strategy.start(grid, to_record(START))
    check_same(tmp_path, result.arrays, root_seed=3)
    spent = [result.train_metrics_clientapp[step]["epsilon"] for step in (1, 2, 3, 4)]
    assert spent == [one["record"]["epsilon"] for one in _intents(tmp_path / "ledger.jsonl")]


@pytest.mark.parametrize("mods", MODS)
def test_it_runs_in_flowers_own_simulation(tmp_path: Path, mods: list[Mod], monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Result] = []
    simulate(serve(tmp_path, results), make_client_app(mods), nodes=12, monkeypatch=monkeypatch)
    check_same(tmp_path, results[0].arrays, root_seed=3)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: the extra flower")
def test_it_runs_in_flowers_own_simulation_with_ray(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.dp.ray_simulation", str(tmp_path)]
    subprocess.run(program, check=True, cwd=Path(__file__).parents[2], capture_output=True)
    with np.load(tmp_path / "model.npz") as model:
        check_same(tmp_path, to_record(dict(model)), root_seed=3)


def test_the_app_of_the_guide_runs_and_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = blocks(DOCS / "guides" / "flower.md", "python")
    (tmp_path / program.file).write_text(program.content, encoding="utf-8")
    app = runpy.run_path(str(tmp_path / program.file))
    monkeypatch.chdir(tmp_path)
    simulate(app["server_app"], app["client_app"], nodes=20, monkeypatch=monkeypatch)
    stated = dp.state_run("runs/flower")
    assert (stated.kind, stated.guarantee.made) == ("release", 5)
    assert stated.epsilon <= 8


def test_a_client_with_the_mod_sends_a_clipped_model_and_nothing_else(tmp_path: Path) -> None:
    grid = LocalGrid(make_client_app([make_clip_mod(0.3)]), nodes=12)
    PrivateStrategy(PLANNED, folder=tmp_path, root_seed=3).start(grid, to_record(START), num_rounds=1)
    assert len(grid.replies) >= 3
    lengths = []
    for reply in grid.replies:
        assert reply.has_content()  # also of those who failed
        assert not reply.content.metric_records
        assert not reply.content.config_records
        sent = to_models(reply.content["arrays"])
        lengths.append(math.sqrt(sum(float(np.square(sent[name] - one).sum()) for name, one in START.items())))
    assert max(lengths) <= 0.3 * (1 + 1e-6)  # its own bound, below the server's 0.5
    assert max(lengths) > 0.299


def test_a_mod_without_any_bound_sends_nothing() -> None:
    app = make_client_app([make_clip_mod()])
    grid = LocalGrid(app, nodes=1)
    asked = Message(content=RecordDict({"arrays": to_record(START)}), message_type=MessageType.TRAIN, dst_node_id=100)
    (reply,) = grid.send_and_receive([asked])
    assert reply.error.reason == "no clip bound"


# What a server may get wrong in an order to train: bounds that are none, models that are none.
BOUNDS = [math.nan, -1.0, 0.0, 1e-40, "0.5", [0.5]]
ORDERS = [
    *(
        pytest.param({"arrays": to_record(START), "config": ConfigRecord({CLIP_BOUND: one})}, id=f"{one}")
        for one in BOUNDS
    ),
    pytest.param({"arrays": to_record(START), "config": ConfigRecord({CLIP_BOUND: math.inf})}, id="inf"),
    pytest.param({"config": ConfigRecord({CLIP_BOUND: 0.5})}, id="no model"),
    pytest.param(
        {"arrays": to_record({"n": np.arange(3)}), "config": ConfigRecord({CLIP_BOUND: 0.5})}, id="whole numbers"
    ),
]


@pytest.mark.parametrize("order", ORDERS)
def test_a_wrong_order_is_refused_alike_by_who_would_learn_and_who_would_fail(order: dict[str, Any]) -> None:
    """Or else a server would see, bound or not, whether training has failed: that depends on the data."""
    grid = LocalGrid(make_client_app([make_clip_mod()]), nodes=12)
    orders = [
        Message(content=RecordDict(order), message_type=MessageType.TRAIN, dst_node_id=100 + user)
        for user in (0, NAN, FAILS, MISSHAPEN)
    ]
    replies = [reply.error if reply.has_error() else reply.content for reply in grid.send_and_receive(orders)]
    assert all(reply == replies[0] for reply in replies[1:])


@pytest.mark.parametrize("asked", [math.inf, 7.0])
def test_a_larger_bound_of_the_server_leaves_the_clients_own(asked: float) -> None:
    grid = LocalGrid(make_client_app([make_clip_mod(0.3)]), nodes=1)
    content = RecordDict({"arrays": to_record(START), "config": ConfigRecord({CLIP_BOUND: asked})})
    (reply,) = grid.send_and_receive([Message(content=content, message_type=MessageType.TRAIN, dst_node_id=100)])
    sent = to_models(reply.content["arrays"])
    moved = math.sqrt(sum(float(np.square(sent[name] - one).sum()) for name, one in START.items()))
    assert moved == pytest.approx(0.3, rel=1e-5)


def test_rounding_to_a_models_types_at_most_doubles_the_bound() -> None:
    """What a server that sends large numbers gains: an update of a bit more than half a cell becomes a whole cell."""
    large = {"w": np.full(1, 2.0**23, dtype=np.float32)}  # cells of 1
    app = ClientApp(mods=[make_clip_mod(0.51)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": to_record({"w": large["w"] + 5})}), reply_to=message)

    grid = LocalGrid(app, nodes=1)
    content = RecordDict({"arrays": to_record(large)})
    (reply,) = grid.send_and_receive([Message(content=content, message_type=MessageType.TRAIN, dst_node_id=100)])
    assert abs(float(to_models(reply.content["arrays"])["w"][0]) - 2.0**23) == 1.0 <= 2 * 0.51


def test_the_mod_leaves_queries_and_evaluations_as_they_are() -> None:
    """As its description says: what an app answers to them is not bounded by anything."""
    app = make_client_app([make_clip_mod(0.3)])

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"loss": 1234.5})}), reply_to=message)

    grid = LocalGrid(app, nodes=4)
    for kind, name, said in ((MessageType.QUERY, "user", 3), (MessageType.EVALUATE, "loss", 1234.5)):
        (reply,) = grid.send_and_receive([Message(content=RecordDict(), message_type=kind, dst_node_id=103)])
        assert reply.content["metrics"][name] == said


def test_an_error_of_a_client_stays_with_it() -> None:
    grid = LocalGrid(make_client_app([make_clip_mod()]), nodes=12)
    content = RecordDict({"arrays": to_record(START), "config": ConfigRecord({CLIP_BOUND: 0.5})})
    (reply,) = grid.send_and_receive(
        [Message(content=content, message_type=MessageType.TRAIN, dst_node_id=100 + FAILS)]
    )
    assert "what this user said" not in repr(reply)
    for name, one in to_models(reply.content["arrays"]).items():
        np.testing.assert_array_equal(one, START[name])


def test_the_budget_stops_an_app_which_goes_on_with_a_larger_one(tmp_path: Path) -> None:
    spent = dp.plan_run(12, cohort_size=6, central_steps=2, delta=1e-2, noise_multiplier=1.0).epsilon.rdp
    grid = LocalGrid(make_client_app([]), nodes=12, missing=[MISSING])
    strategy = PrivateStrategy(PLANNED, folder=tmp_path, root_seed=3, epsilon_budget=spent * 1.01)
    result = strategy.start(grid, to_record(START))
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert dp.state_run(tmp_path).guarantee.epsilon.rdp == pytest.approx(spent, rel=1e-9)
    later = PrivateStrategy(PLANNED, folder=tmp_path, root_seed=3).start(grid, result.arrays)
    assert sorted(later.train_metrics_clientapp) == [1, 2]
    check_same(tmp_path, later.arrays, root_seed=3)


@pytest.mark.parametrize("kept", [1, 2])
def test_an_app_that_was_killed_goes_on_from_a_model_that_it_saved(tmp_path: Path, kept: int) -> None:
    grid, saved = LocalGrid(make_client_app([]), nodes=12, missing=[MISSING]), dict[int, ArrayRecord]()

    def save(step: int, arrays: ArrayRecord) -> None:
        saved[step] = arrays
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PrivateStrategy(PLANNED, folder=tmp_path, root_seed=3).start(grid, to_record(START), evaluate_fn=save)
    later = PrivateStrategy(PLANNED, folder=tmp_path, root_seed=3).start(grid, saved[kept])
    assert len(later.train_metrics_clientapp) == 4 - kept
    check_same(tmp_path, later.arrays, root_seed=3)


def test_an_app_with_correlated_noise_goes_on_and_leaves_no_secrets(tmp_path: Path) -> None:
    """Whoever has the memory of the noise can take some of it off released models again."""
    grid = LocalGrid(make_client_app([]), nodes=12)
    options: dict[str, Any] = {"mechanism": {"kind": "banded", "bands": 2}, "users": ask_users}
    first = PrivateStrategy(PLANNED, folder=tmp_path, **options).start(grid, to_record(START), num_rounds=3)
    assert (tmp_path / "secrets" / "noise-memory.npy").exists()
    PrivateStrategy(PLANNED, folder=tmp_path, **options).start(grid, first.arrays)
    assert dp.state_run(tmp_path).guarantee.made == 4
    assert not (tmp_path / "secrets").exists()


def test_a_round_that_nobody_answers_is_released_as_noise(tmp_path: Path) -> None:
    grid = LocalGrid(make_client_app([]), nodes=12, missing=range(12))
    result = PrivateStrategy(PLANNED, folder=tmp_path).start(grid, to_record(START))
    assert dp.state_run(tmp_path).guarantee.made == 4
    assert all(np.abs(one).min() > 0 for one in to_models(result.arrays).values())


def test_clients_evaluate_nothing_and_the_server_may(tmp_path: Path) -> None:
    grid = LocalGrid(make_client_app([]), nodes=12)
    seen: list[int] = []

    def evaluate(step: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(step)
        return MetricRecord({"largest": float(to_models(arrays)["w"].max())})

    result = PrivateStrategy(PLANNED, folder=tmp_path).start(grid, to_record(START), evaluate_fn=evaluate)
    assert seen == [0, 1, 2, 3, 4]
    assert not result.evaluate_metrics_clientapp
    assert all(reply.metadata.message_type == "train" for reply in grid.replies)


def test_more_nodes_than_users_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    grid = LocalGrid(make_client_app([]), nodes=13)
    with pytest.raises(dp.InputError, match="13 nodes: expected one for each user, and at most population_size=12"):
        PrivateStrategy(PLANNED, folder=tmp_path).start(grid, to_record(START))
    assert dp.state_run(tmp_path).guarantee.made == 0
