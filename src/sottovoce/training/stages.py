"""From a recipe to a result: prepare, train the seed, train, test. What is there and current is not made again."""

from dataclasses import replace
from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.base.processes import Processes, local_device, process_group, was_restarted
from sottovoce.base.signatures import load_signing_key
from sottovoce.config import Recipe
from sottovoce.training.agreement import agreeing, code_version
from sottovoce.training.central_run import run_central
from sottovoce.training.context import Surroundings
from sottovoce.training.elsewhere import Elsewhere
from sottovoce.training.federated_run import run_federated
from sottovoce.training.outcome import Outcome, Target
from sottovoce.training.run_folder import RESULTS
from sottovoce.training.seeding import Seed, as_trusted, seed_of
from sottovoce.training.stores import ensure_store


def run_recipe(
    recipe: Recipe, *, out: Path, resume: bool, around: Surroundings, elsewhere: Elsewhere | None = None
) -> Outcome:
    """Run `recipe` in the folder `out`, its seed before it; with its store's clients, or those `elsewhere`."""
    device = local_device(around.device)
    resume = resume or was_restarted() or (out / RESULTS).exists()  # a finished run only has to be shown
    with process_group(device) as processes:
        around = replace(around, device=device) if processes.is_first else around.silent(device)
        with agreeing(processes) as facts:
            facts |= {"code": code_version(), "recipe": recipe.model_dump(mode="json")}
        with agreeing(processes):
            if processes.is_first:
                ensure_store(recipe, around.stores, around.on_prepare)
        if elsewhere is not None and processes.is_distributed:
            raise InputError("clients on other machines are asked by one process: expected no torchrun")
        key = None if around.sign is None or recipe.federation is None else load_signing_key(around.sign)
        parent, stopped = _parent_model(recipe, around, processes)
        if stopped is not None:
            return stopped
        target = Target(out, resume, around.stand_in)
        if recipe.federation is None:
            return run_central(recipe, target, parent=parent, context=around, processes=processes)
        return run_federated(recipe, target, context=around, processes=processes, elsewhere=elsewhere, key=key)


def _parent_model(recipe: Recipe, around: Surroundings, processes: Processes) -> tuple[Seed | None, Outcome | None]:
    """What training starts from, trained now if it is not there; an outcome where that was interrupted."""
    with agreeing(processes):
        parent = seed_of(recipe, runs=around.runs)
    if parent is None or processes.broadcast_object(parent.is_there):
        return parent, None
    assert parent.recipe is not None
    name = recipe.federated.seed_model if recipe.central is None else recipe.central.start_from
    around.on_stage(f"seed model {name}")
    try:
        with as_trusted(parent):
            outcome = run_recipe(parent.recipe, out=parent.folder, resume=True, around=around)
    except InputError as error:
        raise InputError(
            f"seed model {name}: it is not there, or not finished, and is trained first: {error}"
        ) from None
    return parent, outcome if processes.any(outcome.stopped_at is not None) else None
