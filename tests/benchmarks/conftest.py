"""Benchmarks are programs, not a package: their folder must be on the path. And a run to keep, made once."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tampering import rechain
from tests.tones import pack_tones
from torch import device

from sottovoce.config import load_recipe
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

RECIPE = """
about: tones
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
federation:
  steps: 8
  cohort_size: 3
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, share: dim, noise_multiplier: 0.3, delta: 1e-3}
  engine: sequential
  evaluate_every: 4
"""


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: 8 rounds, private, tested on six speakers."""
    place = tmp_path_factory.mktemp("results")
    pack_tones(place / "stores/tones", people=range(60), letters=(2, 3), utterances=2)
    (place / "tones.yaml").write_text(RECIPE)
    around = RunContext(runs=place, stores=place / "stores", device=device("cpu"))
    run_recipe(load_recipe(str(place / "tones.yaml")), out=place / "suite/dim", resume=False, context=around)
    return place / "suite/dim"


@pytest.fixture
def results(run: Path, tmp_path: Path) -> Path:
    from findings.keeping import keep

    keep(run, tmp_path / "results/suite/dim")
    return tmp_path / "results"


@pytest.fixture
def copy(results: Path) -> Callable[..., Path]:
    """Another kept run: the same but for its label, `settings` of its recipe (old, new), and `errors` per speaker."""

    def make(label: str, *settings: tuple[str, str], errors: list[int] | None = None) -> Path:
        folder = Path(shutil.copytree(results / "suite/dim", results / "suite" / label, dirs_exist_ok=True))
        config = (folder / "config.yaml").read_text()
        for old, new in settings:
            assert old in config
            config = config.replace(old, new)
        (folder / "config.yaml").write_text(config)
        if errors is not None:
            content = json.loads((folder / "results.json").read_text())
            test = content["test"]["test"]
            test["per_speaker"] = [
                {"speaker": str(n), "words": 10, "wer": wrong / 10} for n, wrong in enumerate(errors)
            ]
            test["wer"] = sum(errors) / (10 * len(errors))
            (folder / "results.json").write_text(json.dumps(content))
        rechain(folder)
        return folder

    return make
