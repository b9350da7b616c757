import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.models import ctc
from sottovoce.models.transformer import network
from sottovoce.models.transformer.draws import draw_several
from sottovoce.models.transformer.network import forward, run_blocks
from sottovoce.models.transformer.settings import (
    Settings,
    init,
    layer_index,
    named_settings,
    parameter_kind,
    parameter_shapes,
)

SMALL = Settings(layers=3, width=16, tokens=7, heads=2, features=8, dropout=0.2, layer_drop=0.5)
NORMS: tuple[Literal["pre", "post"], ...] = ("pre", "post")
POSITIONS: tuple[Literal["cape", "sinusoidal"], ...] = ("cape", "sinusoidal")
VARIANTS = [replace(SMALL, norm=norm, positions=positions) for norm, positions in product(NORMS, POSITIONS)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parameters_of(settings: Settings, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Initial parameters, moved a little so that LayerNorm's scales and biases take part."""
    random = generator(7)
    return {
        name: (tensor + 0.1 * torch.randn(tensor.shape, generator=random)).to(dtype)
        for name, tensor in init(settings, generator=random).items()
    }


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 50, 8, generator=generator(1)), torch.tensor([50, 31, 4])


# Table 21 and Appendix F give the sizes; a block of width D has 12·D² + 4·D parameters. In millions.
@pytest.mark.parametrize(
    ("size", "millions"),
    [("base", 255.8), ("narrow", 113.9), ("wide", 454.3), ("shallow", 114.2), ("deep", 510.7)],
)
def test_named_sizes_have_the_papers_parameter_counts(size: str, millions: float) -> None:
    count = sum(math.prod(shape) for shape in parameter_shapes(named_settings(size, tokens=30)).values())
    assert count == pytest.approx(millions * 1e6, rel=0.001)


def test_init_follows_the_shapes_and_the_variances() -> None:
    settings = named_settings("tiny", tokens=30)
    parameters = init(settings, generator=generator())
    assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == parameter_shapes(settings)
    assert parameters["blocks.02.mlp.output.weight"].var().item() == pytest.approx(1 / (3 * 384), rel=0.05)
    assert parameters["conv.weight"].var().item() == pytest.approx(1 / (80 * 7), rel=0.05)
    again = init(settings, generator=generator())
    assert all(torch.equal(tensor, again[name]) for name, tensor in parameters.items())


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: f"{s.norm}-{s.positions}")
def test_padding_and_companions_change_nothing(settings: Settings) -> None:
    parameters = parameters_of(settings, torch.float64)
    features_BTF, lengths_B = batch()
    log_probs_BTV, out_B = forward(parameters, features_BTF, lengths_B, settings=settings)
    assert out_B.tolist() == [16, 10, 1]
    assert log_probs_BTV.isfinite().all()
    worse_BTF = torch.nn.functional.pad(features_BTF, (0, 0, 0, 20), value=1e30)
    for row, length in enumerate(lengths_B):
        worse_BTF[row, length:] = math.nan
    padded_BTV, _ = forward(parameters, worse_BTF, lengths_B, settings=settings)
    for row, (length, frames) in enumerate(zip(lengths_B, out_B, strict=True)):
        alone_TV = forward(parameters, features_BTF[row : row + 1, :length], length[None], settings=settings)[0][0]
        torch.testing.assert_close(log_probs_BTV[row, :frames], alone_TV, atol=1e-10, rtol=0)
        torch.testing.assert_close(padded_BTV[row, :frames], alone_TV, atol=1e-10, rtol=0)


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: f"{s.norm}-{s.positions}")
def test_gradients_of_the_loss_ignore_padding_and_rows_without_frames(settings: Settings) -> None:
    features_BTF, lengths_B = batch()
    tokens_BU, token_lengths_B = torch.tensor([[1, 2, 2], [3, 6, 0], [4, 0, 0]]), torch.tensor([3, 2, 1])

    def gradients(features_BTF: Tensor, lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor) -> list[Tensor]:
        parameters = {name: p.requires_grad_() for name, p in parameters_of(settings, torch.float64).items()}
        log_probs_BTV, out_B = forward(parameters, features_BTF, lengths_B, settings=settings)
        loss = ctc.mean_ctc_loss(log_probs_BTV, out_B, tokens_BU, token_lengths_B)
        return [loss, *torch.autograd.grad(loss, list(parameters.values()))]

    plain = gradients(features_BTF, lengths_B, tokens_BU, token_lengths_B)
    filled = torch.nn.functional.pad(features_BTF, (0, 0, 0, 9, 0, 1), value=math.nan)
    padded = gradients(
        filled,
        torch.cat([lengths_B, torch.tensor([0])]),
        torch.nn.functional.pad(tokens_BU, (0, 2, 0, 1), value=5),
        torch.cat([token_lengths_B, torch.tensor([2])]),
    )
    for a, b in zip(plain, padded, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_shorter_than_one_output_frame_is_finite_and_empty() -> None:
    log_probs_BTV, out_B = forward(parameters_of(SMALL), torch.randn(2, 2, 8), torch.tensor([2, 0]), settings=SMALL)
    assert out_B.tolist() == [0, 0]
    assert log_probs_BTV.isfinite().all()


def test_front_is_the_strided_convolution() -> None:
    parameters = parameters_of(SMALL)
    features_BTF, _ = batch()
    windows_BTW = network.convolution_windows(features_BTF, torch.tensor([50, 50, 50]))
    ours = network.front(parameters, windows_BTW)
    conv_BDT = torch.nn.functional.conv1d(
        features_BTF.mT, parameters["conv.weight"], parameters["conv.bias"], stride=3, padding=2
    )
    torch.testing.assert_close(ours, torch.nn.functional.glu(conv_BDT, dim=1).mT)


def test_layer_drop_skips_the_computation_of_the_block() -> None:
    settings = replace(SMALL, layers=40, layer_drop=0.3)
    features_BTF, lengths_B = batch()
    calls: list[int] = []

    def counting(x_BTD: Tensor, *arguments: Any, **options: Any) -> Tensor:
        calls.append(1)
        return network.block(x_BTD, *arguments, **options)

    parameters = parameters_of(settings)
    draws = draw_several(settings, batch_sizes=[3], generator=generator())[0]
    forward(
        parameters, features_BTF, lengths_B, settings=settings, draws=draws, blocks=partial(run_blocks, block=counting)
    )
    assert len(calls) == len(draws.kept) < 40
    calls.clear()
    forward(parameters, features_BTF, lengths_B, settings=settings, blocks=partial(run_blocks, block=counting))
    assert len(calls) == 40


def test_layer_drop_leaves_out_its_share_of_the_blocks() -> None:
    settings = replace(SMALL, layers=72, layer_drop=0.3)
    random = generator()
    kept = [len(draw_several(settings, batch_sizes=[1], generator=random)[0].kept) for _ in range(200)]
    # Binomial(14400, 0.7): standard deviation 55.
    assert sum(kept) == pytest.approx(0.7 * 72 * 200, abs=4 * 55)


def test_a_training_step_is_a_function_of_its_draws_and_leaves_torchs_own_generator_alone() -> None:
    parameters = parameters_of(SMALL)
    features_BTF, lengths_B = batch()
    before = torch.get_rng_state()
    one, other = (draw_several(SMALL, batch_sizes=[3], generator=generator(seed))[0] for seed in (4, 5))
    results = [
        forward(parameters, features_BTF, lengths_B, settings=SMALL, draws=draws)[0] for draws in (one, other, one)
    ]
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])
    reseeded = forward(parameters, features_BTF, lengths_B, settings=SMALL, draws=replace(one, dropout_seed=1))[0]
    assert not torch.equal(results[0], reseeded)
    assert torch.equal(before, torch.get_rng_state())


