"""A run folder belongs to one run: the same recipe on the same data."""

import re
from pathlib import Path

import pytest

from sottovoce.base.errors import InputError
from sottovoce.training.run_folder import describe_environment, open_run

INPUTS = {"data.store digest": "1", "number of processes": 1}


def test_a_store_made_anew_is_noticed(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", config="a: 1\n", inputs=INPUTS, resume=False):
        pass
    with open_run(tmp_path / "run", config="a: 1\n", inputs=INPUTS, resume=True):
        pass
    changed = INPUTS | {"data.store digest": "2"}
    with (
        pytest.raises(InputError, match=r"data\.store digest was 1 when the run began and is 2 now"),
        open_run(tmp_path / "run", config="a: 1\n", inputs=changed, resume=True),
    ):
        pass


def test_a_run_that_failed_before_it_began_is_in_nobodys_way(tmp_path: Path) -> None:
    """Neither of the same command nor of another; one that has begun is."""
    for number in (1, 1, 2):
        with open_run(tmp_path / "run", config=f"a: {number}\n", inputs=INPUTS | {"b": number}, resume=False) as run:
            (run.path / "population.json").touch()
    assert (tmp_path / "run/config.yaml").read_text() == "a: 2\n"
    with open_run(tmp_path / "run", config="a: 2\n", inputs=INPUTS | {"b": 2}, resume=True) as run:
        run.metrics.add({"step": 0})
    for number, problem in ((2, "holds this run already: --resume goes on"), (1, "belongs to another recipe")):
        with (
            pytest.raises(InputError, match=problem),
            open_run(tmp_path / "run", config=f"a: {number}\n", inputs=INPUTS | {"b": number}, resume=False),
        ):
            pass
    assert (tmp_path / "run/config.yaml").read_text() == "a: 2\n"


def test_a_folder_in_use_is_not_taken_as_new(tmp_path: Path) -> None:
    with (
        open_run(tmp_path / "run", config="a: 1\n", inputs=INPUTS, resume=False) as run,
        pytest.raises(InputError, match="in use by another process"),
        open_run(tmp_path / "run", config="a: 2\n", inputs=INPUTS, resume=False),
    ):
        pass
    assert (run.path / "config.yaml").read_text() == "a: 1\n"


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        open_run(tmp_path / "run", config="a: 1\n", inputs=INPUTS, resume=False),
        pytest.raises(InputError, match="in use by another process"),
        open_run(tmp_path / "run", config="a: 1\n", inputs=INPUTS, resume=True),
    ):
        pass


def test_a_folder_with_other_things_is_left_alone_but_a_torn_beginning_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/.lock").touch()  # killed before its recipe was written
    with open_run(tmp_path / "torn", config="a: 1\n", inputs=INPUTS, resume=True):
        pass
    (tmp_path / "letters.txt").touch()
    with (
        pytest.raises(InputError, match="holds other things"),
        open_run(tmp_path, config="a: 1\n", inputs=INPUTS, resume=True),
    ):
        pass


def test_what_was_measured_later_is_forgotten(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", config="a: 1\n", inputs=INPUTS, resume=False) as run:
        for step in (1, 2, 3):
            run.metrics.add({"step": step})
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "lo')  # torn by a kill
        run.metrics.cut(after_step=2)
        assert run.metrics.read() == [{"step": 1}, {"step": 2}]


def test_the_commit_is_that_of_the_sources_or_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOTTOVOCE_COMMIT", raising=False)
    found = describe_environment()["commit"]
    assert found is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", found)
    monkeypatch.setenv("SOTTOVOCE_COMMIT", "0123abc")
    assert describe_environment()["commit"] == "0123abc"


@pytest.mark.parametrize(
    "line", ["{}", "[1]", '{"step": "x"}', "[" * 100_000, '{"step": ' + "7" * 5_000 + "}", "\udcff"]
)
def test_a_damaged_line_among_others_is_told_and_a_torn_one_at_the_end_is_cut(tmp_path: Path, line: str) -> None:
    with open_run(tmp_path / "run", config="a: 1\n", inputs=INPUTS, resume=False) as run:
        metrics = run.path / "metrics.jsonl"
        metrics.write_bytes(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'.encode(errors="surrogateescape"))
        with pytest.raises(InputError, match=r"metrics\.jsonl line 2 is damaged"):
            run.metrics.cut(after_step=3)
        metrics.write_bytes(f'{{"step": 1}}\n{line}'.encode(errors="surrogateescape"))
        run.metrics.cut(after_step=3)
        assert run.metrics.read() == [{"step": 1}]


def test_damaged_inputs_are_told(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", config="a: 1\n", inputs=INPUTS, resume=False):
        pass
    (tmp_path / "run/inputs.json").write_text("[" * 100_000)
    with (
        pytest.raises(InputError, match=r"inputs\.json is damaged \(nested too deeply\)"),
        open_run(tmp_path / "run", config="a: 1\n", inputs=INPUTS, resume=True),
    ):
        pass
