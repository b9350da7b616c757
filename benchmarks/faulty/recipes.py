"""Damaged recipes and invalid overrides: everything that a run works out of them before it reads any speech."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from faulty import damage
from faulty.cases import Case
from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream, torch_stream
from sottovoce.config import Recipe, Suite, as_yaml, load_experiment, load_recipe
from sottovoce.config.smoke import shrink_recipe
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, create_recogniser
from sottovoce.privacy.accounting import rdp_epsilon
from sottovoce.privacy.events import repeated
from sottovoce.privacy.plan import Plan
from sottovoce.training.parent_model import default_run_folder, resolve_parent_model
from sottovoce.training.run_data import open_named_store
from sottovoce.training.run_folder import open_run
from sottovoce.training.start_model import split_trained_part
from sottovoce.training.suites import select_runs

RECIPES, OVERRIDES = "recipes", "overrides of recipes"
NAMES = (
    "demo",
    "demo-clipping/global",
    "demo-clipping/seed",
    "benchmark/clipping/dim",
    "pelikan2025/appendix-h5/mlp-weight-2",
)
POPULATION = 400

_LAUGHS = "[&a0 [x, x, x, x, x, x, x, x, x], " + ", ".join(
    f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)
)
NUMBERS = (
    *("-1", "0", "1", "2", "3", "0.5", "0.999", "7", "100", "10_000", "1e6", "1e9", "1e15", "1e-3", "1e-9", "1e-15"),
    *("1e308", "-1e308", "1e-308", "5e-324", ".inf", "-.inf", ".nan", "1e30", "1e-29", "1e18", "9223372036854774784"),
    *(
        "9223372036854775807",
        "-9223372036854775809",
        "9" * 30,
        "9" * 400,
        "9" * 5_000,
        "'" + "9" * 400 + "'",
        "'1e400'",
    ),
)
# What a slip, a script or a joker writes where a setting is due.
VALUES = (
    *NUMBERS,
    *("", "null", "true", "x", "''", "[]", "{}", "[1, 2]", "{a: b}", "{name: [1]}", "{name: x, 1: 2}", "[[]]"),
    *("2001-99-99", "!!int x", "!!bool x", "!!binary x", "!!python/name:os.system x", "&a [*a]", "*x", "*", "{", "\t"),
    *('"\\0"', '"\\ud800"', "\x1b[31m", "a" * 300, "a" * 5_000, "../" * 30, "/", "/dev/null", ".", "..", "é" * 200),
    *("[" * 2_000 + "]" * 2_000, "{a: " * 200 + "1" + "}" * 200, f"{_LAUGHS}]", "os:system", ".x:y", "lora(r=0)"),
)


def cases(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    """Half of them damaged files, half overrides."""
    _start()  # made once, before the children
    texts = {name: as_yaml(load_experiment(name)) for name in NAMES}
    for number in range(count):
        rng = stream(seed, RECIPES, number)
        name = NAMES[int(rng.integers(len(NAMES)))]
        place = folder / f"run-{number}"
        if number % 2:
            overrides = [_override(name, rng) for _ in range(1 if rng.random() < 0.8 else 2)]
            words = f"case {number}, {name} with {', '.join(one[:60] for one in overrides)}"
            yield Case(OVERRIDES, words, partial(_understood, name, overrides, place))
        else:
            path = folder / f"recipe-{number}.yaml"
            kinds = (*damage.TEXT, _another_value, _another_value, _another_value)
            kind = kinds[int(rng.integers(len(kinds)))]
            path.write_bytes(kind(texts[name].encode(), rng))
            words = f"case {number}, {kind.__name__} of {name}"
            yield Case(RECIPES, words, partial(_understood, str(path), (), place))


def _override(name: str, rng: np.random.Generator) -> str:
    """Any key of the recipe, or one in an unexpected place, with any value."""
    keys = _keys(name)
    leaves = [key for key, value in keys.items() if not isinstance(value, dict)]
    key = leaves[int(rng.integers(len(leaves)))]
    if rng.random() < 0.1:
        key = (f"{key}.x", key.rpartition(".")[0], "", ".", "a." * 3_000 + "a")[int(rng.integers(5))]
    values = NUMBERS if not isinstance(keys.get(key), str) and rng.random() < 0.7 else VALUES
    return f"{key}={values[int(rng.integers(len(values)))]}"


@cache
def _keys(name: str) -> Mapping[str, object]:
    loaded = load_experiment(name)
    later = {"federation.privacy.target_epsilon": 8.0, "federation.rescale_norms": 2.0, "model.layers": 2}
    recipe = load_recipe("demo-clipping/global") if isinstance(loaded, Suite) else loaded
    return later | dict(_paths(recipe.model_dump(mode="json")))


def _paths(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in content.items():
        yield before + key, value
        if isinstance(value, dict):
            yield from _paths(value, f"{before}{key}.")


def _another_value(data: bytes, rng: np.random.Generator) -> bytes:
    lines = data.decode().splitlines()
    at = int(rng.integers(len(lines)))
    key, colon, _ = lines[at].partition(":")
    if colon and rng.random() < 0.1:  # the key itself, such as a run's label
        key = key[: len(key) - len(key.lstrip())] + VALUES[int(rng.integers(len(VALUES)))]
    lines[at] = f"{key}: {VALUES[int(rng.integers(len(VALUES)))]}"
    return "\n".join(lines).encode(errors="replace")


def _understood(name: str, overrides: Sequence[str], folder: Path) -> object:
    """From the text to the plan of every run, as `sottovoce run` goes, up to where speech is read."""
    experiment = load_experiment(name, overrides)
    if isinstance(experiment, Recipe):
        return _settled(experiment, folder)
    suite = select_runs(experiment, None)
    recipes = {label: load_recipe(run.recipe, run.overrides) for label, run in suite.runs.items()}
    return {label: _settled(recipe, folder / label) for label, recipe in recipes.items()}


def _settled(recipe: Recipe, folder: Path) -> object:
    text = as_yaml(recipe)
    with open_run(folder, config=text, inputs={}, resume=True):
        default_run_folder("x/y.yaml", folder)
    shrink_recipe(recipe)
    find_family(recipe.model.family).shapes(recipe.model.settings(tokens=29))
    for place in (recipe.data.store, recipe.data.dev.rpartition(":")[0] or "x"):
        try:
            open_named_store(place, folder)
        except InputError as error:
            if "no store at" not in str(error):
                raise
    settings = recipe.central if recipe.central is not None else recipe.federated
    steps = settings.steps or 1_000  # those of epochs follow from the data
    schedule = (recipe.central or recipe.federated.server).built_schedule()
    rates = [schedule(step) for step in (0, 1, steps // 2, steps)]
    if recipe.central is not None:
        return text, rates
    start = recipe.federated.seed_model
    if start is not None and not Path(start).is_absolute():
        resolve_parent_model(start, runs=folder, root_seed=recipe.people_seed)
    recipe.federated.clients.population(recipe.data)
    return text, rates, _spent(recipe)


def _spent(recipe: Recipe) -> float:
    settings = recipe.federated
    private = settings.privacy.settings(
        population_size=settings.privacy.population_size or max(POPULATION, settings.cohort_size),
        cohort_size=settings.cohort_size,
        privacy_unit="speaker",
        no_unit_reason=None,
        users_also_in_seed=0,
        root_seed=1,
        central_steps=settings.steps,
    )
    plan = Plan(private, split_trained_part(recipe, _start()).layout)
    return rdp_epsilon(repeated(plan.event, settings.steps), private.delta)


@cache
def _start() -> Recogniser:
    model = load_recipe("demo-clipping/global").model
    tokens = CharacterTokens.seen_in(["abcdefghijklmnopqrstuvwxyz' "])
    return create_recogniser(
        find_family(model.family), model.settings(tokens=29), tokens, language="en", generator=torch_stream(1, "start")
    )
