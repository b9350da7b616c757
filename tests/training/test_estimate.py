"""What runs take: counts are exact; times are whatever they are, and put together exactly."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.config import Recipe, load_recipe, validate
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import poisson_release, repeated
from sottovoce.training import estimate as estimates
from sottovoce.training import speed
from sottovoce.training.beforehand import make_ready, stages_of
from sottovoce.training.context import Surroundings
from sottovoce.training.estimate import (
    LONG_SECONDS,
    Cost,
    Estimate,
    estimate,
    evaluations,
    run_seconds,
    too_long,
    total,
)
from sottovoce.training.keeper import Pace
from sottovoce.training.speed import Speed, audio_per_client, operations

SPEED = Speed(audio_per_step=100, training=0.02, evaluation=0.01, memory=2**30)
STEPS = st.integers(1, 60)


@given(steps=STEPS, evaluate_every=STEPS, is_federated=st.booleans())
def test_counts_are_what_the_keeper_does(steps: int, evaluate_every: int, is_federated: bool) -> None:
    pace = Pace(steps=steps, evaluate_every=evaluate_every, checkpoint_every=1, evaluate_start=is_federated)
    due = [pace.due(step, stops=False) for step in range(1, steps + 1)]
    found = evaluations(steps=steps, every=evaluate_every, at_start=is_federated)
    assert found == is_federated + sum(d.evaluate for d in due)


def test_a_sum_with_something_unknown_in_it_is_unknown() -> None:
    assert total([1.0, 2.0]) == 3.0
    assert total([1.0, None]) is None


def test_the_flagships_local_steps_are_counted() -> None:
    # 255.8M parameters, 1,024 clients × 2,006 rounds × 10 steps of at most 120 s, 33.3 frames a second: 6·P·frames.
    audio = 1024 * 2006 * 10 * 120
    assert operations(255_800_000, audio) == pytest.approx(6 * 255_800_000 * audio * 100 / 3)


@pytest.fixture
def recipe(federated_recipe: Path) -> Recipe:
    return load_recipe(str(federated_recipe))


def test_a_federated_run_is_rounds_evaluations_and_tests(recipe: Recipe) -> None:
    looked = evaluations(steps=12, every=recipe.federated.evaluate_every, at_start=True)
    # 12 rounds, dev speech each time, test speech for the last model and the first.
    expected = 12 * 100 * 0.02 + 0.01 * (looked * 70 + 2 * 90)
    assert run_seconds(recipe, SPEED, scored=(70, 90)) == pytest.approx(expected)


def test_a_central_run_tests_one_model_and_begins_with_no_evaluation(recipe_file: Path) -> None:
    # 12 steps, evaluated after 5, 10 and 12.
    expected = 12 * 100 * 0.02 + 0.01 * (3 * 70 + 90)
    assert run_seconds(load_recipe(str(recipe_file)), SPEED, scored=(70, 90)) == pytest.approx(expected)


def test_the_time_of_a_step_is_the_median_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose reading and compiling would be counted again for every step."""
    clock, took = [0.0], [100.0, 2.0, 50.0, 1.0, 2.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(speed, "ENOUGH_SECONDS", 1000.0)

    def step(number: int) -> float:
        clock[0] += took[number]
        return 10.0

    assert speed._timed(step, steps=5) == (0.2, 10.0)
    assert speed._timed(step, steps=1) == (10.0, 10.0)


def measured(recipe: Recipe, stores: Path, folder: Path, *others: Recipe, above: float | None = 0.0) -> Estimate:
    around = Surroundings(folder / "runs", stores, torch.device("cpu"))
    runs = {f"run {n}": (one, folder / f"run {n}") for n, one in enumerate((recipe, *others))}
    stages = stages_of(runs, folder=around.runs)
    found = estimate(stages, make_ready(stages, around), around, above=above)
    assert not any(folder.glob("run*")), "measuring leaves nothing behind"
    return found


def test_audio_is_counted_from_what_clients_will_train_on(recipe: Recipe, short_stores: Path, tmp_path: Path) -> None:
    found = measured(recipe, short_stores, tmp_path)
    (cost,) = found.costs
    around = Surroundings(tmp_path, short_stores, torch.device("cpu"))
    stages = stages_of({"run": (recipe, tmp_path / "run")}, folder=tmp_path)
    (ready,) = make_ready(stages, around).values()
    assert ready is not None
    assert ready.federation is not None
    one = audio_per_client(ready.federation)
    assert cost.audio_seconds == pytest.approx(12 * recipe.federated.cohort_size * one)
    assert cost.seconds is not None
    assert cost.seconds > 0
    assert cost.memory is not None


def test_epsilon_is_that_of_the_whole_plan(recipe: Recipe, short_stores: Path, tmp_path: Path) -> None:
    plain = replace(recipe.federated.privacy, adaptive=None, epsilon_budget=None)
    federation = recipe.federated.model_copy(update={"privacy": plain})
    (cost,) = measured(recipe.model_copy(update={"federation": federation}), short_stores, tmp_path).costs
    rate = federation.cohort_size / 9
    event = repeated(poisson_release(plain.noise_multiplier or 0.0, sampling_rate=rate), 12)
    assert cost.epsilon == epsilon(event, plain.delta)


def test_runs_that_differ_in_seed_rate_and_noise_are_measured_once(
    recipe: Recipe, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Recipe] = []
    monkeypatch.setattr(estimates, "measure_federated", lambda federation: calls.append(federation.recipe) or SPEED)
    privacy = replace(recipe.federated.privacy, noise_multiplier=9.0)
    louder = recipe.model_copy(update={"federation": recipe.federated.model_copy(update={"privacy": privacy})})
    more = recipe.model_copy(update={"federation": recipe.federated.model_copy(update={"cohort_size": 3})})
    again = recipe.model_copy(update={"seed": 6})
    found = measured(recipe, short_stores, tmp_path, again, louder, more)
    assert len(found.costs) == 4
    assert len(calls) == 2
    assert found.audio_seconds == 4 * 12 * 100


def test_what_is_short_is_counted_and_not_measured(
    recipe: Recipe, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "measure_federated", lambda *_: pytest.fail("measured"))
    found = measured(recipe, short_stores, tmp_path, above=None)
    assert found.seconds is None
    assert "--estimate does" in found.lines()[0]


def test_nobodys_time_is_taken_in_a_release(
    recipe: Recipe, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "measure_federated", lambda *_: pytest.fail("measured"))
    content = recipe.model_dump(mode="json")
    content["federation"]["privacy"]["mode"] = "secure"
    content["federation"]["engine"] = "auto"
    found = measured(validate(content, where="here"), short_stores, tmp_path)
    (cost,) = found.costs
    assert (cost.audio_seconds, cost.seconds, cost.memory) == (None, None, None)
    assert "depends on their speech" in found.lines()[-1]


def test_days_on_a_cpu_are_too_long_and_on_a_gpu_are_not() -> None:
    days = Estimate(
        "CPU", (Cost(name="seed", audio_seconds=1.0, seconds=LONG_SECONDS), Cost(name="run", seconds=1.0)), 1
    )
    assert too_long(days) == LONG_SECONDS + 1
    assert too_long(replace(days, device="NVIDIA H200")) is None
    assert too_long(replace(days, costs=days.costs[1:])) is None


def test_lines_say_once_what_is_true_of_several_runs() -> None:
    runs = [Cost(name=name, audio_seconds=7200.0, seconds=600.0, disk=10**9) for name in ("a", "b", "c")]
    found = Estimate("H200", (Cost(name="seed model s", audio_seconds=3600.0, seconds=60.0), *runs), 10**12)
    assert found.lines() == [
        "4 runs one after another take about 31 min on this H200: 7 h of audio to train on, 3 GB of disk",
        "seed model s: about 60 s on this H200, 1 h of audio",
        "a and 2 more, each: about 10 min on this H200, 2 h of audio",
    ]
    assert json.loads(json.dumps(found.as_json()))["runs"][1]["hours"] == pytest.approx(1 / 6, abs=1e-4)
