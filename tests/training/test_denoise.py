"""Releases are denoised by public people: repeatable, free of charge, and by nobody who is a client or judged by."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.several import in_processes
from tests.tones import FEW_WORDS, pack_tones, rename
from tests.training.running import run_here

from sottovoce import Simulation
from sottovoce.auditing.of_recipe import AuditSettings, audit_recipe
from sottovoce.auditing.rounds import make_rounds
from sottovoce.config import as_yaml, load_recipe
from sottovoce.config.smoke import smoke
from sottovoce.corpora.corpus import RenderedSpeaker
from sottovoce.errors import InputError
from sottovoce.federated.denoise import WienerFilter
from sottovoce.models.saved import load
from sottovoce.privacy.ledger import verify
from sottovoce.store import Store
from sottovoce.training import federation
from sottovoce.training import stages as training_stages
from sottovoce.training.beforehand import make_ready, missing_stores, stages_of
from sottovoce.training.estimate import estimate
from sottovoce.training.seeding import Seed, heard_by
from sottovoce.training.simulation import gather
from sottovoce.training.speakers import public_people, store_of
from sottovoce.training.stages import Outcome, Surroundings, run_recipe
from sottovoce.users import PopulationSettings, build_population

RECIPE = """
about: tones
seed: 5
data: {store: tones}
model: {size: tiny, dropout: 0.1, layer_drop: 0.2}
federation:
  steps: 4
  cohort_size: 2
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}, ema: 0.5}
  privacy: {clip_bound: 0.5, noise_multiplier: 1.0, delta: 1e-3}
  evaluate_every: 4
  checkpoint_every: 2
"""
PUBLIC = "federation.denoise={data: 'public:train'}"
SEED_PART = ["data.seed_part={fraction: 0.4}", "data.part=federation", "federation.denoise={data: seed}"]
CPU = torch.device("cpu")
Run = Callable[..., Outcome]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def run(recipe: Path, public_stores: Path, tmp_path: Path) -> Run:
    """Runs the recipe with `key=value` changes in the folder `out`."""

    def go(*changes: str, out: str, resume: bool = False, stores: Path = public_stores) -> Outcome:
        return run_here(recipe, [*changes], stores, tmp_path / out, resume=resume)

    return go


def weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    return dict(load(outcome.folder / "checkpoints/latest").parameters)


def same(one: Outcome, other: Outcome) -> bool:
    found, expected = weights(one), weights(other)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def lines(outcome: Outcome, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (outcome.folder / file).read_text().splitlines()]


def kept(outcome: Outcome) -> list[float]:
    return [record["denoise_kept"] for record in lines(outcome, "metrics.jsonl") if "denoise_kept" in record]


# What it does, and what not.


def test_the_model_is_another_and_what_is_charged_is_not(run: Run) -> None:
    without, denoised = run(out="without"), run(PUBLIC, out="with")
    assert not same(without, denoised)
    assert len(kept(denoised)) == 4
    assert all(0 < share < 1 for share in kept(denoised))
    assert not kept(without)
    assert verify(without.folder / "ledger.jsonl").epsilon == verify(denoised.folder / "ledger.jsonl").epsilon
    rows, others = lines(without, "ledger.jsonl"), lines(denoised, "ledger.jsonl")
    assert len(rows) == len(others)
    assert [charged(row) for row in rows] == [charged(row) for row in others]


def charged(row: dict[str, Any]) -> dict[str, Any]:
    """All but digests: of the rows before, of what the run has read and written, and of models."""
    digests = ("inputs", "recipe", "parameters", "result", "model", "files")
    return {name: value for name, value in row["record"].items() if name not in digests}


def test_the_first_release_is_what_it_would_be_without(recipe: Path, public_stores: Path, tmp_path: Path) -> None:
    """Nobody's draw moves, and whoever is shown releases is shown them whole."""
    released: dict[str, list[torch.Tensor]] = {}
    for name, changes in {"without": [], "with": [PUBLIC]}.items():
        asked = load_recipe(str(recipe), changes)
        found = gather(asked, around=Surroundings(tmp_path / "runs", public_stores, CPU))
        seen = released.setdefault(name, [])
        make_rounds(
            found.plan,
            server=found.server,
            engine=found.engine,
            rounds=2,
            denoise=found.denoise,
            on_release=lambda released_P, _step, _plan, seen=seen: seen.append(released_P.clone()),  # type: ignore[misc]
        )
    first, other = released["without"], released["with"]
    assert torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])


@pytest.mark.parametrize(
    "changes",
    [
        ["federation.privacy.share=uniform"],
        ["federation.privacy.share=dim", "federation.privacy.normalise=always"],
        ["federation.trainable='lora(r=2)'"],
        ["federation.privacy.weighting=seconds", "federation.privacy.weight_cap=1.0", "federation.model_bits=16"],
        ["federation.privacy.mode=secure"],
        ["federation.engine=stacked"],
        ["federation.engine=shared"],
    ],
    ids=lambda changes: changes[0].split("=", 1)[1],
)
def test_whatever_else_a_run_does(changes: list[str], run: Run) -> None:
    outcome = run(PUBLIC, *changes, "federation.steps=1", out="run")
    (share,) = kept(outcome)
    assert 0 < share < 1


