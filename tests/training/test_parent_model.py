"""Whose speech a seed model has heard: found through its own recipe, and its seeds' recipes."""

import shutil
from pathlib import Path

import pytest
import torch
from tests.tones import pack_tones

from sottovoce.base.errors import InputError
from sottovoce.config import load_recipe
from sottovoce.data.population import PopulationSettings
from sottovoce.data.speakers import SeedPart
from sottovoce.data.store import Store
from sottovoce.training.disjointness import ClientsInParent, count_clients_in_parent
from sottovoce.training.parent_model import (
    ParentModel,
    default_run_folder,
    find_parent_model,
    resolve_parent_model,
)
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_data import build_recipe_population
from sottovoce.training.run_folder import CONFIG

CENTRAL = """
about: a seed
data: {{store: {store}{data}}}
model: {{size: tiny}}
central:
  steps: 1
  batch_seconds: 4
  optimiser: {{name: sgd}}
  schedule: {{name: constant, lr: 0.1}}
  {more}
"""
FEDERATED = """
about: federated
data: {{store: tones{data}}}
model: {{size: tiny}}
federation:
  steps: 1
  cohort_size: 2
  seed_model: {seed}
  local: {{batch_seconds: 2, lr: 0.1, local_steps: 1}}
  server: {{optimiser: {{name: sgd}}, schedule: {{name: constant, lr: 1.0}}}}
  privacy: {{clip_bound: 0.01, noise_multiplier: 8.0, delta: 1e-3}}
"""


