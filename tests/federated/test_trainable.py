"""Clients that train a part of a model: every engine gives the same updates, of that part alone."""

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.small import CPU, EXACT, loaded_client, small_context, start_stream

from sottovoce.base.seeds import torch_stream
from sottovoce.config import FederationSettings
from sottovoce.federated.client import ClientContext, Proximal
from sottovoce.federated.engines import Dropped, Engine, SequentialEngine, StackedEngine
from sottovoce.federated.engines.workers import WorkersEngine
from sottovoce.federated.feature_cache import FeatureCache
from sottovoce.flat.layout import Layout
from sottovoce.models.family import step_loss
from sottovoce.models.trainable import Trainable, parse_part, split_parameters
from sottovoce.privacy.settings import Weighting

EVERYBODY = range(9)
PARTS = ["lora(r=2, alpha=6)", "lora(r=2), output", "blocks.1, output.bias", "*.norm.*"]


@dataclass
class Parted:
    """A context in which a part is trained, and the server's model of that part, some way from its start."""

    context: ClientContext
    part: Trainable
    layout: Layout
    server_P: torch.Tensor

    def updates(self, engine: Engine, *, step: int = 0) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for trained in engine.train(self.server_P, EVERYBODY, step=step):
            assert not isinstance(trained, Dropped), trained
            rows = trained.update if trained.update.dim() == 2 else trained.update[None]
            found |= {client: row.clone() for client, row in zip(trained.clients, rows, strict=True)}
        return found


def parted(store: Path, text: str, **context: Any) -> Parted:
    made = small_context(store, **context)
    part = split_parameters(
        parse_part(text),
        made.family.init(made.model, generator=start_stream()),
        is_lora_target=made.family.transfer.is_lora_target,
        generator=torch_stream(3, "low rank"),
    )
    layout = Layout.of(part.initial)
    server_P = layout.flatten(part.initial)
    for number, view in enumerate(layout.views(server_P).values()):
        view += 0.05 * torch.randn(view.shape, generator=torch_stream(3, "moved", number))
    return Parted(replace(made, frozen=part.frozen), part, layout, server_P)


@pytest.mark.parametrize("text", PARTS)
@pytest.mark.parametrize("local", [{}, {"local_epochs": 2, "batch_seconds": 1.0}], ids=["steps", "epochs"])
def test_stacked_clients_move_as_they_do_one_by_one(text: str, local: dict[str, Any], tones: Path) -> None:
    """With blocks dropped, each client its own, a pull back to the server, and stacks that do not divide the nine."""
    ours = parted(tones, text, model={"layer_drop": 0.4}, local={**local, "proximal": Proximal(mu=0.1)})
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float64}
    expected = ours.updates(SequentialEngine(ours.context, ours.layout, **options))
    found = ours.updates(StackedEngine(ours.context, ours.layout, size=4, **options))
    assert found.keys() == expected.keys() == set(EVERYBODY)
    assert sum(bool(update.any()) for update in expected.values()) > 6, "few lose every block that is trained"
    for client, update in expected.items():
        assert (found[client] - update).norm() <= EXACT * update.norm(), client


@pytest.mark.usefixtures("one_thread")  # as in a worker
def test_worker_processes_have_the_sequential_engines_bits(tones: Path) -> None:
    ours = parted(tones, "lora(r=2, alpha=6)")
    expected = ours.updates(SequentialEngine(ours.context, ours.layout, device=CPU))
    with closing(WorkersEngine(ours.context, ours.layout, workers=1)) as engine:
        found = ours.updates(engine)
    for client, update in expected.items():
        assert torch.equal(found[client], update)


@pytest.mark.parametrize("text", PARTS)
def test_an_update_is_a_step_against_the_gradient_of_the_part(text: str, tones: Path) -> None:
    """One local step of plain SGD, unclipped: θ_server − θ_local is lr times the gradient, autograd's own."""
    ours = parted(tones, text, local={"local_steps": 1, "clip_gradients": float("inf")})
    found = ours.updates(SequentialEngine(ours.context, ours.layout, device=CPU))
    loaded = loaded_client(ours.context, 4, step=0)
    batch = loaded.extract_features(FeatureCache(0), ours.context, dtype=torch.float32).take(loaded.lines[0])
    leaf_P = ours.server_P.clone().requires_grad_()
    whole = ours.part.frozen.with_trained(ours.layout.views(leaf_P))
    loss = step_loss(ours.context.family, whole, batch, settings=ours.context.model, draws=loaded.draws[0])
    (gradient_P,) = torch.autograd.grad(loss, [leaf_P])
    torch.testing.assert_close(found[4], ours.context.local.lr * gradient_P, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("text", PARTS)
def test_what_is_frozen_never_changes(text: str, tones: Path) -> None:
    ours = parted(tones, text)
    before = {name: tensor.clone() for name, tensor in ours.part.frozen.tensors.items()}
    for engine in (
        SequentialEngine(ours.context, ours.layout, device=CPU),
        StackedEngine(ours.context, ours.layout, device=CPU, size=4),
    ):
        ours.updates(engine)
    merged = ours.part.frozen.merged(ours.layout.views(ours.server_P))
    corrected = {name.replace("lora_b", "weight") for name in ours.layout.names if name.endswith("lora_b")}
    for name, tensor in before.items():
        assert torch.equal(ours.part.frozen.tensors[name], tensor)
        assert torch.equal(merged[name], tensor) == (name not in corrected)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_step_in_which_layer_drop_leaves_nothing_to_train_moves_nobody(stacked: bool, tones: Path) -> None:
    """Both steps of nearly everybody leave out block 1, the only one that is trained: 0.999² of them do."""
    ours = parted(tones, "blocks.1", model={"layer_drop": 0.999})
    options: dict[str, Any] = {"device": CPU}
    engine = StackedEngine(ours.context, ours.layout, size=4, **options) if stacked else None
    updates = ours.updates(engine or SequentialEngine(ours.context, ours.layout, **options))
    assert all(not update.any() for update in updates.values())


@pytest.mark.parametrize("stacked", [False, True])
def test_clients_are_weighted_by_the_wer_of_the_whole_model(stacked: bool, tones: Path) -> None:
    ours = parted(tones, "lora(r=2)", people={"holdout": 0.25})
    context = replace(ours.context, weighting=Weighting.WER)
    engine: Engine = SequentialEngine(context, ours.layout, device=CPU)
    if stacked:
        engine = StackedEngine(context, ours.layout, size=4, device=CPU)
    (trained,) = engine.train(ours.server_P, [4], step=0)
    assert not isinstance(trained, Dropped)
    assert trained.figures[0].wer is not None


def test_a_recipe_says_at_once_that_a_part_is_not_understood() -> None:
    settings: dict[str, Any] = {
        "steps": 1,
        "cohort_size": 1,
        "local": {"batch_seconds": 2, "lr": 0.1, "local_steps": 1},
        "server": {"optimiser": {"name": "sgd"}, "schedule": {"name": "constant", "lr": 1}},
    }
    assert FederationSettings(**settings, trainable="blocks.30-35, output").trainable == "blocks.30-35, output"
    with pytest.raises(ValueError, match=r"'lora\(16\)' is not understood, expected \"lora\(r=16\)\""):
        FederationSettings(**settings, trainable="lora(16)")
