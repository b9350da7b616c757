"""What a recipe may say of a pretrained model, and what is known of the model afterwards."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from sottovoce.base.errors import InputError
from sottovoce.models.huggingface.folder import CTC, PretrainedFolder, as_json, open_folder
from sottovoce.models.huggingface.pins import open_pinned, parse_pin
from sottovoce.models.trainable import parse_part

NAME = "huggingface"
# Parts that are meant without their names.
PARTS = ("all", "head", "norms")


@dataclass(frozen=True, kw_only=True)
class Options:
    """A pretrained model and the part of it that is trained.

    Args:
        source: `from` in recipes: a folder, a name in $SOTTOVOCE_MODELS, a name on the hub, or NAME@sha256:DIGEST
            (`pins`), which only the digest of its files decides.
        revision: of a model on the hub.
        train: `lora(r=8, targets=q_proj|v_proj)`, `head`, `norms`, `all`, or names as in `federation.trainable`.
        head: `ctc` puts a new output layer for this run's own tokens on the model's encoder; None takes its own.
        silence_seconds: of silence before and after every utterance; single words are recognised better with it.
        dropout: whether the model's own dropout and LayerDrop are used in training, drawn for each client.
        language: of the text, for models that are told (Whisper).
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(serialize_by_alias=True, extra="forbid")

    family: str = NAME
    source: Annotated[str, Field(alias="from")]
    revision: str | None = None
    train: str = "lora(r=8)"
    head: Literal["ctc"] | None = None
    silence_seconds: Annotated[float, Field(ge=0, le=5)] = 0.0
    dropout: bool = False
    language: str | None = None

    def __post_init__(self) -> None:
        if self.train not in PARTS:
            parse_part(self.train)

    @property
    def folder(self) -> PretrainedFolder:
        if (pin := parse_pin(self.source)) is not None:
            return open_pinned(pin)
        return open_folder(self.source, revision=self.revision)

    def settings(self, *, tokens: int) -> "Settings":
        folder = self.folder
        remember_folder(folder)
        if self.head is None and not folder.writes_text:
            raise InputError(f"model: from={self.source}: an encoder without an output layer; expected head: ctc")
        if self.head is None and tokens != (own := _outputs(folder) + (folder.config["model_type"] not in CTC)):
            tokens = own  # a recipe is checked before its tokens are there
        return Settings(
            tokens=tokens,
            source=folder.name,
            digests=folder.digests,
            config=as_json(folder.config),
            processor=as_json(folder.processor),
            generation=as_json(folder.generation),
            train=self.train,
            head=self.head,
            silence_seconds=self.silence_seconds,
            dropout=self.dropout,
            language=self.language,
        )


def _outputs(folder: PretrainedFolder) -> int:
    size = folder.config.get("vocab_size")
    if not isinstance(size, int):
        raise InputError(f"{folder.path}: vocab_size={size!r} in its config.json, expected how many outputs it has")
    return size


@dataclass(frozen=True)
class Settings:
    """A pretrained model without its weights: its own files as texts, and their digests.

    `tokens` counts a blank, which of a model with a decoder nothing stands for.
    """

    tokens: int
    source: str
    digests: tuple[tuple[str, str], ...]
    config: str
    processor: str
    generation: str
    train: str
    head: str | None = None
    silence_seconds: float = 0.0
    dropout: bool = False
    language: str | None = None

    @cached_property
    def of_model(self) -> Mapping[str, Any]:
        """Its config.json."""
        content: Mapping[str, Any] = json.loads(self.config)
        return content

    @cached_property
    def of_processor(self) -> Mapping[str, Any]:
        content: Mapping[str, Any] = json.loads(self.processor)
        return content

    @cached_property
    def of_generation(self) -> Mapping[str, Any]:
        content: Mapping[str, Any] = json.loads(self.generation)
        return content

    @property
    def kind(self) -> str:
        """Its `model_type`."""
        return str(self.of_model["model_type"])

    @property
    def is_ctc(self) -> bool:
        return self.head == "ctc" or self.kind in CTC

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.digests, self.tokens, self.train, self.head, self.silence_seconds, self.dropout))


# Where weights lie is no part of a model, whose folder may be published: folders that were opened, by their files.
_folders: dict[tuple[tuple[str, str], ...], PretrainedFolder] = {}


def remember_folder(folder: PretrainedFolder) -> None:
    _folders[folder.digests] = folder


def describe_origin(settings: Settings) -> dict[str, str]:
    """The files that a model was made from: a name, a revision where it has one, and SHA-256 of every file."""
    folder = _folders.get(settings.digests)
    revision = {} if folder is None or folder.revision is None else {"revision": folder.revision}
    return {"name": settings.source, **revision, **{f"sha256 of {name}": own for name, own in settings.digests}}


def find_weights(settings: Settings) -> PretrainedFolder:
    """The folder of a pretrained model whose files have these digests; refused where it is not here, or another."""
    if settings.digests not in _folders:
        remember_folder(open_folder(settings.source))
    if (found := _folders.get(settings.digests)) is None:
        raise InputError(f"model: {settings.source} is here with other files than those that the model was made from")
    return found
