"""Kills at every named point: the same command again ends as if nothing had happened, and nothing and nobody is left.

PYTHONPATH=benchmarks python -m faulty.kills [N]
"""

import json
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import yaml

from faulty.cases import Outcome, Tally
from faulty.fork_server import Ended, ForkServer, fork_server
from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.store import Store
from sottovoce.training.ledger_check import check_ledger

MODEL = {"size": "tiny", "dropout": 0.1, "layer_drop": 0.2}
CENTRAL: dict[str, Any] = {
    "about": "tones",
    "data": {"store": "tones"},
    "model": MODEL,
    "central": {
        "steps": 4,
        "batch_seconds": 4,
        "optimiser": {"name": "lars"},
        "schedule": {"name": "constant", "lr": 0.5},
        "evaluate_every": 2,
        "checkpoint_every": 1,
        "log_every": 1,
    },
}
# With everything on that a run must remember. The noise is large because accounting for little noise takes seconds.
FEDERATED: dict[str, Any] = {
    "about": "tones, federated",
    "data": {"store": "tones"},
    "model": MODEL,
    "federation": {
        "steps": 4,
        "cohort_size": 2,
        "local": {"batch_seconds": 2, "lr": 0.1, "local_steps": 1},
        "server": {
            "optimiser": {"name": "lamb"},
            "schedule": {"name": "constant", "lr": 0.01},
            "ema": 0.5,
        },
        "privacy": {
            "clip_bound": 0.01,
            "noise_multiplier": 8.0,
            "delta": 1e-3,
            "adaptive": {"target_quantile": 0.5, "count_noise_std": 10.0},
        },
        "evaluate_every": 4,
        "checkpoint_every": 2,
    },
}
STEPS = 4
_TIMES = {"seconds", "audio_seconds_per_second", "waited_for_data_seconds", "memory_mib"}
# What another run of the same would call otherwise.
_RANDOM = re.compile(r"(?<=data-)[0-9a-f]{12}|(?<=events\.out\.).*")


@dataclass(frozen=True)
class Kind:
    """A command, given in a folder of its own, and what it comes to there: the same with and without a kill.

    `between` looks at the folder after the kill, `after` at all that both processes went through: a line says what is
    wrong.
    """

    name: str
    command: Sequence[object]
    result: Callable[[Path], Any]
    between: Callable[[Path], str] = lambda _: ""
    after: Callable[[Path, Sequence[str]], str] = lambda _folder, _points: ""
    prepared: Path | None = None


def campaign(tally: Tally, *, kills: int | None, seed: int) -> None:
    """Kill each kind of command at all of its points, or at an even sample of `kills` points over all kinds."""
    with tempfile.TemporaryDirectory(prefix="faults-") as place, fork_server() as server:
        kinds = _kinds(Path(place).resolve(), server)
        for number, kind in enumerate(kinds):
            folder = _fresh(kind, Path(place).resolve() / "whole")
            whole = server.run(kind.command, folder=folder)
            assert whole.code == 0, whole.output
            share = None if kills is None else kills * (number + 1) // len(kinds) - kills * number // len(kinds)
            expected = _state(kind, folder)
            for point in _sample(dict.fromkeys(whole.points), share, seed=seed, name=kind.name):
                outcome, words = _killed(kind, point, expected, server, _fresh(kind, Path(place).resolve() / "killed"))
                tally.add(f"kills of {kind.name}", outcome, words=f"at {point}: {words}")


def _killed(kind: Kind, point: str, expected: Any, server: ForkServer, folder: Path) -> tuple[Outcome, str]:
    first = server.run(kind.command, folder=folder, kill_at=point)
    # Where a run's own process was killed, the suite's says so in a line.
    if (bad := _bad_end(first, allowed=(-signal.SIGKILL, 2))) is not None:
        return bad, first.output
    if point not in first.points:
        return Outcome.SILENT_LOSS, "the run took another way than before"
    if words := kind.between(folder):
        return Outcome.SILENT_LOSS, words
    second = server.run(kind.command, folder=folder)
    if (bad := _bad_end(second, allowed=(0, 2))) is not None:
        return bad, second.output
    if second.code == 2:
        return Outcome.CLEAN_ERROR, second.output
    if words := _difference(_state(kind, folder), expected):
        return Outcome.SILENT_LOSS, words
    if words := kind.after(folder, (*first.points, *second.points)):
        return Outcome.SILENT_LOSS, words
    return Outcome.UNHARMED, ""


def _bad_end(ended: Ended, *, allowed: Sequence[int]) -> Outcome | None:
    if ended.code is None:
        return Outcome.HANG
    if ended.traceback:
        return Outcome.TRACEBACK
    return None if ended.code in allowed else Outcome.SILENT_LOSS


def _sample(points: Sequence[str] | dict[str, None], count: int | None, *, seed: int, name: str) -> list[str]:
    """`count` of them, as far apart as can be."""
    found = list(points)
    if count is None or count >= len(found):
        return found
    offset = stream(seed, "kills", name).random()
    return [found[int((number + offset) * len(found) / count)] for number in range(count)]


