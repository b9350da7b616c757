"""A part of a model: it starts as the whole, has the whole's gradients, and goes back into a plain model."""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.models.trainable import Trainable, parse_part, split_parameters
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.network import ClientRows, block, forward, run_blocks
from sottovoce.models.transformer.settings import SIZES, Settings, init, named_settings, parameter_shapes

SETTINGS = Settings(layers=3, width=8, tokens=5, heads=2, features=6, dropout=0.0, layer_drop=0.0)
START = {name: p.double() for name, p in init(SETTINGS, generator=torch_stream(1, "init")).items()}
FEATURES_BTF = torch.randn(2, 30, 6, generator=torch_stream(1, "features"), dtype=torch.float64)
LENGTHS_B = torch.tensor([30, 24])
MATRICES = ("attention.qkv", "attention.output", "mlp.hidden", "mlp.output")


def part_of(text: str | None, parameters: Mapping[str, Tensor] = START) -> Trainable:
    part = None if text is None else parse_part(text)
    return split_parameters(
        part, parameters, is_lora_target=FAMILY.transfer.is_lora_target, generator=torch_stream(1, "low rank")
    )


def moved(part: Trainable, *lead: int) -> dict[str, Tensor]:
    """Trained tensors after some training: nothing is zero any more. With `lead`, of several clients."""
    generator = torch_stream(2, "moved")
    return {
        name: (p + 0.1 * torch.randn(*lead, *p.shape, generator=generator)).double().requires_grad_()
        for name, p in part.initial.items()
    }


def score(parameters: Mapping[str, Tensor], stacking: ClientRows | None = None) -> Tensor:
    """Of each utterance: a sum of its log-probabilities with weights that let nothing cancel."""
    log_probs_BTV, lengths_B = forward(parameters, FEATURES_BTF, LENGTHS_B, settings=SETTINGS, stacking=stacking)
    padding_BT = torch.arange(log_probs_BTV.shape[1]) >= lengths_B[:, None]
    weighted_BTV = log_probs_BTV * torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
    return weighted_BTV.masked_fill(padding_BT[..., None], 0).sum(dim=(1, 2))


def gradients(scored: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(parameters, torch.autograd.grad(scored, [*parameters.values()]), strict=True))


# What a text means.


def test_names_prefixes_and_patterns_choose_tensors_and_everything_else_is_frozen() -> None:
    expected = {
        "blocks.1-2, output": {n for n in START if n.startswith(("blocks.01.", "blocks.02.", "output."))},
        "blocks.2.mlp": {n for n in START if n.startswith("blocks.02.mlp.")},
        "*.norm.*": {n for n in START if ".norm." in n},
        "*.norm, conv.bias": {n for n in START if ".norm." in n} | {"conv.bias"},
        "blocks.0?.*.qkv.weight": {n for n in START if n.endswith("qkv.weight")},
        "*": set(START),
    }
    for text, names in expected.items():
        part = part_of(text)
        assert part.initial.keys() == names, text
        assert part.frozen.tensors.keys() == START.keys() - names, text
        assert [*part.initial] == [n for n in START if n in names], "in the model's order"


def test_lora_has_a_pair_for_each_block_matrix_that_is_not_trained_itself() -> None:
    part = part_of("lora(r=2, alpha=6), blocks.1, output.bias")
    pairs = {f"blocks.0{layer}.{m}.lora_{ab}" for layer in (0, 2) for m in MATRICES for ab in "ab"}
    whole = {n for n in START if n.startswith("blocks.01.")} | {"output.bias"}
    assert part.initial.keys() == pairs | whole
    assert part.frozen.tensors.keys() == START.keys() - whole
    assert part.initial["blocks.00.mlp.hidden.lora_a"].shape == (2, 8)
    assert part.initial["blocks.00.mlp.hidden.lora_b"].shape == (32, 2)
    assert part.frozen.scale == 3.0


@pytest.mark.parametrize(
    "text",
    [
        *("", "lora(16)", "lora(r=0)", "lora(r=2, alpha=0)", "lora(r=2, alpha=1e)", "lora(r=2, alpha=1e999)"),
        *("lora(r=2, factors=a)", "lora(r=2, factors=)", "lora(r=2, factors=b, factors=b)"),
        *("lora(r=2), lora(r=3)", "blocks.5-3", "output,, conv", "lora(r=2", "the output"),
    ],
)
def test_a_text_that_is_not_understood_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match=r"trainable=.*expected") as error:
        parse_part(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("blocks.1-3", "'blocks.03' matches no parameter of the model"),
        ("output, decoder", "'decoder' matches no parameter of the model"),
        ("lora(r=9)", "r=9, expected at most 8, blocks.00.attention.qkv.weight's own rank"),
    ],
)
def test_a_part_that_the_model_does_not_have_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        part_of(text)


@given(st.text(max_size=20))
def test_any_text_is_understood_or_refused(text: str) -> None:
    try:
        part_of(text)
    except InputError:
        return


@pytest.mark.parametrize(("factors", "held"), [("both", []), ("b", []), ("alternate", ["a", "b"]), ("project", ["a"])])
def test_factors_say_what_each_round_holds(factors: str, held: list[str]) -> None:
    """Rounds begin with b, since no gradient reaches a where b is zero; what else is trained is trained in all."""
    part = part_of(f"lora(r=2, factors={factors}), output")
    names = {one: tuple(name for name in part.initial if name.endswith(f".lora_{one}")) for one in "ab"}
    assert part.layout.held == tuple(names[one] for one in held)
    assert [part.layout.held_at(step) for step in range(4)] == [names[one] for one in held * 4][:4] or [()] * 4
    assert bool(names["a"]) == (factors != "b")
    assert part.projected == (tuple(zip(names["a"], names["b"], strict=True)) if factors == "project" else ())


