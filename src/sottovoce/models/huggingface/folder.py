"""The folder of a pretrained model, in Hugging Face's layout: what is read of it, and what is refused.

    config.json  model.safetensors (or several, with an index)  preprocessor_config.json  tokenizer files

Only safetensors are read, and code from a folder is never run. Every file that is read has a digest, which goes into
the inputs of a run.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_file
from sottovoce.base.importing import import_extra
from sottovoce.base.parsing import ParseError, parse_json, parse_yaml
from sottovoce.models.hub import CARD

MODELS = "SOTTOVOCE_MODELS"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
GENERATION, ADAPTER = "generation_config.json", "adapter_config.json"
_FRONT_MATTER = re.compile(r"---\r?\n(.*?)\n---\s", re.DOTALL)
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "normalizer.json", "tokenizer.model", "spiece.model"),
)
# What a hub is asked for: no pickles, no code, nothing in folders below.
PATTERNS = (CONFIG, WEIGHTS, INDEX, "model-?????-of-?????.safetensors", *PROCESSORS, GENERATION, *TOKENIZER, CARD)

# Kinds of models by `model_type`, and the class that is trained.
CTC = {
    "wav2vec2": "Wav2Vec2ForCTC",
    "hubert": "HubertForCTC",
    "wavlm": "WavLMForCTC",
    "wav2vec2-bert": "Wav2Vec2BertForCTC",
    "parakeet_ctc": "ParakeetForCTC",
}
SEQ2SEQ = {
    "whisper": "WhisperForConditionalGeneration",
    "moonshine": "MoonshineForConditionalGeneration",
}
CLASSES = {**CTC, **SEQ2SEQ}
# Encoders without an output layer, as they come from pre-training: for `head: ctc`.
ENCODERS = {
    "wav2vec2": ("Wav2Vec2Model", "Wav2Vec2ForPreTraining"),
    "hubert": ("HubertModel",),
    "wavlm": ("WavLMModel",),
    "wav2vec2-bert": ("Wav2Vec2BertModel",),
}


@dataclass(frozen=True)
class PretrainedFolder:
    """What a folder says of its model. `digests` are SHA-256 of every file that is read, by name.

    `name` and `revision` (a commit) are the hub's where it comes from there; else `name` is the folder's.
    """

    name: str
    revision: str | None
    path: Path
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    generation: Mapping[str, Any]
    digests: tuple[tuple[str, str], ...]

    @property
    def writes_text(self) -> bool:
        """Whether it has an output layer of its own."""
        return _architecture(self.config) == CLASSES[self.config["model_type"]]

    @property
    def weight_files(self) -> list[Path]:
        return [self.path / name for name, _ in self.digests if name.endswith(".safetensors")]


def find_folder(name: str, *, revision: str | None = None, download: bool = True) -> Path:
    """The folder called `name`: a path, a name in $SOTTOVOCE_MODELS, or a name on the hub, where there is network."""
    found = _find_here(name)
    if found is not None:
        if revision is not None:
            raise InputError(f"model: revision={revision}: {found} is a folder, which has no revisions; expected none")
        return found
    where = f"no folder {' or '.join(map(str, _places(name)))} with a {CONFIG}"
    if not os.environ.get(MODELS):
        where += f", and ${MODELS} is not set"
    if Path(name).is_absolute() or name.count("/") != 1:
        raise InputError(f"model: from={name}: {where}")
    try:
        return _download(name, revision, download)
    except InputError:
        raise
    except Exception as error:  # of many kinds, by network and library
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")[:200]
        raise InputError(f"model: from={name}: {where}, and the hub did not give it ({first})") from None


def read_license(name: str, *, digests: tuple[tuple[str, str], ...]) -> str | None:
    """The license that the card of the model called `name` states; None where it does not, or another model is here."""
    try:
        path = find_folder(name, download=False)
        found = _FRONT_MATTER.match(read_file(path / CARD).decode())
        stated = parse_yaml(found[1]) if found and _sha256(path / CONFIG) == dict(digests)[CONFIG] else {}
    except (InputError, OSError, ParseError, UnicodeDecodeError):
        return None
    license = stated.get("license") if isinstance(stated, dict) else None
    return license if isinstance(license, str) else None


def _places(name: str) -> list[Path]:
    models = os.environ.get(MODELS)
    return [Path(name), *([Path(models) / name] if models else [])]


def _find_here(name: str) -> Path | None:
    return next((place for place in _places(name) if (place / CONFIG).is_file()), None)


@cache  # a name is one commit for a whole process, and is asked for once
def _download(name: str, revision: str | None, download: bool) -> Path:
    """The folder of a commit in the hub's own cache, which is called by the commit."""
    hub = import_extra("huggingface_hub", extra="hf", called=f"model: from={name}")
    wanted = {"allow_patterns": list(PATTERNS), "local_files_only": not download}
    return Path(hub.snapshot_download(name, revision=revision, **wanted))


