"""The flagship's acoustic model (Pelikan et al., 2025, Appendix F): a strided convolution and a transformer encoder.

    features ─► conv 7/3, GLU ─► + positions ─► N blocks ─► LayerNorm ─► linear ─► log-probabilities of tokens

The model is functions over a flat dictionary of named tensors: clipping, noise and server optimisers work tensor by
tensor ("layer" = one tensor), and stacked clients have a leading client axis on every tensor that is trained. Only
`linear` and `layer_norm` touch a weight.

Between the front and the output, frames stand in one of two arrangements:

    padded [B, T, D]   one utterance a line; attention has a mask             on a CPU
    packed [N, L, D]   one client a row, utterances end to end (`rows`)       on a GPU, and when clients are stacked

Shapes: B utterances, T frames (10 ms before the convolution, 30 ms after), F mel features, D model width, V tokens with
the blank.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.base.seeds import seeded_kernels
from sottovoce.data.audio.features import normalise_features
from sottovoce.models.ctc import log_softmax
from sottovoce.models.family import Parameters
from sottovoce.models.low_rank import low_rank_names
from sottovoce.models.transformer.draws import Draws, padded_output_frames
from sottovoce.models.transformer.dropout import ClientDropout, DropoutDraws, client_dropout, relu_dropout
from sottovoce.models.transformer.linear import LowRank, Matrix, attend_lines, attend_segments, layer_norm, linear
from sottovoce.models.transformer.positions import PositionDraws, cape_positions, plain_positions, sinusoids
from sottovoce.models.transformer.rows import ROW_MULTIPLE, Packing, plan_packing
from sottovoce.models.transformer.settings import BLOCK_NAMES, CONTEXT, KERNEL, SECONDS_PER_FRAME, STRIDE, Settings


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


def block_weights(parameters: Parameters, layer: int) -> BlockWeights:
    """The weights of block `layer`; a matrix is low-rank where `parameters` hold a pair for it."""
    found: list[Any] = []
    for name in BLOCK_NAMES:
        weight = parameters[f"blocks.{layer:02d}.{name}"]
        a, b = low_rank_names(f"blocks.{layer:02d}.{name}")
        found.append(LowRank(weight, parameters[a], parameters[b]) if a in parameters else weight)
    return BlockWeights(*found)


def output_lengths(lengths_B: Tensor) -> Tensor:
    """Frames after the convolution for utterances of `lengths_B` feature frames."""
    return lengths_B.div(STRIDE, rounding_mode="floor")


def convolution_windows(features_BTF: Tensor, lengths_B: Tensor) -> Tensor:
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
        mixed = attend_lines(q, k, v, mask=where, dropout=dropout).transpose(1, 2).flatten(2)
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
class ClientRows:
    """Which of N clients each utterance belongs to, and in training what each has drawn (None: it has no batch)."""

    rows_B: Sequence[int]
    clients: int
    draws_by: Sequence[Draws | None] | None = None


@dataclass(frozen=True, eq=False)
class Arrangement:
    """What a pass needs besides weights and features: where frames go, and what chance has decided.

    Tensors are on the device. Where there is no `packing`, lines stay padded. `kept` and `own` are `run_blocks`'s and,
    with one place more in front of the blocks, stacked clients' dropout.
    """

    lengths_B: Tensor  # of features
    out_lengths_B: Tensor
    layers: Sequence[int]
    dropout: float = 0.0
    dropout_seed: int | None = None
    positions: PositionDraws | None = None
    packing: Packing | None = None
    kept: Sequence[Tensor | None] | None = None
    own: Sequence[ClientDropout] | None = None


def arrange(
    lengths_B: Tensor,
    *,
    frames: int,
    device: torch.device,
    settings: Settings,
    draws: Draws | None = None,
    row_multiple: int = ROW_MULTIPLE,
    stacking: ClientRows | None = None,
) -> Arrangement:
    """Arrange utterances of `lengths_B` feature frames, padded to `frames`; see `forward`."""
    out_lengths_B = output_lengths(lengths_B)
    arranged = Arrangement(
        lengths_B=lengths_B.to(device, non_blocking=True),
        out_lengths_B=out_lengths_B.to(device, non_blocking=True),
        layers=range(settings.layers) if draws is None else draws.kept,
        dropout=0.0 if draws is None else settings.dropout,
        dropout_seed=None if draws is None else draws.dropout_seed,
        positions=None if draws is None else draws.positions,
    )
    if stacking is None and device.type != "cuda":
        return arranged
    rows, row_count = (None, 1) if stacking is None else (stacking.rows_B, stacking.clients)
    packing = plan_packing(
        out_lengths_B.tolist(),
        padded_frames=padded_output_frames(frames),
        device=device,
        rows=rows,
        row_count=row_count,
        row_multiple=row_multiple,
    )
    arranged = replace(arranged, packing=packing)
    if stacking is None or draws is None:
        return arranged
    kept, own = None, None
    if stacking.draws_by is not None:
        kept = _kept_masks(draws.kept, stacking.draws_by, device=device)
    if arranged.dropout:
        own = _own_dropout(arranged.dropout, stacking, lengths_B, layers=draws.kept, packing=packing)
    return replace(arranged, kept=kept, own=own)


def forward(
    parameters: Parameters,
    features_BTF: Tensor,
    lengths_B: Tensor,
    *,
    settings: Settings,
    draws: Draws | None = None,
    blocks: Callable[..., Tensor] = run_blocks,
    row_multiple: int = ROW_MULTIPLE,
    stacking: ClientRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T/3, V] (float32 at least) and their lengths [B], for normalised features and lengths.

    With `draws` it trains (dropout, layer-drop, CAPE's moves); without it evaluates. Padding never influences an
    utterance. Computes in the parameters' precision, or in autocast's. Lengths come back where they came from: keep
    `lengths_B` on the host, and nothing waits for the device. `blocks` is `run_blocks` or another form of it. Packed
    rows end on a `row_multiple`: the coarser, the fewer shapes. With `stacking` parameters have a leading client axis,
    or are shared by all.
    """
    arranged = arrange(
        lengths_B,
        frames=features_BTF.shape[1],
        device=features_BTF.device,
        settings=settings,
        draws=draws,
        row_multiple=row_multiple,
        stacking=stacking,
    )
    return compute(parameters, features_BTF, arranged, settings=settings, blocks=blocks), output_lengths(lengths_B)


