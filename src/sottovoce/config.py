"""Recipes: YAML in, one validated object out. Everything a run can be told is named here.

Settings live beside the code that they set, as frozen dataclasses; this file only puts them together (so it stands
above those modules, not below them: docs/decisions/004). An unknown key is an error that names the nearest known one.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sottovoce.audio.augment import FASTEST, SLOWEST, NoiseSettings, SpecAugmentSettings
from sottovoce.errors import InputError
from sottovoce.models.ctc_transformer import SIZES, Settings, named_settings
from sottovoce.models.positions import Cape
from sottovoce.optimisers import Optimiser, Schedule, build_optimiser, build_schedule
from sottovoce.text.tokens import DEFAULT_PIECES
from sottovoce.users import SeedPart


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SyntheticCorpus(_Section):
    """A corpus that a run makes by itself when its store is not there yet (`sottovoce prepare synthetic`)."""

    task: str
    users: int = Field(ge=3)
    hours: float | None = Field(default=None, gt=0)
    seed: int = 1
    language: str = "en"


class ManifestCorpus(_Section):
    """A corpus in a table (`sottovoce prepare tsv`); `$SOTTOVOCE_DATA` may stand in the paths."""

    manifests: tuple[str, ...]
    language: str = "en"
    hold_out: Mapping[str, int] = Field(default_factory=dict)
    seed: int = 1


class Data(_Section):
    """What is trained on, chosen on and tested on. A place is `STORE:split`, or `split` of `store`."""

    store: str
    prepare: SyntheticCorpus | ManifestCorpus | None = None
    train: tuple[str, ...] = ("train",)
    seed_part: SeedPart | None = None
    part: Literal["seed", "federation", "all"] = "all"
    dev: str = "dev"
    test: tuple[str, ...] = ("test",)
    longest_seconds: float = Field(default=36.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> "Data":
        if (self.part == "all") != (self.seed_part is None):
            raise ValueError(f"part={self.part!r} and seed_part belong together: give both or neither")
        return self


class TokenSettings(_Section):
    kind: Literal["characters", "sentence_pieces"] = "characters"
    size: int = Field(default=DEFAULT_PIECES, ge=2)
    file: str | None = None  # made by `sottovoce tokens`; then the others do not count


class ModelSettings(_Section):
    """A named size and what differs from it."""

    size: str = "base"
    dropout: float = Field(default=0.3, ge=0, lt=1)
    layer_drop: float = Field(default=0.3, ge=0, lt=1)
    norm: Literal["pre", "post"] = "pre"
    positions: Literal["cape", "sinusoidal"] = "cape"
    cape: Cape = Cape()

    @model_validator(mode="after")
    def _check(self) -> "ModelSettings":
        if self.size not in SIZES:
            raise ValueError(f"size={self.size!r}, expected one of {', '.join(SIZES)}")
        return self

    def settings(self, *, tokens: int) -> Settings:
        return named_settings(tokens=tokens, **{name: getattr(self, name) for name in ModelSettings.model_fields})


class Augmentation(_Section):
    """What is done to speech in training: in time (speeds, noise) and on the features (SpecAugment)."""

    spec_augment: SpecAugmentSettings | None = SpecAugmentSettings()
    speeds: tuple[float, ...] = ()
    noise: NoiseSettings | None = None

    @model_validator(mode="after")
    def _check(self) -> "Augmentation":
        if wrong := [speed for speed in self.speeds if not SLOWEST <= speed <= FASTEST]:
            raise ValueError(f"speeds has {wrong[0]}, expected numbers from {SLOWEST} to {FASTEST}")
        return self


class Central(_Section):
    """Training on one pile of data, `batch_seconds` a step and process."""

    steps: int = Field(ge=1)
    batch_seconds: float = Field(gt=0, allow_inf_nan=False)
    optimiser: Mapping[str, Any]
    schedule: Mapping[str, Any]
    clip_gradients: float = Field(default=1.0, gt=0)
    augment: Augmentation = Augmentation()
    evaluate_every: int = Field(default=1000, ge=1)
    checkpoint_every: int = Field(default=1000, ge=1)
    log_every: int = Field(default=50, ge=1)
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    start_from: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "Central":
        self.built_optimiser()
        self.built_schedule()
        return self

    def built_optimiser(self) -> Optimiser:
        return build_optimiser(**self.optimiser)

    def built_schedule(self) -> Schedule:
        return build_schedule(**self.schedule)


class Paper(_Section):
    """Which published numbers a recipe reproduces, so that a report can put ours beside them."""

    source: str
    place: str
    wer: Mapping[str, float] = Field(default_factory=dict)


class Recipe(_Section):
    """One experiment."""

    about: str
    paper: Paper | None = None
    seed: int = 1
    data: Data
    tokens: TokenSettings = TokenSettings()
    model: ModelSettings = ModelSettings()
    central: Central


def recipe_names() -> list[str]:
    """The names of all recipes that come with the package."""
    root = _recipe_folder()
    found = (path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))
    return sorted(name for name in found if not name.split("/")[-1].startswith("_"))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe `name` (of the package, or a YAML file), with `key=value` overrides such as `central.steps=100`.

    >>> load_recipe("synthetic/central", ["seed=7"]).seed
    7
    """
    content = _read(name)
    for override in overrides:
        _override(content, override)
    return validate(content, where=name)


