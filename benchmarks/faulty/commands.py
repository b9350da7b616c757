"""Cases that are commands: run in this process, as `sottovoce …` would be, and judged by how they end."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from faulty.cases import Case
from sottovoce.cli import main
from sottovoce.cli.serve import NEEDS

REFUSED = (1, 2)  # 1 where some of what was asked for could be done


@dataclass(frozen=True)
class Asked:
    """A command, the folder that it is run in, and what it reads from a pipe.

    `is_counted` says of what it printed whether what is wrong was counted there.
    """

    words: tuple[object, ...]
    folder: Path
    piped: bytes = b""
    is_counted: Callable[[str], bool] = lambda _: False


def command_case(what: str, label: str, asked: Asked, *, due: bool) -> Case:
    """A command; where a refusal is `due`, to end with exit code 0 is a silent loss."""
    return Case(
        what, f"{label}: sottovoce {' '.join(map(str, asked.words))[:200]}", partial(_tried, asked), lambda _: due
    )


def _tried(asked: Asked) -> object:
    """What a command printed that did something; None where it was refused in a few lines."""
    os.chdir(asked.folder)
    code, printed, errors = run(asked.words, asked.piped)
    if code == 0 and asked.is_counted(printed):
        return None
    if code == 0 or NEEDS in errors:  # a missing extra is reported after all other checks
        return printed or "nothing"
    lines = [line for line in errors.splitlines() if line.startswith("error:")]
    is_usage = errors.startswith("Usage:")
    if code not in REFUSED or not errors.strip() or "Traceback" in errors or (len(lines) > 1 and not is_usage):
        raise AssertionError(f"exit code {code}: {errors[-500:]!r}")
    return None


def run(words: Sequence[object], piped: bytes = b"") -> tuple[int, str, str]:
    """The exit code of a command, its output and its errors; what else it raises goes on."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as pipe:
        pipe.write(piped)
        pipe.seek(0)
        before = [os.dup(number) for number in range(3)]
        argv, stdin = sys.argv, sys.stdin
        for number, file in enumerate((pipe, out, err)):
            os.dup2(file.fileno(), number)
        sys.stdin = os.fdopen(0, closefd=False)  # what was read of another pipe is not held any more
        sys.argv = ["sottovoce", *map(str, words)]
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.argv, sys.stdin = argv, stdin
            for number, kept in enumerate(before):
                os.dup2(kept, number)
                os.close(kept)
        found = []
        for file in (out, err):
            file.seek(0)
            found.append(file.read(1 << 20).decode(errors="replace"))
        return code, found[0], found[1]
