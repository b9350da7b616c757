"""Pretrained models known by what is in their files: `NAME@sha256:DIGEST`, as a server names them to its clients.

The name is for people to read. The digest alone decides what is opened: folders that were given, and those in
$SOTTOVOCE_MODELS, are looked through for files that have it, and nothing is fetched. It is the `content_digest` of the
names and SHA-256 of all files that are read.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sottovoce.base.digests import content_digest
from sottovoce.base.errors import InputError
from sottovoce.base.parsing import quote
from sottovoce.models.base_files import BaseModelName
from sottovoce.models.huggingface.folder import CONFIG, MODELS, PretrainedFolder, open_folder

if TYPE_CHECKING:
    from sottovoce.models.huggingface.settings import Options

MARK = "@sha256:"
LONGEST_NAME = 100
_PIN = re.compile(rf"([A-Za-z0-9][\w.-]{{0,{LONGEST_NAME - 1}}}){MARK}([0-9a-f]{{64}})", re.ASCII)

# Folders that people have given, by the digest of their files.
_given: dict[str, Path] = {}


@dataclass(frozen=True)
class Pin:
    """A pretrained model by the digest of its files, and what people call it."""

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name}{MARK}{self.digest}"


def parse_pin(source: str) -> Pin | None:
    """What `NAME@sha256:DIGEST` says; None where `source` is something else.

    >>> parse_pin("tiny@sha256:" + 64 * "a").name, parse_pin("models/tiny")
    ('tiny', None)
    """
    found = _PIN.fullmatch(source)
    return None if found is None else Pin(found[1], found[2])


def pin_folder(folder: PretrainedFolder, *, name: str) -> Pin:
    """The pin of `folder`, which people call by the last part of `name`."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", Path(name).resolve().name).lstrip("_.-")
    return Pin(plain[:LONGEST_NAME] or "model", folder_digest(folder))


def folder_digest(folder: PretrainedFolder) -> str:
    return content_digest(folder.digests)


def open_pinned(pin: Pin) -> PretrainedFolder:
    """The folder whose files have the digest of `pin`, wherever it lies; refused where there is none."""
    if (given := _given.get(pin.digest)) is not None and folder_digest(found := open_folder(str(given))) == pin.digest:
        return found
    for found in _list_models(pin.name):
        if folder_digest(found) == pin.digest:
            return found
    models = os.environ.get(MODELS)
    where = f"in ${MODELS} ({models})" if models else f"here (${MODELS} is not set)"
    raise InputError(
        f"model: made from the base model {pin.name}, and no folder with its files (sha256 {pin.digest}) is {where}; "
        "get it from where its publisher has it, and give `join` its --base FOLDER"
    )


def _list_models(name: str) -> Iterator[PretrainedFolder]:
    """The usable folders of $SOTTOVOCE_MODELS, the one called `name` first: hashing the others takes time."""
    models = os.environ.get(MODELS)
    if not models or not Path(models).is_dir():
        return
    places = [place for place in Path(models).resolve().iterdir() if (place / CONFIG).is_file()]
    for place in sorted(places, key=lambda one: (one.name != name, one.name)):
        try:
            yield open_folder(str(place))
        except InputError:  # not of use for any recipe
            continue


# What the family's record has of it.


def pin_options(options: "Options") -> "Options":
    """The same model by the digest of its files, and not by where it lies here; what is pinned stays as it is."""
    if parse_pin(options.source) is not None:
        return options
    return replace(options, source=str(pin_folder(options.folder, name=options.source)), revision=None)


def describe_base_model(options: "Options") -> BaseModelName:
    pin = parse_pin(options.source)
    if pin is None or options.revision is not None:
        raise InputError(
            f"model: from={quote(options.source)}: a client opens no folder that a server names, and fetches nothing; "
            f"expected NAME{MARK}DIGEST and no revision"
        )
    return BaseModelName(pin.name, pin.digest, options.train)


def find_base_model(options: "Options", folder: Path | None) -> None:
    """Refuse unless the files of pinned `options` are here: in `folder`, where one is given."""
    pin = parse_pin(options.source)
    assert pin is not None, "options that came from elsewhere were checked before"
    if folder is not None:
        if (found := folder_digest(open_folder(str(folder.resolve())))) != pin.digest:
            raise InputError(
                f"{folder}: its files have sha256 {found}, and those of the base model {pin.name} {pin.digest}: "
                "another model, or another version of it"
            )
        _given[pin.digest] = folder.resolve()
    open_pinned(pin)
