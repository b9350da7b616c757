"""The CRDNN as a family: what a recipe may choose of it, its joint loss, and what chance decides.

Shapes: U utterances, T encoder steps, L tokens of the longest text, V tokens with the blank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from sottovoce.base.seeds import seeded_kernels
from sottovoce.data.audio.features import HOP_SAMPLES, MEL_COUNT, FeatureSettings
from sottovoce.data.audio.waveforms import Features
from sottovoce.models import ctc
from sottovoce.models.attention_search import AttentionDecoder, SearchOptions, search_attention
from sottovoce.models.checks import check_size
from sottovoce.models.crdnn import stacked
from sottovoce.models.crdnn.decoder import END, start_decoder, step_decoder
from sottovoce.models.crdnn.features import extract_features, frames_of
from sottovoce.models.crdnn.graphs import (
    STEP_MULTIPLE,
    TOKEN_MULTIPLE,
    RecordedStacks,
    log_probs,
    recorded_decoder,
    recorded_encoder,
)
from sottovoce.models.crdnn.network import Encoded, encode
from sottovoce.models.crdnn.onnx import EXPORT
from sottovoce.models.crdnn.settings import (
    POOLING,
    SIZES,
    Settings,
    init,
    named_settings,
    parameter_shapes,
    running_statistics,
)
from sottovoce.models.decoding import Hypothesis
from sottovoce.models.family import (
    Family,
    FrontEnd,
    Inspection,
    Parameters,
    Presentation,
    Recognition,
    Stacked,
    Stacking,
    Training,
    TrainingProgress,
    Transfer,
)
from sottovoce.models.log_mel import check_feature_settings, narrow_by_settings
from sottovoce.models.module import draw_seeds


@dataclass(frozen=True, kw_only=True)
class Options:
    """A named size, and what differs from it; see `Settings` for what the loss may be."""

    family: str = "crdnn"
    size: str = "gao"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.15
    norm: Literal["layer", "batch"] = "layer"
    mu: Annotated[float, Field(ge=0, le=1)] = 0.7
    label_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.1
    ctc_epochs: Annotated[int, Field(ge=0)] | None = None
    as_released: bool = False
    features: FeatureSettings | None = None  # None is not written: older recipes are written as they always were

    def __post_init__(self) -> None:
        check_size(self.size, SIZES)
        check_feature_settings(self.features, as_released=self.as_released)

    def settings(self, *, tokens: int) -> Settings:
        given = {own.name: getattr(self, own.name) for own in fields(self) if own.name != "family"}
        given["ears"] = given.pop("features")  # saved models call it so
        return named_settings(tokens=tokens, **given)


KINDS = {
    "cnn.conv1": "first convolutions",
    "cnn.norm1": "first convolutions' norms",
    "cnn.conv2": "second convolutions",
    "cnn.norm2": "second convolutions' norms",
    "rnn.forward.input": "LSTM, forward, input",
    "rnn.forward.recurrent": "LSTM, forward, recurrent",
    "rnn.backward.input": "LSTM, backward, input",
    "rnn.backward.recurrent": "LSTM, backward, recurrent",
    "dnn.linear": "DNN",
    "dnn.norm": "DNN's norms",
    "ctc": "CTC head",
    "embedding": "embedding of tokens",
    "attention.key": "attention: keys",
    "attention.query": "attention: queries",
    "attention.score": "attention: scores",
    "attention.places": "attention: places",
    "attention.location": "attention: location",
    "attention.value": "attention: values",
    "gru.input": "GRU, input",
    "gru.recurrent": "GRU, recurrent",
    "readout": "readout",
    "output": "token head",
}


def is_lora_target(name: str) -> bool:
    """Every matrix but what belongs to a single token, or is one row or a norm."""
    return name.endswith(".weight") and not name.startswith(("cnn.", "embedding.", "attention.score."))


def unusable(settings: Settings, samples: int, tokens: Sequence[int]) -> str | None:
    steps = frames_of(samples, settings) // POOLING
    if not steps:
        return "too short for one encoder step"
    return ctc.text_obstacle(tokens, frames=steps)


@dataclass(frozen=True, slots=True)
class Draws:
    """What is decided for one training step: the seed of its dropout, and whether CTC is part of its loss."""

    seed: int
    with_ctc: bool = True


def draw(settings: Settings, utterances: Sequence[int], *, generator: torch.Generator, **_: Any) -> list[Draws]:
    return [Draws(seed) for seed in draw_seeds(settings, utterances, generator=generator)]


def adjust_draws(settings: Settings, draws: Draws, progress: TrainingProgress) -> Draws:
    """CTC helps attention to find its way, and is left out once that is known."""
    is_over = settings.ctc_epochs is not None and progress.epoch >= settings.ctc_epochs
    return replace(draws, with_ctc=not is_over)


def loss(
    parameters: Parameters, features: Features, *, settings: Settings, draws: Draws | None, **functions: Any
) -> Tensor:
    """mu·CE + (1 − mu)·CTC (Gao et al., Eq. 3), or CE alone; `functions` are other ones for training."""
    if draws is None:
        return _joint(_terms(parameters, features, settings=settings, mu=settings.mu, training=False))
    mu = settings.mu if draws.with_ctc else 1.0
    with seeded_kernels(draws.seed, device=features.features_UTF.device):
        return _joint(_terms(parameters, features, settings=settings, mu=mu, training=True, **functions))


CROSS_ENTROPY = "cross_entropy"


def measure(parameters: Parameters, features: Features, *, settings: Settings) -> dict[str, Tensor]:
    """Besides the joint loss its CE alone, where that is trained: the validation loss of SpeechBrain's recipe."""
    terms = _terms(parameters, features, settings=settings, mu=settings.mu, training=False)
    own = {CROSS_ENTROPY: terms[CROSS_ENTROPY][1]} if CROSS_ENTROPY in terms else {}
    return {"loss": _joint(terms), **own}


