"""Checkpoints are whole or not there, and those that a run may need are never cleared away."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models.recogniser import create_recogniser
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import Settings
from sottovoce.training.checkpoint import (
    Checkpoint,
    checkpoint_name,
    load_checkpoint,
    load_latest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)

TOKENS = CharacterTokens("ab ")
SETTINGS = Settings(layers=1, width=16, tokens=TOKENS.size + 1)
MODEL = create_recogniser(FAMILY, SETTINGS, TOKENS, language="en", generator=torch_stream(1, "init"))


def made(step: int, *, best: int) -> Checkpoint:
    return Checkpoint(step, MODEL, {"count": torch.tensor(step)}, best=checkpoint_name(best), state={"place": step})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_comes_back_and_latest_leads_to_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, made(5, best=3))
    found, complaints = load_latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.best, found.state, complaints) == (5, checkpoint_name(3), {"place": 5}, [])
    assert found.optimiser["count"] == 5
    assert (tmp_path / "latest").resolve() == (tmp_path / checkpoint_name(5)).resolve()


def test_the_newest_is_the_one_with_the_highest_number(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save_checkpoint(tmp_path, made(step, best=step))
    found, _ = load_latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1_000_000


def test_pruning_keeps_the_newest_and_what_they_call_the_best(tmp_path: Path) -> None:
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 4), (5, 4)):
        save_checkpoint(tmp_path, made(step, best=best))
    prune_checkpoints(tmp_path, up_to=4)  # as if 5 were damaged: it neither counts nor goes
    assert names(tmp_path) == ["latest", *map(checkpoint_name, (2, 3, 4, 5))]
    prune_checkpoints(tmp_path, up_to=5)
    assert names(tmp_path) == ["latest", *map(checkpoint_name, (4, 5))]


@pytest.fixture
def _small_disk() -> Iterator[None]:
    """Files may not grow beyond some bytes: what a full disk looks like to whoever writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    save_checkpoint(tmp_path, made(1, best=1))
    request.getfixturevalue("_small_disk")
    with pytest.raises(
        InputError, match=r"step-000002 cannot be written \(.*\); the one before is untouched"
    ) as caught:
        save_checkpoint(tmp_path, made(2, best=2))
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["latest", checkpoint_name(1)]
    assert load_checkpoint(tmp_path / checkpoint_name(1)).step == 1


@pytest.mark.parametrize(
    ("old", "new"), [('"place": 5', '"place": 4'), ('"step": 5', '"step": 6'), ('"files"', '"filed"'), ("{", "[")]
)
def test_a_state_with_one_letter_changed_is_damaged(tmp_path: Path, old: str, new: str) -> None:
    save_checkpoint(tmp_path, made(4, best=3))
    state = save_checkpoint(tmp_path, made(5, best=3)) / "state.json"
    state.write_text(state.read_text().replace(old, new, 1))
    found, complaints = load_latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 4
    (complaint,) = complaints
    assert f"checkpoint {state.parent} is damaged" in complaint
    assert "\n" not in complaint


@pytest.mark.parametrize("content", ["[" * 5_000, "7" * 5_000, "[]", "{}"])
def test_a_state_that_is_none_is_damaged(tmp_path: Path, content: str) -> None:
    place = save_checkpoint(tmp_path, made(5, best=3))
    (place / "state.json").write_text(content)
    assert load_latest_checkpoint(tmp_path)[0] is None


def test_a_state_of_an_older_release_is_read(tmp_path: Path) -> None:
    place = save_checkpoint(tmp_path, made(5, best=3))
    state = json.loads((place / "state.json").read_text())
    del state["seal"]
    (place / "state.json").write_text(json.dumps(state))
    assert load_checkpoint(place).state == {"place": 5}
