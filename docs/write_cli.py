"""Write docs/cli.md, the reference of the command line, from the commands themselves: `make docs`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from typer.main import get_command

from sottovoce.cli import app

PAGE = Path(__file__).parent / "cli.md"
HEAD = """\
# The command line

Every command with its arguments and options, as `sottovoce COMMAND --help` prints them. [The tour](guides/tour.md)
shows them at work. A user's mistake is one line on standard error and exit code 2; Ctrl-C ends a run after the present
round, saved. This page is written by `make docs` from the commands.
"""
EXAMPLE = re.compile(r"^Examples?: (.+)$", re.M)


def page() -> str:
    return "\n".join([HEAD, *(_section(words, command) for words, command in _leaves(get_command(app), "sottovoce"))])


def _leaves(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by all of its words, in the order of the alphabet."""
    below = getattr(command, "commands", None)
    if not below:
        yield words, command
        return
    for name in sorted(below):
        yield from _leaves(below[name], f"{words} {name}")


def _section(words: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    usage = " ".join([words, *map(_argument, arguments), *(["[OPTIONS]"] if options else [])])
    text = re.sub(r"\n{3,}", "\n\n", EXAMPLE.sub("", command.help or "")).strip()
    examples = EXAMPLE.findall(command.help or "")
    explained = [one for one in arguments if one.help]
    rows = [_row(f"`{_value(one)}`", one) for one in explained] + [_row(_option(one), one) for one in options]
    table = ["| argument or option | default | meaning |\n|---|---|---|\n" + "\n".join(rows)] if rows else []
    first, _, rest = text.partition("\n\n")
    shown = [f"Example:\n\n```\n{example}\n```" for example in examples]
    parts = [f"## `{words}`", first, f"```\n{usage}\n```", rest, *shown, *table]
    return "\n\n".join(part for part in parts if part) + "\n"


def _argument(one: Any) -> str:
    """As in a line of usage."""
    several = "…" if one.nargs == -1 and not _value(one).endswith("…") else ""
    return f"{_value(one)}{several}" if one.required else f"[{_value(one)}{several}]"


def _value(one: Any) -> str:
    """What stands for a value."""
    if one.metavar:
        return str(one.metavar)
    if one.param_type_name == "argument":
        return str(one.name).upper()
    if isinstance(one.type, click.Choice):
        return "|".join(map(str, one.type.choices))
    name = re.sub(r" range$", "", str(one.type.name))
    return {"integer": "NUMBER", "float": "NUMBER"}.get(name, name.upper())


def _option(one: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*one.opts, *one.secondary_opts])
    return names if one.is_flag else f"{names} `{_value(one)}`"


def _row(shown: str, one: Any) -> str:
    cells = [shown, _default(one), (one.help or "").replace("\n", " ")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(one: Any) -> str:
    if one.required:
        return "required"
    if one.is_flag if one.param_type_name == "option" else False:
        return "on" if one.default is True and one.secondary_opts else ""
    is_plain = isinstance(one.default, str | int | float | Path) and one.default != ""
    return f"`{one.default}`" if is_plain else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
