"""The server's step: momentum, schedule, average, and a checkpoint that forgets nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.small import as_model
from tests.reference_round import LAMB, SGD

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout

SHAPES = {"a": torch.zeros(3, 4), "b": torch.zeros(5)}
LAYOUT = Layout.of(SHAPES)


def drawn(name: str, step: int = 0) -> torch.Tensor:
    generator = torch_stream(1, name, step)
    return LAYOUT.flatten({n: torch.randn(t.shape, generator=generator) for n, t in SHAPES.items()})


def server(**changes: Any) -> Server:
    chosen: dict[str, Any] = {"optimiser": {"name": "sgd"}, "schedule": {"name": "constant", "lr": 0.5}}
    return Server(ServerSettings(**chosen | changes), LAYOUT, drawn("start"))


@pytest.mark.parametrize(
    ("optimiser", "twin"),
    [({"name": "sgd", "momentum": 0.9}, SGD(momentum=0.9)), ({"name": "lamb"}, LAMB())],
    ids=["momentum", "lamb"],
)
def test_the_average_and_the_schedule_follow_their_formulas(optimiser: dict[str, Any], twin: SGD | LAMB) -> None:
    """θ̄ ← κ·θ̄ + (1−κ)·θ after every step, the learning rate halved from step 2 on."""
    schedule = {"name": "step", "lr": 0.5, "transition_begin": 2, "transition_steps": 2, "decay_rate": 0.5}
    ours = server(optimiser=optimiser, schedule=schedule, ema=0.8)
    theta = average = as_model(LAYOUT, ours.parameters_P)
    for step in range(4):
        lr = 0.5 if step < 2 else 0.25
        assert ours.step(drawn("gradient", step), step=step).lr == lr
        ours.average()
        theta = twin.step(theta, as_model(LAYOUT, drawn("gradient", step)), lr=lr)
        average = {name: 0.8 * average[name] + 0.2 * theta[name] for name in theta}
    for found, expected in ((ours.parameters_P, theta), (ours.result_P, average)):
        for name, layer in as_model(LAYOUT, found).items():
            np.testing.assert_allclose(layer, expected[name], rtol=2e-5, atol=1e-6)


def test_without_an_average_the_result_is_the_model_itself() -> None:
    ours = server()
    assert ours.result_P is ours.parameters_P


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("optimiser", ["sgd", "adam", "adagrad", "lars", "lamb"])
def test_a_restored_server_goes_on_with_the_same_bits(optimiser: str, ema: float | None) -> None:
    whole, first, second = (server(optimiser={"name": optimiser}, ema=ema) for _ in range(3))
    for step in range(4):
        whole.step(drawn("gradient", step), step=step)
        whole.average()
    for step in range(2):
        first.step(drawn("gradient", step), step=step)
        first.average()
    kept = {name: tensor.clone() for name, tensor in first.tensors().items()}
    second.restore(first.parameters_P.clone(), kept)
    for step in range(2, 4):
        second.step(drawn("gradient", step), step=step)
        second.average()
    assert torch.equal(second.parameters_P, whole.parameters_P)
    assert torch.equal(second.result_P, whole.result_P)


def test_a_checkpoint_without_an_average_is_refused_where_there_should_be_one() -> None:
    plain, averaging = server(), server(ema=0.9)
    with pytest.raises(InputError, match="saved without ema"):
        averaging.restore(plain.parameters_P, plain.tensors())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ema": 1.0}, "ema=1.0, expected a share in"),
        ({"optimiser": {"name": "lamp"}}, "unknown optimiser 'lamp', did you mean 'lamb'"),
        ({"schedule": {"name": "constant"}}, "lr"),
    ],
)
def test_mistakes_in_the_servers_settings_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        server(**changes)
