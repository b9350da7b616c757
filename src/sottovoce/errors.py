"""The one exception that means "the user can mend this".

The command line prints it as a single line and exits with 2; every other exception is a bug of ours and
keeps its traceback.
"""


class InputError(ValueError):
    """A user's mistake: what is wrong, where, and what was expected, in one line."""
