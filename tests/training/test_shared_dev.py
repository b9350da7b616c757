"""Clients weighted by the WER of their models on speech that all of them share: which, how much, when it is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.tones import FEW_WORDS, pack_tones

from sottovoce.base.errors import InputError
from sottovoce.config import as_yaml, load_recipe
from sottovoce.config.smoke import shrink_recipe
from sottovoce.data.corpora.corpus import RenderedSpeaker
from sottovoce.data.store import Store
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext
from sottovoce.training.testing import choose_shared_dev

CPU = torch.device("cpu")
PLAIN = ["federation.privacy.noise_multiplier=0", "federation.privacy.adaptive=null"]
BY_WER = [*PLAIN, "federation.privacy.weighting=wer_released"]
BY_EQ_10 = [*PLAIN, "federation.privacy.weighting=wer"]
BY_LOSS = [*PLAIN, "federation.privacy.weighting=loss_released", "federation.local.local_steps=null"]
SHORT = ["federation.steps=2", "federation.evaluate_every=2", "federation.checkpoint_every=2"]
Run = Callable[..., Outcome]


def silent_dev(speaker: RenderedSpeaker) -> RenderedSpeaker:
    """Nobody knows what the dev speakers say."""
    if speaker.split != "dev":
        return speaker
    return replace(speaker, utterances=[replace(one, text=None, raw_text="") for one in speaker.utterances])


@pytest.fixture(scope="session")
def shared_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clients' store, and two of other people's speech."""
    folder = tmp_path_factory.mktemp("shared-stores")
    pack_tones(folder / "tones", **FEW_WORDS)
    pack_tones(folder / "public", people=range(15, 25), **FEW_WORDS)
    pack_tones(folder / "silent", people=range(15, 25), change=silent_dev, **FEW_WORDS)
    return folder


@pytest.fixture
def run(federated_recipe: Path, shared_stores: Path, tmp_path: Path) -> Run:
    """Runs the recipe with `key=value` changes in the folder `run`."""

    def go(*changes: str) -> Outcome:
        around = RunContext(runs=tmp_path / "runs", stores=shared_stores, device=CPU)
        recipe = load_recipe(str(federated_recipe), [*SHORT, *changes])
        return run_recipe(recipe, out=tmp_path / "run", resume=False, context=around)

    return go


def test_a_run_by_the_loss_of_the_last_epoch_ends(run: Run) -> None:
    assert run(*BY_LOSS, "federation.local.local_epochs=2").results is not None


@pytest.mark.parametrize("weighting", [BY_WER, BY_EQ_10])
def test_a_place_of_its_own_is_read_and_remembered(weighting: list[str], run: Run) -> None:
    found = run(*weighting, "federation.shared_dev={data: 'public:dev', utterances: 3}")
    inputs = json.loads((found.folder / "inputs.json").read_text())
    assert inputs["federation.shared_dev digest"] != inputs["data.dev digest"]


def test_so_many_utterances_are_the_same_for_all_rounds_and_repeats(
    federated_recipe: Path, shared_stores: Path
) -> None:
    store = Store(shared_stores / "tones")

    def chosen(*changes: str) -> list[int]:
        recipe = load_recipe(str(federated_recipe), [*BY_WER, "data.people_seed=3", *changes])
        return choose_shared_dev(recipe, (store, "dev")).rows.tolist()

    everything = chosen("federation.shared_dev={utterances: null}")
    some = chosen("federation.shared_dev={utterances: 4}")
    assert len(everything) == len(chosen()) == 6
    assert len(some) == 4
    assert set(some) < set(everything)
    assert some == sorted(some) == chosen("federation.shared_dev={utterances: 4}", "seed=8")
    others = [chosen("federation.shared_dev={utterances: 4}", f"data.people_seed={seed}") for seed in range(8)]
    assert any(other != some for other in others)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["federation.privacy.weighting=wer_released"],
            "weighting=wer_released with noise_multiplier=8.0: such weights",
        ),
        (
            [*BY_WER, "federation.shared_dev={data: 'silent:dev'}"],
            "weighting=wer_released: nothing to score in",
        ),
        ([*BY_EQ_10, "federation.shared_dev={data: 'silent:dev'}"], "weighting=wer: nothing to score in"),
        ([*BY_WER, "federation.shared_dev={data: 'public:nowhere'}"], "no split='nowhere'"),
        (
            [*BY_WER, "federation.shared_dev={data: train}"],
            "shared_dev.data=train is in data.train, the clients' speech",
        ),
        (
            [*BY_WER, "federation.shared_dev={data: test}"],
            "shared_dev.data=test is in data.test, what the model is judged",
        ),
        ([*BY_WER, "federation.shared_dev={utterances: 0}"], "greater than or equal to 1"),
        (
            [*PLAIN, "federation.shared_dev={}"],
            "shared_dev with privacy.weighting=uniform: only wer and wer_released read it",
        ),
        (BY_LOSS[:-1], "loss_released is the loss of the last local epoch: expected local.local_epochs"),
        ([*PLAIN, "federation.privacy.weighting=wer"], "expected clients.holdout or shared_dev"),
    ],
)
def test_mistakes_are_one_line(changes: list[str], message: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        run(*changes)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "run").exists(), "refused before anything is written"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (BY_WER, "federation.privacy.weighting=wer_released: models of family="),
        (
            [*PLAIN, "federation.clients.holdout=0.5", "federation.test_clients=all"],
            "federation.test_clients=all: models of family=",
        ),
    ],
)
def test_errors_of_models_that_write_nothing_are_refused(changes: list[str], message: str, run: Run) -> None:
    with pytest.raises(InputError, match=f"{message}tests.training.mute:FAMILY write no text"):
        run("model.family=tests.training.mute:FAMILY", "model.size=tiny", *changes)


def test_a_recipe_without_it_is_written_as_before(federated_recipe: Path) -> None:
    assert "shared_dev" not in as_yaml(load_recipe(str(federated_recipe)))
    assert "shared_dev" not in as_yaml(load_recipe(str(federated_recipe), BY_WER))


def test_settings_of_batches_that_came_later_are_written_only_where_they_are_given(federated_recipe: Path) -> None:
    before = as_yaml(load_recipe(str(federated_recipe)))
    assert not any(name in before for name in ("batch_utterances", "order"))
    changes = ["federation.local.batch_utterances=8", "federation.local.order=ascending"]
    changes += ["federation.local.local_steps=null", "federation.local.local_epochs=5"]
    written = as_yaml(load_recipe(str(federated_recipe), changes))
    assert "batch_utterances: 8" in written
    assert "order: ascending" in written


def test_by_equation_10_it_is_read_where_it_is_given_and_not_otherwise(federated_recipe: Path) -> None:
    own = load_recipe(str(federated_recipe), [*BY_EQ_10, "federation.clients.holdout=0.5"])
    assert own.federated.weighed_on is None
    both = load_recipe(
        str(federated_recipe), [*BY_EQ_10, "federation.clients.holdout=0.5", "federation.shared_dev={utterances: 7}"]
    )
    assert both.federated.weighed_on == both.federated.shared_dev is not None


def test_a_smoke_run_has_little_of_it(federated_recipe: Path) -> None:
    made = shrink_recipe(load_recipe(str(federated_recipe), [*BY_WER, "federation.shared_dev={data: 'public:dev'}"]))
    assert made.federated.shared_dev is not None
    assert (made.federated.shared_dev.data, made.federated.shared_dev.utterances) == (None, 4)