def test_without_dropout_layer_drop_and_moves_training_equals_evaluation() -> None:
    still = replace(SMALL, dropout=0.0, layer_drop=0.0, positions="sinusoidal")
    parameters = parameters_of(still)
    features_BTF, lengths_B = batch()
    draws = draw_several(still, batch_sizes=[3], generator=generator())[0]
    trained, _ = forward(parameters, features_BTF, lengths_B, settings=still, draws=draws)
    assert torch.equal(trained, forward(parameters, features_BTF, lengths_B, settings=still)[0])


@pytest.mark.parametrize("norm", NORMS)
def test_low_precision_gives_float32_log_probabilities(norm: Literal["pre", "post"]) -> None:
    settings = replace(SMALL, norm=norm)
    features_BTF, lengths_B = batch()
    parameters = parameters_of(settings)
    exact, _ = forward(parameters, features_BTF, lengths_B, settings=settings)
    low = {name: tensor.bfloat16() for name, tensor in parameters.items()}
    cast, _ = forward(low, features_BTF, lengths_B, settings=settings)
    with torch.autocast("cpu", torch.bfloat16):
        automatic, _ = forward(parameters, features_BTF, lengths_B, settings=settings)
    for result in (cast, automatic):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, exact, atol=0.15, rtol=0)
        torch.testing.assert_close(result.exp().sum(dim=-1), torch.ones(3, 16))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_without_graph_breaks_for_all_blocks_and_batch_shapes() -> None:
    compilations: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        compilations.append(1)
        return graph.forward

    compiled = torch.compile(network.block, fullgraph=True, backend=backend)
    settings = replace(SMALL, layers=6)
    parameters = parameters_of(settings)
    random = generator()
    for rows, frames in ((3, 60), (5, 80), (2, 33), (7, 41)):
        features_BTF, lengths_B = torch.randn(rows, frames, 8), torch.full((rows,), frames - 2)
        draws = draw_several(settings, batch_sizes=[rows], generator=random)[0]
        options: dict[str, Any] = {"settings": settings, "draws": draws}
        ours, _ = forward(parameters, features_BTF, lengths_B, **options, blocks=partial(run_blocks, block=compiled))
        torch.testing.assert_close(ours, forward(parameters, features_BTF, lengths_B, **options)[0])
    assert len(compilations) == 2  # for the first shape, then for any


