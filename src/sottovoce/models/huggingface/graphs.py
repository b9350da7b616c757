"""A pretrained network in training as CUDA graphs, where there is enough to train to record it.

A step is some thousand small kernels, which a host launches several times more slowly than a large GPU runs them.
The network is recorded once for every shape, forwards and backwards; the loss follows plainly. Speech and texts are
padded to few shapes; padding is never looked at (`inputs`).

Shapes: U utterances, T frames, F features, L tokens.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from sottovoce.models.cuda_graphs import CudaRecorder, GraphRecorder, RecordedFunction, Turn
from sottovoce.models.family import Parameters
from sottovoce.models.huggingface.inputs import RAW
from sottovoce.models.huggingface.memory import activation_bytes, extent, share_to_recompute
from sottovoce.models.huggingface.network import MERGED, call_network
from sottovoce.models.huggingface.settings import Settings

TOKEN_MULTIPLE = 8
# An eighth of a second; of longer speech at most an eighth of it is padding.
SAMPLE_MULTIPLE, FRAME_MULTIPLE = 2_000, 5
# A pass that keeps more than this has a large GPU busy for longer than the host takes to launch it.
MOST_BYTES = 8 << 30
MOST_WEIGHTS = 4  # of how many stacks the weights are known, as engines have them
# Corrections that are added to matrices anew in every step; networks that copy from the host on their way.
NOT_RECORDED = (*MERGED, "wav2vec2", "hubert")


def padded_frames(frames: int, settings: Settings) -> int:
    """So many frames of features or more, so that few numbers occur.

    Whisper takes whole windows, which are of one length.
    """
    if settings.kind == "whisper":
        return frames
    step = SAMPLE_MULTIPLE if settings.kind in RAW else FRAME_MULTIPLE
    while frames > 16 * step:
        step *= 2
    return -(-frames // step) * step


def padded_tokens(tokens: int, *, longest: int) -> int:
    """So many tokens or more, up to the `longest` text that there is."""
    return max(tokens, min(longest, -(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE))


@dataclass(frozen=True, eq=False)
class _Known:
    """Weights for which a network is recorded: those that stay at their addresses, and those that are made anew.

    Scaled corrections are made in every step.
    """

    fixed: Sequence[tuple[str, Tensor]]
    made: tuple[str, ...]
    leaves: Parameters
    function: RecordedFunction

    def are(self, parameters: Parameters) -> bool:
        return len(parameters) == len(self.fixed) + len(self.made) and all(
            parameters.get(name) is tensor for name, tensor in self.fixed
        )


@final
class RecordedNetwork:
    """`call_network` in training, for weights that stay where they are; plain where that cannot be recorded.

    A pass that keeps more than `most_bytes` runs plainly too.
    """

    def __init__(
        self, *, record: Callable[[torch.device], GraphRecorder] = CudaRecorder, most_bytes: float = MOST_BYTES
    ) -> None:
        self._record, self._most_bytes = record, most_bytes
        self._known: list[_Known] = []
        self._recorder: GraphRecorder | None = None
        self._turn = Turn()
        self._gave_up = False

    def __call__(
        self,
        parameters: Parameters,
        settings: Settings,
        inputs: Mapping[str, Any],
        *,
        norm_frames_B: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        """The network's scores."""
        tensors = {name: own for name, own in inputs.items() if isinstance(own, Tensor)}
        first = next(iter(tensors.values()))
        if norm_frames_B is not None:
            tensors["norm_frames_B"] = norm_frames_B
        large = activation_bytes(settings, *extent(first, settings)) > self._most_bytes
        if self._gave_up or training or large or settings.kind in NOT_RECORDED or not torch.is_grad_enabled():
            return network_scores(parameters, settings, inputs, norm_frames_B=norm_frames_B, training=training)
        known = self._find(parameters, settings)
        made = [parameters[name] for name in known.made]
        flat = torch.cat([own.flatten() for own in made]) if made else first.new_empty(1)
        try:
            return known.function(known.leaves, flat, *tensors.values(), names=tuple(tensors))
        except RuntimeError as error:
            # In a release every client would be dropped, one after another.
            warnings.warn(f"model: {settings.kind} cannot be recorded, and is slower ({error})", stacklevel=2)
            self._gave_up = True
            return network_scores(parameters, settings, inputs, norm_frames_B=norm_frames_B)

    def _find(self, parameters: Parameters, settings: Settings) -> _Known:
        for known in self._known:
            if known.are(parameters):
                return known
        if len(self._known) == MOST_WEIGHTS:
            self._known.clear()
        self._known.append(self._remember(parameters, settings))
        return self._known[-1]

    def _remember(self, parameters: Parameters, settings: Settings) -> _Known:
        leaves = {name: own for name, own in parameters.items() if own.requires_grad and own.is_leaf}
        frozen = {name: own for name, own in parameters.items() if not own.requires_grad}
        made = {name: own.shape for name, own in parameters.items() if not own.is_leaf}
        if self._recorder is None:
            self._recorder = self._record(next(iter(parameters.values())).device)

        def function(leaves: Parameters, flat: Tensor, *tensors: Tensor, names: tuple[str, ...]) -> Tensor:
            parts = torch.split(flat, [shape.numel() for shape in made.values()]) if made else ()
            views = {name: part.view(shape) for (name, shape), part in zip(made.items(), parts, strict=True)}
            given = dict(zip(names, tensors, strict=True))
            norm_frames_B = given.pop("norm_frames_B", None)
            return network_scores({**frozen, **leaves, **views}, settings, given, norm_frames_B=norm_frames_B)

        def kept_bytes(_flat: Tensor, first: Tensor, *_: Tensor) -> int:
            return int(activation_bytes(settings, *extent(first, settings)))

        recorded = RecordedFunction(
            function, leaves, recorder=self._recorder, activation_bytes=kept_bytes, turn=self._turn
        )
        return _Known([*leaves.items(), *frozen.items()], tuple(made), leaves, recorded)


def network_scores(
    parameters: Parameters,
    settings: Settings,
    inputs: Mapping[str, Any],
    *,
    recompute: float | None = None,
    **how: Any,
) -> Tensor:
    """Scores of outputs [U, T or L, V]. None: so many layers are computed again on the way back as memory asks for."""
    first = next(iter(inputs.values()))
    if recompute is None:
        recompute = 0.0
        if torch.is_grad_enabled():
            recompute = share_to_recompute(settings, *extent(first, settings), device=first.device)
    decoder = {"use_cache": False} if "decoder_input_ids" in inputs else {}
    found = call_network(parameters, settings, {**inputs, **decoder}, recompute=recompute, **how)
    scores: Tensor = found if isinstance(found, Tensor) else found.logits
    return scores
