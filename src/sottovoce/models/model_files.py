"""The files of a saved model, and digests of what they say: without torch, so that anybody can check them.

FOLDER/model.safetensors    or part.safetensors, where only a part of the model was trained
FOLDER/config.json          architecture, language, and what is known of its training
FOLDER/tokens.json          what it writes
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sottovoce.base.digests import content_digest, safetensors_digest
from sottovoce.base.errors import InputError
from sottovoce.base.files import check_digest, read_json

PARAMETERS, CONFIG, TOKENS = "model.safetensors", "config.json", "tokens.json"
PART, FROZEN = "part.safetensors", "frozen.safetensors"

_OF_FILE = ("seal", "parameters")  # of one way to write a config down
_SCORE = "dev_"  # how the model did on the dev set, which is found out after it is made


def description_digest(config: Mapping[str, Any]) -> str:
    """The digest of what a model's config says of it, but for its dev score: what is known before it is evaluated."""
    about = {name: value for name, value in config["about"].items() if not name.startswith(_SCORE)}
    return content_digest({name: value for name, value in config.items() if name not in _OF_FILE} | {"about": about})


def dev_scores(config: Mapping[str, Any]) -> dict[str, Any]:
    """The dev scores that a model's config names."""
    return {name: value for name, value in config["about"].items() if name.startswith(_SCORE)}


def locate_model(folder: Path) -> Path:
    """The folder of a model: this one, or the `model` of a run's folder."""
    return folder if (folder / CONFIG).exists() or not (folder / "model" / CONFIG).exists() else folder / "model"


def weights_file(config: Mapping[str, Any]) -> str:
    """Which file has what was trained."""
    return PARAMETERS if config.get("part") is None else PART


def read_model_config(folder: Path) -> dict[str, Any]:
    """The config of the model in `folder`, as it was written."""
    config = check_digest(read_json(folder / CONFIG), where=folder / CONFIG)
    if not isinstance(config.get("about"), dict):
        raise InputError(f"{folder / CONFIG} is damaged: it does not say how the model came to be")
    return config


def digest_model_files(folder: Path) -> dict[str, str]:
    """The digests of the model in `folder`, as a ledger's commits have them; of a part without what is frozen."""
    config = read_model_config(folder)
    return {
        "weights": safetensors_digest(folder / weights_file(config)),
        "description": description_digest(config),
        "tokens": content_digest(read_json(folder / TOKENS)),
    }
