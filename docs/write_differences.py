"""Write into each paper's README in what paper, released code and recipes differ: `make docs`.

The tables stand between two marks and come from `differences/PAPER.yaml`, where they were transcribed by hand:

    different:                                  # by chapter; a row each
      Data:
        - setting: longest utterance            # in words
          paper: not said                       # with its place
          code: 8 s (`avoid_if_longer_than`)    # left out where `no_code: true` stands at the head
          recipe: {data.longest_seconds: 8}     # one or several; `in` and `except` are patterns of recipes' names
          here: dev and test keep all           # what no key says, and why
          as_code: data.longest_seconds=10      # what makes a recipe do as the code, or (as_paper) as the paper
    same:                                       # what paper, code and recipe have alike
      - {where: §5.3, federation.local.local_epochs: 5}
    ours:                                       # what neither paper nor code has: files, logs, checkpoints
      - {why: files, keys: [data.store]}        # `keys`: only named, their values are held elsewhere or are free

`find_mistakes` compares a transcription with the recipes as they are loaded. Every key that a recipe sets, defaults
included, must be named: what is new cannot go unnoticed. A key stands for all below it.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.parsing import parse_yaml
from sottovoce.config import Recipe, load_experiment, load_recipe, recipe_names

PAPERS = ("pelikan2025", "gao2022", "ramesh2023")
FOLDER = Path(__file__).parent / "differences"
BEGIN, END = "<!-- differences: written by `make docs` from docs/differences/{paper}.yaml -->", "<!-- end -->"
WORDS = {"in", "except", "where", "why", "keys"}  # of an assignment; all else in it are keys of recipes

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """That `recipes` (those `in` patterns, but for some) have `key`, and have it as `value`, where that `is_held`."""

    part: str
    name: str
    recipes: Settings
    key: str
    value: Any
    is_held: bool

    def concerns(self, recipe: str, settings: Settings) -> bool:
        return self.key.partition(".")[0] in settings and _fits(recipe, self.recipes)

    def names(self, key: str) -> bool:
        return key == self.key or key.startswith(f"{self.key}.")


def transcription(paper: str) -> dict[str, Any]:
    found: dict[str, Any] = parse_yaml((FOLDER / f"{paper}.yaml").read_text(encoding="utf-8"))
    return found


def loaded_settings(paper: str) -> dict[str, Settings]:
    """All that the recipes of a paper set, by their names without the paper's."""
    named = ((name, load_experiment(name)) for name in recipe_names() if name.startswith(f"{paper}/"))
    return {
        name.removeprefix(f"{paper}/"): _without_nothing(recipe.model_dump(mode="json"))
        for name, recipe in named
        if isinstance(recipe, Recipe)
    }


def _without_nothing(value: Any) -> Any:
    """`value` without what is null or empty: that is not set."""
    if not isinstance(value, dict):
        return value
    kept = {str(key): _without_nothing(of_key) for key, of_key in value.items()}
    return {key: of_key for key, of_key in kept.items() if of_key is not None and of_key not in ({}, [])}


def leaves(settings: Settings, path: tuple[str, ...] = ()) -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield ".".join((*path, key))


def value_at(settings: Settings, key: str) -> Any:
    found: Any = settings
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _fits(recipe: str, assignment: Settings) -> bool:
    patterns, others = _listed(assignment.get("in", "*")), _listed(assignment.get("except"))
    return any(fnmatchcase(recipe, one) for one in patterns) and not any(fnmatchcase(recipe, one) for one in others)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _rows(transcribed: Settings) -> Iterator[Settings]:
    for rows in transcribed["different"].values():
        yield from rows


def claims(transcribed: Settings) -> list[Claim]:
    """All that a transcription says of recipes."""
    assignments = [
        ("different", row["setting"], one) for row in _rows(transcribed) for one in _listed(row.get("recipe"))
    ]
    assignments += [(part, part, one) for part in ("same", "ours") for one in transcribed[part]]
    found = []
    for part, name, assignment in assignments:
        held = {key: value for key, value in assignment.items() if key not in WORDS}
        found += [Claim(part, name, assignment, key, value, True) for key, value in held.items()]
        found += [Claim(part, name, assignment, key, None, False) for key in assignment.get("keys", ())]
    return found


def find_mistakes(paper: str, transcribed: Settings, loaded: Mapping[str, Settings]) -> list[str]:
    """Where a transcription does not fit the recipes: a line each."""
    made = claims(transcribed)
    found = [line for claim in made for line in _mistakes_of(claim, loaded)]
    for recipe, settings in loaded.items():
        concerned = [claim for claim in made if claim.concerns(recipe, settings)]
        for key in leaves(settings):
            parts = {claim.part for claim in concerned if claim.names(key)}
            if not parts:
                found.append(f"{recipe}: {key} is not named")
            elif len(parts) > 1:
                found.append(f"{recipe}: {key} is named as {' and as '.join(sorted(parts))}")
    return found + [line for row in _rows(transcribed) for line in _mistakes_in_row(paper, row, loaded)]


def _mistakes_of(claim: Claim, loaded: Mapping[str, Settings]) -> Iterator[str]:
    concerned = {recipe: of_it for recipe, of_it in loaded.items() if claim.concerns(recipe, of_it)}
    if not any(value_at(settings, claim.key) is not None for settings in concerned.values()) and (
        not claim.is_held or claim.value is not None or not concerned
    ):
        yield f"{claim.name}: no recipe{_scope(claim.recipes)} sets {claim.key}"
    for recipe, settings in concerned.items():
        value = value_at(settings, claim.key)
        if claim.is_held and value != _without_nothing(claim.value):
            yield f"{claim.name}: {recipe} has {claim.key}: {_in_line(value)}, not {_in_line(claim.value)}"


def _mistakes_in_row(paper: str, row: Settings, loaded: Mapping[str, Settings]) -> Iterator[str]:
    if not (row.get("recipe") or row.get("here")):
        yield f"{row['setting']}: nothing is said of the recipes"
    for overrides in filter(None, (row.get("as_code"), row.get("as_paper"))):
        changed = shlex.split(overrides)
        section = changed[0].partition(".")[0]
        named = _listed(row.get("recipe")) or [{}]
        fitting = [
            name for name, of_it in loaded.items() if section in of_it and any(_fits(name, one) for one in named)
        ]
        try:
            load_recipe(f"{paper}/{fitting[0]}", changed)
        except (InputError, IndexError) as error:
            yield f"{row['setting']}: {overrides} cannot be set: {error}"


def _in_line(value: Any) -> str:
    """As a recipe may have it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_in_line(of_key)}' for key, of_key in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_line, value))}]"
    if isinstance(value, float):
        return f"{value:g}".replace("inf", ".inf")
    return value if isinstance(value, str) else json.dumps(value)


def render(transcribed: Settings) -> str:
    """The tables as Markdown."""
    parts = []
    for chapter, rows in transcribed["different"].items():
        parts.append(
            _table(chapter, ("setting", "paper", "released code", "recipe"), [_row(transcribed, row) for row in rows])
        )
    same = [(_assigned(one), str(one["where"])) for one in transcribed["same"]]
    ours = [(_assigned(one), str(one["why"])) for one in transcribed["ours"]]
    parts.append(_table("The same in the paper, the released code and the recipes", ("recipe", "where"), same))
    parts.append(_table("Keys that are ours alone", ("recipe", "what for"), ours))
    return "\n".join(parts)


def _table(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    assert not any("|" in cell for row in rows for cell in row), f"{title}: a cell may not have a bar"
    return f"### {title}\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _row(transcribed: Settings, row: Settings) -> tuple[str, ...]:
    code = "none released" if transcribed.get("no_code") else str(row["code"])
    recipe = [str(row["here"])] if row.get("here") else []
    recipe += [_assigned(one) for one in _listed(row.get("recipe"))]
    recipe += [f"as released: `{row['as_code']}`"] if row.get("as_code") else []
    recipe += [f"as printed: `{row['as_paper']}`"] if row.get("as_paper") else []
    return str(row["setting"]), str(row["paper"]), code, "; ".join(recipe)


def _assigned(assignment: Settings) -> str:
    """`data.dev: dev`, and of which recipes, if not of all that have such a section."""
    shown = [f"`{key}: {_in_line(value)}`" for key, value in assignment.items() if key not in WORDS]
    shown += [f"`{key}`" for key in assignment.get("keys", ())]
    return ", ".join(shown) + _scope(assignment)


def _scope(assignment: Settings) -> str:
    """In which recipes, in brackets; nothing where it is in all."""
    inside, outside = (", ".join(f"`{one}`" for one in _listed(assignment.get(word))) for word in ("in", "except"))
    scope = [f"in {inside}"] * bool(inside) + [f"not in {outside}"] * bool(outside)
    return f" ({', '.join(scope)})" if scope else ""


def readme(paper: str) -> Path:
    return Path(str(resources.files("sottovoce"))) / "recipes" / paper / "README.md"


def page(paper: str, *, written: str) -> str:
    """The README `written`, with the tables between its marks."""
    before, begin, rest = written.partition(BEGIN.format(paper=paper))
    _, end, after = rest.partition(END)
    assert begin, f"{paper}/README.md has no mark for its tables"
    assert end, f"{paper}/README.md has no mark behind its tables"
    return f"{before}{begin}\n\n{render(transcription(paper))}\n{end}{after}"


if __name__ == "__main__":
    for name in PAPERS:
        mistakes = find_mistakes(name, transcription(name), loaded_settings(name))
        if mistakes:
            raise SystemExit("\n".join(f"differences/{name}.yaml: {line}" for line in mistakes))
        readme(name).write_text(page(name, written=readme(name).read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {readme(name)}")
