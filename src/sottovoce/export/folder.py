"""An exported folder: its files beside the model's, their digests, and a signature of all of them. Without torch.

FOLDER/privacy.json              what is stated of the model's privacy (`privacy_file`)
       ledger.jsonl              the run's ledger; ledger.signature.json, where the run has signed it
       recipe.yaml               the run's recipe
       audit.json                an audit, where one travels along
       privacy.signature.json    SHA-256 of every other file, the signer's public key, and the signature
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sottovoce.base.digests import file_digest
from sottovoce.base.errors import InputError
from sottovoce.base.files import check_file, read_json, write_json
from sottovoce.base.signatures import SigningKey, fingerprint, parse_verifying_key, public_line, sign, verified

PRIVACY, RECIPE, AUDIT, EXPORT_SIGNATURE = "privacy.json", "recipe.yaml", "audit.json", "privacy.signature.json"
SIGNATURE_VERSION = 1
# What git and the hub's client leave beside a copy. Nothing loads a model from there.
_OF_COPIES = (".git", ".gitattributes", ".gitignore", ".cache")
# The same key may sign orders or ledgers: no signature can be taken for another.
_CONTEXT = b"sottovoce export\n"


def copy_file(source: Path, target: Path) -> None:
    """The bytes of a small file, without its times or owner."""
    check_file(source)
    shutil.copyfile(source, target)


def digest_export(folder: Path, *, but: tuple[str, ...]) -> dict[str, str]:
    """SHA-256 of every file of the folder by its path, `but` some; read piece by piece."""
    names = [name for name in list_export(folder) if name not in but]
    return {name: digest_of(folder, name) for name in names}


def list_export(folder: Path) -> list[str]:
    """The paths of all files in the folder, in order; not of what git or the hub's client left there.

    A link to a folder is one, too: loaders follow it.
    """
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.as_posix() for path in found if path.parts[0] not in _OF_COPIES)


def digest_of(folder: Path, name: str) -> str:
    check_file(folder / name)
    try:
        return file_digest(folder / name)
    except OSError as error:
        raise InputError(f"{folder / name} cannot be read ({error.strerror})") from None


def compare_files(folder: Path, listed: Mapping[str, str], found: Mapping[str, str], *, by: str) -> None:
    """Refuse, by its name, a file that has changed, is missing, or is not `listed`."""
    for name in sorted({*listed, *found}):
        if name not in found:
            raise InputError(f"{folder / name} is missing: {by} lists it")
        if name not in listed:
            raise InputError(f"{folder / name} is none of the files that {by} lists: it was added")
        if listed[name] != found[name]:
            raise InputError(f"{folder / name} is not the file that {by} lists: it was changed, or is another's")


@dataclass(frozen=True)
class ExportSigner:
    """Who has signed a folder: the fingerprint of their key, None where nobody has.

    `is_expected`: the reader has named that key. `of_ledger` is who has signed the ledger alone.
    """

    signer: str | None = None
    is_expected: bool = False
    of_ledger: str | None = None

    @property
    def words(self) -> str:
        if self.signer is not None:
            return f"signed by {self.signer}, {'the key that you named' if self.is_expected else 'whom you must know'}"
        if self.of_ledger is not None:
            return f"of the ledger alone, by {self.of_ledger}, whom you must know; the rest of this folder has none"
        return (
            "none: whoever can write this folder can have written all of it anew, consistently, and no recomputation "
            "sees that"
        )

    def as_json(self) -> dict[str, object]:
        if self.signer is None:
            return {"status": "unsigned", "ledger": self.of_ledger}
        return {"status": "signed", "signer": self.signer, "expected": self.is_expected, "ledger": self.of_ledger}


def sign_export(folder: Path, *, key: SigningKey, files: Mapping[str, str]) -> None:
    """Sign the digests of all files of the folder."""
    said = {"version": SIGNATURE_VERSION, "files": dict(files), "key": public_line(key.public_key())}
    write_json(folder / EXPORT_SIGNATURE, {**said, "signature": sign(key, _signed(said)).hex()})


def check_export_signature(folder: Path, files: Mapping[str, str], *, expected: str | None) -> ExportSigner:
    """Who has signed the folder, whose `files` have these digests; `expected` is the fingerprint it has to be."""
    path = folder / EXPORT_SIGNATURE
    if not path.exists():
        if expected is not None:
            raise InputError(f"{folder}: unsigned, expected a signature by {expected}")
        return ExportSigner()
    said = read_json(path, is_unique=True)
    try:
        signature = bytes.fromhex(said.pop("signature"))
        key = parse_verifying_key(said["key"])
        listed = {str(name): str(digest) for name, digest in dict(said["files"]).items()}
        is_known = said["version"] == SIGNATURE_VERSION
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise InputError(f"{path}: signature wrong: it cannot be read ({problem})") from None
    signer = fingerprint(key).hex()
    if not is_known or not verified(key, _signed(said), signature):
        raise InputError(f"{path}: signature wrong: it is not by the key that it names, {signer}")
    if expected not in (None, signer):
        raise InputError(f"{path}: signed by {signer}, expected {expected}")
    compare_files(folder, listed, files, by=EXPORT_SIGNATURE)
    return ExportSigner(signer, expected is not None)


def _signed(said: Mapping[str, Any]) -> bytes:
    return _CONTEXT + json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
