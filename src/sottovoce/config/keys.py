"""Every key that a recipe may have: where it stands, what it may be, its default, and what it means.

The keys are those of the sections themselves; the meanings stand beside them in `keys.yaml`.
"""

import inspect
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sottovoce.config.recipe import Recipe
from sottovoce.models.family import REGISTERED, find_family
from sottovoce.optimisers import OPTIMISERS, SCHEDULES

REQUIRED = "required"
_PLAIN = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """One key of a section. `sections` are what may stand below it."""

    name: str
    expected: str
    default: str
    meaning: str
    sections: tuple[type, ...]


@dataclass(frozen=True)
class SectionKeys:
    """A section, the places in a recipe where it may stand, and its keys."""

    title: str
    places: tuple[str, ...]
    keys: tuple[Key, ...]


def list_sections() -> list[SectionKeys]:
    """Every section of a recipe once, in the order in which a reader comes to it."""
    places: dict[type, list[str]] = {}
    _visit(Recipe, "", places)
    return [SectionKeys(title_of(kind), tuple(at), list_section_keys(kind)) for kind, at in places.items()]


def _visit(kind: type, place: str, places: dict[type, list[str]]) -> None:
    places.setdefault(kind, []).append(place)
    for key in list_section_keys(kind):
        for below in key.sections:
            _visit(below, f"{place}.{key.name}".lstrip("."), places)


@cache
def list_section_keys(kind: type) -> tuple[Key, ...]:
    """The keys of one section, in its own order."""
    meanings = _meanings().get(title_of(kind), {})
    return tuple(
        Key(name, expected(annotation), default, meanings.get(name, ""), tuple(_sections(kind, name, annotation)))
        for name, annotation, default in _settings(kind)
    )


@cache
def _meanings() -> Mapping[str, Mapping[str, str]]:
    found: dict[str, dict[str, str]] = yaml.safe_load(
        resources.files("sottovoce.config").joinpath("keys.yaml").read_text(encoding="utf-8")
    )
    return found


def list_described_keys() -> set[tuple[str, str]]:
    """Which keys of which sections `keys.yaml` describes."""
    return {(title, name) for title, meanings in _meanings().items() for name in meanings}


def title_of(kind: type) -> str:
    """What a section is called in `keys.yaml`: as its class, and a family's options by the family."""
    own = {find_family(name).Options: name for name in REGISTERED}
    return f"model {own[kind]}" if kind in own else kind.__name__


def _settings(kind: type) -> Iterator[tuple[str, Any, str]]:
    """Name, annotation and default of every setting."""
    if issubclass(kind, BaseModel):
        for name, info in kind.model_fields.items():
            yield (
                name,
                info.annotation,
                REQUIRED if info.is_required() else _format_default(info.get_default(call_default_factory=True)),
            )
        return
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    for own in fields(kind):
        given = own.default if own.default_factory is MISSING else own.default_factory()
        yield _name_in_yaml(kind, own.name), hints[own.name], REQUIRED if given is MISSING else _format_default(given)


@cache
def _aliases(kind: type) -> Mapping[str, str]:
    """Names of settings that Python cannot have, by those that it has instead."""
    hints = get_type_hints(kind, include_extras=True)
    told = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {
        name: one.alias
        for name, metadata in told.items()
        for one in metadata
        if isinstance(one, FieldInfo) and one.alias is not None
    }


def _name_in_yaml(kind: type, name: str) -> str:
    return _aliases(kind).get(name, name)


def _value_of(section: Any, name: str) -> Any:
    """The value of the setting that YAML calls `name`."""
    kind: Any = type(section)
    ours = {alias: own for own, alias in _aliases(kind).items()}
    return getattr(section, ours.get(name, name))


def _format_default(default: Any) -> str:
    """A default as YAML writes it; of a section that its keys have their own."""
    if is_section(type(default)):
        return "its own"
    return in_yaml(default)


