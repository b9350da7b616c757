"""The flagship's acoustic model (Pelikan et al., 2025, Appendix F): a strided convolution and a transformer encoder.

    features ─► conv 7/3, GLU ─► + positions ─► N blocks ─► LayerNorm ─► linear ─► log-probabilities of tokens

Shapes: B utterances, T frames (10 ms before the convolution, 30 ms after), F mel features, D model width,
V tokens with the blank.

The model is functions over a flat dictionary of named tensors, because everything around it treats parameters as
data: clipping, noise and server optimisers work tensor by tensor ("layer" = one tensor), clients start from one
shared set, and many clients are trained at once by giving every tensor a leading client axis (or only those that are
trained: the rest is shared). Only `linear` and `layer_norm` touch a weight.

Between the front and the output, frames stand in one of two arrangements:
    padded [B, T, D]   one utterance a line; attention has a mask             on a CPU
    packed [N, L, D]   one client a row, utterances end to end (`packing`)    on a GPU, and when clients are stacked

Randomness is an argument: `draw` makes all of a step's choices from one generator, `forward` obeys them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.audio.features import Ears, normalise
from sottovoce.errors import InputError
from sottovoce.models.family import Parameters
from sottovoce.models.log_mel import check_ears
from sottovoce.models.low_rank import low_rank_names
from sottovoce.models.transformer.dropout import ClientDropout, DropoutDraws, client_dropout
from sottovoce.models.transformer.linear import LowRank, Matrix, attend_segments, layer_norm, linear
from sottovoce.models.transformer.positions import (
    Cape,
    PositionDraws,
    cape_positions,
    draw_positions,
    plain_positions,
    sinusoids,
)
from sottovoce.models.transformer.relu_dropout import relu_dropout
from sottovoce.models.transformer.rows import ROW_MULTIPLE, Packing, plan_packing
from sottovoce.seeds import seeded_kernels

KERNEL, STRIDE = 7, 3
CONTEXT = (KERNEL - STRIDE) // 2  # output frame i is centred on the input frames 3i, 3i+1, 3i+2 that it replaces
SECONDS_PER_FRAME = STRIDE * 0.01


@dataclass(frozen=True, slots=True)
class Settings:
    """The architecture. `tokens` counts the blank; the MLP is four times as wide as the model.

    `as_released`: what the code of Pelikan et al. has and their text does not name. Its features are others
    (`transformer.front`), and each utterance is normalised once more after SpecAugment, with a scale and an offset that
    are learned. `ears`: how our own features are normalised; None is as the paper has it.
    """

    layers: int
    width: int
    tokens: int
    heads: int = 4
    features: int = 80
    dropout: float = 0.3
    layer_drop: float = 0.3
    norm: Literal["pre", "post"] = "pre"
    positions: Literal["cape", "sinusoidal"] = "cape"
    cape: Cape = field(default_factory=Cape)
    as_released: bool = False
    ears: Ears | None = None

    def __post_init__(self) -> None:
        check_ears(self.ears, as_released=self.as_released)
        for name in ("layers", "width", "heads", "features"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"model: {name}={value}, expected at least 1")
        if self.tokens < 2:
            raise InputError(f"model: tokens={self.tokens}, expected at least 2 (one token and the blank)")
        if self.width % self.heads:
            raise InputError(f"model: width={self.width} does not divide into heads={self.heads}")
        for name in ("dropout", "layer_drop"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise InputError(f"model: {name}={value}, expected a probability in [0, 1)")
        for name, allowed in (("norm", ("pre", "post")), ("positions", ("cape", "sinusoidal"))):
            if (value := getattr(self, name)) not in allowed:
                raise InputError(f"model: {name}={value!r}, expected {' or '.join(allowed)}")


class Size(NamedTuple):
    layers: int
    width: int
    heads: int = 4


SIZES: Mapping[str, Size] = {
    "tiny": Size(layers=4, width=96),
    "small": Size(layers=8, width=256),
    "base": Size(layers=36, width=768),  # 255.8M parameters
    "narrow": Size(layers=36, width=512),
    "wide": Size(layers=36, width=1024),
    "shallow": Size(layers=16, width=768),
    "deep": Size(layers=72, width=768),
}


def named_settings(size: str, *, tokens: int, **changes: Any) -> Settings:
    """The settings of a named size, with the flagship's dropout and layer-drop unless changed.

    >>> named_settings("tiny", tokens=30, layer_drop=0.0).width
    96
    """
    if size not in SIZES:
        raise InputError(f"model: size={size!r}, expected one of {', '.join(SIZES)}")
    return Settings(**{**SIZES[size]._asdict(), "tokens": tokens, **changes})


# --- parameters ------------------------------------------------------------------------------------------------------


class BlockWeights(NamedTuple):
    """The weights of one block, in the order of `BLOCK_NAMES`."""

    attention_norm_weight: Tensor
    attention_norm_bias: Tensor
    qkv: Matrix
    attention_output: Matrix
    mlp_norm_weight: Tensor
    mlp_norm_bias: Tensor
    mlp_hidden: Matrix
    mlp_output: Matrix


# Queries, keys and values are one tensor, hence one layer to clip, as in the paper's Figure 5 ("wqkv").
BLOCK_NAMES = (
    "attention.norm.weight",
    "attention.norm.bias",
    "attention.qkv.weight",
    "attention.output.weight",
    "mlp.norm.weight",
    "mlp.norm.bias",
    "mlp.hidden.weight",
    "mlp.output.weight",
)


def parameter_shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape, in the model's order."""
    d, v = settings.width, settings.tokens
    block = ((d,), (d,), (3 * d, d), (d, d), (d,), (d,), (4 * d, d), (d, 4 * d))
    shapes: dict[str, tuple[int, ...]] = {"input.weight": (1,), "input.bias": (1,)} if settings.as_released else {}
    shapes |= {"conv.weight": (2 * d, settings.features, KERNEL), "conv.bias": (2 * d,)}
    for layer in range(settings.layers):
        shapes |= {f"blocks.{layer:02d}.{name}": shape for name, shape in zip(BLOCK_NAMES, block, strict=True)}
    if settings.norm == "pre":
        shapes |= {"final.norm.weight": (d,), "final.norm.bias": (d,)}
    return shapes | {"output.weight": (v, d), "output.bias": (v,)}


