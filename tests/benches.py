"""Suites of the bench, loaded and compared setting by setting."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from sottovoce.config import Recipe, Suite, load_experiment, load_recipe

# Keys that recipes no longer have, with the values that all kept runs have of them: what was the default.
_REMOVED_KEYS = re.compile(
    r"^ +(most_data_speakers: null|local_shift_frames: 0\.0|global_scale: 1\.0|layerdrop_group: 1|ctc_steps: null"
    r"|temperature: null|colour: pink)\n",
    re.M,
)


# Runs with these clients were kept when their seed model had the name on the left.
_RENAMED = ("store: demo-crowd\n", "seed_model: demo/seed\n", "seed_model: demo-clipping/seed\n")


def without_removed_keys(kept: str) -> str:
    """The configuration of a kept run without keys that recipes no longer have, where they say what was the default.

    A seed model is called as it is now.
    """
    content = _REMOVED_KEYS.sub("", kept)
    clients, old, new = _RENAMED
    return content.replace(old, new) if clients in content else content


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
