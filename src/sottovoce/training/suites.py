"""A suite: its recipes one after another, or several at once on one device, each in a process of its own.

A small model leaves a GPU idle while its process prepares the next launch; other runs' processes fill that time.
"""

import multiprocessing
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from sottovoce.base.children import ChildKilled, ChildPool, child_pool
from sottovoce.base.errors import InputError
from sottovoce.base.importing import import_named, named_imports
from sottovoce.base.interrupts import interruptible
from sottovoce.base.processes import local_device, process_group
from sottovoce.config import Recipe, Suite, is_collection, load_recipe
from sottovoce.training.parent_model import default_run_folder, list_ancestors, list_untrained_ancestors
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext
from sottovoce.training.run_data import ensure_store
from sottovoce.training.tracking import Tracking


def select_runs(suite: Suite, patterns: str | None) -> Suite:
    """The runs of `suite` whose labels fit one of the `patterns` (such as `dim*,global`); all of them for None."""
    if patterns is None:
        return suite
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatchcase(label, pattern) for label in suite.runs):
            raise InputError(f"only={pattern}: no run of the suite is called so; it has {', '.join(suite.runs)}")
    found = {label: run for label, run in suite.runs.items() if any(fnmatchcase(label, p) for p in wanted)}
    return suite.model_copy(update={"runs": found})


def load_suite_recipes(suite: Suite) -> dict[str, Recipe]:
    """Its recipes by label, each with what is different in it."""
    return {label: load_recipe(run.recipe, run.overrides) for label, run in suite.runs.items()}


Job = tuple[Recipe, Path]


def plan_suite(name: str, suite: Suite, *, out: Path, runs: Path) -> dict[str, Job]:
    """The recipes of `suite` by label, each with its folder: `out/label`, or where others look for it below `runs`.

    That is the folder of its own name, for the recipes of a file without a suite, and for a run that another run of
    the suite starts from or takes its tokens from. So none is trained twice.
    """
    recipes = load_suite_recipes(suite)
    if is_collection(name):
        places = {
            label: default_run_folder(f"{name}/{label}", runs, recipe=recipe) for label, recipe in recipes.items()
        }
    else:
        needed = [one for recipe in recipes.values() for one in list_ancestors(recipe, runs=runs) if one.is_own]
        places = {
            label: next((one.folder for one in needed if one.recipe == recipe), out / label)
            for label, recipe in recipes.items()
        }
    return {label: (recipe, places[label]) for label, recipe in recipes.items()}


def run_suite(jobs: Mapping[str, Job], *, context: RunContext, at_once: int = 1) -> dict[str, Outcome]:
    """Run every recipe in its folder (`plan_suite`); what is finished is not run again.

    `at_once` of them share the device, each in its own process, with its share of the cores. Returns how they ended, by
    label; when interrupted, a run that was stopped is among them, or those that were not begun are missing.
    """
    if at_once < 1:
        raise InputError(f"at_once={at_once}: expected at least 1")
    if at_once > 1:
        return _side_by_side(jobs, context=context, at_once=at_once)
    outcomes: dict[str, Outcome] = {}
    with process_group(local_device(context.device)) as processes:
        for label, (recipe, folder) in jobs.items():
            context.on_stage(label)
            outcomes[label] = run_recipe(recipe, out=folder, resume=True, context=context)
            if processes.any(outcomes[label].stopped_at is not None):
                break
    return outcomes


def make_parents(jobs: Mapping[str, Job], *, context: RunContext, at_once: int = 1) -> list[str] | None:
    """Make the stores that the runs need and train what they start from: its titles; None where that was interrupted.

    After it, runs may be started side by side by other means than ours: none makes what another makes, too.
    """
    with process_group(local_device(context.device)) as processes:
        if processes.is_first:
            for recipe, _ in jobs.values():
                ensure_store(recipe, context.stores, context.on_prepare)
        waves = processes.broadcast_object(_parent_waves([recipe for recipe, _ in jobs.values()], context.runs))
    for wave in waves:
        outcomes = run_suite(wave, context=context, at_once=at_once)
        if len(outcomes) < len(wave) or any(outcome.stopped_at is not None for outcome in outcomes.values()):
            return None
    return [title for wave in waves for title in wave]


