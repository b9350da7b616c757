"""The units and the compose file under `deploy/`: what they start is what the command line knows."""

import re
import shlex
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.guides import DOCS
from typer.main import get_command

from sottovoce.cli import app

DEPLOY = DOCS.parent / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
_GIVEN = {"SERVER": "https://voices.example.org:9443", "DIGEST": "ab" * 32}


def parsed(words: list[str]) -> dict[str, Any]:
    """The options and arguments of a command; fails where it has others."""
    command: Any = get_command(app)
    while below := getattr(command, "commands", None):
        command = below[words.pop(0)]
    context = command.make_context("sottovoce", words)  # types and required options too
    return dict(context.params)


def filled(line: str) -> list[str]:
    return shlex.split(re.sub(r"\$\{(\w+)[^}]*\}", lambda found: _GIVEN[found[1]], line))


def unit(path: Path) -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text(encoding="utf-8"))
    return parser


def test_there_are_a_server_and_a_node() -> None:
    assert [path.stem for path in UNITS] == ["node", "server"]
    assert set(COMPOSE["services"]) == {"node", "server"}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_a_command_of_ours_and_stops_it_in_order(path: Path) -> None:
    service = unit(path)["Service"]
    program, *words = filled(service["ExecStart"])
    assert program.endswith("/.venv/bin/sottovoce")
    check(path.stem, parsed(words))
    assert (service["KillSignal"], service["RestartPreventExitStatus"]) == ("SIGINT", "2")
    if path.stem == "server":  # which ends with it when it is told to stop: no failure
        assert service["SuccessExitStatus"] == "130"


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_container_starts_a_command_of_ours_and_stops_it_in_order(name: str) -> None:
    service = COMPOSE["services"][name]
    check(name, parsed(filled(service["command"])))
    assert service["stop_signal"] == "SIGINT"
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def check(name: str, given: dict[str, Any]) -> None:
    if name == "server":
        assert (given["listen"], given["resume"]) == ("0.0.0.0:9443", True)
    else:
        assert (given["server"], given["accept"]) == (_GIVEN["SERVER"], _GIVEN["DIGEST"])


def test_the_container_has_what_it_is_built_from() -> None:
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert all((DEPLOY.parent / name).exists() for name in copied)
    assert 'ENTRYPOINT ["sottovoce"]' in lines


def test_the_page_names_all_of_them() -> None:
    page = (DOCS / "guides" / "deploying.md").read_text(encoding="utf-8")
    for path in DEPLOY.iterdir():
        assert f"(../../deploy/{path.name})" in page
