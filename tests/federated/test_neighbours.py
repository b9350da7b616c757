"""One user more or less moves a sum by that user's clipped update and by nothing else, whichever engine trains.

This is what the sensitivity C of a release rests on. Everything that chance decides is switched on, and people have
unequal amounts of speech. Where sums are exact (a release's) it holds to the bit, else up to float32's rounding.

Shapes: P flat length.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.federated.small import CPU, Small, as_model, furthest, small
from tests.ranks import in_processes
from torch import Tensor

from sottovoce.base.processes import process_group
from sottovoce.data.audio.augment import SpecAugmentSettings
from sottovoce.federated.cohort import Clients, LocalClients
from sottovoce.federated.engines import Dropped, Engine, SequentialEngine, StackedEngine
from sottovoce.federated.engines.workers import WorkersEngine
from sottovoce.federated.ranks import ClientsOverRanks, RoundOrder

COHORT, NEWCOMER = (0, 1, 3, 4, 6, 8), 5
# With the newcomer, without it, and without each of the others.
COHORTS = [(*COHORT, NEWCOMER), COHORT, *([other for other in COHORT if other != one] for one in COHORT)]
CHANCE: dict[str, Any] = {
    "model": {"layers": 3, "dropout": 0.3, "layer_drop": 0.3},
    "local": {"local_epochs": 1, "batch_seconds": 1.6, "spec_augment": SpecAugmentSettings()},
    "people": {"max_seconds": 3.0},
    "cohort_size": 6,
}
PRIVATE: dict[str, Any] = {"noise_multiplier": 1.0, "share": "dim", "weighting": "utterances", "weight_cap": 4.0}
RELEASE = PRIVATE | {"mode": "secure", "root_seed": None}
FLOAT32 = 20.0  # units of rounding (see `furthest`), as for a round


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in a worker: matrix products of two threads add up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sums(ours: Small, clients: Clients) -> list[Tensor]:
    """Of every cohort, before the noise."""
    return [
        clients.sum(ours.server.parameters_P, np.array(sorted(cohort)), plan=ours.plan, step=1).total
        for cohort in COHORTS
    ]


def small_federation(ledger: Path, store: Path, privacy: dict[str, Any], part: str | None) -> Small:
    """Where a `part` is trained, some way from its start: with b = 0 no gradient reaches a."""
    ours = small(store, ledger, privacy=privacy, part=part, **CHANCE)
    for name, view in ours.layout.views(ours.server.parameters_P).items():
        view += 0.05 if name.endswith(".lora_b") else 0.0
    return ours


def sums_by(
    name: str, ours: Small, store: Path, folder: Path, privacy: dict[str, Any], *, part: str | None = None
) -> list[Tensor]:
    if name.startswith("ranks"):
        found = in_processes(2, sums_of_ranks, name, store, folder, privacy, part)[0]
        return [torch.from_numpy(total) for total in found]
    with closing(LocalClients(engine_of(name, ours))) as clients:
        return sums(ours, clients)


def engine_of(name: str, ours: Small) -> Engine:
    match name:
        case "workers":
            return WorkersEngine(ours.context, ours.layout, workers=2)
        case "stacked" | "ranks, stacked":
            return StackedEngine(ours.context, ours.layout, device=CPU, size=3)
    return SequentialEngine(ours.context, ours.layout, device=CPU)


def sums_of_ranks(
    name: str, store: Path, folder: Path, privacy: dict[str, Any], part: str | None
) -> list[NDArray[Any]]:
    torch.set_num_threads(1)
    with process_group(CPU) as processes:
        ours = small_federation(folder / f"{processes.rank}.jsonl", store, privacy, part)
        clients = ClientsOverRanks(engine_of(name, ours), processes, seconds=ours.context.population.seconds)
        if processes.is_first:
            return [total.numpy() for total in sums(ours, clients)]
        for _ in COHORTS:
            order: Any = processes.broadcast_object(None)
            assert isinstance(order, RoundOrder)
            clients.take_part(order, ours.server.parameters_P, plan=ours.plan)
        return []


def updates_alone(ours: Small) -> dict[int, tuple[Tensor, float]]:
    """Of each user by itself: the update and its weight."""
    found = {}
    engine = SequentialEngine(ours.context, ours.layout, device=CPU)
    for user in (*COHORT, NEWCOMER):
        (trained,) = engine.train(ours.server.parameters_P, [user], step=1)
        assert not isinstance(trained, Dropped)
        found[user] = trained.update.clone(), ours.plan.weight(float(trained.figures[0].utterances))
    return found


def moves(found: Sequence[Tensor]) -> dict[int, Tensor]:
    """By how much each user moves the sum of the others."""
    with_newcomer, whole, *without = found
    return {NEWCOMER: with_newcomer - whole} | {user: whole - rest for user, rest in zip(COHORT, without, strict=True)}


@pytest.mark.parametrize("part", [None, "lora(r=2, factors=alternate), output", "lora(r=2, factors=project)"])
@pytest.mark.parametrize("engine", ["sequential", "workers", "ranks"])
def test_in_a_release_a_user_moves_the_sum_by_the_own_clipped_update_to_the_bit(
    engine: str, part: str | None, tones: Path, tmp_path: Path
) -> None:
    """And by nothing in what the round holds."""
    ours = small_federation(tmp_path / "ledger.jsonl", tones, RELEASE, part)
    alone = updates_alone(ours)
    moved = moves(sums_by(engine, ours, tones, tmp_path, RELEASE, part=part))
    assert len({weight for _, weight in alone.values()}) > 1, "unequal amounts of speech"
    for user, (update_P, weight) in alone.items():
        clipped_P = ours.plan.clip(update_P, weight=weight, step=1)
        assert clipped_P.any()
        assert torch.equal(moved[user], clipped_P), user
        assert all(not ours.layout.views(clipped_P)[name].any() for name in ours.layout.held_at(1))


@pytest.mark.parametrize("engine", ["sequential", "workers", "ranks", "stacked", "ranks, stacked"])
def test_in_a_simulation_a_user_moves_the_sum_by_the_own_clipped_update_up_to_rounding(
    engine: str, tones: Path, tmp_path: Path
) -> None:
    """A sum of n clipped updates is rounded n times, to its own size at most. In a stack each update has rounding of
    its own besides, which shrinks with it as it is clipped."""
    ours = small(tones, tmp_path / "ledger.jsonl", privacy=PRIVATE, **CHANCE)
    alone = updates_alone(ours)
    found = sums_by(engine, ours, tones, tmp_path, PRIVATE)
    moved = moves(found)
    clipped = {user: ours.plan.clip(update_P, weight=weight) for user, (update_P, weight) in alone.items()}
    bound = ours.plan.clip_bound
    for user in alone:
        allowed = 2 * len(COHORTS[0]) * float(sum(one.norm() for one in clipped.values()))
        if "stacked" in engine:
            for other, (update_P, _) in alone.items():
                size = float(ours.server.parameters_P.norm() + 100 * update_P.norm())
                allowed += 2 * FLOAT32 * size * float(clipped[other].norm() / update_P.norm())
        assert float((moved[user] - clipped[user]).norm()) < allowed * 2.0**-24, user
        assert allowed * 2.0**-24 < bound / 50, "or the test would say little"


@pytest.mark.parametrize("size", [3, 9], ids=["threes", "one stack"])
def test_in_a_stack_nobody_elses_update_hangs_on_a_newcomer(size: int, tones: Path, tmp_path: Path) -> None:
    """Though others stand elsewhere in the stacks, and beside others, than without it."""
    ours = small(tones, tmp_path / "ledger.jsonl", privacy=PRIVATE, **CHANCE)
    engine = StackedEngine(ours.context, ours.layout, device=CPU, size=size)
    start = ours.model()
    with_newcomer, without = (
        {
            client: as_model(ours.layout, ours.server.parameters_P - update_P)
            for trained in engine.train(ours.server.parameters_P, cohort, step=1)
            if not isinstance(trained, Dropped)
            for client, update_P in zip(trained.clients, trained.update, strict=True)
        }
        for cohort in (sorted(COHORTS[0]), COHORT)
    )
    assert with_newcomer.keys() - without.keys() == {NEWCOMER}
    for client in COHORT:
        assert furthest(with_newcomer[client], without[client], start) < FLOAT32, client
