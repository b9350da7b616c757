"""What a sound ledger says, for people and machines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from sottovoce.privacy.accounting import Epsilon, epsilon
from sottovoce.privacy.chain import Mark
from sottovoce.privacy.events import Event
from sottovoce.privacy.outside import rests_on

DRAWN_WHEN_DRY = "who has nothing left of a time line is drawn like all others, and sends zero"


@dataclass(frozen=True, kw_only=True)
class LedgerReport:
    """What a sound ledger says, for people and machines. `hashes` are those of its lines.

    `commits` are by step, and so are the fingerprints of `parameters` before each; `results` is the last record of
    them, where nothing was released since. `settled_length` counts the lines up to the last of both, whose `signer` it
    names.
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

    @cached_property
    def epsilon(self) -> Epsilon:
        """ε of everything charged, by both accountants; computed anew from the events."""
        return epsilon(self.spent, self.header["delta"])

    @property
    def outside(self) -> str | None:
        """What the guarantee rests on that is not part of this package; None without one, or without a guarantee."""
        return None if self.header["event"].get("reason") else rests_on(self.header.get("plan") or {})

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
        told = dict(self.header["client_wer"])
        return {"client_wer": {**told, "measured": self.measured, "attempts": self.measured_attempts}}

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
            "each step": _told(event),
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
            rows["time lines"] = DRAWN_WHEN_DRY
        if (told := self.header.get("client_wer")) is not None:
            again = self.measured_attempts - self.measured
            rows["WER of clients"] = (
                f"measured {self.measured} times{f', and {again} times again after a crash' if again else ''}, of at "
                f"most {told['words']:g} words a person: {_told(told['event'])}; ε covers it"
            )
        table = Table(title=str(self.path), show_header=False)
        for name, value in rows.items():
            table.add_row(name, escape(str(value)))
        return table


def _told(event: Mapping[str, Any]) -> str:
    return event.get("reason") or ", ".join(_told_part(name, value) for name, value in event.items() if name != "kind")


def _told_part(name: str, value: Any) -> str:
    if isinstance(value, Mapping):  # a strategy: its kind and its numbers
        return " ".join(
            [str(value["kind"]), *(f"{part}={numbers}" for part, numbers in value.items() if part != "kind")]
        )
    return f"{name}={value}"


def json_number(value: float) -> float | None:
    """Infinity is not JSON: an ε without a guarantee, or a clip bound that bounds nothing."""
    return value if math.isfinite(value) else None
