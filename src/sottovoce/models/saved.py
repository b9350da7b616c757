"""A recogniser on disk: what `evaluate` and `transcribe` load, and what a run starts from.

FOLDER/model.safetensors    float32 parameters by name
FOLDER/config.json          architecture, language, and what is known of its training
FOLDER/tokens.json          what it writes
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.errors import InputError
from sottovoce.files import sealed, unsealed, write_json
from sottovoce.models.family import Family, Parameters, find_family
from sottovoce.parsing import Unreadable, parse_json
from sottovoce.text.tokens import Tokens, load_tokens, save_tokens

PARAMETERS, CONFIG, TOKENS = "model.safetensors", "config.json", "tokens.json"


@dataclass(frozen=True)
class Recogniser:
    """Everything that turns speech into text. `about` says how it came to be (recipe, step, …)."""

    family: Family[Any, Any]
    settings: Any
    tokens: Tokens
    parameters: Parameters
    language: str
    about: Mapping[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> "Recogniser":
        return replace(self, parameters={name: p.to(device, dtype) for name, p in self.parameters.items()})


def fresh(
    family: Family[Any, Any], settings: Any, tokens: Tokens, *, language: str, generator: torch.Generator
) -> Recogniser:
    """An untrained recogniser."""
    return Recogniser(family, settings, tokens, family.init(settings, generator=generator), language)


def save(recogniser: Recogniser, folder: Path) -> None:
    """Write the three files into `folder`, which exists. The caller makes the folder appear atomically."""
    # Copies: safetensors refuses tensors that are views of one another's memory.
    parameters = {
        name: p.detach().to("cpu", torch.float32, copy=True).contiguous() for name, p in recogniser.parameters.items()
    }
    save_file(parameters, folder / PARAMETERS)
    config = {
        "architecture": recogniser.family.name,
        "sample_rate": SAMPLE_RATE,
        "language": recogniser.language,
        "settings": asdict(recogniser.settings),
        "tokens": recogniser.tokens.digest,
        "parameters": _digest(folder / PARAMETERS),
        "about": dict(recogniser.about),
    }
    write_json(folder / CONFIG, sealed(config))
    save_tokens(recogniser.tokens, folder / TOKENS)


def load(folder: Path | str) -> Recogniser:
    """The recogniser in `folder`: a model folder, or a run folder that holds one as `model`."""
    folder = Path(folder)
    if not (folder / CONFIG).exists() and (folder / "model" / CONFIG).exists():
        folder = folder / "model"
    config = _read_config(folder)
    try:
        family = find_family(config["architecture"])
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    tokens = load_tokens(folder / TOKENS)
    if tokens.digest != config["tokens"]:
        raise InputError(f"{folder}: {TOKENS} is not the token set this model was trained with")
    try:
        settings = TypeAdapter(family.Settings).validate_python(config["settings"])
        parameters = load_file(folder / PARAMETERS)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(("settings", *map(str, first["loc"])))
        raise InputError(f"{folder}: the model cannot be read ({at}: {first['msg']}); it may be cut short") from None
    except (OSError, SafetensorError, TypeError, KeyError) as error:
        raise InputError(f"{folder}: the model cannot be read ({error}); it may be cut short") from None
    check_parameters(parameters, family.shapes(settings), where=str(folder))
    unsealed(config, where=folder / CONFIG)  # last: what is wrong above says more than that something is
    if "parameters" in config and _digest(folder / PARAMETERS) != config["parameters"]:  # older models have none
        raise InputError(f"{folder}: {PARAMETERS} is damaged: it was changed after it was written")
    return Recogniser(family, settings, tokens, parameters, config["language"], config["about"])


def check_parameters(parameters: Parameters, expected: Mapping[str, tuple[int, ...]], *, where: str) -> None:
    """Refuse parameters that belong to another architecture, whose shapes are not those `expected`."""
    for name, shape in expected.items():
        if name not in parameters:
            raise InputError(f"{where}: parameter {name!r} is missing: a model of another architecture")
        if tuple(parameters[name].shape) != shape:
            found = list(parameters[name].shape)
            raise InputError(f"{where}: parameter {name!r} has shape {found}, expected {list(shape)}")
    if unknown := sorted(parameters.keys() - expected.keys()):
        raise InputError(f"{where}: unknown parameter {unknown[0]!r}: a model of another architecture")


def adapt(seed: Recogniser, settings: Any, tokens: Tokens, *, generator: torch.Generator) -> dict[str, Tensor]:
    """`seed`'s parameters for a model with `settings` and `tokens`; under another token set the output layer is new."""
    family = seed.family
    parameters = family.init(settings, generator=generator)
    new = family.of_tokens if seed.tokens.digest != tokens.digest else frozenset()
    kept = {name: p for name, p in seed.parameters.items() if name not in new}
    merged = {**parameters, **kept}
    check_parameters(merged, family.shapes(settings), where="the model to start from does not fit `model`")
    return {name: merged[name].clone() for name in parameters}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = parse_json((folder / CONFIG).read_bytes())
        architecture = config["architecture"]
        absent = {"language", "settings", "tokens", "about"} - config.keys()
    except (OSError, Unreadable, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"no model at {folder}: expected a readable {CONFIG} ({error})") from None
    if not isinstance(architecture, str):
        raise InputError(f"{folder}: architecture={architecture!r}, expected the name of a model family")
    if (rate := config.get("sample_rate", SAMPLE_RATE)) != SAMPLE_RATE:
        raise InputError(f"{folder}: a model for sample_rate={rate}, expected {SAMPLE_RATE}, the stores' rate")
    if absent:
        raise InputError(f"{folder}: {CONFIG} has no {', '.join(sorted(absent))}")
    return config


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
