"""Runs on time lines: killed at any instant every utterance is used once, none twice and none is lost."""

import json
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.points import CHARGED, SAVED
from tests.tones import pack_tones
from tests.training import forked
from tests.training.launched import launch
from tests.training.test_distributed_runs import IN_ROUNDS, lost
from tests.training.test_federation_resume import kill_often, records

from sottovoce.base.errors import InputError
from sottovoce.config import load_recipe
from sottovoce.data.store import Store
from sottovoce.federated.client import PlannedClient, load_client
from sottovoce.federated.engines import engine as engine_module
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.ledger_report import EXHAUSTED_CLIENTS
from sottovoce.training.checkpoint import TURNS
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext

# Nine clients with two words each, one at a time: eighteen turns.
LINE = ["federation.local.batch_utterances=1", "federation.engine=sequential"]
ONCE = [
    *LINE,
    "federation.local.time_line.dry=skip",
    "federation.privacy.noise_multiplier=0",
    "federation.privacy.adaptive=null",
    "federation.steps=100",
]
PRIVATE = [*LINE, "federation.local.time_line.dry=zero", "federation.cohort_size=5"]


def run_here(recipe: Path, stores: Path, out: Path, changes: list[str], said: list[str] | None = None) -> Outcome:
    around = RunContext(
        runs=out.parent / "runs",
        stores=stores,
        device=torch.device("cpu"),
        say=(said if said is not None else []).append,
    )
    return run_recipe(load_recipe(str(recipe), changes), out=out, resume=False, context=around)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """The store's rows that the rounds of this process train on, by round."""
    rows: dict[int, list[int]] = {}

    def load(room: Any, planned: PlannedClient, *, step: int, **rest: Any) -> Any:
        rows.setdefault(step, []).extend(
            row for batch in planned.batches for row in planned.speech.rows[batch.rows].tolist()
        )
        return load_client(room, planned, step=step, **rest)

    monkeypatch.setattr(engine_module, "load_client", load)
    return rows


def speech_of(stores: Path) -> list[int]:
    """Rows of all that clients say."""
    store = Store(stores / "tones")
    people = store.splits["train"]
    return [*range(int(store.user_utterances[people.start]), int(store.user_utterances[people.stop]))]


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_killed_ten_times_every_utterance_is_used_once(
    federated_recipe: Path, short_stores: Path, tmp_path: Path, used: dict[int, list[int]]
) -> None:
    outcome = run_here(federated_recipe, short_stores, tmp_path / "whole", ONCE)
    assert outcome.results is not None
    assert outcome.results["ended"]["reason"] == "dry"
    assert sorted(row for rows in used.values() for row in rows) == speech_of(short_stores)

    arguments = ["run", federated_recipe, "--stores", short_stores, *ONCE]
    counted = forked.run([*arguments, "--out", tmp_path / "counted"], counts=True)
    assert counted.code == 0, counted.err
    whole = tmp_path / "whole"
    for broken in kill_often(arguments, tmp_path, calls=counted.calls, seed_name="time line"):
        assert_same(broken, whole)
        assert load_file(broken / "checkpoints/latest/optimiser.safetensors")[TURNS].tolist() == [2] * 9
        assert records(broken / "metrics.jsonl")[-1]["speech_used"] == 1.0


def assert_same(broken: Path, whole: Path) -> None:
    for file in ("checkpoints/latest/model.safetensors", "checkpoints/latest/optimiser.safetensors", "ledger.jsonl"):
        assert (broken / file).read_bytes() == (whole / file).read_bytes(), (broken, file)
    for file in ("metrics.jsonl", "diagnostics.jsonl"):
        assert records(broken / file) == records(whole / file)
    assert json.loads((broken / "results.json").read_text()) == json.loads((whole / "results.json").read_text())


@pytest.mark.usefixtures("one_thread")
def test_under_privacy_the_dry_are_drawn_on_and_a_killed_run_ends_with_the_same_bits(
    federated_recipe: Path, short_stores: Path, tmp_path: Path, used: dict[int, list[int]]
) -> None:
    said: list[str] = []
    whole = tmp_path / "whole"
    outcome = run_here(federated_recipe, short_stores, whole, PRIVATE, said)
    assert outcome.results is not None
    assert outcome.results["ended"] == {"step": 12, "reason": "finished"}  # however little is left
    assert outcome.results["privacy"]["guarantee"].endswith(EXHAUSTED_CLIENTS)
    assert any(EXHAUSTED_CLIENTS in line for line in said)
    assert "local.time_line: of 9 of 9 speakers nobody knows in which order they spoke" in said[0]
    ledger = verify(whole / "ledger.jsonl")
    assert ledger.header["plan"]["time_line"] == "zero"
    assert EXHAUSTED_CLIENTS in [*ledger.table().columns[1].cells]
    assert not any("speech_used" in record for record in records(whole / "metrics.jsonl"))
    dropped = sum((Counter(record["dropped"]) for record in records(whole / "diagnostics.jsonl")), Counter[str]())
    assert dropped["nothing is left of its time line"] == dropped.total() > 0
    rows = [row for rows in used.values() for row in rows]
    assert len(rows) == len(set(rows))
    drawn = load_file(whole / "checkpoints/latest/optimiser.safetensors")[TURNS]
    assert int(drawn.clamp(max=2).sum()) == len(rows)
    assert int(drawn.sum()) == len(rows) + dropped.total()

    arguments = ["run", federated_recipe, "--stores", short_stores, *PRIVATE]
    counted = forked.run([*arguments, "--out", tmp_path / "counted"], counts=True)
    assert counted.code == 0, counted.err
    for broken in kill_often(arguments, tmp_path, calls=counted.calls, seed_name="private time line", times=3):
        assert_same(broken, whole)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("engine", ["workers", "stacked", "shared"])
