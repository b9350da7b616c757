"""Models that others have trained, as one of ours: so far SpeechBrain's CRDNN recipes.

FOLDER/model.ckpt | asr.ckpt                        the modules' weights
FOLDER/tokenizer.ckpt | tokenizer.model | *_unigram.model    the sentence pieces
FOLDER/normalizer.ckpt                              the mean and deviation of features; each utterance's own without
"""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from sottovoce.errors import InputError
from sottovoce.models.crdnn import FAMILY
from sottovoce.models.crdnn.speechbrain import converted, settings_of
from sottovoce.models.saved import Recogniser
from sottovoce.text.tokens import SentencePieceTokens

WEIGHTS = ("model.ckpt", "asr.ckpt")
PIECES = ("tokenizer.ckpt", "tokenizer.model", "*_unigram.model")
NORMALISER = "normalizer.ckpt"


def read_speechbrain(folder: Path, *, language: str) -> Recogniser:
    """The recogniser of a SpeechBrain CRDNN recipe whose files lie in `folder`."""
    file = _found(folder, WEIGHTS, what="the weights")
    state = _tensors(file)
    settings = settings_of(state, where=str(file), **_normalisation(folder / NORMALISER))
    pieces = _found(folder, PIECES, what="the sentence pieces")
    try:
        tokens = SentencePieceTokens(pieces.read_bytes())
    except InputError as error:
        raise InputError(f"{pieces}: {error}") from None
    if tokens.size + 1 != settings.tokens:
        raise InputError(f"{pieces}: {tokens.size + 1} pieces, expected {settings.tokens}, as {file.name} writes")
    parameters = converted(state, settings, where=str(file))
    return Recogniser(FAMILY, settings, tokens, parameters, language, {"imported": f"SpeechBrain, {file.name}"})


def _found(folder: Path, names: tuple[str, ...], *, what: str) -> Path:
    files = sorted({file for name in names for file in folder.glob(name)})
    if len(files) != 1:
        having = f"has {', '.join(file.name for file in files)}" if files else "has none"
        raise InputError(f"{folder}: expected one file with {what} ({' or '.join(names)}), {having}")
    return files[0]


def _tensors(file: Path) -> Mapping[str, Any]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError, ValueError) as error:
        raise InputError(f"{file} cannot be read as a torch checkpoint ({str(error).splitlines()[0]})") from None
    if not isinstance(found, Mapping):
        raise InputError(f"{file} holds {type(found).__name__}, expected named tensors")
    return found


def _normalisation(file: Path) -> dict[str, tuple[float, ...]]:
    if not file.exists():
        return {}
    found = _tensors(file)
    values = [found.get(name) for name in ("glob_mean", "glob_std")]
    if not all(isinstance(value, Tensor) for value in values):
        raise InputError(f"{file}: expected glob_mean and glob_std, of features that were normalised globally")
    mean, deviation = (tuple(value.flatten().tolist()) for value in values if value is not None)
    return {"feature_mean": mean, "feature_deviation": deviation}
