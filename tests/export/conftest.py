"""Small runs of every kind of promise, and exports of them that a test may copy."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.export.tone_models import trained as trained
from tests.tones import FEW_WORDS, pack_tones

from sottovoce.base.signatures import load_signing_key
from sottovoce.cli import main
from sottovoce.config import load_recipe
from sottovoce.export.guarantee import ExportOptions, read_export_source, write_guarantee
from sottovoce.models.recogniser import export_recogniser, load_recogniser
from sottovoce.network.keys import SIGNER, make_node, make_signer
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext

RECIPE = """
about: tones, federated
seed: 5
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
federation:
  steps: 4
  cohort_size: 2
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, noise_multiplier: 8.0, delta: 1e-3, mode: secure}
  engine: sequential
  evaluate_every: 2
  checkpoint_every: 2
"""
CENTRAL = """
about: tones in one place
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
central:
  steps: 2
  batch_seconds: 4
  optimiser: {name: lars}
  schedule: {name: constant, lr: 0.5}
"""
KINDS = {
    "release": [],
    "another": ["about=tones, again"],
    "silo": ["federation.clients={rule: silo, silos: 4}", "federation.cohort_size=4"],
    "banded": ["federation.privacy.mechanism={kind: banded, bands: 2, cycle: 3}", "federation.steps=5"],
    # For one speaker inside a silo that is drawn by chance dp-accounting has a PLD alone, which resolves no such δ.
    "no bound": [
        "federation.clients={rule: silo, silos: 4}",
        "federation.cohort_size=2",
        "federation.privacy.delta=1e-13",
    ],
    "simulation": ["federation.privacy.mode=seeded"],
    "no noise": ["federation.privacy.mode=seeded", "federation.privacy.noise_multiplier=0"],
}
# Of the form that `sottovoce audit` writes, made by hand: what it measures is no matter here.
AUDIT = {
    "accounted": False,
    "recipe": "tones, other people",
    "config_digest": "0" * 32,
    "sottovoce": "0.1.0",
    "verdict": "consistent",
    "why": "nothing speaks against what is promised",
    "observer": "releases",
    "canaries": 1000,
    "people": 60,
    "rounds": 4,
    "delta": 1e-3,
    "promised": {"epsilon_pld": 0.1, "epsilon_rdp": 0.2},
    "estimate": {"epsilon": 0.08, "interval": [0.0, 0.12]},
    "interval_holds_truth": False,
    "lower_bound": {"epsilon": 0.02},
    "noise": None,
    "worst_tensor": {"name": "output.weight"},
}


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Exports(NamedTuple):
    """Runs by kind, and exports of them: of every kind unsigned, of the release also `signed`."""

    place: Path

    @property
    def key(self) -> Path:
        return self.place / "key" / SIGNER

    def run(self, kind: str) -> Path:
        return self.place / "runs" / kind

    def copy(self, kind: str, to: Path) -> Path:
        return Path(shutil.copytree(self.place / "exports" / kind, to / "model"))


def write_export(run: Path, out: Path, options: ExportOptions | None = None) -> Path:
    source = read_export_source(run)
    assert source is not None
    export_recogniser(load_recogniser(run), out)
    write_guarantee(source, out, options)
    return out


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    place = tmp_path_factory.mktemp("exported")
    made, stores = Exports(place), place / "stores"
    pack_tones(stores / "tones", **FEW_WORDS)
    (place / "tones.yaml").write_text(RECIPE)
    (place / "central.yaml").write_text(CENTRAL)
    (place / "audit.json").write_text(json.dumps(AUDIT))
    make_signer(place / "key")
    make_node(place / "other-key")
    recipes = {kind: load_recipe(str(place / "tones.yaml"), changes) for kind, changes in KINDS.items()}
    recipes["central"] = load_recipe(str(place / "central.yaml"))
    around = RunContext(runs=place, stores=stores, device=torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sottovoce.report.page.inline_svg", lambda _: "<svg />")
        for kind, recipe in recipes.items():
            run_recipe(recipe, out=made.run(kind), resume=False, context=around)
    (place / "exports").mkdir()
    for kind in recipes:
        write_export(made.run(kind), place / "exports" / kind)
    audited = ExportOptions(audit=place / "audit.json")
    write_export(made.run("release"), place / "exports" / "audited", audited)
    signed = ExportOptions(key=load_signing_key(place / "key"))
    write_export(made.run("release"), place / "exports" / "signed", signed)
    return made


@pytest.fixture
def sottovoce(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["sottovoce", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code or 0, *capsys.readouterr())  # type: ignore[arg-type]

    return run
