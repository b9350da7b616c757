"""The order in which people number things: `chapter_2` before `chapter_10`."""

import re
from typing import Any

_NUMBER = re.compile(r"([0-9]+)")


def natural_key(name: str) -> tuple[Any, ...]:
    """A key to sort names by, in which a run of digits counts as the number it is.

    >>> sorted(["10_end", "essay_02_pope", "9_end", "1-25", "essay_1_pope", "1-3"], key=natural_key)
    ['1-3', '1-25', '9_end', '10_end', 'essay_1_pope', 'essay_02_pope']
    """
    parts = _NUMBER.split(name)
    # Texts stand at even places and numbers at odd ones, so that like is compared with like. A number is its length
    # and its digits, which are not limited as those of an integer are.
    numbers = [(len(digits), digits) for digits in (part.lstrip("0") for part in parts[1::2])]
    return (*(item for pair in zip(parts[::2], [*numbers, (0, "")], strict=True) for item in pair), name)
