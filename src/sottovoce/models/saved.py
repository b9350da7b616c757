"""A recogniser on disk: what `evaluate` and `transcribe` load, and what a run starts from.

FOLDER/model.safetensors    float32 parameters by name
FOLDER/config.json          architecture, language, and what is known of its training
FOLDER/tokens.json          what it writes

Of a model that was trained in part, a folder holds `part.safetensors` instead: what was trained, with a digest of the
rest, which lies once for all checkpoints of a run, in RUN/frozen.safetensors. `load` puts them together.
"""

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as as_bytes
from torch import Tensor

from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.digests import content_digest, weights_digest
from sottovoce.errors import InputError
from sottovoce.files import named_inside, sealed, unsealed, write_json, written_atomically
from sottovoce.models.family import Family, Parameters, find_family
from sottovoce.models.saved_files import CONFIG as CONFIG
from sottovoce.models.saved_files import FROZEN as FROZEN
from sottovoce.models.saved_files import PARAMETERS as PARAMETERS
from sottovoce.models.saved_files import PART as PART
from sottovoce.models.saved_files import TOKENS as TOKENS
from sottovoce.models.saved_files import description_digest
from sottovoce.models.trainable import Frozen
from sottovoce.parsing import Unreadable, parse_json
from sottovoce.text.tokens import Tokens, load_tokens, save_tokens, written_tokens


@dataclass(frozen=True, eq=False)
class TrainedPart:
    """What was trained of a recogniser; the rest stays what it was, and its file's digest says which that is."""

    trained: Parameters
    scale: float
    frozen_digest: str


@dataclass(frozen=True)
class Recogniser:
    """Everything that turns speech into text. `about` says how it came to be (recipe, step, …).

    Where only a `part` of it was trained, that alone is saved.
    """

    family: Family[Any, Any]
    settings: Any
    tokens: Tokens
    parameters: Parameters
    language: str
    about: Mapping[str, Any] = field(default_factory=dict)
    part: TrainedPart | None = None

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> "Recogniser":
        return replace(self, parameters={name: p.to(device, dtype) for name, p in self.parameters.items()})

    @property
    def whole(self) -> "Recogniser":
        """The same, to be saved with all of its parameters."""
        return replace(self, part=None)


def fresh(
    family: Family[Any, Any], settings: Any, tokens: Tokens, *, language: str, generator: torch.Generator
) -> Recogniser:
    """An untrained recogniser."""
    return Recogniser(family, settings, tokens, family.init(settings, generator=generator), language)


def save(recogniser: Recogniser, folder: Path) -> None:
    """Write the three files into `folder`, which exists. The caller makes the folder appear atomically."""
    file = folder / (PARAMETERS if recogniser.part is None else PART)
    save_file(_for_disk(_trained(recogniser)), file)
    write_json(folder / CONFIG, sealed({**_described(recogniser), "parameters": _digest(file)}))
    save_tokens(recogniser.tokens, folder / TOKENS)


def digests(recogniser: Recogniser) -> dict[str, str]:
    """SHA-256 of what `save` will write, for a ledger's commit; `saved_files.digests_in` finds the same on the disk."""
    return {
        "weights": weights_digest({name: p.numpy() for name, p in _for_disk(_trained(recogniser)).items()}),
        "description": description_digest(_described(recogniser)),
        "tokens": content_digest(written_tokens(recogniser.tokens)),
    }


def _trained(recogniser: Recogniser) -> Parameters:
    return recogniser.parameters if recogniser.part is None else recogniser.part.trained


def _described(recogniser: Recogniser) -> dict[str, Any]:
    """What `config.json` says of the model, but for its file."""
    part = recogniser.part
    config = {
        "architecture": recogniser.family.name,
        "sample_rate": SAMPLE_RATE,
        "language": recogniser.language,
        "settings": asdict(recogniser.settings),
        "tokens": recogniser.tokens.digest,
        "about": dict(recogniser.about),
    }
    return config if part is None else {**config, "part": {"frozen": part.frozen_digest, "scale": part.scale}}


def export(recogniser: Recogniser, folder: Path) -> dict[str, Any]:
    """Write `recogniser` into a new `folder`, which appears whole or not at all; what was written, for a summary."""
    if folder.exists():
        raise InputError(f"{folder} is there already: expected the name of a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            written = Path(temporary) / folder.name
            written.mkdir()
            save(recogniser, written)
            size = sum(file.stat().st_size for file in written.iterdir())
            written.rename(folder)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder} cannot be written ({error})") from None
    return {
        "folder": str(folder),
        "whole": recogniser.part is None,
        "parameters": sum(p.numel() for p in _trained(recogniser).values()),
        "bytes": size,
    }


def save_frozen(frozen: Frozen, run: Path) -> str:
    """Write what a run does not train into its folder, unless it is there; returns the file's digest."""
    content, file = as_bytes(_for_disk(frozen.tensors)), run / FROZEN
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    if not file.exists() or _digest(file) != digest:
        with written_atomically(file) as writing:
            writing.write(content)
    return digest


