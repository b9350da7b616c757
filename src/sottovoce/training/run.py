"""The stages of a recipe: prepare the store, train the seed model, train, test. What is there and current is kept."""

import tempfile
from dataclasses import replace
from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.base.processes import Processes, local_device, process_group, was_restarted
from sottovoce.base.signatures import load_signing_key
from sottovoce.config import Experiment, Recipe, Suite, load_recipe
from sottovoce.config.smoke import shrink_recipe
from sottovoce.training.agreement import describe_code, require_equal_across_ranks
from sottovoce.training.central import run_central
from sottovoce.training.federated_run import run_federated
from sottovoce.training.loop import ProgressReport
from sottovoce.training.parent_model import (
    ParentModel,
    allow_own_imports,
    default_run_folder,
    find_parent_model,
    find_token_parent,
    list_parents,
)
from sottovoce.training.remote_clients import RemoteClients
from sottovoce.training.run_context import Outcome, RunContext, RunTarget, fixed_threads
from sottovoce.training.run_data import ensure_store
from sottovoce.training.run_folder import RESULTS


def run_recipe(
    recipe: Recipe, *, out: Path, resume: bool, context: RunContext, remote: RemoteClients | None = None
) -> Outcome:
    """Run `recipe` in the folder `out`, its seed model first; with the clients of its store, or `remote` ones."""
    device = local_device(context.device)
    resume = resume or was_restarted() or (out / RESULTS).exists()  # a finished run only has to be shown
    with process_group(device) as processes:
        context = replace(context, device=device) if processes.is_first else context.silent(device)
        with require_equal_across_ranks(processes) as facts:
            facts |= {"code": describe_code(), "recipe": recipe.model_dump(mode="json")}
        with require_equal_across_ranks(processes):
            if processes.is_first:
                ensure_store(recipe, context.stores, context.on_prepare)
        if remote is not None and processes.is_distributed:
            raise InputError("clients on other machines are asked by one process: expected no torchrun")
        key = None if context.sign is None or recipe.federation is None else load_signing_key(context.sign)
        with require_equal_across_ranks(processes):
            parents = list_parents(recipe, runs=context.runs)
        for parent in parents:
            if (stopped := _train_parent(parent, context, processes)) is not None:
                return stopped
        target = RunTarget(out, resume, context.stand_in, context.tracking, context.say)
        with fixed_threads(recipe.threads):
            if recipe.federation is None:
                return run_central(recipe, target, context=context, processes=processes)
            return run_federated(recipe, target, context=context, processes=processes, remote=remote, key=key)


def _train_parent(parent: ParentModel, context: RunContext, processes: Processes) -> Outcome | None:
    """Train what a run needs if it is not there; an outcome where that was interrupted."""
    if processes.broadcast_object(parent.is_trained):
        return None
    assert parent.recipe is not None
    context.on_stage(parent.title)
    try:
        with allow_own_imports(parent):
            outcome = run_recipe(parent.recipe, out=parent.folder, resume=True, context=context)
    except InputError as error:
        raise InputError(f"{parent.title}: it is not there, or not finished, and is trained first: {error}") from None
    return outcome if processes.any(outcome.stopped_at is not None) else None


def run_smoke(name: str, experiment: Experiment, *, out: Path | None, context: RunContext) -> None:
    """One step of every run in `experiment` on a small synthetic stand-in, in `out` or a temporary folder.

    No ε is reported: it would be the stand-in's.
    """

    def report_without_epsilon(report: ProgressReport) -> None:
        context.on_report(replace(report, epsilon=None))

    quiet = replace(context, stand_in=True, on_report=report_without_epsilon)
    if out is not None:
        _run_smokes(name, experiment, replace(quiet, runs=out))
        return
    with tempfile.TemporaryDirectory(prefix="sottovoce-smoke-") as folder:
        _run_smokes(name, experiment, replace(quiet, runs=Path(folder)))


def _run_smokes(name: str, experiment: Experiment, context: RunContext) -> None:
    if isinstance(experiment, Suite):
        for label, part in experiment.runs.items():
            _run_smokes(f"{name}/{label}", load_recipe(part.recipe, part.overrides), context)
        return
    _run_smoke(experiment, default_run_folder(name, context.runs), context)


def _run_smoke(recipe: Recipe, folder: Path, context: RunContext) -> None:
    """In `folder`, what it needs first. That is made once, however many recipes need it."""
    model, tokens = find_parent_model(recipe, runs=context.runs), find_token_parent(recipe, runs=context.runs)
    made = [None if parent is None else _make_smoke_parent(parent, context) for parent in (model, tokens)]
    small = shrink_recipe(recipe, seed_model=made[0], tokens_from=made[1])
    if not ParentModel(folder, small).is_trained:
        run_recipe(small, out=folder, resume=True, context=context)


def _make_smoke_parent(parent: ParentModel, context: RunContext) -> str | None:
    """The folder of a parent's smoke; None for a model without a recipe."""
    if parent.recipe is None:
        return None
    _run_smoke(parent.recipe, parent.folder, context)
    return str(parent.folder)