def init(settings: Settings, *, generator: torch.Generator) -> dict[str, Tensor]:
    """Fresh float32 parameters on the host, in the flagship's distributions.

    Block matrices are uniform with variance 1/(3·fan_in); the convolution and the output matrix have 1/fan_in.
    """
    shapes = parameter_shapes(settings)
    parameters = {}
    for name, shape in shapes.items():
        if ".norm." in name or name.startswith("input."):
            parameters[name] = torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
            continue
        fan_in = math.prod(shapes[name.replace("bias", "weight")][1:])
        variance_times_fan_in = 1.0 if name in ("conv.weight", "output.weight") else 1 / 3
        limit = math.sqrt(3 * variance_times_fan_in / fan_in)
        parameters[name] = torch.empty(shape).uniform_(-limit, limit, generator=generator)
    return parameters


def block_weights(parameters: Parameters, layer: int) -> BlockWeights:
    """The weights of block `layer`; a matrix is low-rank where `parameters` hold a pair for it."""
    found: list[Any] = []
    for name in BLOCK_NAMES:
        weight = parameters[f"blocks.{layer:02d}.{name}"]
        a, b = low_rank_names(f"blocks.{layer:02d}.{name}")
        found.append(LowRank(weight, parameters[a], parameters[b]) if a in parameters else weight)
    return BlockWeights(*found)


def layer_index(name: str) -> int | None:
    """The block that a parameter belongs to, None outside the blocks.

    >>> layer_index("blocks.07.mlp.hidden.weight"), layer_index("conv.weight")
    (7, None)
    """
    return int(name.split(".")[1]) if name.startswith("blocks.") else None


def parameter_kind(name: str) -> str:
    """The group in which the paper plots (Figure 5) and noises (Figure 15) a parameter.

    One of conv, layer_norm, attention (its "wqkv"), attention_output ("wf"), mlp ("w1", "w2"), output; as released also
    input.

    >>> parameter_kind("blocks.07.attention.output.weight"), parameter_kind("blocks.07.mlp.norm.bias")
    ('attention_output', 'layer_norm')
    """
    if ".norm." in name:
        return "layer_norm"
    if ".attention." in name:
        return "attention_output" if ".output." in name else "attention"
    return "mlp" if ".mlp." in name else name.split(".")[0]


def parameter_role(name: str) -> str:
    """What the paper calls a parameter in its figures, norms and matrices of a block apart.

    One of conv, ln1, wqkv, wf, ln2, w1, w2, last_norm (behind the blocks), output; as released also input.

    >>> parameter_role("blocks.07.mlp.hidden.weight"), parameter_role("blocks.07.mlp.norm.bias")
    ('w1', 'ln2')
    """
    part = next((part for part in ("attention", "mlp") if f".{part}." in name), None)
    if ".norm." in name:
        return {"attention": "ln1", "mlp": "ln2", None: "last_norm"}[part]
    if part is None:
        return name.split(".")[0]
    first, second = ("wqkv", "wf") if part == "attention" else ("w1", "w2")
    return second if ".output." in name else first


