"""`sottovoce recipes`: which there are, what they reproduce, what they start from and read."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sottovoce.cli.console import Json, print_json, stdout
from sottovoce.errors import InputError

if TYPE_CHECKING:
    from sottovoce.config import Experiment


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
    """List recipes, with the paper's WER, the seed model and the store of each.

    Example: sottovoce recipes uniform --paper pelikan2025 --table 1

    `sottovoce recipes show demo/global` prints one with every default and the meaning of each key, ready to be changed.
    """
    from sottovoce.config import load_experiment, recipe_names

    asked_for, *rest = words or [""]
    if asked_for in ("show", "keys"):
        if paper is not None or table is not None or (asked_for == "keys" and rest):
            raise InputError("expected `recipes show NAME [KEY=VALUE…]`, or `recipes keys`, and no other option")
        if asked_for == "show":
            _show(rest, json)
        else:
            _show_keys(json)
        return
    names = recipe_names()
    papers = dict.fromkeys(name.partition("/")[0] for name in names if "/" in name)
    if paper is not None and paper not in papers:
        raise InputError(f"paper={paper}: expected one of {', '.join(papers)}")
    listed = (_described(name, load_experiment(name)) for name in names if paper in (None, name.partition("/")[0]))
    found = [one for one in listed if _fits(one, words or [], table)]
    if not found:
        asked = [*(words or []), *([f"paper={paper}"] if paper else []), *([f"table={table}"] if table else [])]
        raise InputError(f"no recipe fits {' '.join(asked)}: `sottovoce recipes` lists all {len(names):,}")
    if json:
        print_json(found)
        return
    for one in found:
        details = "; ".join(_details(one))
        stdout.print(f"[bold]{one['name']}[/]  {one['about']}", highlight=False, soft_wrap=True)
        if details:
            stdout.print(f"    [dim]{details}[/]", highlight=False, soft_wrap=True)


def _show(words: Sequence[str], json: bool) -> None:
    from sottovoce.config import Suite, load_experiment
    from sottovoce.config.keys import plain, render_commented_recipe
    from sottovoce.naming import importing_nothing

    if not words:
        raise InputError("expected `recipes show NAME [KEY=VALUE…]`")
    name, *overrides = words
    with importing_nothing(f"`recipes show` imports nothing, `sottovoce run {name} --estimate` does"):
        experiment = load_experiment(name, overrides)
    if isinstance(experiment, Suite):
        runs = ", ".join(run.recipe for run in experiment.runs.values())
        raise InputError(f"{name} is a suite: expected one of its runs, {runs}")
    if json:
        print_json(plain(experiment))
    else:
        print(render_commented_recipe(experiment), end="")  # rich would wrap lines and read brackets as markup


def _show_keys(json: bool) -> None:
    from dataclasses import asdict

    from sottovoce.config.keys import list_sections, render_keys_page

    if not json:
        print(render_keys_page(), end="")
        return
    print_json(
        [
            {"places": section.places, "title": section.title, "keys": [_named(asdict(key)) for key in section.keys]}
            for section in list_sections()
        ]
    )


def _named(key: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in key.items() if name != "sections"}


def _described(name: str, experiment: "Experiment") -> dict[str, Any]:
    from sottovoce.config import Suite

    printed = experiment.paper and experiment.paper.model_dump(mode="json")
    described: dict[str, Any] = {"name": name, "about": experiment.about, "paper": printed}
    if isinstance(experiment, Suite):
        return {**described, "runs": list(experiment.runs)}
    central = experiment.central
    seed = experiment.federated.seed_model if central is None else central.start_from
    return {**described, "seed_model": seed, "store": experiment.data.store}


def _details(one: dict[str, Any]) -> Iterator[str]:
    paper = one["paper"] or {}
    if wers := paper.get("wer"):
        yield f"{paper['place'].partition(',')[0]}: WER {', '.join(f'{test} {wer:.1f}' for test, wer in wers.items())}"
    if "runs" in one:
        yield f"{len(one['runs']):,} runs"
    if one.get("seed_model"):
        yield f"from {one['seed_model']}"
    if one.get("store"):
        yield f"store {one['store']}"


def _fits(one: dict[str, Any], words: Sequence[str], table: int | None) -> bool:
    place = (one["paper"] or {}).get("place", "")
    line = " ".join((one["name"], one["about"], place, *_details(one))).casefold()
    return all(word.casefold() in line for word in words) and (table is None or table in tables_in(place))


def tables_in(place: str) -> set[int]:
    """The tables that a place of a paper names.

    >>> sorted(tables_in("Table 1, σ_DP = 1e-6, dim; Table 17; Figure 5")), sorted(tables_in("Tables 5, 11 and 13"))
    ([1, 17], [5, 11, 13])
    """
    lists = re.findall(r"Tables ((?:\d+(?:, | and )?)+)", place)
    return {int(number) for number in re.findall(r"Table (\d+)", place) + re.findall(r"\d+", " ".join(lists))}
