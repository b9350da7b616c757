"""`sottovoce run`: from a recipe to a result."""

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import (
    exit_interrupted,
    print_json,
    print_line,
    progress_bar,
    stderr,
    stdout,
)
from sottovoce.cli.finished import print_finished
from sottovoce.cli.options import (
    Device,
    Json,
    OutsideFamily,
    Overrides,
    Recipe,
    Runs,
    SignKey,
    Stores,
    Track,
    TrackDiagnostics,
)
from sottovoce.cli.stage_times import StageTimes

if TYPE_CHECKING:
    from sottovoce.config import Recipe as LoadedRecipe
    from sottovoce.training.estimate import Estimate
    from sottovoce.training.loop import ProgressReport
    from sottovoce.training.run_context import Outcome, RunContext


def run(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; RUNS/RECIPE by default.")] = None,
    runs: Runs = Path("runs"),
    stores: Stores = Path("stores"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the run's folder.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="One step on a small synthetic stand-in: does the recipe fit together?")
    ] = False,
    family: OutsideFamily = None,
    device: Device = None,
    only: Annotated[
        str | None, typer.Option(metavar="LABEL,…", help="Of a suite only these runs; * and ? stand for others.")
    ] = None,
    at_once: Annotated[
        int, typer.Option(metavar="N", help="Of a suite N runs at once, each in its own process; 8 suit a large GPU.")
    ] = 1,
    labels: Annotated[bool, typer.Option("--list", help="Of a suite print the runs' labels, and do no more.")] = False,
    parents_only: Annotated[
        bool, typer.Option("--parents-only", help="Make the stores and parent models that are needed, and do no more.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what it takes (time here, audio, disk, ε), and do no more.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Begin at once: neither estimate nor ask before runs that take a CPU days."),
    ] = False,
    sign: SignKey = None,
    track: Track = None,
    track_diagnostics: TrackDiagnostics = False,
    json: Json = False,
) -> None:
    """Run a recipe: prepare what is missing, train its parent model, train, test on unseen speakers, report.

    Example: sottovoce run demo

    All that it needs is checked first, and its cost is estimated. Stages whose result is there and current are not run
    again. A finished run prints its results.

    Exit code 0: it is finished, or has reached a limit that was set (a budget, patience: `ended` in --json says which);
    130: it was interrupted and is saved; 2: something has to be corrected first.
    """
    from sottovoce.base.signatures import load_signing_key
    from sottovoce.config import Suite, load_experiment
    from sottovoce.models.family import find_family
    from sottovoce.training.parent_model import default_run_folder
    from sottovoce.training.run import run_recipe, run_smoke
    from sottovoce.training.suites import plan_suite, run_suite, select_runs
    from sottovoce.training.tracking import choose_trackers

    if family is not None:
        find_family(family)
    experiment = load_experiment(recipe, overrides or [])
    tracking = choose_trackers(track, diagnostics=track_diagnostics, root=runs)
    if isinstance(experiment, Suite):
        experiment = select_runs(experiment, only)
    elif only is not None or at_once != 1 or labels:
        raise InputError(f"{recipe} is one run: --only, --at-once and --list are for suites")
    if labels and isinstance(experiment, Suite):
        _print_labels([*experiment.runs], json)
        return
    if smoke:
        with open_context(recipe, runs=runs, stores=stores, device=device) as around:
            run_smoke(recipe, experiment, out=out, context=replace(around, tracking=tracking))
        shown = "" if out is None else f"; sottovoce report {out} shows what it writes down"
        print_line(f"{recipe}: one step of it runs{shown}", to=stdout)
        return
    if sign is not None:
        load_signing_key(sign)  # refused now, not after hours
    folder = out or default_run_folder(recipe, runs)
    label, times = label_run(recipe, out), StageTimes()
    with open_context(recipe, runs=runs, stores=stores, device=device, times=times) as around:
        if isinstance(experiment, Suite):
            wanted = plan_suite(recipe, experiment, out=folder, runs=runs)
        else:
            wanted = {label: (experiment, folder)}
        costs = check_and_estimate(wanted, replace(around, tracking=tracking))
    if estimate:
        _print_costs(costs, json)
        return
    if costs is not None:
        for line in costs.lines():
            print_line(line)
        _confirm(costs, yes=yes)
    with open_context(recipe, runs=runs, stores=stores, device=device, times=times) as around:
        around = replace(around, sign=sign, tracking=tracking)
        if parents_only:
            _make_parents(wanted, around, at_once=at_once)
            return
        if isinstance(experiment, Suite):
            outcomes = run_suite(wanted, context=around, at_once=at_once)
        else:
            times.begin("training")
            outcomes = {label: run_recipe(experiment, out=folder, resume=resume, context=around)}
    planned = len(experiment.runs) if isinstance(experiment, Suite) else 1
    stopped = _format_stopped(outcomes, folder, planned=planned)
    finished = {label: outcome for label, outcome in outcomes.items() if outcome.results is not None}
    if stopped is None and not finished:  # another process than the first
        return
    if stopped is None:
        folder.mkdir(parents=True, exist_ok=True)  # all runs may lie where others look for them
        times.begin("report")
        names = {label: f"{recipe}/{label}" if isinstance(experiment, Suite) else recipe for label in finished}
        commands = {label: shlex.join(["sottovoce", "run", name, *(overrides or [])]) for label, name in names.items()}
        print_finished(finished, folder, title=experiment.about, commands=commands, quietly=json)
        if not json and costs is not None:  # something was left to do
            print_line(times.format())
    if json:
        found = {label: known for label, outcome in outcomes.items() if (known := outcome.as_json()) is not None}
        print_json(found if isinstance(experiment, Suite) else found[label])
    if stopped is not None:
        exit_interrupted(stopped)


