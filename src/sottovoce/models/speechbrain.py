"""Models that others have trained, as one of ours: so far SpeechBrain's CRDNN recipes.

FOLDER/model.ckpt | asr.ckpt                        the modules' weights
FOLDER/tokenizer.ckpt | tokenizer.model | *_unigram.model    the sentence pieces
FOLDER/normalizer.ckpt                              the mean and deviation of features; each utterance's own without

A checkpoint may be anybody's. Only tensors are unpickled; their names, layout, type, bytes and values are checked
before anything is made of them. `model.ckpt` holds a list of modules: 0 encoder, 1 embedding, 2 decoder, 3 CTC head,
4 token head.
"""

import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.files import check_file, read_file
from sottovoce.base.parsing import quote, shorten
from sottovoce.data.audio.features import MEL_COUNT
from sottovoce.data.text.tokens import SentencePieceTokens
from sottovoce.models.crdnn import FAMILY
from sottovoce.models.crdnn.settings import Settings, parameter_shapes
from sottovoce.models.recogniser import Recogniser

WEIGHTS = ("model.ckpt", "asr.ckpt")
PIECES = ("tokenizer.ckpt", "tokenizer.model", "*_unigram.model")
NORMALISER = "normalizer.ckpt"


def read_speechbrain(folder: Path, *, language: str) -> Recogniser:
    """The recogniser of a SpeechBrain CRDNN recipe whose files lie in `folder`."""
    if not (language.strip() and language.isprintable()):
        raise InputError(f"language={language!r}, expected the name of one, such as fr")
    file = _found(folder, WEIGHTS, what="the weights")
    state = _weights(file)
    settings = settings_of(state, where=str(file), **_normalisation(folder / NORMALISER))
    parameters = converted(state, settings, where=str(file))
    pieces = _found(folder, PIECES, what="the sentence pieces")
    try:
        tokens = SentencePieceTokens(read_file(pieces))
    except OSError as error:
        raise InputError(f"{pieces} cannot be read ({error.strerror})") from None
    except InputError as error:
        raise InputError(str(error) if str(pieces) in str(error) else f"{pieces}: {error}") from None
    if tokens.size + 1 != settings.tokens:
        raise InputError(f"{pieces}: {tokens.size + 1} pieces, expected {settings.tokens}, as {file.name} writes")
    return Recogniser(FAMILY, settings, tokens, parameters, language, {"imported": f"SpeechBrain, {file.name}"})


def _found(folder: Path, names: tuple[str, ...], *, what: str) -> Path:
    files = sorted({file for name in names for file in folder.glob(name)})
    if len(files) != 1:
        having = f"has {', '.join(file.name for file in files)}" if files else "has none"
        raise InputError(f"{folder}: expected one file with {what} ({' or '.join(names)}), {having}")
    return files[0]


def _weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, but for counters of batches; refused where one is no plain tensor of numbers."""
    found = {name: tensor for name, tensor in _unpickled(file).items() if not str(name).endswith(COUNTER)}
    for name, tensor in found.items():
        if not isinstance(name, str):
            raise InputError(f"{file}: a tensor is called {quote(name)}, expected a text")
        _check_tensor(name, tensor, file)
    _check_values(found, file)
    return found


def _unpickled(file: Path) -> Mapping[Any, Any]:
    try:
        check_file(file)
        _check_packing(file)
        # Of sparse tensors torch 2.11 and 2.15 warn, each in its way. They are refused below, with one line.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            found = torch.load(file, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # torch raises many kinds of errors on files that it did not write
        why = (" ".join(str(error).split()) or type(error).__name__).partition(". ")[0]
        raise InputError(f"{file} cannot be read as a torch checkpoint ({shorten(why)})") from None
    if not isinstance(found, Mapping):
        raise InputError(f"{file} holds {type(found).__name__}, expected named tensors")
    return found


def _check_packing(file: Path) -> None:
    """Refuse an archive whose parts are packed: torch packs none, and a few bytes could mean gigabytes."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
        unpacked = sum(part.file_size for part in parts)
        if unpacked > file.stat().st_size or any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise InputError(f"{file} has {unpacked:,} bytes packed into fewer, expected parts as torch writes them")


def _check_tensor(name: str, tensor: object, file: Path) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{file}: {name} is {type(tensor).__name__}, expected a tensor")
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise InputError(f"{file}: {name} is no plain tensor ({tensor.layout}, {tensor.device}), expected its numbers")
    if not tensor.is_floating_point():
        raise InputError(f"{file}: {name} is {tensor.dtype}, expected floating-point numbers")


def _check_values(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Refuse more numbers than the file can hold (one number may stand for any many), and what is no number."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    held = {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()}
    for name, needed in sizes.items():
        if needed > held[name]:
            raise InputError(f"{file}: {name} makes {needed:,} bytes of {held[name]:,}: it repeats what the file holds")
    if sum(sizes.values()) > file.stat().st_size:
        raise InputError(f"{file}: its tensors have {sum(sizes.values()):,} bytes: they repeat what the file holds")
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor.float()).all():
            raise InputError(f"{file}: {name} has a number that is not finite in float32")


def _normalisation(file: Path) -> dict[str, tuple[float, ...]]:
    if not os.path.lexists(file):  # a link that leads nowhere is one that somebody has made
        return {}
    found = _unpickled(file)
    values = {name: found.get(name) for name in ("glob_mean", "glob_std")}
    if not all(isinstance(value, Tensor) for value in values.values()):
        raise InputError(f"{file}: expected glob_mean and glob_std, of features that were normalised globally")
    tensors: dict[str, Tensor] = {}
    for name, value in values.items():
        _check_tensor(name, value, file)
        assert isinstance(value, Tensor)
        tensors[name] = value
    _check_values(tensors, file)
    mean, deviation = (tuple(tensor.flatten().tolist()) for tensor in tensors.values())
    if len(mean) != MEL_COUNT or len(deviation) != MEL_COUNT or min(deviation) <= 0:
        raise InputError(
            f"{file}: {len(mean)} means and {len(deviation)} deviations, expected {MEL_COUNT}, the latter positive"
        )
    return {"feature_mean": mean, "feature_deviation": deviation}


# Names of tensors there, and the sizes that a state dict has.

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
        raise InputError(f"{where}: a model with {bins} mel filters, expected {MEL_COUNT}")
    try:
        return Settings(**sizes, **{"norm": "batch", "as_released": True, **changes})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    return len({found[1] for name in state if (found := re.match(pattern, name))})
