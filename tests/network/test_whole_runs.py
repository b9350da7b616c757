"""Whole runs with participants in this process: the same model and ledger as a simulation of the same people."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.network.places import ROUNDS, Place, check_same

from sottovoce.federated.cohort import quantise_model
from sottovoce.models.model_files import PARAMETERS
from sottovoce.network.messages import OrderKind, parse_order
from sottovoce.network.server.setup import with_client_noise
from sottovoce.network.transport.link import AnswerFunction
from sottovoce.privacy.ledger import verify
from sottovoce.training.checkpoint import LATEST
from sottovoce.training.run_folder import DIAGNOSTICS, LEDGER

Settled = Callable[..., Place]


@pytest.fixture
def settled(tmp_path: Path, cluster_stores: Path) -> Settled:
    def made(**federation: Any) -> Place:
        place = Place(tmp_path, cluster_stores)
        place.write_files(**federation)
        return place

    return made


@pytest.mark.parametrize("secure", [False, True], ids=["open", "secure"])
def test_a_run_is_the_simulation_s(settled: Settled, secure: bool) -> None:
    place = settled()
    outcome = place.run_here("served", secure=secure)
    assert outcome.results is not None
    check_same(outcome.folder, place.simulate("simulated"))


def test_a_run_that_was_stopped_goes_on_and_charges_every_step_once(settled: Settled) -> None:
    """Told to stop in its second round, by a signal as Ctrl-C sends it; nodes answer no attempt twice."""
    place = settled()

    def stops(answer: AnswerFunction) -> AnswerFunction:
        asked = 0

        def stopping(data: bytes) -> bytes | None:
            nonlocal asked
            asked += parse_order(data, limit=1 << 30).kind is OrderKind.TRAIN
            if asked == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return answer(data)

        return stopping

    stopped = place.run_here("served", secure=False, meddle=dict.fromkeys(place.people, stops))
    assert stopped.stopped_at is not None
    assert 0 < stopped.stopped_at < ROUNDS
    place.run_here("served", secure=False, resume=True)
    check_same(stopped.folder, place.simulate("simulated"))


def test_a_run_that_waits_for_nodes_can_be_stopped_and_has_paid_for_nothing_meanwhile(settled: Settled) -> None:
    """Somebody is silent from the second round on; whoever runs the server gives up while it waits for them."""
    place = settled(cohort_size=9)

    def goes(answer: AnswerFunction) -> AnswerFunction:
        heard: list[OrderKind] = []

        def going(data: bytes) -> bytes | None:
            heard.append(parse_order(data, limit=1 << 30).kind)
            if heard.count(OrderKind.TERMS) > 1:
                os.kill(os.getpid(), signal.SIGINT)
            return None if heard.count(OrderKind.TRAIN) > 1 else answer(data)

        return going

    stopped = place.run_here("served", secure=False, meddle={place.people[0]: goes})
    assert stopped.stopped_at == 2
    assert verify(stopped.folder / LEDGER).attempts == 2
    assert place.run_here("served", secure=False, resume=True).results is not None
    assert verify(stopped.folder / LEDGER).attempts == ROUNDS


def test_who_is_away_is_told_of_in_a_simulation(settled: Settled) -> None:
    place = settled(cohort_size=9)

    def away(answer: AnswerFunction) -> AnswerFunction:
        return lambda data: None if parse_order(data, limit=1 << 30).kind is OrderKind.TRAIN else answer(data)

    outcome = place.run_here("served", secure=True, meddle={place.people[0]: away})
    records = [json.loads(line) for line in (outcome.folder / DIAGNOSTICS).read_text().splitlines()]
    # In the first round it is asked and silent. Then it must be told the terms again, which it answers.
    assert [record["dropped"] for record in records] == [{"away, too late, or with too large an answer": 1}] * ROUNDS
    assert verify(outcome.folder / LEDGER).attempts == ROUNDS


def test_noise_by_clients_is_charged_as_noise_by_the_server(settled: Settled) -> None:
    place = settled(cohort_size=9)
    outcome = place.run_here("served", secure=True, planned=partial(with_client_noise, least=3, colluding=1))
    assert outcome.results is not None
    by_clients = verify(outcome.folder / LEDGER)
    by_server = verify(place.simulate("simulated") / LEDGER)
    assert by_clients.spent == by_server.spent


@pytest.mark.parametrize("secure", [False, True], ids=["open", "secure"])
def test_models_of_16_bits_make_the_simulation_s_run_and_take_half_the_bytes(settled: Settled, secure: bool) -> None:
    """What clients get is rounded in both; the server's own model is not, and its ledger is as ever."""
    sent: list[int] = []

    def counts(answer: AnswerFunction) -> AnswerFunction:
        def counting(data: bytes) -> bytes | None:
            order = parse_order(data, limit=1 << 30)
            if order.kind is OrderKind.TRAIN:
                sent.append(len(order.payload))
            return answer(data)

        return counting

    place = settled(model_bits=16)
    outcome = place.run_here("served", secure=secure, meddle=dict.fromkeys(place.people, counts))
    assert outcome.results is not None
    check_same(outcome.folder, place.simulate("simulated"))
    told = outcome.results["communication"]
    assert set(sent) == {told["bytes_down"]}
    assert 2 * told["bytes_down"] == told["bytes_up"]
    model = load_file(outcome.folder / "checkpoints" / LATEST / PARAMETERS)
    assert any(not torch.equal(quantise_model(tensor, 16), tensor) for tensor in model.values())


def test_a_simulation_of_16_bits_is_another_run(settled: Settled) -> None:
    place = settled()
    exact = place.simulate("exact")
    recipe = yaml.safe_load(place.recipe_file.read_text())
    recipe["federation"]["model_bits"] = 16
    place.recipe_file.write_text(yaml.safe_dump(recipe))
    rounded = place.simulate("rounded")
    models = [load_file(folder / "checkpoints" / LATEST / PARAMETERS) for folder in (exact, rounded)]
    assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])
