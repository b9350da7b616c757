import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from sottovoce.cli import console, main


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def sottovoce(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs the command line in this process: loading everything anew for each case would take seconds.

    However slow the machine is, no line of progress comes among what is said.
    """
    monkeypatch.setattr(console, "LINE_EVERY", math.inf)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # as `main` has it, and not beyond this test

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["sottovoce", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code or 0, *capsys.readouterr())  # type: ignore[call-arg]

    return run
