"""Checkpoints: folders that are written completely or not at all, and verified when they are loaded.

checkpoints/step-000750/{model.safetensors, config.json, tokens.json, optimiser.safetensors, state.json}
checkpoints/latest -> step-000750        model -> checkpoints/step-000500      (the best one)
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.files import add_digest, check_digest, read_json, sync_folder, write_json
from sottovoce.models.recogniser import Recogniser, load_recogniser, save_recogniser
from sottovoce.training.run_folder import STATE as STATE

OPTIMISER, LATEST = "optimiser.safetensors", "latest"

# Among the optimiser's tensors:
PARAMETERS = "parameters"  # the server's own, where the model of the checkpoint is an average
TURNS = "turns"  # how often each client was drawn, where clients have time lines
RECENT = "recent"  # the server's last models, where rounds overlap
NOISE = "noise"  # the earlier noise that later noise needs, where a simulation's is correlated over rounds


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on as if it had never stopped. `best` names the best checkpoint so far."""

    step: int
    recogniser: Recogniser
    optimiser: Mapping[str, Tensor]
    best: str
    state: Mapping[str, Any]


def checkpoint_name(step: int) -> str:
    """The name of the folder of the checkpoint at `step`."""
    return f"step-{step:06d}"


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` under `folder` and make it the latest. Where that fails, those before it stay as they are."""
    try:
        return _save(folder, checkpoint)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"checkpoint {folder / checkpoint_name(checkpoint.step)} cannot be written ({error}); the one before is "
            "untouched"
        ) from None


def _save(folder: Path, checkpoint: Checkpoint) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / checkpoint_name(checkpoint.step)
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
    try:
        os.chmod(temporary, 0o755)
        save_recogniser(checkpoint.recogniser, temporary)
        save_file({n: t.detach().cpu().contiguous() for n, t in checkpoint.optimiser.items()}, temporary / OPTIMISER)
        state = {"step": checkpoint.step, "best": checkpoint.best, "files": _digests(temporary), **checkpoint.state}
        write_json(temporary / STATE, add_digest(state))
        for path in temporary.iterdir():
            _sync_file(path)
        sync_folder(temporary)
        if place.exists():  # a step repeated after a resume: the same bits
            shutil.rmtree(place)
        temporary.rename(place)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    point_link(folder / LATEST, place)
    return place


def point_link(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to `target`, atomically."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent))
    os.replace(temporary, link)
    sync_folder(link.parent)


def load_latest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and a line for each newer one that is not."""
    complaints: list[str] = []
    for place in _newest_first(folder):
        try:
            return load_checkpoint(place), complaints
        except InputError as error:
            complaints.append(str(error))
    return None, complaints


def load_checkpoint(place: Path) -> Checkpoint:
    """The checkpoint in `place`; `InputError` if any of its files is missing or not as it was written."""
    try:
        state = check_digest(read_json(place / STATE), where=place / STATE)
        written, step, best = dict(state.pop("files")), state.pop("step"), state.pop("best")
        found = _digests(place)
        found.pop(STATE, None)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"checkpoint {place} is damaged ({error})") from None
    if damaged := sorted(file for file in written if found.get(file) != written[file]):
        raise InputError(f"checkpoint {place} is damaged: {', '.join(damaged)} not as written")
    return Checkpoint(step, load_recogniser(place), load_file(place / OPTIMISER), best, state)


def prune_checkpoints(folder: Path, *, up_to: int, newest: int = 2) -> None:
    """Of the checkpoints up to step `up_to`, remove all but the `newest` and those that they call the best.

    Later ones are damaged (or a run would have gone on from them): they count for nothing, and stay until their step is
    made again.
    """
    places = [place for place in _newest_first(folder) if _step(place) <= up_to]
    kept = {place.name for place in places[:newest]}
    kept |= {best for place in places[:newest] if (best := _best_named_by(place)) is not None}
    for place in places:
        if place.name not in kept:
            shutil.rmtree(place, ignore_errors=True)
    for left in folder.glob(".writing-*"):
        shutil.rmtree(left, ignore_errors=True)


def _best_named_by(place: Path) -> str | None:
    try:
        best: str = read_json(place / STATE)["best"]
        return best
    except (InputError, KeyError):
        return None  # damaged: no run will go on from it


def _newest_first(folder: Path) -> list[Path]:
    # By number: step-1000000 is newer than step-999999.
    return sorted((place for place in folder.glob("step-*") if place.name[5:].isdecimal()), key=_step, reverse=True)


def _step(place: Path) -> int:
    return int(place.name.removeprefix("step-"))


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return found


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
