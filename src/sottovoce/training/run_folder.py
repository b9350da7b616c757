"""A run's folder: all files that a run writes.

runs/<name>/config.yaml  inputs.json  environment.json  metrics.jsonl  results.json
            ledger.jsonl  diagnostics.jsonl  personal.json   (federated runs; the last two in simulations only)
            tensorboard/ (not of a release)  checkpoints/  model -> best
            trackers.json                        (what services call the run, and how much of it they have)
            frozen.safetensors                   (what is not trained, where that is not all)
            secrets/                             (never published; readable by the owner only)
"""

import difflib
import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sottovoce import __version__
from sottovoce.base.errors import InputError
from sottovoce.base.files import read_json, remove_leftovers, write_atomically, write_json
from sottovoce.base.parsing import ParseError, parse_json

CONFIG, INPUTS, ENVIRONMENT = "config.yaml", "inputs.json", "environment.json"
METRICS, DIAGNOSTICS, LEDGER = "metrics.jsonl", "diagnostics.jsonl", "ledger.jsonl"
RESULTS, LOCK = "results.json", ".lock"
ENGINE, POPULATION, TRACKERS = "engine.json", "population.json", "trackers.json"
PERSONAL = "personal.json"  # of simulations only
CHECKPOINTS, MODEL, STATE = "checkpoints", "model", "state.json"  # the last of every checkpoint
FILES = (CONFIG, INPUTS, ENVIRONMENT, METRICS, DIAGNOSTICS, LEDGER, RESULTS, ENGINE, POPULATION, TRACKERS, PERSONAL)

BEFORE_IT_BEGINS = {CONFIG, INPUTS, ENVIRONMENT, ENGINE, POPULATION}  # written before anything is trained or charged

ONE_TIME = 315_532_800  # 1980 begins: the first moment that a zip file can hold

BASE_MODEL = "base model"  # begins the names of inputs that say what the weights were made from
STAND_IN = "stand_in"
NO_EPSILON = "people and noise are the stand-in's, not the recipe's: what they would promise is not said"
COMMIT = "SOTTOVOCE_COMMIT"  # an environment variable, for sources that came without their history