def test_rounds_in_the_hand_and_audits_are_denoised_too(
    run: Run, recipe: Path, public_stores: Path, tmp_path: Path
) -> None:
    outcome = run(PUBLIC, "federation.engine=sequential", out="run")
    asked = load_recipe(str(recipe), [PUBLIC])
    simulation = Simulation(asked, stores=public_stores, runs=tmp_path / "runs", device="cpu")
    assert len(list(simulation.rounds())) == 4
    found = simulation.model.parameters
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(outcome).items())
    around = Surroundings(tmp_path / "runs", public_stores, CPU)
    audit = audit_recipe(asked, AuditSettings(canaries=50, rounds=2), around=around)
    assert audit.rounds == 2


# Who they are.


def test_the_seed_part_is_meant_by_its_name(recipe: Path, public_stores: Path) -> None:
    asked = load_recipe(str(recipe), SEED_PART)
    found = public_people(asked, public_stores)
    assert found is not None
    store = store_of(found)
    clients = build_population(store, asked.federated.clients.population(asked.data), seed=found.seed)
    everybody = build_population(store, PopulationSettings(split=("train",)), seed=1)
    assert (len(found), len(clients), len(everybody)) == (3, 6, 9)
    assert not set(found.user_rows().tolist()) & set(clients.user_rows().tolist())


def test_a_split_called_seed_goes_before(recipe: Path, tmp_path: Path) -> None:
    def moved(rendered: RenderedSpeaker) -> RenderedSpeaker:
        return replace(rendered, split="seed") if rendered.name in ("s00", "s01") else rendered

    pack_tones(tmp_path / "stores/tones", change=moved, **FEW_WORDS)
    found = public_people(load_recipe(str(recipe), SEED_PART), tmp_path / "stores")
    assert found is not None
    assert {client.id for client in found} == {"s00", "s01"}


def test_public_people_are_capped_like_clients(recipe: Path, public_stores: Path) -> None:
    asked = load_recipe(str(recipe), [PUBLIC, "federation.clients.max_seconds=0.5"])
    found = public_people(asked, public_stores)
    assert found is not None
    assert found.left_out.clients_above_max_seconds == len(found)  # each says two words of 0.4 s or more


def test_without_it_a_recipe_is_written_as_before_and_nobody_is_asked_for(recipe: Path, public_stores: Path) -> None:
    asked = load_recipe(str(recipe))
    assert "denoise" not in as_yaml(asked)
    assert public_people(asked, public_stores) is None


def test_who_a_run_was_denoised_by_counts_as_heard_by_a_seed(run: Run, public_stores: Path, tmp_path: Path) -> None:
    outcome = run(PUBLIC, out="seed")
    seed = Seed(outcome.folder, load_recipe(str(outcome.folder / "config.yaml")))
    others = build_population(Store(public_stores / "public"), PopulationSettings(split=("train",)), seed=1)
    found = heard_by(seed, others, runs=tmp_path / "runs", stores=public_stores)
    assert (found.clients, found.unknown) == (len(others), ())
    assert json.loads((outcome.folder / "inputs.json").read_text())["federation.denoise.data digest"]


def test_a_smoke_run_is_denoised_by_other_people(recipe: Path) -> None:
    small = smoke(load_recipe(str(recipe), SEED_PART))
    assert small.federated.denoise is not None
    assert (small.federated.denoise.data, small.data.dev) == ("dev", "test")


# However it is run.


class Killed(Exception):
    pass


