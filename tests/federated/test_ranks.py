"""However many processes share a cohort, the round comes to the same."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.small import Small, furthest, small
from tests.ranks import in_processes
from tests.reference_round import Model

from sottovoce.base.errors import InputError
from sottovoce.base.processes import Processes, process_group
from sottovoce.data.store import Store
from sottovoce.federated.cohort import CohortSum, LocalClients
from sottovoce.federated.engines import StackedEngine
from sottovoce.federated.ranks import ClientsOverRanks, RoundOrder
from sottovoce.privacy.clipping import AdaptiveClipping

CPU = torch.device("cpu")
WORLDS = (1, 2, 3)
STEPS = 2
BAD = {2, 5, 7}

CASES: dict[str, dict[str, Any]] = {
    "private": {"privacy": {"noise_multiplier": 0.7, "share": "dim"}, "cohort_size": 6},
    "stacked": {"privacy": {"noise_multiplier": 0.7}, "cohort_size": 6},
    "clip bound moves": {
        "privacy": {
            "noise_multiplier": 0.7,
            "adaptive": AdaptiveClipping(target_quantile=0.3, count_noise_std=2.0),
        },
        "cohort_size": 6,
    },
    "shares by utterances": {"privacy": {"weighting": "utterances", "clip_bound": math.inf}, "cohort_size": 9},
    "shares by loss": {"privacy": {"weighting": "loss", "clip_bound": math.inf}, "cohort_size": 9},
    "shares by loss as released": {
        "privacy": {"weighting": "loss_released", "clip_bound": math.inf},
        "local": {"local_epochs": 2},
        "cohort_size": 9,
    },
    "shares by WER as released": {
        "privacy": {"weighting": "wer_released", "clip_bound": math.inf},
        "shared_dev": "dev",
        "cohort_size": 9,
    },
    "one client, or none": {"privacy": {"noise_multiplier": 0.7}, "cohort_size": 1},
    "some clients fail": {"privacy": {"weighting": "utterances", "clip_bound": math.inf}, "cohort_size": 9},
}


# In each of the processes.


def all_cases(store: Path, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with process_group(CPU) as processes:
        for name, case in CASES.items():
            ours = small(store, folder / f"{processes.world}-{processes.rank}-{name}.jsonl", **case)
            if name == "some clients fail":
                spoil(ours)
            found[name] = rounds(ours, processes, stacked=name == "stacked", steps=8 if "none" in name else STEPS)
        found["exact"] = exact_sum(store, folder, processes)
    return found


def rounds(ours: Small, processes: Processes, *, stacked: bool, steps: int) -> dict[str, Any]:
    # In float64: who shares a stack depends on the dealing, and with it the order of sums.
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float64, "size": 2}
    inner: Any = StackedEngine(ours.context, ours.layout, **options) if stacked else ours.engine
    over_ranks = ClientsOverRanks(inner, processes, seconds=ours.context.population.seconds)
    clients = over_ranks if processes.is_distributed else LocalClients(inner)
    start, first_P = ours.model(), ours.server.parameters_P.clone()
    ends, figures = [], []
    for step in range(steps):
        ours.server.parameters_P.copy_(first_P)  # no round begins with what another made of its rounding
        if processes.is_first:
            done = ours.round(step, clients=clients)
            assert done.private is not None
            figures.append(done.private.as_json(ours.plan) | {"audio_seconds": done.private.audio_seconds})
            ours.plan = ours.next_plan
        else:
            order: Any = processes.broadcast_object(None)
            assert isinstance(order, RoundOrder)
            over_ranks.take_part(order, ours.server.parameters_P, plan=ours.plan)
        ends.append(ours.model())
    return {"start": start, "ends": ends, "figures": figures, "clip_bound": ours.plan.clip_bound}


def spoil(ours: Small) -> None:
    """The audio of three clients cannot be read; who gets them is up to the dealing."""
    rows = {row for bad in BAD for row in ours.context.population.client(bad).utterances.tolist()}
    whole = Store.samples

    def samples(self: Store, row: int) -> Any:
        if row in rows:
            raise InputError("its audio is damaged")
        return whole(self, row)

    Store.samples = samples  # type: ignore[method-assign]


def sum_together(
    ours: Small,
    cohort: list[int],
    processes: Processes,
    *,
    step: int = 0,
    interrupted: Callable[[], bool] = lambda: False,
) -> CohortSum | None:
    """The sum over given clients, before the noise, in the first process; None in the others, who took part."""
    clients = ClientsOverRanks(ours.engine, processes, seconds=ours.context.population.seconds)
    if processes.is_first:
        return clients.sum(ours.server.parameters_P, np.array(cohort), plan=ours.plan, step=step)
    order: Any = processes.broadcast_object(None)
    clients.take_part(order, ours.server.parameters_P, plan=ours.plan, interrupted=interrupted)
    return None


def exact_sum(store: Path, folder: Path, processes: Processes) -> np.ndarray | None:
    """The sum of a release over six given clients."""
    ours = small(
        store,
        folder / f"{processes.world}-{processes.rank}-exact.jsonl",
        privacy={"mode": "secure", "noise_multiplier": 1.0, "root_seed": None},
    )
    summed = sum_together(ours, [0, 1, 3, 4, 6, 8], processes)
    if summed is None:
        return None
    assert summed.total.dtype == torch.float64
    assert summed.diagnostics is None, "a release keeps none"
    return summed.total.numpy()


def votes(store: Path, folder: Path) -> list[bool]:
    """What the first of two processes hears in two rounds, before the second of which the other was asked to stop."""
    with process_group(CPU) as processes:
        ours = small(store, folder / f"votes-{processes.rank}.jsonl")
        heard = []
        for step in range(2):
            summed = sum_together(ours, [0, 1, 2], processes, step=step, interrupted=lambda step=step: step == 1)
            heard.append(summed is not None and summed.interrupted)
    return heard


# What comes of it.


@pytest.fixture(scope="module")
def found(tones: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By the number of processes: what the first one has."""
    folder = tmp_path_factory.mktemp("ledgers")
    return {world: in_processes(world, all_cases, tones, folder)[0] for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", CASES)
def test_the_model_is_the_same_up_to_rounding(name: str, world: int, found: dict[int, dict[str, Any]]) -> None:
    one, several = found[1][name], found[world][name]
    start: Model = one["start"]
    for end, expected in zip(several["ends"], one["ends"], strict=True):
        assert furthest(end, expected, start) < 1
    assert any(np.any(end[layer] != start[layer]) for end in one["ends"] for layer in start)
    assert several["clip_bound"] == one["clip_bound"]


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", CASES)
def test_the_figures_are_those_of_the_whole_cohort(name: str, world: int, found: dict[int, dict[str, Any]]) -> None:
    for one, several in zip(found[1][name]["figures"], found[world][name]["figures"], strict=True):
        for figure in ("cohort", "dropped", "utterances_left_out", "updates", "non_finite", "clip_fraction"):
            assert several[figure] == one[figure]
        for figure in ("loss", "norm", "audio_seconds"):
            # Without clients there is no loss.
            assert (several[figure] or 0.0) == pytest.approx(one[figure] or 0.0, rel=1e-4)
        for layer, norms in one["layers"].items():
            assert several["layers"][layer] == pytest.approx(norms, rel=1e-3, abs=1e-7)


def test_cases_are_what_they_are_called(found: dict[int, dict[str, Any]]) -> None:
    sizes = [figures["cohort"] for figures in found[3]["one client, or none"]["figures"]]
    assert {0, 1} <= set(sizes)
    failed = [figures["dropped"] for figures in found[2]["some clients fail"]["figures"]]
    assert failed[0]["its audio is damaged"] >= 2
    assert found[2]["clip bound moves"]["clip_bound"] != 0.2


def test_the_sum_of_a_release_has_the_same_bits_whoever_adds_it_up(found: dict[int, dict[str, Any]]) -> None:
    assert found[1]["exact"].any()
    for world in WORLDS[1:]:
        assert np.array_equal(found[world]["exact"], found[1]["exact"])


def test_whoever_is_asked_to_stop_the_first_one_hears_of_it_after_that_round(tones: Path, tmp_path: Path) -> None:
    assert in_processes(2, votes, tones, tmp_path)[0] == [False, True]
