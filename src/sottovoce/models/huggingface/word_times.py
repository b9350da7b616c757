"""When words were said, by models with a decoder: where chosen heads of it look at each token (Whisper's way).

Whisper's files name heads of the decoder's attention to speech that follow the text (`alignment_heads`). Their weights,
normalised over tokens and smoothed over time, are a matrix of tokens by frames; the path through it with the largest
sum (dynamic time warping) gives each token its first frame. Models without such heads do not say when a word was said.

Shapes: U utterances, L tokens, T frames, H heads.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from sottovoce.data.audio.waveforms import Features
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.decoding import Hypothesis
from sottovoce.models.family import Parameters
from sottovoce.models.huggingface.decoding import decoder_prompt
from sottovoce.models.huggingface.inputs import network_inputs, samples_per_frame
from sottovoce.models.huggingface.network import build_network
from sottovoce.models.huggingface.settings import Settings
from sottovoce.models.trainable import with_corrections


def explain_untimed(settings: Settings) -> str | None:
    """Why a model does not say when its words were said; None where it does."""
    if settings.is_ctc or settings.of_generation.get("alignment_heads"):
        return None
    return f"models of model_type={settings.kind} without alignment_heads do not say when a word was said"


def lead_frames(settings: Settings) -> int:
    """The frames of the silence that is put before every utterance."""
    return round(settings.silence_seconds * SAMPLE_RATE / samples_per_frame(settings))


@torch.no_grad()
def align_texts(
    parameters: Parameters, features: Features, texts: Sequence[Hypothesis], *, lengths_U: Tensor, settings: Settings
) -> list[Hypothesis]:
    """`texts` with the frame in which each token begins, of utterances with so many samples."""
    prompt, longest = decoder_prompt(settings), max((len(text.tokens) for text in texts), default=0)
    if longest == 0:
        return list(texts)
    dtype, device = next(iter(parameters.values())).dtype, features.features_UTF.device
    inputs, _, _ = network_inputs(features.features_UTF.to(dtype), features.frames_U, settings)
    lines = [[*prompt, *(token - 1 for token in text.tokens)] for text in texts]
    padded = [line + [prompt[0]] * (len(prompt) + longest - len(line)) for line in lines]  # none looks ahead
    decoder = {"decoder_input_ids": torch.tensor(padded, device=device), "use_cache": False, "output_attentions": True}
    module = _build_attending(settings)
    buffers = {name: own.to(device) for name, own in module.named_buffers() if own is not None}
    found = functional_call(module, {**buffers, **with_corrections(parameters)}, kwargs=inputs | decoder)
    heads = settings.of_generation["alignment_heads"]
    weights_HULT = torch.stack([found.cross_attentions[layer][:, head] for layer, head in heads]).float()
    silence = 2 * round(settings.silence_seconds * SAMPLE_RATE)
    # As many frames as theirs: two of features to one, of which each begins where a hop does.
    frames_U = -(-(lengths_U + silence) // (samples_per_frame(settings) // 2)) // 2
    aligned = []
    for number, (text, frames) in enumerate(zip(texts, frames_U.tolist(), strict=True)):
        tokens = slice(len(prompt), len(prompt) + len(text.tokens))
        weights_HLT = weights_HULT[:, number, tokens, : max(frames, 1)]
        aligned.append(replace(text, frames=_first_frames(weights_HLT, settings)) if text.tokens else text)
    return aligned


@cache
def _build_attending(settings: Settings) -> nn.Module:
    """The network with an attention that returns its weights, which the fast ones do not."""
    module: Any = deepcopy(build_network(settings).module)
    module.set_attn_implementation("eager")
    return cast(nn.Module, module)


def _first_frames(weights_HLT: Tensor, settings: Settings) -> list[int]:
    """The frame in which each of L tokens begins."""
    mean_H1T = weights_HLT.mean(dim=1, keepdim=True)
    deviation_H1T = weights_HLT.std(dim=1, keepdim=True, unbiased=False)
    normal_HLT = (weights_HLT - mean_H1T) / deviation_H1T.clamp_min(torch.finfo(torch.float32).tiny)
    smooth_HLT = _smooth(normal_HLT, width=int(settings.of_model.get("median_filter_width", 7)))
    return find_first_frames(smooth_HLT.mean(dim=0).cpu().double().numpy())


def _smooth(values_HLT: Tensor, *, width: int) -> Tensor:
    """The median of `width` frames around each."""
    half = width // 2
    if values_HLT.shape[-1] <= half:
        return values_HLT
    padded = torch.nn.functional.pad(values_HLT, (half, half), mode="reflect")
    return padded.unfold(-1, width, 1).sort(dim=-1).values[..., half]


def find_first_frames(matrix_LT: NDArray[np.float64]) -> list[int]:
    """The first frame of each token on the path from the first of both to the last whose sum is largest.

    >>> find_first_frames(np.array([[1.0, 1, -1, -1], [-1, -1, 1, -1], [-1, -1, -1, 1]]))
    [0, 2, 3]
    """
    tokens, frames = matrix_LT.shape
    cost = np.full((tokens + 1, frames + 1), np.inf, dtype=np.float32)
    cost[0, 0] = 0
    step = np.full((tokens + 1, frames + 1), 2, dtype=np.int8)  # both on, the token alone, the frame alone
    step[1:, 0] = 1
    for diagonal in range(2, tokens + frames + 1):  # all cells of one at once: they depend on those before alone
        i = np.arange(max(1, diagonal - frames), min(tokens, diagonal - 1) + 1)
        j = diagonal - i
        both, token, frame = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        step[i, j] = np.where((both < token) & (both < frame), 0, np.where((token < both) & (token < frame), 1, 2))
        cost[i, j] = np.choose(step[i, j], (both, token, frame)) - matrix_LT[i - 1, j - 1]
    first = [0] * tokens
    i, j = tokens, frames
    while i > 0:
        first[i - 1] = max(j - 1, 0)  # the last one written is the earliest
        taken = int(step[i, j])
        i, j = i - (taken != 2), j - (taken != 1)
    return first
