"""A personal part on disk: what one person has trained on top of a public model, for themselves alone.

FOLDER/personal.json           which model it belongs to, what of it was trained and how, and what the guard decided
FOLDER/personal.safetensors    the trained tensors; absent where the guard keeps the public model

Both are their owner's to read. A part belongs to one model: it names a digest of that model's weights and tokens, and
is refused with any other.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_as_bytes
from torch import Tensor

from sottovoce.base.digests import content_digest, weights_digest
from sottovoce.base.errors import InputError
from sottovoce.base.files import add_digest, check_digest, read_file, read_json, write_atomically, write_json
from sottovoce.models.family import Family, Parameters
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.trainable import Frozen, Part, Trainable, parse_part, split_names

DESCRIPTION, TENSORS = "personal.json", "personal.safetensors"
BIASES = "biases"  # every tensor with one axis: norms and biases

_FORMAT, _VERSION = "sottovoce personal part", 1


@dataclass(frozen=True, eq=False)
class PersonalPart:
    """The trained tensors of one person, and the model they belong to. `about` says how they were trained and judged.

    Without tensors the public model is kept as it is.
    """

    base: str
    part: str
    scale: float
    tensors: Parameters
    about: Mapping[str, Any]

    @property
    def is_kept(self) -> bool:
        """Whether it changes the model at all."""
        return bool(self.tensors)


def parse_personal_part(text: str, family: Family[Any, Any], settings: Any) -> Part:
    """What `text` says is trained of a model: as `federation.trainable` says it, or `biases` for norms and biases.

    Tensors that count what was seen (batch-norm's) are no biases.
    """
    named = split_names(text)
    if BIASES not in named:
        return parse_part(text)
    counted = family.training.statistics(settings)
    vectors = [name for name, shape in family.shapes(settings).items() if len(shape) == 1 and name not in counted]
    others = [name for name in named if name != BIASES]
    rest = parse_part(", ".join(others)) if others else Part(text, (), None)
    return replace(rest, text=text, patterns=(*rest.patterns, *vectors))


def digest_base(recogniser: Recogniser) -> str:
    """What identifies a model to its personal parts: its weights and its tokens."""
    arrays = {name: p.detach().cpu().float().numpy() for name, p in recogniser.parameters.items()}
    return content_digest({"weights": weights_digest(arrays), "tokens": recogniser.tokens.digest})


def build_personal_part(
    recogniser: Recogniser, split: Trainable, trained: Parameters | None, *, part: str, about: Mapping[str, Any]
) -> PersonalPart:
    """What is kept of training `split` of `recogniser`: `trained` with factors that were not, or None for nothing."""
    tensors: dict[str, Tensor] = {}
    if trained is not None:
        pairs = {f"{name.removesuffix('lora_b')}lora_a" for name in trained if name.endswith(".lora_b")}
        fixed = {name: tensor for name, tensor in split.frozen.tensors.items() if name in pairs}
        whole = {**fixed, **trained}
        tensors = {name: tensor.detach().cpu().float().contiguous().clone() for name, tensor in whole.items()}
    return PersonalPart(digest_base(recogniser), part, split.frozen.scale, tensors, about)


def save_personal_part(part: PersonalPart, folder: Path) -> None:
    """Write `part` into `folder`, for its owner alone; one that is there already is replaced."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = tensors_as_bytes(dict(part.tensors))
    description = {
        "format": _FORMAT,
        "version": _VERSION,
        "base": part.base,
        "part": part.part,
        "scale": part.scale,
        "tensors": weights_digest({name: tensor.numpy() for name, tensor in part.tensors.items()}),
        "is_kept": part.is_kept,
        "about": dict(part.about),
    }
    if part.is_kept:
        with write_atomically(folder / TENSORS, private=True) as file:
            file.write(content)
    write_json(folder / DESCRIPTION, add_digest(description), private=True)
    if not part.is_kept:
        (folder / TENSORS).unlink(missing_ok=True)


def load_personal_part(folder: Path) -> PersonalPart:
    """The part that `save_personal_part` wrote; InputError where there is none, or it was changed since."""
    file = folder / DESCRIPTION
    if not file.is_file():
        raise InputError(f"{folder}: no personal part here, expected a folder that `sottovoce personalise` wrote")
    found = check_digest(read_json(file), where=file)
    if found.get("format") != _FORMAT or found.get("version") != _VERSION:
        raise InputError(f"{file}: expected format={_FORMAT!r}, version={_VERSION}")
    kinds = {"base": str, "part": str, "scale": float, "tensors": str, "is_kept": bool, "about": dict}
    for name, kind in kinds.items():
        if not isinstance(found.get(name), kind):
            raise InputError(f"{file} is damaged: {name} is missing")
    tensors: dict[str, Tensor] = {}
    if found["is_kept"]:
        try:
            tensors = tensors_from_bytes(read_file(folder / TENSORS))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise InputError(f"{folder / TENSORS} cannot be read ({' '.join(str(error).split())})") from None
        if weights_digest({name: tensor.float().numpy() for name, tensor in tensors.items()}) != found["tensors"]:
            raise InputError(f"{folder / TENSORS} is damaged: it was changed after it was written")
    if not math.isfinite(found["scale"]):
        raise InputError(f"{file}: scale={found['scale']}, expected a finite number")
    return PersonalPart(found["base"], found["part"], found["scale"], tensors, found["about"])


def apply_personal_part(recogniser: Recogniser, part: PersonalPart, *, where: str) -> Recogniser:
    """The person's own model; InputError where `part` belongs to another model than `recogniser`."""
    if (base := digest_base(recogniser)) != part.base:
        raise InputError(
            f"{where} belongs to another model ({part.base[:12]}…) than this one ({base[:12]}…): expected the model "
            "that it was trained on, or a new part by `sottovoce personalise`"
        )
    if not part.is_kept:
        return recogniser
    try:
        parameters = Frozen(recogniser.parameters, part.scale).merged(part.tensors)
    except (KeyError, RuntimeError):
        raise InputError(f"{where} has tensors that this model does not have") from None
    shapes = {name: tuple(p.shape) for name, p in recogniser.parameters.items()}
    if {name: tuple(p.shape) for name, p in parameters.items()} != shapes:
        raise InputError(f"{where} has tensors of other shapes than this model")
    return replace(recogniser, parameters={name: parameters[name] for name in shapes}, part=None)
