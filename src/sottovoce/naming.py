"""What recipes call by name: ours by a word, anybody's as `module:Name`."""

import dataclasses
import difflib
import importlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from sottovoce.errors import InputError, told_import

T = TypeVar("T")


def imported(name: str) -> Any:
    """What `module:Name` means."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(f"{name}: cannot be imported ({told_import(error, module)})") from None


def built(kind: str, made: type[T], name: str, settings: Mapping[str, Any]) -> T:
    """One of the dataclass `made`, which a recipe calls `name`, with these settings and no others than it knows."""
    assert dataclasses.is_dataclass(made)
    fields = {field.name: field for field in dataclasses.fields(made)}
    for setting in settings:
        if setting not in fields:
            raise InputError(f"{kind} {name}: unknown setting {setting!r}{nearest(setting, fields)}")
    for setting, field in fields.items():
        if field.default is dataclasses.MISSING and setting not in settings:
            raise InputError(f"{kind} {name}: setting {setting!r} is missing")
    return made(**settings)


def nearest(name: str, known: Collection[str]) -> str:
    """A hint at what was meant, and all that there is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return (f", did you mean {near[0]!r}?" if near else ",") + f" (known: {', '.join(known)})"