def test_a_resumed_run_has_the_same_bits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in its last round, after a checkpoint that does not hold the round before."""
    whole = run(*SEED_PART, out="whole")
    run_round = federation.run_round

    def dies(*arguments: Any, **options: Any) -> Any:
        if options["step"] == 3:
            raise Killed
        return run_round(*arguments, **options)

    monkeypatch.setattr(federation, "run_round", dies)
    with pytest.raises(Killed):
        run(*SEED_PART, out="broken")
    monkeypatch.setattr(federation, "run_round", run_round)
    resumed = run(*SEED_PART, out="broken", resume=True)
    assert same(resumed, whole)
    assert (resumed.folder / "ledger.jsonl").read_bytes() == (whole.folder / "ledger.jsonl").read_bytes()
    assert kept(resumed) == kept(whole)


def test_a_finished_run_is_shown_without_training_anybody(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(PUBLIC, out="run")

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("public people were trained again")

    monkeypatch.setattr(training_stages, "learn_denoise", never)
    assert run(PUBLIC, out="run", resume=True).results == outcome.results


def one_thread_run(*arguments: Any) -> Outcome:
    torch.set_num_threads(1)
    return run_here(*arguments)


@pytest.mark.long
def test_several_processes_come_to_the_same_bits(recipe: Path, public_stores: Path, tmp_path: Path) -> None:
    """Cohorts of two, whose sum has the same bits whoever adds it up."""
    changes = [PUBLIC, "federation.privacy.sampling=fixed_size", "federation.engine=sequential"]
    alone, together = (
        in_processes(count, one_thread_run, recipe, changes, public_stores, tmp_path / str(count))[0]
        for count in (1, 2)
    )
    assert same(together, alone)
    assert kept(together) == kept(alone)


def test_it_is_measured_and_its_store_is_asked_for(recipe: Path, public_stores: Path, tmp_path: Path) -> None:
    asked = load_recipe(str(recipe), [PUBLIC])
    around = Surroundings(tmp_path / "runs", public_stores, CPU)
    stages = stages_of({"run": (asked, tmp_path / "run")}, folder=around.runs)
    (cost,) = estimate(stages, make_ready(stages, around), around, above=0.0).costs
    assert cost.seconds is not None
    assert list(missing_stores(stages, tmp_path)) == ["tones", "public"]


# What is refused.


def refused(recipe: Path, stores: Path, tmp_path: Path, words: str) -> None:
    """Beforehand, and by a run before anything is charged."""
    asked = load_recipe(str(recipe), [PUBLIC])
    around = Surroundings(tmp_path / "runs", stores, CPU)
    stages = stages_of({"run": (asked, tmp_path / "run")}, folder=around.runs)
    with pytest.raises(InputError, match=words) as caught:
        make_ready(stages, around)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=words):
        run_recipe(asked, out=tmp_path / "run", resume=False, around=around)
    assert not (tmp_path / "run/ledger.jsonl").exists()


@pytest.mark.parametrize(
    ("public", "words"),
    [
        (
            {"people": range(5), "letters": (4, 5)},
            "data=public:train: 3 of its speakers are clients too; public people",
        ),
        ({"people": [15, 16, 12], "change": rename("s12", "other")}, "utterance 12-0 is a client's too, sample for"),
        ({"people": [15, 16, 17], "change": rename("s15", "s03")}, "1 of its speakers are in data.dev, what the model"),
        ({"people": [15]}, "data=public:train: 1 public people, expected at least 2"),
        ({"people": [15, 16], "language": "fr"}, "language"),
    ],
    ids=["clients", "clients' speech", "judged", "one", "language"],
)
def test_public_people_are_strangers(
    public: dict[str, Any], words: str, recipe: Path, public_stores: Path, tmp_path: Path
) -> None:
    stores = tmp_path / "stores"
    stores.mkdir()
    (stores / "tones").symlink_to(public_stores / "tones")
    pack_tones(stores / "public", **FEW_WORDS | public)
    refused(recipe, stores, tmp_path, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["federation.denoise.data=train"], "is in data.train, the clients' speech"),
        (["federation.denoise.data=dev"], "is in data.dev, what the model is judged by"),
        (["federation.denoise.data=test"], "is in data.test, what the model is judged by"),
        (["federation.privacy.noise_multiplier=0"], "denoise without noise: there is nothing to take out"),
        (["federation.privacy.adaptive={target_quantile: 0.5}"], "denoise with privacy.adaptive: its filter is"),
        (["federation.privacy.mechanism={kind: banded, bands: 2}"], "denoise with privacy.mechanism: what is taken"),
        (
            ["federation.privacy.noise_scope={groups: {all: ['*']}, factors: {all: 0.5}}"],
            "denoise with privacy.noise_scope: its filter is",
        ),
        (["federation.denoise.date=dev"], "date"),
    ],
)
def test_what_cannot_be_denoised_is_refused_in_one_line(changes: list[str], words: str, recipe: Path) -> None:
    with pytest.raises(InputError, match=words) as caught:
        load_recipe(str(recipe), [PUBLIC, *changes])
    assert "\n" not in str(caught.value)


def test_people_who_cannot_be_trained_are_left_out_and_some_must_be_left(
    recipe: Path, public_stores: Path, tmp_path: Path
) -> None:
    def talks_on(rendered: RenderedSpeaker) -> RenderedSpeaker:
        longer = [replace(said, samples=np.tile(said.samples, 9)) for said in rendered.utterances]
        return replace(rendered, utterances=longer) if rendered.name == "s16" else rendered

    stores = tmp_path / "stores"
    stores.mkdir()
    (stores / "tones").symlink_to(public_stores / "tones")
    pack_tones(stores / "public", people=[15, 16, 17], change=talks_on, **FEW_WORDS)
    found = gather(load_recipe(str(recipe), [PUBLIC]), around=Surroundings(tmp_path / "runs", stores, CPU)).denoise
    assert isinstance(found, WienerFilter)
    assert "learned from 2 public people (1 more could not be trained), " in found.about
    asked = load_recipe(str(recipe), [PUBLIC, "federation.local.batch_seconds=0.3"])
    around = Surroundings(tmp_path / "runs", public_stores, CPU)
    with pytest.raises(InputError, match="0 public people could be trained, expected at least 2"):
        gather(asked, around=around)
