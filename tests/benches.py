"""Suites of the bench, loaded and compared setting by setting."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from sottovoce.config import Recipe, Suite, load_experiment, load_recipe


@cache
def runs_of(suite: str) -> Mapping[str, Recipe]:
    loaded = load_experiment(suite)
    assert isinstance(loaded, Suite)
    return {label: load_recipe(run.recipe, run.overrides) for label, run in loaded.runs.items()}


def changed(recipe: Recipe, base: Recipe) -> set[str]:
    """The settings in which they differ."""
    return {*_differences(settings(recipe), settings(base))}


def settings(recipe: Recipe) -> dict[str, Any]:
    """All that decides how a run goes."""
    found: dict[str, Any] = json.loads(recipe.model_dump_json(exclude={"about", "paper"}))
    return found


def _differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            yield from _differences(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))
    elif one != other:
        yield path
