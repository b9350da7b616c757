"""Recipes that name parts from outside: a run writes down whose they are, and says what its promise rests on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sottovoce import Simulation, load_recipe
from sottovoce.privacy.ledger import verify
from sottovoce.report.summary import write_report
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_folder import LEDGER

FAST = ["federation.steps=2", "federation.evaluate_every=2", "federation.privacy.adaptive=null"]
OUTSIDE = {
    "clip_rule": {"name": "tests.privacy.test_plugins:Grown", "factor": 1e6},
    "weights": {"name": "tests.privacy.test_plugins:Constant", "weight": 0.5},
}
WORDS = (
    "clipping by tests.privacy.test_plugins:Grown(factor=1000000.0) and weights by tests.privacy.test_plugins:"
    "Constant(weight=0.5), which are not part of this package: this holds if they look at the data of one speaker alone"
)


def changes(**parts: Any) -> list[str]:
    return [*FAST, *(f"federation.privacy.{name}={json.dumps(part)}" for name, part in parts.items())]


@pytest.mark.usefixtures("undrawn")
def test_a_run_says_what_its_promise_rests_on(federated_recipe: Path, short_stores: Path, tmp_path: Path) -> None:
    said: list[str] = []
    around = RunContext(tmp_path / "runs", short_stores, torch.device("cpu"), say=said.append)
    recipe = load_recipe(str(federated_recipe), changes(**OUTSIDE))
    outcome = run_recipe(recipe, out=tmp_path / "run", resume=False, context=around)
    assert any(line.endswith(WORDS) for line in said)
    assert load_recipe(str(outcome.folder / "config.yaml")) == recipe
    assert outcome.results is not None
    assert outcome.results["privacy"]["guarantee"].endswith(WORDS)
    assert verify(outcome.folder / LEDGER).header["plan"]["weights"] == OUTSIDE["weights"]
    report = write_report({"run": outcome.folder}, tmp_path, title="outside")
    assert any(WORDS in note for note in report.notes)


def test_a_rule_that_enlarges_is_clipped_and_a_weight_counts(federated_recipe: Path, short_stores: Path) -> None:
    """All nine at the bound, each by half."""
    quiet = ["federation.privacy.noise_multiplier=0", "federation.cohort_size=9"]
    simulation = Simulation(load_recipe(str(federated_recipe), [*changes(**OUTSIDE), *quiet]), stores=short_stores)
    done = next(simulation.rounds())
    assert done.diagnostics["cohort"] == 9
    norm = done.diagnostics["pseudo_gradient_norm"]
    assert isinstance(norm, float)
    assert 0 < norm <= 0.5 * simulation.plan.clip_bound


def test_with_a_sampler_from_outside_nothing_is_promised(federated_recipe: Path, short_stores: Path) -> None:
    sampler = {"name": "tests.privacy.test_plugins:InTurn", "first": 3}
    simulation = Simulation(load_recipe(str(federated_recipe), changes(sampler=sampler)), stores=short_stores)
    assert "no guarantee: cohorts are drawn by tests.privacy.test_plugins:InTurn(first=3)" in simulation.plan.guarantee
    first, second = simulation.rounds()
    assert (first.epsilon, second.epsilon) == (None, None)
    assert (first.diagnostics["cohort"], second.diagnostics["cohort"]) == (2, 2)
