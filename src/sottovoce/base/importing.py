"""What recipes call by name: ours by a word, anybody's as `module:Name`.

To import a module is to run it. So a module is imported because the user names it: in a recipe that they run, on the
command line, from Python. What others have written (a model's folder, a run's `config.yaml`) is read within
`refuse_imports`, where only those names are followed that the user has named before.
"""

import dataclasses
import difflib
import importlib
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from sottovoce.base.errors import InputError

T = TypeVar("T")


_named: set[str] = set()  # what the user has named in this process
_advice: ContextVar[str | None] = ContextVar("advice", default=None)  # None: names are followed


def named_imports() -> list[str]:
    """What the user has named so far in this process, for one that works for it."""
    return sorted(_named)


@contextmanager
def refuse_imports(advice: str) -> Iterator[None]:
    """Within, `import_named` refuses what the user has not named yet; `advice` says what they can do about it.

    `{name}` in the advice stands for the name.
    """
    token = _advice.set(advice)
    try:
        yield
    finally:
        _advice.reset(token)


def import_named(name: str, *, called: str | None = None) -> Any:
    """What `module:Name` means; a line about it begins with what it is `called`."""
    called = f"{name}:" if called is None else called
    if (advice := _advice.get()) is not None and name not in _named:
        raise InputError(
            f"{called} is code from outside this package, which is imported only where you name it yourself: "
            + advice.replace("{name}", name)
        )
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(f"{called} cannot be imported ({_explain(error, module)})") from None
    except (Exception, SystemExit) as error:  # of the module's own; where it was raised helps who wrote it
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{called} cannot be imported ({why}, {place.filename}:{place.lineno})") from None
    _named.add(name)
    return found


def _explain(error: Exception, module: str) -> str:
    """Why somebody's own `module` cannot be imported, and what helps where it is only not found."""
    is_lost = isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0])
    helps = "is its folder in PYTHONPATH? `python -m sottovoce` also looks in the present folder"
    return f"{error}; {helps}" if is_lost else str(error)


def build_from_settings(kind: str, made: type[T], name: str, settings: Mapping[str, Any]) -> T:
    """One of the dataclass `made`, which a recipe calls `name`, with these settings and no others than it knows."""
    assert dataclasses.is_dataclass(made)
    fields = {field.name: field for field in dataclasses.fields(made)}
    for setting in settings:
        if setting not in fields:
            raise InputError(f"{kind} {name}: unknown setting {setting!r}{suggest_nearest(setting, fields)}")
    for setting, field in fields.items():
        if field.default is dataclasses.MISSING and setting not in settings:
            raise InputError(f"{kind} {name}: setting {setting!r} is missing")
    return made(**settings)


def suggest_nearest(name: str, known: Collection[str]) -> str:
    """A hint at what was meant, and all that there is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return (f", did you mean {near[0]!r}?" if near else ",") + f" (known: {', '.join(known)})"


def import_extra(module: str, *, extra: str, called: str) -> Any:
    """A package that only an extra of ours installs; a line about it begins with what needs it (`called`)."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{called} needs {module}: pip install 'sottovoce[{extra}]' ({error})") from None
