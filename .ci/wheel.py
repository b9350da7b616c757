"""Build the sdist, the wheel from it, and try the wheel in an environment that has what it declares and nothing else.

`.venv/bin/python .ci/wheel.py`, from the repository. The dependencies are links to the distributions of the environment
that runs this, so that it takes seconds; one that is used and not declared is missing, as it would be for a user.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "sottovoce"
EXTRAS = {"demo"}  # without which there is no speech to try it on
GUIDE = ROOT / "docs" / "guides" / "from-python.md"
FENCE = re.compile(r"^```(?:python|yaml)\n# ([\w-]+\.(?:py|yaml))\n(.*?)^```$", re.M | re.S)
DOCTESTS = """
import doctest, importlib, sottovoce
modules = sorted({home.partition(":")[0] for home in sottovoce._HOMES.values()})
results = [doctest.testmod(importlib.import_module(name)) for name in modules]
assert sum(result.attempted for result in results) > 0
assert not any(result.failed for result in results)
"""
HELPS = """
from typer.main import get_command
from typer.testing import CliRunner
from sottovoce.cli import app

def words(command, before=()):
    yield [*before, "--help"]
    for name, below in getattr(command, "commands", {}).items():
        yield from words(below, (*before, name))

for line in words(get_command(app)):
    assert CliRunner().invoke(app, line).exit_code == 0, line
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = build(folder)
        check_contents(wheel)
        python = make_environment(folder / "env", wheel)
        try_wheel(python, folder / "work")


def build(folder: Path) -> Path:
    """The wheel, from the unpacked sdist: so the sdist has all that it takes."""
    hatch = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t"]
    subprocess.run([*hatch, "sdist"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    subprocess.run([*hatch, "wheel"], cwd=unpacked, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    for path in (sdist, wheel):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
    return wheel


def check_contents(wheel: Path) -> None:
    """Every tracked file of the package is in the wheel: recipes, templates, tables, the marker of types."""
    listed = subprocess.run(["git", "ls-files", "-z", "src"], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = {name.removeprefix("src/") for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.partition("/")[0].endswith(".dist-info")}
    if tracked != packed:
        sys.exit(f"not in the wheel: {sorted(tracked - packed)}; not tracked: {sorted(packed - tracked)}")
    print(f"{len(packed)} files, those that are tracked")


def make_environment(place: Path, wheel: Path) -> Path:
    venv.create(place, with_pip=False)
    (packages,) = place.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    linked = declared(metadata.get_all("Requires-Dist") or [], EXTRAS)
    for distribution in linked.values():
        for top in {path.parts[0] for path in distribution.files or [] if path.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    python = place / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, *install], check=True)
    print(f"an environment with {len(linked)} dependencies")
    return python


def declared(lines: list[str], extras: set[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that these requirements need, directly or not, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [(line, frozenset(extras)) for line in lines]
    while left:
        line, asked = left.pop()
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in asked | {""}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found[name] = importlib.metadata.distribution(requirement.name)
        left += [(below, key[1]) for below in found[name].requires or []]
    return found


def try_wheel(python: Path, work: Path) -> None:
    work.mkdir()
    for name, content in FENCE.findall(GUIDE.read_text(encoding="utf-8")):
        (work / name).write_text(content, encoding="utf-8")
    programs = [name for name, _ in FENCE.findall(GUIDE.read_text(encoding="utf-8")) if name.endswith(".py")]
    command = str(python.parent / "sottovoce")
    steps = {
        "version": [command, "--version"],
        "types": [
            str(python),
            "-c",
            "import sottovoce, pathlib; (pathlib.Path(sottovoce.__file__).parent / 'py.typed').stat()",
        ],
        "recipes": [command, "recipes"],
        "every --help": [str(python), "-c", HELPS],
        "examples of the API": [str(python), "-c", DOCTESTS],
        **{f"{GUIDE.name}: {name}": [str(python), name] for name in programs},
        "a smoke run": [command, "run", "demo", "--smoke", "--out", "runs"],
        "its export": [command, "export", "runs/demo-private", "--out", "model"],
        "verify": [command, "verify", "model"],
    }
    # Nothing of the repository: neither its path nor its folder.
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    for title, words in steps.items():
        start = time.monotonic()
        done = subprocess.run(words, cwd=work, env=clean, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{title} failed:\n{done.stdout}{done.stderr}")
        print(f"{title}: {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
