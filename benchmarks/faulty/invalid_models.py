"""Untrusted models: checkpoints of another toolkit, and folders of ours whose settings do not fit their files."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faulty import damage, fixtures
from faulty.cases import Case
from faulty.commands import Asked, command_case
from sottovoce.base.seeds import stream

CHECKPOINTS, FOLDERS, OUTSIDE = "checkpoints of SpeechBrain", "settings of model folders", "code that a folder names"

Change = Callable[[Tensor], Any]
# Each of these makes a tensor into something that must be refused.
TENSORS: Mapping[str, Change] = {
    "text": lambda tensor: "x",
    "list": lambda tensor: tensor.tolist(),
    "None": lambda tensor: None,
    "one axis more": lambda tensor: tensor[None].clone(),
    "flat": lambda tensor: tensor.reshape(-1).clone() if tensor.dim() != 1 else tensor[None].clone(),
    "no axis": lambda tensor: torch.zeros(()),
    "empty": lambda tensor: tensor[:0].clone(),
    "one row less": lambda tensor: torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:]),
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: tensor.to("meta"),
    "whole numbers": lambda tensor: tensor.long(),
    "bool": lambda tensor: tensor > 0,
    "complex": lambda tensor: tensor.to(torch.complex64),
    "NaN": lambda tensor: tensor * math.nan,
    "one infinity": lambda tensor: torch.full_like(tensor, math.inf),
    "beyond float32": lambda tensor: torch.full_like(tensor, 1e300, dtype=torch.float64),
    "repeated": lambda tensor: torch.zeros(()).expand(tensor.shape) if tensor.numel() > 1 else "x",
    "gigabytes": lambda tensor: torch.zeros(()).expand(70_000, 50_000),
    "missing": lambda tensor: None,
}
FILES = ("model.ckpt", "tokenizer.ckpt", "normalizer.ckpt")


def checkpoints(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    """Two thirds of them tensors that are not what they should be, one third files with damaged bytes."""
    fixtures.build(folder)
    whole = torch.load(folder / "theirs" / "model.ckpt", weights_only=True)
    for number in range(count):
        rng = stream(seed, CHECKPOINTS, number)
        copy = folder / f"theirs-{number}"
        shutil.copytree(folder / "theirs", copy)
        due = number % 3 < 2
        if due:
            name, kind = (list(some)[int(rng.integers(len(some)))] for some in (whole, TENSORS))
            state = {**whole, name: TENSORS[kind](whole[name])}
            if kind == "missing":
                del state[name]
            torch.save(state, copy / "model.ckpt")
            label = f"{name} is {kind}"
        else:
            file, way = FILES[int(rng.integers(3))], damage.BINARY[int(rng.integers(len(damage.BINARY)))]
            (copy / file).write_bytes(way((copy / file).read_bytes(), rng))
            label = f"{way.__name__} of {file}"
        words = ("import", "speechbrain", copy, "--language", "fr", "--out", folder / f"model-{number}")
        yield command_case(CHECKPOINTS, f"case {number}, {label}", Asked(words, folder), due=due)


# What no file of a few kilobytes holds, and what no setting is.
NUMBERS = (0, -1, 2, 3, 1_000, 65_536, 10**6, 10**9, 10**12, 2**63, 10**30, 1e300, 0.5, math.nan, math.inf, -math.inf)
OTHERS: tuple[Any, ...] = ("x", "", None, True, [], [1, 2], {}, {"a": 1}, "9" * 400)
# Not shapes: another of these is simply another model.
FREE = {
    *("dropout", "layer_drop", "norm", "positions", "as_released", "ears", "mu", "label_smoothing", "ctc_epochs"),
    *("feature_mean", "feature_deviation", "candidates", "heads", "encoder.mean"),
    *("encoder.deviation", "cape.global_shift_seconds"),
}


def folders(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    """Another value in the place of any of a model's settings, or of what is beside them."""
    import json

    fixtures.build(folder)
    for number in range(count):
        rng = stream(seed, FOLDERS, number)
        name = list(fixtures.MODELS)[int(rng.integers(len(fixtures.MODELS)))]
        copy = folder / f"model-{number}"
        shutil.copytree(folder / "models" / name, copy)
        config = json.loads((copy / "config.json").read_text())
        keys = dict(_leaves(config["settings"]))
        value = (*NUMBERS, *NUMBERS, *OTHERS)[int(rng.integers(2 * len(NUMBERS) + len(OTHERS)))]
        if number % 8 == 7:
            key = ("architecture", "language", "tokens", "settings", "about", "sample_rate", "part", "parameters")[
                int(rng.integers(8))
            ]
            fixtures.change_config(copy, {key: value})
            due = key not in ("about", "language", "part") and (key, value) != ("language", "x")
            due = due and not (key == "part" and value is None)
        else:
            key = list(keys)[int(rng.integers(len(keys)))]
            fixtures.change_config(copy, {}, settings={key: value})
            due = key not in FREE and value != keys[key] and not (value is True and keys[key] == 1)
        words = _use(name, copy, folder, number)
        yield command_case(FOLDERS, f"case {number}, {name} with {key}={value!r:.40}", Asked(words, folder), due=due)


def _use(name: str, model: Path, folder: Path, number: int) -> tuple[object, ...]:
    if name == "cpc":
        return ("evaluate", model, "--on", folder / "store:test")
    if number % 3 == 0:
        return ("export", model, "--out", folder / f"out-{number}")
    return ("transcribe", model, folder / "sound.wav")


def _leaves(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield before + name, value


# Modules that do something when they are imported, and one of our own making that leaves a mark.
MODULES = ("venv.__main__:F", "this:F", "antigravity:F", "idlelib.idle:F", "os:system", ":F", "a:", "..:F", "x y:F")


def outside(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    """A model's folder, a run's recipe or an override that names a module: nothing of it may be run."""
    fixtures.build(folder)
    mark = folder / "was-run"
    (folder / "untrusted_module.py").write_text(f"open({str(mark)!r}, 'w').close()\nFAMILY = F = 1\n")
    keys = (
        "model.family={}",
        "federation.server.optimiser={{name: '{}'}}",
        "federation.privacy.clip_rule={{name: '{}'}}",
    )
    for number in range(count):
        rng = stream(seed, OUTSIDE, number)
        name = ("untrusted_module:FAMILY", *MODULES)[int(rng.integers(1 + len(MODULES)))]
        if number % 2:
            words: tuple[object, ...] = (
                "recipes",
                "show",
                "demo-clipping/global",
                keys[int(rng.integers(3))].format(name),
            )
        else:
            copy = folder / f"model-{number}"
            shutil.copytree(folder / "models" / "ctc_transformer", copy)
            fixtures.change_config(copy, {"architecture": name})
            words = _use("ctc_transformer", copy, folder, number)
        case = command_case(OUTSIDE, f"case {number}, {name}", Asked(words, folder), due=True)
        yield Case(case.what, case.words, partial(_unmarked, case.read, mark), case.loss)


def _unmarked(read: Callable[[], object], mark: Path) -> object:
    import sys

    sys.path.insert(0, str(mark.parent))
    try:
        return read()
    finally:
        sys.path.remove(str(mark.parent))
        if mark.exists():
            mark.unlink()
            raise AssertionError("a module was imported because a folder named it")
