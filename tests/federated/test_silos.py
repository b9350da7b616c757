"""Silos in a round: one person's speech moves the update of their own silo alone, and an empty silo moves nothing."""

from pathlib import Path

import torch
from tests.federated.small import Small, small
from tests.tones import pack_tones

from sottovoce.federated.engines import Dropped

SILOS = 4
PEOPLE = {"clients": "silo", "silos": SILOS}
# Everything random switched on: streams must be those of the silo, whoever is in the others.
RANDOM = {"model": {"dropout": 0.3, "layer_drop": 0.5}}


def updates(ours: Small) -> dict[str, torch.Tensor]:
    """Each silo's clipped update; zero where there is nothing to train on."""
    population = ours.context.population
    found = {population.client(index).id: ours.plan.new_total() for index in range(len(population))}
    for trained in ours.engine.train(ours.server.parameters_P, range(len(population)), step=0):
        if not isinstance(trained, Dropped):
            ours.plan.accumulate(found[population.client(trained.clients[0]).id], trained.update)
    return found


def test_a_speaker_who_leaves_moves_their_own_silo_alone(tmp_path: Path) -> None:
    pack_tones(tmp_path / "everybody", people=range(13))
    pack_tones(tmp_path / "without", people=range(12))  # s12, who trains, has left
    here, there = (
        small(tmp_path / name, tmp_path / f"{name}.jsonl", people=PEOPLE, **RANDOM) for name in ("everybody", "without")
    )
    names = {
        client.id: {here.context.store.user(row).name for row in client.speakers.tolist()}
        for client in here.context.population
    }
    before, after = updates(here), updates(there)
    assert before.keys() == after.keys() == {f"silo-{number}" for number in range(SILOS)}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name, people in names.items() if "s12" in people}


def test_an_empty_silo_sends_a_zero_update(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", people=PEOPLE | {"silos": 40}, cohort_size=40)
    empty = ours.context.population.left_out.clients_without_speech
    assert ours.plan.settings.population_size == 40
    done = ours.figures(0)
    assert done.cohort == 40  # everybody: S = K
    assert sum(done.dropped.values()) == empty > 0
    assert all("no utterance to train on (none there)" in reason for reason in done.dropped)
