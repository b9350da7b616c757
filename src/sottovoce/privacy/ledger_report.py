"""What a sound ledger says, for people and machines; and the signature of its head.

RUN/ledger.signature.json    length and head of the ledger when it was signed, the signer's public key, the signature,
                             and at a run's end SHA-256 of the other files that its folder had then

Anybody can rewrite a chain of hashes from its start. Under a signature only the holder of the key can; that the key is
the right one is for the reader to know. The file may be published with the ledger.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_json, write_json
from sottovoce.base.signatures import SigningKey, fingerprint, parse_verifying_key, public_line, sign, verified
from sottovoce.privacy.accounting import Epsilon, epsilon
from sottovoce.privacy.chain import Mark
from sottovoce.privacy.events import Event
from sottovoce.privacy.plugins import format_plugin_condition

EXHAUSTED_CLIENTS = "who has nothing left of a time line is drawn like all others, and sends zero"


@dataclass(frozen=True, kw_only=True)
class LedgerReport:
    """A sound ledger. `commits` and the fingerprints of `parameters` before them are by step.

    `results` is the last record of them, where nothing was released since. `settled_length` counts the lines up to the
    last commit or results, which name the `signer`. `promised_budget` is the `epsilon_budget` of the first
    release, None where it was changed since: a run keeps to the new one, but whoever chose it may have seen releases.
    """

    path: Path
    torn_bytes: int
    hashes: tuple[str, ...]
    mark: Mark
    header: Mapping[str, Any]
    epsilon_budget: float | None
    steps: int
    attempts: int
    committed_step: int | None
    spent: Event
    measured: int = 0  # how often clients' word error rate was
    measured_attempts: int = 0
    commits: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    parameters: Mapping[int, str] = field(default_factory=dict)
    results: Mapping[str, Any] | None = None
    released: Mark | None = None  # the mark without results at its end, as results themselves know it
    settled_length: int = 0
    signer: str | None = None
    promised_budget: float | None = None

    @cached_property
    def epsilon(self) -> Epsilon:
        """ε of everything charged, by both accountants; computed anew from the events."""
        return epsilon(self.spent, self.header["delta"])

    @property
    def outside(self) -> str | None:
        """The condition that plug-ins put on the guarantee; None without any, or without a guarantee."""
        return None if self.header["event"].get("reason") else format_plugin_condition(self.header.get("plan") or {})

    def holds(self, mark: Mark) -> bool:
        """Whether the ledger once stood at `mark`."""
        return 1 <= mark.length <= len(self.hashes) and self.hashes[mark.length - 1] == mark.head

    def as_json(self) -> dict[str, object]:
        return {
            "path": str(self.path),
            "valid": True,
            **{name: self.header[name] for name in ("run", "mode", "event", "delta")},
            "epsilon_pld": self.epsilon.pld,
            "epsilon_pld_reason": self.epsilon.pld_reason,
            "epsilon_rdp": json_number(self.epsilon.rdp),
            "rdp_order": self.epsilon.rdp_order,
            "epsilon_budget": self.epsilon_budget,
            "steps": self.steps,
            "attempts": self.attempts,
            "committed_step": self.committed_step,
            **({} if "accepted" not in self.header else {"accepted": self.header["accepted"]}),
            **({} if "client_wer" not in self.header else self._measured_json()),
            **({} if self.outside is None else {"outside": self.outside}),
            "length": self.mark.length,
            "head": self.mark.head,
            "torn_bytes": self.torn_bytes,
        }

    def _measured_json(self) -> dict[str, object]:
        counts = {"measured": self.measured, "attempts": self.measured_attempts}
        return {"client_wer": {**self.header["client_wer"], **counts}}

    def table(self) -> Table:
        """The same for the terminal."""
        event, account = self.header["event"], self.epsilon
        release = "secure: cohorts and noise were drawn once and cannot be repeated"
        by_pld = f"{account.pld:.4g}" if account.pld is not None else f"none: {account.pld_reason}"
        repeats = self.attempts - self.steps
        mode = self.header["mode"]
        rows = {
            "run": self.header["run"],
            "mode": release if mode == "secure" else f"{mode}: a simulation, not a release",
            "each step": _format_event(event),
            "steps": f"{self.steps} charged, {0 if self.committed_step is None else self.committed_step + 1} committed",
            "attempts": f"{self.attempts}, {repeats} of them repeated after a crash" if repeats else self.attempts,
            "ε (PLD)": by_pld,
            "ε (RDP)": f"{account.rdp:.4g}" if math.isfinite(account.rdp) else "no guarantee",
            "δ": f"{self.header['delta']:g}",
            "budget": "none" if self.epsilon_budget is None else f"ε ≤ {self.epsilon_budget:g} by RDP",
            "last line": f"torn, {self.torn_bytes} bytes to be removed on resume" if self.torn_bytes else "whole",
            "chain": f"sound, {self.mark.length} lines",
        }
        if (accepted := self.header.get("accepted")) is not None:
            rows["accepted"] = f"at most {accepted['attempts']:,} attempts at rounds, repeated ones included"
        if self.header["plan"].get("time_line") == "zero":
            rows["time lines"] = EXHAUSTED_CLIENTS
        if (client_wer := self.header.get("client_wer")) is not None:
            again = self.measured_attempts - self.measured
            rows["WER of clients"] = (
                f"measured {self.measured} times{f', and {again} times again after a crash' if again else ''}, of at "
                f"most {client_wer['words']:g} words a person: {_format_event(client_wer['event'])}; ε covers it"
            )
        table = Table(title=str(self.path), show_header=False)
        for name, value in rows.items():
            table.add_row(name, escape(str(value)))
        return table


def _format_event(event: Mapping[str, Any]) -> str:
    return event.get("reason") or ", ".join(
        _format_field(name, value) for name, value in event.items() if name != "kind"
    )


def _format_field(name: str, value: Any) -> str:
    if isinstance(value, Mapping):  # a strategy: its kind and its numbers
        return " ".join(
            [str(value["kind"]), *(f"{part}={numbers}" for part, numbers in value.items() if part != "kind")]
        )
    return f"{name}={value}"


def json_number(value: float) -> float | None:
    """Infinity is not JSON: an ε without a guarantee, or a clip bound that bounds nothing."""
    return value if math.isfinite(value) else None


SIGNATURE = "ledger.signature.json"
VERSION = 1
# The same key may sign orders to nodes: neither signature can be taken for the other.
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
        vouched = "the key that was expected" if self.is_expected else "--key checks whose key that is"
        return f"signed by {self.signer} ({vouched})"

    def as_json(self) -> dict[str, object]:
        if self.signer is None:
            return {"status": "unsigned"}
        return {"status": "signed", "signer": self.signer, "expected": self.is_expected, "length": self.length}


def write_ledger_signature(
    ledger: Path, mark: Mark, *, key: SigningKey, files: Mapping[str, str] | None = None
) -> None:
    """Sign `mark` of the ledger in the file `ledger`, and digests of `files` by name; in place of an earlier one."""
    said = {
        "version": VERSION,
        "length": mark.length,
        "head": mark.head,
        "files": dict(files or {}),
        "key": public_line(key.public_key()),
    }
    write_json(ledger.with_name(SIGNATURE), {**said, "signature": sign(key, _signed(said)).hex()})


def check_ledger_signature(report: LedgerReport, place: Path, *, expected: str | None = None) -> SignatureCheck:
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
        key = parse_verifying_key(said["key"])
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
