import shutil
from pathlib import Path

import pytest
from tests.tones import pack_tones

RECIPE = """
about: tones, audited
data: {store: tones}
model: {size: tiny, layers: 1, width: 16, dropout: 0.0, layer_drop: 0.0}
federation:
  steps: 3
  cohort_size: 6
  local: {batch_seconds: 4, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, noise_multiplier: 2.0, delta: 1e-3}
  engine: sequential
  evaluate_every: 3
"""


@pytest.fixture(scope="session")
def tones_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store with 18 people to train on."""
    folder = tmp_path_factory.mktemp("audited")
    pack_tones(folder / "stores/tones", people=range(30), letters=(2, 3), utterances=2)
    return folder / "stores"


@pytest.fixture
def place(tones_store: Path, tmp_path: Path) -> Path:
    """A folder to work in, with a recipe and its store."""
    (tmp_path / "tones.yaml").write_text(RECIPE)
    shutil.copytree(tones_store, tmp_path / "stores")
    return tmp_path
