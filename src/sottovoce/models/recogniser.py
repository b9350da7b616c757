"""A recogniser on disk: what `evaluate` and `transcribe` load, and what a run starts from.

`model_files` lists the files of its folder. Of a model that was trained in part, the folder holds `part.safetensors`:
what was trained, with a digest of the rest, which lies once for all checkpoints of a run, in RUN/frozen.safetensors.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import save as as_bytes
from torch import Tensor

from sottovoce.base.digests import content_digest, weights_digest
from sottovoce.base.errors import InputError
from sottovoce.base.files import (
    add_digest,
    check_digest,
    check_file,
    list_folders_holding,
    read_file,
    write_atomically,
    write_folder_atomically,
    write_json,
)
from sottovoce.base.importing import refuse_imports
from sottovoce.base.parsing import ParseError, parse_json, quote
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.text.tokens import Tokens, load_tokens, save_tokens, tokens_as_json
from sottovoce.models.family import Family, Parameters, find_family
from sottovoce.models.low_rank import low_rank_names
from sottovoce.models.model_files import CONFIG, FROZEN, PARAMETERS, PART, TOKENS, description_digest, locate_model
from sottovoce.models.trainable import Frozen

NAME_FAMILY = "--family {name}, if you trust it"


@dataclass(frozen=True, eq=False)
class TrainedPart:
    """What was trained of a recogniser; the rest stays what it was, and its file's digest says which that is."""

    trained: Parameters
    scale: float
    frozen_digest: str
    fixed: Parameters = field(default_factory=dict)  # factors of low rank that were not trained


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


def create_recogniser(
    family: Family[Any, Any], settings: Any, tokens: Tokens, *, language: str, generator: torch.Generator
) -> Recogniser:
    """An untrained recogniser."""
    return Recogniser(family, settings, tokens, family.init(settings, generator=generator), language)


def save_recogniser(recogniser: Recogniser, folder: Path) -> None:
    """Write the three files into `folder`, which exists. The caller makes the folder appear atomically."""
    file = folder / (PARAMETERS if recogniser.part is None else PART)
    save_file(_for_disk(_trained(recogniser)), file)
    write_json(folder / CONFIG, add_digest({**_described(recogniser), "parameters": _digest(file)}))
    save_tokens(recogniser.tokens, folder / TOKENS)