# Several at once.


def _side_by_side(jobs: Mapping[str, Job], *, context: RunContext, at_once: int) -> dict[str, Outcome]:
    if "RANK" in os.environ:
        raise InputError(f"at_once={at_once}: under torchrun one run is spread over the processes; expected 1")
    waves = [*_parent_waves([recipe for recipe, _ in jobs.values()], context.runs), jobs]
    for wave in waves:
        for recipe, _ in wave.values():
            ensure_store(recipe, context.stores, context.on_prepare)
    at_once = min(at_once, len(jobs))  # more processes than runs would only wait
    threads = max(1, (os.cpu_count() or 1) // at_once)
    spawning = multiprocessing.get_context("spawn")
    try:
        with (
            interruptible() as asked,
            child_pool(at_once, spawning, begin=_begin, given=[threads, named_imports()]) as workers,
        ):
            for wave in waves:
                outcomes = _run_jobs(wave, workers, context, asked)
            return outcomes  # of the last, the runs themselves
    except ChildKilled:
        raise InputError(
            f"a run's process was killed (out of memory?): the same command goes on; at_once={at_once} may be too many"
        ) from None


def _begin(threads: int, plugins: Collection[str]) -> None:
    """In a child process: import what the user has named in the parent."""
    torch.set_num_threads(threads)
    for name in plugins:
        with suppress(InputError):  # raised again where it is needed
            import_named(name)


def _parent_waves(recipes: Sequence[Recipe], runs: Path) -> list[dict[str, Job]]:
    """What is needed and not trained yet, each once: those that need nothing, then those that need only these, …"""
    waves: list[dict[str, Job]] = []
    depths: dict[Path, int] = {}
    for recipe in recipes:
        for parent in list_untrained_ancestors(recipe, runs=runs):
            if parent.folder in depths:
                continue
            assert parent.recipe is not None
            before = list_untrained_ancestors(parent.recipe, runs=runs)
            depth = depths[parent.folder] = max((depths[one.folder] + 1 for one in before), default=0)
            waves += [{}] * (depth == len(waves))
            waves[depth] = waves[depth] | {parent.title: (parent.recipe, parent.folder)}
    return waves


def _run_jobs(
    jobs: Mapping[str, Job], workers: ChildPool, context: RunContext, asked: Callable[[], bool]
) -> dict[str, Outcome]:
    """Run all `jobs`; what fails is said at once and raised at the end. When `asked` to stop, no more begin."""
    if asked():
        return {}
    context.on_stage(f"{len(jobs):,} runs side by side" if len(jobs) > 1 else next(iter(jobs)))
    for label, (recipe, folder) in jobs.items():
        places = context.runs, context.stores, context.device
        workers.submit(label, _run, recipe, folder, places, context.sign, context.tracking)
    failures, outcomes = dict[str, Exception](), dict[str, Outcome]()
    while workers.busy:
        for answer in workers.answers(timeout=0.2):
            label = answer.name
            if answer.error is not None:
                failures[label] = answer.error
                context.say(f"{label}: failed: {answer.error}")
                continue
            outcomes[label], said = answer.value
            for line in (*said, f"{len(outcomes):,} of {len(jobs):,}"):
                context.say(f"{label}: {line}")
        if asked():  # the signal may have been sent to this process alone
            workers.ask_to_stop()
    for label, error in failures.items():
        raise InputError(f"{label}: {error}") if isinstance(error, InputError) else error
    return {label: outcomes[label] for label in jobs if label in outcomes}


def _run(
    recipe: Recipe, out: Path, places: tuple[Path, Path, torch.device], sign: Path | None, tracking: Tracking
) -> tuple[Outcome, list[str]]:
    """How it ended, and its messages: its guarantee and warnings must reach the user."""
    said: list[str] = []
    context = RunContext(*places, say=said.append, sign=sign, tracking=tracking)
    return run_recipe(recipe, out=out, resume=True, context=context), said
