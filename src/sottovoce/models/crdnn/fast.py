"""The decoder in training as CUDA graphs, where there is enough to train to record it.

A text of forty tokens is some two thousand small kernels forwards and backwards. Graphs are recorded for each shape, so
memory and texts are padded to few of these: what is padded is never attended to, and never counted.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sottovoce.models.crdnn.decoder import teacher_forced
from sottovoce.models.crdnn.settings import Settings
from sottovoce.models.family import Parameters
from sottovoce.models.recording import CudaRecorder, RecordedFunction, Recorder

STEP_MULTIPLE, TOKEN_MULTIPLE = 32, 8  # 1.3 s, and about as much of a text
DECODER = ("embedding.", "attention.", "gru.", "readout.", "output.")


def log_probs(parameters: Parameters, *inputs: Tensor, **options: Any) -> Tensor:
    """The first of what `teacher_forced` gives."""
    return teacher_forced(parameters, *inputs, **options)[0]


def recorded_decoder(
    working: Parameters, *, settings: Settings, recorder: Recorder | None = None, keep_free_bytes: int = 8 << 30
) -> Callable[..., Tensor]:
    """`log_probs` for the weights `working`, which stay at their addresses."""
    own = {name: tensor for name, tensor in working.items() if name.startswith(DECODER)}
    device = own["output.weight"].device
    recorded = RecordedFunction(
        log_probs,
        own,
        recorder=recorder or CudaRecorder(device, keep_free_bytes=keep_free_bytes),
        activation_bytes=lambda memory_UTD, _, tokens_UL: _bytes(memory_UTD, tokens_UL, settings),
    )

    def decode(
        parameters: Parameters, memory_UTD: Tensor, lengths_U: Tensor, tokens_UL: Tensor, **options: Any
    ) -> Tensor:
        lengths_U, tokens_UL = (own.to(memory_UTD.device, non_blocking=True) for own in (lengths_U, tokens_UL))
        steps, tokens = memory_UTD.shape[1], tokens_UL.shape[1]
        memory_UTD = F.pad(memory_UTD, (0, 0, 0, -steps % STEP_MULTIPLE))
        # The end is a token more.
        tokens_UL = F.pad(tokens_UL, (0, -(tokens + 1) % TOKEN_MULTIPLE))
        return recorded(parameters, memory_UTD, lengths_U, tokens_UL, **options)[:, : tokens + 1]

    return decode


def _bytes(memory_UTD: Tensor, tokens_UL: Tensor, settings: Settings) -> int:
    """Each step keeps what tanh gives, and makes some more of that size."""
    utterances, steps, _ = memory_UTD.shape
    heard = utterances * steps * settings.decoder_width * memory_UTD.element_size()
    return 2 * (tokens_UL.shape[1] + 1) * heard