def _joint(terms: Mapping[str, tuple[float, Tensor]]) -> Tensor:
    return torch.stack([weight * term for weight, term in terms.values()]).sum()


def _terms(
    parameters: Parameters,
    features: Features,
    *,
    settings: Settings,
    mu: float,
    training: bool,
    encode: Callable[..., Encoded] = encode,
    log_probs: Callable[..., Tensor] = log_probs,
) -> dict[str, tuple[float, Tensor]]:
    """The parts of the loss that have a weight, each with it."""
    encoded = encode(parameters, features, settings=settings, training=training)
    terms, texts = {}, (features.tokens_UL, features.token_lengths_U)
    if mu > 0:
        inputs = (encoded.memory_UTD, encoded.lengths_U, features.tokens_UL)
        log_probs_ULV = log_probs(parameters, *inputs, settings=settings, dropout=settings.dropout if training else 0.0)
        terms[CROSS_ENTROPY] = (mu, cross_entropy(log_probs_ULV, *texts, smoothing=settings.label_smoothing))
    if mu < 1:
        terms["ctc"] = (1 - mu, ctc.mean_ctc_loss_by_token(encoded.ctc_log_probs_UTV, encoded.lengths_U, *texts))
    return terms


def cross_entropy(log_probs_ULV: Tensor, tokens_UL: Tensor, token_lengths_U: Tensor, *, smoothing: float) -> Tensor:
    """The mean over all tokens of a batch and the ends of texts; `smoothing` of it is the mean over the vocabulary."""
    device = log_probs_ULV.device
    targets_UL = F.pad(tokens_UL, (0, 1), value=END).to(device, non_blocking=True)  # zero behind each text, as END is
    counted_UL = torch.arange(targets_UL.shape[1]) <= token_lengths_U[:, None]
    said_UL = log_probs_ULV.gather(2, targets_UL[:, :, None])[:, :, 0]
    smoothed_UL = (1 - smoothing) * said_UL + smoothing * log_probs_ULV.mean(dim=2)
    return -torch.where(counted_UL.to(device, non_blocking=True), smoothed_UL, 0).sum() / int(counted_UL.sum())


def emit(parameters: Parameters, features: Features, *, settings: Settings) -> tuple[Tensor, Tensor]:
    """The CTC head's log-probabilities [U, T, V] and their lengths [U]."""
    encoded = encode(parameters, features, settings=settings)
    return encoded.ctc_log_probs_UTV, encoded.lengths_U


def search(
    parameters: Parameters, features: Features, *, settings: Settings, how: SearchOptions
) -> list[list[Hypothesis]]:
    """The best texts of each utterance, by the decoder and, where `how` asks for it, the CTC head."""
    if settings.mu == 0:  # the decoder was never trained: it must decide nothing
        how = replace(how, ctc_weight=1.0, end_threshold=None, longest_shift=None)
    encoded = encode(parameters, features, settings=settings)
    decoder = AttentionDecoder(
        start=partial(start_decoder, parameters, settings=settings),
        step=partial(step_decoder, parameters, settings=settings),
    )
    return search_attention(
        decoder, encoded.memory_UTD, encoded.lengths_U, ctc_log_probs_UTV=encoded.ctc_log_probs_UTV, how=how
    )


# Recording takes about a tenth of a second for each of some thirty shapes.
WORTH_RECORDING = 500


