"""Whose mistake it is.

`InputError` means "the user can mend this": the command line prints it as a single line and exits with 2. Every other
exception is a bug of ours and keeps its traceback. Ours are assertions, but for those that stand between a user and a
promise: `promise` raises under `python -O` too, which leaves `assert` out.
"""


class InputError(ValueError):
    """A user's mistake: what is wrong, where, and what was expected, in one line."""


class BrokenPromise(AssertionError):
    """A mistake of ours that would break what users were promised; nothing is released."""


def told_import(error: Exception, module: str) -> str:
    """Why somebody's own `module` cannot be imported, and what helps where it is only not found."""
    is_lost = isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0])
    return f"{error}; is its folder in PYTHONPATH?" if is_lost else str(error)


def promise(kept: bool, broken: str) -> None:
    """Raise `BrokenPromise` with the words `broken` unless `kept`."""
    if not kept:
        raise BrokenPromise(broken)