def test_other_engines_go_on_with_the_same_bits(
    engine: str, federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    changes = [*ONCE, f"federation.engine={engine}", "federation.workers=2"]
    arguments = ["run", federated_recipe, "--stores", short_stores, *changes]
    for name in ("whole", "broken"):
        for point in (replace(CHARGED, nth=4), replace(SAVED, at="call")) if name == "broken" else ():
            assert forked.run([*arguments, "--out", tmp_path / name, "--resume"], kill_at=point).code == -signal.SIGKILL
        ended = forked.run([*arguments, "--out", tmp_path / name, "--resume"])
        assert ended.code == 0, ended.err
        assert load_file(tmp_path / name / "checkpoints/latest/optimiser.safetensors")[TURNS].tolist() == [2] * 9
    assert_same(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.long
def test_two_ranks_that_are_lost_in_turn_go_on_with_the_same_bits(
    federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    arguments = ["run", federated_recipe, "--stores", short_stores, *ONCE]
    kills = dict(enumerate(IN_ROUNDS))
    launch([*arguments, "--out", tmp_path / "whole"], processes=2, log=tmp_path / "log-whole")
    launch([*arguments, "--out", tmp_path / "broken"], processes=2, log=tmp_path / "log-broken", kills=kills)
    assert lost(tmp_path / "log-broken", kills) == len(kills)
    assert_same(tmp_path / "broken", tmp_path / "whole")
    assert load_file(tmp_path / "broken/checkpoints/latest/optimiser.safetensors")[TURNS].tolist() == [2] * 9


def test_a_recipe_without_a_time_line_is_written_as_ever(federated_recipe: Path) -> None:
    local = load_recipe(str(federated_recipe)).model_dump(mode="json")["federation"]["local"]
    assert "time_line" not in local
    given = load_recipe(str(federated_recipe), [*LINE, "federation.local.time_line={}"])
    assert given.model_dump(mode="json")["federation"]["local"]["time_line"] == {"dry": "zero"}


def test_a_store_in_order_of_time_needs_no_word(federated_recipe: Path, tmp_path: Path) -> None:
    pack_tones(
        tmp_path / "stores" / "tones", letters=(2, 3), utterances=2, change=lambda one: replace(one, in_time=True)
    )
    said: list[str] = []
    run_here(federated_recipe, tmp_path / "stores", tmp_path / "run", [*PRIVATE, "federation.steps=1"], said)
    assert not any("nobody knows" in line for line in said)


def test_a_time_line_is_one_speakers(federated_recipe: Path) -> None:
    changes = ["federation.local.time_line={}", "federation.clients.rule=silo", "federation.clients.silos=3"]
    with pytest.raises(InputError, match=r"local\.time_line with clients\.rule=silo: a time line is one speaker's"):
        load_recipe(str(federated_recipe), changes)


@pytest.mark.parametrize("bound", [".inf", "0.01"], ids=["one batch", "each clipped"])
def test_one_step_of_a_cohort_on_shared_weights(
    bound: str, federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    """The same run as one client after another, but for rounding; after all is used, both have stopped."""
    step = [f"federation.privacy.clip_bound={bound}", "federation.local.clip_gradients=.inf"]
    models = []
    for engine in ("sequential", "shared"):
        changes = [*ONCE, *step, f"federation.engine={engine}", "federation.steps=3", "federation.evaluate_every=3"]
        folder = run_here(federated_recipe, short_stores, tmp_path / engine, changes).folder
        assert json.loads((folder / "engine.json").read_text())["engine"] == engine
        models.append(load_file(folder / "checkpoints/latest/model.safetensors"))
    for name, expected in models[0].items():
        torch.testing.assert_close(models[1][name], expected, rtol=0, atol=1e-3)  # three steps of LAMB, of 0.01 each
    assert any(not torch.equal(models[1][name], expected) for name, expected in models[0].items())


def test_a_release_trains_clients_apart(federated_recipe: Path) -> None:
    with pytest.raises(InputError, match=r"engine=shared with privacy\.mode=secure: in a stack the rounding"):
        load_recipe(str(federated_recipe), ["federation.privacy.mode=secure", "federation.engine=shared"])
