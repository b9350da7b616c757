"""A store small enough to train on in a test."""

from pathlib import Path

import pytest
from tests.tones import FEW_WORDS, pack_tones


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    pack_tones(folder / "tones")
    return folder


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tones.yaml"
    path.write_text(
        """
about: tones
data: {store: tones}
model: {size: tiny, dropout: 0.1, layer_drop: 0.2}
central:
  steps: 12
  batch_seconds: 4
  optimiser: {name: lars}
  schedule: {name: constant, lr: 0.5}
  augment: {speeds: [0.9, 1.0], noise: {}}
  evaluate_every: 5
  checkpoint_every: 3
  log_every: 2
"""
    )
    return path


@pytest.fixture(scope="session")
def short_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine clients with two words each: a round takes a few hundredths of a second."""
    folder = tmp_path_factory.mktemp("short-stores")
    pack_tones(folder / "tones", **FEW_WORDS)
    return folder


@pytest.fixture(scope="session")
def public_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clients' store, and one of other people's speech: of ten of them six train."""
    folder = tmp_path_factory.mktemp("public-stores")
    pack_tones(folder / "tones", **FEW_WORDS)
    pack_tones(folder / "public", people=range(15, 25), **FEW_WORDS)
    return folder


@pytest.fixture
def federated_recipe(tmp_path: Path) -> Path:
    """With everything on that a run must remember: moments, an average, a moving clip bound.

    The noise is large because accounting for little noise takes seconds.
    """
    path = tmp_path / "federated.yaml"
    path.write_text(
        """
about: tones, federated
seed: 5
data: {store: tones}
model: {size: tiny, dropout: 0.1, layer_drop: 0.2}
federation:
  steps: 12
  cohort_size: 2
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}, ema: 0.5}
  privacy:
    clip_bound: 0.01
    noise_multiplier: 8.0
    delta: 1e-3
    adaptive: {target_quantile: 0.5, count_noise_std: 10.0}
  evaluate_every: 6
  checkpoint_every: 2
"""
    )
    return path


@pytest.fixture
def narrow_recipe(federated_recipe: Path) -> Path:
    """The same with a narrow model, for those who look at what is recorded and not at what is learned."""
    text = federated_recipe.read_text()
    assert "size: tiny," in text
    federated_recipe.write_text(text.replace("size: tiny,", "size: tiny, layers: 2, width: 32,"))
    return federated_recipe
