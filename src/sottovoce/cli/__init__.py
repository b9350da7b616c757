"""The command line: parse, call, print. Everything it can do is a function elsewhere."""

import errno
import io
import math
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from sottovoce import __version__
from sottovoce.base.errors import InputError
from sottovoce.cli import (
    audit,
    compare,
    evaluate,
    export,
    join,
    keys,
    ledger,
    models,
    personalise,
    plan,
    prepare,
    probe,
    recipes,
    report,
    run,
    serve,
    stats,
    tokens,
    transcribe,
)
from sottovoce.cli.console import stderr

ABOUT = (
    "Train speech recognisers on speech that never leaves its speaker, and prove a bound on what they reveal of anyone."
)

app = typer.Typer(
    name="sottovoce",
    help=ABOUT,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    *(stats.stats, tokens.tokens, run.run, recipes.recipes, serve.serve, join.join, plan.plan, audit.audit),
    *(ledger.ledger, report.report, evaluate.evaluate, compare.compare, transcribe.transcribe),
    *(personalise.personalise, probe.probe),
    *(export.export, export.verify),
):
    app.command()(_command)
for _name, _group in {
    "prepare": prepare.app,
    "node": join.node,
    "import": models.import_app,
    "keys": keys.app,
}.items():
    app.add_typer(_group, name=_name)

_USERS_MISTAKES = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sottovoce {__version__}")
        raise typer.Exit


@app.callback(help=ABOUT)
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2, a traceback means a bug of ours."""
    # Before torch is loaded: its threads then sleep while they wait for one another. By default they spin, which on a
    # busy machine takes the core from the very thread that is waited for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A file's name need not be UTF-8; it is printed with what it has instead, as on standard error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            _refuse_nan(_join_help_lines(typer.main.get_command(app)))()
        finally:
            sys.stdout.flush()  # not left to the end of the program, where errors are no longer reported
    except InputError as error:
        _exit_with_error(str(error))
    except OSError as error:
        # A full disk, a missing permission or a wrong path is the user's to correct; anything else keeps its traceback.
        if error.errno not in _USERS_MISTAKES:
            raise
        if error.filename is None:  # every file has a name by now
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit_with_error(f"{error.filename or 'standard output'}: {error.strerror}")


def _join_help_lines(command: Any) -> Any:
    """The same, each paragraph of its help one line, for a terminal of any width: docstrings are broken at ours."""
    command.help = re.sub(r"(?<=\S) *\n *(?=\S)", " ", command.help or "")
    if isinstance(command, TyperGroup):
        for below in command.commands.values():
            _join_help_lines(below)
    return command


def _refuse_nan(command: Any) -> Any:
    """The same, refusing NaN: it is neither too large nor too small for any check."""
    if isinstance(command, TyperGroup):
        for below in command.commands.values():
            _refuse_nan(below)
    elif isinstance(command, TyperCommand) and command.callback is not None:
        command.callback = partial(_call, command, command.callback)
    return command


def _call(command: TyperCommand, called: Callable[..., Any], **options: Any) -> Any:
    for parameter in command.params:
        value = options.get(parameter.name or "")
        if isinstance(value, float) and math.isnan(value):
            raise InputError(f"{parameter.opts[0]} nan: expected a number")
    return called(**options)


def _exit_with_error(message: str) -> NoReturn:
    stderr.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)
