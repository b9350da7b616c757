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
from sottovoce.store import Store
from sottovoce.training import estimate as estimates
from sottovoce.training.beforehand import make_ready, stages_of
from sottovoce.training.estimate import LONG_SECONDS, Cost, Estimate, estimate, run_seconds, too_long
from sottovoce.training.keeper import Pace
from sottovoce.training.measuring import CENTRAL_ON_GPU, Block, Speed, audio_per_client
from sottovoce.training.speakers import population_of
from sottovoce.training.stages import Surroundings
from sottovoce.training.work import evaluations, operations, saves, total

SPEED = Speed(begin=5, first=3, step=2, audio_per_step=100, evaluation=0.01, save=0.5, memory=2**30)
STEPS = st.integers(1, 60)


@given(steps=STEPS, evaluate_every=STEPS, checkpoint_every=STEPS, at_start=st.booleans())
def test_counts_are_what_the_keeper_does(
    steps: int, evaluate_every: int, checkpoint_every: int, at_start: bool
) -> None:
    pace = Pace(steps=steps, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every, evaluate_start=at_start)
    due = [pace.due(step, stops=False) for step in range(1, steps + 1)]
    assert evaluations(steps=steps, every=evaluate_every, at_start=at_start) == at_start + sum(d.evaluate for d in due)
    found = saves(steps=steps, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every)
    assert found == sum(d.save for d in due)


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


def test_a_federated_run_is_rounds_evaluations_tests_and_checkpoints(recipe: Recipe) -> None:
    settings = recipe.federated
    looked = evaluations(steps=12, every=settings.evaluate_every, at_start=True)
    saved = saves(steps=12, evaluate_every=settings.evaluate_every, checkpoint_every=settings.checkpoint_every)
    # Begin and warm-up, 12 rounds, dev speech each time, test speech for the last model and the first, checkpoints.
    expected = 5 + 3 + 12 * 2 + 0.01 * (looked * 70 + 2 * 90) + saved * 0.5
    assert run_seconds(recipe, SPEED, scored=(70, 90)) == pytest.approx(expected)


def test_a_central_run_tests_one_model_and_begins_with_no_evaluation(recipe_file: Path) -> None:
    # 12 steps, evaluated after 5, 10 and 12, saved after 3, 5, 6, 9, 10 and 12.
    expected = 5 + 3 + 12 * 2 + 0.01 * (3 * 70 + 90) + 6 * 0.5
    assert run_seconds(load_recipe(str(recipe_file)), SPEED, scored=(70, 90)) == pytest.approx(expected)


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
    store = Store(short_stores / "tones")
    population = population_of(recipe, store, recipe.federated.clients.population(recipe.data))
    around = Surroundings(tmp_path, short_stores, torch.device("cpu"))
    stages = stages_of({"run": (recipe, tmp_path / "run")}, folder=tmp_path)
    (model,) = make_ready(stages, around).values()
    assert model is not None
    one = audio_per_client(recipe, population, model)
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
    monkeypatch.setattr(estimates, "measure_run", lambda recipe, *_: calls.append(recipe) or SPEED)
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
    monkeypatch.setattr(estimates, "measure_run", lambda *_: pytest.fail("measured"))
    found = measured(recipe, short_stores, tmp_path, above=None)
    assert found.seconds is None
    assert "--estimate does" in found.lines()[0]


def test_nobodys_time_is_taken_in_a_release(
    recipe: Recipe, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "measure_run", lambda *_: pytest.fail("measured"))
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


def test_compiling_is_counted_once_whenever_it_happens() -> None:
    """As on a GPU: shapes come one after another, and each is compiled when it comes."""
    fast, compiling = Block(4, 0.05, 400.0), Block(4, 30.0, 400.0)
    blocks = [compiling, compiling, fast, compiling, *[fast] * 6]
    first, step, audio = CENTRAL_ON_GPU.steady(blocks)
    assert (step, audio) == (pytest.approx(0.0125), 100.0)
    assert first == pytest.approx(3 * (30.0 - 0.05))
    # All of 4,000 steps: 50 s and what was compiled, and not 4,000 times a step that compiles.
    assert 4000 * step + first == pytest.approx(50 + 3 * 29.95)


def test_measuring_goes_on_while_steps_are_still_compiled_and_ends_with_patience() -> None:
    fast, compiling = Block(4, 0.05, 400.0), Block(4, 30.0, 400.0)
    timing = replace(CENTRAL_ON_GPU, least=4, enough=4)
    assert not timing.ends([compiling] * 3, elapsed=0.0), "too few"
    assert not timing.ends([compiling, fast, fast, compiling], elapsed=60.0)
    assert timing.ends([compiling, compiling, fast, fast], elapsed=60.0)
    assert timing.ends([compiling, fast, fast, compiling], elapsed=91.0)
