"""What a tracker should have of a run, by its folder; and a folder that a run could have begun."""

import json
from pathlib import Path
from typing import Any

from sottovoce.training.run_folder import RunFolder
from sottovoce.training.trackers import flatten_numbers


def begin_folder(path: Path) -> RunFolder:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("about: tones\nseed: 1\n")
    return RunFolder(path)


def numbers(folder: Path, *, diagnostics: bool = False) -> dict[int, dict[str, float]]:
    """By step."""
    found = {record["step"]: dict(flatten_numbers(record)) for record in _lines(folder / "metrics.jsonl")}
    for record in _lines(folder / "diagnostics.jsonl") if diagnostics else []:
        own = flatten_numbers({name: value for name, value in record.items() if name != "step"})
        found[record["step"]] |= {f"diagnostics/{name}": value for name, value in own}
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