def _for_disk(parameters: Parameters) -> dict[str, Tensor]:
    # Copies: safetensors refuses tensors that are views of one another's memory.
    return {name: p.detach().to("cpu", torch.float32, copy=True).contiguous() for name, p in parameters.items()}


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
        part = _read_part(folder, config)
        parameters = load_file(folder / PARAMETERS) if part is None else _put_together(folder, part)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(("settings", *map(str, first["loc"])))
        raise InputError(f"{folder}: the model cannot be read ({at}: {first['msg']}); it may be cut short") from None
    except (OSError, SafetensorError, TypeError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(f"{folder}: the model cannot be read ({error}); it may be cut short") from None
    check_parameters(parameters, family.shapes(settings), where=str(folder))
    unsealed(config, where=folder / CONFIG)  # last: what is wrong above says more than that something is
    file = PARAMETERS if part is None else PART
    if "parameters" in config and _digest(folder / file) != config["parameters"]:  # older models have none
        raise InputError(f"{folder}: {file} is damaged: it was changed after it was written")
    return Recogniser(family, settings, tokens, parameters, config["language"], config["about"], part)


def _read_part(folder: Path, config: Mapping[str, Any]) -> TrainedPart | None:
    """What was trained of the model in `folder`; None where that is all of it."""
    if (part := config.get("part")) is None:
        return None
    return TrainedPart(load_file(folder / PART), float(part["scale"]), str(part["frozen"]))


def _put_together(folder: Path, part: TrainedPart) -> dict[str, Tensor]:
    """The whole model: a part, and what its run has not trained."""
    run = folder.resolve().parent.parent  # RUN/checkpoints/step-000750
    if not (run / FROZEN).exists():
        raise InputError(
            f"{folder}: a part of a model, and no {FROZEN} where its run would be ({run}); "
            "`sottovoce export RUN --merged` writes a whole model"
        )
    if _digest(run / FROZEN) != part.frozen_digest:
        raise InputError(f"{run / FROZEN} is not what the part in {folder} was trained with")
    return Frozen(load_file(run / FROZEN), part.scale).merged(part.trained)


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


def adapt(
    seed: Recogniser,
    settings: Any,
    tokens: Tokens,
    *,
    generator: torch.Generator,
    family: Family[Any, Any] | None = None,
) -> dict[str, Tensor]:
    """`seed`'s parameters for a model with `settings` and `tokens`; under another token set the output layer is new.

    Of a seed of another family than `family`, what that inherits is taken, and the rest is new.
    """
    family = seed.family if family is None else family
    parameters = family.init(settings, generator=generator)
    merged = _merged(parameters, seed, settings, tokens, family=family)
    return {name: merged[name].clone() for name in parameters}


def sketch(
    family: Family[Any, Any], settings: Any, tokens: Tokens, *, language: str, seed: Recogniser | None = None
) -> Recogniser:
    """A recogniser without numbers, whose tensors have shapes alone; refuses a `seed` that `adapt` would refuse."""
    shapes = family.shapes(settings)
    blank: Parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if seed is not None:
        _merged(blank, seed, settings, tokens, family=family)
    return Recogniser(family, settings, tokens, blank, language)


def _merged(
    parameters: Parameters, seed: Recogniser, settings: Any, tokens: Tokens, *, family: Family[Any, Any]
) -> Parameters:
    """`parameters` with those of `seed` in their place that a model with `settings` takes over."""
    if family.name == seed.family.name:
        new = family.of_tokens if seed.tokens.digest != tokens.digest else frozenset()
        kept = {name: p for name, p in seed.parameters.items() if name not in new}
    else:
        inherited = family.inherited(seed.settings, settings)
        if not inherited:
            raise InputError(f"the model to start from is of family={seed.family.name}, expected {family.name}")
        if absent := sorted(inherited - seed.parameters.keys()):
            raise InputError(f"the model to start from has no {absent[0]!r}: a pre-trained encoder of another shape")
        kept = {name: p for name, p in seed.parameters.items() if name in inherited}
    merged = {**parameters, **kept}
    check_parameters(merged, family.shapes(settings), where="the model to start from does not fit `model`")
    return merged


def describe_inherited(start: Recogniser, seed: Recogniser) -> str:
    """What `start`, whose family is another, has of `seed`, for whoever watches."""
    names = start.family.inherited(seed.settings, start.settings)
    taken, whole = (sum(p.numel() for n, p in start.parameters.items() if n in of) for of in (names, start.parameters))
    unused = sum(p.numel() for name, p in seed.parameters.items() if name not in names)
    return (
        f"{taken:,} of {whole:,} parameters are those of a model of family={seed.family.name}, whose other {unused:,} "
        "are left behind; the rest is new"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = parse_json((folder / CONFIG).read_bytes())
        architecture = config["architecture"]
        absent = {"language", "settings", "tokens", "about"} - config.keys()
    except (OSError, Unreadable, KeyError, TypeError, AttributeError) as error:
        if not (folder / CONFIG).exists() and (inside := named_inside(folder, f"model/{CONFIG}")):
            raise InputError(f"no model at {folder}, which holds runs: expected one of {inside}") from None
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