def digest_recogniser(recogniser: Recogniser) -> dict[str, str]:
    """SHA-256 of what `save_recogniser` will write, as `digest_model_files` finds it, for a ledger's commit."""
    return {
        "weights": weights_digest({name: p.numpy() for name, p in _for_disk(_trained(recogniser)).items()}),
        "description": description_digest(_described(recogniser)),
        "tokens": content_digest(tokens_as_json(recogniser.tokens)),
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


def export_recogniser(recogniser: Recogniser, folder: Path | str) -> dict[str, Any]:
    """Write `recogniser` into a new `folder`, which appears whole or not at all; what was written, for a summary."""
    try:
        with write_folder_atomically(Path(folder)) as written:
            save_recogniser(recogniser, written)
            _write_adapter(recogniser, written)
            files = list(written.iterdir())
            for file in files:  # safetensors are written for their owner alone, and this is for others
                file.chmod(0o644)
            size = sum(file.stat().st_size for file in files)
    except SafetensorError as error:
        raise InputError(f"{folder} cannot be written ({error})") from None
    return {
        "folder": str(folder),
        "whole": recogniser.part is None,
        "parameters": sum(p.numel() for p in _trained(recogniser).values()),
        "bytes": size,
    }


def _write_adapter(recogniser: Recogniser, folder: Path) -> None:
    """Low-rank corrections as others read them, where the family says how and nothing else was trained."""
    part, write = recogniser.part, recogniser.family.transfer.write_adapter
    if part is None or write is None or not all(name.endswith((".lora_a", ".lora_b")) for name in part.trained):
        return
    write({**part.fixed, **part.trained}, folder, scale=part.scale, settings=recogniser.settings)


def save_frozen(frozen: Frozen, run: Path) -> str:
    """Write what a run does not train into its folder, unless it is there; returns the file's digest."""
    content, file = as_bytes(_for_disk(frozen.tensors)), run / FROZEN
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    if not file.exists() or _digest(file) != digest:
        with write_atomically(file) as writing:
            writing.write(content)
    return digest


def _for_disk(parameters: Parameters) -> dict[str, Tensor]:
    # Copies: safetensors refuses tensors that are views of one another's memory.
    return {name: p.detach().to("cpu", torch.float32, copy=True).contiguous() for name, p in parameters.items()}


def load_recogniser(folder: Path | str, *, family: str | None = None) -> Recogniser:
    """The recogniser in `folder`: a model folder, or a run folder that holds one as `model`.

    A `family` is what its models are expected to be of. One from outside this package (`module:FAMILY`) has to be
    named, here or in a recipe that was loaded before: to import a module is to run it, and a folder may be anybody's.
    """
    folder = locate_model(Path(folder))
    if family is not None:
        find_family(family)
    config = _read_config(folder)
    if family is not None and config["architecture"] != family:
        raise InputError(f"{folder}: a model of family={quote(config['architecture'])}, expected {family}")
    try:
        with refuse_imports(NAME_FAMILY):
            found = find_family(config["architecture"])
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    tokens = load_tokens(folder / TOKENS)
    if tokens.digest != config["tokens"]:
        raise InputError(f"{folder}: {TOKENS} is not the token set this model was trained with")
    if config["settings"].get("tokens", tokens.size + 1) != tokens.size + 1:
        outputs = quote(config["settings"]["tokens"])
        raise InputError(f"{folder}: settings.tokens={outputs}, expected {tokens.size + 1}, as {TOKENS} has")
    file = PARAMETERS if config.get("part") is None else PART
    try:
        settings = TypeAdapter(found.Settings).validate_python(config["settings"])
        held = _shapes_in(folder / file)
        frozen = {} if file == PARAMETERS else _shapes_in(_frozen_of(folder))
        _check_size(config["settings"], found.transfer.layer_count(settings), {**frozen, **held}, where=folder)
        check_shapes(_merged_shapes(held, frozen), found.shapes(settings), where=str(folder))
        part = _read_part(folder, config)
        parameters = load_file(folder / file) if part is None else _put_together(folder, part)
        if part is not None:
            part = replace(part, fixed=_read_fixed(folder))
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(("settings", *map(str, first["loc"])))
        raise InputError(f"{folder}: the model cannot be read ({at}: {first['msg']}); it may be cut short") from None
    except InputError as error:
        raise InputError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from None
    except (OSError, SafetensorError, TypeError, ValueError, KeyError, RuntimeError, MemoryError) as error:
        raise InputError(f"{folder}: the model cannot be read ({_line(error)}); it may be cut short") from None
    check_digest(config, where=folder / CONFIG)  # last: what is wrong above says more than that something is
    if "parameters" in config and _digest(folder / file) != config["parameters"]:  # older models have none
        raise InputError(f"{folder}: {file} is damaged: it was changed after it was written")
    return Recogniser(found, settings, tokens, parameters, config["language"], config["about"], part)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Settings that contradict their file are refused before anything is made of them.

Shapes = Mapping[str, tuple[int, ...]]
SMALL = 65_536  # a number that any settings may have, however small the model


def _shapes_in(file: Path) -> Shapes:
    """The tensors of a file by its header, which the library has compared with the file's length."""
    check_file(file)
    with safe_open(file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
        for name, one in slices.items():
            if one.get_dtype() != "F32":
                raise InputError(f"{file}: {name!r} is {one.get_dtype()}, expected float32")
        return {name: tuple(one.get_shape()) for name, one in slices.items()}


def _check_size(settings: Mapping[str, Any], layers: int, held: Shapes, *, where: Path) -> None:
    """Refuse settings that speak of more layers than there are tensors, or of more numbers than the tensors have."""
    if layers > len(held):
        raise InputError(f"{where}: its settings have {layers:,} layers, and its file {len(held):,} tensors")
    numbers = sum(map(math.prod, held.values()))
    for name, value in _numbers(settings, "settings"):
        if not math.isfinite(value):
            raise InputError(f"{where}: {name}={value}, expected a finite number")
        if isinstance(value, int) and abs(value) > max(numbers, SMALL):
            raise InputError(f"{where}: {name}={value:,}, and its file has {numbers:,} numbers in all")


def _numbers(value: object, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _numbers(inside, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _numbers(inside, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def _merged_shapes(trained: Shapes, frozen: Shapes) -> Shapes:
    """The shapes of `Frozen.merged`, whose products of low rank may be far larger than what they are made of."""
    whole = {name: shape for name, shape in frozen.items() if not name.endswith(".lora_a")}
    for name, shape in trained.items():
        if not name.endswith((".lora_a", ".lora_b")):
            whole[name] = shape
    for name in trained:
        if not name.endswith(".lora_b"):
            continue
        matrix = name.removesuffix("lora_b") + "weight"
        a, b = {**frozen, **trained}.get(low_rank_names(matrix)[0], ()), trained[name]
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or frozen.get(matrix) != (b[0], a[1]):
            raise InputError(f"{name!r} is no correction of low rank of {matrix!r}: a model of another architecture")
    return whole


def _read_part(folder: Path, config: Mapping[str, Any]) -> TrainedPart | None:
    """What was trained of the model in `folder`; None where that is all of it."""
    if (part := config.get("part")) is None:
        return None
    scale = float(part["scale"])
    if not math.isfinite(scale):
        raise InputError(f"{folder}: part.scale={scale}, expected a finite number")
    return TrainedPart(load_file(folder / PART), scale, str(part["frozen"]))


def _read_fixed(folder: Path) -> dict[str, Tensor]:
    with safe_open(_frozen_of(folder), framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if name.endswith(".lora_a")}  # noqa: SIM118


def _frozen_of(folder: Path) -> Path:
    """What the run of the part in `folder` has not trained."""
    run = folder.resolve().parent.parent  # RUN/checkpoints/step-000750
    if not (run / FROZEN).exists():
        raise InputError(
            f"{folder}: a part of a model, and no {FROZEN} where its run would be ({run}); "
            "`sottovoce export RUN --merged` writes a whole model"
        )
    return run / FROZEN


def _put_together(folder: Path, part: TrainedPart) -> dict[str, Tensor]:
    """The whole model: a part, and what its run has not trained."""
    frozen = _frozen_of(folder)
    if _digest(frozen) != part.frozen_digest:
        raise InputError(f"{frozen} is not what the part in {folder} was trained with")
    return Frozen(load_file(frozen), part.scale).merged(part.trained)


def check_parameters(parameters: Parameters, expected: Shapes, *, where: str) -> None:
    """Refuse parameters that belong to another architecture, whose shapes are not those `expected`."""
    check_shapes({name: tuple(tensor.shape) for name, tensor in parameters.items()}, expected, where=where)


def check_shapes(found: Shapes, expected: Shapes, *, where: str) -> None:
    """Refuse the parameters of another architecture."""
    for name, shape in expected.items():
        if name not in found:
            raise InputError(f"{where}: parameter {name!r} is missing: a model of another architecture")
        if found[name] != shape:
            raise InputError(f"{where}: parameter {name!r} has shape {list(found[name])}, expected {list(shape)}")
    if unknown := sorted(found.keys() - expected.keys()):
        raise InputError(f"{where}: unknown parameter {unknown[0]!r}: a model of another architecture")


def adapt_parameters(
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


def sketch_recogniser(
    family: Family[Any, Any], settings: Any, tokens: Tokens, *, language: str, seed: Recogniser | None = None
) -> Recogniser:
    """A recogniser whose tensors have shapes and no values; refuses a `seed` that `adapt_parameters` would refuse."""
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
        new = family.transfer.token_tensors if seed.tokens.digest != tokens.digest else frozenset()
        kept = {name: p for name, p in seed.parameters.items() if name not in new}
    else:
        inherited = family.transfer.inherited(seed.settings, settings)
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
    names = start.family.transfer.inherited(seed.settings, start.settings)
    taken, whole = (sum(p.numel() for n, p in start.parameters.items() if n in of) for of in (names, start.parameters))
    unused = sum(p.numel() for name, p in seed.parameters.items() if name not in names)
    return (
        f"{taken:,} of {whole:,} parameters are those of a model of family={seed.family.name}, whose other {unused:,} "
        "are left behind; the rest is new"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = parse_json(read_file(folder / CONFIG))
        architecture = config["architecture"]
        absent = {"language", "settings", "tokens", "about"} - config.keys()
    except (OSError, ParseError, KeyError, TypeError, AttributeError) as error:
        if not (folder / CONFIG).exists() and (inside := list_folders_holding(folder, f"model/{CONFIG}")):
            raise InputError(f"no model at {folder}, which holds runs: expected one of {inside}") from None
        raise InputError(f"no model at {folder}: expected a readable {CONFIG} ({error})") from None
    if not isinstance(architecture, str):
        raise InputError(f"{folder}: architecture={architecture!r}, expected the name of a model family")
    if (rate := config.get("sample_rate", SAMPLE_RATE)) != SAMPLE_RATE:
        raise InputError(f"{folder}: a model for sample_rate={rate}, expected {SAMPLE_RATE}, the stores' rate")
    if absent:
        raise InputError(f"{folder}: {CONFIG} has no {', '.join(sorted(absent))}")
    for name, kind in {"language": str, "tokens": str, "settings": dict, "about": dict}.items():
        if not isinstance(config[name], kind):
            expected = "names and values" if kind is dict else "a text"
            raise InputError(f"{folder}: {name}={quote(config[name])}, expected {expected}")
    return config


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
