"""The transducer on speech that is still being spoken: samples in, tokens out, what is needed to go on in between.

A step's tokens come as soon as the window of its last frame is there, 45 ms after the step began. They are those that
greedy search finds in the whole recording: features, encoder, prediction network and search look at the past alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sottovoce.data.audio.features import HOP_SAMPLES, WINDOW_SAMPLES
from sottovoce.models.family import Parameters
from sottovoce.models.lstm import State
from sottovoce.models.module import with_corrections
from sottovoce.models.speech_lstm.network import encode_frames, line_features
from sottovoce.models.transducer.network import Settings
from sottovoce.models.transducer.search import Written, greedy


@dataclass(frozen=True, slots=True)
class Heard:
    """Samples of which no step has been made yet, how many steps have, and what the networks remember of them."""

    left_N: NDArray[np.int16]
    steps: int = 0
    encoder: State | None = None
    written: Written | None = None


def stream(
    parameters: Parameters, samples_N: NDArray[np.int16], before: Heard | None = None, *, settings: Settings
) -> tuple[list[tuple[int, int]], Heard]:
    """The tokens that follow, each with its step, and from where to go on."""
    before = before or Heard(np.zeros(0, dtype=np.int16))
    left_N, encoder = np.concatenate([before.left_N, samples_N]), settings.encoder
    frames = (len(left_N) - WINDOW_SAMPLES) // HOP_SAMPLES + 1
    if (steps := max(frames, 0) // encoder.stack) == 0:
        return [], Heard(left_N, before.steps, before.encoder, before.written)
    weights = with_corrections(parameters)
    samples_1N = torch.from_numpy(left_N)[None].to(weights["output.bias"].device)
    with torch.no_grad():
        features_1TF = line_features(samples_1N, torch.tensor([len(left_N)]).to(samples_1N.device), settings=encoder)
        encoded_1TD, state = encode_frames(
            weights, features_1TF[:, : steps * encoder.stack], before.encoder, settings=encoder
        )
        (found,), written = greedy(weights, encoded_1TD, torch.tensor([steps]), before.written, settings=settings)
    tokens = [(token, before.steps + step) for token, step in zip(found.tokens, found.frames, strict=True)]
    return tokens, Heard(left_N[steps * encoder.step_samples :], before.steps + steps, state, written)
