"""Participants with their own speech make, to the bit, the model that a simulation of all of them makes."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.federated.small import MADE_FROM_NOTHING
from tests.network.conftest import MakeCluster
from tests.network.local_cluster import NUMBERS, LocalCluster, content, recipe_of
from tests.tones import pack_tones, speaker

from sottovoce.data.store import Store
from sottovoce.federated.cohort import Clients, LocalClients
from sottovoce.federated.round import RoundState, run_round
from sottovoce.federated.server import Server
from sottovoce.models.family import find_family
from sottovoce.network.invitation import SecureSums
from sottovoce.privacy.ledger import Ledger, verify
from sottovoce.privacy.plan import Plan
from sottovoce.training.engines import build_engine
from sottovoce.training.refactoring import build_refactoring
from sottovoce.training.run_data import build_recipe_population
from sottovoce.training.start_model import split_trained_part

ROUNDS = 2


def simulated(local_cluster: LocalCluster, plan: Plan) -> Clients:
    """All of the cluster's people in one process."""
    recipe = local_cluster.recipe
    population = build_recipe_population(recipe, local_cluster.store, recipe.federated.clients.population(recipe.data))
    engine = build_engine("sequential", recipe, population, local_cluster.start, plan, device=torch.device("cpu"))
    return LocalClients(engine)


def trained(local_cluster: LocalCluster, clients: Clients, plan: Plan, ledger: Path) -> torch.Tensor:
    """The server's model after some rounds."""
    settings = local_cluster.recipe.federated
    initial_P = local_cluster.layout.flatten(split_trained_part(local_cluster.recipe, local_cluster.start).initial)
    server = Server(settings.server, local_cluster.layout, initial_P)
    part = split_trained_part(local_cluster.recipe, local_cluster.start)
    after_step = [build_refactoring(part, server)] if part.projected else []
    with closing(Ledger(ledger, header=plan.ledger_header(run="local_cluster"))) as held:
        state = RoundState(server, plan, held)
        for step in range(ROUNDS):
            run_round(state, clients, step=step, after_step=after_step)
    return server.parameters_P


def compare(local_cluster: LocalCluster, folder: Path) -> None:
    for name in local_cluster.people:
        local_cluster.welcome(name)
    over_network = trained(local_cluster, local_cluster, local_cluster.plan, folder / "network.jsonl")
    here = trained(
        local_cluster, simulated(local_cluster, local_cluster.plan), local_cluster.plan, folder / "here.jsonl"
    )
    assert torch.equal(over_network, here)
    assert not torch.equal(
        here, local_cluster.layout.flatten(split_trained_part(local_cluster.recipe, local_cluster.start).initial)
    )


@pytest.mark.parametrize("sum_bits", [32, 64])
def test_with_sums_that_the_server_cannot_open(make_cluster: MakeCluster, tmp_path: Path, sum_bits: int) -> None:
    """Here nothing is clipped twice and nobody is rounded differently: masks cancel to the bit."""
    compare(make_cluster(content(cohort_size=7), sum_bits=sum_bits, secure=SecureSums(least=3)), tmp_path)


def test_words_of_32_bits(make_cluster: MakeCluster, tmp_path: Path) -> None:
    compare(make_cluster(sum_bits=32), tmp_path)


def test_silos(make_cluster: MakeCluster, tmp_path: Path, cluster_stores: Path) -> None:
    """A silo holds whom its place would have in a simulation, and trains as one client."""
    given = content(clients={"rule": "silo", "silos": 3, "max_seconds": 2.0}, cohort_size=2)
    recipe = recipe_of(given)
    everybody = Store(cluster_stores / "tones")
    population = build_recipe_population(recipe, everybody, recipe.federated.clients.population(recipe.data))
    for client in population:
        names = {everybody.user(row).name for row in client.speakers.tolist()}
        assert names
        members = [number for number in NUMBERS if speaker(number).name in names]
        pack_tones(tmp_path / "stores" / client.id, people=members, letters=(2, 3), utterances=3)  # type: ignore[arg-type]
    (tmp_path / "stores" / "tones").symlink_to(cluster_stores / "tones")
    compare(make_cluster(given, people=["silo-0", "silo-1", "silo-2"], stores=tmp_path / "stores"), tmp_path)


def test_a_grid_moves_a_simulation_by_next_to_nothing(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Without sum_bits a simulation's sums are float32; an update loses less than a cell of the grid to it."""
    local_cluster = make_cluster()
    plain = Plan(local_cluster.plan.settings, local_cluster.layout)
    totals = [
        simulated(local_cluster, plan)
        .sum(
            local_cluster.layout.flatten(split_trained_part(local_cluster.recipe, local_cluster.start).initial),
            np.arange(9),
            plan=plan,
            step=0,
        )
        .total
        for plan in (local_cluster.plan, plain)
    ]
    bound = 9 * (local_cluster.plan.grid or 0) + 9 * 2.0**-23 * plain.clip_bound
    assert float((totals[0] - totals[1].double()).abs().max()) <= bound


@pytest.mark.parametrize("family", sorted(MADE_FROM_NOTHING))
def test_every_family(make_cluster: MakeCluster, tmp_path: Path, family: str) -> None:
    given = content()
    given["model"] = {"family": family, **find_family(family).smoke_options}
    compare(make_cluster(given), tmp_path)


@pytest.mark.parametrize(
    "trainable",
    [
        *("lora(r=2)", "blocks.0, output", "lora(r=2, alpha=4), output"),
        *("lora(r=2, factors=alternate)", "lora(r=2, factors=project), output"),
    ],
)
def test_every_part(make_cluster: MakeCluster, tmp_path: Path, trainable: str) -> None:
    local_cluster = make_cluster(content(trainable=trainable))
    assert local_cluster.layout.dimension < sum(p.numel() for p in local_cluster.start.parameters.values())
    compare(local_cluster, tmp_path)


def test_weights_caps_and_holdouts(make_cluster: MakeCluster, tmp_path: Path) -> None:
    privacy = {"weighting": "seconds", "weight_cap": 4.0, "share": "dim"}
    compare(make_cluster(content(privacy=privacy, clients={"max_seconds": 1.0, "holdout": 0.34})), tmp_path)


def test_clients_that_cannot_be_trained_send_zeros_in_both(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """With so short a batch, whoever has said nothing shorter has nothing to train on."""
    compare(make_cluster(content(local={"batch_seconds": 0.45, "lr": 0.1, "local_steps": 2})), tmp_path)


@pytest.mark.parametrize("secure", [None, SecureSums(least=3)], ids=["open", "masked"])
def test_a_release_sums_what_its_people_send(
    make_cluster: MakeCluster, tmp_path: Path, secure: SecureSums | None
) -> None:
    """A release's noise is never the same twice, so sums are compared; then rounds are charged, noised and made."""
    local_cluster = make_cluster(content(privacy={"mode": "secure"}, cohort_size=9), sum_bits=32, secure=secure)
    for name in local_cluster.people:
        local_cluster.welcome(name)
    server_P, everybody = (
        local_cluster.layout.flatten(split_trained_part(local_cluster.recipe, local_cluster.start).initial),
        np.arange(9),
    )
    sums = [
        clients.sum(server_P, everybody, plan=local_cluster.plan, step=0).total
        for clients in (local_cluster, simulated(local_cluster, local_cluster.plan))
    ]
    assert torch.equal(*sums)
    assert sums[0].any()
    trained(local_cluster, local_cluster, local_cluster.plan, tmp_path / "ledger.jsonl")
    assert verify(tmp_path / "ledger.jsonl").steps == ROUNDS
