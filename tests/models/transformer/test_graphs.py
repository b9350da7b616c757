"""Recorded blocks compute what plain blocks compute, whichever of them layer-drop leaves.

Without a GPU the recorder is a stand-in that does the work again and puts the results where they lay the first time:
what is tested then is everything but CUDA itself. On a CUDA device the same tests run on real graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.models.replaying_recorder import ReplayingRecorder
from torch import Tensor

from sottovoce.base.seeds import torch_stream
from sottovoce.flat.layout import Layout
from sottovoce.models.transformer.draws import Draws, draw_several
from sottovoce.models.transformer.graphs import GraphedBlocks, graphed_blocks
from sottovoce.models.transformer.network import BlockWeights, forward
from sottovoce.models.transformer.settings import BLOCK_NAMES, Settings, init

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
SETTINGS = Settings(layers=5, width=16, tokens=7, heads=2, features=8, dropout=0.0, layer_drop=0.0)


def parameters(settings: Settings = SETTINGS) -> dict[str, Tensor]:
    made = init(settings, generator=torch_stream(1, "init"))
    flat = Layout.of(made).flatten(made).to(DEVICE)
    return {name: view.detach().requires_grad_() for name, view in Layout.of(made).views(flat).items()}


def graphed(own: dict[str, Tensor], *, settings: Settings = SETTINGS, room: int = 100) -> Callable[..., Tensor]:
    if CUDA:
        return graphed_blocks(own, settings=settings, keep_free_bytes=0)
    names = ([f"blocks.{layer:02d}.{name}" for name in BLOCK_NAMES] for layer in range(settings.layers))
    return GraphedBlocks([BlockWeights(*map(own.get, block)) for block in names], recorder=ReplayingRecorder(room=room))


def batch(number: int, *, frames: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch_stream(2, "batch", number)
    features = torch.randn(3, frames, SETTINGS.features, generator=generator).to(DEVICE)
    return features, torch.tensor([frames, frames - 7, frames // 2])


def draws(settings: Settings, number: int, *, kept: Sequence[int] | None = None) -> Draws:
    drawn = draw_several(settings, batch_sizes=[3], generator=torch_stream(3, "draws", number))[0]
    return drawn if kept is None else replace(drawn, kept=tuple(kept))


def gradients(
    own: dict[str, Tensor], inputs: tuple[Tensor, Tensor], drawn: Draws, settings: Settings, **blocks: Callable
) -> tuple[Tensor, list[Tensor | None]]:
    log_probs, _ = forward(own, *inputs, settings=settings, draws=drawn, **blocks)
    loss = log_probs[:, :, 1].sum()
    found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
    return loss.detach().clone(), [None if g is None else g.clone() for g in found]


def assert_same(one: tuple[Tensor, list[Tensor | None]], other: tuple[Tensor, list[Tensor | None]]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-5)
    for a, b in zip(one[1], other[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_any_subset_of_blocks_gives_the_plain_gradients(norm: str) -> None:
    settings = replace(SETTINGS, norm=norm)
    own = parameters(settings)
    blocks = graphed(own, settings=settings)
    subsets = [(0, 1, 2, 3, 4), (1, 3), (0, 4), (2,), (), (0, 1, 3, 4), (4,), (0, 1, 2, 3, 4)]
    for number, kept in enumerate(subsets):
        for frames in (24, 30):  # two shapes in turn
            drawn = draws(settings, number, kept=kept)
            inputs = batch(number, frames=frames)
            expected = gradients(own, inputs, drawn, settings)
            assert_same(gradients(own, inputs, drawn, settings, blocks=blocks), expected)


def test_weights_are_read_where_they_lie() -> None:
    own = parameters()
    blocks = graphed(own)
    first = gradients(own, batch(0), draws(SETTINGS, 0), SETTINGS, blocks=blocks)
    with torch.no_grad():
        for p in own.values():
            p.mul_(1.5)
    second = gradients(own, batch(0), draws(SETTINGS, 0), SETTINGS, blocks=blocks)
    assert not torch.allclose(first[0], second[0])
    assert_same(second, gradients(own, batch(0), draws(SETTINGS, 0), SETTINGS))


def test_dropout_follows_its_seed_and_recording_leaves_no_trace_in_it() -> None:
    settings = replace(SETTINGS, dropout=0.4, layer_drop=0.3)
    own = parameters(settings)
    blocks = graphed(own, settings=settings)
    runs = [gradients(own, batch(0), draws(settings, n), settings, blocks=blocks) for n in (0, 1, 0)]
    assert runs[0][0] != runs[1][0]
    # The first run recorded the graphs, the last one found them: a resumed run records at another step.
    # (Not so the gradients to the bit: torch's attention may add them up in any order on a GPU.)
    assert torch.equal(runs[0][0], runs[2][0])
    assert_same(runs[0], runs[2])
    assert_same(runs[1], gradients(own, batch(0), draws(settings, 1), settings))


def test_a_pass_overtaken_by_another_is_refused() -> None:
    own = parameters()
    blocks = graphed(own)
    early, _ = forward(own, *batch(0), settings=SETTINGS, draws=draws(SETTINGS, 0), blocks=blocks)
    forward(own, *batch(1), settings=SETTINGS, draws=draws(SETTINGS, 1), blocks=blocks)
    with pytest.raises(AssertionError, match="a later pass has taken their place"):
        torch.autograd.grad(early.sum(), list(own.values()), allow_unused=True)


def test_a_pass_goes_back_once() -> None:
    own = parameters()
    log_probs, _ = forward(own, *batch(0), settings=SETTINGS, draws=draws(SETTINGS, 0), blocks=graphed(own))
    torch.autograd.grad(log_probs.sum(), list(own.values()), retain_graph=True)
    with pytest.raises(AssertionError, match="the activations of this pass are gone"):
        torch.autograd.grad(log_probs.sum(), list(own.values()))


def test_evaluation_other_weights_and_full_memory_run_plainly() -> None:
    own, others = parameters(), parameters()
    blocks = graphed(own, room=0)
    drawn = draws(SETTINGS, 0)
    with torch.no_grad():
        evaluated = forward(own, *batch(0), settings=SETTINGS, blocks=blocks)[0]
        torch.testing.assert_close(evaluated, forward(own, *batch(0), settings=SETTINGS)[0], rtol=0, atol=0)
    assert_same(
        gradients(others, batch(0), drawn, SETTINGS, blocks=blocks), gradients(others, batch(0), drawn, SETTINGS)
    )
    assert_same(gradients(own, batch(0), drawn, SETTINGS, blocks=blocks), gradients(own, batch(0), drawn, SETTINGS))


@pytest.mark.skipif(not CUDA, reason="no CUDA device: whether shapes share memory is the allocator's business")
def test_shapes_share_their_memory() -> None:
    settings = replace(SETTINGS, width=256, layers=8)
    own = parameters(settings)
    blocks = graphed(own, settings=settings)
    reserved = []
    for frames in (960, 954, 948, 942, 936):
        gradients(own, batch(0, frames=frames), draws(settings, 0), settings, blocks=blocks)
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    # Five shapes kept apart would need five times the pool of the first.
    assert reserved[-1] < 2 * reserved[0]
