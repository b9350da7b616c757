"""What of a model other runtimes can run: functions of tensors with named inputs and outputs, to be written as ONNX.

A family says in its `Export` what its graphs are. `sottovoce.export` writes them, and knows no family.

    samples [B, N], lengths [B] ─► features and network ─► log-probabilities [B, T, V], their lengths [B]

Shapes: B utterances, N samples, T frames, F mel filters, V outputs with the blank.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sottovoce.data.audio.features import LOG_FLOOR, MEL_COUNT, WINDOW_SAMPLES
from sottovoce.models.lstm import lstm_layer

Axes = tuple[str | int, ...]  # of a tensor: numbers, and names where any size will do
Weights = Mapping[str, Tensor]
BATCH = "batch"
NOTHING = -1e9  # the log-probability of what must not be chosen: finite, so that no runtime makes NaN of it


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph:
    """A function as one ONNX graph, with the axes of its inputs and outputs, in order.

    `examples` are inputs of any such sizes, of at least 2 wherever they vary; `least` and `most` bound what varies.
    """

    name: str
    module: nn.Module
    examples: tuple[Tensor, ...]
    inputs: Mapping[str, Axes]
    outputs: Mapping[str, Axes]
    least: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class OnnxModel:
    """All graphs of a model, and what a runtime must know to call them (`decoding`)."""

    graphs: tuple[Graph, ...]
    decoding: Mapping[str, Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class SherpaModel:
    """A model as sherpa-onnx loads it: a constructor of its recognisers, and the graph behind each of its arguments.

    `metadata` are those of every graph. `symbols` are the lines of `tokens.txt`, by the number of their token. A
    streaming recogniser needs `tail_samples` of silence behind a recording to read all of it.
    """

    recogniser: str
    graphs: Mapping[str, Graph]
    symbols: Mapping[int, str]
    metadata: Mapping[str, str] = field(default_factory=dict)
    tail_samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Export:
    """How models of a family leave for other runtimes; both refuse, with an `InputError`, what cannot.

    `onnx(parameters, settings)` gives an `OnnxModel`. `sherpa(parameters, settings, pieces)` gives a `SherpaModel`;
    `pieces` are the texts of the outputs (`Tokens.pieces`).
    """

    onnx: Callable[..., OnnxModel]
    sherpa: Callable[..., SherpaModel]


class Function(nn.Module):
    """`function(weights, *inputs)` of given weights, which become the graph's own."""

    def __init__(self, function: Callable[..., Any], weights: Weights) -> None:
        super().__init__()
        self._call = function
        self._names = {name: name.replace(".", "__") for name in weights}
        for name, weight in weights.items():
            self.register_buffer(self._names[name], weight.detach().to("cpu", torch.float32))

    def forward(self, *inputs: Tensor) -> Any:
        return self._call({name: getattr(self, own) for name, own in self._names.items()}, *inputs)


def translations() -> dict[Any, Callable[..., Any]]:
    """Operations of our own as those of ONNX, for torch's exporter."""
    from onnxscript import opset18 as op

    def lstm(x: Any, hidden: Any, cell: Any, input: Any, recurrent: Any, bias: Any) -> Any:
        width = recurrent.shape[1]
        i, f, g, o = torch.arange(4 * width).view(4, width).tolist()  # torch's gates

        def reordered(matrix: Any) -> Any:
            return op.Unsqueeze(op.Gather(matrix, op.Constant(value_ints=[*i, *o, *f, *g]), axis=0), [0])

        both_1G = op.Concat(reordered(bias), op.Mul(reordered(bias), 0.0), axis=1)  # of inputs, of recurrence
        first = (op.Unsqueeze(hidden, [0]), op.Unsqueeze(cell, [0]))
        x_TWI, weights = op.Transpose(x, perm=[1, 0, 2]), (reordered(input), reordered(recurrent), both_1G)
        found_T1WD, *last = op.LSTM(x_TWI, *weights, None, *first, hidden_size=width)
        found_WTD = op.Transpose(op.Squeeze(found_T1WD, [1]), perm=[1, 0, 2])
        return found_WTD, *(op.Squeeze(state, [0]) for state in last)

    return {lstm_layer._opoverload: lstm}


# CTC.

Emit = Callable[[Weights, Tensor, Tensor], tuple[Tensor, Tensor]]


def ctc_from_samples(
    emit: Emit, weights: Weights, *, outputs: int, samples_per_frame: int, most_samples: int | None = None
) -> OnnxModel:
    """`emit(weights, samples_BN, lengths_B)`, of floats in [-1, 1) at 16 kHz, as the one graph of a model."""
    graph = Graph(
        name="model",
        module=Function(emit, weights),
        examples=(_example_samples(2), torch.tensor([_EXAMPLE_SAMPLES, _EXAMPLE_SAMPLES - 1_000])),
        inputs={"samples": (BATCH, "samples"), "lengths": (BATCH,)},
        outputs={"log_probs": (BATCH, "frames", outputs), "frame_lengths": (BATCH,)},
        least={"samples": WINDOW_SAMPLES},
        most={} if most_samples is None else {"samples": most_samples},
    )
    return OnnxModel(graphs=(graph,), decoding={"method": "ctc", "blank": 0, "samples_per_frame": samples_per_frame})


