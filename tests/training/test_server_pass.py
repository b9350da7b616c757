"""The server trains on speech of its own after every round: repeatable, free of charge, and on nobody's but its own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import in_processes
from tests.tones import FEW_WORDS, pack_tones, speaker
from tests.training.passes import CPU, LOCAL, PUBLIC_UTTERANCES, beginning, built
from tests.training.running import run_here

from sottovoce.base.errors import InputError
from sottovoce.config import as_yaml, load_recipe
from sottovoce.config.smoke import shrink_recipe
from sottovoce.data.corpora.corpus import RenderedSpeaker
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store
from sottovoce.models.recogniser import load_recogniser
from sottovoce.privacy.ledger import verify
from sottovoce.training import federation, server_pass
from sottovoce.training.assemble import assemble
from sottovoce.training.disjointness import count_clients_in_parent
from sottovoce.training.parent_model import ParentModel
from sottovoce.training.run_context import Outcome, RunContext
from sottovoce.training.run_data import (
    build_training_population,
    find_server_people,
    find_split_people,
    list_training_rows,
)

OWN = "federation.server_pass={data: 'public:train', batch_seconds: 2, lr: 0.1, steps: 2}"
SHORT = ["federation.steps=4", "federation.evaluate_every=4", "federation.checkpoint_every=2"]
Run = Callable[..., Outcome]


@pytest.fixture
def run(federated_recipe: Path, public_stores: Path, tmp_path: Path) -> Run:
    """Runs the recipe with `key=value` changes in the folder `out`."""

    def go(*changes: str, out: str, resume: bool = False, stores: Path = public_stores) -> Outcome:
        return run_here(federated_recipe, [*SHORT, *changes], stores, tmp_path / out, resume=resume)

    return go


def weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    return dict(load_recogniser(outcome.folder / "checkpoints/latest").parameters)


def same(one: Outcome, other: Outcome) -> bool:
    found, expected = weights(one), weights(other)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def metrics(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]


# What it does.


def test_the_model_is_another_and_epsilon_is_not(run: Run) -> None:
    without, with_pass = run(out="without"), run(OWN, out="with")
    assert not same(without, with_pass)
    spent = [verify(outcome.folder / "ledger.jsonl").epsilon for outcome in (without, with_pass)]
    assert spent[0] == spent[1]
    assert not any("server_pass_loss" in record for record in metrics(without))
    assert [record["step"] for record in metrics(with_pass) if "server_pass_loss" in record] == [1, 2, 3, 4]


def test_a_pass_is_plain_training_from_the_servers_model(federated_recipe: Path, public_stores: Path) -> None:
    """Steps down the loss of the same few words, with the same bits whenever the round is made again."""
    changes = [
        "federation.server_pass={data: 'public:train', batch_seconds: 20, lr: 0.5, steps: 8}",
        "model.dropout=0",
        "model.layer_drop=0",
        "federation.server_pass.augment.spec_augment=null",
    ]
    recipe = load_recipe(str(federated_recipe), changes)
    start, passes = built(recipe, public_stores)
    first_P, again_P = start.clone(), start.clone()
    first, again = passes(first_P, 3), passes(again_P, 3)
    assert first == again
    assert torch.equal(first_P, again_P)
    assert passes(first_P, 4) < first


def test_an_epoch_uses_everything_once(federated_recipe: Path, public_stores: Path) -> None:
    changes = ["federation.server_pass={data: 'public:train', batch_seconds: 2, lr: 0.1, epochs: 2}"]
    recipe = load_recipe(str(federated_recipe), changes)
    settings = recipe.federated.server_pass
    assert settings is not None
    start, population = beginning(recipe, public_stores)
    people = find_split_people(Store(public_stores / "public"), "train")
    speech = server_pass.load_public_speech(recipe, start, population, people)
    assert len(speech.rows) == PUBLIC_UTTERANCES
    batches = list(server_pass._batches(speech, settings, seed=1, step=0, device=CPU))
    assert len(batches) > 2
    assert sum(batch.audio_seconds for batch in batches) == pytest.approx(2 * 3600 * speech.hours, rel=1e-6)


def test_what_is_frozen_stays_frozen(run: Run) -> None:
    outcome = run(OWN, "federation.trainable=output", out="part")
    assert outcome.results is not None
    start = run(
        OWN, "federation.trainable=output", "federation.server.schedule.lr=1e-30", "federation.steps=1", out="one"
    )
    found, before = weights(outcome), weights(start)
    assert all(torch.equal(found[name], before[name]) == (not name.startswith("output")) for name in found)


# However it is run.


class Killed(Exception):
    pass


def test_a_resumed_run_has_the_same_bits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in its last round, after a checkpoint that does not hold the round before."""
    whole = run(OWN, out="whole")
    run_round = federation.run_round

    def dies(*arguments: Any, **options: Any) -> Any:
        if options["step"] == 3:
            raise Killed
        return run_round(*arguments, **options)

    monkeypatch.setattr(federation, "run_round", dies)
    with pytest.raises(Killed):
        run(OWN, out="broken")
    monkeypatch.setattr(federation, "run_round", run_round)
    resumed = run(OWN, out="broken", resume=True)
    assert same(resumed, whole)
    assert (resumed.folder / "ledger.jsonl").read_bytes() == (whole.folder / "ledger.jsonl").read_bytes()
    losses = [[record.get("server_pass_loss") for record in metrics(outcome)] for outcome in (resumed, whole)]
    assert losses[0] == losses[1]


