"""From what is written to a recipe: `key=value` on top, and one clear line for whatever is wrong.

An unknown key is an error that names the nearest known one.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError

from sottovoce.base.errors import InputError
from sottovoce.base.parsing import quote, shorten
from sottovoce.config.reading import apply_overrides, read_recipe_content
from sottovoce.config.recipe import Experiment, Recipe, Suite, is_suite
from sottovoce.config.sections import model_section_type, read_model
from sottovoce.models.family import DEFAULT

S = TypeVar("S", bound=BaseModel)


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe `name` (of the package, or a YAML file), with `key=value` overrides such as `central.steps=100`.

    >>> load_recipe("synthetic/central", ["seed=7"]).seed
    7
    """
    loaded = load_experiment(name, overrides)
    if isinstance(loaded, Suite):
        raise InputError(f"recipe {name}: expected one run, found a suite of {len(loaded.runs)}")
    return loaded


def load_experiment(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """The recipe or suite called `name`; a suite hands the overrides on to each of its runs."""
    content = read_recipe_content(name)
    if is_suite(content):
        suite = _validated(Suite, content, where=name)
        runs = {
            label: run.model_copy(update={"overrides": (*run.overrides, *overrides)})
            for label, run in suite.runs.items()
        }
        return suite.model_copy(update={"runs": runs})
    apply_overrides(content, overrides)
    return validate_recipe(content, where=name)


def validate_recipe(content: Mapping[str, Any], *, where: str) -> Recipe:
    """A recipe from plain data; one clear line for the first mistake."""
    _check_numbers(content, where=where)
    return _validated(Recipe, {**content, "model": _model(content.get("model", {}), where=where)}, where=where)


def _model(section: Any, *, where: str) -> Any:
    """The section `model`, whose keys are those of the family that it names."""
    try:
        return read_model(section)
    except ValidationError as error:
        kind = model_section_type(str(section.get("family", DEFAULT)))
        raise InputError(f"recipe {where}: {_first_line(error, kind)}") from None
    except InputError as error:
        raise InputError(f"recipe {where}: {error}") from None


# Single precision ends at 1e±38, and counters at 2⁶³.
SMALLEST_NUMBER, LARGEST_NUMBER, LARGEST_COUNT = 1e-30, 1e30, 2**63 - 1


def _check_numbers(content: object, *, where: str, path: tuple[str, ...] = ()) -> None:
    """Refuse numbers that nothing here can compute with, before anything tries to."""
    if isinstance(content, dict):
        for key, value in content.items():
            _check_numbers(value, where=where, path=(*path, str(key)))
    elif isinstance(content, list | tuple):
        for value in content:
            _check_numbers(value, where=where, path=path)
    elif isinstance(content, int | float) and not _computable(content):
        raise InputError(
            f"recipe {where}: {'.'.join(path)}={quote(content)}, expected a number between {SMALLEST_NUMBER:g} and "
            f"{LARGEST_NUMBER:g} in size (or 0, or .inf where there is no bound), a whole one below 2⁶³"
        )


def _computable(number: float) -> bool:
    if isinstance(number, int):
        return abs(number) <= LARGEST_COUNT
    return number == 0 or math.isinf(number) or SMALLEST_NUMBER <= abs(number) <= LARGEST_NUMBER


def _validated(kind: type[S], content: Mapping[str, Any], *, where: str) -> S:
    _check_numbers(content, where=where)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise InputError(f"recipe {where}: {_first_line(error, kind)}") from None


def as_yaml(recipe: Experiment) -> str:
    """The whole recipe, defaults included, as YAML that `load_recipe` reads back."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _first_line(error: ValidationError, kind: type[BaseModel]) -> str:
    first = error.errors()[0]
    # Where a key may hold one of several things, pydantic puts the thing's name into the path.
    where = [str(part) for part in first["loc"] if not str(part)[:1].isupper() and part != "[key]"]
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        key = str(first["loc"][-1])
        section = where if key[:1].isupper() else where[:-1]
        known = _known_keys(kind, section)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        return f"unknown key {quote('.'.join((*section, key)))}" + (
            f", did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
        )
    message = first["msg"].removeprefix("Value error, ")
    given = (
        f", found {quote(first['input'])}"
        if not isinstance(first["input"], dict) and first["type"] != "missing"
        else ""
    )
    return f"{shorten('.'.join(where)) or 'recipe'}: {message}{given}"


def _known_keys(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the section at `path`."""
    from sottovoce.config.keys import list_choices

    section: Any = kind
    for part in path:
        fields_of = _fields(section)
        if part not in fields_of:
            return []
        section = next((option for option in list_choices(fields_of[part]) if _fields(option)), None)
    return list(_fields(section))


def _fields(section: Any) -> dict[str, Any]:
    """The settings of a section, and what each of them is."""
    if isinstance(section, type) and issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    if is_dataclass(section) and isinstance(section, type):
        hints = get_type_hints(section)
        return {field.name: hints[field.name] for field in fields(section)}
    return {}
