"""Processes that have found different things do not train together: all end with the line that says what differs.

Each process stands in a folder of its own, so that one path leads to something else in each of them, as on machines
that do not share their disks.
"""

import contextlib
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.points import Watch
from tests.ranks import in_processes
from tests.tones import pack_tones, rename
from tests.training.forked import run_command

from sottovoce.base.seeds import torch_stream
from sottovoce.data.text.tokens import CharacterTokens, save_tokens
from sottovoce.models.recogniser import create_recogniser, save_recogniser
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import named_settings

Ended = tuple[int, str]
LETTERS = "abcdefghijklmnopqrstuvwxyz' "


# In each of the processes.


def command(folders: list[Path], arguments: list[list[str]], before: Callable[[int], None] | None = None) -> Ended:
    """`sottovoce` with this process's `arguments`, in its folder: the exit code, and what it said of errors."""
    rank, said = int(os.environ["RANK"]), io.StringIO()
    os.chdir(folders[rank])
    if before is not None:
        before(rank)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = run_command(arguments[rank], Watch(None))
    return code, "".join(line for line in said.getvalue().splitlines(keepends=True) if "error" in line.lower())


def stop_in_the_first_round(_: int) -> None:
    from sottovoce.federated.ranks import ClientsOverRanks

    whole = ClientsOverRanks.take_part

    def take_part(*order: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        whole(*order, **named)

    ClientsOverRanks.take_part = take_part  # type: ignore[method-assign]


def another_torch(rank: int) -> None:
    if rank == 1:
        torch.__version__ = "1.0.0"  # type: ignore[attr-defined]


# What differs for the second of them.


@pytest.fixture
def folders(short_stores: Path, tmp_path: Path) -> list[Path]:
    """A folder for each of two processes: what lies in them is the same until a test changes it."""
    found = [tmp_path / "rank-0", tmp_path / "rank-1"]
    for folder in found:
        folder.mkdir()
        (folder / "stores").symlink_to(short_stores)
        save_tokens(CharacterTokens(LETTERS), folder / "tokens.json")
        write_model(folder / "seed", name="init")
    return found


def write_model(folder: Path, *, name: str) -> None:
    folder.mkdir(exist_ok=True)
    tokens = CharacterTokens(LETTERS)
    settings = named_settings("tiny", tokens=tokens.size + 1, dropout=0.1, layer_drop=0.2)
    save_recogniser(create_recogniser(FAMILY, settings, tokens, language="en", generator=torch_stream(1, name)), folder)


def with_store(folder: Path, **changed: Any) -> None:
    (folder / "stores").unlink()
    pack_tones(folder / "stores/tones", letters=(2, 3), utterances=2, **changed)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "one person has another name": (lambda folder: with_store(folder, change=rename("s05", "s99")), "data.store"),
    "one person is missing": (lambda folder: with_store(folder, people=range(14)), "data.store"),
    "another token set": (lambda folder: save_tokens(CharacterTokens(LETTERS[::-1]), folder / "tokens.json"), "tokens"),
    "another start model": (lambda folder: write_model(folder / "seed", name="another"), "start model"),
}
SHORT = ["federation.steps=2", "federation.evaluate_every=2"]


def run_arguments(recipe: Path, out: Path, *overrides: str) -> list[str]:
    return ["run", str(recipe), *overrides, "--out", str(out)]


def expect(ended: list[Ended], line: str, *, out: Path) -> None:
    """All processes end with the same line, and nothing of the run is there."""
    assert [code for code, _ in ended] == [2, 2]
    assert [said for _, said in ended] == [f"error: {line}\n"] * 2
    assert not out.exists()


@pytest.mark.parametrize("mode", ["seeded", "secure"])
def test_another_clip_bound(federated_recipe: Path, folders: list[Path], tmp_path: Path, mode: str) -> None:
    first = run_arguments(federated_recipe, tmp_path / "out", *SHORT, f"federation.privacy.mode={mode}")
    ended = in_processes(2, command, folders, [first, [*first, "federation.privacy.clip_bound=5"]])
    line = "rank 1's recipe differs from rank 0's: federation.privacy.clip_bound is 5.0, not 0.01"
    expect(ended, line, out=tmp_path / "out")


@pytest.mark.parametrize("change", CHANGES)
def test_other_data(federated_recipe: Path, folders: list[Path], tmp_path: Path, change: str) -> None:
    apply, what = CHANGES[change]
    apply(folders[1])
    start = {"tokens": "tokens.file=tokens.json", "start model": "federation.seed_model=seed"}.get(what)
    same = run_arguments(federated_recipe, tmp_path / "out", *SHORT, *([start] if start else []))
    ended = in_processes(2, command, folders, [same, same])
    expect(ended, f"rank 1's {what} differs from rank 0's", out=tmp_path / "out")


def test_another_version_of_the_code(federated_recipe: Path, folders: list[Path], tmp_path: Path) -> None:
    same = run_arguments(federated_recipe, tmp_path / "out", *SHORT)
    ended = in_processes(2, command, folders, [same, same], another_torch)
    line = f"""rank 1's code differs from rank 0's: torch is "1.0.0", not "{torch.__version__}\""""
    expect(ended, line, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ("one person has another name", "federation.privacy.mode=secure"),
        ("another start model", "federation.seed_model=seed"),
    ],
)
def test_they_compare_again_when_a_run_is_resumed(
    federated_recipe: Path, folders: list[Path], tmp_path: Path, change: str, setting: str
) -> None:
    out, (apply, what) = tmp_path / "out", CHANGES[change]
    same = run_arguments(federated_recipe, out, setting)
    begun = in_processes(2, command, folders, [same, same], stop_in_the_first_round)
    assert begun == [(130, ""), (0, "")]  # the first speaks for all
    before = (out / "ledger.jsonl").read_bytes()
    apply(folders[1])
    ended = in_processes(2, command, folders, [[*same, "--resume"]] * 2)
    assert ended == [(2, f"error: rank 1's {what} differs from rank 0's\n")] * 2
    assert (out / "ledger.jsonl").read_bytes() == before
    assert not (out / "results.json").exists()


@pytest.mark.parametrize("change", CHANGES)
def test_central_training_compares_too(recipe_file: Path, folders: list[Path], tmp_path: Path, change: str) -> None:
    apply, what = CHANGES[change]
    apply(folders[1])
    start = {"tokens": "tokens.file=tokens.json", "start model": "central.start_from=seed"}.get(what)
    same = run_arguments(recipe_file, tmp_path / "out", *([start] if start else []))
    ended = in_processes(2, command, folders, [same, same])
    expect(ended, f"rank 1's {what} differs from rank 0's", out=tmp_path / "out")


def test_central_training_goes_on_from_one_checkpoint(recipe_file: Path, folders: list[Path], tmp_path: Path) -> None:
    """Each process reads the run's checkpoints for itself."""
    out = ["run", str(recipe_file), "--out", "out"]
    assert in_processes(2, command, folders, [[*out, "central.steps=3"]] * 2) == [(0, ""), (0, "")]
    (folders[0] / "out/results.json").unlink()
    ended = in_processes(2, command, folders, [[*out, "central.steps=3", "--resume"]] * 2)
    assert ended == [(2, "error: rank 1's checkpoint differs from rank 0's: step is 0, not 3\n")] * 2


def test_whom_one_process_refuses_all_refuse(federated_recipe: Path, folders: list[Path], tmp_path: Path) -> None:
    """A store that is missing in one place, and a folder that only the first process opens."""
    same = run_arguments(federated_recipe, tmp_path / "out", *SHORT)
    (folders[1] / "stores").unlink()
    ended = in_processes(2, command, folders, [same, same])
    assert [code for code, _ in ended] == [2, 2]
    assert ended[0] == ended[1]
    assert ended[0][1].startswith("error: rank 1: no store at stores/tones")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/something").touch()
    ended = in_processes(2, command, [folders[0]] * 2, [same, same])
    assert ended == [(2, f"error: run folder {tmp_path / 'out'} holds other things: --out names another\n")] * 2