def accelerate(
    family: Family[Settings, Draws],
    working: Parameters | None,
    *,
    settings: Settings,
    steps: int,
    batch_seconds: float,
    device: torch.device,
) -> Family[Settings, Draws]:
    """Recorded, for training the whole of `working` on a GPU; not as released, where padding is part of the speech."""
    if device.type != "cuda" or steps < WORTH_RECORDING or working is None or settings.as_released:
        return family
    functions: dict[str, Any] = {"encode": recorded_encoder(working, settings=settings)}
    if settings.mu > 0:
        functions["log_probs"] = recorded_decoder(working, settings=settings)
    return replace(family, loss=partial(loss, **functions))


# Many clients at once.


def stacked_losses(
    parameters: Parameters,
    features: Features,
    *,
    rows_U: Sequence[int],
    clients: int,
    settings: Settings,
    draws: Sequence[Draws | None],
    record: stacked.Record | None = None,
    **padding: int,
) -> Tensor:
    """`loss` of each of N `clients`, [N]; utterance i belongs to client `rows_U[i]`.

    `record` and `padding` are those of `stacked.client_losses` and `stacked.arrange_lines`.
    """
    return stacked.client_losses(
        parameters,
        stacked.arrange_lines(features, rows_U=rows_U, clients=clients, **padding),
        settings=settings,
        record=record,
        seeds_N=[None if own is None else own.seed for own in draws],
        mu_N=[settings.mu if own is None or own.with_ctc else 1.0 for own in draws],
    )


# Clients trained in a run: stacks come in up to a hundred shapes, each of which takes about a second to record.
WORTH_RECORDING_STACKS = 10_000


def accelerate_stacks(
    stacks: Stacked[Settings, Draws], *, steps: int, batch_seconds: float, device: torch.device
) -> Stacked[Settings, Draws]:
    """For stacked clients; `steps` counts those of each. All stacks are as high, so that few shapes occur."""
    if device.type != "cuda" or steps < WORTH_RECORDING_STACKS:
        return stacks
    recorded = partial(
        stacked_losses, record=RecordedStacks(), frame_multiple=POOLING * STEP_MULTIPLE, token_multiple=TOKEN_MULTIPLE
    )
    return replace(stacks, losses=recorded, full=True)


def stacking_unfit(settings: Settings) -> str | None:
    """What depends on a batch as a whole would depend on the other clients of a stack."""
    if settings.norm != "layer":
        return f"with norm={settings.norm}, whose statistics are those of a batch; expected norm=layer"
    if settings.as_released:
        return "with as_released, where padding is part of the speech; expected as_released=false"
    return None


# Bytes of a number, twice, because clients are padded to the longest and the most utterances of a stack.
_NUMBER_BYTES = 2 * 2
_SAVED_PLANES = 12  # as large as a block's output before its pooling, which its two convolutions keep for the way back
_SAVED_WIDTHS = 26  # as wide as an LSTM, each step and layer
_FRAMES_PER_SECOND = 100
_TOKENS_PER_SECOND = 15


def stack_bytes(settings: Settings, *, seconds: float, steps: int) -> float:
    """What a client with `steps` steps of at most `seconds` of speech takes besides its weights."""
    frames = seconds * _FRAMES_PER_SECOND
    planes = sum(channels * (MEL_COUNT >> block) for block, channels in enumerate(settings.channels))
    widths = settings.rnn_layers * settings.rnn_width
    attended = 10 * _TOKENS_PER_SECOND * settings.decoder_width  # by each token of an utterance of ten seconds
    kept = frames * _SAVED_PLANES * planes + frames / POOLING * (_SAVED_WIDTHS * widths + attended)
    return _NUMBER_BYTES * (kept + frames * steps * MEL_COUNT)


def samples_per_frame(_settings: Settings) -> int:
    return POOLING * HOP_SAMPLES


# For weights of either kind: shared ones are seen as every client's.
_STACKED = Stacked(
    join=list, losses=stacked_losses, bytes=stack_bytes, unfit=stacking_unfit, accelerate=accelerate_stacks
)

FAMILY = Family(
    name="crdnn",
    Options=Options,
    Settings=Settings,
    smoke_options={"size": "tiny"},
    shapes=parameter_shapes,
    init=init,
    unusable=unusable,
    draw=draw,
    loss=loss,
    front_end=FrontEnd(extract_features=extract_features, narrow=narrow_by_settings),
    recognition=Recognition(emit=emit, samples_per_frame=samples_per_frame, search=search),
    stacking=Stacking(stacked=_STACKED, shared=_STACKED),
    presentation=Presentation(kinds=KINDS),
    transfer=Transfer(
        token_tensors=frozenset({"ctc.weight", "ctc.bias", "embedding.weight", "output.weight", "output.bias"}),
        is_lora_target=is_lora_target,
        layer_count=attrgetter("layer_count"),
    ),
    training=Training(adjust_draws=adjust_draws, statistics=running_statistics, accelerate=accelerate),
    inspection=Inspection(measure=measure, validation=CROSS_ENTROPY),
    export=EXPORT,
)
