"""The CRDNN in training as CUDA graphs, where there is enough to train to record it.

A batch is ten thousand small kernels, which a host launches more slowly than a large GPU runs them. Encoder and decoder
are recorded once for every shape, forwards and backwards. Speech and texts are padded to few shapes; padding is never
attended to and never counted. Dropout draws for padded lines, so the encoder's masks are others than in plain training.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.data.audio.waveforms import Features
from sottovoce.models.crdnn import stacked
from sottovoce.models.crdnn.decoder import teacher_forced
from sottovoce.models.crdnn.network import Encoded, convolve, ctc_log_probs, deepen, run_lstms
from sottovoce.models.crdnn.settings import POOLING, Settings
from sottovoce.models.cuda_graphs import CudaRecorder, GraphRecorder, RecordedFunction
from sottovoce.models.family import Parameters
from sottovoce.models.trainable import with_corrections

STEP_MULTIPLE, TOKEN_MULTIPLE = 32, 8  # 1.3 s, and about as much of a text
DECODER = ("embedding.", "attention.", "gru.", "readout.", "output.")
ENCODER = ("cnn.", "rnn.", "dnn.")


def recorded_encoder(
    working: Parameters, *, settings: Settings, recorder: GraphRecorder | None = None
) -> Callable[..., Encoded]:
    """`network.encode` for the weights `working`, which stay at their addresses; its memory may be longer."""
    recorded = _record_encoder(memory, working, settings, recorder)

    def encode(parameters: Parameters, features: Features, *, settings: Settings, training: bool = False) -> Encoded:
        features_UTF = features.features_UTF.to(parameters["ctc.weight"].dtype)
        features_UTF = F.pad(features_UTF, (0, 0, 0, -features_UTF.shape[1] % (POOLING * STEP_MULTIPLE)))
        frames_U = features.frames_U.to(features_UTF.device, non_blocking=True)
        memory_UTD = recorded(parameters, features_UTF, frames_U, settings=settings, training=training)
        log_probs_UTV = ctc_log_probs(with_corrections(parameters), memory_UTD)
        return Encoded(memory_UTD, features.frames_U // POOLING, log_probs_UTV)

    return encode


def memory(
    parameters: Parameters, features_UTF: Tensor, frames_U: Tensor, *, settings: Settings, training: bool
) -> Tensor:
    """What the decoder attends to, from tensors that are all on the device: [U, T, D]."""
    weights = with_corrections(parameters)
    dropout = settings.dropout if training else 0.0
    x_UTD = convolve(weights, features_UTF, frames_U, settings=settings, dropout=dropout)
    lengths_U = (frames_U // POOLING).clamp(min=1)
    x_UTD = run_lstms(weights, x_UTD, lengths_U, settings=settings, dropout=dropout, recordable=True)
    return deepen(weights, x_UTD, lengths_U, settings=settings, training=training)


def log_probs(parameters: Parameters, *inputs: Tensor, **options: Any) -> Tensor:
    """The first of what `teacher_forced` gives."""
    return teacher_forced(parameters, *inputs, **options)[0]


def recorded_decoder(
    working: Parameters, *, settings: Settings, recorder: GraphRecorder | None = None
) -> Callable[..., Tensor]:
    """`log_probs` for the weights `working`, which stay at their addresses."""
    recorded = _record_decoder(log_probs, working, settings, recorder)

    def decode(
        parameters: Parameters, memory_UTD: Tensor, lengths_U: Tensor, tokens_UL: Tensor, **options: Any
    ) -> Tensor:
        lengths_U, tokens_UL = (own.to(memory_UTD.device, non_blocking=True) for own in (lengths_U, tokens_UL))
        tokens = tokens_UL.shape[1] + 1  # the end is one
        memory_UTD = F.pad(memory_UTD, (0, 0, 0, -memory_UTD.shape[1] % STEP_MULTIPLE))
        tokens_UL = F.pad(tokens_UL, (0, -tokens % TOKEN_MULTIPLE))
        return recorded(parameters, memory_UTD, lengths_U, tokens_UL, **options)[:, :tokens]

    return decode


@final
class RecordedStacks:
    """`stacked.encode_clients` and `decode_clients`, recorded for the weights of the first stacks.

    None where models are trained in part. Masks are drawn outside, so chance is that of plain stacks.
    """

    def __init__(self, record: Callable[[torch.device], GraphRecorder] = CudaRecorder) -> None:
        self._record, self._functions = record, dict[str, Callable[..., Tensor]]()
        self._first: Tensor | None = None

    def __call__(self, weights: Parameters, settings: Settings) -> Mapping[str, Callable[..., Tensor]]:
        first = weights["ctc.weight"]
        if not all(weight.is_leaf and weight.requires_grad for weight in weights.values()):
            return {}
        if self._first is not first:  # the engine has made its stacks anew
            self._first = first
            self._functions = {
                "encode": _record_encoder(stacked.encode_clients, weights, settings, self._record(first.device)),
                "log_probs": _record_decoder(stacked.decode_clients, weights, settings, self._record(first.device)),
            }
        return self._functions


def _record_encoder(
    function: Callable[..., Tensor], weights: Parameters, settings: Settings, recorder: GraphRecorder | None
) -> RecordedFunction:
    def activation_bytes(features_UTF: Tensor, *_: Tensor) -> int:
        """A convolution keeps about six tensors of its size, which each block halves in frequency; an LSTM twenty."""
        frames, bins = features_UTF[..., 0].numel(), features_UTF.shape[2]
        convolved = sum(2 * 6 * channels * (bins >> block) for block, channels in enumerate(settings.channels))
        recurred = settings.rnn_layers * 20 * 2 * settings.rnn_width // POOLING
        return frames * (convolved + recurred) * features_UTF.element_size()

    own = {name: tensor for name, tensor in weights.items() if name.startswith(ENCODER)}
    recorder = recorder or CudaRecorder(weights["ctc.weight"].device)
    return RecordedFunction(function, own, recorder=recorder, activation_bytes=activation_bytes)


def _record_decoder(
    function: Callable[..., Tensor], weights: Parameters, settings: Settings, recorder: GraphRecorder | None
) -> RecordedFunction:
    def activation_bytes(memory: Tensor, _lengths: Tensor, tokens_UL: Tensor, *_: Tensor) -> int:
        """Each step keeps what tanh gives, and makes some more of that size."""
        attended = memory[..., 0].numel() * settings.decoder_width * memory.element_size()
        return 2 * (tokens_UL.shape[1] + 1) * attended

    own = {name: tensor for name, tensor in weights.items() if name.startswith(DECODER)}
    recorder = recorder or CudaRecorder(weights["ctc.weight"].device)
    return RecordedFunction(function, own, recorder=recorder, activation_bytes=activation_bytes)
