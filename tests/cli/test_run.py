"""`sottovoce run` for federated recipes: what it prints, and how it ends."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.tones import pack_tones

from sottovoce.config import recipe_names
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import poisson_release, repeated
from sottovoce.training import estimate, suites
from sottovoce.training.estimate import Estimate, RunCost

RECIPE = """
about: tones, federated
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
federation:
  steps: 2
  cohort_size: 2
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, noise_multiplier: 8.0, delta: 1e-3}
"""
CENTRAL = """
about: tones, centrally
data: {store: tones, part: seed, seed_part: {fraction: 0.3}}
model: {size: tiny, layers: 2, width: 32}
central: {steps: 2, batch_seconds: 4, optimiser: {name: adam}, schedule: {name: constant, lr: 0.001}}
"""
SUITE = """
about: with and without noise
runs:
  noisy: {recipe: RECIPE}
  quiet: {recipe: RECIPE, overrides: [federation.privacy.noise_multiplier=0]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store and a recipe, where the command is given."""
    pack_tones(tmp_path / "stores/tones", letters=(2, 3), utterances=2)
    (tmp_path / "tones.yaml").write_text(RECIPE)
    (tmp_path / "suite.yaml").write_text(SUITE.replace("RECIPE", str(tmp_path / "tones.yaml")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_ends_with_a_table_what_it_promises_and_where_the_report_is(
    here: Path, sottovoce: Callable[..., object]
) -> None:
    ended = sottovoce("run", "tones.yaml", "--out", "run")
    assert ended.code == 0, ended.err
    assert "On unseen speakers" in ended.out
    assert any(line.startswith("run ") for line in ended.out.splitlines()), "called as its --out is"
    assert "for each speaker against adding or removing one" in ended.out
    assert "not the tuning before it" in ended.out
    assert f"report: {Path('run/report.html')}" in ended.out
    assert (here / "run/report.html").exists()

    again = sottovoce("run", "tones.yaml", "--out", "run", "--resume", "--json")
    assert json.loads(again.out) == json.loads((here / "run/results.json").read_text())


@pytest.mark.usefixtures("undrawn")
def test_a_suite_makes_one_table_of_its_runs_and_does_not_run_them_twice(
    here: Path, sottovoce: Callable[..., object]
) -> None:
    ended = sottovoce("run", "suite.yaml", "--out", "both", "--json")
    assert ended.code == 0, ended.err
    results = json.loads(ended.out)
    assert results.keys() == {"noisy", "quiet"}
    assert results["quiet"]["privacy"]["epsilon_rdp"] is None
    text = (here / "both/report.txt").read_text()
    assert "noisy" in text
    assert "quiet" in text
    ledgers = [(here / "both" / label / "ledger.jsonl").read_bytes() for label in ("noisy", "quiet")]
    assert sottovoce("run", "suite.yaml", "--out", "both").code == 0
    assert ledgers == [(here / "both" / label / "ledger.jsonl").read_bytes() for label in ("noisy", "quiet")]


@contextmanager
def _asked_at_once() -> Iterator[Callable[[], bool]]:
    """As if somebody had pressed Ctrl-C before the first round."""
    yield lambda: True


def test_what_is_interrupted_ends_with_130_and_says_so_to_machines(
    here: Path, sottovoce: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sottovoce.training.loop.interruptible", _asked_at_once)
    stopped = {"ended": {"step": 1, "reason": "interrupted"}}
    for recipe, found, again in (
        ("tones.yaml", stopped, "the same command with --resume"),
        ("suite.yaml", {"noisy": stopped}, "the same command"),
    ):
        ended = sottovoce("run", recipe, "--out", recipe.removesuffix(".yaml"), "--json")
        assert ended.code == 130, ended.err
        assert json.loads(ended.out) == found
        assert ended.err.splitlines()[-1] == f"stopped after step 1 and saved: {again} goes on"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("reason", ["budget", "patience"])
def test_an_end_that_was_asked_for_is_no_failure_and_has_its_reason(
    reason: str, here: Path, sottovoce: Callable[..., object]
) -> None:
    one, two = (epsilon(repeated(poisson_release(8.0, sampling_rate=2 / 9), steps), 1e-3).rdp for steps in (1, 2))
    changes = {"budget": f"federation.privacy.epsilon_budget={(one + two) / 2}", "patience": "federation.patience=1"}
    often = ["federation.steps=20", "federation.evaluate_every=1"]  # noise teaches nothing
    ended = sottovoce("run", "tones.yaml", changes[reason], *often, "--out", "run", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["ended"]["reason"] == reason


@pytest.mark.usefixtures("undrawn")
def test_a_table_runs_whole_with_the_papers_numbers_beside_it_or_by_cell(
    here: Path, sottovoce: Callable[..., object]
) -> None:
    (here / "table.yaml").write_text(
        f"about: Table 9\nextends: {here / 'tones.yaml'}\nfederation: {{privacy: {{share: dim}}}}\nruns:\n"
        "  noisy: {about: with noise, paper: {source: S, place: 'Table 9, noise', wer: {test: 12.5}}}\n"
        "  quiet:\n    about: without\n    paper: {source: S, place: 'Table 9, quiet', wer: {test: 7.5}}\n"
        "    federation: {privacy: {noise_multiplier: 0}}\n"
    )
    ended = sottovoce("run", "table.yaml", "--out", "both", "--json")
    assert ended.code == 0, ended.err
    page = (here / "both/report.html").read_text()
    for printed in ("WER beside the paper's", "Table 9, noise", "12.5 %", "Table 9, quiet", "7.5 %"):
        assert printed in unescape(page)
    cell = sottovoce("run", "table.yaml/quiet", "--json")
    assert cell.code == 0, cell.err
    assert (here / "runs/table-quiet/config.yaml").read_text() == (here / "both/quiet/config.yaml").read_text()
    assert (here / "runs/table-quiet/ledger.jsonl").read_bytes() == (here / "both/quiet/ledger.jsonl").read_bytes()
    assert "table/quiet" in (here / "runs/table-quiet/report.txt").read_text()
    wrong = sottovoce("run", "table.yaml/quite")
    assert wrong.code == 2
    assert "no recipe 'table.yaml/quite', did you mean 'table.yaml/quiet'?" in wrong.err


@pytest.mark.usefixtures("undrawn")
def test_a_suite_says_what_its_runs_promise_together(here: Path, sottovoce: Callable[..., object]) -> None:
    run = f"{{recipe: {here / 'tones.yaml'}, overrides: [federation.privacy.mode=secure]}}"
    (here / "suite.yaml").write_text(f"about: three\nruns: {{one: {run}, two: {run}, three: {run}}}")
    ended = sottovoce("run", "suite.yaml", "--out", "all")
    assert ended.code == 0, ended.err
    # Nine clients, two of them a round, two rounds a run.
    joint = epsilon(repeated(poisson_release(8.0, sampling_rate=2 / 9), 6), 1e-3)
    sentence = f"all 3 runs: ε = {joint.pld:.4g} (PLD) / {joint.rdp:.4g} (RDP) at δ = 0.001."
    for said in (ended.out, (here / "all/report.txt").read_text(), (here / "all/report.html").read_text()):
        assert sentence in said


@pytest.mark.usefixtures("one_thread")
@pytest.mark.usefixtures("undrawn")
def test_runs_of_a_suite_side_by_side_are_those_one_after_another(
    here: Path, sottovoce: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # one thread for each of two runs
    began: list[int] = []
    started = suites.child_pool
    monkeypatch.setattr(suites, "child_pool", lambda count, *a, **k: began.append(count) or started(count, *a, **k))
    seeded = (here / "suite.yaml").read_text().replace("noisy: {recipe:", "noisy: {overrides: [SEED], recipe:")
    (here / "seed.yaml").write_text(CENTRAL)
    apart = f"federation.seed_model={here / 'seed.yaml'}, data.part=federation, data.seed_part.fraction=0.3"
    (here / "suite.yaml").write_text(seeded.replace("SEED", apart))
    ended = sottovoce("run", "suite.yaml", "--out", "both", "--runs", "own", "--at-once", "3", "--json")
    assert ended.code == 0, ended.err
    assert "noisy: 1 of 2" in ended.err or "noisy: 2 of 2" in ended.err
    assert any(line.startswith("noisy: δ=0.001 for each speaker") for line in ended.err.splitlines())
    assert began == [2], "no more processes than runs"
    found = json.loads(ended.out)
    alone = sottovoce("run", "suite.yaml", "--out", "alone", "--runs", "alone-too", "--json")
    assert json.loads(alone.out) == found
    for label in ("noisy", "quiet"):
        ledgers = [(here / folder / label / "ledger.jsonl").read_bytes() for folder in ("both", "alone")]
        assert ledgers[0] == ledgers[1]


@pytest.mark.usefixtures("undrawn")
def test_some_runs_of_a_suite_can_be_chosen(here: Path, sottovoce: Callable[..., object]) -> None:
    ended = sottovoce("run", "suite.yaml", "--out", "both", "--only", "q*", "--json")
    assert json.loads(ended.out).keys() == {"quiet"}
    wrong = sottovoce("run", "suite.yaml", "--out", "both", "--only", "loud")
    assert wrong.code == 2
    assert "only=loud: no run of the suite is called so; it has noisy, quiet" in wrong.err
    single = sottovoce("run", "tones.yaml", "--at-once", "2")
    assert single.code == 2
    assert "--only, --at-once and --list are for suites" in single.err


def test_the_labels_of_a_suite_are_listed_for_a_scheduler(here: Path, sottovoce: Callable[..., object]) -> None:
    assert sottovoce("run", "suite.yaml", "--list").out == "noisy\nquiet\n"
    chosen = sottovoce("run", "suite.yaml", "--only", "q*", "--list", "--json")
    assert json.loads(chosen.out) == ["quiet"]
    assert not (here / "runs").exists()


def test_what_a_suite_needs_is_made_alone_so_that_its_runs_may_begin_anywhere(
    here: Path, sottovoce: Callable[..., object]
) -> None:
    (here / "seed.yaml").write_text(CENTRAL)
    seeded = [f"federation.seed_model={here / 'seed.yaml'}", "data.part=federation", "data.seed_part.fraction=0.3"]
    made = sottovoce("run", "suite.yaml", *seeded, "--parents-only")
    assert made.code == 0, made.err
    (seed,) = (here / "runs").iterdir()
    assert made.out == f"what the runs need is there; trained for it: seed model {seed.name}\n"
    assert (seed / "results.json").exists()
    again = sottovoce("run", "suite.yaml", *seeded, "--parents-only")
    assert again.out == "what the runs need is there; trained for it: nothing\n"
    task = sottovoce("run", "suite.yaml", *seeded, "--only", "noisy", "--json")
    assert task.code == 0, task.err
    assert "— seed model" not in task.err
    assert list(json.loads(task.out)) == ["noisy"]


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_fails_beside_others_is_one_line_and_spoils_none(
    here: Path, sottovoce: Callable[..., object]
) -> None:
    taken = f"  taken: {{recipe: {here / 'tones.yaml'}, overrides: [seed=2]}}\n"
    (here / "suite.yaml").write_text((here / "suite.yaml").read_text().replace("  noisy", taken + "  noisy"))
    (here / "both/taken").mkdir(parents=True)
    (here / "both/taken/letters.txt").write_text("somebody's")
    ended = sottovoce("run", "suite.yaml", "--out", "both", "--at-once", "2")
    assert ended.code == 2
    assert "error: taken: run folder both/taken holds other things" in ended.err.splitlines()[-1]
    assert (here / "both/quiet/results.json").exists()


def test_a_run_that_cannot_be_made_is_said_before_any_other_begins(
    here: Path, sottovoce: Callable[..., object]
) -> None:
    wide = f"  wide: {{recipe: {here / 'tones.yaml'}, overrides: [federation.cohort_size=99]}}\n"
    (here / "suite.yaml").write_text((here / "suite.yaml").read_text() + wide)
    ended = sottovoce("run", "suite.yaml", "--out", "both")
    assert ended.code == 2
    assert "error: wide: federation.cohort_size=99: the population has only 9 clients" in ended.err.splitlines()[-1]
    assert not (here / "both").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("federation.cohort_sizes=3", "unknown key 'federation.cohort_sizes', did you mean 'cohort_size'?"),
        ("federation.cohort_size=99", "federation.cohort_size=99: the population has only 9 clients"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    change: str, message: str, here: Path, sottovoce: Callable[..., object]
) -> None:
    ended = sottovoce("run", "tones.yaml", change, "--out", "run")
    assert ended.code == 2
    assert message in ended.err.strip().splitlines()[-1]


@pytest.mark.parametrize("out", ["a" * 300, "tones.yaml/run"])
def test_a_folder_that_cannot_be_is_one_line(out: str, here: Path, sottovoce: Callable[..., object]) -> None:
    ended = sottovoce("run", "tones.yaml", "--out", out)
    assert ended.code == 2
    assert ended.err.strip().splitlines()[-1].startswith("error: ")


def test_all_recipes_are_listed_with_what_they_reproduce(sottovoce: Callable[..., object]) -> None:
    listed = json.loads(sottovoce("recipes", "--json").out)
    assert [recipe["name"] for recipe in listed] == recipe_names()
    assert all(recipe["about"] for recipe in listed)
    assert all(recipe["paper"]["place"] for recipe in listed if recipe["name"].startswith("pelikan2025/table"))


def listed(sottovoce: Callable[..., object], *asked: str) -> list[dict[str, Any]]:
    ended = sottovoce("recipes", *asked, "--json")
    assert ended.code == 0, ended.err
    found: list[dict[str, Any]] = json.loads(ended.out)
    return found


def test_recipes_are_found_by_words_paper_and_table(sottovoce: Callable[..., object]) -> None:
    first = listed(sottovoce, "--paper", "pelikan2025", "--table", "1")
    assert len(first) == 18, "the table and its 17 cells"
    cells = {f"pelikan2025/table01/{label}" for label in first[0]["runs"]}
    assert {one["name"] for one in first[1:]} == cells
    per_layer = listed(sottovoce, "--table", "1", "--paper", "pelikan2025", "UNIFORM", "no noise")
    assert [one["paper"]["wer"]["test"] for one in per_layer] == [18.9, 19.1]
    (cell,) = listed(sottovoce, "sigma-3e-6-dim", "--paper", "pelikan2025", "--table", "17")
    assert (cell["seed_model"], cell["store"]) == ("pelikan2025/central/ls-100", "commonvoice-en")
    shown = sottovoce("recipes", "sigma-3e-6-dim", "--table", "17").out
    assert "Table 1: WER dev 17.1, test 20.4; from pelikan2025/central/ls-100; store commonvoice-en" in shown


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["recipes", "nonsense"], "no recipe fits nonsense"),
        (["recipes", "--paper", "pelican2025"], "paper=pelican2025: expected one of"),
        (["run", "pelikan2025/tabel01"], "did you mean 'pelikan2025/table01'?"),
        (["run", "pelikan2025/table01/sigma-3e-6-dimm"], "did you mean 'pelikan2025/table01/sigma-3e-6-dim'?"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(asked: list[str], words: str, sottovoce: Callable[..., object]) -> None:
    ended = sottovoce(*asked)
    assert ended.code == 2
    assert words in ended.err


def test_an_estimate_says_what_a_run_takes_and_begins_nothing(here: Path, sottovoce: Callable[..., object]) -> None:
    ended = sottovoce("run", "suite.yaml", "--estimate", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert [run["name"] for run in found["runs"]] == ["noisy", "quiet"]
    assert found["hours"] is not None
    assert (
        found["runs"][0]["epsilon"]["rdp"] == epsilon(repeated(poisson_release(8.0, sampling_rate=2 / 9), 2), 1e-3).rdp
    )
    assert found["runs"][1]["epsilon"] is None
    assert not (here / "runs").exists()
    told = sottovoce("run", "tones.yaml", "--estimate")
    assert "on this CPU" in told.out
    assert "at its end" in told.out


@pytest.mark.usefixtures("undrawn")
def test_a_run_begins_with_what_it_takes_and_a_finished_one_does_not(
    here: Path, sottovoce: Callable[..., object]
) -> None:
    ended = sottovoce("run", "tones.yaml", "--out", "run")
    assert ended.code == 0, ended.err
    assert "of audio to train on" in ended.err
    again = sottovoce("run", "tones.yaml", "--out", "run")
    assert again.code == 0, again.err
    assert "of audio to train on" not in again.err
    assert sottovoce("run", "tones.yaml", "--out", "run", "--estimate").out.strip() == "nothing is left to do"


@pytest.mark.usefixtures("undrawn")
def test_without_a_terminal_days_on_a_cpu_are_refused_in_one_line_unless_yes(
    here: Path, sottovoce: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    days = Estimate("CPU", (RunCost(name="seed", audio_seconds=1.0, seconds=50 * 24 * 3600.0),), 1)
    monkeypatch.setattr(estimate, "estimate_runs", lambda *_, **__: days)
    ended = sottovoce("run", "tones.yaml", "--out", "run")
    assert ended.code == 2
    assert ended.err.splitlines()[-1] == "error: this takes a CPU about 1,200 h: expected a GPU, or --yes"
    assert not (here / "run").exists()
    assert sottovoce("run", "tones.yaml", "--out", "run", "--yes").code == 0
