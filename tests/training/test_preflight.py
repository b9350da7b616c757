"""What would stop a run after days stops it before the first step: nothing is trained, and no folder is begun."""

from pathlib import Path

import pytest
import torch
from tests.tones import pack_tones

from sottovoce.base.errors import InputError
from sottovoce.config import Suite, as_yaml, load_experiment, load_recipe, recipe_names
from sottovoce.training.preflight import check_stages, check_stores, find_missing_stores, list_stages
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_folder import CONFIG, RESULTS
from sottovoce.training.suites import load_suite_recipes

SEED = """
about: the seed
data: {store: letters}
model: {size: tiny}
central: {steps: 3, batch_seconds: 4, optimiser: {name: adam}, schedule: {name: constant, lr: 0.001}}
"""
FEDERATED = """
about: the run
data: {store: tones}
model: {size: tiny}
federation:
  steps: 2
  cohort_size: 2
  seed_model: SEED
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, noise_multiplier: 8.0, delta: 1e-3}
"""


@pytest.fixture
def around(tmp_path: Path) -> RunContext:
    """Two stores with other people each, and recipes for a seed and for what starts from it."""
    pack_tones(tmp_path / "stores/tones", letters=(2, 3), utterances=2)
    pack_tones(tmp_path / "stores/letters", people=range(20, 30), letters=(2, 3), utterances=2)
    (tmp_path / "seed.yaml").write_text(SEED)
    (tmp_path / "run.yaml").write_text(FEDERATED.replace("SEED", str(tmp_path / "seed.yaml")))
    return RunContext(tmp_path / "runs", tmp_path / "stores", torch.device("cpu"))


def checked(around: RunContext, *overrides: str) -> None:
    recipe = load_recipe(str(around.runs.parent / "run.yaml"), overrides)
    stages = list_stages({"run": (recipe, around.runs / "run")}, folder=around.runs)
    assert [stage.recipe.about for stage in stages] == ["the seed", "the run"]
    check_stages(stages, around)


def test_what_fits_together_passes_and_leaves_nothing_behind(around: RunContext) -> None:
    checked(around)
    assert not around.runs.exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["federation.privacy.population_size=34753"], "the store has 9 clients"),
        (["federation.cohort_size=10"], "the population has only 9 clients"),
        (["data.test=[train]"], "of its speakers are clients too"),
        (["data.test=[tests]"], "no split='tests'"),
        (["model.width=64"], "the model to start from does not fit `model`"),
        (["model.family=crdnn", "model.size=tiny"], "is of family=ctc_transformer, expected crdnn"),
        (["data.store=letters"], "the seed model has already seen their speech"),
        (["federation.measure=ctc_wer"], "measure=ctc_wer"),
    ],
)
def test_what_the_run_would_be_refused_for_is_said_before_its_seed_is_trained(
    overrides: list[str], words: str, around: RunContext
) -> None:
    with pytest.raises(InputError, match=r"^run: ") as refused:
        checked(around, *overrides)
    assert words in str(refused.value)
    assert not around.runs.exists()


def test_a_store_in_another_language_is_refused_before_the_seed_is_trained(around: RunContext) -> None:
    pack_tones(around.stores / "german", language="de", letters=(2, 3), utterances=2)
    with pytest.raises(InputError, match="language"):
        checked(around, "data.store=german")


def test_an_engine_that_the_device_cannot_have_is_refused(around: RunContext) -> None:
    recipe = load_recipe(str(around.runs.parent / "run.yaml"), ["federation.engine=workers"])
    stages = list_stages({"run": (recipe, around.runs / "run")}, folder=around.runs)
    elsewhere = RunContext(around.runs, around.stores, torch.device("cuda"))
    with pytest.raises(InputError, match="engine=workers: its processes compute on the CPU"):
        check_stages(stages, elsewhere)


def test_all_missing_stores_are_named_at_once_each_with_its_command(tmp_path: Path) -> None:
    table = load_experiment("pelikan2025/table01")
    assert isinstance(table, Suite)
    runs = {label: (recipe, tmp_path / label) for label, recipe in load_suite_recipes(table).items()}
    stages = list_stages(runs, folder=tmp_path)
    assert len(stages) == 18, "17 cells, and the seed that they share"
    with pytest.raises(InputError) as refused:
        check_stores(stages, Path("stores"))
    first, *lines = str(refused.value).splitlines()
    assert first.startswith("these 2 stores are not there: librispeech, commonvoice-en")
    assert lines == [
        "  sottovoce prepare librispeech LibriSpeech --out stores/librispeech",
        "  sottovoce prepare commonvoice cv-corpus-13.0-2023-03-09/en --as-released --out stores/commonvoice-en",
    ]


def test_every_store_of_a_papers_recipes_has_a_command_or_is_made_by_its_run(tmp_path: Path) -> None:
    loaded = {name: load_experiment(name) for name in recipe_names() if name[:4] in ("peli", "gao2", "rame")}
    runs = {name: (recipe, tmp_path / "x") for name, recipe in loaded.items() if not isinstance(recipe, Suite)}
    absent = find_missing_stores(list_stages(runs, folder=tmp_path), tmp_path)
    assert len(absent) >= 8
    assert not [command for command in absent.values() if "CORPUS" in command]


def test_manifests_that_are_not_there_are_named(around: RunContext, tmp_path: Path) -> None:
    made = f"data.prepare={{manifests: [{tmp_path}/none.tsv]}}"
    with pytest.raises(InputError, match=r"it is made of .*/none.tsv, which is not there"):
        checked(around, "data.store=new", made)


def test_seeds_count_once_in_their_order_and_what_is_finished_not_at_all(around: RunContext) -> None:
    place = around.runs.parent
    (place / "second.yaml").write_text(SEED.replace("central: {", f"central: {{start_from: {place / 'seed.yaml'}, "))
    recipe = load_recipe(str(place / "run.yaml"), [f"federation.seed_model={place / 'second.yaml'}"])
    runs = {label: (recipe, around.runs / label) for label in ("one", "two", "three")}
    (around.runs / "two").mkdir(parents=True)
    (around.runs / "two" / RESULTS).write_text("{}")
    names = [stage.name for stage in list_stages(runs, folder=around.runs)]
    seeds = [name for name in names if name.startswith("seed model")]
    assert [name.rpartition("-")[2] for name in seeds] == ["seed", "second"]
    assert names == [*seeds, "one", "three"]


def test_what_another_recipe_has_finished_in_the_folder_is_refused(around: RunContext) -> None:
    """`--estimate` said that nothing was left to do, and a run was refused after its seed model was trained."""
    recipe = load_recipe(str(around.runs.parent / "run.yaml"))
    folder = around.runs / "run"
    folder.mkdir(parents=True)
    (folder / RESULTS).write_text("{}")
    (folder / CONFIG).write_text(as_yaml(recipe), encoding="utf-8")
    assert list_stages({"run": (recipe, folder)}, folder=around.runs) == []
    other = load_recipe(str(around.runs.parent / "run.yaml"), ["seed=7"])
    with pytest.raises(
        InputError, match=r"run folder .*/run belongs to another recipe \(- there, \+ now\): -seed: 1; \+seed: 7"
    ):
        list_stages({"run": (other, folder)}, folder=around.runs)
