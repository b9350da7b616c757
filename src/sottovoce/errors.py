"""Whose mistake it is.

`InputError` means "the user can mend this": the command line prints it as a single line and exits with 2. Every other
exception is a bug of ours and keeps its traceback. Ours are assertions, except where a guarantee to users depends on
it: `check_invariant` raises under `python -O` too, which leaves `assert` out.
"""


class InputError(ValueError):
    """A user's mistake: what is wrong, where, and what was expected, in one line."""


class InvariantError(AssertionError):
    """A mistake of ours that would break a guarantee to users; nothing is released."""


def told_import(error: Exception, module: str) -> str:
    """Why somebody's own `module` cannot be imported, and what helps where it is only not found."""
    is_lost = isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0])
    return f"{error}; is its folder in PYTHONPATH?" if is_lost else str(error)


def check_invariant(holds: bool, problem: str) -> None:
    """Raise `InvariantError` with the words `problem` unless it `holds`."""
    if not holds:
        raise InvariantError(problem)
