"""The losses of stacked clients as CUDA graphs: a lock-step is one graph forwards and one backwards.

A lock-step of small models is some five hundred kernels, which a host launches several times more slowly than a large
GPU runs them. Everything from features to losses is recorded, once for every shape. So that few shapes occur, batches
are padded: with utterances that are nobody's, with frames and tokens behind the longest. None of it is looked at.

Where frames go and what chance has decided (`network.Arrangement`) are inputs. Layer-drop is a mask for every block: a
block that nobody keeps in a step runs all the same, where plainly it would be left out.

Shapes: U utterances, T frames of the longest, F mel features, L tokens of the longest text, N clients, B blocks.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.data.audio.waveforms import Features
from sottovoce.models import ctc
from sottovoce.models.cuda_graphs import CudaRecorder, GraphRecorder, RecordedFunction
from sottovoce.models.family import Parameters
from sottovoce.models.transformer.draws import Draws, StackDraws
from sottovoce.models.transformer.dropout import KeyedDropout
from sottovoce.models.transformer.network import Arrangement, ClientRows, arrange, block, compute, run_blocks
from sottovoce.models.transformer.positions import PositionDraws
from sottovoce.models.transformer.rows import Packing
from sottovoce.models.transformer.settings import STRIDE, Settings

# What the sides of a batch are rounded up to; 192 feature frames are 2 s.
FRAME_MULTIPLE, TOKEN_MULTIPLE, WIDTH_MULTIPLE, UTTERANCE_MULTIPLE = 64 * STRIDE, 32, 16, 16

Losses = Callable[..., Tensor]


@final
class RecordedStacks:
    """`plain`, the losses of stacked clients, through graphs recorded for the weights that it is called with.

    Plain where nothing is trained or only a part of a model, where masks of dropout are drawn on the host, and from
    then on where a graph could not be recorded.
    """

    def __init__(
        self,
        plain: Losses,
        *,
        row_multiple: int,
        channel_bytes: int,
        block: Callable[..., Tensor] = block,
        record: Callable[[torch.device], GraphRecorder] = CudaRecorder,
    ) -> None:
        """`channel_bytes` is what a pass keeps for each frame of a row, block and channel."""
        self._row_multiple, self._channel_bytes, self._record = row_multiple, channel_bytes, record
        self._blocks = partial(run_blocks, block=block)
        self._plain = partial(plain, blocks=self._blocks, row_multiple=row_multiple)
        self._recorded: RecordedFunction | None = None
        self._first: Tensor | None = None
        self._gave_up = False

    def __call__(
        self,
        parameters: Parameters,
        features: Features,
        *,
        rows_U: Sequence[int],
        clients: int,
        settings: Settings,
        draws: StackDraws,
    ) -> Tensor:
        stack: dict[str, Any] = {"rows_U": rows_U, "clients": clients, "settings": settings}
        is_trained = torch.is_grad_enabled() and all(own.is_leaf and own.requires_grad for own in parameters.values())
        if self._gave_up or not is_trained:
            return self._plain(parameters, features, draws=draws, **stack)
        padded = pad_stack(features)
        arranged = arrange_stack(padded, draws, row_multiple=self._row_multiple, **stack)
        if arranged.own is not None and not isinstance(arranged.own[0], KeyedDropout):
            return self._plain(parameters, features, draws=draws, **stack)
        tensors, fixed = take_apart(arranged, settings)
        places = ctc.find_places(rows_U, rows=clients, utterances=len(padded), width_multiple=WIDTH_MULTIPLE)
        tensors |= {"tokens_UL": padded.tokens_UL, "token_lengths_U": padded.token_lengths_U}
        tensors |= {"lines_NW": places.lines_NW, "places_U1": places.places_U1}
        device = padded.features_UTF.device
        sent = [own.to(device, non_blocking=True) for own in tensors.values()]
        try:
            recorded = self._find(parameters, settings)
            return recorded(parameters, padded.features_UTF, *sent, names=tuple(tensors), fixed=fixed)
        except RuntimeError as error:
            warnings.warn(f"model: stacks cannot be recorded, and are slower ({error})", stacklevel=2)
            self._gave_up, self._recorded = True, None
            return self._plain(parameters, features, draws=draws, **stack)

    def _find(self, parameters: Parameters, settings: Settings) -> RecordedFunction:
        first = next(iter(parameters.values()))
        if self._recorded is None or self._first is not first:  # the engine has made its stacks anew
            self._first = first
            self._recorded = RecordedFunction(
                partial(recordable_losses, settings=settings, blocks=self._blocks),
                parameters,
                recorder=self._record(first.device),
                activation_bytes=partial(self._count_bytes, settings),
            )
        return self._recorded

    def _count_bytes(
        self, settings: Settings, _features: Tensor, _lengths: Tensor, _out: Tensor, from_batch_NL: Tensor, *_: Tensor
    ) -> int:
        return from_batch_NL.numel() * settings.layers * settings.width * self._channel_bytes


def pad_stack(features: Features) -> Features:
    """The same with utterances of nobody behind them, without frames or text, and with all sides rounded up.

    Utterances are rounded up to a sixteenth of a power of two, or to `UTTERANCE_MULTIPLE`.
    """
    count, frames = features.features_UTF.shape[:2]
    multiple = max(UTTERANCE_MULTIPLE, (1 << (count - 1).bit_length()) // 16)
    more, longer = -count % multiple, -frames % FRAME_MULTIPLE
    return Features(
        F.pad(features.features_UTF, (0, 0, 0, longer, 0, more)),
        F.pad(features.frames_U, (0, more)),
        F.pad(features.tokens_UL, (0, -features.tokens_UL.shape[1] % TOKEN_MULTIPLE, 0, more)),
        F.pad(features.token_lengths_U, (0, more)),
    )


def arrange_stack(
    padded: Features,
    draws: StackDraws,
    *,
    rows_U: Sequence[int],
    clients: int,
    settings: Settings,
    row_multiple: int,
) -> Arrangement:
    """`arrange` for all blocks, whoever keeps them."""
    more = len(padded) - len(rows_U)
    shifts = draws.of_all.positions
    of_all = Draws(
        kept=tuple(range(settings.layers)),
        positions=None if shifts is None else PositionDraws(F.pad(shifts.shift_B, (0, more))),
        dropout_seed=None,
    )
    return arrange(
        padded.frames_U,
        frames=padded.features_UTF.shape[1],
        device=padded.features_UTF.device,
        settings=settings,
        draws=of_all,
        row_multiple=row_multiple,
        stacking=ClientRows([*rows_U, *[0] * more], clients, draws.by_client),
    )


def recordable_losses(
    parameters: Parameters,
    features_UTF: Tensor,
    *tensors: Tensor,
    names: tuple[str, ...],
    fixed: tuple[tuple[str, Any], ...],
    settings: Settings,
    blocks: Callable[..., Tensor],
) -> Tensor:
    """The loss of each client [N], from tensors that are all on the device."""
    given = dict(zip(names, tensors, strict=True))
    arranged = _put_together(given, dict(fixed))
    log_probs_UTV = compute(parameters, features_UTF, arranged, settings=settings, blocks=blocks)
    return ctc.mean_ctc_losses_by_client(
        log_probs_UTV,
        arranged.out_lengths_B.clamp(min=1),  # a loss over nothing has no gradient that could be multiplied by zero
        given["tokens_UL"],
        given["token_lengths_U"],
        places=ctc.ClientPlaces(given["lines_NW"], given["places_U1"]),
    )


def take_apart(arranged: Arrangement, settings: Settings) -> tuple[dict[str, Tensor], tuple[tuple[str, Any], ...]]:
    """An arrangement as tensors by name, and what of it is fixed for a shape."""
    packing, kept, own = arranged.packing, arranged.kept, arranged.own
    assert packing is not None
    tensors = {
        "lengths_U": arranged.lengths_B,
        "out_lengths_U": arranged.out_lengths_B,
        "from_batch_NL": packing.from_batch_NL,
        "to_batch_UT": packing.to_batch_UT,
        "segment_ends": packing.segment_ends,
    }
    if arranged.positions is not None:
        tensors["shift_U"] = arranged.positions.shift_B
    if kept is not None and settings.layer_drop:
        everybody = torch.ones(packing.rows, 1, 1, dtype=torch.bool, device=packing.segment_ends.device)
        tensors["kept_BN11"] = torch.stack([everybody if mask is None else mask for mask in kept])
    if own is not None:
        tensors["keys_BN"] = torch.stack([one.keys_N for one in own if isinstance(one, KeyedDropout)])
    fixed = {"layers": tuple(arranged.layers), "dropout": arranged.dropout, "longest": packing.longest}
    return tensors, tuple(fixed.items())


def _put_together(tensors: Mapping[str, Tensor], fixed: Mapping[str, Any]) -> Arrangement:
    shift_U, kept_BN11, keys_BN = (tensors.get(name) for name in ("shift_U", "kept_BN11", "keys_BN"))
    rows, frames = tensors["from_batch_NL"].shape
    return Arrangement(
        lengths_B=tensors["lengths_U"],
        out_lengths_B=tensors["out_lengths_U"],
        layers=fixed["layers"],
        dropout=fixed["dropout"],
        positions=None if shift_U is None else PositionDraws(shift_U),
        packing=Packing(
            rows=rows,
            frames=frames,
            longest=fixed["longest"],
            from_batch_NL=tensors["from_batch_NL"],
            to_batch_UT=tensors["to_batch_UT"],
            segment_ends=tensors["segment_ends"],
        ),
        kept=None if kept_BN11 is None else [*kept_BN11],
        own=None if keys_BN is None else [KeyedDropout(fixed["dropout"], keys_N) for keys_N in keys_BN],
    )
