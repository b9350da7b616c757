"""The list of recipes: what each reproduces, starts from and reads, and which of them fit a search."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.config.loading import load_experiment
from sottovoce.config.reading import recipe_names
from sottovoce.config.recipe import Experiment, Suite


def find_recipes(words: Sequence[str], *, paper: str | None = None, table: int | None = None) -> list[dict[str, Any]]:
    """Descriptions of the recipes in which all `words` occur, of one paper and one of its tables if asked."""
    names = recipe_names()
    papers = dict.fromkeys(name.partition("/")[0] for name in names if "/" in name)
    if paper is not None and paper not in papers:
        raise InputError(f"paper={paper}: expected one of {', '.join(papers)}")
    listed = [describe_recipe(name, load_experiment(name)) for name in names if paper in (None, name.partition("/")[0])]
    found = [described for described in listed if _matches(described, words, table)]
    if not found:
        asked = [*words, *([f"paper={paper}"] if paper else []), *([f"table={table}"] if table else [])]
        raise InputError(f"no recipe fits {' '.join(asked)}: `sottovoce recipes` lists all {len(names):,}")
    return found


def describe_recipe(name: str, experiment: Experiment) -> dict[str, Any]:
    """What `recipes --json` says of a recipe."""
    printed = experiment.paper and experiment.paper.model_dump(mode="json")
    described: dict[str, Any] = {"name": name, "about": experiment.about, "paper": printed}
    if isinstance(experiment, Suite):
        return {**described, "runs": list(experiment.runs)}
    central = experiment.central
    seed = experiment.federated.seed_model if central is None else central.start_from
    return {**described, "seed_model": seed, "store": experiment.data.store}


def format_details(described: Mapping[str, Any]) -> Iterator[str]:
    """The paper's WERs, the runs of a suite, the parent model and the store, as far as there are any."""
    paper = described["paper"] or {}
    if wers := paper.get("wer"):
        yield f"{paper['place'].partition(',')[0]}: WER {', '.join(f'{test} {wer:.1f}' for test, wer in wers.items())}"
    if "runs" in described:
        yield f"{len(described['runs']):,} runs"
    if described.get("seed_model"):
        yield f"from {described['seed_model']}"
    if described.get("store"):
        yield f"store {described['store']}"


def find_tables(place: str) -> set[int]:
    """The tables that a place of a paper names.

    >>> sorted(find_tables("Table 1, σ_DP = 1e-6, dim; Table 17; Figure 5")), sorted(find_tables("Tables 5, 11 and 13"))
    ([1, 17], [5, 11, 13])
    """
    lists = re.findall(r"Tables ((?:\d+(?:, | and )?)+)", place)
    return {int(number) for number in re.findall(r"Table (\d+)", place) + re.findall(r"\d+", " ".join(lists))}


def _matches(described: Mapping[str, Any], words: Sequence[str], table: int | None) -> bool:
    place = (described["paper"] or {}).get("place", "")
    line = " ".join((described["name"], described["about"], place, *format_details(described))).casefold()
    return all(word.casefold() in line for word in words) and (table is None or table in find_tables(place))