class RunFolder:
    """An open run folder, held against other processes. Made by `open_run`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.best = path / MODEL

    @property
    def metrics(self) -> "JsonLines":
        """What is public about every step."""
        return JsonLines(self.path / METRICS)

    @property
    def diagnostics(self) -> "JsonLines":
        """By-products of private data, which no ε covers; of simulations only."""
        return JsonLines(self.path / DIAGNOSTICS)


class JsonLines:
    """Records with a `step` each, one line of JSON per record."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, *records: Mapping[str, Any]) -> None:
        """Append; the next checkpoint makes it durable."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        except OSError as error:
            raise InputError(f"{self._path} cannot be written ({error.strerror})") from None

    def cut(self, *, after_step: int) -> None:
        """Forget what was measured after `after_step`: those steps will be made again."""
        if not self._path.exists():
            return
        kept = []
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            step = _step_of(line)
            if step is None and number < len(lines):
                raise InputError(f"{self._path} line {number} is damaged: expected a record with its step")
            if step is None or step > after_step:  # the last line may be torn by a crash
                break
            kept.append(line + "\n")
        with write_atomically(self._path) as rewritten:
            rewritten.write("".join(kept).encode())

    def read(self) -> list[dict[str, Any]]:
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        return [parse_json(line) for line in lines]


def _step_of(line: str) -> int | None:
    """The step of a record; None where the line is none."""
    try:
        step = parse_json(line)["step"]
    except (ParseError, LookupError, TypeError):
        return None
    return step if isinstance(step, int) else None


@contextmanager
def open_run(
    path: Path,
    *,
    config: str,
    inputs: Mapping[str, Any],
    resume: bool,
    keeps_times: bool = True,
    stand_in: bool = False,
) -> Iterator[RunFolder]:
    """Open `path` for a run with `config` (YAML): a new folder, or with `resume` the folder of the same run.

    `inputs` is what the run depends on besides: a store may have been made anew since. A folder that holds another
    run, or is in use, is refused. One whose run has failed before it began is taken as new. Unless it `keeps_times`,
    all files have one when it is closed (`reset_file_times`).
    A `stand_in` says so in its environment: people and noise are not the recipe's.
    """
    known = path / CONFIG
    if path.exists() and not path.is_dir():
        raise InputError(f"run folder {path} is a file")
    begun = path.exists() and _has_begun(path)
    if known.exists() and (resume or begun):
        _check_same(known, config)
        if not resume:
            raise InputError(f"run folder {path} holds this run already: --resume goes on with it, --out names another")
    elif begun:
        raise InputError(f"run folder {path} holds other things: --out names another")
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"run folder {path} is in use by another process") from None
        remove_leftovers(path, *FILES)
        if not resume:
            _forget_beginning(path)
        if not known.exists():
            with write_atomically(known) as file:
                file.write(config.encode())
        if (path / INPUTS).exists():
            _check_inputs(path / INPUTS, inputs)
        else:
            write_json(path / INPUTS, inputs)
        try:
            if not ((path / LEDGER).exists() and (path / RESULTS).exists()):  # or else the ledger knows its digest
                write_json(path / ENVIRONMENT, describe_environment() | ({STAND_IN: True} if stand_in else {}))
            yield RunFolder(path)
        finally:
            if not keeps_times:
                reset_file_times(path)


def _has_begun(path: Path) -> bool:
    """Whether `path` holds more than what is written before a run begins; a lock and a torn config do not count."""
    return any(inside.name not in BEFORE_IT_BEGINS and not inside.name.startswith(".") for inside in path.iterdir())


def _forget_beginning(path: Path) -> None:
    """Remove what a run has left that failed before it began; its folder is held."""
    if _has_begun(path):  # it was begun while we waited for the lock
        raise InputError(f"run folder {path} holds this run already: --resume goes on with it, --out names another")
    for name in BEFORE_IT_BEGINS:
        (path / name).unlink(missing_ok=True)


def reset_file_times(path: Path) -> None:
    """Give a file, or all files of a folder, one modification time: theirs would show how long rounds took."""
    if path.is_dir() and not path.is_symlink():
        for inside in path.iterdir():
            reset_file_times(inside)
    os.utime(path, (ONE_TIME, ONE_TIME), follow_symlinks=False)


def require_same_recipe(path: Path, config: str) -> None:
    """Refuse the folder of a run that another recipe has made; one that no recipe has made is nobody's."""
    if (path / CONFIG).exists():
        _check_same(path / CONFIG, config)


def _check_same(known: Path, config: str) -> None:
    old = known.read_text(encoding="utf-8")
    if old == config:
        return
    changes = [
        line
        for line in difflib.unified_diff(old.splitlines(), config.splitlines(), n=0, lineterm="")
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    shown = "; ".join(" ".join(line.split()) for line in changes[:6])
    raise InputError(f"run folder {known.parent} belongs to another recipe (- there, + now): {shown}")


def _check_inputs(known: Path, inputs: Mapping[str, Any]) -> None:
    old = read_json(known)
    for name in sorted(old.keys() | inputs.keys()):
        if old.get(name) != inputs.get(name):
            raise InputError(
                f"run folder {known.parent}: {name} was {old.get(name)} when the run began and is {inputs.get(name)} "
                "now: restore it, or begin another run with --out"
            )


def describe_environment() -> dict[str, Any]:
    """Where and with what a run was made."""
    import torch  # here: reading run folders needs none

    return {
        "sottovoce": __version__,
        "commit": os.environ.get(COMMIT) or _commit(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
    }


def _commit() -> str | None:
    """The sources' commit, with `-dirty` behind it where they were changed since; None where git cannot say."""
    place = ["git", "-C", str(Path(__file__).parent)]
    said = subprocess.run(
        [*place, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip() if said.returncode == 0 else None
