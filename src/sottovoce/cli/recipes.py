"""`sottovoce recipes`: which there are, what they reproduce, what they start from and read."""

from collections.abc import Sequence
from typing import Annotated

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import print_json, stdout
from sottovoce.cli.options import Json


def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORD… | show NAME [KEY=VALUE…] | keys]",
            help="Only those in whose lines all of these occur; or one of them whole; or all keys that recipes have.",
        ),
    ] = None,
    paper: Annotated[str | None, typer.Option(metavar="NAME", help="Only a paper's, such as pelikan2025.")] = None,
    table: Annotated[int | None, typer.Option(metavar="N", help="Only what that table of a paper prints.")] = None,
    json: Json = False,
) -> None:
    """List recipes, with the paper's WER, the parent model and the store of each.

    Example: sottovoce recipes uniform --paper pelikan2025 --table 1

    `sottovoce recipes show demo/private` prints one with every default and what each key means, ready to be changed.
    """
    from sottovoce.config.catalogue import find_recipes, format_details

    first, *rest = words or [""]
    if first in ("show", "keys"):
        if paper is not None or table is not None or (first == "keys" and rest):
            raise InputError("expected `recipes show NAME [KEY=VALUE…]`, or `recipes keys`, and no other option")
        if first == "show":
            _print_recipe(rest, json)
        else:
            _print_keys(json)
        return
    found = find_recipes(words or [], paper=paper, table=table)
    if json:
        print_json(found)
        return
    for recipe in found:
        stdout.print(f"[bold]{recipe['name']}[/]  {recipe['about']}", highlight=False, soft_wrap=True)
        if details := "; ".join(format_details(recipe)):
            stdout.print(f"    [dim]{details}[/]", highlight=False, soft_wrap=True)


def _print_recipe(words: Sequence[str], json: bool) -> None:
    from sottovoce.base.importing import refuse_imports
    from sottovoce.config import Suite, load_experiment
    from sottovoce.config.keys import plain, render_commented_recipe

    if not words:
        raise InputError("expected `recipes show NAME [KEY=VALUE…]`")
    name, *overrides = words
    with refuse_imports(f"`recipes show` imports nothing, `sottovoce run {name} --estimate` does"):
        experiment = load_experiment(name, overrides)
    if isinstance(experiment, Suite):
        runs = ", ".join(run.recipe for run in experiment.runs.values())
        raise InputError(f"{name} is a suite: expected one of its runs, {runs}")
    if json:
        print_json(plain(experiment))
    else:
        print(render_commented_recipe(experiment), end="")  # rich would wrap lines and read brackets as markup


def _print_keys(json: bool) -> None:
    from dataclasses import asdict

    from sottovoce.config.keys import list_sections, render_keys_page

    if not json:
        print(render_keys_page(), end="")
        return
    sections = [
        {
            "places": section.places,
            "title": section.title,
            "keys": [
                {name: value for name, value in asdict(key).items() if name != "sections"} for key in section.keys
            ],
        }
        for section in list_sections()
    ]
    print_json(sections)