def _fresh(kind: Kind, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    if kind.prepared is None:
        folder.mkdir()
    else:
        shutil.copytree(kind.prepared, folder)
    return folder


# What a command has come to.


def _state(kind: Kind, folder: Path) -> dict[str, Any]:
    files = sorted({_RANDOM.sub("*", str(path.relative_to(folder))) for path in folder.rglob("*")})
    return {"files": files, "result": kind.result(folder)}


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    left = sorted(set(found["files"]) ^ set(expected["files"]))
    if left:
        return f"left over or missing: {', '.join(left)}"
    return "" if found["result"] == expected["result"] else "another result"


def _run_result(run: Path) -> dict[str, Any]:
    """All but the times it took."""
    lines = {
        name: [
            {key: value for key, value in json.loads(line).items() if key not in _TIMES}
            for line in (run / name).read_text().splitlines()
        ]
        for name in ("metrics.jsonl", "diagnostics.jsonl")
        if (run / name).exists()
    }
    ledger = (run / "ledger.jsonl").read_bytes() if (run / "ledger.jsonl").exists() else None
    model = (run / "model/model.safetensors").read_bytes()
    return {**lines, "ledger": ledger, "model": model, "results": json.loads((run / "results.json").read_text())}


def _every_attempt_is_charged(run: Path, points: Sequence[str]) -> str:
    try:
        report = check_ledger(run).report
    except InputError as problem:
        return str(problem)
    noised = sum(point.startswith("before Plan.add_noise") for point in points)
    charged = sum(point.startswith("after Ledger.intend") for point in points)
    if not noised <= charged <= report.attempts:
        return f"noise was drawn {noised} times, {charged} charges were given out and {report.attempts} written"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    if report.committed_step != STEPS - 1 or steps != [*range(STEPS + 1)]:
        return f"steps {steps}, the last commit is of {report.committed_step}"
    return ""


def _kinds(place: Path, server: ForkServer) -> list[Kind]:
    """The five kinds of command, with the speech and the recipes that they need below `place`."""
    base = place / "base"
    (base / "clips").mkdir(parents=True)
    table = _speak(base, range(15))
    few = base / "few.tsv"
    few.write_text("".join(table.read_text().splitlines(keepends=True)[:7]))
    for manifest, store in ((table, base / "stores/tones"), (few, base / "old/made")):
        made = server.run(["prepare", "tsv", manifest, "--split-column", "split", "--out", store], folder=base)
        assert made.code == 0, made.output
    old, new = Store(base / "old/made").digest, Store(base / "stores/tones").digest
    secure = {**FEDERATED, "federation": {**FEDERATED["federation"]}}
    secure["federation"]["privacy"] = {**FEDERATED["federation"]["privacy"], "mode": "secure"}
    for name, recipe in (("central", CENTRAL), ("federated", FEDERATED), ("secure", secure)):
        (base / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    runs = {name: {"recipe": str(base / f"{name}.yaml")} for name in ("central", "federated")}
    (base / "suite.yaml").write_text(yaml.safe_dump({"about": "two runs", "runs": runs}))

    def run(recipe: str, *more: object) -> list[object]:
        return ["run", base / f"{recipe}.yaml", "--stores", base / "stores", "--out", "run", *more, "--device", "cpu"]

    def old_or_new(folder: Path) -> str:
        digest = Store(folder / "made").digest
        return "" if digest in (old, new) else f"a store of digest {digest}, neither the old nor the new"

    return [
        Kind(
            "prepare",
            ["prepare", "tsv", table, "--split-column", "split", "--out", "made", "--workers", 2],
            result=lambda folder: Store(folder / "made").digest,
            between=old_or_new,
            prepared=base / "old",
        ),
        Kind("a central run", run("central", "--resume"), result=lambda folder: _run_result(folder / "run")),
        Kind("a federated run", run("federated", "--resume"), result=lambda folder: _run_result(folder / "run")),
        Kind(
            "a secure run",
            run("secure", "--resume"),
            result=lambda _: None,  # drawn anew after each kill
            after=lambda folder, points: _every_attempt_is_charged(folder / "run", points),
        ),
        Kind(
            "a suite, two at once",
            run("suite", "--at-once", 2),
            result=lambda folder: [_run_result(folder / "run" / name) for name in runs],
        ),
    ]


def _speak(base: Path, people: range) -> Path:
    """Speakers who say tones for letters, and the table of what they say."""
    rows = ["client_id\tpath\tsentence\tsplit"]
    seconds = np.arange(SAMPLE_RATE // 5) / SAMPLE_RATE
    for person in people:
        rng = stream(1, "speaker", person)
        for clip in range(2):
            text = "".join(rng.choice(list("abcde"), size=2))
            tones = [np.sin(2 * np.pi * (200 + 180 * (ord(letter) - 97)) * seconds) for letter in text]
            loudness = 0.2 + 0.005 * person + 0.002 * clip  # no two clips are the same samples
            soundfile.write(base / f"clips/{person}-{clip}.wav", loudness * np.concatenate(tones), SAMPLE_RATE)
            split = ("train", "train", "train", "dev", "test")[person % 5]
            rows.append(f"s{person:02}\tclips/{person}-{clip}.wav\t{text}\t{split}")
    table = base / "train.tsv"
    table.write_text("\n".join(rows) + "\n")
    return table


if __name__ == "__main__":
    found = Tally()
    campaign(found, kills=int(sys.argv[1]) if len(sys.argv) > 1 else None, seed=1)
    print(json.dumps(found.as_json(), indent=2), *found.bad, sep="\n")
    sys.exit(bool(found.bad))
