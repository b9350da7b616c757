"""The streaming transducer for other runtimes: an encoder with its state, a prediction network, a joint.

    samples of a chunk, state ─► encoder ─► f of its steps, next state
    the last token, state     ─► decoder ─► g, next state
    f of one step, g          ─► joiner  ─► log-probabilities

A chunk of N samples has (N − 240) // 480 steps; the next one begins 480 samples later for each of them. With
filterbanks, steps are 640 samples, and the first chunk begins with `lead_samples` of its samples backwards. A stateless
prediction network is given the last two tokens, and has no state.

sherpa-onnx computes filterbanks itself, a step of 40 ms at a time. It knows such a model by the name `lstm`: that of
icefall's LSTM transducers, with encoders of LSTMs and a stateless decoder.

Shapes: U utterances, N samples, T frames or encoder steps, D width, V outputs, C tokens; states are [layers, U, D].
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import HOP_SAMPLES, sample_count
from sottovoce.models.ctc import BLANK
from sottovoce.models.family import Parameters
from sottovoce.models.lstm import LstmState
from sottovoce.models.onnx_graphs import (
    BATCH,
    Axes,
    Export,
    Function,
    Graph,
    OnnxModel,
    SherpaModel,
    as_symbols,
    merge_silent,
    silent_outputs,
)
from sottovoce.models.speech_lstm import encode_frames, normalise_frames, normalised_frames
from sottovoce.models.transducer.network import CONTEXT, Settings, joint, predict_from_context, predict_next

_EXAMPLE_STEPS = 7
_STATE = ("next_hidden", "next_cell")


def encode_chunk(
    parameters: Parameters, samples_UN: Tensor, hidden_LUD: Tensor, cell_LUD: Tensor, *, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """The steps of a chunk [U, T, D], of floats in [-1, 1), and the state behind them."""
    lengths_U = torch.full_like(samples_UN[:, 0], samples_UN.shape[1], dtype=torch.int64)
    features_UTF = normalised_frames(samples_UN, lengths_U, settings=settings.encoder)
    before = LstmState(hidden_LUD, cell_LUD)
    encoded_UTD, state = encode_frames(parameters, features_UTF, before, settings=settings.encoder)
    return encoded_UTD, *state


def predict_token(
    parameters: Parameters, tokens_U1: Tensor, hidden_LUD: Tensor, cell_LUD: Tensor, *, settings: Settings
) -> tuple[Tensor, ...]:
    """g [U, D] behind one more token; the blank before a text's first."""
    predicted_U1D, state = predict_next(parameters, tokens_U1, LstmState(hidden_LUD, cell_LUD), settings=settings)
    return predicted_U1D[:, 0], *state


def predict_statelessly(parameters: Parameters, tokens_UC: Tensor) -> Tensor:
    """g [U, D] behind the last tokens; where there are none yet, blanks, or −1, as sherpa-onnx has it."""
    return predict_from_context(parameters, tokens_UC.clamp_min(BLANK))[:, 0]


def to_onnx(parameters: Parameters, settings: Settings) -> OnnxModel:
    encoder, width = settings.encoder, settings.encoder.lstm_width
    least = sample_count(encoder.stack)
    of_encoder: Axes = (encoder.lstm_layers, BATCH, width)
    graphs = (
        Graph(
            name="encoder",
            module=Function(partial(encode_chunk, settings=settings), _part(parameters, "encoder.")),
            examples=(
                torch.sin(torch.arange(2 * sample_count(_EXAMPLE_STEPS * encoder.stack)).float()).view(2, -1),
                *_example_state(encoder.lstm_layers, width),
            ),
            inputs={"samples": (BATCH, "samples"), "hidden": of_encoder, "cell": of_encoder},
            outputs={"encoded": (BATCH, "steps", width), **dict.fromkeys(_STATE, of_encoder)},
            least={"samples": least},
        ),
        _stateless_decoder(parameters, settings) if settings.is_stateless else _lstm_decoder(parameters, settings),
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
        "lead_samples": encoder.lead_samples,
        "most_tokens_a_frame": settings.most_at_once,
    }
    return OnnxModel(graphs=graphs, decoding=decoding)


