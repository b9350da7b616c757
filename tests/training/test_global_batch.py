"""A recipe names the batch of a step; how many processes there are decides nothing but the rounding."""

import json
from pathlib import Path

import pytest
import torch
from tests.ranks import in_processes
from torch import Tensor

from sottovoce.config import load_recipe
from sottovoce.models.recogniser import load_recogniser
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext

RECIPE = """
about: one batch for all
data: {store: tones}
model: {size: tiny, layers: 2, width: 32, dropout: 0.2, layer_drop: 0.3}
central:
  steps: 4
  batches: 4
  batch_seconds: 3
  optimiser: {name: sgd}
  schedule: {name: constant, lr: 0.05}
  evaluate_every: 4
  checkpoint_every: 4
"""
WITHOUT_CHANCE = [
    "model.dropout=0",
    "model.layer_drop=0",
    "central.augment.spec_augment=null",
    "model.positions=sinusoidal",
]


def train(recipe: Path, changes: list[str], stores: Path, out: Path) -> None:
    around = RunContext(runs=out.parent, stores=stores, device=torch.device("cpu"))
    run_recipe(load_recipe(str(recipe), changes), out=out, resume=False, context=around)


def trained(world: int, changes: list[str], *, stores: Path, folder: Path) -> Tensor:
    """All parameters after the last step of so many processes."""
    recipe, out = folder / "recipe.yaml", folder / f"by-{world}-{len(changes)}"
    recipe.write_text(RECIPE)
    if world == 1:
        train(recipe, changes, stores, out)
    else:
        in_processes(world, train, recipe, changes, stores, out)
    parameters = load_recogniser(out / "checkpoints/latest").parameters
    return torch.cat([tensor.flatten() for _, tensor in sorted(parameters.items())])


def apart(found: Tensor, expected: Tensor, other: Tensor) -> float:
    """How far two models are from one another, where that between `expected` and `other` is one."""
    return float((found - expected).norm() / (other - expected).norm())


# Another order of adding rounds float32's sums by 1e-7 of them; a batch left out, counted twice or drawn otherwise is a
# quarter of a step, as is what `other` differs in.
ROUNDING = 1e-3


@pytest.mark.parametrize("changes", [[], WITHOUT_CHANCE], ids=["with chance", "without"])
def test_any_number_of_processes_makes_the_same_seed_model(
    changes: list[str], short_stores: Path, tmp_path: Path
) -> None:
    around = {"stores": short_stores, "folder": tmp_path}
    alone = trained(1, changes, **around)
    other = trained(1, [*changes, "central.batches=3"], **around)
    # Six have parts of a batch, whose chance is their own.
    for world in [2, 4] if not changes else [3, 6]:
        assert apart(trained(world, changes, **around), alone, other) < ROUNDING, world


def test_all_processes_end_where_the_first_has_seen_enough(short_stores: Path, tmp_path: Path) -> None:
    """It alone evaluates; one that went on alone would wait for the others' gradients forever."""
    ends = ["central.steps=9", "central.evaluate_every=1", "central.patience={share: 0.2}", "central.schedule.lr=1e-9"]
    for world in (1, 2):
        trained(world, ends, stores=short_stores, folder=tmp_path)
        results = json.loads((tmp_path / f"by-{world}-{len(ends)}/results.json").read_text())
        assert (results["ended"]["reason"], results["ended"]["step"]) == ("patience", 5), world