def one_thread_run(*arguments: Any) -> Outcome:
    torch.set_num_threads(1)
    return run_here(*arguments)


@pytest.mark.long
def test_workers_and_ranks_come_to_the_same_bits(federated_recipe: Path, public_stores: Path, tmp_path: Path) -> None:
    """Cohorts of two, whose sum has the same bits whoever adds it up."""
    ways = {
        "sequential": (1, "federation.engine=sequential"),
        "workers": (1, "federation.engine=workers"),
        "ranks": (2, "federation.engine=sequential"),
    }
    found = {
        name: in_processes(
            count,
            one_thread_run,
            federated_recipe,
            [*SHORT, OWN, "federation.privacy.sampling=fixed_size", "federation.workers=2", engine],
            public_stores,
            tmp_path / name,
        )[0]
        for name, (count, engine) in ways.items()
    }
    assert same(found["workers"], found["sequential"])
    assert same(found["ranks"], found["sequential"])
    assert json.loads((found["ranks"].folder / "inputs.json").read_text())["federation.server_pass.data digest"]


# Whose speech it may be.


def renamed(other: str) -> Callable[[RenderedSpeaker], RenderedSpeaker]:
    return lambda rendered: replace(rendered, name=f"{other}{rendered.name}")


def test_clients_are_refused_by_name_before_anything_is_charged(run: Run, public_stores: Path, tmp_path: Path) -> None:
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores/tones").symlink_to(public_stores / "tones")
    pack_tones(tmp_path / "stores/public", people=range(5), letters=(4, 5))
    with pytest.raises(
        InputError, match=r"server_pass\.data=public:train: 3 of its speakers are clients too; the server"
    ):
        run(OWN, out="refused", stores=tmp_path / "stores")
    assert not (tmp_path / "refused/ledger.jsonl").exists()


