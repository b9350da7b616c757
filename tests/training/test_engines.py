"""Which engine a run takes on a CPU, and in which precision."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.training.running import run_here

from sottovoce.config import FederationSettings
from sottovoce.models import precision
from sottovoce.training import engines

FEW: dict[str, Any] = {"steps": 10, "cohort_size": 8}
MANY: dict[str, Any] = {"steps": 100, "cohort_size": 8}
SETTINGS: dict[str, Any] = {
    "local": {"batch_seconds": 2.0, "lr": 0.1, "local_steps": 1},
    "server": {"optimiser": {"name": "sgd"}, "schedule": {"name": "constant", "lr": 1.0}},
}


@pytest.mark.parametrize(
    ("size", "cores", "expected"),
    [
        (MANY, 4, "workers"),
        (MANY, 1, "sequential"),  # nobody to share the work with
        (MANY, 5, "sequential"),  # fewer than two clients each
        (FEW, 4, "sequential"),  # over before the processes have started
        (MANY | {"workers": 2}, 16, "workers"),
        (MANY | {"workers": 1}, 4, "sequential"),
    ],
)
def test_workers_are_chosen_where_all_have_enough_to_do(
    size: dict[str, Any], cores: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "usable_cores", lambda: cores)
    chosen, why = engines.choose_cpu_engine(FederationSettings(**SETTINGS | size))
    assert chosen == expected
    assert why["why"]


WIDE = ["model.layers=1", "model.width=192", "federation.steps=2", "federation.evaluate_every=2"]


@contextmanager
def _asked_at_once() -> Iterator[Callable[[], bool]]:
    """As if somebody had pressed Ctrl-C before the first round."""
    yield lambda: True


@pytest.mark.usefixtures("undrawn", "one_thread")
def test_precision_is_chosen_once_for_a_run(
    federated_recipe: Path, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the processor of its beginning: resumed on another one, it ends with the same bits."""

    def run(name: str, *changes: str, has_instructions: bool) -> tuple[str, bytes]:
        monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: has_instructions)
        folder = tmp_path / name
        run_here(federated_recipe, [*WIDE, *changes], short_stores, folder, resume=folder.exists())
        weights = (folder / "checkpoints/latest/model.safetensors").read_bytes()
        return json.loads((folder / "engine.json").read_text())["precision"], weights

    whole = run("whole", has_instructions=True)
    with monkeypatch.context() as patch:
        patch.setattr("sottovoce.training.loop.interruptible", _asked_at_once)
        begun = run("moved", has_instructions=True)
    assert begun != whole == run("moved", has_instructions=False)
    plain = run("plain", has_instructions=False)
    assert (whole[0], plain[0]) == ("bfloat16", "float32")
    assert plain == run("pinned", "federation.precision=float32", has_instructions=True)
    assert plain[1] != whole[1]