def validate(content: Mapping[str, Any], *, where: str) -> Recipe:
    """A recipe from plain data; one clear line for the first mistake."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise InputError(f"recipe {where}: {_first_line(error)}") from None


def as_yaml(recipe: Recipe) -> str:
    """The whole recipe, defaults included, as YAML that `load_recipe` reads back."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _recipe_folder() -> Path:
    return Path(str(resources.files("sottovoce"))) / "recipes"


def _read(name: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The content of a recipe on top of what it extends."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else _recipe_folder() / f"{name}.yaml"
    if name in seen:
        raise InputError(f"recipe {name}: it extends itself by way of {' → '.join(seen)}")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader) or {}
    except FileNotFoundError:
        near = difflib.get_close_matches(name, recipe_names(), n=1, cutoff=0.5)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise InputError(f"no recipe {name!r}{hint} (`sottovoce recipes` lists them; or give a .yaml file)") from None
    except OSError as error:
        raise InputError(f"recipe {name}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {name}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise InputError(f"recipe {name}: expected keys and values at the top level")
    base = content.pop("extends", None)
    if not (base is None or isinstance(base, str)):
        raise InputError(f"recipe {name}: extends={base!r}, expected the name of one recipe")
    return _merged(_read(base, (*seen, name)), content) if base else content


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` over `base`, key by key; a mapping that names a thing (`name:`) takes the place of the base's."""
    result = dict(base)
    for key, value in top.items():
        old = result.get(key)
        joins = isinstance(value, dict) and isinstance(old, dict) and "name" not in value
        result[key] = _merged(old, value) if joins else value  # type: ignore[arg-type]  # joins says old is a dict
    return result


def _override(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise InputError(f"override {override!r}: expected key=value, such as central.steps=100")
    *path, last = key.split(".")
    for part in path:
        content = content.setdefault(part, {})
        if not isinstance(content, dict):
            raise InputError(f"override {override!r}: {part!r} is a value, not a section")
    try:
        content[last] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise InputError(f"override {override!r}: {text!r} is not readable as YAML") from None


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-6 as a number, as everybody means it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in ("SyntheticCorpus", "ManifestCorpus")]
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _known_keys(where[:-1])
        near = difflib.get_close_matches(where[-1], known, n=1, cutoff=0.5)
        return f"unknown key {'.'.join(where)!r}" + (
            f", did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
        )
    message = first["msg"].removeprefix("Value error, ")
    given = f", found {first['input']!r}" if not isinstance(first["input"], dict) and first["type"] != "missing" else ""
    return f"{'.'.join(where) or 'recipe'}: {message}{given}"


def _known_keys(path: Sequence[str]) -> list[str]:
    """The keys of the section at `path`."""
    section: Any = Recipe
    for part in path:
        if not (isinstance(section, type) and issubclass(section, BaseModel)) or part not in section.model_fields:
            return []
        section = section.model_fields[part].annotation
        options = [t for t in getattr(section, "__args__", ()) if t is not type(None)]
        section = options[0] if options else section
    if is_dataclass(section):
        return [field.name for field in fields(section)]
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []
