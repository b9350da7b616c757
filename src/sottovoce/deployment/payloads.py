"""Numbers as they travel: a round's model down, an update up, a start model once. Little-endian, and without padding.

    model      the trained parameters in the order of their layout, float32
    update     as many words of 32 or 64 bits: how many cells of the plan's grid, negative ones as two's complement, so
               that words add up modulo 2³² or 2⁶⁴ and the sum of all is the sum of updates
    start      lengths of two files (8 bytes each), config.json, tokens.json, model.safetensors (`models.saved`)

Lengths are known before anything arrives, but for the start model's, whose digest people have accepted.
"""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sottovoce.deployment.masks import Words
from sottovoce.deployment.messages import Code, Refused
from sottovoce.errors import InputError, promise
from sottovoce.files import written_atomically
from sottovoce.flat.layout import Layout
from sottovoce.models import saved
from sottovoce.models.saved import Recogniser
from sottovoce.parsing import Unreadable, parse_json
from sottovoce.privacy.plan import Plan

_FLOAT = np.dtype("<f4")
_LENGTHS = struct.Struct("<QQ")


def model_bytes(layout: Layout) -> int:
    return _FLOAT.itemsize * layout.dimension


def write_model(flat_P: Tensor, layout: Layout) -> bytes:
    return torch.cat(layout.parts(flat_P.detach())).cpu().numpy().astype(_FLOAT, copy=False).tobytes()


def read_model(payload: bytes, layout: Layout) -> Tensor:
    """The model [P]; Refused where it has another length."""
    if len(payload) != model_bytes(layout):
        raise Refused(Code.UNREADABLE)
    return _spread(torch.from_numpy(np.frombuffer(payload, dtype=_FLOAT).astype(np.float32)), layout)


def _spread(values: Tensor, layout: Layout) -> Tensor:
    """All parameters in a row, put where they belong in a flat vector [P]."""
    flat_P = layout.zeros(dtype=values.dtype)
    for part, own in zip(layout.parts(flat_P), torch.split(values, list(layout.sizes)), strict=True):
        part.copy_(own)
    return flat_P


def _signed(plan: Plan) -> np.dtype[np.signedinteger]:
    promise(plan.sum_bits is not None, "updates over a network without sum_bits")
    return np.dtype("<i4" if plan.sum_bits == 32 else "<i8")


def update_bytes(plan: Plan) -> int:
    return _signed(plan).itemsize * plan.layout.dimension


def words_of(total_P: Tensor, plan: Plan) -> Words:
    """A sum on the plan's grid as words."""
    assert plan.grid is not None
    signed = _signed(plan)
    words = np.empty(plan.layout.dimension, dtype=signed)
    places = torch.split(torch.from_numpy(words), list(plan.layout.sizes))
    for place, part in zip(places, plan.layout.parts(total_P), strict=True):
        cells = part.cpu() / plan.grid
        place.copy_(cells)
        # Neither off the grid nor too large for a word: it would have come out as another number.
        promise(torch.equal(place.to(cells.dtype), cells), "an update off the grid, or too large for a word")
    return words.view(f"<u{signed.itemsize}")


def read_words(payload: bytes, plan: Plan) -> Words:
    """Words as they came; Refused where they are too few or too many."""
    if len(payload) != update_bytes(plan):
        raise Refused(Code.UNREADABLE)
    return np.frombuffer(payload, dtype=f"<u{_signed(plan).itemsize}")


def total_of(words: Words, plan: Plan) -> Tensor:
    """A sum of words as one on the plan's grid, [P] in float64."""
    assert plan.grid is not None
    return _spread(torch.from_numpy(words.view(_signed(plan)).astype(np.float64) * plan.grid), plan.layout)


# The model that training starts from: parameters that are not trained, tokens, settings.


def write_start(start: Recogniser, folder: Path) -> bytes:
    """A start model as it travels; `folder` is empty, and holds its files afterwards."""
    saved.save(start.whole, folder)
    config, tokens = ((folder / name).read_bytes() for name in (saved.CONFIG, saved.TOKENS))
    return _LENGTHS.pack(len(config), len(tokens)) + config + tokens + (folder / saved.PARAMETERS).read_bytes()


def read_start(content: bytes, folder: Path, *, family: str) -> Recogniser:
    """Put a start model's files into `folder` and load it; InputError where they are none, or of another `family`."""
    if len(content) < _LENGTHS.size:
        raise InputError(f"{folder}: the start model is cut short")
    config, tokens = _LENGTHS.unpack_from(content)
    ends = [_LENGTHS.size, _LENGTHS.size + config, _LENGTHS.size + config + tokens, len(content)]
    if ends[2] > ends[3]:
        raise InputError(f"{folder}: the start model is cut short")
    # Before anything is loaded: a family is found by its name, and a name may be anybody's module.
    if _architecture(content[ends[0] : ends[1]]) != family:
        raise InputError(f"{folder}: the start model is of another family: expected {family}")
    for name, begin, end in zip((saved.CONFIG, saved.TOKENS, saved.PARAMETERS), ends, ends[1:], strict=False):
        with written_atomically(folder / name) as file:
            file.write(content[begin:end])
    return load_start(folder)


def load_start(folder: Path) -> Recogniser:
    """The start model in `folder`, its parameters in their family's order, which a file does not keep."""
    start = saved.load(folder)
    names = start.family.shapes(start.settings)
    return replace(start, parameters={name: start.parameters[name] for name in names})


def _architecture(config: bytes) -> object:
    try:
        found = parse_json(config)
    except Unreadable:
        return None
    return found.get("architecture") if isinstance(found, dict) else None
