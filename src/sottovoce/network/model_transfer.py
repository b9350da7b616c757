"""Models as they travel: a round's model down, the start model once. Little-endian, without padding.

    round      the trained parameters in the order of their layout, float32, or float16 where people accepted that
    start      lengths of tokens and language (8 bytes each), tokens.json, language, parameters as safetensors

Lengths are known before anything arrives, but for the start model's, whose digest people have accepted. Of a model that
is made from files at every client (`Family.base_files`) only the parameters that these do not give travel, and no
tokens where they bring their own.
"""

import json
import struct
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.data.text.pretrained_tokens import PretrainedTokens
from sottovoce.data.text.tokens import Tokens, parse_tokens, tokens_as_json
from sottovoce.flat.layout import Layout
from sottovoce.models.family import Family, Options, find_family
from sottovoce.models.recogniser import Recogniser, check_parameters
from sottovoce.network.messages import AnswerCode, Refused
from sottovoce.network.secure_sum.words import fill_flat

_LENGTHS = struct.Struct("<QQ")


def write_round_model(flat_P: Tensor, layout: Layout, *, model_bits: int | None = None) -> bytes:
    """A round's model. One of 16 bits has been rounded before (`as_sent`): nothing is lost here."""
    values = torch.cat(layout.parts(flat_P.detach())).cpu().numpy()
    written = values.astype(_float_type(model_bits), copy=False)
    if model_bits is not None:
        check_invariant(np.array_equal(written, values, equal_nan=True), "a model of more bits than it is sent with")
    return written.tobytes()


def read_round_model(payload: bytes, layout: Layout, *, model_bits: int | None = None) -> Tensor:
    """The model [P] in float32; Refused where it has another length."""
    sent = _float_type(model_bits)
    if len(payload) != sent.itemsize * layout.dimension:
        raise Refused(AnswerCode.UNREADABLE)
    return fill_flat(torch.from_numpy(np.frombuffer(payload, dtype=sent).astype(np.float32)), layout)


def _float_type(model_bits: int | None) -> np.dtype[np.floating]:
    return np.dtype("<f2" if model_bits == 16 else "<f4")


def write_start_model(start: Recogniser, model: Options) -> bytes:
    """A start model of a recipe's section `model`."""
    own = start.family.training.own_tokens(model, start.language)
    tokens, language = b"", start.language.encode()
    if own is None or own.digest != start.tokens.digest:
        _check_tokens_travel(start.tokens, own)
        tokens = json.dumps(tokens_as_json(start.tokens), sort_keys=True).encode()
    given = _given_by_files(start.family, start.settings)
    parameters = {name: tensor.detach().cpu().float().contiguous() for name, tensor in start.parameters.items()}
    sent = {name: p for name, p in parameters.items() if name not in given or not torch.equal(given[name], p)}
    return _LENGTHS.pack(len(tokens), len(language)) + tokens + language + safetensors.torch.save(sent)


def _given_by_files(family: Family[Any, Any], settings: Any) -> dict[str, Tensor]:
    """What a client has from the files that its model is made from. What is drawn besides, a run draws otherwise."""
    if family.base_files is None:
        return {}
    return family.init(settings, generator=torch.Generator().manual_seed(0))


def _check_tokens_travel(tokens: Tokens, own: Tokens | None) -> None:
    """Refuse tokens that are files of somebody's tokenizer: a client opens none that a server sends."""
    if own is not None or isinstance(tokens, PretrainedTokens):
        raise InputError(
            "the start model's tokens: those of a pretrained model are never sent; expected its own, which its files "
            "have at every client"
        )


def read_start_model(content: bytes, model: Options) -> Recogniser:
    """A start model of a recipe's section `model`; InputError where `content` is something else.

    The recipe alone decides what is loaded and how large it is; content that does not fit is refused.
    """
    tokens, language = _LENGTHS.unpack_from(content) if len(content) >= _LENGTHS.size else (len(content), 0)
    texts, rest = _LENGTHS.size + tokens, _LENGTHS.size + tokens + language
    if rest > len(content):
        raise InputError("the start model is cut short")
    try:
        found = safetensors.torch.load(content[rest:])
        spoken = content[texts:rest].decode()
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError):
        raise InputError("the start model's parameters cannot be read") from None
    family = find_family(model.family)
    known = _read_tokens(content[_LENGTHS.size : texts], family.training.own_tokens(model, spoken))
    settings = model.settings(tokens=known.size + 1)
    shapes = family.shapes(settings)
    found = {**_given_by_files(family, settings), **found}
    check_parameters(found, shapes, where="the start model")
    if any(tensor.dtype != torch.float32 for tensor in found.values()):
        raise InputError("the start model's parameters are of another kind: expected float32")
    # In the family's order, which a file does not keep.
    return Recogniser(family, settings, known, {name: found[name] for name in shapes}, spoken)


def _read_tokens(content: bytes, own: Tokens | None) -> Tokens:
    """The tokens as they came, or the model's `own`, which do not come."""
    if own is not None and not content:
        return own
    known = parse_tokens(content, where="the start model's tokens")
    _check_tokens_travel(known, own)
    return known
