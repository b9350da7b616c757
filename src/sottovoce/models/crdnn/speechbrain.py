"""Weights of SpeechBrain's CRDNN recipes as ours: what goes by which name there, and which sizes a state dict has.

Their checkpoint `model.ckpt` holds a list of modules: 0 encoder, 1 embedding, 2 decoder, 3 CTC head, 4 token head.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sottovoce.audio.features import MEL_COUNT
from sottovoce.base.errors import InputError
from sottovoce.models.crdnn.settings import Settings, parameter_shapes

_PLAIN = {
    "ctc": "3.w",
    "output": "4.w",
    "embedding": "1.Embedding",
    "readout": "2.proj",
    "attention.key": "2.attn.mlp_enc",
    "attention.query": "2.attn.mlp_dec",
    "attention.score": "2.attn.mlp_attn",
    "attention.places": "2.attn.conv_loc",
    "attention.location": "2.attn.mlp_loc",
    "attention.value": "2.attn.mlp_out",
}
EXPECTED = "expected the weights of SpeechBrain's CRDNN recipe"
COUNTER = ".num_batches_tracked"
_STATISTICS = {"mean": "running_mean", "variance": "running_var"}
_MATRIX = {"input": "ih", "recurrent": "hh"}


def their_name(name: str) -> str:
    """What SpeechBrain calls our tensor `name`.

    >>> their_name("rnn.3.backward.input.weight"), their_name("cnn.0.norm2.bias")
    ('0.RNN.rnn.weight_ih_l3_reverse', '0.CNN.block_0.norm_2.norm.bias')
    """
    stem, _, last = name.rpartition(".")
    if stem in _PLAIN:
        return f"{_PLAIN[stem]}.{last}"
    match stem.split("."):
        case ["cnn", block, part]:
            kind, number = part[:-1], part[-1]
            return f"0.CNN.block_{block}.{kind}_{number}.{kind}.{last}"
        case ["rnn", layer, direction, matrix]:
            return f"0.RNN.rnn.{last}_{_MATRIX[matrix]}_l{layer}{'_reverse' if direction == 'backward' else ''}"
        case ["dnn", layer, "linear"]:
            return f"0.DNN.block_{layer}.linear.w.{last}"
        case ["dnn", layer, "norm"]:
            return f"0.DNN.block_{layer}.norm.norm.{_STATISTICS.get(last, last)}"
        case ["gru", matrix]:
            return f"2.rnn.rnn_cells.0.{last}_{_MATRIX[matrix]}"
    raise AssertionError(f"{name}: no such tensor")


def converted(state: Mapping[str, Tensor], settings: Settings, *, where: str) -> dict[str, Tensor]:
    """Our parameters from their state dict, which must hold these, in these shapes, and but for counters no others."""
    left = {name for name in state if not name.endswith(COUNTER)}
    expected = parameter_shapes(settings)
    for name, shape in expected.items():
        theirs = their_name(name)
        if theirs not in state:
            raise InputError(f"{where}: {theirs} is missing, {EXPECTED}")
        turned = (*shape[:2], shape[3], shape[2]) if _is_convolution(name, shape) else shape
        if tuple(state[theirs].shape) != turned:
            found = list(state[theirs].shape)
            raise InputError(f"{where}: {theirs} has shape {found}, expected {list(turned)} beside the others")
        left.discard(theirs)
    if left:
        raise InputError(f"{where}: {min(left)} is no part of SpeechBrain's CRDNN recipe with an attention decoder")
    return {name: _taken(state[their_name(name)], name, shape) for name, shape in expected.items()}


def _is_convolution(name: str, shape: tuple[int, ...]) -> bool:
    """Their convolutions see frequency before time."""
    return name.startswith("cnn.") and len(shape) == 4


def _taken(tensor: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    return (tensor.transpose(2, 3) if _is_convolution(name, shape) else tensor).detach().float().contiguous()


def settings_of(state: Mapping[str, Tensor], *, where: str, **changes: Any) -> Settings:
    """The architecture whose weights these are, read off their shapes; batch-norm, and padding as released."""

    def size(name: str, *, axis: int = 0, axes: int = 1) -> int:
        if name not in state:
            raise InputError(f"{where}: {name} is missing, {EXPECTED}")
        if state[name].dim() != axes:
            raise InputError(f"{where}: {name} has shape {list(state[name].shape)}, expected {axes} axes")
        return state[name].shape[axis]

    blocks = _count(state, r"0\.CNN\.block_(\d+)\.")
    # The shape of a weight of each kind says how large its layer is; `converted` compares all others with these.
    sizes: dict[str, Any] = {
        "tokens": size("3.w.bias"),
        "channels": tuple(size(f"0.CNN.block_{block}.conv_1.conv.bias") for block in range(blocks)),
        "rnn_layers": _count(state, r"0\.RNN\.rnn\.weight_ih_l(\d+)$"),
        "rnn_width": size("0.RNN.rnn.weight_hh_l0", axis=1, axes=2),
        "dnn_layers": _count(state, r"0\.DNN\.block_(\d+)\."),
        "dnn_width": size("0.DNN.block_0.linear.w.bias"),
        "embedding": size("1.Embedding.weight", axis=1, axes=2),
        "decoder_width": size("2.proj.bias"),
        "location_channels": size("2.attn.conv_loc.weight", axes=3),
        "location_reach": size("2.attn.conv_loc.weight", axis=2, axes=3) // 2,
    }
    bins = size("0.CNN.block_0.norm_1.norm.weight", axes=2)
    if bins != MEL_COUNT:
        raise InputError(f"{where}: a model that hears {bins} mel filters, expected {MEL_COUNT}")
    try:
        return Settings(**sizes, **{"norm": "batch", "as_released": True, **changes})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    return len({found[1] for name in state if (found := re.match(pattern, name))})