def open_folder(name: str, *, revision: str | None = None) -> PretrainedFolder:
    """Read all but the weights; refuses a folder that cannot be used."""
    path = find_folder(name, revision=revision)
    present = {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in path.iterdir() if file.is_file()}
    is_here = _find_here(name) is not None
    called, commit = (path.resolve().name, None) if is_here else (name, path.name)
    return _read_folder(path, tuple(sorted(present.items())), name=called, revision=commit)


@cache
def _read_folder(
    path: Path, present: tuple[tuple[str, tuple[int, int]], ...], *, name: str, revision: str | None
) -> PretrainedFolder:
    """`present` are names, sizes and times of its files: a folder that was changed is read anew."""
    config = _read(path / CONFIG)
    kind = config.get("model_type")
    if "auto_map" in config:
        raise InputError(f"{path}: its {CONFIG} has auto_map, code of its own, which is never run")
    if kind not in CLASSES:
        raise InputError(f"{path}: model_type={kind!r}, expected one of {', '.join(CLASSES)}")
    if (found := _architecture(config)) not in (known := (CLASSES[kind], *ENCODERS.get(kind, ()))):
        raise InputError(f"{path}: architectures={found}, expected {' or '.join(known)}")
    if config.get("quantization_config") is not None:
        raise InputError(f"{path}: quantised weights cannot be trained; expected float32, float16 or bfloat16")
    names = {file for file, _ in present}
    if ADAPTER in names:  # transformers would add it to the weights, and no digest would know
        raise InputError(f"{path}: it holds {ADAPTER}, corrections for a base model; expected the base model alone")
    processor_file = next((name for name in PROCESSORS if name in names), None)
    if processor_file is None:
        raise InputError(f"{path}: no {' or '.join(PROCESSORS)}, which say what features the model takes")
    processor = _read(path / processor_file)
    processor = processor.get("feature_extractor", processor)
    weights = [WEIGHTS] if WEIGHTS in names else _indexed(path, names)
    read = [CONFIG, *weights, processor_file, *(name for name in (GENERATION, *TOKENIZER) if name in names)]
    generation = _read(path / GENERATION) if GENERATION in names else {}
    digests = tuple(sorted((name, _sha256(path / name)) for name in read))
    return PretrainedFolder(name, revision, path, config, processor, generation, digests)


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else CLASSES[config["model_type"]]


def _indexed(path: Path, names: set[str]) -> list[str]:
    if INDEX not in names:
        pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")))
        why = f" ({pickled[0]} may run code when it is opened)" if pickled else ""
        raise InputError(f"{path}: no {WEIGHTS}; only safetensors are read{why}")
    files = sorted(set(_read(path / INDEX).get("weight_map", {}).values()))
    if not files or (absent := [name for name in files if name not in names]):
        raise InputError(f"{path}: {INDEX} names {absent[0] if files else 'nothing'}, which is not there")
    return files


def _read(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_file(file))
    except (OSError, ParseError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}: expected names and values")
    return content


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def load_weights(folder: PretrainedFolder) -> dict[str, Tensor]:
    """All tensors of its files, as they are stored."""
    found: dict[str, Tensor] = {}
    for file in folder.weight_files:
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: cannot be read ({' '.join(str(error).split())})") from None
    return found


def as_json(content: Mapping[str, Any]) -> str:
    """One text for one content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))
