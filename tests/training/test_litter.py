"""What a run was writing when it was killed is gone when the same command has ended."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.points import Watch
from tests.training.forked import FORKS, run_command


def run(arguments: list[str], dies_at: str | None) -> None:
    """`sottovoce run …`, killed when it is about to rename what it has written to a file called `dies_at`."""
    whole = os.replace

    def replace(written: Any, place: Any) -> None:
        if Path(place).name == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(written, place)

    os.replace = replace  # type: ignore[assignment]
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.exit(run_command(["run", *arguments], Watch(None)))


@pytest.mark.parametrize("file", ["config.yaml", "environment.json", "engine.json", "metrics.jsonl", "report.html"])
def test_nothing_is_left_of_a_kill_between_writing_and_renaming(
    federated_recipe: Path, short_stores: Path, tmp_path: Path, file: str
) -> None:
    out = tmp_path / "out"
    arguments = [str(federated_recipe), "federation.steps=2", "--stores", str(short_stores), "--out", str(out)]
    codes = []
    # Metrics are written anew only on going on from a checkpoint that is there.
    for dies_at in ("report.html", file, None) if file == "metrics.jsonl" else (file, None):
        process = FORKS.Process(target=run, args=([*arguments, "--resume"], dies_at))
        process.start()
        process.join()
        codes.append(process.exitcode)
        if dies_at == "report.html" and file == "metrics.jsonl":
            (out / "results.json").unlink()
        elif dies_at is not None:
            assert [*out.glob(f".{file}.*")], "the kill came in time"
    assert codes[-2:] == [-signal.SIGKILL, 0]
    assert [path.name for path in out.rglob(".*")] == [".lock"]
