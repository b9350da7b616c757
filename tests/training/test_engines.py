"""Which engine a run takes on a CPU."""

from typing import Any

import pytest

from sottovoce.config import FederationSettings
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
