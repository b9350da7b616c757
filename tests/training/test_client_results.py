"""Clients before and after a run, each on its own held-out speech: the numbers, whose they are, and who may ask."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks import in_processes
from tests.tones import pack_tones

from sottovoce.base.errors import InputError
from sottovoce.config import as_yaml, load_recipe
from sottovoce.config.smoke import shrink_recipe
from sottovoce.data.store import Store
from sottovoce.evaluation.error_rates import compute_wer
from sottovoce.evaluation.recognise import recognise_utterances
from sottovoce.models.recogniser import load_recogniser
from sottovoce.report.summary import write_report
from sottovoce.training.client_wer import choose_clients_to_test, group_by_seconds, summarise_clients
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext
from sottovoce.training.run_data import build_recipe_population

CPU = torch.device("cpu")
ASKED = ["federation.clients.holdout=0.25", "federation.test_clients=all"]
SHORT = ["federation.steps=2", "federation.evaluate_every=2", "federation.checkpoint_every=2"]
SHORT += ["federation.engine=sequential", "federation.privacy.sampling=fixed_size"]


@pytest.fixture(scope="session")
def client_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine clients with four words each, of which two are held out."""
    folder = tmp_path_factory.mktemp("client-stores")
    pack_tones(folder / "tones", letters=(2, 3))
    return folder


def run(
    recipe: Path, changes: list[str], stores: Path, out: Path, say: Callable[[str], None] = lambda _: None
) -> Outcome:
    torch.set_num_threads(1)
    around = RunContext(runs=out.parent / "runs", stores=stores, device=CPU, say=say)
    return run_recipe(load_recipe(str(recipe), [*SHORT, *changes]), out=out, resume=False, context=around)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without noise, so that the model moves."""
    path = tmp_path_factory.mktemp("recipe") / "federated.yaml"
    path.write_text(
        """
about: tones, federated
seed: 5
data: {store: tones}
model: {size: tiny}
federation:
  steps: 2
  cohort_size: 2
  local: {batch_seconds: 2, lr: 0.1, local_steps: 2}
  server: {optimiser: {name: sgd}, schedule: {name: constant, lr: 1.0}}
