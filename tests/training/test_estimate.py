"""What runs take, counted; and the words for it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.config import Recipe, load_recipe, validate_recipe
from sottovoce.data.loading import Speech
from sottovoce.evaluation.measures import LOSS
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import poisson_release, repeated
from sottovoce.training.assemble import assemble
from sottovoce.training.estimate import (
    LONG_SECONDS,
    Estimate,
    RunCost,
    count_operations,
    count_recognised_seconds,
    estimate_runs,
    measure_device_speed,
    seconds_too_long,
    sum_known,
)
from sottovoce.training.loop import LoopSettings
from sottovoce.training.preflight import check_stages, list_stages
from sottovoce.training.run_context import RunContext

STEPS = st.integers(1, 60)


@given(steps=STEPS, evaluate_every=STEPS)
def test_counts_are_what_the_loop_does(steps: int, evaluate_every: int) -> None:
    recipe = load_recipe("synthetic/central", [f"central.steps={steps}", f"central.evaluate_every={evaluate_every}"])
    settings = LoopSettings(
        recipe="", tokens="", measure=LOSS, steps=steps, evaluate_every=evaluate_every, checkpoint_every=1
    )
    due = [settings.due(step, stops=False) for step in range(1, steps + 1)]
    assert count_recognised_seconds(recipe, dev=1.0, tests=0.0) == sum(d.evaluate for d in due)


def test_a_sum_with_something_unknown_in_it_is_unknown() -> None:
    assert sum_known([1.0, 2.0]) == 3.0
    assert sum_known([1.0, None]) is None


def test_the_flagships_local_steps_are_counted() -> None:
    # 255.8M parameters, 1,024 clients × 2,006 rounds × 10 steps of at most 120 s, 33.3 frames a second: 6·P·frames.
    audio = 1024 * 2006 * 10 * 120
    assert count_operations(255_800_000, audio) == pytest.approx(6 * 255_800_000 * audio * 100 / 3)
    # Recognising takes the forward pass alone, a third of it.
    assert count_operations(255_800_000, 0.0, audio) == pytest.approx(2 * 255_800_000 * audio * 100 / 3)


@pytest.fixture
def recipe(federated_recipe: Path) -> Recipe:
    return load_recipe(str(federated_recipe))


def test_a_federated_run_evaluates_before_its_first_round_and_tests_two_models(recipe: Recipe) -> None:
    evaluated = 1 + -(-12 // recipe.federated.evaluate_every)
    assert count_recognised_seconds(recipe, dev=70, tests=90) == evaluated * 70 + 2 * 90


def test_a_central_run_tests_one_model_and_begins_with_no_evaluation(recipe_file: Path) -> None:
    # 12 steps, evaluated after 5, 10 and 12.
    assert count_recognised_seconds(load_recipe(str(recipe_file)), dev=70, tests=90) == 3 * 70 + 90


def test_a_device_has_some_speed() -> None:
    assert measure_device_speed(torch.device("cpu")) > 1e6


def estimated(recipe: Recipe, stores: Path, folder: Path) -> Estimate:
    context = RunContext(folder / "runs", stores, torch.device("cpu"))
    stages = list_stages({"run": (recipe, folder / "run")}, folder=context.runs)
    found = estimate_runs(stages, check_stages(stages, context), context)
    assert not any(folder.glob("run*")), "estimating leaves nothing behind"
    return found


def test_audio_is_counted_from_what_clients_will_train_on(recipe: Recipe, short_stores: Path, tmp_path: Path) -> None:
    found = estimated(recipe, short_stores, tmp_path)
    (cost,) = found.costs
    local = recipe.federated.local
    assert local.local_steps is not None
    clients = 12 * recipe.federated.cohort_size
    assert cost.audio_seconds == clients * local.local_steps * local.batch_seconds
    assert cost.seconds is not None
    assert cost.seconds > 0


@pytest.mark.parametrize(
    ("amount", "seconds"), [("steps: 3", lambda own: 3 * 2.0), ("epochs: 2", lambda own: 2 * 3600 * own.hours)]
)
def test_the_servers_own_training_is_counted(
    amount: str, seconds: Callable[[Speech], float], federated_recipe: Path, public_stores: Path, tmp_path: Path
) -> None:
    own = f"federation.server_pass={{data: 'public:train', lr: 0.1, {amount}}}"
    found = {
        name: estimated(load_recipe(str(federated_recipe), changes), public_stores, tmp_path).audio_seconds
        for name, changes in (("without", []), ("with", [own]))
    }
    context = RunContext(tmp_path / "runs", public_stores, torch.device("cpu"))
    speech = assemble(load_recipe(str(federated_recipe), [own]), context=context).public_speech
    assert speech is not None
    assert found["without"] is not None
    assert found["with"] == pytest.approx(found["without"] + 12 * seconds(speech))


def test_epsilon_is_that_of_the_whole_plan(recipe: Recipe, short_stores: Path, tmp_path: Path) -> None:
    plain = replace(recipe.federated.privacy, adaptive=None, epsilon_budget=None)
    federation = recipe.federated.model_copy(update={"privacy": plain})
    (cost,) = estimated(recipe.model_copy(update={"federation": federation}), short_stores, tmp_path).costs
    rate = federation.cohort_size / 9
    event = repeated(poisson_release(plain.noise_multiplier or 0.0, sampling_rate=rate), 12)
    assert cost.epsilon == epsilon(event, plain.delta)


def test_the_speech_of_a_release_is_not_counted(recipe: Recipe, short_stores: Path, tmp_path: Path) -> None:
    content = recipe.model_dump(mode="json")
    content["federation"]["privacy"]["mode"] = "secure"
    content["federation"]["engine"] = "auto"
    found = estimated(validate_recipe(content, where="here"), short_stores, tmp_path)
    (cost,) = found.costs
    assert (cost.audio_seconds, cost.seconds) == (None, None)
    assert "depend on its clients' speech" in found.lines()[-1]


def test_days_on_a_cpu_are_too_long_and_on_a_gpu_are_not() -> None:
    days = Estimate(
        "CPU", (RunCost(name="seed", audio_seconds=1.0, seconds=LONG_SECONDS), RunCost(name="run", seconds=1.0)), 1
    )
    assert seconds_too_long(days) == LONG_SECONDS + 1
    assert seconds_too_long(replace(days, device="NVIDIA H200")) is None
    assert seconds_too_long(replace(days, costs=days.costs[1:])) is None


def test_lines_say_once_what_is_true_of_several_runs() -> None:
    runs = [RunCost(name=name, audio_seconds=7200.0, seconds=600.0, disk=10**9) for name in ("a", "b", "c")]
    found = Estimate("H200", (RunCost(name="seed model s", audio_seconds=3600.0, seconds=60.0), *runs), 10**12)
    assert found.lines() == [
        "4 runs one after another take about 31 min on this H200: 7 h of audio to train on, 3 GB of disk",
        "seed model s: about 60 s on this H200, 1 h of audio",
        "a and 2 more, each: about 10 min on this H200, 2 h of audio",
    ]
    assert json.loads(json.dumps(found.as_json()))["runs"][1]["hours"] == pytest.approx(1 / 6, abs=1e-4)