def part(name: str) -> str:
    """Three people for the seed, the other six for the federation."""
    return f", seed_part: {{fraction: 0.34}}, part: {name}"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speakers 0 to 14, 10 to 24 and 20 to 34: the first two stores share three who train (10, 11, 12)."""
    folder = tmp_path_factory.mktemp("stores")
    pack_tones(folder / "tones", letters=(2, 3), utterances=2)
    pack_tones(folder / "others", people=range(10, 25), letters=(2, 3), utterances=2)
    pack_tones(folder / "strangers", people=range(20, 35), letters=(2, 3), utterances=2)
    return folder


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def central(folder: Path, name: str, *, store: str = "tones", data: str = "", more: str = "") -> str:
    return written(folder / f"{name}.yaml", CENTRAL.format(store=store, data=data, more=more))


def federated(folder: Path, seed: str, *, data: str = "") -> str:
    return written(folder / "federated.yaml", FEDERATED.format(seed=seed, data=data))


def around(tmp_path: Path, stores: Path) -> RunContext:
    return RunContext(runs=tmp_path / "runs", stores=stores, device=torch.device("cpu"))


@pytest.mark.parametrize(("store", "heard"), [("tones", 9), ("others", 3), ("strangers", 0)])
def test_people_are_known_by_name_across_stores(store: str, heard: int, stores: Path, tmp_path: Path) -> None:
    recipe = load_recipe(federated(tmp_path, "unused"))
    clients = build_recipe_population(recipe, Store(stores / "tones"), recipe.federated.clients.population(recipe.data))
    seed = ParentModel(tmp_path, load_recipe(central(tmp_path, "seed", store=store)))
    assert count_clients_in_parent(seed, clients, runs=tmp_path, stores=stores).clients == heard


def test_what_a_seed_started_from_counts_too(stores: Path, tmp_path: Path) -> None:
    recipe = load_recipe(federated(tmp_path, "unused"))
    clients = build_recipe_population(recipe, Store(stores / "tones"), recipe.federated.clients.population(recipe.data))
    first = central(tmp_path, "first", store="others")
    second = central(tmp_path, "second", store="strangers", more=f"start_from: {first}")
    found = count_clients_in_parent(
        resolve_parent_model(second, runs=tmp_path, root_seed=1), clients, runs=tmp_path, stores=stores
    )
    # Neither has been trained, so nobody knows whether these are the stores that they will have read.
    assert (found.clients, len(found.unknown)) == (3, 2)
    bare = central(tmp_path, "third", store="strangers", more=f"start_from: {tmp_path}")
    found = count_clients_in_parent(
        resolve_parent_model(bare, runs=tmp_path, root_seed=1), clients, runs=tmp_path, stores=stores
    )
    assert (found.clients, found.unknown[-1]) == (0, tmp_path)


def test_a_private_run_refuses_clients_whom_its_seed_has_heard(stores: Path, tmp_path: Path) -> None:
    recipe = load_recipe(federated(tmp_path, central(tmp_path, "seed")))
    with pytest.raises(InputError, match="users_also_in_seed=9: the seed model has already seen their speech"):
        run_recipe(recipe, out=tmp_path / "run", resume=False, context=around(tmp_path, stores))


def test_a_seed_on_its_own_part_of_the_people_is_trained_once_and_found_again(stores: Path, tmp_path: Path) -> None:
    """Both recipes divide the same people alike, because they share `seed`."""
    seed = central(tmp_path, "seed", data=part("seed"))
    recipe = load_recipe(federated(tmp_path, seed, data=part("federation")))
    where = around(tmp_path, stores)
    outcome = run_recipe(recipe, out=tmp_path / "run", resume=False, context=where)
    assert outcome.results is not None
    assert outcome.results["privacy"]["population_size"] == 6
    trained = default_run_folder(seed, where.runs)
    before = (trained / "results.json").stat().st_mtime_ns
    run_recipe(recipe, out=tmp_path / "again", resume=False, context=where)
    assert (trained / "results.json").stat().st_mtime_ns == before
    assert resolve_parent_model(seed, runs=where.runs, root_seed=1).is_trained
    for place in (trained, trained / "model", (trained / "model").resolve()):
        assert resolve_parent_model(str(place), runs=where.runs, root_seed=1).recipe == load_recipe(seed)


WHOLE = ("seed=2", "data.people_seed=2")


def test_a_whole_repeat_has_other_people_and_a_seed_model_of_its_own(stores: Path, tmp_path: Path) -> None:
    """Where both recipes name a `people_seed`, that of the seed model follows: else they would divide people apart."""
    of_one = ", people_seed: 1"
    seed = central(tmp_path, "seed", data=part("seed") + of_one)
    path, where = federated(tmp_path, seed, data=part("federation") + of_one), around(tmp_path, stores)
    for changes, folder in (((), "seed"), (("seed=2",), "seed"), (WHOLE, "seed-seed2")):
        found = find_parent_model(load_recipe(path, changes), runs=where.runs)
        assert found is not None
        assert found.folder.name.endswith(folder)
    outcome = run_recipe(load_recipe(path, WHOLE), out=tmp_path / "run", resume=False, context=where)
    assert outcome.results is not None
    assert outcome.results["privacy"]["population_size"] == 6, "nobody of them is in the seed part"
    assert outcome.results["start"]["converged"] == "not shown", "one step shows nothing"
    told = found.folder / "results.json"
    told.write_text(told.read_text().replace('"converged": "not shown"', '"converged": "yes"'))
    again = run_recipe(load_recipe(path, WHOLE), out=tmp_path / "again", resume=False, context=where)
    assert again.results is not None
    assert again.results["start"]["converged"] == "yes", "what the seed model's run says of it"
    assert "people_seed: 2" in (default_run_folder(seed, where.runs).with_name(found.folder.name) / CONFIG).read_text()


@pytest.mark.parametrize(
    ("name", "parent", "divides"),
    [
        ("benchmark/clipping-lars/dim", "benchmark-seed-lars", False),  # other people altogether
        ("benchmark/clipping/dim", "benchmark-seed", True),
        ("benchmark/cpu/imbalance/lars-dim", "benchmark-cpu-seed-lars", True),
        ("benchmark/gao/real-speech-commands/user", "benchmark-gao-real-speech-commands-warm-up", True),
    ],
)
def test_whole_repeats_of_the_benchmarks_start_from_other_seed_models(name: str, parent: str, divides: bool) -> None:
    shared, whole = (find_parent_model(load_recipe(name, c), runs=Path("runs")) for c in (WHOLE[:1], WHOLE))
    assert shared is not None
    assert whole is not None
    assert (shared.folder.name, whole.folder.name) == (parent, f"{parent}-seed2")
    assert shared.recipe is not None
    assert whole.recipe is not None
    assert (shared.recipe.seed, whole.recipe.seed) == (1, 2)
    assert (whole.recipe.people_seed == 2) is divides


@pytest.mark.parametrize("name", ["start/user", "silos/silo", "weighting-loss/user-loss", "scratch/second-half"])
def test_where_no_people_seed_is_named_every_repeat_is_whole(name: str) -> None:
    for seed, folder in ((1, "benchmark-gao-warm-up-fr"), (2, "benchmark-gao-warm-up-fr-seed2")):
        found = find_parent_model(load_recipe(f"benchmark/gao/{name}", [f"seed={seed}"]), runs=Path("runs"))
        assert found is not None
        assert found.folder.name == folder
        assert found.recipe is not None
        assert (found.recipe.seed, found.recipe.people_seed) == (seed, seed)


def test_a_seed_model_that_divides_by_another_rule_keeps_its_people(tmp_path: Path) -> None:
    seed = central(tmp_path, "seed", data=part("seed").replace("0.34", "0.5") + ", people_seed: 6")
    found = find_parent_model(load_recipe(federated(tmp_path, seed, data=part("federation"))), runs=tmp_path)
    assert found is not None
    assert found.recipe is not None
    assert (found.recipe.seed, found.recipe.people_seed) == (1, 6)


def test_another_root_seed_has_a_folder_of_its_own(tmp_path: Path) -> None:
    path = central(tmp_path, "seed")
    usual, other = (resolve_parent_model(path, runs=tmp_path, root_seed=number) for number in (1, 2))
    assert usual.folder != other.folder
    assert other.recipe is not None
    assert other.recipe.seed == 2


def test_a_seed_that_is_nowhere_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no recipe 'pelikan2025/central/ls-10', did you mean"):
        resolve_parent_model("pelikan2025/central/ls-10", runs=tmp_path, root_seed=1)


def test_a_store_made_anew_leaves_nobody_knowing_whom_the_seed_has_heard(tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    pack_tones(stores / "crowd", people=range(10), letters=(2, 3), utterances=2)
    where = RunContext(runs=tmp_path / "runs", stores=stores, device=torch.device("cpu"))
    seed = central(tmp_path, "seed", store="crowd", data=", seed_part: {fraction: 0.3}, part: seed")
    found = resolve_parent_model(seed, runs=where.runs, root_seed=1)
    assert found.recipe is not None
    run_recipe(found.recipe, out=found.folder, resume=False, context=where)
    clients = build_recipe_population(
        found.recipe, Store(stores / "crowd"), PopulationSettings(split="train", seed_part=SeedPart(fraction=0.3))
    )
    assert count_clients_in_parent(found, clients, runs=where.runs, stores=stores) == ClientsInParent(0, ())
    shutil.rmtree(stores / "crowd")
    pack_tones(stores / "crowd", people=range(15), letters=(2, 3), utterances=2)
    assert count_clients_in_parent(found, clients, runs=where.runs, stores=stores).unknown == (found.folder,)


def test_people_whom_a_seed_was_chosen_on_count_as_heard(tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    pack_tones(stores / "crowd", people=range(10), letters=(2, 3), utterances=2)
    pack_tones(stores / "studio", people=range(40, 45), letters=(2, 3), utterances=2)
    where = RunContext(runs=tmp_path / "runs", stores=stores, device=torch.device("cpu"))
    seed = central(tmp_path, "seed", store="studio", data=", dev: 'crowd:train'")
    found = resolve_parent_model(seed, runs=where.runs, root_seed=1)
    assert found.recipe is not None
    run_recipe(found.recipe, out=found.folder, resume=False, context=where)
    clients = build_recipe_population(found.recipe, Store(stores / "crowd"), PopulationSettings(split="train"))
    assert count_clients_in_parent(found, clients, runs=where.runs, stores=stores).clients == len(clients)


@pytest.fixture
def trained_elsewhere(stores: Path, tmp_path: Path) -> Path:
    """A finished run whose store is not on this machine."""
    own = tmp_path / "own stores"
    own.mkdir()
    shutil.copytree(stores / "strangers", own / "strangers")
    seed = load_recipe(central(tmp_path, "seed", store="strangers"))
    run_recipe(seed, out=tmp_path / "seed run", resume=False, context=around(tmp_path, own))
    shutil.rmtree(own)
    return tmp_path / "seed run"


def start_from(seed: Path, stores: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"  # has the clients' store and no other
    if not here.exists():
        here.mkdir()
        (here / "tones").symlink_to(stores / "tones")
    recipe = load_recipe(federated(tmp_path, f"'{seed}'"))
    run_recipe(recipe, out=tmp_path / "out", resume=False, context=around(tmp_path, here))


def test_a_run_as_seed_says_why_its_store_is_needed_and_what_to_give_instead(
    stores: Path, tmp_path: Path, trained_elsewhere: Path
) -> None:
    for seed in (trained_elsewhere, trained_elsewhere / "model"):
        with pytest.raises(InputError) as refused:
            start_from(seed, stores, tmp_path)
        said = str(refused.value)
        assert said.startswith(f"seed model {seed}: the stores that it was trained and chosen on are needed, to find ")
        assert f"(no store at {tmp_path / 'here' / 'strangers'}: nothing is there" in said
        assert said.endswith("or for a simulation the model without its run: a copy of the run's folder `model`")
    shutil.copytree(trained_elsewhere / "model", tmp_path / "copy")
    start_from(tmp_path / "copy", stores, tmp_path)


def test_an_unfinished_run_as_seed_says_that_it_would_be_trained(
    stores: Path, tmp_path: Path, trained_elsewhere: Path
) -> None:
    (trained_elsewhere / "results.json").unlink()
    with pytest.raises(InputError, match=r"seed model .*seed run: it is not there, or not finished, and is trained fi"):
        start_from(trained_elsewhere, stores, tmp_path)


def test_the_model_in_a_run_is_a_seed_like_the_run(stores: Path, tmp_path: Path) -> None:
    seed = load_recipe(central(tmp_path, "seed", store="strangers"))
    run_recipe(seed, out=tmp_path / "seed run", resume=False, context=around(tmp_path, stores))
    for place in ("seed run", "seed run/model"):
        found = resolve_parent_model(str(tmp_path / place), runs=tmp_path, root_seed=1)
        assert (found.is_trained, found.recipe) == (True, seed)
        found.load()