def _lstm_decoder(parameters: Parameters, settings: Settings) -> Graph:
    width = settings.encoder.lstm_width
    of_state: Axes = (settings.predictor_layers, BATCH, width)
    return Graph(
        name="decoder",
        module=Function(partial(predict_token, settings=settings), _part(parameters, "embedding.", "predictor.")),
        examples=(torch.zeros(2, 1, dtype=torch.int64), *_example_state(settings.predictor_layers, width)),
        inputs={"token": (BATCH, 1), "hidden": of_state, "cell": of_state},
        outputs={"predicted": (BATCH, width), **dict.fromkeys(_STATE, of_state)},
    )


def _stateless_decoder(
    parameters: Parameters, settings: Settings, *, names: tuple[str, str] = ("tokens", "predicted")
) -> Graph:
    return Graph(
        name="decoder",
        module=Function(predict_statelessly, _part(parameters, "embedding.", "predictor.")),
        examples=(torch.zeros(2, CONTEXT, dtype=torch.int64),),
        inputs={names[0]: (BATCH, CONTEXT)},
        outputs={names[1]: (BATCH, settings.encoder.lstm_width)},
    )


def _example_state(layers: int, width: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(layers, 2, width) for _ in _STATE)


def _part(parameters: Parameters, *stems: str) -> Parameters:
    return {name: p for name, p in parameters.items() if name.startswith(stems)}


# sherpa-onnx.


def encode_filterbanks(
    parameters: Parameters, filterbanks_UTF: Tensor, hidden_LUD: Tensor, cell_LUD: Tensor, *, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of filterbanks that sherpa-onnx has computed."""
    features_UTF = normalise_frames(filterbanks_UTF, settings=settings.encoder)
    before = LstmState(hidden_LUD, cell_LUD)
    encoded_UTD, state = encode_frames(parameters, features_UTF, before, settings=settings.encoder)
    return encoded_UTD, *state


def to_sherpa(parameters: Parameters, settings: Settings, pieces: Sequence[str]) -> SherpaModel:
    """One step a chunk. Outputs that write nothing are the blank there."""
    encoder, width, silent = settings.encoder, settings.encoder.lstm_width, silent_outputs(pieces)
    if encoder.input != "filterbanks" or not settings.is_stateless:
        raise InputError(
            "sherpa-onnx streams filterbanks into transducers whose prediction network has no state: expected a model "
            "trained with model.input=filterbanks and model.prediction=stateless, or --to onnx"
        )

    def join(weights: Parameters, encoded_UD: Tensor, predicted_UD: Tensor) -> Tensor:
        return merge_silent(joint(weights, encoded_UD, predicted_UD), silent)

    of_state: Axes = (encoder.lstm_layers, BATCH, width)
    graphs = {
        "encoder": Graph(
            name="encoder",
            module=Function(partial(encode_filterbanks, settings=settings), _part(parameters, "encoder.")),
            examples=(torch.zeros(2, encoder.stack, encoder.values), *_example_state(encoder.lstm_layers, width)),
            inputs={"x": (BATCH, encoder.stack, encoder.values), "h0": of_state, "c0": of_state},
            outputs={"encoder_out": (BATCH, 1, width), "next_h0": of_state, "next_c0": of_state},
        ),
        "decoder": _stateless_decoder(parameters, settings, names=("y", "decoder_out")),
        "joiner": Graph(
            name="joiner",
            module=Function(join, _part(parameters, "output.")),
            examples=(torch.zeros(2, width), torch.zeros(2, width)),
            inputs={"encoder_out": (BATCH, width), "decoder_out": (BATCH, width)},
            outputs={"logit": (BATCH, settings.tokens)},
        ),
    }
    numbers = {
        "T": encoder.stack,
        "decode_chunk_len": encoder.stack,
        "num_encoder_layers": encoder.lstm_layers,
        "rnn_hidden_size": width,
        "d_model": width,
        "context_size": CONTEXT,
        "vocab_size": settings.tokens,
    }
    return SherpaModel(
        recogniser="OnlineRecognizer.from_transducer",
        graphs=graphs,
        symbols=dict(enumerate(as_symbols(pieces))),
        metadata={"model_type": "lstm", **{name: str(number) for name, number in numbers.items()}},
        tail_samples=HOP_SAMPLES,
    )


EXPORT = Export(onnx=to_onnx, sherpa=to_sherpa)
