"""What is kept of a run is small, and says what the run said."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import results as program
from findings.keeping import FILES, PERSONAL, PROBE, keep, readable, sparse, thinned
from findings.kept import Kept
from tests.benchmarks.rendering import rendered

from sottovoce.base.errors import InputError
from sottovoce.privacy.ledger import verify
from sottovoce.report.archives import open_path
from sottovoce.report.curves import read_series
from sottovoce.report.layers import norm_profiles
from sottovoce.report.records import read_run
from sottovoce.training.ledger_check import check_ledger


def test_a_kept_run_says_the_same(run: Path, results: Path) -> None:
    whole, small = read_run("run", run), read_run("run", results / "suite/dim")
    assert {path.name for path in small.folder.iterdir()} == set(FILES) - {PROBE, PERSONAL}, "which nobody asked for"
    assert small.config == whole.config
    assert small.ledger is not None
    assert small.ledger.report is not None
    assert small.ledger.report.mark == whole.ledger.report.mark  # type: ignore[union-attr]
    for mine, theirs in zip(read_series(small.metrics, "dev_wer"), read_series(whole.metrics, "dev_wer"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert len(small.diagnostics) == len(whole.diagnostics) == 8
    full = [n for n, record in enumerate(small.diagnostics) if "layers" in record]
    assert full[0] == 0
    assert full[-1] == 7
    some = [whole.diagnostics[n] for n in full]
    for mine, theirs in zip(
        norm_profiles(small.diagnostics, place=small.place)[0].rows(),
        norm_profiles(some, place=small.place)[0].rows(),
        strict=True,
    ):
        assert mine == (*theirs[:2], pytest.approx(theirs[2], rel=0.01))


def test_what_a_probe_said_is_kept_with_its_run(run: Path, tmp_path: Path) -> None:
    probed = Path(shutil.copytree(run, tmp_path / "run"))
    (probed / PROBE).write_text('{"speaker": {"accuracy": 0.5}}')
    keep(probed, tmp_path / "kept")
    assert (tmp_path / "kept" / PROBE).read_text() == '{"speaker": {"accuracy": 0.5}}'


def test_names_of_people_are_not_kept(run: Path, results: Path) -> None:
    def people(folder: Path) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())["test"]["test"]["per_speaker"]
        return found

    before, after = people(run), people(results / "suite/dim")
    assert [(p["wer"], p["words"]) for p in before] == [(p["wer"], p["words"]) for p in after]
    assert not {p["speaker"] for p in before} & {p["speaker"] for p in after}
    assert len({p["speaker"] for p in after}) == len(before)


def test_the_population_by_pld_is_no_larger_and_useful(results: Path) -> None:
    found = json.loads((results / "suite/dim/planned.json").read_text())
    assert found["pld"]["population_size"] <= found["rdp"]["population_size"]
    assert found["pld"]["epsilon_pld"] <= 8 < found["pld"]["epsilon_rdp"]


def test_in_brief_every_evaluation_is_kept_and_few_others() -> None:
    records = [{"step": n, "loss": 1.0, **({"dev_loss": 2.0} if n % 40 == 7 else {})} for n in range(1_000)]
    found = [record["step"] for record in sparse(records, others=10)]
    evaluated = [record["step"] for record in records if "dev_loss" in record]
    assert {*evaluated} <= {*found}
    assert len(found) == len(evaluated) + 10
    assert (found[0], found[-1]) == (0, 999)
    assert sparse(records[:3], others=10) == records[:3]
    assert sparse([]) == []


def test_thinning_keeps_every_record_and_few_layers() -> None:
    records = [{"step": n, "loss": n + 0.123456789, "layers": {"a": {"norm": 0.123456}}} for n in range(100)]
    few = thinned(records)
    assert [record["step"] for record in few] == list(range(100))
    assert [record["step"] for record in few if "layers" in record] == [0, 25, 50, 74, 99]
    assert few[0] == {"step": 0, "loss": 0.123457, "layers": {"a": {"norm": 0.123}}}
    assert len([r for r in thinned(records, rounds=2) if "layers" in r]) == 2
    assert not any("layers" in record for record in thinned(records, rounds=0))
    assert thinned([{"step": 0, "dev_wer": 0.5}]) == [{"step": 0, "dev_wer": 0.5}]


def test_a_run_kept_in_brief_can_be_shown_in_a_table_of_rates(run: Path, results: Path) -> None:
    keep(run, results / "suite/dim", brief=True)
    small = read_run("run", results / "suite/dim")
    assert not small.problems
    few = {"config.yaml", "inputs.json", "environment.json", "metrics.jsonl", "results.json"}
    assert {path.name for path in small.folder.iterdir()} == few
    assert "per_speaker" not in small.results["test"]["test"]
    assert "%" not in rendered(results, '{{ grid("suite", label="(d)(.+)", show="dev") }}')


def test_readable_is_the_same_json() -> None:
    content = {"a": [{"b": 1}, {"c": [None, "ü"]}], "d": {}, "e": 0.1, "f": {"g": {"h": []}}}
    assert json.loads(readable(content)) == content


def test_an_unfinished_run_is_left_out(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = Path(shutil.copytree(run.parent, tmp_path / "suite", symlinks=True))
    half = Path(shutil.copytree(suite / "dim", suite / "half", symlinks=True))
    (half / "results.json").unlink()
    program.keep_runs([suite], results=tmp_path / "results", suite=None, rounds=None, brief=False)
    assert Kept(tmp_path / "results", tmp_path).labels("suite") == ["dim"]
    assert "half is not finished" in capsys.readouterr().out


def test_a_run_joins_those_that_are_kept_or_takes_its_own_place(run: Path, tmp_path: Path) -> None:
    def keep_as(label: str, *, brief: bool = False) -> dict[str, bytes]:
        if not (folder := tmp_path / "other" / label).exists():
            shutil.copytree(run, folder, symlinks=True)
        program.keep_runs([folder], results=tmp_path / "results", suite="suite", rounds=None, brief=brief)
        inside = open_path(tmp_path / "results/suite.zip")
        return {path.relative_to(inside).as_posix(): path.read_bytes() for path in inside.glob("*/*")}

    first = keep_as("b")
    both = keep_as("a")
    assert both == {**first, **{name.replace("b/", "a/"): content for name, content in first.items()}}
    brief = keep_as("b", brief=True)
    assert {name for name in brief if name.startswith("a/")} == {name for name in both if name.startswith("a/")}
    assert len(brief) == len(both) - 5, "what is not kept in brief has gone"
    assert brief["b/config.yaml"] == (run / "config.yaml").read_bytes()
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["suite.zip"]


def test_nothing_is_kept_in_a_damaged_archive(run: Path, tmp_path: Path) -> None:
    (tmp_path / "suite.zip").write_bytes(b"PK, but no more")
    with pytest.raises(InputError, match=r"suite\.zip: cannot be unpacked"):
        program.keep_runs([run], results=tmp_path, suite=None, rounds=None, brief=False)
    assert (tmp_path / "suite.zip").read_bytes() == b"PK, but no more"


def test_a_kept_run_says_that_its_figures_are_an_excerpt(run: Path, results: Path) -> None:
    """Its ledger knows digests of what it was taken from, and not of what is kept: that is said."""
    kept = results / "suite/dim"
    assert not any("excerpt" in note for note in check_ledger(run).notes)
    notes = check_ledger(kept).notes
    assert any(note.startswith("results.json: an excerpt of what the run has written") for note in notes)
    said = json.loads((kept / "results.json").read_text())
    recorded = verify(kept / "ledger.jsonl").results
    assert recorded is not None
    assert said["excerpt"] == recorded["files"]["results.json"]
