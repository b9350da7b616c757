"""A run that stops because of what it has put out reports the ε of its plan, wherever it reports one."""

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tampering import rechain
from tests.training.test_federation import _asked_at_once
from typer.testing import CliRunner

from sottovoce.cli import app
from sottovoce.config import load_recipe
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import poisson_release, repeated
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext

pytestmark = pytest.mark.usefixtures("undrawn")

# Nine clients, two of them a round, and noise of z = 8 at δ = 1e-3: the recipe's.
STEP = poisson_release(8.0, sampling_rate=2 / 9)
PROMISED, SPENT = epsilon(repeated(STEP, 9), 1e-3), epsilon(repeated(STEP, 3), 1e-3)
WORDS = f"ε = {PROMISED.pld:.4g} (PLD) / {PROMISED.rdp:.4g} (RDP) promised for 9 rounds; "
PLAIN = ["federation.privacy.adaptive=null", "federation.steps=9", "federation.evaluate_every=1"]
PATIENCE = [*PLAIN, "federation.patience=2"]  # it ends after three rounds, as noise teaches nothing


def words_of(page: Path) -> str:
    return " ".join(unescape(re.sub(r"<(style|svg).*?</\1>|<[^>]+>", " ", page.read_text(), flags=re.DOTALL)).split())


@pytest.fixture
def command(federated_recipe: Path, short_stores: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs the recipe from the command line; what it printed."""

    def run(*changes: str, code: int = 0) -> str:
        arguments = ["run", str(federated_recipe), *changes, "--stores", str(short_stores)]
        done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "run"), "--device", "cpu"])
        assert done.exit_code == code, done.output
        return " ".join(done.output.split())

    return run


@pytest.fixture
def outcome(federated_recipe: Path, short_stores: Path, tmp_path: Path) -> Callable[..., Outcome]:
    def run(*changes: str, out: str = "run", resume: bool = False) -> Outcome:
        around = RunContext(tmp_path / "runs", short_stores, torch.device("cpu"))
        recipe = load_recipe(str(federated_recipe), list(changes))
        return run_recipe(recipe, out=tmp_path / out, resume=resume, context=around)

    return run


def privacy_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.results is not None
    found: dict[str, Any] = outcome.results["privacy"]
    return found


def test_a_stop_by_patience_reports_the_epsilon_of_the_plan(command: Callable[..., str], tmp_path: Path) -> None:
    printed = command(*PATIENCE)
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["ended"]["reason"] == "patience"
    assert results["privacy"]["steps"] == results["ended"]["step"] == 3
    assert results["privacy"]["epsilon_rdp"] == pytest.approx(PROMISED.rdp)
    assert results["privacy"]["epsilon_pld"] == PROMISED.pld
    assert results["privacy"]["promised_steps"] == 9
    assert results["privacy"]["spent"] == {"epsilon_pld": SPENT.pld, "epsilon_rdp": pytest.approx(SPENT.rdp)}
    column = f"{PROMISED.pld:.4g} / {PROMISED.rdp:.4g}"
    assert column in printed
    assert "promised for 9 rounds; 3 made" in printed
    report = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")])
    assert report.exit_code == 0, report.output
    for page in (tmp_path / "page.html", tmp_path / "run/report.html"):
        words = words_of(page)
        assert f"ε at this population (PLD) {PROMISED.pld:.4g} PLD {PROMISED.pld:.4g}, RDP {PROMISED.rdp:.4g}" in words
        assert column in words
        assert "promised for 9 rounds; 3 made" in words
    assert column in (tmp_path / "run/report.txt").read_text()


def test_the_population_for_a_useful_epsilon_is_for_the_whole_plan(outcome: Callable[..., Outcome]) -> None:
    # So little noise that nine rounds need more people than the three that were made.
    little = ["federation.privacy.noise_multiplier=0.5"]
    stopped = outcome(*PATIENCE, *little, out="stopped")
    whole = outcome(*PLAIN, *little, out="whole")
    assert stopped.results is not None
    assert stopped.results["ended"]["reason"] == "patience"
    assert privacy_of(stopped)["useful"] == privacy_of(whole)["useful"]


def test_an_interrupted_run_says_what_it_has_promised(
    command: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may look at the dev WER and not go on."""
    monkeypatch.setattr("sottovoce.training.loop.interruptible", _asked_at_once)
    printed = command(*PLAIN, code=130)
    assert "stopped after step 1 and saved" in printed
    assert f"{WORDS}1 made" in printed
    report = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")])
    assert report.exit_code == 0, report.output
    assert f"run is not finished: there are no results yet. {WORDS}1 made." in words_of(tmp_path / "page.html")


def test_a_budget_ends_a_run_by_its_accounts_alone_so_that_its_epsilon_stands(outcome: Callable[..., Outcome]) -> None:
    budget = (SPENT.rdp + epsilon(repeated(STEP, 4), 1e-3).rdp) / 2
    ended = outcome(*PLAIN, f"federation.privacy.epsilon_budget={budget}")
    assert ended.results is not None
    assert ended.results["ended"]["reason"] == "budget"
    assert privacy_of(ended)["promised_steps"] == 3
    assert privacy_of(ended)["epsilon_rdp"] == pytest.approx(SPENT.rdp)


def test_an_older_result_of_a_stopped_run_is_reported_with_its_promise(
    outcome: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Results used to say what was spent, and ledgers not how many steps were planned; the recipe beside them does."""
    folder = outcome(*PATIENCE).folder
    results = json.loads((folder / "results.json").read_text())
    privacy = results["privacy"]
    privacy |= privacy.pop("spent")
    del privacy["promised_steps"]
    (folder / "results.json").write_text(json.dumps(results))
    rechain(folder)
    report = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "page.html")])
    assert report.exit_code == 0, report.output
    assert f"{PROMISED.pld:.4g} / {PROMISED.rdp:.4g}" in words_of(tmp_path / "page.html")