def in_yaml(value: Any) -> str:
    """A value in one line of YAML.

    >>> in_yaml((1, None)), in_yaml({"name": "sgd"}), in_yaml(float("inf"))
    ('[1, null]', '{name: sgd}', '.inf')
    """
    written = yaml.safe_dump(plain(value), default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return written.removesuffix("\n").removesuffix("\n...")


def plain(value: Any) -> Any:
    """Settings as plain data."""
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if is_dataclass(value) and not isinstance(value, type):
        return {_name_in_yaml(type(value), own.name): plain(getattr(value, own.name)) for own in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple | list) else value


def is_section(kind: Any) -> bool:
    """Whether `kind` holds settings of its own."""
    return inspect.isclass(kind) and (issubclass(kind, BaseModel) or is_dataclass(kind))


def _sections(kind: type, name: str, annotation: Any) -> Iterator[type]:
    if kind is Recipe and name == "model":
        yield from (find_family(family).Options for family in REGISTERED)
    yield from (one for one in list_choices(annotation) if is_section(one))


def list_choices(annotation: Any) -> Iterator[Any]:
    """What a value may be, one by one."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from list_choices(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from list_choices(one)
    elif origin is tuple and is_section(get_args(annotation)[0]):
        yield get_args(annotation)[0]
    else:
        yield annotation


def expected(annotation: Any) -> str:
    """What a value may be, in words.

    >>> expected(int | None), expected(Literal["a", "b"]), expected(tuple[str, ...])
    ('a whole number or null', 'a, b', 'a list, each a text')
    """
    words = dict.fromkeys(_word(one) for one in list_choices(annotation))
    return " or ".join(words)


def _word(kind: Any) -> str:
    origin = get_origin(kind)
    if kind is type(None):
        return "null"
    if origin is Literal:
        return ", ".join(in_yaml(value) for value in get_args(kind))
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return ", ".join(str(one.value) for one in kind)
    if origin is tuple:
        return f"a list, each {expected(get_args(kind)[0])}"
    if is_section(kind) or kind is Any:
        return "a section"
    return _PLAIN.get(kind, "names and values")


def render_keys_page() -> str:
    """The page of the docs that lists all keys."""
    lines = [
        "# Keys of a recipe",
        "",
        "Everything that a recipe may say, with what is taken where it says nothing. Written by "
        "`sottovoce recipes keys`; `sottovoce recipes show NAME` prints one recipe with all of it filled in.",
        "",
    ]
    sections = list_sections()
    places = Counter(place for section in sections for place in section.places)
    for section in sections:
        lines += [f"## {_heading(section, places)}", "", "| key | expected | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{key.name}` | {key.expected} | {_quoted(key.default)} | {key.meaning} |" for key in section.keys]
        lines.append("")
    for title, registry in (("Optimisers", OPTIMISERS), ("Schedules", SCHEDULES)):
        lines += [f"## {title}", "", "| name | settings |", "|---|---|"]
        lines += [f"| `{name}` | {_parameters(kind)} |" for name, kind in registry.items()]
        lines += ["| `module:Name` | one of your own ([how](guides/extending.md)) |", ""]
    return "\n".join(lines).rstrip() + "\n"


def _heading(section: SectionKeys, sharing: Mapping[str, int]) -> str:
    """Where a section stands; one of several that may stand there is named with its first key."""
    if section.title.startswith("model "):
        return f"`model`, with `family: {section.title.removeprefix('model ')}`"
    places = ", ".join(f"`{place}`" for place in section.places if place) or "The whole"
    is_shared = any(sharing[place] > 1 for place in section.places)
    return f"{places}, with `{section.keys[0].name}`" if is_shared else places


def _quoted(default: str) -> str:
    return default if default in (REQUIRED, "its own") else f"`{default}`"


def _parameters(kind: type) -> str:
    return ", ".join(f"`{name}` ({default})" for name, _, default in _settings(kind)) or "none"


def render_commented_recipe(recipe: Recipe) -> str:
    """A recipe with every default, as YAML that is read back the same, and behind each key what it means."""
    return "\n".join(_lines(recipe, indent="")) + "\n"


def _lines(section: Any, *, indent: str) -> Iterator[str]:
    for key in list_section_keys(type(section)):  # type: ignore[arg-type]  # types are hashable
        value, meaning = _value_of(section, key.name), f"  # {key.meaning}" if key.meaning else ""
        if is_section(type(value)):
            yield f"{indent}{key.name}:{meaning}"
            yield from _lines(value, indent=indent + "  ")
        else:
            yield f"{indent}{key.name}: {in_yaml(value)}{meaning}"
