"""What is written of a recipe, as plain data: a file of its own or an entry of one, on top of what it extends.

A file is called by its path below `recipes/`, or by the path of a YAML file. Its entries stand under `runs`, which make
a suite, and under `recipes`, which are run by their own names, or all of them by the file's where there are no `runs`.
An entry's name is the file's, a slash, and its
own: `pelikan2025/table01/sigma-3e-6-dim`, or `mine/table.yaml/dim`.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_file
from sottovoce.base.parsing import DEEPEST, ParseError, parse_yaml, quote
from sottovoce.config.recipe import is_suite
from sottovoce.models.family import DEFAULT

Content = dict[str, Any]

_YAML = (".yaml", ".yml")
_OF_THE_WHOLE = ("about", "paper", "runs", "recipes")  # all else at the head of a suite is shared by its runs


def recipe_names() -> list[str]:
    """The names of all recipes that come with the package; a run that only names another recipe is not listed."""
    root = _recipe_folder()
    found: list[str] = []
    for path in root.rglob("*.yaml"):
        name = path.relative_to(root).with_suffix("").as_posix()
        content = _file(name, path)
        found += [f"{name}/{label}" for label in (*content.get("recipes", {}), *_written_runs(content))]
        if is_suite(content) or "recipes" not in content or _collected(content):
            found.append(name)
    return sorted(name for name in found if not name.split("/")[-1].startswith("_"))


def is_recipe(name: str) -> bool:
    """Whether `name` is that of a recipe, and not of a folder: one of the package, a YAML file, or an entry of one."""
    path, entry = _place(name)
    if entry is None and name.endswith(_YAML):
        return True
    if name.split("/")[-1].startswith("_") or not os.path.isfile(path):
        return False
    return entry in _entries(_file(name, path)) if entry is not None else path.is_relative_to(_recipe_folder())


def is_collection(name: str) -> bool:
    """Whether `name` is that of a file of recipes that are no suite: each is run as if by its own name."""
    path, entry = _place(name)
    return entry is None and not is_suite(content := _file(name, path)) and "recipes" in content


def plain_name(name: str) -> str:
    """A recipe's name without the ending of its file.

    >>> plain_name("mine/table.yaml/dim")
    'mine/table/dim'
    """
    file, slash, entry = (name, "", "") if name.endswith(_YAML) else name.rpartition("/")
    return file.removesuffix(".yaml").removesuffix(".yml") + slash + entry


def public_name(name: str) -> str:
    """A recipe's name as a report may show it: of a file only what it is called, not in whose folder it lies.

    >>> public_name("/home/me/table.yaml/dim")
    'table/dim'
    """
    file = name if name.endswith(_YAML) else name.rpartition("/")[0]
    return plain_name(name.removeprefix(f"{os.path.dirname(file)}/")) if file.endswith(_YAML) else name


def read_recipe_content(name: str, seen: tuple[str, ...] = ()) -> Content:
    """The content of a recipe or suite on top of what it extends."""
    if name in seen:
        raise InputError(f"recipe {name}: it extends itself by way of {' → '.join(seen)}")
    path, entry = _place(name)
    file = _file(name, path)
    found = _whole(file, name) if entry is None else _entry(file, entry, name)
    if entry is not None and "recipe" in found:
        return _elsewhere(found, name, (*seen, name))
    content = deepcopy(dict(found))  # what was parsed once is used again
    base = content.pop("extends", None)
    if not (base is None or isinstance(base, str)):
        raise InputError(f"recipe {name}: extends={base!r}, expected the name of one recipe")
    return _overlaid(read_recipe_content(base, (*seen, name)), content) if base else content


def apply_overrides(content: Content, changes: Sequence[str]) -> None:
    """Set what each `key=value`, such as `central.steps=100`, says, in place."""
    # The family first: the other keys of `model` are its own.
    for change in sorted(changes, key=lambda text: not text.startswith("model.family=")):
        _override(content, change)


def _override(content: Content, change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise InputError(f"override {quote(change)}: expected key=value, such as central.steps=100")
    *path, last = key.split(".")
    if len(path) > DEEPEST:
        raise InputError(f"override {quote(change)}: nested too deeply")
    if path and path[0] in _TRAINING and path[0] not in content and any(kind in content for kind in _TRAINING):
        raise InputError(f"override {quote(change)}: this recipe has no section {path[0]!r}")
    for part in path:
        content = content.setdefault(part, {})
        if not isinstance(content, dict):
            raise InputError(f"override {quote(change)}: {part!r} is a value, not a section")
    try:
        # To YAML a star begins a reference, of which there are none here: it is a pattern (`trainable=*.norm.*`).
        value = text if text.startswith("*") else parse_yaml(text)
    except ParseError as error:
        raise InputError(f"override {quote(change)}: {quote(text)} is not readable as YAML: {error}") from None
    if key == "model.family" and value != content.get(last, DEFAULT):
        content.clear()  # the other keys belong to another family
    content[last] = value


_TRAINING = ("central", "federation")
_NAMING = {"name", "family"}


# Files.


def _recipe_folder() -> Path:
    return Path(str(resources.files("sottovoce"))) / "recipes"


def _place(name: str) -> tuple[Path, str | None]:
    """The file that a name leads to, and which entry of it, where it is not the whole file."""
    if name.endswith(_YAML):
        return Path(name), None
    home, _, entry = name.rpartition("/")
    if home.endswith(_YAML):
        return Path(home), entry
    root = _recipe_folder()
    alone, around = root / f"{name}.yaml", root / f"{home}.yaml"
    return (around, entry) if os.path.isfile(around) and not os.path.isfile(alone) else (alone, None)


def _file(name: str, path: Path) -> Mapping[str, Any]:
    """All that the file at `path` says: not to be changed."""
    try:
        content = _parsed(read_file(path).decode("utf-8")) or {}
    except FileNotFoundError:
        raise _unknown(name, recipe_names()) from None
    except OSError as error:
        raise InputError(f"recipe {name}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # no UTF-8, no YAML, or a name that no file can have
        raise InputError(f"recipe {name}: not readable as YAML: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"recipe {name}: expected keys and values at the top level")
    if "recipes" in content:
        _check_entries(content, name)
    return content


# By its text, so that nothing can be out of date: each of a table's runs reads its table, and the same few bases.
_parsed = lru_cache(maxsize=128)(parse_yaml)


def _unknown(name: str, known: list[str]) -> InputError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f", did you mean {near[0]!r}?" if near else ""
    return InputError(f"no recipe {name!r}{hint} (`sottovoce recipes` lists them; or give a .yaml file)")


# Suites and their entries.


def _written_runs(content: Mapping[str, Any]) -> list[str]:
    """The runs of a suite that are written there, and not only named."""
    runs = content.get("runs")
    return [label for label, run in runs.items() if _is_written(run)] if isinstance(runs, dict) else []


def _collected(content: Mapping[str, Any]) -> list[str]:
    """The recipes of a file that can be run; what begins with _ is there to be extended."""
    return [label for label in content.get("recipes", {}) if not label.startswith("_")]


def _is_written(run: object) -> bool:
    return isinstance(run, dict) and "recipe" not in run


def _entries(content: Mapping[str, Any]) -> Content:
    kinds = [kind for kind in (content.get("recipes"), content.get("runs")) if isinstance(kind, dict)]
    return {str(label): entry for kind in kinds for label, entry in kind.items()}


def _check_entries(content: Mapping[str, Any], name: str) -> None:
    recipes, runs = content["recipes"], content.get("runs", {})
    if not isinstance(recipes, dict):
        raise InputError(f"recipe {name}: recipes: expected names and what each is, found {quote(recipes)}")
    if not is_suite(content) and len(content) > 1:
        other = next(key for key in content if key != "recipes")
        raise InputError(f"recipe {name}: {quote(other)} beside recipes, expected a suite with runs, or recipes alone")
    if isinstance(runs, dict) and (both := [label for label in recipes if label in runs]):
        raise InputError(f"recipe {name}: {quote(both[0])} stands under recipes and under runs")


def _shared(content: Mapping[str, Any]) -> Content:
    """What stands at the head of a suite for all of its runs."""
    return {key: value for key, value in content.items() if key not in _OF_THE_WHOLE}


def _whole(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A file as one recipe or suite; of a run that is written there, the suite keeps the name."""
    if "recipes" in content and not is_suite(content):
        if not (labels := _collected(content)):
            raise InputError(f"recipe {name}: other recipes extend what is in this file; there is none to be run")
        return {"about": f"the recipes of {name}", "runs": {label: {"recipe": f"{name}/{label}"} for label in labels}}
    written = _written_runs(content)
    if not written:
        return {key: value for key, value in content.items() if key != "recipes"}
    named = [label for label, run in content["runs"].items() if isinstance(run, dict) and label not in written]
    if named and (shared := _shared(content)):
        raise InputError(
            f"recipe {name}: {next(iter(shared))!r} is for all runs of the suite, and {named[0]!r} names a recipe of "
            "its own: expected `extends` in place of `recipe`"
        )
    runs = {label: {"recipe": f"{name}/{label}"} if _is_written(run) else run for label, run in content["runs"].items()}
    return {key: content[key] for key in ("about", "paper") if key in content} | {"runs": runs}


def _entry(content: Mapping[str, Any], label: str, name: str) -> Content:
    """One entry of a file; a run is put on top of what the suite's runs share, and what it extends below that."""
    entries, written = _entries(content), _written_runs(content)
    home = name.removesuffix(f"/{label}")
    if label not in entries:
        others = [] if home.endswith(_YAML) else recipe_names()
        raise _unknown(name, [*others, *(f"{home}/{known}" for known in entries)])
    entry = entries[label]
    if not isinstance(entry, dict):
        raise InputError(f"recipe {name}: expected keys and values, found {quote(entry)}")
    # A run of the same suite has on it what is shared, and perhaps something else in its place.
    has_it = entry.get("extends") in [f"{home}/{known}" for known in written]
    return entry if has_it or label not in written else _overlaid(_shared(content), entry)


def _elsewhere(run: Mapping[str, Any], name: str, seen: tuple[str, ...]) -> Content:
    """What a run is that names another recipe and what is different here."""
    recipe, changes = run["recipe"], run.get("overrides", [])
    texts = [recipe, *changes] if isinstance(changes, list) else [None]
    if not (run.keys() <= {"recipe", "overrides"} and all(isinstance(text, str) for text in texts)):
        raise InputError(f"recipe {name}: expected recipe: NAME and overrides: [key=value, …], and nothing else")
    content = read_recipe_content(recipe, seen)
    apply_overrides(content, changes)
    return content


def _overlaid(base: Mapping[str, Any], top: Mapping[str, Any]) -> Content:
    """`top` over `base`, key by key; a mapping that names a thing takes the place of the base's."""
    result = dict(base)
    for key, value in top.items():
        old = result.get(key)
        joins = isinstance(value, dict) and isinstance(old, dict) and not value.keys() & _NAMING
        result[key] = _overlaid(old, value) if joins else value  # type: ignore[arg-type]  # joins says old is a dict
    return result
