"""The streaming transducer for other runtimes: an encoder with its state, a prediction network with its own, a joint.

    samples of a chunk, state ─► encoder ─► f of its steps, next state
    the last token, state     ─► decoder ─► g, next state
    f of one step, g          ─► joiner  ─► log-probabilities

A chunk of N samples has (N − 240) // 480 steps; the next one begins 480 samples later for each of them.

Shapes: U utterances, N samples, T encoder steps, D width, V outputs; states are [layers, U, D].
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import sample_count
from sottovoce.models.family import Parameters
from sottovoce.models.lstm import LstmState
from sottovoce.models.onnx_graphs import BATCH, Axes, Export, Function, Graph, OnnxModel, SherpaModel
from sottovoce.models.speech_lstm import encode_frames, normalised_log_power
from sottovoce.models.transducer.network import Settings, joint, predict_next
from sottovoce.models.transducer.search import MOST_AT_ONCE

_EXAMPLE_STEPS = 7


def encode_chunk(
    parameters: Parameters, samples_UN: Tensor, hidden_LUD: Tensor, cell_LUD: Tensor, *, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """The steps of a chunk [U, T, D], of floats in [-1, 1), and the state behind them."""
    lengths_U = torch.full_like(samples_UN[:, 0], samples_UN.shape[1], dtype=torch.int64)
    features_UTF = normalised_log_power(samples_UN, lengths_U, settings=settings.encoder)
    before = LstmState(hidden_LUD, cell_LUD)
    encoded_UTD, state = encode_frames(parameters, features_UTF, before, settings=settings.encoder)
    return encoded_UTD, *state


def predict_token(
    parameters: Parameters, tokens_U1: Tensor, hidden_LUD: Tensor, cell_LUD: Tensor, *, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """g [U, D] behind one more token; the blank before a text's first."""
    predicted_U1D, state = predict_next(parameters, tokens_U1, LstmState(hidden_LUD, cell_LUD), settings=settings)
    return predicted_U1D[:, 0], *state


def to_onnx(parameters: Parameters, settings: Settings) -> OnnxModel:
    encoder, width = settings.encoder, settings.encoder.lstm_width
    least, state = sample_count(encoder.stack), ("next_hidden", "next_cell")
    of_encoder: Axes = (encoder.lstm_layers, BATCH, width)
    of_decoder: Axes = (settings.predictor_layers, BATCH, width)
    graphs = (
        Graph(
            name="encoder",
            module=Function(partial(encode_chunk, settings=settings), _part(parameters, "encoder.")),
            examples=(
                torch.sin(torch.arange(2 * sample_count(_EXAMPLE_STEPS * encoder.stack)).float()).view(2, -1),
                *(torch.zeros(encoder.lstm_layers, 2, width) for _ in state),
            ),
            inputs={"samples": (BATCH, "samples"), "hidden": of_encoder, "cell": of_encoder},
            outputs={"encoded": (BATCH, "steps", width), **dict.fromkeys(state, of_encoder)},
            least={"samples": least},
        ),
        Graph(
            name="decoder",
            module=Function(partial(predict_token, settings=settings), _part(parameters, "embedding.", "predictor.")),
            examples=(
                torch.zeros(2, 1, dtype=torch.int64),
                *(torch.zeros(settings.predictor_layers, 2, width) for _ in state),
            ),
            inputs={"token": (BATCH, 1), "hidden": of_decoder, "cell": of_decoder},
            outputs={"predicted": (BATCH, width), **dict.fromkeys(state, of_decoder)},
        ),
        Graph(
            name="joiner",
            module=Function(joint, _part(parameters, "output.")),
            examples=(torch.zeros(2, width), torch.zeros(2, width)),
            inputs={"encoded": (BATCH, width), "predicted": (BATCH, width)},
            outputs={"log_probs": (BATCH, settings.tokens)},
        ),
    )
    decoding = {
        "method": "transducer",
        "blank": 0,
        "samples_per_frame": encoder.step_samples,
        "overlap_samples": least - encoder.step_samples,
        "most_tokens_a_frame": MOST_AT_ONCE,
    }
    return OnnxModel(graphs=graphs, decoding=decoding)


def _part(parameters: Parameters, *stems: str) -> Parameters:
    return {name: p for name, p in parameters.items() if name.startswith(stems)}


def to_sherpa(parameters: Parameters, settings: Settings, pieces: Sequence[str]) -> SherpaModel:
    raise InputError(
        "sherpa-onnx streams mel filterbanks, and this transducer takes log-power spectra of 256 bins, which cannot be "
        "computed from them: expected --to onnx, or a CTC model"
    )


EXPORT = Export(onnx=to_onnx, sherpa=to_sherpa)
