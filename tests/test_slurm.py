"""The scripts under `deploy/slurm`, with stand-ins for SLURM's commands: what is submitted, and what a signal does.

SLURM itself is not here. docs/guides/clusters.md says what was tried with it.
"""

import os
import shlex
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests.guides import DOCS
from tests.test_deploy import parsed

SLURM = DOCS.parent / "deploy" / "slurm"
SCRIPTS = sorted(SLURM.iterdir())
JOBS = [path for path in SCRIPTS if path.suffix == ".sbatch"]

# What they are called with is kept, a line a call. A run says when it is ready, and may wait to be told to stop.
SBATCH = """#!/usr/bin/env bash
echo "sbatch $*" >>"$CALLS"
wc -l <"$CALLS"
echo "$SOTTOVOCE_LABELS" >>"$LABELS"
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$CALLS"
if [ "$1" = show ]; then printf "one\\ntwo\\n"; fi
"""
RUN = f"""#!{sys.executable} -S
import os, signal, sys
with open(os.environ["CALLS"], "a") as calls:
    print("sottovoce", *sys.argv[1:], file=calls)
with open(os.environ["PID"], "w") as file:
    print(os.getpid(), file=file)
if sys.argv[-1] == "--list":
    sys.exit(print("first", "second", sep="\\n"))
code = int(os.environ["CODE"])
signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
with open(os.environ["READY"], "w") as ready:
    ready.write("ready")
while "WAITS" in os.environ:
    signal.pause()
sys.exit(code)
"""
SRUN = """#!/usr/bin/env bash
exec "${@:2}"
"""
SCANCEL = """#!/usr/bin/env bash
echo "scancel $*" >>"$CALLS"
kill -TERM "$(cat "$PID")"
"""
STANDING_IN = {
    "sbatch": SBATCH,
    "scontrol": SCONTROL,
    "sottovoce": RUN,
    "srun": SRUN,
    "scancel": SCANCEL,
    "torchrun": RUN,
}


@pytest.fixture
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the stand-ins on the path, and what jobs find in their environment."""
    (tmp_path / "bin").mkdir()
    for name, content in STANDING_IN.items():
        path = tmp_path / "bin" / name
        path.write_text(content)
        path.chmod(0o755)
    os.mkfifo(tmp_path / "ready")
    monkeypatch.setenv("READY", str(tmp_path / "ready"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PID", str(tmp_path / "pid"))
    monkeypatch.setenv("LABELS", str(tmp_path / "labels"))
    monkeypatch.setenv("SLURM_JOB_ID", "70")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "one,two")
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("CODE", "0")
    for name in ("SLURM_ARRAY_TASK_ID", "JOB_OPTIONS", "AT_ONCE", "PROCESSES", "SOTTOVOCE_LABELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def calls(around: Path) -> list[list[str]]:
    return [shlex.split(line) for line in (around / "calls").read_text().splitlines()]


def run_job(path: Path, around: Path, *words: str, sent: signal.Signals | None = None) -> int:
    """The exit code of a job that gets a signal once its run is ready."""
    with subprocess.Popen(["bash", path, *words]) as job:
        with (around / "ready").open() as ready:
            assert ready.read() == "ready"
        if sent is not None:
            job.send_signal(sent)
        return job.wait()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_read_by_bash(path: Path) -> None:
    assert path.suffix in (".sbatch", ".sh")
    subprocess.run(["bash", "-n", path], check=True)


def test_the_page_names_all_of_them() -> None:
    page = (DOCS / "guides" / "clusters.md").read_text(encoding="utf-8")
    assert all(f"(../../deploy/slurm/{path.name})" in page for path in SCRIPTS)


def test_a_suite_is_submitted_as_its_parents_an_array_and_a_report(
    around: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_OPTIONS", "--gpus=1 --time=60")
    monkeypatch.setenv("AT_ONCE", "4")
    said = subprocess.run(
        ["bash", SLURM / "suite.sh", "demo-clipping", "seed=2", "--runs", "out"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    listed, parents, tasks, report = calls(around)
    assert said.stdout == "parents 2, 2 runs 3, report 4\n"
    assert parsed(listed[1:])["labels"] is True
    for call in (parents, tasks, report):
        assert {"--gpus=1", "--time=60", "--parsable"} <= set(call)
        _, *words = call[call.index(str(SLURM / "run.sbatch")) :]
        given = parsed(["run", *words])
        assert (given["recipe"], given["overrides"], given["runs"]) == ("demo-clipping", ("seed=2",), "out")
        assert given["parents_only"] == (call is parents)
    assert {"--array=0-1%4", "--dependency=afterok:2"} <= set(tasks)
    assert "--dependency=afterok:3" in report
    assert (around / "labels").read_text() == "first\nsecond\n" * 3


def test_a_task_of_the_array_makes_the_run_of_its_number(around: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SOTTOVOCE_LABELS", "first\nsecond")
    assert run_job(SLURM / "run.sbatch", around, "demo-clipping") == 0
    ((_, *words),) = calls(around)
    given = parsed(words)
    assert (given["only"], given["resume"], given["yes"]) == ("second", True, True)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("sent", "code", "is_queued"),
    [
        (signal.SIGUSR1, 130, True),  # the time limit is near, and the run has saved
        (signal.SIGTERM, 130, False),  # scancel
        (signal.SIGUSR1, 0, False),  # it had just ended
        (None, 2, False),
    ],
)
def test_a_job_is_queued_again_where_its_time_limit_stopped_it(
    around: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    sent: signal.Signals | None,
    code: int,
    is_queued: bool,
) -> None:
    monkeypatch.setenv("CODE", str(code))
    if sent is not None:
        monkeypatch.setenv("WAITS", "yes")
    assert run_job(path, around, "demo-clipping/global", sent=sent) == code
    assert (["scontrol", "requeue", "70"] in calls(around)) == is_queued


def test_a_job_that_was_stopped_before_its_first_round_is_queued_again(
    around: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE", "143")
    monkeypatch.setenv("WAITS", "yes")
    assert run_job(SLURM / "run.sbatch", around, "demo", sent=signal.SIGUSR1) == 143
    assert ["scontrol", "requeue", "70"] in calls(around)


def test_torchrun_finds_the_others_through_the_first_machine(around: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCESSES", "2")
    assert run_job(SLURM / "torchrun.sbatch", around, "mine.yaml", "--runs", "shared") == 0
    (words,) = [call for call in calls(around) if call[0] == "sottovoce" or "-m" in call]
    given = dict(pairwise(words))
    assert (given["--nnodes"], given["--nproc-per-node"], given["--rdzv-endpoint"]) == ("2", "2", "one:20070")
    run = parsed(words[words.index("-m") + 2 :])
    assert (run["recipe"], run["runs"], run["resume"]) == ("mine.yaml", "shared", True)
