"""The CTC transformer as a family: what a recipe may choose of it, its loss, and how it is stacked and sped up.

Shapes: U utterances, T frames, V tokens with the blank, N clients of a stack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from sottovoce.audio.augment import apply_masks
from sottovoce.audio.features import HOP_SAMPLES, MEL_COUNT, Ears, compiled, frame_count
from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.errors import InputError
from sottovoce.models import ctc, log_mel
from sottovoce.models.family import DEFAULT, Family, Parameters, Place, Recognition, Stacked
from sottovoce.models.transformer import network
from sottovoce.models.transformer.front import hear
from sottovoce.models.transformer.graphs import graphed_blocks
from sottovoce.models.transformer.network import SIZES, STRIDE, Draws, Settings, Stacking, block, forward, run_blocks
from sottovoce.models.transformer.positions import Cape, PositionDraws
from sottovoce.models.transformer.rescaling import rescaled_norms
from sottovoce.models.transformer.rows import ROW_MULTIPLE
from sottovoce.models.utterances import Features


@dataclass(frozen=True, kw_only=True)
class Options:
    """A named size and what differs from it; `layers` and `width` are the size's unless given.

    `as_released` has features and an input as the code of Pelikan et al. has them (`network.Settings`).
    """

    family: str = DEFAULT
    size: str = "base"
    layers: Annotated[int, Field(ge=1, le=1_000)] | None = None  # built one by one, so bounded before
    width: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3
    layer_drop: Annotated[float, Field(ge=0, lt=1)] = 0.3
    norm: Literal["pre", "post"] = "pre"
    positions: Literal["cape", "sinusoidal"] = "cape"
    cape: Cape = field(default_factory=Cape)
    as_released: bool | None = None  # None is not written, so that older recipes are written as they always were
    features: Ears | None = None  # likewise

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise InputError(f"size={self.size!r}, expected one of {', '.join(SIZES)}")
        if self.width is not None and self.width % (heads := SIZES[self.size].heads):
            raise InputError(f"width={self.width}, expected a multiple of {heads}, the heads of size={self.size}")
        log_mel.check_ears(self.features, as_released=self.as_released)

    def settings(self, *, tokens: int) -> Settings:
        given = {own.name: getattr(self, own.name) for own in fields(self) if own.name != "family"}
        given["ears"] = given.pop("features")  # saved models call it so
        return network.named_settings(tokens=tokens, **{name: v for name, v in given.items() if v is not None})


def place(name: str) -> Place:
    return Place(network.parameter_kind(name), network.layer_index(name))


KINDS = {
    "input": "input scale",
    "conv": "convolution",
    "layer_norm": "layer norm",
    "attention": "attention (q, k, v)",
    "attention_output": "attention output",
    "mlp": "MLP",
    "output": "output layer",
}


def place_apart(name: str) -> Place:
    return Place(network.parameter_role(name), network.layer_index(name))


KINDS_APART = {
    "input": "input scale",
    "conv": "convolution",
    "ln1": "norm 1 (ln1)",
    "wqkv": "q, k, v (wqkv)",
    "wf": "attention out (wf)",
    "ln2": "norm 2 (ln2)",
    "w1": "MLP in (w1)",
    "w2": "MLP out (w2)",
    "last_norm": "last norm",
    "output": "output layer",
}

_MATRICES = tuple(name for name in network.BLOCK_NAMES if ".norm." not in name)


def corrected(name: str) -> bool:
    """Every matrix of a block."""
    return network.layer_index(name) is not None and name.endswith(_MATRICES)


def unusable(settings: Settings, samples: int, tokens: Sequence[int]) -> str | None:
    if ctc.required_frames(tokens) > frame_count(samples) // STRIDE:
        return "text too long for its audio"
    return None


def draw(
    settings: Settings,
    utterances: Sequence[int],
    *,
    samples: Sequence[int],
    generator: torch.Generator,
    shared: torch.Generator | None = None,
) -> list[Draws]:
    """A group of clients shares which blocks layer-drop leaves out; all else is each one's own."""
    frames = [frame_count(count) for count in samples]
    own = network.draw_several(settings, batch_sizes=utterances, frames=frames, generator=generator)
    if shared is None:
        return own
    kept = network.draw_kept(settings, steps=len(utterances), generator=shared)
    return [replace(drawn, kept=layers) for drawn, layers in zip(own, kept, strict=True)]


def narrow(settings: Settings) -> log_mel.Narrow | None:
    return log_mel.narrowing(settings.ears, as_released=settings.as_released)


def drops_layers(settings: Settings) -> bool:
    return settings.layer_drop > 0


def layers(settings: Settings) -> int:
    return settings.layers


def samples_per_frame(_settings: Settings) -> int:
    return STRIDE * HOP_SAMPLES


