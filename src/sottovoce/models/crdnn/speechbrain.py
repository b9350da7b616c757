"""Weights of SpeechBrain's CRDNN recipes as ours: what goes by which name there, and which sizes a state dict has.

Their checkpoint `model.ckpt` holds a list of modules: 0 encoder, 1 embedding, 2 decoder, 3 CTC head, 4 token head.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sottovoce.audio.features import MEL_COUNT
from sottovoce.errors import InputError
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
    """Our parameters from their state dict, which must hold these and, but for counters, nothing else."""
    left = {name for name in state if not name.endswith(".num_batches_tracked")}
    parameters = {}
    for name in parameter_shapes(settings):
        theirs = their_name(name)
        if theirs not in state:
            raise InputError(f"{where}: {theirs} is missing, expected the weights of SpeechBrain's CRDNN recipe")
        # Their convolutions see frequency before time.
        is_conv = name.startswith("cnn.") and state[theirs].dim() == 4
        parameters[name] = (state[theirs].transpose(2, 3) if is_conv else state[theirs]).detach().float().contiguous()
        left.discard(theirs)
    if left:
        raise InputError(f"{where}: {min(left)} is no part of SpeechBrain's CRDNN recipe with an attention decoder")
    return parameters


def settings_of(state: Mapping[str, Tensor], *, where: str, **changes: Any) -> Settings:
    """The architecture whose weights these are, read off their shapes; batch-norm, and padding as released."""
    try:
        blocks = _count(state, r"0\.CNN\.block_(\d+)\.")
        settings = Settings(
            tokens=len(state["3.w.bias"]),
            channels=tuple(len(state[f"0.CNN.block_{block}.conv_1.conv.bias"]) for block in range(blocks)),
            rnn_layers=_count(state, r"0\.RNN\.rnn\.weight_ih_l(\d+)$"),
            rnn_width=state["0.RNN.rnn.weight_hh_l0"].shape[1],
            dnn_layers=_count(state, r"0\.DNN\.block_(\d+)\."),
            dnn_width=len(state["0.DNN.block_0.linear.w.bias"]),
            embedding=state["1.Embedding.weight"].shape[1],
            decoder_width=len(state["2.proj.bias"]),
            location_channels=state["2.attn.conv_loc.weight"].shape[0],
            location_reach=state["2.attn.conv_loc.weight"].shape[2] // 2,
            **{"norm": "batch", "as_released": True, **changes},
        )
        bins = len(state["0.CNN.block_0.norm_1.norm.weight"])
    except (KeyError, IndexError, ValueError) as error:
        raise InputError(f"{where}: {error} is missing, expected the weights of SpeechBrain's CRDNN recipe") from None
    if bins != MEL_COUNT:
        raise InputError(f"{where}: a model that hears {bins} mel filters, expected {MEL_COUNT}")
    return settings


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    return len({found[1] for name in state if (found := re.match(pattern, name))})
