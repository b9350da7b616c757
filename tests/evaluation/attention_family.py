"""A family that searches with attention, and has no memory: a frame's loudness is its token, silence says nothing.

Its decoder looks at one spoken frame after another. What it hears never depends on where a window begins.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sottovoce.data.audio.waveforms import Features, Waveforms
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models import attention_search
from sottovoce.models.attention_search import AttentionDecoder, SearchOptions
from sottovoce.models.decoding import Hypothesis
from sottovoce.models.family import Recognition, find_family

NAME = "tests.evaluation.attention_family:FAMILY"
TOKENS = CharacterTokens("abcdefghijklmnopqrstuvwxyz ")
FRAME_SAMPLES = 640
LEVEL = 1_000
DEAF = 28  # a loudness that makes the decoder say "a" for ever, without looking anywhere else


def sound_of(frames: str, *, deaf: bool = False) -> np.ndarray:
    """Samples that say `frames`, one character each; "." is silence."""
    levels = [TOKENS.encode(character)[0] if character != "." else 0 for character in frames]
    return np.repeat(np.array([*[DEAF] * deaf, *levels]) * LEVEL, FRAME_SAMPLES).astype(np.int16)


def hear(recordings: Waveforms, *, settings: Any, dtype: torch.dtype) -> Features:
    frames_U = recordings.lengths_U // FRAME_SAMPLES
    lines_UN = torch.nn.functional.pad(recordings.padded_UN.float(), (0, FRAME_SAMPLES))  # at least one frame
    frames_UTN = lines_UN.unfold(1, FRAME_SAMPLES, FRAME_SAMPLES)
    levels_UT = (frames_UTN.abs().mean(dim=-1) / LEVEL).round()
    return Features(levels_UT[..., None].to(dtype), frames_U, recordings.tokens_UL, recordings.token_lengths_U)


def emit(_parameters: Any, features: Features, *, settings: Any) -> tuple[Tensor, Tensor]:
    levels_UT = features.features_UTF[..., 0].long().clamp(max=TOKENS.size)
    return (9.0 * torch.nn.functional.one_hot(levels_UT, TOKENS.size + 1)).log_softmax(dim=-1), features.frames_U


class State(NamedTuple):
    next_B: Tensor  # the first frame that it has not looked at


def start(memory_BTD: Tensor, _lengths_B: Tensor) -> State:
    return State(torch.zeros(len(memory_BTD), dtype=torch.int64))


def step(memory_BTD: Tensor, lengths_B: Tensor, _tokens_B: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
    levels_BT, frames_T = memory_BTD[..., 0].long(), torch.arange(memory_BTD.shape[1])
    ahead_BT = (levels_BT > 0) & (frames_T >= state.next_B[:, None]) & (frames_T < lengths_B[:, None])
    frame_B = ahead_BT.int().argmax(dim=1)
    heard_B = levels_BT.gather(1, frame_B[:, None])[:, 0]
    deaf_B = heard_B == DEAF
    token_B = torch.where(ahead_BT.any(dim=1), torch.where(deaf_B, 1, heard_B), attention_search.END)
    log_probs_BV = (9.0 * torch.nn.functional.one_hot(token_B, TOKENS.size + 1)).log_softmax(dim=-1)
    attention_BT = torch.nn.functional.one_hot(frame_B, len(frames_T)).float()
    return log_probs_BV, State(torch.where(deaf_B, state.next_B, frame_B + 1)), attention_BT


def search(_parameters: Any, features: Features, *, settings: Any, how: SearchOptions) -> list[list[Hypothesis]]:
    decoder = AttentionDecoder(start=start, step=step)
    ctc_log_probs_UTV, lengths_U = emit(_parameters, features, settings=settings)
    return attention_search.search_attention(
        decoder, features.features_UTF, lengths_U, ctc_log_probs_UTV=ctc_log_probs_UTV, how=how
    )


FAMILY = replace(
    find_family("ctc_transformer"),
    name=NAME,
    front_end=replace(find_family("ctc_transformer").front_end, extract_features=hear),
    recognition=Recognition(emit=emit, samples_per_frame=lambda _settings: FRAME_SAMPLES, search=search),
)
