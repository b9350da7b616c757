"""On a full disk every command that writes says in one line which file it could not write."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from tests.tones import pack_tones, say

from sottovoce.cli import main

CENTRAL = """
about: tones, centrally
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
central: {steps: 1, batch_seconds: 4, optimiser: {name: adam}, schedule: {name: constant, lr: 0.001}}
"""
FEDERATED = """
about: tones, federated
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
federation:
  steps: 1
  cohort_size: 2
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, noise_multiplier: 8.0, delta: 1e-3}
"""
PLAN = "plan --population 1000 --cohort 100 --steps 10 --delta 1e-4 --noise-multiplier 2"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, a recording with its manifest, recipes, and a finished run."""
    place = tmp_path_factory.mktemp("place")
    pack_tones(place / "stores/tones", letters=(2, 3), utterances=2)
    soundfile.write(place / "a.wav", say("abc", pitch=1.0).astype(np.int16), 16_000)
    (place / "train.tsv").write_text("client_id\tpath\tsentence\nada\ta.wav\tabc\n")
    (place / "central.yaml").write_text(CENTRAL)
    (place / "federated.yaml").write_text(FEDERATED)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["sottovoce", "run", "central.yaml", "--out", "done"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return place


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("transcribe done a.wav --out texts", "texts/a.txt"),
        ("evaluate done --on stores/tones:dev --out texts.jsonl", "texts.jsonl"),
        ("evaluate done --on stores/tones:dev --plot wer.svg", "wer.svg"),
        (f"{PLAN} --plot plan.svg", "plan.svg"),
        ("stats stores/tones --plot stats.svg", "stats.svg"),
        ("tokens stores/tones --out tokens.json --size 8", "tokens.json"),
        ("report done --out page.html", "page.html"),
        ("prepare tsv train.tsv --out other", "other"),
        ("run central.yaml --out begun", "begun/config.yaml"),
        ("run central.yaml --out done --resume", "done/environment.json"),
    ],
)
def test_the_file_is_named(
    sottovoce: Callable[..., Any], place: Path, monkeypatch: pytest.MonkeyPatch, command: str, file: str
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(os, "fsync", full)
    done = sottovoce(*command.split())
    assert done.code == 2
    (line,) = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert file in line
    assert "No space left on device" in line
    assert "Errno" not in line
    assert not [left for left in place.rglob(".*") if left.name != ".lock"]


def test_the_ledger_is_named(sottovoce: Callable[..., Any], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(os, "pwrite", full)
    done = sottovoce("run", "federated.yaml", "--out", "uncharged")
    assert (done.code, done.err.splitlines()[-1]) == (2, "error: uncharged/ledger.jsonl: No space left on device")


def test_a_full_disk_behind_standard_output_is_said_too() -> None:
    with open("/dev/full", "w") as disk:
        done = subprocess.run(
            [sys.executable, "-m", "sottovoce", *PLAN.split(), "--json"], stdout=disk, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (2, "error: standard output: No space left on device\n")