def compute(
    parameters: Parameters,
    features_BTF: Tensor,
    arranged: Arrangement,
    *,
    settings: Settings,
    blocks: Callable[..., Tensor] = run_blocks,
) -> Tensor:
    """`forward`'s log-probabilities, from what is all on the device: nothing here depends on the host."""
    device, frames = features_BTF.device, padded_output_frames(features_BTF.shape[1])
    if settings.positions == "cape":
        positions_BT = cape_positions(
            arranged.out_lengths_B, frames=frames, seconds_per_frame=SECONDS_PER_FRAME, draws=arranged.positions
        )
    else:
        positions_BT = plain_positions(frames, device=device).expand(features_BTF.shape[0], frames)
    dtype, lengths_B = parameters["conv.weight"].dtype, arranged.lengths_B
    if settings.as_released:
        features_BTF = normalise_features(features_BTF.to(torch.promote_types(dtype, torch.float32)), lengths_B)
    inputs = convolution_windows(features_BTF.to(dtype), lengths_B)
    spoken = None
    if settings.as_released:
        spoken = convolution_windows(torch.ones_like(features_BTF, dtype=dtype), lengths_B)

    packing = arranged.packing
    if packing is not None:
        with torch.no_grad():
            inputs, positions_BT = packing.pack(inputs), packing.pack(positions_BT)
            spoken = None if spoken is None else packing.pack(spoken)
        where, longest = packing.segment_ends, packing.longest
    else:
        # An utterance without frames attends to its first padding frame: a softmax over nothing would be NaN.
        inside_BT = torch.arange(frames, device=device) < arranged.out_lengths_B.clamp(min=1)[:, None]
        where, longest = inside_BT[:, None, None], None

    seed, dropout, own = arranged.dropout_seed, arranged.dropout, arranged.own
    with nullcontext() if seed is None else seeded_kernels(seed, device=device):
        x = front(parameters, inputs if spoken is None else scaled_windows(parameters, inputs, spoken))
        x = F.dropout(x, dropout, training=dropout > 0) if own is None else own[0].drop(x)
        x = x + sinusoids(positions_BT, width=settings.width).to(x.dtype)
        stack = [block_weights(parameters, layer) for layer in arranged.layers]
        options: dict[str, Any] = {"heads": settings.heads, "norm": settings.norm, "dropout": dropout}
        if arranged.kept is not None:
            options["kept"] = arranged.kept
        if own is not None:
            options["own"] = own[1:]
        x = blocks(x, stack, where=where, longest=longest, **options)
    if settings.norm == "pre":
        x = layer_norm(x, parameters["final.norm.weight"], parameters["final.norm.bias"])
    logits = linear(x, parameters["output.weight"], parameters["output.bias"])
    return log_softmax(logits if packing is None else packing.unpack(logits))


def _own_dropout(
    rate: float, stacking: ClientRows, lengths_B: Tensor, *, layers: Sequence[int], packing: Packing
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
