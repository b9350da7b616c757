"""`sottovoce run` in the process of a test, which may be one of several."""

from pathlib import Path

import torch

from sottovoce.config import load_recipe
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext


def run_here(recipe: Path, changes: list[str], stores: Path, out: Path, resume: bool = False) -> Outcome:
    """With `key=value` changes, in the folder `out`; seeds lie beside it."""
    around = RunContext(runs=out.parent / "runs", stores=stores, device=torch.device("cpu"))
    return run_recipe(load_recipe(str(recipe), changes), out=out, resume=resume, context=around)
