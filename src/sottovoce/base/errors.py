"""Whose mistake it is.

`InputError` is a user's: the command line prints it as one line and exits with 2. Every other exception is a bug of
ours and keeps its traceback. Ours are assertions; `check_invariant` is for those that protect users' privacy or data,
because it raises under `python -O` too, which leaves `assert` out.
"""


class InputError(ValueError):
    """A user's mistake: what is wrong, where, and what was expected, in one line."""


class InvariantError(AssertionError):
    """A bug of ours that would break a guarantee to users; nothing is released."""


def check_invariant(holds: bool, otherwise: str) -> None:
    """Raise `InvariantError` with the message `otherwise` unless it `holds`."""
    if not holds:
        raise InvariantError(otherwise)