@pytest.mark.usefixtures("fresh_compiler")
def test_the_whole_evaluation_is_one_graph() -> None:
    parameters = parameters_of(SMALL)
    features_BTF, lengths_B = batch()
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    result, _ = compiled(parameters, features_BTF, lengths_B, settings=SMALL)
    torch.testing.assert_close(result, forward(parameters, features_BTF, lengths_B, settings=SMALL)[0])


@pytest.mark.parametrize("norm", NORMS)
def test_overfits_one_batch_to_nothing(norm: Literal["pre", "post"]) -> None:
    settings = Settings(layers=2, width=32, tokens=7, features=8, dropout=0.0, layer_drop=0.0, norm=norm)
    parameters = {name: p.requires_grad_() for name, p in init(settings, generator=generator()).items()}
    optimiser = torch.optim.Adam(list(parameters.values()), lr=3e-3)
    features_BTF, lengths_B = batch()
    tokens_BU, token_lengths_B = torch.tensor([[1, 2, 2, 5], [3, 1, 6, 0], [4, 0, 0, 0]]), torch.tensor([4, 3, 1])
    for _ in range(400):
        log_probs_BTV, out_B = forward(parameters, features_BTF, lengths_B, settings=settings)
        loss = ctc.mean_ctc_loss(log_probs_BTV, out_B, tokens_BU, token_lengths_B)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert loss.item() < 0.01


def test_kinds_and_layers_cover_every_parameter() -> None:
    names = parameter_shapes(replace(SMALL, layers=12))
    blocks = [name for name in names if layer_index(name) is not None]
    assert {layer_index(name) for name in blocks} == {*range(12)}
    assert len(blocks) == 12 * 8
    kinds = {name: parameter_kind(name) for name in names}
    assert {*kinds.values()} == {"conv", "layer_norm", "attention", "attention_output", "mlp", "output"}
    assert kinds["final.norm.bias"] == kinds["blocks.11.attention.norm.weight"] == "layer_norm"
    assert kinds["output.bias"] == "output"
    assert kinds["blocks.03.mlp.output.weight"] == "mlp"


@pytest.mark.parametrize(
    "wrong",
    [{"layers": 0}, {"heads": 3}, {"dropout": 1.0}, {"layer_drop": -0.1}, {"norm": "both"}, {"tokens": 1}],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))}="):
        replace(SMALL, **wrong)


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"size='huge', expected one of tiny, .* deep"):
        named_settings("huge", tokens=30)
