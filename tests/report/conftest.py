"""Real runs, as small as they can be, for reports to be made of."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tampering import rechain
from tests.tones import pack_tones

from sottovoce.config import load_recipe
from sottovoce.privacy.events import event_to_json, repeated
from sottovoce.report.records import LedgerCheck, RunRecord
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext

FEDERATED = """
about: tones, federated
paper: {source: A paper, place: "Table 9", wer: {test: 12.3}, population_size: 25}
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
federation:
  steps: 4
  cohort_size: 3
  local: {batch_seconds: 2, lr: 0.1, local_steps: 2}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, share: dim, noise_multiplier: 8.0, delta: 1e-3,
            extrapolate: [{population_size: 900, cohort_size: 20, paper_epsilon: 7.2}]}
  engine: sequential
  evaluate_every: 2
"""
CENTRAL = """
about: tones, in one pile
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
central:
  steps: 4
  batch_seconds: 4
  optimiser: {name: adam}
  schedule: {name: constant, lr: 1e-3}
  evaluate_every: 2
  log_every: 1
"""
QUIET = ("about=tones, without noise", "federation.privacy.noise_multiplier=0", "federation.privacy.extrapolate=[]")
SAMPLES = [{"reference": "abc de", "hypothesis": "abc d e"}, {"reference": "one & two", "hypothesis": "one <b>"}]

MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs noisy, quiet, release and central."""
    place = tmp_path_factory.mktemp("reporting")
    pack_tones(place / "stores/tones", people=range(30), letters=(2, 3), utterances=2)
    (place / "federated.yaml").write_text(FEDERATED)
    (place / "central.yaml").write_text(CENTRAL)
    around = RunContext(runs=place / "runs", stores=place / "stores", device=torch.device("cpu"))
    made = {
        "noisy": ("federated", ()),
        "quiet": ("federated", QUIET),
        "release": ("federated", ("federation.privacy.mode=secure",)),
        "central": ("central", ()),
    }
    for name, (recipe, changes) in made.items():
        found = load_recipe(str(place / f"{recipe}.yaml"), list(changes))
        run_recipe(found, out=place / "runs" / name, resume=False, context=around)
        shutil.rmtree(place / "runs" / name / "checkpoints")  # large, and no report reads them
    results = place / "runs/noisy/results.json"
    content = json.loads(results.read_text())
    content["test"]["test"]["samples"] = SAMPLES  # which runs keep of synthetic voices alone
    results.write_text(json.dumps(content))
    rechain(place / "runs/noisy")
    return place / "runs"


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> MakeRun:
    """A copy of one of them that a test may spoil."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(runs / name, tmp_path / name, symlinks=True))

    return copy


@pytest.fixture(scope="session")
def releases(runs: Path) -> Path:
    """More releases: `eight`, with ε = 8, `thousands`, with hardly any noise, and `silos`, eight of them."""
    place = runs.parent
    around = RunContext(runs=place / "releases", stores=place / "stores", device=torch.device("cpu"))
    noise = {
        "eight": ("federation.privacy.noise_multiplier=null", "federation.privacy.target_epsilon=8"),
        "thousands": ("federation.privacy.noise_multiplier=0.02",),
        "silos": (
            "federation.clients.rule=silo",
            "federation.clients.silos=8",
            "federation.cohort_size=8",
            "federation.privacy.noise_multiplier=4",
            "federation.privacy.extrapolate=[]",
        ),
    }
    for name, changes in noise.items():
        found = load_recipe(str(place / "federated.yaml"), ["federation.privacy.mode=secure", *changes])
        run_recipe(found, out=place / "releases" / name, resume=False, context=around)
        shutil.rmtree(place / "releases" / name / "checkpoints")
    return place / "releases"


def with_event(run: RunRecord, event: Any, **plan: Any) -> RunRecord:
    """The same run with a ledger of another mechanism."""
    assert run.ledger is not None
    assert run.ledger.report is not None
    report = run.ledger.report
    header = {**report.header, "event": event_to_json(event), "plan": {**report.header["plan"], **plan}}
    return replace(
        run, ledger=LedgerCheck(report=replace(report, header=header, spent=repeated(event, report.attempts)))
    )