_EXAMPLE_SAMPLES, _EXAMPLE_FRAMES = 9_700, 61


def _example_samples(utterances: int) -> Tensor:
    return torch.sin(torch.arange(utterances * _EXAMPLE_SAMPLES).float() ** 1.1).mul(0.1).view(utterances, -1)


# sherpa-onnx. Its recognisers know families by names of their own; two of them take what our models need:
#
#   from_fire_red_asr_ctc       Kaldi's filterbanks of 16-bit samples, up to the Nyquist frequency, whole windows only,
#                               which are ours but for the scale; other recognisers leave out 400 Hz or move the frames
#   from_omnilingual_asr_ctc    samples, each recording with zero mean and unit variance

_INT16_LOG_SCALE = 2 * math.log(2.0**15)


def rescale_kaldi(filterbanks_BTF: Tensor) -> Tensor:
    """Log filterbanks of 16-bit samples as those of samples in [-1, 1), with the floor that is ours."""
    return (filterbanks_BTF - _INT16_LOG_SCALE).clamp_min(math.log(LOG_FLOOR))


def sherpa_from_filterbanks(emit: Emit, weights: Weights, *, pieces: Sequence[str], subsampling: int) -> SherpaModel:
    """`emit(weights, filterbanks_BTF, frames_B)`, of Kaldi's filterbanks of 16-bit samples."""
    graph = Graph(
        name="model",
        module=Function(partial(_emit_texts, emit, silent_outputs(pieces)), weights),
        examples=(_example_filterbanks(), torch.tensor([_EXAMPLE_FRAMES, _EXAMPLE_FRAMES - 9])),
        inputs={"x": (BATCH, "frames", MEL_COUNT), "x_lens": (BATCH,)},
        outputs={"log_probs": (BATCH, "steps", len(pieces)), "log_probs_lens": (BATCH,)},
        least={"frames": 2 * subsampling},
    )
    same = {"cmvn_mean": ",".join(["0"] * MEL_COUNT), "cmvn_inv_stddev": ",".join(["1"] * MEL_COUNT)}
    return SherpaModel(
        recogniser="OfflineRecognizer.from_fire_red_asr_ctc",
        graphs={"model": graph},
        symbols=dict(enumerate(as_symbols(pieces))),
        metadata={"model_type": "fire-red-asr-2-ctc", "subsampling_factor": str(subsampling), **same},
    )


def _example_filterbanks() -> Tensor:
    values = torch.arange(2 * _EXAMPLE_FRAMES * MEL_COUNT).float()
    return 10 + torch.sin(values**1.1).view(2, _EXAMPLE_FRAMES, MEL_COUNT)


def sherpa_from_samples(emit: Emit, weights: Weights, *, pieces: Sequence[str]) -> SherpaModel:
    """`emit(weights, samples_BN, lengths_B)`, of samples with zero mean and unit variance, one recording at a time."""

    def log_probs(weights: Weights, samples_BN: Tensor) -> Tensor:
        lengths_B = torch.full_like(samples_BN[:, 0], samples_BN.shape[1], dtype=torch.int64)
        return _emit_texts(emit, silent_outputs(pieces), weights, samples_BN, lengths_B)[0]

    graph = Graph(
        name="model",
        module=Function(log_probs, weights),
        examples=(_example_samples(2),),
        inputs={"x": (BATCH, "samples")},
        outputs={"log_probs": (BATCH, "steps", len(pieces))},
        least={"samples": WINDOW_SAMPLES},
    )
    return SherpaModel(
        recogniser="OfflineRecognizer.from_omnilingual_asr_ctc",
        graphs={"model": graph},
        symbols=dict(enumerate(as_symbols(pieces))),
    )


def silent_outputs(pieces: Sequence[str]) -> list[int]:
    """Outputs besides the blank that write nothing."""
    return [number for number, piece in enumerate(pieces) if number and not piece]


def _emit_texts(
    emit: Emit, silent: Sequence[int], weights: Weights, inputs: Tensor, lengths_B: Tensor
) -> tuple[Tensor, Tensor]:
    log_probs_BTV, lengths_B = emit(weights, inputs, lengths_B)
    return merge_silent(log_probs_BTV, silent), lengths_B


def merge_silent(log_probs: Tensor, silent: Sequence[int]) -> Tensor:
    """The same texts where outputs that write nothing are the blank: a runtime would write their names."""
    if not silent:
        return log_probs
    is_silent_V = torch.zeros(log_probs.shape[-1], dtype=torch.bool)
    is_silent_V[list(silent)] = True
    blank = log_probs[..., [0, *silent]].amax(dim=-1, keepdim=True)
    return torch.cat([blank, log_probs.masked_fill(is_silent_V, NOTHING)[..., 1:]], dim=-1)


def as_symbols(pieces: Sequence[str]) -> list[str]:
    """`pieces` as `tokens.txt` names them: the blank first, ▁ for the space that begins a word.

    >>> as_symbols(["", "a", " ", " bc", ""])
    ['<blk>', 'a', '▁', '▁bc', '<4>']
    """
    written = [piece.replace(" ", "▁") or f"<{number}>" for number, piece in enumerate(pieces)]
    return ["<blk>", *written[1:]]
