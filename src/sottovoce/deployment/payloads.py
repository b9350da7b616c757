"""Numbers as they travel: a round's model down, an update up, a start model once. Little-endian, and without padding.

    model      the trained parameters in the order of their layout, float32, or float16 where people accepted that
    update     as many words of 32 or 64 bits: how many cells of the plan's grid, negative ones as two's complement, so
               that words add up modulo 2³² or 2⁶⁴ and the sum of all is the sum of updates
    pair       of a word error rate: the same with two words, of 64 bits
    start      lengths of tokens and language (8 bytes each), tokens.json, language, parameters as safetensors

Lengths are known before anything arrives, but for the start model's, whose digest people have accepted.
"""

import json
import struct
from dataclasses import replace

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from sottovoce.deployment.masks import Words
from sottovoce.deployment.messages import Code, Refused
from sottovoce.deployment.sum_terms import Terms
from sottovoce.errors import InputError, promise
from sottovoce.flat.layout import Layout
from sottovoce.models.family import Options, find_family
from sottovoce.models.recogniser import Recogniser, check_parameters
from sottovoce.privacy.plan import Plan
from sottovoce.text.tokens import parse_tokens, written_tokens

_FLOAT, _HALF = np.dtype("<f4"), np.dtype("<f2")
_LENGTHS = struct.Struct("<QQ")


def model_bytes(layout: Layout, *, model_bits: int | None = None) -> int:
    return _float(model_bits).itemsize * layout.dimension


def write_model(flat_P: Tensor, layout: Layout, *, model_bits: int | None = None) -> bytes:
    """A model as it travels. Of 16 bits, it has been rounded before (`as_sent`): nothing is lost here."""
    values = torch.cat(layout.parts(flat_P.detach())).cpu().numpy()
    written = values.astype(_float(model_bits), copy=False)
    if model_bits is not None:
        promise(np.array_equal(written, values, equal_nan=True), "a model of more bits than it is sent with")
    return written.tobytes()


def read_model(payload: bytes, layout: Layout, *, model_bits: int | None = None) -> Tensor:
    """The model [P] in float32; Refused where it has another length."""
    if len(payload) != model_bytes(layout, model_bits=model_bits):
        raise Refused(Code.UNREADABLE)
    return _spread(torch.from_numpy(np.frombuffer(payload, dtype=_float(model_bits)).astype(np.float32)), layout)


def _float(model_bits: int | None) -> np.dtype[np.floating]:
    return _HALF if model_bits == 16 else _FLOAT


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


def terms_of(terms: Terms, plan: Plan) -> Terms:
    """The same terms for secure sums of words under `plan`: updates have others than pairs."""
    return replace(terms, length=plan.layout.dimension, bits=32 if _signed(plan).itemsize == 4 else 64)


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
    """A sum of words as one on the plan's grid, [P] in float64; modulo 2⁵³ where float64 holds no more.

    Sums of clipped updates are smaller. That others are not must not show: there is no sum which is refused.
    """
    assert plan.grid is not None
    signed = words.view(_signed(plan))
    unused = 8 * signed.itemsize - plan.word_bits
    cells = (signed << unused) >> unused  # keeps the sign of what is left
    return _spread(torch.from_numpy(cells.astype(np.float64) * plan.grid), plan.layout)


# The model that training starts from: tokens, language, parameters. Its family and settings are the recipe's.


def write_start(start: Recogniser) -> bytes:
    """A start model as it travels."""
    tokens, language = json.dumps(written_tokens(start.tokens), sort_keys=True).encode(), start.language.encode()
    parameters = {name: tensor.detach().cpu().float().contiguous() for name, tensor in start.parameters.items()}
    return _LENGTHS.pack(len(tokens), len(language)) + tokens + language + safetensors.torch.save(parameters)


def read_start(content: bytes, model: Options) -> Recogniser:
    """A start model of a recipe's section `model`; InputError where `content` is something else.

    Nothing of it decides what is loaded or how large it is made: it fits what the recipe says, or is refused.
    """
    tokens, language = _LENGTHS.unpack_from(content) if len(content) >= _LENGTHS.size else (len(content), 0)
    texts, rest = _LENGTHS.size + tokens, _LENGTHS.size + tokens + language
    if rest > len(content):
        raise InputError("the start model is cut short")
    known = parse_tokens(content[_LENGTHS.size : texts], where="the start model's tokens")
    family, settings = find_family(model.family), model.settings(tokens=known.size + 1)
    shapes = family.shapes(settings)
    try:
        found = safetensors.torch.load(content[rest:])
        spoken = content[texts:rest].decode()
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError):
        raise InputError("the start model's parameters cannot be read") from None
    check_parameters(found, shapes, where="the start model")
    if any(tensor.dtype != torch.float32 for tensor in found.values()):
        raise InputError("the start model's parameters are of another kind: expected float32")
    # In the family's order, which a file does not keep.
    return Recogniser(family, settings, known, {name: found[name] for name in shapes}, spoken)
