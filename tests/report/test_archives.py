"""An archive of runs is read wherever their folders would be, and a bad one is one clear line."""

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.conftest import MakeRun
from typer.testing import CliRunner

from sottovoce.base.errors import InputError
from sottovoce.cli import app
from sottovoce.privacy.ledger import verify
from sottovoce.report import archives
from sottovoce.report.archives import open_path, restore_archive_names, unzip, zip_folder
from sottovoce.report.records import find_runs, read_run

NAMES = st.text("ab.-é", min_size=1, max_size=4).filter(lambda name: name.strip("."))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def suite(runs: Path, tmp_path: Path) -> Path:
    """All four runs in one archive."""
    zip_folder(runs, tmp_path / "suite.zip")
    return tmp_path / "suite.zip"


@given(files=st.dictionaries(st.tuples(NAMES, NAMES), st.binary(max_size=50), max_size=6))
def test_what_is_packed_comes_back_to_the_byte(
    tmp_path_factory: pytest.TempPathFactory, files: dict[tuple[str, str], bytes]
) -> None:
    place = tmp_path_factory.mktemp("archives")
    for (label, name), content in files.items():
        (place / "folder" / label).mkdir(parents=True, exist_ok=True)
        (place / "folder" / label / name).write_bytes(content)
    zip_folder(place / "folder", place / "suite.zip")
    unzip(place / "suite.zip", place / "back")
    assert contents(place / "back") == {"/".join(names): content for names, content in files.items()}


def test_the_same_files_give_the_same_archive(tmp_path: Path) -> None:
    """Whatever order, times and rights they were written with; how well zlib packs them is its own affair."""
    made = []
    for place, order, rights in (("one", "abc", 0o600), ("two", "cba", 0o644)):
        for name in order:
            (tmp_path / place / name).mkdir(parents=True)
            (tmp_path / place / name / "results.json").write_text(name)
            (tmp_path / place / name / "results.json").chmod(rights)
        zip_folder(tmp_path / place, tmp_path / f"{place}.zip")
        with zipfile.ZipFile(tmp_path / f"{place}.zip") as packed:
            fields = ("filename", "date_time", "compress_type", "create_system", "external_attr", "extra", "comment")
            made.append([(packed.read(e), *(getattr(e, field) for field in fields)) for e in packed.infolist()])
    assert made[0] == made[1]
    assert [entry[1:3] for entry in made[0]] == [(f"{name}/results.json", (1980, 1, 1, 0, 0, 0)) for name in "abc"]


def test_a_path_may_lead_into_an_archive(runs: Path, suite: Path, tmp_path: Path) -> None:
    assert contents(open_path(suite)) == contents(runs)
    assert contents(open_path(suite / "noisy")) == contents(runs / "noisy")
    assert open_path(suite / "noisy/ledger.jsonl").read_bytes() == (runs / "noisy/ledger.jsonl").read_bytes()
    assert open_path(runs) == runs
    assert open_path(tmp_path / "nowhere.zip/noisy") == tmp_path / "nowhere.zip/noisy"
    (tmp_path / "folder.zip").mkdir()
    assert open_path(tmp_path / "folder.zip") == tmp_path / "folder.zip"


def test_an_archive_written_anew_is_read_anew(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for content in ("one", "two"):
        (tmp_path / "folder/file").write_text(content)
        zip_folder(tmp_path / "folder", tmp_path / "suite.zip")
        assert (open_path(tmp_path / "suite.zip") / "file").read_text() == content


def test_runs_are_found_in_archives_and_told_apart(runs: Path, suite: Path, copied: MakeRun, tmp_path: Path) -> None:
    assert list(find_runs([suite])) == ["central", "noisy", "quiet", "release"]
    again = copied("noisy")
    found = find_runs([suite / "noisy", again, suite / "noisy"])
    assert list(found) == ["suite/noisy", f"{tmp_path.name}/noisy"]
    assert contents(found["suite/noisy"]) == contents(again)
    with pytest.raises(InputError, match=re.escape(f"run={suite / 'nothing'}: expected the folder of a run")):
        find_runs([suite / "nothing"])


def test_reports_of_folders_and_of_their_archive_are_the_same(runs: Path, suite: Path, tmp_path: Path) -> None:
    pages = []
    for path in (runs, suite):
        done = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path / "page.html"), "--json"])
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)
        assert said["runs"] == {name: str(path / name) for name in ("central", "noisy", "quiet", "release")}
        pages.append((tmp_path / "page.html").read_text())
    assert pages[0] == pages[1]


@pytest.mark.parametrize("within", ["noisy", "noisy/ledger.jsonl"])
def test_a_ledger_is_verified_where_it_lies(runs: Path, suite: Path, within: str) -> None:
    said = [json.loads(CliRunner().invoke(app, ["ledger", str(p / within), "--json"]).stdout) for p in (runs, suite)]
    agreeing = [file for file in said[0]["agrees_with"] if file != "model"]  # a link to it, which is not packed
    assert said[1] == {**said[0], "path": str(suite / "noisy/ledger.jsonl"), "agrees_with": agreeing}
    assert said[1]["head"] == verify(runs / "noisy/ledger.jsonl").mark.head
    lines = CliRunner().invoke(app, ["ledger", str(suite / within)]).output.split()
    shown = "".join(lines)  # a long path is folded
    assert str(suite / "noisy/ledger.jsonl") in shown
    assert "sottovoce-archive" not in shown


