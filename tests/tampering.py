"""A run folder, tampered with by somebody who knows how it is made: chains and seals are recomputed to fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sottovoce.base.digests import file_digest
from sottovoce.base.files import add_digest
from sottovoce.privacy.chain import read_chain, seal
from sottovoce.training.recorded_files import digest_final_files

Record = dict[str, Any]
GENESIS = "0" * 64


def read(path: Path) -> Record:
    return dict(json.loads(path.read_text()))


def write(path: Path, content: Record) -> None:
    path.write_text(json.dumps(content))


def edit(path: Path, change: Callable[[Record], object], *, with_seal: bool = False) -> None:
    """Change a JSON file in place; `with_seal`, so that its own digest fits again."""
    content = read(path)
    change(content)
    if with_seal:
        content.pop("seal", None)
        content = add_digest(content)
    write(path, content)


def rechain(folder: Path, change: Callable[[Record], Record | None] = lambda record: record) -> None:
    """Write a ledger anew with every record changed (None takes it away), and fit all that knows its heads to it.

    What it says of recipe and results is worked out anew, too (but of an excerpt of them): nothing in the folder tells.
    """
    path = folder / "ledger.jsonl"
    lines, heads, marks = list[bytes](), list[str](), list[int]()
    for old in read_chain(path).records:
        record = change(json.loads(json.dumps(old)))
        if record is not None and "recipe" in record:
            record["recipe"] = file_digest(folder / "config.yaml")
        if record is not None and record["kind"] == "results":
            _fit(folder, heads, [*marks, len(heads)])
            results = read(folder / "results.json")
            if "excerpt" not in results:
                record["files"] = digest_final_files(folder, results)
        if record is not None:
            line, digest = seal(record, after=heads[-1] if heads else GENESIS)
            lines.append(line)
            heads.append(digest)
        marks.append(len(heads))
    path.write_bytes(b"".join(lines))
    _fit(folder, heads, marks)


def _fit(folder: Path, heads: list[str], marks: list[int]) -> None:
    """Everything that knows a length and a head: `marks` is how many lines there are now for so many before."""

    def fitted(known: Record) -> None:
        known["length"] = marks[min(known["length"], len(marks)) - 1]
        known["head"] = heads[known["length"] - 1]

    for state in folder.glob("checkpoints/step-*/state.json"):
        if (known := read(state)["ledger"])["head"] not in heads and known["length"] <= len(marks):
            edit(state, lambda content: fitted(content["ledger"]), with_seal=True)
    results = folder / "results.json"
    if results.exists() and read(results)["privacy"]["head"] not in heads:
        edit(results, lambda content: fitted(content["privacy"]))


def older(record: Record) -> Record | None:
    """As ledgers were before they had digests of models and files."""
    for name in ("model", "recipe", "signer"):
        record.pop(name, None)
    return None if record["kind"] == "results" else record
