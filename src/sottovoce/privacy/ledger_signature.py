"""The signature of a ledger's head, in a file of its own beside it, which may be published with it.

RUN/ledger.signature.json    length and head of the ledger when it was signed, the signer's public key, the signature,
                             and at a run's end SHA-256 of the other files that its folder had then

A chain of hashes alone can be written anew by anybody. Under a signature it cannot, but by whoever has the key; and
that the key is the right one is for the reader to know, who has it from elsewhere.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_json, write_json
from sottovoce.base.signatures import PrivateKey, fingerprint, parse_public_key, public_line, sign, verified
from sottovoce.privacy.chain import Mark
from sottovoce.privacy.ledger_report import LedgerReport

SIGNATURE = "ledger.signature.json"
VERSION = 1
# What signs orders to nodes may sign ledgers, too: neither can be taken for the other.
_CONTEXT = b"sottovoce ledger head\n"


@dataclass(frozen=True)
class SignatureCheck:
    """Who has signed a ledger's head; `signer` is the fingerprint of their key, None where nobody has.

    `is_expected`: the reader has named that key. `length` is how many lines are signed; `files`, what else is.
    """

    signer: str | None = None
    is_expected: bool = False
    length: int = 0
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        if self.signer is None:
            return "unsigned: whoever can write the folder can have written all of it anew"
        vouched = "the key that was expected" if self.is_expected else "whose key that is, only --key can tell"
        return f"signed by {self.signer} ({vouched})"

    def as_json(self) -> dict[str, object]:
        if self.signer is None:
            return {"status": "unsigned"}
        return {"status": "signed", "signer": self.signer, "expected": self.is_expected, "length": self.length}


def write_signature(ledger: Path, mark: Mark, *, key: PrivateKey, files: Mapping[str, str] | None = None) -> None:
    """Sign `mark` of the ledger in the file `ledger`, and digests of `files` by name; in place of an earlier one."""
    said = {
        "version": VERSION,
        "length": mark.length,
        "head": mark.head,
        "files": dict(files or {}),
        "key": public_line(key.public_key()),
    }
    write_json(ledger.with_name(SIGNATURE), {**said, "signature": sign(key, _signed(said)).hex()})


def check_signature(report: LedgerReport, place: Path, *, expected: str | None = None) -> SignatureCheck:
    """Who has signed the ledger in the file `place`; `expected` is the fingerprint that it has to be.

    Raises InputError with "signature wrong" where it does not hold, or is missing though the ledger names its signer.
    """
    path = place.with_name(SIGNATURE)
    if not path.exists():
        if report.signer is not None:
            raise InputError(f"{path}: signature missing: the ledger says that it is signed by {report.signer}")
        if expected is not None:
            raise InputError(f"{place}: unsigned, expected a signature by {expected}")
        return SignatureCheck()
    said = read_json(path)
    try:
        signature = bytes.fromhex(said.pop("signature"))
        key = parse_public_key(said["key"])
        mark = Mark(int(said["length"]), str(said["head"]))
        files = {str(name): str(digest) for name, digest in dict(said["files"]).items()}
        is_known = said["version"] == VERSION
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise InputError(f"{path}: signature wrong: it cannot be read ({problem})") from None
    signer = fingerprint(key).hex()
    if not is_known or not verified(key, _signed(said), signature):
        raise InputError(f"{path}: signature wrong: it is not by the key that it names, {signer}")
    if not report.holds(mark):
        raise InputError(f"{path}: signature wrong: it is of another ledger, or of one that was written anew since")
    if mark.length < report.settled_length:
        raise InputError(
            f"{path}: signature wrong: it is of {mark.length} lines, and the ledger has commits or results after them; "
            "a run that was killed there signs them when it goes on"
        )
    if report.signer not in (None, signer):
        raise InputError(f"{path}: signature wrong: by {signer}, and the ledger says that {report.signer} signs it")
    if expected not in (None, signer):
        raise InputError(f"{path}: signed by {signer}, expected {expected}")
    return SignatureCheck(signer, expected is not None, mark.length, files)


def _signed(said: Mapping[str, Any]) -> bytes:
    return _CONTEXT + json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
