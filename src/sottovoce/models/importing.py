"""Models that others have trained, as one of ours: so far SpeechBrain's CRDNN recipes.

FOLDER/model.ckpt | asr.ckpt                        the modules' weights
FOLDER/tokenizer.ckpt | tokenizer.model | *_unigram.model    the sentence pieces
FOLDER/normalizer.ckpt                              the mean and deviation of features; each utterance's own without

A checkpoint may be anybody's. Only tensors are unpickled; their names, layout, type, bytes and values are checked
before anything is made of them.
"""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sottovoce.audio.features import MEL_COUNT
from sottovoce.base.errors import InputError
from sottovoce.base.files import check_file, read_file
from sottovoce.base.parsing import quote, shorten
from sottovoce.models.crdnn import FAMILY
from sottovoce.models.crdnn.speechbrain import COUNTER, converted, settings_of
from sottovoce.models.saved import Recogniser
from sottovoce.text.tokens import SentencePieceTokens

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
        found = torch.load(file, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # torch's reader stumbles over what it did not write in many ways
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
