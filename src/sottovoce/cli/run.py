"""`sottovoce run`: from a recipe to a result."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sottovoce.cli.console import Json, end_interrupted, fits, print_json, print_wide, progress_bar, say, stderr, stdout
from sottovoce.errors import InputError

if TYPE_CHECKING:
    from sottovoce.config import Recipe
    from sottovoce.reporting.summary import Summary
    from sottovoce.training.estimate import Estimate
    from sottovoce.training.loop import ProgressReport
    from sottovoce.training.run_context import Outcome, RunContext


def run(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's name (`sottovoce recipes`), a YAML file, or FILE.yaml/RUN.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as central.steps=100.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; RUNS/RECIPE by default.")] = None,
    runs: Annotated[Path, typer.Option(help="Where runs lie: seed models are looked for and made here.")] = Path(
        "runs"
    ),
    stores: Annotated[Path, typer.Option(help="Where stores lie and are made.")] = Path("stores"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the run's folder.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="One step on a small synthetic stand-in: does the recipe fit together?")
    ] = False,
    family: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FAMILY",
            help="Import this family of your own, of which the folder of a seed model is; recipes name theirs.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one by default.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="LABEL,…", help="Of a suite only these runs; * and ? stand for others.")
    ] = None,
    at_once: Annotated[
        int, typer.Option(metavar="N", help="Of a suite N runs at once, each in its own process; 8 suit a large GPU.")
    ] = 1,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what it takes (time here, audio, disk, memory, ε), and do no more.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Begin at once: measure nothing, and do not ask what takes a CPU days.")
    ] = False,
    sign: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="Sign ledgers with this private key (`sottovoce keys`), at every commit."),
    ] = None,
    json: Json = False,
) -> None:
    """Run a recipe: prepare what is missing, train its seed model, train, test on unseen speakers, report.

    Example: sottovoce run demo

    All that it needs is checked first, and what it takes is said. Stages whose result is there and current are not run
    again. A finished run prints its results.

    Exit code 0: it is finished, or at an end that was asked for (a budget, patience: `ended` in --json says which);
    130: it was interrupted and is saved; 2: something has to be mended first.
    """
    from sottovoce.config import Suite, load_experiment
    from sottovoce.models.family import find_family
    from sottovoce.signatures import load_signing_key
    from sottovoce.training.parent_model import default_run_folder
    from sottovoce.training.run import run_recipe, run_smoke
    from sottovoce.training.suites import load_suite_recipes, run_suite, select_runs

    if family is not None:
        find_family(family)
    experiment = load_experiment(recipe, overrides or [])
    if isinstance(experiment, Suite):
        experiment = select_runs(experiment, only)
    elif only is not None or at_once != 1:
        raise InputError(f"{recipe} is one run: --only and --at-once are for suites")
    if smoke:
        with surroundings(recipe, runs=runs, stores=stores, device=device) as around:
            run_smoke(recipe, experiment, out=out, context=around)
        shown = "" if out is None else f"; sottovoce report {out} shows what it writes down"
        stdout.print(f"{recipe}: one step of it runs{shown}", highlight=False, markup=False)
        return
    if sign is not None:
        load_signing_key(sign)  # who has none is told now, not after hours
    folder = out or default_run_folder(recipe, runs)
    label = label_of(recipe, out)
    with surroundings(recipe, runs=runs, stores=stores, device=device) as around:
        if isinstance(experiment, Suite):
            wanted = {name: (one, folder / name) for name, one in load_suite_recipes(experiment).items()}
        else:
            wanted = {label: (experiment, folder)}
        costs = beforehand(wanted, around)
    if estimate:
        _show_costs(costs, json)
        return
    for line in () if costs is None else costs.lines():
        say(line)
    _confirm(costs, yes=yes)
    with surroundings(recipe, runs=runs, stores=stores, device=device) as around:
        around = replace(around, sign=sign)
        if isinstance(experiment, Suite):
            outcomes = run_suite(experiment, out=folder, context=around, at_once=at_once)
        else:
            outcomes = {label: run_recipe(experiment, out=folder, resume=resume, context=around)}
    planned = len(experiment.runs) if isinstance(experiment, Suite) else 1
    stopped = _stopped(outcomes, folder, planned=planned)
    finished = {label: outcome for label, outcome in outcomes.items() if outcome.results is not None}
    if stopped is None and not finished:  # another process than the first
        return
    if stopped is None:
        show_finished(finished, folder, title=experiment.about, quietly=json)
    if json:
        found = {label: known for label, outcome in outcomes.items() if (known := outcome.as_json()) is not None}
        print_json(found if isinstance(experiment, Suite) else found[label])
    if stopped is not None:
        end_interrupted(stopped)


def label_of(recipe: str, out: Path | None) -> str:
    """What a run is called in its table and report: as the folder that was asked for, else as its recipe."""
    from sottovoce.config import public_name

    return public_name(recipe) if out is None else out.absolute().name


def _stopped(outcomes: "Mapping[str, Outcome]", folder: Path, *, planned: int) -> str | None:
    """Where it was interrupted and how it goes on; None where it was not."""
    for outcome in outcomes.values():
        if outcome.stopped_at is not None:
            again = "the same command" + (" with --resume" if outcome.folder == folder else "")
            return f"stopped after step {outcome.stopped_at:,} and saved: {again} goes on"
    if len(outcomes) < planned:
        return f"stopped after {len(outcomes):,} of {planned:,} runs: the same command goes on"
    return None


def beforehand(wanted: "Mapping[str, tuple[Recipe, Path]]", around: "RunContext") -> "Estimate | None":
    """Check all that the runs need, and say what they take; None where nothing is left to do, or others do it too."""
    from sottovoce.processes import own_device, process_group
    from sottovoce.training.agreement import require_equal_across_ranks
    from sottovoce.training.estimate import estimate_runs
    from sottovoce.training.preflight import check_stages, list_stages

    with process_group(own_device(around.device)) as processes, require_equal_across_ranks(processes):
        if not processes.first:
            return None
        stages = list_stages(wanted, folder=around.runs)
        known = check_stages(stages, around)
        if processes.several or not stages:  # one process cannot say what several take
            return None
        around.on_stage("what it takes")
        return estimate_runs(stages, known, replace(around, say=lambda _: None))


def _show_costs(costs: "Estimate | None", json: bool) -> None:
    if json:
        print_json(None if costs is None else costs.as_json())
        return
    for line in ["nothing is left to do"] if costs is None else costs.lines():
        say(line, to=stdout)


def _confirm(costs: "Estimate | None", *, yes: bool) -> None:
    """Ask before a CPU is kept busy for days; without a terminal to ask, refuse."""
    from sottovoce.training.estimate import format_time, seconds_too_long

    if yes or costs is None or (seconds := seconds_too_long(costs)) is None:
        return
    words = f"this takes a CPU about {format_time(seconds)}"
    if not (sys.stdin.isatty() and stderr.is_terminal):
        raise InputError(f"{words}: expected a GPU, or --yes")
    typer.confirm(f"{words}. Begin?", abort=True, err=True)


def show_finished(finished: "Mapping[str, Outcome]", folder: Path, *, title: str, quietly: bool = False) -> None:
    """Write the report of runs that are done, and print its tables unless `quietly`."""
    from sottovoce.reporting.summary import write_report

    report = write_report({label: outcome.folder for label, outcome in finished.items()}, folder, title=title)
    if quietly:
        return
    print_result(report)
    stdout.print(report.verdict, highlight=False, soft_wrap=True, style="bold")
    for table in report.tables_below:
        print_wide(table.for_terminal())
    for line in report.together:
        say(line, to=stdout)
    for note in report.notes:
        stdout.print(note, highlight=False, soft_wrap=True)
    stdout.print(f"report: {report.path}", highlight=False, soft_wrap=True)
    *_, last = finished.values()
    stdout.print(_use(last), highlight=False, soft_wrap=True)


def print_result(report: "Summary") -> None:
    """The table of results, whole at any width: where it does not fit, without what the report says besides."""
    table = report.for_terminal()
    stdout.print(table if fits(table) else report.for_terminal(brief=True))


def _use(finished: "Outcome") -> str:
    """What can be done with the model of a run."""
    assert finished.results is not None
    tests, folder = finished.results["test"].values(), finished.folder
    if tests and not any("wer" in test for test in tests):  # it writes nothing down
        return f"to use it: start_from={folder} in a recipe, or sottovoce probe {folder} --on STORE:SPLIT"
    return f"to use it: sottovoce transcribe {folder} FILE"


@contextmanager
def surroundings(recipe: str, *, runs: Path, stores: Path, device: str | None) -> Iterator["RunContext"]:
    """Where the run works, with a progress bar that shows what it reports."""
    from sottovoce.evaluation.recognise import choose_device
    from sottovoce.store import Progress
    from sottovoce.training.run_context import RunContext

    with progress_bar(recipe) as bar:
        (task,) = bar.task_ids

        def say(line: str) -> None:
            bar.console.print(line, highlight=False, soft_wrap=True)

        def show_stage(stage: str) -> None:
            bar.update(task, completed=0, total=None, note=stage)
            say(f"— {stage}")

        def show_prepare(progress: Progress) -> None:
            bar.update(task, completed=progress.tasks_done, total=progress.tasks, note="speakers prepared")

        def show(report: "ProgressReport") -> None:
            note = _told(report)
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


def _told(report: "ProgressReport") -> str:
    """What is known of a step or a round, in one line."""
    known = [
        (report.loss, "loss {:.3f}"),
        (report.score, "dev {}"),
        (report.epsilon, "ε spent {:,.4g}"),
        (report.audio_seconds_per_second, "{:,.0f} s/s"),
        (report.speech_used, "{:.0%} of the speech used"),
    ]
    return ", ".join(words.format(value) for value, words in known if value is not None)