def test_only_a_projected_factor_starts_orthonormal_and_it_spans_what_was_drawn() -> None:
    drawn, ours = part_of("lora(r=2)"), part_of("lora(r=2, factors=project)")
    for name, a in ours.initial.items():
        if not name.endswith(".lora_a"):
            assert torch.equal(a, drawn.initial[name])
            continue
        torch.testing.assert_close(a @ a.T, torch.eye(2), rtol=0, atol=1e-6)
        torch.testing.assert_close(drawn.initial[name] @ a.T @ a, drawn.initial[name], rtol=0, atol=1e-6)
    same = part_of("lora(r=2, factors=alternate)").initial
    assert all(torch.equal(a, same[name]) for name, a in drawn.initial.items())


def test_the_share_of_base_that_lora_trains() -> None:
    """A pair of rank r for an [out, in] matrix has r·(in + out) numbers: per block and r, with width d, (d + 3d) for
    queries, keys and values, (d + d) for attention's output and twice (d + 4d) for the MLP: 16·d. Times 36 and 16."""
    settings = named_settings("base", tokens=29)
    parameters = {name: torch.empty(shape, device="meta") for name, shape in parameter_shapes(settings).items()}
    part = part_of("lora(r=16)", parameters)
    assert part.trained_count == 16 * 16 * SIZES["base"].width * SIZES["base"].layers == 7_077_888
    assert part.frozen_count == sum(p.numel() for p in parameters.values())


# What it computes.


@pytest.mark.parametrize(
    "text", [None, "lora(r=2)", "lora(r=2, alpha=8)", "lora(r=2, factors=project)", "blocks.1, output.bias", "*.norm.*"]
)
def test_a_part_starts_as_the_whole_model(text: str | None) -> None:
    part = part_of(text)
    assert torch.equal(score(part.frozen.with_trained(as_doubles(part))), score(START))
    merged = part.frozen.merged(part.initial)
    assert merged.keys() == START.keys()
    assert all(torch.equal(merged[name], START[name]) for name in START)


def as_doubles(part: Trainable) -> dict[str, Tensor]:
    return {name: p.double() for name, p in part.initial.items()}


@pytest.mark.parametrize("text", ["lora(r=2)", "lora(r=2, alpha=8), output", "blocks.1, output.bias", "*.norm.bias"])
def test_a_trained_part_computes_what_the_merged_model_computes(text: str) -> None:
    part = part_of(text)
    trained = moved(part)
    expected = score(part.frozen.merged(trained))
    assert not torch.allclose(expected, score(START), rtol=1e-3)
    torch.testing.assert_close(score(part.frozen.with_trained(trained)), expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_a_pair_follow_from_those_of_the_merged_matrix() -> None:
    """With G the gradient of W' = W + s·b·a: that of a is s·bᵀ·G and that of b is s·G·aᵀ."""
    part = part_of("lora(r=2, alpha=6)")
    trained = moved(part)
    merged = {name: p.detach().requires_grad_() for name, p in part.frozen.merged(trained).items()}
    ours = gradients(score(part.frozen.with_trained(trained)).sum(), trained)
    whole = gradients(score(merged).sum(), merged)
    for layer in range(SETTINGS.layers):
        for matrix in MATRICES:
            stem = f"blocks.{layer:02d}.{matrix}"
            a, b, gradient = trained[f"{stem}.lora_a"], trained[f"{stem}.lora_b"], whole[f"{stem}.weight"]
            torch.testing.assert_close(ours[f"{stem}.lora_a"], 3 * b.T @ gradient, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(ours[f"{stem}.lora_b"], 3 * gradient @ a.T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "text",
    ["lora(r=2, alpha=6)", "blocks.1", "output.bias", "output.weight", "*.norm.weight", "*.norm.bias", "conv", "*"],
)
def test_stacked_clients_share_what_is_frozen_and_each_computes_its_own(text: str) -> None:
    """Client 1 has the first utterance, client 0 the second, and client 2 none."""
    part = part_of(text)
    trained = moved(part, 3)
    stacked_B = score(part.frozen.with_trained(trained), ClientRows(rows_B=[1, 0], clients=3))
    stacked = gradients(stacked_B.sum(), trained)
    for utterance, client in ((0, 1), (1, 0)):
        own = {name: p[client].detach().requires_grad_() for name, p in trained.items()}
        alone = score(part.frozen.with_trained(own))[utterance]
        torch.testing.assert_close(stacked_B[utterance], alone, rtol=1e-12, atol=1e-12)
        for name, expected in gradients(alone, own).items():
            torch.testing.assert_close(stacked[name][client], expected, rtol=1e-9, atol=1e-12)
    assert all(not gradient[2].any() for gradient in stacked.values())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own tracing asks for it
def test_a_compiled_block_takes_low_rank_weights() -> None:
    part = part_of("lora(r=2), blocks.2")
    whole = part.frozen.with_trained(moved(part))
    compiled = partial(run_blocks, block=torch.compile(block, backend="eager", fullgraph=True))
    found, _ = forward(whole, FEATURES_BTF, LENGTHS_B, settings=SETTINGS, blocks=compiled)
    expected, _ = forward(whole, FEATURES_BTF, LENGTHS_B, settings=SETTINGS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