"""
    )
    return path


@pytest.fixture(scope="module")
def outcome(recipe: Path, client_stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(recipe, ASKED, client_stores, tmp_path_factory.mktemp("outcome") / "run")


def told(outcome: Outcome) -> dict[str, Any]:
    assert outcome.results is not None
    found: dict[str, Any] = outcome.results["clients"]
    return found


def test_each_client_is_scored_on_its_own_held_out_speech(outcome: Outcome, recipe: Path, client_stores: Path) -> None:
    store = Store(client_stores / "tones")
    read = load_recipe(str(recipe), ASKED)
    population = build_recipe_population(read, store, read.federated.clients.population(read.data))
    best = load_recogniser(outcome.folder / "model")
    expected = []
    for client in population:
        assert len(client.held_out) == 2
        texts = [store.utterance(row).text or "" for row in client.held_out.tolist()]
        rate = compute_wer(texts, recognise_utterances(best, store, client.held_out))
        expected.append((rate, client.seconds, sum(len(text.split()) for text in texts)))
    found = told(outcome)
    assert [one["after"] for one in found["per_client"]] == sorted(rate for rate, _, _ in expected)
    assert sorted((one["after"], one["seconds"], one["words"]) for one in found["per_client"]) == sorted(expected)
    assert (found["clients"], found["population_size"], found["without_holdout"], found["utterances"]) == (9, 9, 0, 18)
    assert found["after"]["mean"] == pytest.approx(np.mean([rate for rate, _, _ in expected]))
    assert found["accounted"] is False


def test_nobody_is_named(outcome: Outcome) -> None:
    assert not any(f"s{number:02}" in json.dumps(told(outcome)) for number in range(15))


def test_before_is_the_start_model(recipe: Path, client_stores: Path, outcome: Outcome, tmp_path: Path) -> None:
    """Of a run whose server never moves, before and after are the same, and the same as before any other run."""
    still = run(recipe, [*ASKED, "federation.server.schedule.lr=1e-30"], client_stores, tmp_path / "still")
    assert told(still)["before"] == told(still)["after"] == told(outcome)["before"]
    assert (told(still)["better"], told(still)["worse"]) == (0, 0)


def test_two_processes_say_the_same(recipe: Path, client_stores: Path, outcome: Outcome, tmp_path: Path) -> None:
    several = in_processes(2, run, recipe, ASKED, client_stores, tmp_path / "ranks")[0]
    assert told(several)["per_client"] == told(outcome)["per_client"]


def test_so_many_clients_are_the_same_in_repeats(recipe: Path, client_stores: Path) -> None:
    store = Store(client_stores / "tones")

    def chosen(count: str, *changes: str) -> list[int]:
        read = load_recipe(str(recipe), [ASKED[0], f"federation.test_clients={count}", "data.people_seed=3", *changes])
        population = build_recipe_population(read, store, read.federated.clients.population(read.data))
        return [client.index for client in choose_clients_to_test(read, population).clients]

    assert chosen("all") == list(range(9))
    assert len(chosen("4")) == 4
    assert chosen("4") == chosen("4", "seed=9") == chosen("6")[:4]
    assert len(chosen("40")) == 9


def test_clients_without_held_out_speech_are_counted(recipe: Path, tmp_path: Path) -> None:
    """With three utterances nobody has any; then there is nothing to score, and that is said."""
    pack_tones(tmp_path / "tones", letters=(2, 3), utterances=3)
    found = told(run(recipe, ASKED, tmp_path, tmp_path / "run"))
    assert (found["clients"], found["without_holdout"]) == (0, 9)
    assert "per_client" not in found


@pytest.mark.parametrize("weighting", ["uniform", "wer"])
def test_clients_too_small_to_hold_out_train_and_are_announced(weighting: str, recipe: Path, tmp_path: Path) -> None:
    """Weighted by WER, a cohort of them once ended the run."""
    pack_tones(tmp_path / "tones", letters=(2, 3), utterances=3)
    lines: list[str] = []
    changes = [*ASKED, f"federation.privacy.weighting={weighting}"]
    outcome = run(recipe, changes, tmp_path, tmp_path / "run", lines.append)
    weighs = ", weigh the mean of those of their cohort that do" if weighting == "wer" else ""
    said = f"they hold out nothing, train on all that they have{weighs} and are not tested"
    assert f"9 of 9 clients have fewer than 4 utterances: {said}" in lines
    rounds = [json.loads(line) for line in (outcome.folder / "diagnostics.jsonl").read_text().splitlines()]
    assert [one["dropped"] for one in rounds if "dropped" in one] == [{}, {}]
    left_out = json.loads((outcome.folder / "population.json").read_text())["left_out"]
    assert left_out["clients_without_holdout"] == 9
    notes = write_report({"run": outcome.folder}, tmp_path, title="Run").notes
    assert "run: 9 of 9 clients hold out nothing and are not tested" in notes


def test_where_all_hold_something_out_nothing_is_said(recipe: Path, client_stores: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    run(recipe, ASKED, client_stores, tmp_path / "run", lines.append)
    assert not any("hold out" in line for line in lines)


def test_shares_and_means_by_hand() -> None:
    """Four clients of ten words: 20 %, 50 %, 60 % and 150 %."""
    counts = np.array([[10, 2, 0, 0], [10, 5, 0, 0], [10, 0, 6, 0], [10, 5, 0, 10]])
    found = summarise_clients(counts)
    assert found["mean"] == pytest.approx(0.7)
    assert found["mean_without_above_100"] == pytest.approx(1.3 / 3)
    assert (found["share_above_50"], found["share_above_100"]) == (0.5, 0.25)
    assert found["wer"] == pytest.approx(28 / 40)
    assert summarise_clients(counts[3:])["mean_without_above_100"] is None


def test_quarters_by_amount_of_speech() -> None:
    seconds, before = np.array([8.0, 1, 5, 2, 4]), np.array([0.1, 0.9, 0.3, 0.7, 0.5])
    found = group_by_seconds(seconds, before, before / 2)
    assert [part["clients"] for part in found] == [2, 1, 1, 1]
    assert [part["seconds"] for part in found] == [[1, 2], [4, 4], [5, 5], [8, 8]]
    assert [part["before"] for part in found] == pytest.approx([0.8, 0.5, 0.3, 0.1])
    assert [part["after"] for part in found] == pytest.approx([0.4, 0.25, 0.15, 0.05])
    assert len(group_by_seconds(seconds[:2], before[:2], before[:2])) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["federation.test_clients=all"], "test_clients=all without held-out speech: expected clients.holdout"),
        ([ASKED[0], "federation.test_clients=0"], "test_clients"),
        ([ASKED[0], "federation.test_clients=some"], "test_clients"),
        (
            [*ASKED, "federation.privacy={mode: secure, clip_bound: 1, noise_multiplier: 8}"],
            "test_clients=all with privacy.mode=secure: what a model does for single clients is private",
        ),
    ],
)
def test_mistakes_are_one_line(changes: list[str], message: str, recipe: Path) -> None:
    with pytest.raises(InputError) as raised:
        load_recipe(str(recipe), changes)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_it_is_written_only_where_it_is_asked_for(recipe: Path) -> None:
    assert "test_clients" not in as_yaml(load_recipe(str(recipe)))
    assert "test_clients: all" in as_yaml(load_recipe(str(recipe), ASKED))
    assert shrink_recipe(load_recipe(str(recipe), ASKED)).federated.test_clients == 4
