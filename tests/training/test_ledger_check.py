"""A ledger is held against all that its folder says of it: whatever knows of more than the ledger, is believed."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.tampering import older, rechain
from typer.testing import CliRunner

from sottovoce.base.errors import InputError
from sottovoce.cli import app, main
from sottovoce.config import load_recipe
from sottovoce.privacy.ledger import verify
from sottovoce.report.archives import open_path
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext

pytestmark = pytest.mark.usefixtures("undrawn")

RECIPE = """
about: tones, federated
seed: 5
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
federation:
  steps: 8
  cohort_size: 2
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, noise_multiplier: 8.0, delta: 1e-3}
  engine: sequential
  evaluate_every: 4
  checkpoint_every: 2
"""
KEPT = Path(__file__).parents[2] / "results/cpu-cohort.zip/s5-noise"
LINES = 14  # a header, eight intents, a commit at each of four checkpoints, the results
OLDER_LINES = LINES - 1  # without the last
MODES = ["seeded", "secure"]


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Ended]
Run = Callable[..., Outcome]


@pytest.fixture
def sottovoce(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["sottovoce", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code or 0, *capsys.readouterr())  # type: ignore[arg-type]

    return run


@pytest.fixture(scope="module")
def run(short_stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the recipe in a mode and a folder, or goes on with it there."""
    place = tmp_path_factory.mktemp("marks")
    (place / "tones.yaml").write_text(RECIPE)

    def go(mode: str, out: Path, *changes: str) -> Outcome:
        recipe = load_recipe(str(place / "tones.yaml"), [f"federation.privacy.mode={mode}", *changes])
        around = RunContext(runs=place, stores=short_stores, device=torch.device("cpu"))
        return run_recipe(recipe, out=out, resume=True, context=around)

    return go


