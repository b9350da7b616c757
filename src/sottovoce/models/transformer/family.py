"""The CTC transformer as a family: what a recipe may choose of it, its loss, and how it is stacked and sped up.

Shapes: U utterances, T frames, V tokens with the blank, N clients of a stack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.augment import apply_masks
from sottovoce.data.audio.features import HOP_SAMPLES, MEL_COUNT, FeatureSettings, compile_features, frame_count
from sottovoce.data.audio.waveforms import Features
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models import ctc
from sottovoce.models.checks import check_size
from sottovoce.models.family import (
    DEFAULT,
    Family,
    FrontEnd,
    ParameterPlace,
    Parameters,
    Presentation,
    Recognition,
    Stacked,
    Stacking,
    Training,
    Transfer,
)
from sottovoce.models.log_mel import check_feature_settings, narrow_by_settings, normalised_log_mel
from sottovoce.models.transformer.draws import Draws, StackDraws, draw, join_draws
from sottovoce.models.transformer.features import extract_features
from sottovoce.models.transformer.graphs import graphed_blocks
from sottovoce.models.transformer.network import ClientRows, block, forward, run_blocks
from sottovoce.models.transformer.onnx import EXPORT
from sottovoce.models.transformer.positions import Cape
from sottovoce.models.transformer.recorded_stacks import RecordedStacks
from sottovoce.models.transformer.rows import ROW_MULTIPLE
from sottovoce.models.transformer.settings import (
    BLOCK_NAMES,
    SIZES,
    STRIDE,
    Settings,
    init,
    layer_index,
    named_settings,
    parameter_kind,
    parameter_role,
    parameter_shapes,
    rescaled_norms,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """A named size and what differs from it; `layers` and `width` are the size's unless given.

    `as_released` has features and an input as the code of Pelikan et al. has them (`Settings`).
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
    features: FeatureSettings | None = None  # likewise

    def __post_init__(self) -> None:
        check_size(self.size, SIZES)
        if self.width is not None and self.width % (heads := SIZES[self.size].heads):
            raise InputError(f"width={self.width}, expected a multiple of {heads}, the heads of size={self.size}")
        check_feature_settings(self.features, as_released=self.as_released)

    def settings(self, *, tokens: int) -> Settings:
        given = {own.name: getattr(self, own.name) for own in fields(self) if own.name != "family"}
        given["ears"] = given.pop("features")  # saved models call it so
        return named_settings(tokens=tokens, **{name: v for name, v in given.items() if v is not None})


def place(name: str) -> ParameterPlace:
    return ParameterPlace(parameter_kind(name), layer_index(name))


KINDS = {
    "input": "input scale",
    "conv": "convolution",
    "layer_norm": "layer norm",
    "attention": "attention (q, k, v)",
    "attention_output": "attention output",
    "mlp": "MLP",
    "output": "output layer",
}


def fine_place(name: str) -> ParameterPlace:
    return ParameterPlace(parameter_role(name), layer_index(name))


FINE_KINDS = {
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

_MATRICES = tuple(name for name in BLOCK_NAMES if ".norm." not in name)


def is_lora_target(name: str) -> bool:
    """Every matrix of a block."""
    return layer_index(name) is not None and name.endswith(_MATRICES)


def unusable(settings: Settings, samples: int, tokens: Sequence[int]) -> str | None:
    return ctc.text_obstacle(tokens, frames=frame_count(samples) // STRIDE)


# The width from which on a processor is 1.7 times as fast in bfloat16, with only 4 s a step (docs/benchmarks.md). tiny
# (96) gains nothing in whole rounds and keeps its bits, as all models do with which CPU results were made.
BFLOAT16_WIDTH = 192


def gains_in_bfloat16(settings: Settings) -> bool:
    return settings.width >= BFLOAT16_WIDTH


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
    return ctc.mean_ctc_loss(log_probs_UTV, lengths_U, features.tokens_UL, features.token_lengths_U)


# Many clients at once.


def stacked_losses(
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
    stacking = ClientRows(rows_U, clients, draws.by_client)
    log_probs_UTV, lengths_U = emit(
        parameters, features, settings=settings, draws=draws.of_all, stacking=stacking, **options
    )
    return ctc.mean_ctc_losses_by_client(
        log_probs_UTV,
        lengths_U,
        features.tokens_UL,
        features.token_lengths_U,
        places=ctc.find_places(rows_U, rows=clients),
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
# Clients trained in a run. Recording takes a few passes for each shape of a stack, of which there are few. Compiling
# takes a minute for all of them, for a tenth of the time.
WORTH_RECORDING_STACKS, WORTH_COMPILING_STACKS = 2_000, 100_000

SHAPES = 32  # how many shapes of rows may be compiled in one run; torch's own limit is 8

# width² · seconds of audio a step, up to which a block takes the host longer to launch (some 0.8 ms) than it takes a
# large GPU to run (12·width² weights, 6 operations each per frame of 30 ms, at 400 TFLOP/s): 250 s for `base`.
HOST_BOUND = 1.5e8


def accelerate(
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
        front_end=replace(
            family.front_end,
            extract_features=partial(extract_features, by_lines=compile_features(normalised_log_mel)),
            mask=torch.compile(apply_masks),
        ),
        loss=partial(loss, **options),
        recognition=replace(family.recognition, emit=partial(emit, **options)),
    )


def accelerate_stacks(
    stacked: Stacked[Settings, Draws], *, steps: int, batch_seconds: float, device: torch.device
) -> Stacked[Settings, Draws]:
    """For stacked clients; `steps` counts those of each."""
    if device.type != "cuda" or steps < WORTH_RECORDING_STACKS:
        return stacked
    rows = row_multiple(batch_seconds)
    used = _fused_block() if steps >= WORTH_COMPILING_STACKS else block
    recorded = RecordedStacks(stacked.losses, block=used, row_multiple=rows, channel_bytes=_ACTIVATION_BYTES)
    return replace(stacked, losses=recorded, full=True)


def _fused_block() -> Any:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    return torch.compile(block, dynamic=False)


ROW_LENGTHS = 16


def row_multiple(batch_seconds: float) -> int:
    """What rows end on, so that batches up to `batch_seconds` have few lengths, and nearly full ones one or two."""
    frames = frame_count(int(batch_seconds * SAMPLE_RATE)) // STRIDE
    return -(-frames // (ROW_LENGTHS * ROW_MULTIPLE)) * ROW_MULTIPLE


_STACKED = Stacked(join=join_draws, losses=stacked_losses, bytes=stack_bytes, accelerate=accelerate_stacks)

FAMILY = Family(
    name=DEFAULT,
    Options=Options,
    Settings=Settings,
    smoke_options={"size": "tiny", "layers": None, "width": None},
    shapes=parameter_shapes,
    init=init,
    unusable=unusable,
    draw=draw,
    loss=loss,
    place=place,
    front_end=FrontEnd(extract_features=extract_features, narrow=narrow_by_settings),
    recognition=Recognition(emit=emit, samples_per_frame=samples_per_frame),
    stacking=Stacking(stacked=_STACKED, shared=_STACKED),  # for weights of either kind
    presentation=Presentation(kinds=KINDS, fine_place=fine_place, fine_kinds=FINE_KINDS),
    transfer=Transfer(
        token_tensors=frozenset({"output.weight", "output.bias"}),
        is_lora_target=is_lora_target,
        rescale=rescaled_norms,
        layer_count=attrgetter("layers"),
    ),
    training=Training(accelerate=accelerate),
    export=EXPORT,
    gains_in_bfloat16=gains_in_bfloat16,
)