# --- one training step's randomness ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draws:
    """What chance decides in one training step: which blocks run, how positions move, the seed of the dropout.

    There is no one seed where a step of stacked clients is drawn: each has its own (`Stacking`).
    """

    kept: tuple[int, ...]
    positions: PositionDraws | None
    dropout_seed: int | None


def draw(settings: Settings, *, batch_size: int, frames: int, generator: torch.Generator) -> Draws:
    """Draw a training step for `batch_size` utterances padded to `frames` feature frames, on the host."""
    return draw_several(settings, batch_sizes=[batch_size], frames=[frames], generator=generator)[0]


def draw_several(
    settings: Settings, *, batch_sizes: Sequence[int], frames: Sequence[int], generator: torch.Generator
) -> list[Draws]:
    """As `draw`, for several training steps at once.

    Each block is left out of a step with probability `layer_drop`, for the whole batch. Nothing is rescaled for it.
    """
    steps = len(batch_sizes)
    kept = draw_kept(settings, steps=steps, generator=generator)
    positions: Sequence[PositionDraws | None] = [None] * steps
    if settings.positions == "cape":
        drawn = draw_positions(settings.cape, batch_size=sum(batch_sizes), generator=generator)
        positions = drawn.split(batch_sizes)
    seeds = torch.randint(2**62, (steps,), generator=generator).tolist()
    return [Draws(*own) for own in zip(kept, positions, seeds, strict=True)]


