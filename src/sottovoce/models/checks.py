"""What the settings of several families refuse alike."""

from collections.abc import Collection

from sottovoce.base.errors import InputError


def check_size(size: str, sizes: Collection[str], *, where: str = "") -> None:
    """Refuse a size that has no name; `where` says what it is a size of."""
    if size not in sizes:
        raise InputError(f"{where}size={size!r}, expected one of {', '.join(sizes)}")


def check_counts(settings: object, *names: str, least: int = 1) -> None:
    for name in names:
        if (value := getattr(settings, name)) < least:
            raise InputError(f"model: {name}={value}, expected at least {least}")


def check_token_count(tokens: int) -> None:
    if tokens < 2:
        raise InputError(f"model: tokens={tokens}, expected at least 2 (one token and the blank)")


def check_probabilities(settings: object, *names: str) -> None:
    for name in names:
        if not 0 <= (value := getattr(settings, name)) < 1:
            raise InputError(f"model: {name}={value}, expected a probability in [0, 1)")
