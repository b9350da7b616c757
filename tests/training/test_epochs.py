"""Central training by epochs: its steps follow from the data that are there; and NewBob goes by the dev loss."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import in_processes
from tests.training.running import run_here

from sottovoce.base.errors import InputError
from sottovoce.config import as_yaml, load_recipe
from sottovoce.config.smoke import shrink_recipe
from sottovoce.data.loading import DataPosition, iterate_steps
from sottovoce.models.recogniser import load_recogniser
from sottovoce.report.records import read_run
from sottovoce.report.run_facts import RUN_FACTS
from sottovoce.training import central
from sottovoce.training.checkpoint import load_latest_checkpoint
from sottovoce.training.estimate import count_recognised_seconds, estimate_runs
from sottovoce.training.preflight import check_stages, list_stages
from sottovoce.training.run_context import Outcome, RunContext

CPU = torch.device("cpu")
EPOCHS = [
    *("central.steps=null", "central.epochs=3", "central.evaluate_every=epoch", "central.checkpoint_every=4"),
    *("central.batch_utterances=5", "central.batch_seconds=20"),  # never the tighter bound
]


def metrics(outcome: Outcome) -> list[dict[str, Any]]:
    """All but what the clock decides."""
    records = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k != "audio_seconds_per_second"} for record in records]


def inputs(outcome: Outcome) -> dict[str, Any]:
    return dict(json.loads((outcome.folder / "inputs.json").read_text()))


def same(one: Outcome, other: Outcome) -> bool:
    found, expected = (load_recogniser(outcome.folder / "checkpoints/latest").parameters for outcome in (one, other))
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


class Killed(Exception):
    pass


@pytest.mark.parametrize("order", ["ascending", "null"])
def test_three_epochs_use_all_three_times_and_a_resumed_run_has_the_same_bits(
    order: str, recipe_file: Path, stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [*EPOCHS, f"central.order={order}"]
    whole = run_here(recipe_file, changes, stores, tmp_path / "whole")
    in_epoch = inputs(whole)["steps in an epoch"]
    assert inputs(whole)["steps"] == 3 * in_epoch
    found, _ = load_latest_checkpoint(whole.folder / "checkpoints")
    assert found is not None
    assert (found.step, found.state["place"]) == (3 * in_epoch, {"epoch": 3, "batch": 0})
    assert [record["step"] for record in metrics(whole) if "dev_wer" in record] == [in_epoch, 2 * in_epoch, found.step]

    train_step, made = central.train_step, iter(range(100))

    def dies(*arguments: Any, **options: Any) -> Any:
        if next(made) == in_epoch + 3:  # in the second epoch, after its first checkpoint
            raise Killed
        return train_step(*arguments, **options)

    monkeypatch.setattr(central, "train_step", dies)
    with pytest.raises(Killed):
        run_here(recipe_file, changes, stores, tmp_path / "broken")
    monkeypatch.setattr(central, "train_step", train_step)
    resumed = run_here(recipe_file, changes, stores, tmp_path / "broken", True)
    assert same(resumed, whole)
    assert (metrics(resumed), inputs(resumed)) == (metrics(whole), inputs(whole))


def test_the_steps_of_a_part_follow_from_its_own_data(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    """Nine people with four utterances each, of whom a third are the warm-up: batches of five."""
    changes = [*EPOCHS, "data.seed_part={fraction: 0.34}"]
    expected = {"seed": 3, "federation": 5}  # of 12 and 24 utterances; by steps both would have as many
    for part, in_epoch in expected.items():
        outcome = run_here(recipe_file, [*changes, f"data.part={part}"], stores, tmp_path / part)
        assert (inputs(outcome)["steps"], metrics(outcome)[-1]["step"]) == (3 * in_epoch, 3 * in_epoch)
        assert metrics(outcome)[-1]["epoch"] == 3
        assert RUN_FACTS["rounds or steps"](read_run(part, outcome.folder)) == f"{3 * in_epoch}"


def one_thread_run(*arguments: Any) -> Outcome:
    torch.set_num_threads(1)
    return run_here(*arguments)


def test_two_ranks_make_as_many_steps(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    arguments = (recipe_file, EPOCHS, stores)
    alone = one_thread_run(*arguments, tmp_path / "alone")
    team, _ = in_processes(2, one_thread_run, *arguments, tmp_path / "team")
    names = ("steps", "steps in an epoch")
    assert [inputs(team)[name] for name in names] == [inputs(alone)[name] for name in names]
    assert metrics(team)[-1]["epoch"] == 3


def test_checks_before_a_run_know_its_steps_and_the_estimate_its_audio(
    recipe_file: Path, stores: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(str(recipe_file), EPOCHS)
    context = RunContext(tmp_path / "runs", stores, CPU)
    stages = list_stages({"run": (recipe, tmp_path / "run")}, folder=context.runs)
    checked = check_stages(stages, context)
    stage = checked[tmp_path / "run"]
    assert stage is not None
    assert stage.speech is not None
    (cost,) = estimate_runs(stages, checked, context).costs
    assert cost.audio_seconds == pytest.approx(3 * 3600 * stage.speech.hours)
    assert count_recognised_seconds(recipe, speech=stage.speech, dev=70, tests=90) == 3 * 70 + 90
    steps = iterate_steps(
        stage.speech, start=DataPosition(), max_seconds=20, max_utterances=5, seed=recipe.seed, device=CPU
    )
    made = next(number for number, loaded in enumerate(steps, start=1) if loaded.following.epoch == 3)
    outcome = run_here(recipe_file, EPOCHS, stores, tmp_path / "run")
    assert inputs(outcome)["steps"] == made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["central.epochs=2"], "steps=12, epochs=2: expected exactly one; =null takes one away"),
        (["central.steps=null"], "steps=None, epochs=None: expected exactly one"),
        (["central.steps=null", "central.epochs=0"], "greater than or equal to 1"),
        (["central.evaluate_every=epochs"], "evaluate_every"),
    ],
)
def test_mistakes_are_one_line(changes: list[str], message: str, recipe_file: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_recipe(str(recipe_file), changes)
    assert "\n" not in str(caught.value)


def test_a_recipe_says_steps_or_epochs_and_a_smoke_run_makes_one_step(recipe_file: Path) -> None:
    by_steps, by_epochs = load_recipe(str(recipe_file)), load_recipe(str(recipe_file), EPOCHS)
    assert "epochs" not in as_yaml(by_steps)
    assert "steps" not in as_yaml(by_epochs)
    small = shrink_recipe(by_epochs).training
    assert (small.steps, small.epochs, small.evaluate_every) == (1, None, 1)


def test_newbob_goes_by_the_loss_where_errors_say_something_else(
    recipe_file: Path, stores: Path, tmp_path: Path
) -> None:
    """A model that writes nothing yet: its WER stays at 100 %, while its loss falls."""
    changes = ["central.newbob={factor: 0.5, improvement: 0.0001}", "central.evaluate_every=3"]
    changes += ["central.optimiser={name: adam}", "central.schedule.lr=0.001"]
    outcome = run_here(recipe_file, changes, stores, tmp_path / "run")
    evaluated = [record for record in metrics(outcome) if "dev_wer" in record]
    losses = [record["dev_loss"] for record in evaluated]
    assert [record["dev_wer"] for record in evaluated] == [1.0] * 4, "by which the rate would have been halved"
    assert all(after < 0.9999 * before for before, after in pairwise(losses))
    assert {record["lr"] for record in metrics(outcome)} == {0.001}