def test_a_spoilt_ledger_is_named_as_the_user_named_it(copied: MakeRun, tmp_path: Path) -> None:
    folder = copied("noisy")
    ledger = folder / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-2]))
    zip_folder(folder.parent, tmp_path.parent / f"{tmp_path.name}.zip")
    run = tmp_path.parent / f"{tmp_path.name}.zip" / "noisy"
    done = CliRunner().invoke(app, ["ledger", str(run), "--json"])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith(f"{run / 'ledger.jsonl'} is not sound: results.json")
    assert json.loads(done.stdout)["problem"] == str(done.exception)
    assert read_run("noisy", open_path(run)).unsound == str(done.exception)


def test_a_release_without_its_ledger_is_named_as_the_user_named_it(copied: MakeRun, tmp_path: Path) -> None:
    (copied("release") / "ledger.jsonl").unlink()
    zip_folder(tmp_path / "release", tmp_path / "release.zip")
    (record,) = (read_run(label, folder) for label, folder in find_runs([tmp_path / "release.zip"]).items())
    assert record.unsound.startswith(f"{tmp_path / 'release.zip'}/ledger.jsonl is missing")


def refused(archive: Path) -> str:
    with pytest.raises(InputError) as raised:
        open_path(archive / "run")
    message = restore_archive_names(str(raised.value))
    assert message.startswith(f"{archive}: cannot be unpacked: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["/etc/run", "../run", "a/../../run", "a/..", "..", "a\\..\\run"])
def test_files_stay_below_their_folder(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "suite.zip", "w") as packed:
        packed.writestr("run/config.yaml", "")
        packed.writestr(name, "harm")
    assert f"expected files below one folder, found {name!r}" in refused(tmp_path / "suite.zip")
    with pytest.raises(InputError):
        unzip(tmp_path / "suite.zip", tmp_path / "back")
    assert not (tmp_path / "back").exists(), "not even what is harmless"


def test_an_archive_that_would_fill_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "suite.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("run/zeros", bytes(2**20))
        packed.writestr("run/more", bytes(10))
    assert (tmp_path / "suite.zip").stat().st_size < 2**12
    unzip(tmp_path / "suite.zip", tmp_path / "back")
    monkeypatch.setattr(archives, "MOST_BYTES", 2**20 + 9)
    assert "expected at most 50,000 files and 1,048,585 bytes" in refused(tmp_path / "suite.zip")
    monkeypatch.undo()
    monkeypatch.setattr(archives, "MOST_FILES", 1)
    assert "expected at most 1 files" in refused(tmp_path / "suite.zip")


def test_an_archive_that_understates_its_files_writes_no_more_than_it_said(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "suite.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("run/zeros", bytes(2**20))
    content = (tmp_path / "suite.zip").read_bytes()
    (tmp_path / "suite.zip").write_bytes(content.replace((2**20).to_bytes(4, "little"), (99).to_bytes(4, "little")))
    refused(tmp_path / "suite.zip")
    with pytest.raises(InputError):
        unzip(tmp_path / "suite.zip", tmp_path / "back")
    assert all(len(found) <= 99 for found in contents(tmp_path / "back").values())


def _flipped(content: bytes) -> bytes:
    """With other bits within the ledger, which stands behind its own name."""
    place = content.index(b"noisy/ledger.jsonl") + 100
    return content[:place] + bytes(byte ^ 0xFF for byte in content[place : place + 9]) + content[place + 9 :]


@pytest.mark.parametrize(
    "spoil", [lambda content: b"", lambda content: b"words", lambda content: content[:-30], _flipped]
)
def test_a_damaged_archive_is_one_clear_line(suite: Path, spoil: Callable[[bytes], bytes]) -> None:
    suite.write_bytes(spoil(suite.read_bytes()))
    refused(suite)
    done = CliRunner().invoke(app, ["report", str(suite)])
    assert isinstance(done.exception, InputError)


def test_a_file_that_is_a_folder_as_well_is_one_clear_line(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "suite.zip", "w") as packed:
        packed.writestr("run", "")
        packed.writestr("run/config.yaml", "")
    refused(tmp_path / "suite.zip")


def test_an_archive_is_replaced_as_a_whole_or_not_at_all(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = suite.read_bytes()
    (tmp_path / "folder").mkdir()
    for name in "ab":
        (tmp_path / "folder" / name).touch()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: _deny(path) if path.name == "b" else read(path))
    with pytest.raises(PermissionError):
        zip_folder(tmp_path / "folder", suite)
    assert suite.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "suite.zip"}


def _deny(path: Path) -> bytes:
    raise PermissionError(13, "Permission denied", str(path))
