"""What training a pretrained network keeps in memory, by count.

Numbers that a layer keeps for its way back, for every frame of its output, counted by
`torch.autograd.graph.saved_tensors_hooks` (`tests/models/huggingface/test_memory.py`), with D the layers' width, I that
of their hidden layers, H heads and T frames of an utterance:

                                   a part, LoRA          everything
    Wav2Vec2-BERT                  13·D + 2·I            27·D + 4·I            convolutions
    Parakeet-CTC                   14·D + 2·I + 2·H·T    27·D + 4·I + 2·H·T    the same; a bias of all places
    Moonshine                      11·D + 1.5·I          16·D + 2.6·I          rotary positions
    Whisper                        9·D + 1·I             14·D + 2·I
    wav2vec2, HuBERT, WavLM        8·D + 1·I             12·D + 2·I

A layer that is computed again on the way back keeps its input alone: D. In Wav2Vec2-BERT the bias of all places is
computed again in each layer (`attention`): it and its gradient, 2·H·T, are there for one layer at a time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.huggingface.decoding import TOKENS_A_SECOND
from sottovoce.models.huggingface.inputs import (
    MOONSHINE_CONVOLUTIONS,
    RAW,
    feature_frames,
    output_frames,
    samples_per_frame,
)
from sottovoce.models.huggingface.settings import Settings

NUMBER_BYTES = 2  # GPUs train in bfloat16
LOGIT_BYTES = 12  # scores, and their softmax in float32
USUAL_SECONDS = 10.0  # of an utterance, where only those of a batch are known
SURELY_FREE_BYTES = 2 << 30
MOST_OF_FREE = 0.9
# What comes and goes besides: gradients of one layer, and a copy or two.
SPARE = 1.1
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of layers that may be computed again: each is a network of its own


@dataclass(frozen=True)
class _Kept:
    """Of one layer and frame: multiples of D, of I, and of H·T; the last also for what one layer has at a time."""

    widths: float
    hidden: float
    places: float = 0.0
    passing: float = 0.0


_PART = {
    "wav2vec2-bert": _Kept(13, 2, passing=2),
    "parakeet_ctc": _Kept(14, 2, 2),
    "moonshine": _Kept(11, 1.5),
    "whisper": _Kept(9, 1),
}
_ALL = {
    "wav2vec2-bert": _Kept(27, 4, passing=2),
    "parakeet_ctc": _Kept(27, 4, 2),
    "moonshine": _Kept(16, 2.6),
    "whisper": _Kept(14, 2),
}


def activation_bytes(
    settings: Settings, lines: int, frames: int, *, recompute: float = 0.0, number_bytes: int = NUMBER_BYTES
) -> float:
    """What a pass over so many `lines` keeps, each of so many `frames` of features (or samples).

    `recompute`: the share of layers that are computed again.
    """
    config = _encoder(settings)
    width, layers = int(config.get("hidden_size") or config.get("d_model") or 1024), layer_count(settings)
    hidden = int(config.get("intermediate_size") or config.get("encoder_ffn_dim") or 4 * width)
    heads = config.get("num_attention_heads") or config.get("encoder_attention_heads")
    heads = int(heads or config.get("encoder_num_attention_heads") or 8)
    whole = settings.train == "all"
    kept = (_ALL if whole else _PART).get(settings.kind, _Kept(12, 2) if whole else _Kept(8, 1))
    places = int(output_frames(torch.tensor([frames]), settings)[0])
    layer = kept.widths * width + kept.hidden * hidden + kept.places * heads * places
    again = math.ceil(recompute * layers)
    plain = max(layers - again, 1)  # of those computed again one is there at a time, when the others are gone
    per_frame = again * width + plain * layer + kept.passing * heads * places
    front = _front_numbers(settings) * (3 if whole else 1)
    # Embeddings of all distances in an utterance, whatever the number of lines.
    table = places**2 * width // heads if config.get("position_embeddings_type") == "relative_key" else 0
    return SPARE * number_bytes * (lines * (places * per_frame + frames * front) + table)


def extent(features: Tensor, settings: Settings) -> tuple[int, int]:
    """Lines and frames of what a network takes first: [U, T], [U, T, F], or Whisper's [U, F, T]."""
    return len(features), features.shape[2 if settings.kind == "whisper" else 1]


def share_to_recompute(settings: Settings, lines: int, frames: int, *, device: torch.device) -> float:
    """The smallest share of layers to compute again for a pass over so much to fit into the `device`'s free memory."""
    if device.type != "cuda" or activation_bytes(settings, lines, frames) < SURELY_FREE_BYTES:
        return 0.0
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return fitting_share(settings, lines, frames, most_bytes=MOST_OF_FREE * (free + unused))


def fitting_share(settings: Settings, lines: int, frames: int, *, most_bytes: float) -> float:
    """The smallest share of layers to compute again for a pass to take `most_bytes`; all of them where none is."""
    for share in SHARES:
        if activation_bytes(settings, lines, frames, recompute=share) <= most_bytes:
            return share
    return SHARES[-1]


def _encoder(settings: Settings) -> Mapping[str, Any]:
    found: Mapping[str, Any] = settings.of_model.get("encoder_config") or settings.of_model
    return found


def layer_count(settings: Settings) -> int:
    """Of the encoder: a decoder's texts are short."""
    config = _encoder(settings)
    names = ("num_hidden_layers", "encoder_layers", "encoder_num_hidden_layers")
    return int(next((config[name] for name in names if config.get(name)), 6 if settings.kind == "moonshine" else 24))


def _front_numbers(settings: Settings) -> float:
    """What convolutions before the first layer make of one sample; kept where they are trained."""
    config = settings.of_model
    if settings.kind not in RAW:
        return 0.0
    if settings.kind == "moonshine":
        strides = [stride for _, stride in MOONSHINE_CONVOLUTIONS]
        channels = [int(config.get("hidden_size", 288)) * times for times in (1, 2, 1)]
    else:
        strides = list(config.get("conv_stride", (5, 2, 2, 2, 2, 2, 2)))
        channels = list(config.get("conv_dim", [512] * len(strides)))
    numbers, stride = 0.0, 1
    for own, by in zip(channels, strides, strict=True):
        stride *= by
        numbers += own / stride
    return numbers


def stack_bytes(settings: Settings, *, seconds: float, steps: int) -> float:
    """What a client with `steps` steps of at most `seconds` of speech takes besides its weights."""
    usual = min(seconds, USUAL_SECONDS)
    frames = feature_frames(round(usual * SAMPLE_RATE), settings)
    line = activation_bytes(settings, 2, frames) - activation_bytes(settings, 1, frames)
    kept = line * seconds / usual
    features = steps * seconds * SAMPLE_RATE * (NUMBER_BYTES if settings.kind in RAW else 1)
    logits = seconds * TOKENS_A_SECOND * settings.tokens * LOGIT_BYTES
    if settings.is_ctc:
        logits = seconds * SAMPLE_RATE / samples_per_frame(settings) * settings.tokens * LOGIT_BYTES
    return float(kept + features + logits)
