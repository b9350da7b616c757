"""`sottovoce run` and `sottovoce recipes`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from sottovoce.cli.console import Json, print_json, progress_bar, stderr, stdout


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (`sottovoce recipes`) or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as central.steps=100.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/RECIPE by default.")] = None,
    stores: Annotated[Path, typer.Option(help="Where stores lie and are made.")] = Path("stores"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the run's folder.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one by default.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a recipe: prepare what is missing, train, evaluate on unseen speakers.

    Example: sottovoce run synthetic/central central.steps=600 --out runs/first
    """
    from sottovoce.config import load_recipe
    from sottovoce.evaluation.recognise import choose_device
    from sottovoce.store import Progress
    from sottovoce.training.central import Report
    from sottovoce.training.stages import run_recipe

    chosen = load_recipe(recipe, overrides or [])
    folder = out or Path("runs") / Path(recipe).with_suffix("").as_posix().replace("/", "-")
    with progress_bar(f"{recipe}") as bar:
        (task,) = bar.task_ids

        def show_prepare(progress: Progress) -> None:
            bar.update(task, completed=progress.tasks_done, total=progress.tasks, note="speakers prepared")

        def show(report: Report) -> None:
            wer = "" if report.dev_wer is None else f", dev WER {report.dev_wer:.1%}"
            note = f"loss {report.loss:.3f}{wer}, {report.audio_seconds_per_second:,.0f} s/s"
            bar.update(task, completed=report.step, total=report.steps, note=note)
            if report.dev_wer is not None:
                bar.console.print(f"step {report.step:,}: {note}", highlight=False)

        outcome = run_recipe(
            chosen,
            out=folder,
            stores=stores,
            resume=resume,
            device=choose_device(device),
            on_prepare=show_prepare,
            on_report=show,
            say=lambda line: bar.console.print(line, highlight=False, soft_wrap=True),
        )
    if outcome.stopped_at is not None:
        stopped = f"stopped after step {outcome.stopped_at:,} and saved: the same command with --resume goes on"
        stderr.print(stopped, highlight=False)
    elif outcome.results is None:  # another process than the first
        return
    elif json:
        print_json(outcome.results)
    else:
        stdout.print(_results_table(outcome.results))
        stdout.print(f"model: {folder / 'model'}", highlight=False)


def _results_table(results: dict[str, Any]) -> Table:
    table = Table(
        "test set", "WER", "95 % interval", "CER", "speakers", title="On unseen speakers", title_justify="left"
    )
    for name, result in results["test"].items():
        interval = result["wer_interval"]
        spread = "" if interval is None else f"{interval[0]:.1%} to {interval[1]:.1%}"
        table.add_row(name, f"{result['wer']:.1%}", spread, f"{result['cer']:.1%}", f"{result['speakers']:,}")
    return table


def recipes(json: Json = False) -> None:
    """List all recipes, one line each.

    Example: sottovoce recipes --json
    """
    from sottovoce.config import load_recipe, recipe_names

    found = [(name, load_recipe(name)) for name in recipe_names()]
    if json:
        print_json(
            [
                {"name": name, "about": recipe.about, "paper": recipe.paper and recipe.paper.model_dump(mode="json")}
                for name, recipe in found
            ]
        )
        return
    for name, recipe in found:
        stdout.print(f"[bold]{name}[/]  {recipe.about}", highlight=False, soft_wrap=True)