def _print_labels(labels: list[str], json: bool) -> None:
    if json:
        print_json(labels)
        return
    for label in labels:
        print_line(label, to=stdout)


def _make_parents(wanted: "Mapping[str, tuple[LoadedRecipe, Path]]", around: "RunContext", *, at_once: int) -> None:
    from sottovoce.training.suites import make_parents

    made = make_parents(wanted, context=around, at_once=at_once)
    if made is None:
        exit_interrupted("stopped and saved: the same command goes on")
    print_line(f"what the runs need is there; trained for it: {', '.join(made) or 'nothing'}", to=stdout)


def label_run(recipe: str, out: Path | None) -> str:
    """What a run is called in its table and report: the name of its folder if one was given, else of its recipe."""
    from sottovoce.config import public_name

    return public_name(recipe) if out is None else out.absolute().name


def _format_stopped(outcomes: "Mapping[str, Outcome]", folder: Path, *, planned: int) -> str | None:
    """Where it was interrupted and how to resume; None where it was not."""
    for outcome in outcomes.values():
        if outcome.stopped_at is not None:
            again = "the same command" + (" with --resume" if outcome.folder == folder else "")
            return f"stopped after step {outcome.stopped_at:,} and saved: {again} goes on"
    if len(outcomes) < planned:
        return f"stopped after {len(outcomes):,} of {planned:,} runs: the same command goes on"
    return None


def check_and_estimate(wanted: "Mapping[str, tuple[LoadedRecipe, Path]]", around: "RunContext") -> "Estimate | None":
    """Check all that the runs need, and estimate their cost; None where nothing is left to do, or for several ranks."""
    from sottovoce.base.processes import local_device, process_group
    from sottovoce.training.agreement import require_equal_across_ranks
    from sottovoce.training.estimate import estimate_runs
    from sottovoce.training.preflight import check_stages, list_stages

    with process_group(local_device(around.device)) as processes, require_equal_across_ranks(processes):
        if not processes.is_first:
            return None
        stages = list_stages(wanted, folder=around.runs)
        known = check_stages(stages, around)
        if processes.is_distributed or not stages:  # one process cannot time what several take
            return None
        around.on_stage("what it takes")
        return estimate_runs(stages, known, replace(around, say=lambda _: None))


def _print_costs(costs: "Estimate | None", json: bool) -> None:
    if json:
        print_json(None if costs is None else costs.as_json())
        return
    for line in ["nothing is left to do"] if costs is None else costs.lines():
        print_line(line, to=stdout)


def _confirm(costs: "Estimate", *, yes: bool) -> None:
    """Ask before a CPU is kept busy for days; without a terminal to ask, refuse."""
    from sottovoce.training.estimate import format_time, seconds_too_long

    if yes or (seconds := seconds_too_long(costs)) is None:
        return
    message = f"this takes a CPU about {format_time(seconds)}"
    if not (sys.stdin.isatty() and stderr.is_terminal):
        raise InputError(f"{message}: expected a GPU, or --yes")
    typer.confirm(f"{message}. Begin?", abort=True, err=True)


@contextmanager
def open_context(
    recipe: str, *, runs: Path, stores: Path, device: str | None, times: StageTimes | None = None
) -> Iterator["RunContext"]:
    """The context of a run, with a progress bar that shows what it reports; `times` measures its stages."""
    from sottovoce.data.store import PackingProgress
    from sottovoce.evaluation.recognise import choose_device
    from sottovoce.training.run_context import RunContext

    with progress_bar(recipe) as bar:
        (task,) = bar.task_ids
        begin = (times or StageTimes()).begin

        def say(line: str) -> None:
            bar.console.print(line, highlight=False, soft_wrap=True)

        def show_stage(stage: str) -> None:
            begin(stage)
            bar.update(task, completed=0, total=None, note=stage)
            say(f"— {stage}")

        def show_prepare(progress: PackingProgress) -> None:
            begin("speech")
            bar.update(task, completed=progress.tasks_done, total=progress.tasks, note="speakers prepared")

        def show(report: "ProgressReport") -> None:
            note = _format_report(report)
            bar.update(task, completed=report.step, total=report.steps, note=note)
            if report.score is not None:
                say(f"{report.unit} {report.step:,}: {note}")

        yield RunContext(
            runs=runs,
            stores=stores,
            device=choose_device(device),
            on_prepare=show_prepare,
            on_report=show,
            on_stage=show_stage,
            say=say,
        )


def _format_report(report: "ProgressReport") -> str:
    """What is known of a step or a round, in one line."""
    known = [
        (report.loss, "loss {:.3f}"),
        (report.score, "dev {}"),
        (report.epsilon, "ε spent {:,.4g} (RDP)"),
        (report.audio_seconds_per_second, "{:,.0f} s/s"),
        (report.speech_used, "{:.0%} of the speech used"),
    ]
    return ", ".join(words.format(value) for value, words in known if value is not None)
