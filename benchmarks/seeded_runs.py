"""Seeded runs of a source tree and their digests: before and after a refactor they must agree to the bit.

    PYTHONPATH=OLD/src python benchmarks/seeded_runs.py make FOLDER [--demo]   # ten smokes of each paper, or the demo
    PYTHONPATH=NEW/src python benchmarks/seeded_runs.py make OTHER [--demo]
    python benchmarks/seeded_runs.py compare FOLDER OTHER

Compared are the weights of every model, and metrics, diagnostics and results without clocks and without the head of the
ledger, whose header holds the whole recipe. One thread, so that bits do not depend on the machine's cores.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PAPERS = ("pelikan2025", "gao2022", "ramesh2023")
SMOKES = 10  # of each paper, evenly spread over its recipes
CLOCKS = ("seconds", "time", "speed", "memory", "head")


def choose_recipes() -> list[str]:
    from sottovoce.config import recipe_names

    chosen: list[str] = []
    for paper in PAPERS:
        names = [name for name in recipe_names() if name.startswith(f"{paper}/") and name.count("/") == 2]
        chosen += [names[number * len(names) // SMOKES] for number in range(SMOKES)]
    return chosen


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_clocks(own) for key, own in sorted(value.items()) if not any(c in key for c in CLOCKS)}
    return [without_clocks(own) for own in value] if isinstance(value, list) else value


def digest_runs(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or {"stores", "checkpoints"} & {*path.parts}:
            continue
        if path.suffix == ".safetensors":
            content = path.read_bytes()
        elif path.suffix == ".jsonl" and path.stem in ("metrics", "diagnostics"):
            content = json.dumps([without_clocks(json.loads(line)) for line in path.read_text().splitlines()]).encode()
        elif path.name == "results.json":
            content = json.dumps(without_clocks(json.loads(path.read_text()))).encode()
        else:
            continue
        found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def make_runs(out: Path, *, is_demo: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    digests: dict[str, dict[str, str]] = {}
    for name in ["demo"] if is_demo else choose_recipes():
        folder = out / name.replace("/", "-")
        where = ["--yes", "--runs", folder, "--stores", folder / "stores"] if is_demo else ["--smoke", "--out", folder]
        command = [sys.executable, "-m", "sottovoce", "run", name, *map(str, where)]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        digests[name] = digest_runs(folder)
        print(f"{name}: {len(digests[name])} files", flush=True)
        (out / "digests.json").write_text(json.dumps(digests, indent=1))


def compare_runs(one: Path, other: Path) -> int:
    """How many files differ."""
    first, second = (json.loads((folder / "digests.json").read_text()) for folder in (one, other))
    pairs = {(name, file) for runs in (first, second) for name, files in runs.items() for file in files}
    differing = sorted(p for p in pairs if first.get(p[0], {}).get(p[1]) != second.get(p[0], {}).get(p[1]))
    for name, file in differing:
        print(f"differs: {name}: {file}")
    print(f"{len(pairs) - len(differing)} of {len(pairs)} files of {len(first)} runs are equal")
    return len(differing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "compare"])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--demo", action="store_true")
    asked = parser.parse_args()
    if asked.what == "compare":
        return min(compare_runs(*asked.folders), 1)
    make_runs(asked.folders[0].resolve(), is_demo=asked.demo)
    return 0


if __name__ == "__main__":
    sys.exit(main())