def test_clients_speech_is_refused_under_any_name(run: Run, public_stores: Path, tmp_path: Path) -> None:
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores/tones").symlink_to(public_stores / "tones")
    pack_tones(tmp_path / "stores/public", people=range(12, 20), change=renamed("somebody-"), **FEW_WORDS)
    with pytest.raises(
        InputError, match=r"server_pass\.data=public:train: utterance 12-0 is a client's too, sample for"
    ):
        run(OWN, out="refused", stores=tmp_path / "stores")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("train", "is in data.train, the clients' speech"),
        ("tones:train", "is in data.train, the clients' speech"),
        ("dev", "is in data.dev, what the model is judged by"),
        ("test", "is in data.test, what the model is judged by"),
    ],
)
def test_a_recipe_whose_server_hears_its_clients_is_refused(data: str, message: str, federated_recipe: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe(str(federated_recipe), [OWN, f"federation.server_pass.data={data}"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("steps=null", "steps=None, epochs=None: expected exactly one"),
        ("epochs=1", "steps=2, epochs=1: expected exactly one"),
        ("lr=0", "lr: Input should be greater than 0"),
        ("optimiser={name: sgdd}", "sgdd"),
    ],
)
def test_mistakes_are_one_line(change: str, message: str, federated_recipe: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_recipe(str(federated_recipe), [OWN, f"federation.server_pass.{change}"])
    assert "\n" not in str(caught.value)


# The seed part.

SEED = [
    *("data.seed_part={most_utterances_share: 0.5}", "data.part=federation"),
    "federation.server_pass={data: seed, lr: 0.1, epochs: 1}",
]


def test_the_seed_part_is_exactly_whom_a_seed_model_is_trained_on(
    federated_recipe: Path, public_stores: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(str(federated_recipe), SEED)
    warm_up = recipe.model_copy(update={"data": recipe.data.model_copy(update={"part": "seed"})})
    store = Store(public_stores / "tones")
    seed, clients = build_training_population(warm_up, store), build_training_population(recipe, store)
    made = assemble(recipe, context=RunContext(tmp_path / "runs", public_stores, CPU))
    assert made.public_speech is not None
    assert made.public_speech.rows.tolist() == list_training_rows(warm_up, store).tolist()
    people = find_server_people(recipe, public_stores)
    assert people is not None
    assert {*people.keys.tolist()} == {*store.user_keys[seed.user_rows()].tolist()}
    assert len(seed) + len(clients) == 9
    assert not {*people.keys.tolist()} & {*store.user_keys[made.population.user_rows()].tolist()}


def test_a_run_trains_on_its_seed_part_after_every_round(run: Run) -> None:
    outcome = run(*SEED, out="seed")
    assert [record["step"] for record in metrics(outcome) if "server_pass_loss" in record] == [1, 2, 3, 4]
    inputs = json.loads((outcome.folder / "inputs.json").read_text())
    assert inputs["federation.server_pass.data digest"] == inputs["data.store digest"]
    assert not same(outcome, run(*SEED, "federation.server_pass=null", out="without"))


@pytest.mark.parametrize(
    "changes", [["data.seed_part=null", "data.part=all"], ["data.part=seed"]], ids=["no seed part", "its own clients"]
)
def test_without_a_seed_part_that_is_nobody_and_refused(changes: list[str], federated_recipe: Path) -> None:
    with pytest.raises(InputError, match=r"server_pass\.data=seed: expected data\.seed_part, which says who") as caught:
        load_recipe(str(federated_recipe), [*SEED, *changes])
    assert "\n" not in str(caught.value)


def test_a_client_among_them_under_another_name_is_refused(run: Run, tmp_path: Path) -> None:
    """The one who has most to say, and so is in the seed part, is a client once more under another name."""
    (tmp_path / "stores").mkdir()

    def double(rendered: RenderedSpeaker) -> RenderedSpeaker:
        if rendered.name == "s00":
            return replace(rendered, utterances=[*rendered.utterances, *speaker(30, **FEW_WORDS).utterances])
        return replace(rendered, utterances=speaker(0, **FEW_WORDS).utterances) if rendered.name == "s01" else rendered

    pack_tones(tmp_path / "stores/tones", change=double, **FEW_WORDS)
    few = "data.seed_part={most_utterances_share: 0.1}"
    with pytest.raises(InputError, match=r"server_pass\.data=seed: utterance 0-0 is a client's too, sample for sample"):
        run(*SEED, few, out="refused", stores=tmp_path / "stores")
    assert not (tmp_path / "refused/ledger.jsonl").exists()


def test_the_seed_part_of_a_server_counts_as_heard_by_a_seed(run: Run, public_stores: Path, tmp_path: Path) -> None:
    outcome = run(*SEED, out="first")
    recipe = load_recipe(str(outcome.folder / "config.yaml"))
    store = Store(public_stores / "tones")
    warm_up = recipe.model_copy(update={"data": recipe.data.model_copy(update={"part": "seed"})})
    others = build_training_population(warm_up, store)
    seed = ParentModel(outcome.folder, recipe)
    found = count_clients_in_parent(seed, others, runs=tmp_path / "runs", stores=public_stores)
    assert (found.clients, found.unknown) == (len(others), ())


def test_a_recipe_without_a_pass_is_written_as_before(federated_recipe: Path) -> None:
    assert "server_pass" not in as_yaml(load_recipe(str(federated_recipe)))


def test_who_was_heard_by_a_server_counts_as_heard_by_a_seed(run: Run, public_stores: Path, tmp_path: Path) -> None:
    outcome = run(OWN, out="seed")
    seed = ParentModel(outcome.folder, load_recipe(str(outcome.folder / "config.yaml")))
    others = build_population(Store(public_stores / "public"), PopulationSettings(split=("train",)), seed=1)
    found = count_clients_in_parent(seed, others, runs=tmp_path / "runs", stores=public_stores)
    assert (found.clients, found.unknown) == (len(others), ())


def test_a_smoke_run_has_a_pass_of_other_people(federated_recipe: Path) -> None:
    small_recipe = shrink_recipe(load_recipe(str(federated_recipe), [OWN]))
    assert small_recipe.federated.server_pass is not None
    assert (small_recipe.federated.server_pass.data, small_recipe.data.dev) == ("dev", "test")
    of_seed = shrink_recipe(load_recipe(str(federated_recipe), [*LOCAL, *SEED]))
    own = of_seed.federated.server_pass
    assert own is not None
    assert (own.data, own.steps, own.epochs, own.order, of_seed.data.dev) == ("seed", 1, None, None, "dev")
