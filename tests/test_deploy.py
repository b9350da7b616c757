"""The units, the compose file and the images under `deploy/`: what they start is what the command line knows."""

import re
import shlex
import subprocess
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
IMAGES = sorted(DEPLOY.glob("Dockerfile*"))
every_image = pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
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
    assert [path.name for path in IMAGES] == ["Dockerfile", "Dockerfile.cuda"]


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


def instructions(path: Path) -> list[tuple[str, str]]:
    """A Dockerfile's instructions, each with what follows its name."""
    text = re.sub(r"\\\n", "", path.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def find_mistakes(found: list[tuple[str, str]]) -> list[str]:
    """What would make an image differ from one day to the next, run as root, or carry more than it needs.

    hadolint, in `make check`, knows the general rules; these are ours.
    """
    named = {name: [rest for other, rest in found if other == name] for name, _ in found}
    mistakes = [f"no exact tag: {image}" for image in named["FROM"] if not re.search(r":\d+\.\d+\.\d+-[\w.-]+$", image)]
    if found[-1][0] != "ENTRYPOINT" or named.get("USER", ["root"])[-1].partition(":")[0] in ("root", "0"):
        mistakes.append("does not end as a user of its own with what it starts")
    if "ADD" in named:
        mistakes.append("ADD may fetch and unpack: COPY does neither")
    for command in (part.strip() for step in named["RUN"] for part in step.split("&&")):
        if command.startswith("pip install") and not {"--no-cache-dir", "--constraint"} <= {*command.split()}:
            mistakes.append(f"versions are not pinned, or a cache is kept: {command}")
        if command.startswith("apt-get install") and not {"--yes", "--no-install-recommends"} <= {*command.split()}:
            mistakes.append(f"asks, or installs what is not named: {command}")
    if any("apt-get" in step and "rm -rf /var/lib/apt/lists/*" not in step for step in named["RUN"]):
        mistakes.append("keeps the lists of packages")
    return mistakes


@every_image
def test_an_image_is_pinned_small_and_not_root(path: Path) -> None:
    found = instructions(path)
    assert not find_mistakes(found)
    assert found[-1] == ("ENTRYPOINT", '["sottovoce"]')
    copied = [word for name, rest in found if name == "COPY" for word in rest.split()[:-1]]
    assert copied
    assert all((DEPLOY.parent / name).exists() for name in copied)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (":3.11.14-slim-bookworm", ":latest"),
        (":3.11.14-slim-bookworm", ""),
        (":3.11.14-slim-bookworm", ":3.11-slim"),
        ("USER 1000:1000", "USER root"),
        ("USER 1000:1000", "USER 0:0"),
        ("--constraint /source/constraints.txt ", ""),
        ("--no-cache-dir ", ""),
        ("--no-install-recommends ", ""),
        ("&& rm -rf /var/lib/apt/lists/*", ""),
        ("COPY src", "ADD src"),
    ],
)
def test_a_planted_mistake_in_an_image_is_found(tmp_path: Path, old: str, new: str) -> None:
    text = (DEPLOY / "Dockerfile.cuda").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "Dockerfile").write_text(text.replace(old, new), encoding="utf-8")
    assert find_mistakes(instructions(tmp_path / "Dockerfile"))


@every_image
def test_the_steps_of_an_image_run_as_shell(path: Path, tmp_path: Path) -> None:
    """With programs in place of those that change a system, which write down how they are called.

    What pip would install is tried by .ci/wheel.py. Absolute paths of the image lie in a folder here.
    """
    image, programs, calls = tmp_path / "image", tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    for name in ("pip", "apt-get", "useradd"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {calls}\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    (image / "var/lib/apt/lists").mkdir(parents=True)
    for name, rest in instructions(path):
        if name == "COPY":
            *sources, place = rest.split()
            assert place.startswith("/source")
            for source in sources:
                target = image / place.lstrip("/") / ("" if place != "/source/" else source)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch() if (DEPLOY.parent / source).is_file() else target.mkdir(exist_ok=True)
        if name == "RUN":
            here = re.sub(r"(?<=[ '])/(?=source|var)", f"{image}/", rest)
            pins = [word for word in here.split() if word.endswith("constraints.txt")]
            assert all(Path(word).is_file() for word in pins), "a file is used before it is copied"
            path_of = {"PATH": f"{programs}:/usr/bin:/bin"}
            subprocess.run(["/bin/sh", "-eu", "-c", here], env=path_of, cwd=tmp_path, check=True)
    assert not (image / "source").exists()
    called = calls.read_text(encoding="utf-8")
    assert "useradd --create-home --uid 1000 sottovoce" in called
    assert ("USER", "1000:1000") in instructions(path)  # the same person
    assert f"{image}/source[network]" in called


def test_the_page_names_all_of_them() -> None:
    page = (DOCS / "guides" / "deploying.md").read_text(encoding="utf-8")
    for path in (path for path in DEPLOY.iterdir() if path.is_file()):
        assert f"(../../deploy/{path.name})" in page
