"""Rounds in the hand are the rounds of a run, and one client's update can be looked at without moving anything."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sottovoce
from sottovoce import InputError, Simulation, load_recipe
from sottovoce.models.recogniser import load_recogniser
from sottovoce.privacy.ledger import BudgetSpent
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext

Simulate = Callable[..., Simulation]
# A run's model is its best; evaluated at its end alone, after three rounds, it is the last.
THREE = ["federation.steps=3", "federation.evaluate_every=3", "federation.checkpoint_every=3"]


@pytest.fixture
def simulate(federated_recipe: Path, short_stores: Path, tmp_path: Path) -> Simulate:
    def make(*changes: str) -> Simulation:
        recipe = load_recipe(str(federated_recipe), [*THREE, *changes])
        return Simulation(recipe, stores=short_stores, runs=tmp_path / "runs")

    return make


@pytest.mark.usefixtures("one_thread")
def test_three_rounds_are_those_of_a_run_to_the_bit(
    simulate: Simulate, federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    """With an average of models and a moving clip bound."""
    around = RunContext(tmp_path / "runs", short_stores, torch.device("cpu"))
    recipe = load_recipe(str(federated_recipe), [*THREE, "federation.engine=sequential"])
    run_recipe(recipe, out=tmp_path / "run", resume=False, context=around)
    last = load_recogniser(tmp_path / "run" / "checkpoints" / "latest")
    simulation = simulate()
    done = list(simulation.rounds())
    assert [one.step for one in done] == [1, 2, 3]
    assert simulation.model.parameters.keys() == last.parameters.keys()
    assert all(torch.equal(simulation.model.parameters[name], p) for name, p in last.parameters.items())


def test_rounds_are_made_when_they_are_asked_for_and_no_more_than_the_recipe_has(simulate: Simulate) -> None:
    simulation = simulate()
    rounds = simulation.rounds(2)
    assert simulation.step == 0
    first = next(rounds)
    assert (first.step, simulation.step) == (1, 1)
    assert first.epsilon is not None
    assert first.diagnostics["cohort"] is not None
    assert len([*rounds, *simulation.rounds(5)]) == 2


def test_a_model_that_was_looked_at_stays_as_it_was(simulate: Simulate) -> None:
    simulation = simulate()
    before = simulation.model
    known = {name: p.clone() for name, p in before.parameters.items()}
    next(simulation.rounds())
    assert all(torch.equal(before.parameters[name], p) for name, p in known.items())
    assert any(not torch.equal(simulation.model.parameters[name], p) for name, p in known.items())


def test_the_updates_of_a_cohort_add_up_to_its_round(simulate: Simulate) -> None:
    """One client at a time, without noise and with plain averaging: the server moves by their mean."""
    plain = ["federation.server={optimiser: {name: sgd}, schedule: {name: constant, lr: 1.0}}"]
    simulation = simulate(*plain, "federation.privacy={clip_bound: 0.01}")
    plan = simulation.plan
    before_P = plan.layout.flatten(simulation.model.parameters)
    cohort = plan.sample(0)
    assert len(cohort)
    total_P = plan.new_total()
    for client in cohort.tolist():
        total_P += plan.clip(simulation.update(client))
    assert torch.equal(plan.layout.flatten(simulation.model.parameters), before_P)
    next(simulation.rounds())
    moved_P = before_P - plan.layout.flatten(simulation.model.parameters)
    # Parameters are near 1 and float32 has 24 bits: each of two differences is off by 2⁻²⁴ of them at most.
    largest = float(before_P.abs().max())
    torch.testing.assert_close(moved_P, total_P / plan.denominator, rtol=0, atol=2 * largest * 2.0**-24)


def test_a_round_that_was_interrupted_is_made_again(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stopped = simulate(), simulate()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stopped._engine, "train", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(stopped.rounds())
    assert stopped.step == 0
    once, again = next(whole.rounds()), next(stopped.rounds())
    assert once == again
    assert all(torch.equal(whole.model.parameters[name], p) for name, p in stopped.model.parameters.items())


def test_a_budget_ends_the_rounds(simulate: Simulate) -> None:
    epsilon = next(simulate().rounds()).epsilon
    simulation = simulate(f"federation.privacy.epsilon_budget={1.001 * epsilon}")
    with pytest.raises(BudgetSpent):
        list(simulation.rounds())
    assert simulation.step == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["federation.privacy.mode=secure"], "a release is made by `sottovoce run`"),
        (
            ["federation.clients.holdout=0.5", "federation.client_wer={words: 10, noise_multiplier: 8.0}"],
            "only `sottovoce run` measures it",
        ),
    ],
)
def test_what_is_no_simulation_of_rounds_is_refused(simulate: Simulate, changes: list[str], why: str) -> None:
    with pytest.raises(InputError, match=why):
        simulate(*changes)


def test_a_central_recipe_is_refused(recipe_file: Path) -> None:
    with pytest.raises(InputError, match="it trains centrally"):
        sottovoce.Simulation(load_recipe(str(recipe_file)))


def test_a_client_who_is_not_there_is_refused(simulate: Simulate) -> None:
    with pytest.raises(InputError, match="client=-1: expected 0 to 8"):
        simulate().update(-1)