def emit(parameters: Parameters, features: Features, *, settings: Settings, **options: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities [U, T, V] and their lengths [U]: training with `draws`, evaluation without.

    `options` are those of `network.forward`: `draws`, and how the blocks run.
    """
    return forward(parameters, features.features_UTF, features.frames_U, settings=settings, **options)


def loss(
    parameters: Parameters, features: Features, *, settings: Settings, draws: Draws | None, **options: Any
) -> Tensor:
    """The mean CTC loss."""
    log_probs_UTV, lengths_U = emit(parameters, features, settings=settings, draws=draws, **options)
    return ctc.loss(log_probs_UTV, lengths_U, features.tokens_UL, features.token_lengths_U)


# Many clients at once.


@dataclass(frozen=True, eq=False)
class StackDraws:
    """One step's draws of several clients: of all together, and each one's own, None where it has no batch."""

    of_all: Draws
    by_client: list[Draws | None]


def join(drawn_N: Sequence[Draws | None]) -> StackDraws:
    """The draws of several clients as one batch's, but for dropout, whose seeds stay each client's own."""
    active = [drawn for drawn in drawn_N if drawn is not None]
    positions = [drawn.positions for drawn in active if drawn.positions is not None]
    of_all = Draws(
        kept=tuple(sorted({layer for drawn in active for layer in drawn.kept})),
        positions=_joined_positions(positions) if positions else None,
        dropout_seed=None,
    )
    return StackDraws(of_all, list(drawn_N))


def _joined_positions(positions: Sequence[PositionDraws]) -> PositionDraws:
    return PositionDraws(torch.cat([p.shift_B for p in positions]))


def losses(
    parameters: Parameters,
    features: Features,
    *,
    rows_U: Sequence[int],
    clients: int,
    settings: Settings,
    draws: StackDraws,
    **options: Any,
) -> Tensor:
    """`loss` of each of N `clients`, [N], from parameters with a leading client axis, or shared by all.

    `rows_U` is the client of each utterance; a client without utterances has a loss of zero.
    """
    stacking = Stacking(rows_U, clients, draws.by_client)
    log_probs_UTV, lengths_U = emit(
        parameters, features, settings=settings, draws=draws.of_all, stacking=stacking, **options
    )
    return ctc.loss_by_row(
        log_probs_UTV, lengths_U, features.tokens_UL, features.token_lengths_U, rows_U=rows_U, rows=clients
    )


# Bytes of activations for each frame, block and channel: 24 numbers of two bytes, as measured for the blocks.
_ACTIVATION_BYTES = 48
_FRAMES_PER_SECOND = 100 / 3


def stack_bytes(settings: Settings, *, seconds: float, steps: int) -> float:
    """What a client with `steps` steps of at most `seconds` of speech takes besides its weights."""
    frames = seconds * _FRAMES_PER_SECOND
    activations = frames * settings.layers * settings.width * _ACTIVATION_BYTES
    features = frames * STRIDE * steps * MEL_COUNT * 8  # two bytes each, and padding to the longest utterance
    return activations + features


# Where compiling, or recording CUDA graphs, pays.

WORTH_COMPILING = 2000  # steps: compiling takes half a minute
# Clients trained in a run: stacks come in many shapes, a minute of compiling in all, for a tenth of the time.
WORTH_COMPILING_STACKS = 100_000

SHAPES = 32  # how many shapes of rows may be compiled in one run; torch's own limit is 8

# width² · seconds of audio a step, up to which a block takes the host longer to launch (some 0.8 ms) than it takes a
# large GPU to run (12·width² weights, 6 operations each per frame of 30 ms, at 400 TFLOP/s): 250 s for `base`.
HOST_BOUND = 1.5e8


def faster(
    family: Family[Settings, Draws],
    working: Parameters | None,
    *,
    settings: Settings,
    steps: int,
    batch_seconds: float,
    device: torch.device,
) -> Family[Settings, Draws]:
    """For training one model, whose weights are `working`, with `steps` steps of at most `batch_seconds`.

    None where only a part of it is trained: graphs record whole models.
    """
    if device.type != "cuda" or steps < WORTH_COMPILING:
        return family
    fused = _fused_block()
    blocks: Any = partial(run_blocks, block=fused)
    if working is not None and settings.width**2 * batch_seconds <= HOST_BOUND:
        blocks = graphed_blocks(working, settings=settings, block=fused)
    options: dict[str, Any] = {"blocks": blocks, "row_multiple": row_multiple(batch_seconds)}
    assert family.recognition is not None
    return replace(
        family,
        hear=partial(hear, line_features=compiled(log_mel.line_features)),
        mask=torch.compile(apply_masks),
        loss=partial(loss, **options),
        recognition=replace(family.recognition, emit=partial(emit, **options)),
    )


def faster_stacks(
    stacked: Stacked[Settings, Draws], *, steps: int, batch_seconds: float, device: torch.device
) -> Stacked[Settings, Draws]:
    """For stacked clients; `steps` counts those of each."""
    if device.type != "cuda" or steps < WORTH_COMPILING_STACKS:
        return stacked
    blocks, rows = partial(run_blocks, block=_fused_block()), row_multiple(batch_seconds, lengths=4)
    return replace(stacked, losses=partial(losses, blocks=blocks, row_multiple=rows), full=True)


def _fused_block() -> Any:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    return torch.compile(block, dynamic=False)


def row_multiple(batch_seconds: float, *, lengths: int = 16) -> int:
    """What rows end on, so that batches up to `batch_seconds` have few lengths, and nearly full ones one or two."""
    frames = frame_count(int(batch_seconds * SAMPLE_RATE)) // STRIDE
    return -(-frames // (lengths * ROW_MULTIPLE)) * ROW_MULTIPLE


_STACKED = Stacked(join=join, losses=losses, bytes=stack_bytes, faster=faster_stacks)  # for weights of either kind

FAMILY = Family(
    name=DEFAULT,
    Options=Options,
    Settings=Settings,
    tiny={"size": "tiny", "layers": None, "width": None},
    shapes=network.parameter_shapes,
    layers=layers,
    init=network.init,
    place=place,
    kinds=KINDS,
    place_apart=place_apart,
    kinds_apart=KINDS_APART,
    corrected=corrected,
    of_tokens=frozenset({"output.weight", "output.bias"}),
    unusable=unusable,
    hear=hear,
    narrow=narrow,
    draw=draw,
    loss=loss,
    shared_chance=drops_layers,
    recognition=Recognition(emit=emit, samples_per_frame=samples_per_frame),
    stacked=_STACKED,
    shared=_STACKED,
    faster=faster,
    rescaled=rescaled_norms,
)
