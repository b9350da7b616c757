"""Participants with their own speech make, to the bit, the model that a simulation of all of them makes."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.deployment.conftest import Settle
from tests.deployment.village import NUMBERS, Village, content, recipe_of
from tests.tones import pack_tones, speaker

from sottovoce.deployment.invitation import SecureSums
from sottovoce.federated.cohort import Clients, ClientsHere
from sottovoce.federated.round import RoundState, run_round
from sottovoce.federated.server import Server
from sottovoce.models.family import REGISTERED, find_family
from sottovoce.privacy.ledger import Ledger, verify
from sottovoce.privacy.plan import Plan
from sottovoce.store import Store
from sottovoce.training.engines import build_engine
from sottovoce.training.run_data import build_recipe_population
from sottovoce.training.start_model import split_trained_part

ROUNDS = 2


def simulated(village: Village, plan: Plan) -> Clients:
    """All of the village's people in one process."""
    recipe = village.recipe
    population = build_recipe_population(recipe, village.store, recipe.federated.clients.population(recipe.data))
    engine = build_engine("sequential", recipe, population, village.start, plan, device=torch.device("cpu"))
    return ClientsHere(engine)


def trained(village: Village, clients: Clients, plan: Plan, ledger: Path) -> torch.Tensor:
    """The server's model after some rounds."""
    settings = village.recipe.federated
    initial_P = village.layout.flatten(split_trained_part(village.recipe, village.start).initial)
    server = Server(settings.server, village.layout, initial_P)
    with closing(Ledger(ledger, header=plan.ledger_header(run="village"))) as held:
        state = RoundState(server, plan, held)
        for step in range(ROUNDS):
            run_round(state, clients, step=step)
    return server.parameters_P


def compare(village: Village, folder: Path) -> None:
    for name in village.people:
        village.welcome(name)
    over_network = trained(village, village, village.plan, folder / "network.jsonl")
    here = trained(village, simulated(village, village.plan), village.plan, folder / "here.jsonl")
    assert torch.equal(over_network, here)
    assert not torch.equal(here, village.layout.flatten(split_trained_part(village.recipe, village.start).initial))


@pytest.mark.parametrize("sum_bits", [32, 64])
def test_with_sums_that_the_server_cannot_open(settle: Settle, tmp_path: Path, sum_bits: int) -> None:
    """Here nothing is clipped twice and nobody is rounded differently: masks cancel to the bit."""
    compare(settle(content(cohort_size=7), sum_bits=sum_bits, secure=SecureSums(least=3)), tmp_path)


def test_words_of_32_bits(settle: Settle, tmp_path: Path) -> None:
    compare(settle(sum_bits=32), tmp_path)


def test_silos(settle: Settle, tmp_path: Path, village_stores: Path) -> None:
    """A silo holds whom its place would have in a simulation, and trains as one client."""
    given = content(clients={"rule": "silo", "silos": 3, "max_seconds": 2.0}, cohort_size=2)
    recipe = recipe_of(given)
    everybody = Store(village_stores / "tones")
    population = build_recipe_population(recipe, everybody, recipe.federated.clients.population(recipe.data))
    for client in population:
        names = {everybody.user(row).name for row in client.speakers.tolist()}
        assert names
        members = [number for number in NUMBERS if speaker(number).name in names]
        pack_tones(tmp_path / "stores" / client.id, people=members, letters=(2, 3), utterances=3)  # type: ignore[arg-type]
    (tmp_path / "stores" / "tones").symlink_to(village_stores / "tones")
    compare(settle(given, people=["silo-0", "silo-1", "silo-2"], stores=tmp_path / "stores"), tmp_path)


def test_a_grid_moves_a_simulation_by_next_to_nothing(settle: Settle, tmp_path: Path) -> None:
    """Without sum_bits a simulation's sums are float32; an update loses less than a cell of the grid to it."""
    village = settle()
    plain = Plan(village.plan.settings, village.layout)
    totals = [
        simulated(village, plan)
        .sum(
            village.layout.flatten(split_trained_part(village.recipe, village.start).initial),
            np.arange(9),
            plan=plan,
            step=0,
        )
        .total
        for plan in (village.plan, plain)
    ]
    bound = 9 * (village.plan.grid or 0) + 9 * 2.0**-23 * plain.clip_bound
    assert float((totals[0] - totals[1].double()).abs().max()) <= bound


@pytest.mark.parametrize("family", sorted(REGISTERED))
def test_every_family(settle: Settle, tmp_path: Path, family: str) -> None:
    given = content()
    given["model"] = {"family": family, **find_family(family).tiny}
    compare(settle(given), tmp_path)


@pytest.mark.parametrize("trainable", ["lora(r=2)", "blocks.0, output", "lora(r=2, alpha=4), output"])
def test_every_part(settle: Settle, tmp_path: Path, trainable: str) -> None:
    village = settle(content(trainable=trainable))
    assert village.layout.dimension < sum(p.numel() for p in village.start.parameters.values())
    compare(village, tmp_path)


def test_weights_caps_and_holdouts(settle: Settle, tmp_path: Path) -> None:
    privacy = {"weighting": "seconds", "weight_cap": 4.0, "share": "dim"}
    compare(settle(content(privacy=privacy, clients={"max_seconds": 1.0, "holdout": 0.34})), tmp_path)


def test_clients_that_cannot_be_trained_send_zeros_in_both(settle: Settle, tmp_path: Path) -> None:
    """With so short a batch, whoever has said nothing shorter has nothing to train on."""
    compare(settle(content(local={"batch_seconds": 0.45, "lr": 0.1, "local_steps": 2})), tmp_path)


@pytest.mark.parametrize("secure", [None, SecureSums(least=3)], ids=["open", "masked"])
def test_a_release_sums_what_its_people_send(settle: Settle, tmp_path: Path, secure: SecureSums | None) -> None:
    """A release's noise is never the same twice, so sums are compared; then rounds are charged, noised and made."""
    village = settle(content(privacy={"mode": "secure"}, cohort_size=9), sum_bits=32, secure=secure)
    for name in village.people:
        village.welcome(name)
    server_P, everybody = (
        village.layout.flatten(split_trained_part(village.recipe, village.start).initial),
        np.arange(9),
    )
    sums = [
        clients.sum(server_P, everybody, plan=village.plan, step=0).total
        for clients in (village, simulated(village, village.plan))
    ]
    assert torch.equal(*sums)
    assert sums[0].any()
    trained(village, village, village.plan, tmp_path / "ledger.jsonl")
    assert verify(tmp_path / "ledger.jsonl").steps == ROUNDS