@pytest.fixture(scope="module")
def finished(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("finished")
    return {mode: run(mode, place / mode).folder for mode in MODES}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(finished: dict[str, Path], mode: str, tmp_path: Path) -> Path:
    """A finished run that a test may spoil."""
    return Path(shutil.copytree(finished[mode], tmp_path / "run", symlinks=True))


@pytest.fixture
def older_folder(folder: Path) -> Path:
    """The same with a ledger that has no digests of files, as they were: its marks are all that there is."""
    rechain(folder, older)
    return folder


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def shorten(folder: Path, *, to: int = 5) -> None:
    ledger = folder / "ledger.jsonl"
    ledger.write_text("".join(lines_of(ledger)[:to]))


def without(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# One mark at a time: everything else that the folder knows is taken away.


def only_a_checkpoint(folder: Path) -> None:
    without(folder, "results.json", "metrics.jsonl", "diagnostics.jsonl", "model")


def only_results(folder: Path) -> None:
    without(folder, "checkpoints", "metrics.jsonl", "diagnostics.jsonl", "model")


def _keep_of_results(folder: Path, chosen: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    only_results(folder)
    path = folder / "results.json"
    path.write_text(json.dumps(chosen(json.loads(path.read_text()))))


def only_epsilon_in_results(folder: Path) -> None:
    _keep_of_results(folder, lambda found: {"privacy": {"epsilon_rdp": found["privacy"]["spent"]["epsilon_rdp"]}})


def only_steps_in_results(folder: Path) -> None:
    _keep_of_results(folder, lambda found: {"privacy": {"steps": found["privacy"]["steps"]}})


def only_the_end_in_results(folder: Path) -> None:
    _keep_of_results(folder, lambda found: {"ended": found["ended"]})


def only_metrics(folder: Path) -> None:
    without(folder, "checkpoints", "results.json", "diagnostics.jsonl", "model")


def only_the_model(folder: Path) -> None:
    model = folder.parent / "model"
    shutil.copytree(folder / "model", model)
    without(folder, "checkpoints", "results.json", "metrics.jsonl", "diagnostics.jsonl", "model")
    shutil.move(model, folder / "model")


MARKS = {
    "state.json": only_a_checkpoint,
    "results.json": only_results,
    "results.json says epsilon_rdp": only_epsilon_in_results,
    "results.json says steps": only_steps_in_results,
    "results.json says steps=8": only_the_end_in_results,
    "metrics.jsonl": only_metrics,
    "config.json": only_the_model,
}


@pytest.mark.parametrize("named", MARKS)
def test_every_mark_alone_shows_a_missing_end(sottovoce: Command, older_folder: Path, named: str) -> None:
    folder = older_folder
    MARKS[named](folder)
    assert len(lines_of(folder / "ledger.jsonl")) == OLDER_LINES
    done = sottovoce("ledger", folder)
    assert done.code == 0, done.err
    assert done.err == ""
    shorten(folder)
    done = sottovoce("ledger", folder)
    assert done.code == 2
    assert named in done.err
    assert done.err.count("\n") == 1


def test_a_plan_for_more_people_knows_how_many_steps_there_were(sottovoce: Command, tmp_path: Path) -> None:
    """Of a kept run, whose ledger does not say how many it set out to make."""
    for name in ("ledger.jsonl", "planned.json"):
        shutil.copy(open_path(KEPT / name), tmp_path)
    done = sottovoce("ledger", tmp_path)
    assert done.code == 0, done.err
    shorten(tmp_path, to=20)
    done = sottovoce("ledger", tmp_path)
    assert done.code == 2
    assert "planned.json says epsilon_rdp=7.97" in done.err


def test_a_plan_is_of_as_many_steps_as_were_promised(sottovoce: Command, folder: Path) -> None:
    useful = json.loads((folder / "results.json").read_text())["privacy"]["useful"]
    for epsilon, code in ((useful["epsilon_rdp"], 0), (useful["epsilon_rdp"] / 2, 2)):
        (folder / "planned.json").write_text(json.dumps({"rdp": {**useful, "epsilon_rdp": epsilon}}))
        assert sottovoce("ledger", folder).code == code


def test_diagnostics_know_how_far_a_simulation_came(
    sottovoce: Command, finished: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished["seeded"], tmp_path / "run", symlinks=True))
    without(folder, "checkpoints", "results.json", "metrics.jsonl", "model")
    shorten(folder)
    assert "diagnostics.jsonl says steps=8, the ledger 3" in sottovoce("ledger", folder).err


def test_a_shortened_ledger_beside_everything_else_is_refused(sottovoce: Command, folder: Path) -> None:
    shorten(folder)
    done = sottovoce("ledger", folder, "--json")
    assert done.code == 2
    assert f"results.json knows {OLDER_LINES} lines of it, and it has 5: it was shortened or rolled back" in done.err
    assert json.loads(done.out)["valid"] is False


def test_a_run_that_stopped_early_says_what_it_promised_and_what_it_spent(
    sottovoce: Command, run: Run, mode: str, tmp_path: Path
) -> None:
    """A rate below the rounding of any weight leaves the model as it is: the second evaluation ends every run."""
    still = "federation.server.schedule.lr=1e-30"
    folder = run(mode, tmp_path / "run", still, "federation.patience=1", "federation.evaluate_every=2").folder
    assert sottovoce("ledger", folder).code == 0
    rechain(folder, older)
    path = folder / "results.json"
    results = json.loads(path.read_text())
    privacy = results["privacy"]
    assert privacy["steps"] == 4 < privacy["promised_steps"] == 8
    done = sottovoce("ledger", folder)
    assert done.code == 0, done.err
    only_results(folder)
    for name, value, told in (
        ("epsilon_rdp", privacy["spent"]["epsilon_rdp"], "promised epsilon_rdp="),
        ("spent", {"epsilon_rdp": 1e-3}, "epsilon_rdp=0.001"),
        ("promised_steps", 4, "promised_steps=4, the ledger 8"),
    ):
        path.write_text(json.dumps({**results, "privacy": {**privacy, name: value}}))
        done = sottovoce("ledger", folder)
        assert done.code == 2
        assert f"results.json says {told}" in done.err


def test_even_one_attempt_or_commit_less_is_seen(sottovoce: Command, folder: Path) -> None:
    shorten(folder, to=LINES - 1)
    assert sottovoce("ledger", folder).code == 2


def test_a_ledger_longer_than_its_results_is_refused(sottovoce: Command, folder: Path) -> None:
    """Somebody went on in secret, and the results promise what no longer holds."""
    results = json.loads((folder / "results.json").read_text())
    hashes = [json.loads(line)["hash"] for line in lines_of(folder / "ledger.jsonl")]
    results["privacy"] = {"length": LINES - 3, "head": hashes[LINES - 4]}
    (folder / "results.json").write_text(json.dumps(results))
    done = sottovoce("ledger", folder)
    assert done.code == 2
    assert f"says that it ended after {LINES - 3} lines, and it has {LINES}" in done.err


def test_the_ledger_of_another_run_is_refused(sottovoce: Command, finished: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished["secure"], tmp_path / "run", symlinks=True))
    shutil.copy(finished["seeded"] / "ledger.jsonl", folder / "ledger.jsonl")
    done = sottovoce("ledger", folder)
    assert done.code == 2
    assert f"results.json knows another line {OLDER_LINES} than it has" in done.err
    only_results(folder)
    results = json.loads((folder / "results.json").read_text())
    del results["privacy"]["length"]
    (folder / "results.json").write_text(json.dumps(results))
    assert "results.json says simulated=False, the ledger True" in sottovoce("ledger", folder).err


def test_a_ledger_alone_says_what_it_cannot_show(sottovoce: Command, folder: Path) -> None:
    done = sottovoce("ledger", folder / "ledger.jsonl")
    assert done.code == 0
    told = "chain valid; alone it cannot show that its end is missing: give the run folder"
    assert told in done.err
    done = sottovoce("ledger", folder / "ledger.jsonl", "--json")
    assert json.loads(done.out)["agrees_with"] == []
    done = sottovoce("ledger", folder, "--json")
    assert {"results.json", "metrics.jsonl", "model/config.json"} <= set(json.loads(done.out)["agrees_with"])
    assert "cannot show" not in done.err


def test_a_mark_that_cannot_be_read_is_named(sottovoce: Command, folder: Path) -> None:
    (folder / "results.json").write_text('{"privacy": {"length"')
    done = sottovoce("ledger", folder)
    assert done.code == 2
    assert f"{folder / 'ledger.jsonl'} is not sound: results.json is damaged" in done.err


def test_in_older_folders_a_mark_that_cannot_be_read_is_named_too(sottovoce: Command, older_folder: Path) -> None:
    (older_folder / "results.json").write_text('{"privacy": {"length"')
    done = sottovoce("ledger", older_folder)
    assert done.code == 0
    assert f"{older_folder / 'results.json'} cannot be read" in done.err


# Training.


@pytest.mark.parametrize("left", ["metrics.jsonl", "model", "results.json", "checkpoints"])
def test_a_run_without_its_ledger_is_refused(run: Run, folder: Path, mode: str, left: str) -> None:
    """Else it would begin at ε = 0 beside what it had released before."""
    without(folder, "ledger.jsonl", *({"metrics.jsonl", "diagnostics.jsonl", "model", "results.json"} - {left}))
    if left != "checkpoints":
        without(folder, "checkpoints")
    with pytest.raises(InputError, match=r"ledger\.jsonl: no ledger there, but") as raised:
        run(mode, folder)
    assert "\n" not in str(raised.value)
    assert not (folder / "ledger.jsonl").exists(), "nothing was charged beside it"


def test_an_emptied_ledger_is_refused_too(run: Run, folder: Path, mode: str) -> None:
    without(folder, "checkpoints", "results.json")
    (folder / "ledger.jsonl").write_text("")
    with pytest.raises(InputError, match="header"):
        run(mode, folder)


def test_a_shortened_ledger_is_refused_without_its_checkpoints_too(run: Run, folder: Path, mode: str) -> None:
    without(folder, "checkpoints", "results.json")
    shorten(folder)
    with pytest.raises(InputError, match=r"metrics\.jsonl says steps=8, the ledger 3"):
        run(mode, folder)


def test_a_finished_run_with_a_shortened_ledger_is_not_shown_as_if_it_held(run: Run, folder: Path, mode: str) -> None:
    shorten(folder)
    with pytest.raises(InputError, match="shortened or rolled back"):
        run(mode, folder)


def test_without_checkpoints_a_release_pays_again_and_a_simulation_replays(run: Run, folder: Path, mode: str) -> None:
    before = (folder / "ledger.jsonl").read_bytes()
    without(folder, "checkpoints", "results.json")
    outcome = run(mode, folder)
    report = verify(folder / "ledger.jsonl")
    assert outcome.results is not None
    assert outcome.results["privacy"]["attempts"] == report.attempts
    if mode == "seeded":
        assert (folder / "ledger.jsonl").read_bytes() == before
    else:
        assert (folder / "ledger.jsonl").read_bytes().startswith(before)
        assert (report.steps, report.attempts) == (8, 16)


def test_a_run_that_was_killed_before_its_ledger_begins_anew(run: Run, folder: Path, mode: str) -> None:
    """Nothing had been evaluated or released yet."""
    without(folder, "checkpoints", "results.json", "metrics.jsonl", "diagnostics.jsonl", "model", "ledger.jsonl")
    assert run(mode, folder).results is not None


# The report.


def test_the_report_begins_with_what_is_not_sound_and_ends_with_an_error(
    folder: Path, finished: dict[str, Path], mode: str, tmp_path: Path
) -> None:
    shorten(folder)
    page = tmp_path / "report.html"
    for runs in ([folder], [finished[mode], folder]):
        done = CliRunner().invoke(app, ["report", *map(str, runs), "--out", str(page)])
        assert done.exit_code == 2
        _, body = page.read_text().split("<body>")
        first = body.strip()
        assert first.startswith('<p class="alarm" role="alert"><strong>NOT SOUND</strong>')
        assert f"results.json knows {OLDER_LINES} lines of it, and it has 5" in first[: first.index("</p>")]
        assert first.count('class="alarm"') == 1, "the other run is sound"
    for theme in page.read_text().split("prefers-color-scheme: dark"):
        assert "--alarm: #" in theme
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(page), "--json"])
    assert done.exit_code == 2
    assert list(json.loads(done.stdout)["not_sound"]) == ["run"]


def test_a_chain_that_is_broken_is_not_sound_either(folder: Path, tmp_path: Path) -> None:
    ledger = folder / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"step":3', '"step":4', 1))
    page = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(page)])
    assert done.exit_code == 2
    assert "NOT SOUND" in page.read_text().split("<header>")[0].split("<body>")[1]


def test_a_release_whose_ledger_is_gone_is_not_sound(finished: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished["secure"], tmp_path / "run", symlinks=True))
    without(folder, "ledger.jsonl")
    page = tmp_path / "report.html"
    assert CliRunner().invoke(app, ["report", str(folder), "--out", str(page)]).exit_code == 2
    assert "ledger.jsonl is missing" in page.read_text().split("<header>")[0]


def test_a_sound_report_has_no_alarm(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert CliRunner().invoke(app, ["report", str(folder), "--out", str(page)]).exit_code == 0
    assert "NOT SOUND" not in page.read_text()