def draw_kept(settings: Settings, *, steps: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    """The blocks that layer-drop leaves in each of some steps."""
    chances = torch.rand(steps, settings.layers, generator=generator).tolist()
    return [tuple(layer for layer, chance in enumerate(own) if chance >= settings.layer_drop) for own in chances]


# --- forward ---------------------------------------------------------------------------------------------------------


def dropped(x: Tensor, dropout: float) -> Tensor:
    return F.dropout(x, dropout) if dropout else x


def output_lengths(lengths_B: Tensor) -> Tensor:
    """Frames after the convolution for utterances of `lengths_B` feature frames."""
    return lengths_B.div(STRIDE, rounding_mode="floor")


def padded_output_frames(frames: int) -> int:
    return max(frames // STRIDE, 1)  # a batch of nothing but utterances under 30 ms still has one (padding) frame


def windows(features_BTF: Tensor, lengths_B: Tensor) -> Tensor:
    """What the strided convolution sees for each of its outputs: [B, T, F] → [B, T/3, 7·F]."""
    frames = features_BTF.shape[1]
    padding_BT = torch.arange(frames, device=features_BTF.device) >= lengths_B[:, None]
    features_BTF = features_BTF.masked_fill(padding_BT[..., None], 0)
    features_BTF = F.pad(features_BTF, (0, 0, CONTEXT, max(CONTEXT, KERNEL - CONTEXT - frames)))
    return features_BTF.unfold(1, KERNEL, STRIDE).flatten(2)


def scaled_windows(parameters: Parameters, windows_BTW: Tensor, spoken_BTW: Tensor) -> Tensor:
    """Windows of normalised features with the learned scale and offset, which silence behind an utterance has none of.

    `spoken_BTW` are windows of ones. With a leading client axis each row has its own scale.
    """
    weight, bias = (parameters[name][..., None] for name in ("input.weight", "input.bias"))
    return windows_BTW * weight + spoken_BTW * bias


def front(parameters: Parameters, windows_BTW: Tensor) -> Tensor:
    """The strided convolution, as a linear map of windows of frames, and its gate: → [B, T/3, D]."""
    return F.glu(linear(windows_BTW, parameters["conv.weight"].flatten(-2), parameters["conv.bias"]), dim=-1)


def attention(
    x: Tensor,
    weights: BlockWeights,
    *,
    where: Tensor,
    longest: int | None,
    heads: int,
    dropout: float,
    own: ClientDropout | None,
) -> Tensor:
    """Attention within each utterance.

    Padded: `where` is the mask [B, 1, 1, T]. Packed: `where` holds the segments' ends, `longest` bounds their length.
    """
    lead = x.shape[:2]
    qkv = linear(x, weights.qkv)
    if longest is None:
        q, k, v = (part.view(*lead, heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=where, dropout_p=dropout).transpose(1, 2).flatten(2)
    elif own is not None:
        mixed = own.attend(qkv.view(lead.numel(), 3, heads, -1), ends=where, longest=longest).view(*lead, -1)
    else:
        q, k, v = qkv.view(lead.numel(), 3, heads, -1).unbind(1)
        mixed = attend_segments(q, k, v, ends=where, longest=longest, dropout=dropout).reshape(*lead, -1)
    return linear(mixed, weights.attention_output)


def mlp(x_BTD: Tensor, weights: BlockWeights, *, dropout: float, own: ClientDropout | None) -> Tensor:
    hidden = linear(x_BTD, weights.mlp_hidden)
    return linear(relu_dropout(hidden, dropout) if own is None else own.relu_drop(hidden), weights.mlp_output)


def block(
    x_BTD: Tensor,
    weights: BlockWeights,
    *,
    where: Tensor,
    longest: int | None,
    heads: int,
    norm: Literal["pre", "post"],
    dropout: float,
    own: ClientDropout | None = None,
) -> Tensor:
    """One transformer block. Dropout acts on the attention weights and inside the MLP, not on the residual stream.

    It is from the device's generator, or stacked clients' `own`.
    """

    def attend(x_BTD: Tensor) -> Tensor:
        return attention(x_BTD, weights, where=where, longest=longest, heads=heads, dropout=dropout, own=own)

    attention_norm = weights.attention_norm_weight, weights.attention_norm_bias
    mlp_norm = weights.mlp_norm_weight, weights.mlp_norm_bias
    if norm == "pre":
        x_BTD = x_BTD + attend(layer_norm(x_BTD, *attention_norm))
        return x_BTD + mlp(layer_norm(x_BTD, *mlp_norm), weights, dropout=dropout, own=own)
    x_BTD = layer_norm(x_BTD + attend(x_BTD), *attention_norm)
    return layer_norm(x_BTD + mlp(x_BTD, weights, dropout=dropout, own=own), *mlp_norm)


def run_blocks(
    x_BTD: Tensor,
    stack: Sequence[BlockWeights],
    *,
    block: Callable[..., Tensor] = block,
    kept: Sequence[Tensor | None] | None = None,
    own: Sequence[ClientDropout] | None = None,
    **options: Any,
) -> Tensor:
    """The blocks of `stack`, one after another; `options` are `block`'s.

    `kept` says for each block which of N stacked clients it runs for, where it is not all of them; `own` is their
    dropout in each. With `block=torch.compile(block)` one compilation serves all blocks and depths.
    """
    for number, weights in enumerate(stack):
        after = block(x_BTD, weights, **options, **{} if own is None else {"own": own[number]})
        mask = None if kept is None else kept[number]
        x_BTD = after if mask is None else torch.where(mask, after, x_BTD)
    return x_BTD


@dataclass(frozen=True, slots=True)
class Stacking:
    """Which of N clients each utterance belongs to, and in training what each has drawn (None: it has no batch)."""

    rows_B: Sequence[int]
    clients: int
    draws_by: Sequence[Draws | None] | None = None


def forward(
    parameters: Parameters,
    features_BTF: Tensor,
    lengths_B: Tensor,
    *,
    settings: Settings,
    draws: Draws | None = None,
    blocks: Callable[..., Tensor] = run_blocks,
    row_multiple: int = ROW_MULTIPLE,
    stacking: Stacking | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T/3, V] (float32 at least) and their lengths [B], for normalised features and lengths.

    With `draws` it trains (dropout, layer-drop, CAPE's moves); without it evaluates. What lies beyond an utterance's
    length never influences it. Computes in the parameters' precision, or in autocast's. Keep `lengths_B` on the
    host: the lengths come back where they came from, and nothing then waits for the device.
    `blocks` is `run_blocks` or another form of it. Packed rows end on a `row_multiple`: the
    coarser it is, the fewer shapes occur. With `stacking` parameters have a leading client axis, or are shared by all.
    """
    device = features_BTF.device
    dropout = 0.0 if draws is None else settings.dropout
    out_lengths_B = output_lengths(lengths_B)
    frames = padded_output_frames(features_BTF.shape[1])
    device_lengths_B = out_lengths_B.to(device, non_blocking=True)
    if settings.positions == "cape":
        positions_BT = cape_positions(
            device_lengths_B,
            frames=frames,
            seconds_per_frame=SECONDS_PER_FRAME,
            draws=None if draws is None else draws.positions,
        )
    else:
        positions_BT = plain_positions(frames, device=device).expand(len(lengths_B), frames)
    dtype = parameters["conv.weight"].dtype
    in_lengths_B = lengths_B.to(device, non_blocking=True)
    if settings.as_released:
        features_BTF = normalise(features_BTF.to(torch.promote_types(dtype, torch.float32)), in_lengths_B)
    inputs = windows(features_BTF.to(dtype), in_lengths_B)
    spoken = windows(torch.ones_like(features_BTF, dtype=dtype), in_lengths_B) if settings.as_released else None

    packing, own = None, None
    if stacking is not None or device.type == "cuda":
        packing = _packing(out_lengths_B, frames, device=device, row_multiple=row_multiple, stacking=stacking)
        with torch.no_grad():
            inputs, positions_BT = packing.pack(inputs), packing.pack(positions_BT)
            spoken = None if spoken is None else packing.pack(spoken)
        where, longest = packing.segment_ends, packing.longest
        if stacking is not None and draws is not None and dropout:
            own = _own_dropout(dropout, stacking, lengths_B, layers=draws.kept, packing=packing)
    else:
        # An utterance without frames attends to its first padding frame: a softmax over nothing would be NaN.
        where = (torch.arange(frames, device=device) < device_lengths_B.clamp(min=1)[:, None])[:, None, None]
        longest = None

    seed = None if draws is None else draws.dropout_seed
    with nullcontext() if seed is None else seeded_kernels(seed, device=device):
        x = front(parameters, inputs if spoken is None else scaled_windows(parameters, inputs, spoken))
        x = dropped(x, dropout) if own is None else own[0].drop(x)
        x = x + sinusoids(positions_BT, width=settings.width).to(x.dtype)
        layers = range(settings.layers) if draws is None else draws.kept
        stack = [block_weights(parameters, layer) for layer in layers]
        options: dict[str, Any] = {"heads": settings.heads, "norm": settings.norm, "dropout": dropout}
        if draws is not None and stacking is not None and stacking.draws_by is not None:
            options["kept"] = _kept_masks(draws.kept, stacking.draws_by, device=device)
        if own is not None:
            options["own"] = own[1:]
        x = blocks(x, stack, where=where, longest=longest, **options)
    if settings.norm == "pre":
        x = layer_norm(x, parameters["final.norm.weight"], parameters["final.norm.bias"])
    logits = linear(x, parameters["output.weight"], parameters["output.bias"])
    logits_BTV = logits if packing is None else packing.unpack(logits)
    precision = torch.promote_types(logits_BTV.dtype, torch.float32)
    return logits_BTV.log_softmax(dim=-1, dtype=precision), out_lengths_B


def _packing(
    lengths_B: Tensor, frames: int, *, device: torch.device, row_multiple: int, stacking: Stacking | None
) -> Packing:
    return plan_packing(
        lengths_B.tolist(),
        padded_frames=frames,
        device=device,
        rows=None if stacking is None else stacking.rows_B,
        row_count=1 if stacking is None else stacking.clients,
        row_multiple=row_multiple,
    )


def _own_dropout(
    rate: float, stacking: Stacking, lengths_B: Tensor, *, layers: Sequence[int], packing: Packing
) -> list[ClientDropout]:
    """Each client's dropout, from its own draws and lengths: before the blocks, then in each of `layers`."""
    assert stacking.draws_by is not None, "stacked clients are trained without draws of their own"
    lines_by: list[list[int]] = [[] for _ in range(stacking.clients)]
    for line, row in enumerate(stacking.rows_B):
        lines_by[row].append(line)
    clients: list[DropoutDraws | None] = []
    for lines, drawn in zip(lines_by, stacking.draws_by, strict=True):
        if drawn is None:
            clients.append(None)
            continue
        assert drawn.dropout_seed is not None
        frames = padded_output_frames(int(lengths_B[lines].max()))
        clients.append(DropoutDraws(lines, frames, drawn.kept, drawn.dropout_seed))
    return client_dropout(rate, clients, layers=layers, packing=packing)


def _kept_masks(union: Sequence[int], draws_by: Sequence[Draws | None], *, device: torch.device) -> list[Tensor | None]:
    """For each block that any client keeps: None where all do, else which of them do, [N, 1, 1]."""
    masks: list[Tensor | None] = []
    for layer in union:
        keeps = [drawn is None or layer in drawn.kept for drawn in draws_by]
        masks.append(None if all(keeps) else torch.tensor(keeps).to(device, non_blocking=True)[:, None, None])
    return masks
