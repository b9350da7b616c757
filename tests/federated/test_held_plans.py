"""What an engine holds of a cohort whose groups are formed before anything is read does not grow with the cohort."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from tests.federated.small import CPU, Small, small

from sottovoce.federated.client import PlannedClient, plan_client
from sottovoce.federated.engines import Dropped, Engine, SharedEngine, StackedEngine
from sottovoce.federated.engines import engine as engine_module
from sottovoce.federated.feature_cache import SizedCache

EVERYBODY, KEPT = range(9), 2
ONE_STEP: dict[str, Any] = {"local": {"local_steps": 1}}


def engine_of(name: str, ours: Small) -> Engine:
    common: dict[str, Any] = {"device": CPU, "size": 2}
    context = replace(ours.context, _known=SizedCache(0))  # texts are held by plans alone
    if name == "stacked":
        return StackedEngine(context, ours.layout, **common)
    return SharedEngine(context, ours.layout, summed=False, **common)


def updates_of(engine: Engine, ours: Small) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for trained in engine.train(ours.server.parameters_P, EVERYBODY, step=0):
        assert not isinstance(trained, Dropped)
        rows = trained.update if trained.update.dim() == 2 else trained.update[None]
        found |= {client: row.clone() for client, row in zip(trained.clients, rows, strict=True)}
    return found


@pytest.mark.parametrize("name", ["stacked", "shared"])
def test_plans_are_held_within_their_bound_and_updates_are_the_same(
    name: str, tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", **ONE_STEP)
    alive: WeakSet[PlannedClient] = WeakSet()
    most = made = 0

    def watched(*given: Any, **rest: Any) -> PlannedClient:
        nonlocal most, made
        planned = plan_client(*given, **rest)
        alive.add(planned)
        most, made = max(most, len(alive)), made + 1
        return planned

    monkeypatch.setattr(engine_module, "plan_client", watched)
    whole = updates_of(engine_of(name, ours), ours)
    assert (most, made) == (len(EVERYBODY), len(EVERYBODY))
    alive.clear()
    most = made = 0
    largest = max(plan_client(ours.context, client, step=0).held_bytes for client in EVERYBODY)
    monkeypatch.setattr(engine_module, "PLANS_BYTES", KEPT * largest)
    again = updates_of(engine_of(name, ours), ours)
    smallest = min(plan_client(ours.context, client, step=0).held_bytes for client in EVERYBODY)
    # Those kept, the one that is being made, and the one before it.
    assert most <= KEPT * largest // smallest + 2 < len(EVERYBODY)
    assert made > len(EVERYBODY)
    assert all(torch.equal(again[client], whole[client]) for client in EVERYBODY)


def test_what_is_taken_is_kept_no_longer_and_makes_room() -> None:
    kept: SizedCache[str] = SizedCache(2)
    kept.keep(1, "one", size=1)
    kept.keep(2, "two", size=1)
    assert (kept.take(1), kept.take(1), kept.take(3)) == ("one", None, None)
    kept.keep(3, "three", size=1)
    assert (kept.get(2), kept.get(3)) == ("two", "three")
