"""The command line of the planner and the ledger, as a user types it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sottovoce.privacy.accounting import poisson_epsilon
from sottovoce.privacy.events import NoGuarantee, poisson_release
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.ledger_records import Header
from sottovoce.report.archives import zip_folder

Command = Callable[..., Any]

RUN = ("--population", 69_506_000, "--cohort", 204_800, "--steps", 2034, "--delta", 1e-9)
SMALL = ("--population", 10_000, "--cohort", 100, "--steps", 50, "--delta", 1e-6)


def test_a_plan_for_machines(sottovoce: Command) -> None:
    done = sottovoce("plan", *RUN, "--sigma-dp", 3e-6, "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    # The golden row of the paper: z = 3e-6·204,800 = 0.6144; ε 7.2 there, 7.23 by RDP, 6.30 by PLD.
    assert plan["noise_multiplier"] == pytest.approx(0.6144)
    assert plan["sampling_rate"] == pytest.approx(0.00295, rel=1e-2)
    assert plan["epsilon_rdp"] == pytest.approx(7.23, abs=0.02)
    assert plan["epsilon_pld"] == pytest.approx(6.30, abs=0.02)
    assert plan["rdp_order"] == 4.0
    assert plan["sigma_dp"] == pytest.approx(3e-6)
    assert plan["warnings"] == []


def test_a_plan_for_people(sottovoce: Command) -> None:
    done = sottovoce("plan", *RUN, "--noise-multiplier", 0.6144, "--parameters", 255_700_000)
    assert done.code == 0, done.err
    for expected in ("6.29", "7.22 at order 4", "69,506,000", "0.048", "0.00614"):
        assert expected in done.out
    assert done.err == ""


def test_a_target_its_scale_and_the_population_it_needs(sottovoce: Command) -> None:
    done = sottovoce("plan", *SMALL, "--target-epsilon", 2, "--accountant", "rdp", "--json")
    plan = json.loads(done.out)
    assert 1.99 <= plan["epsilon_rdp"] <= 2.0
    wanted = ("--scale", "10,100", "--smallest-population", "--target-epsilon", 1, "--max-cohort", 150)
    done = sottovoce("plan", *SMALL, "--noise-multiplier", 0.6, *wanted, "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert [(one["population_size"], one["cohort_size"]) for one in plan["scaled"]] == [(10**5, 1000), (10**6, 10_000)]
    needed = plan["smallest_population"]
    assert needed["epsilon_pld"] <= 1
    assert needed["cohort_size"] == 150
    assert needed["sigma_dp"] == pytest.approx(plan["sigma_dp"])
    careful = poisson_epsilon(
        needed["noise_multiplier"], sampling_rate=needed["sampling_rate"], central_steps=50, delta=1e-6
    )
    assert careful.pld == needed["epsilon_pld"]
    shown = sottovoce("plan", *SMALL, "--noise-multiplier", 0.6, *wanted)
    assert "extrapolated" in shown.out
    assert "The smallest population with ε ≤ 1, by PLD" in shown.out


def test_over_selection_is_planned_at_the_drawn_rate(sottovoce: Command) -> None:
    done = sottovoce("plan", *SMALL, "--noise-multiplier", 0.6, "--over-select", 1.3, "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert (plan["cohort_size"], plan["expected_answers"], plan["sampling_rate"]) == (130, 100, 0.013)
    assert plan["sigma_dp"] == pytest.approx(0.6 / 100)
    drawn = poisson_epsilon(0.6, sampling_rate=0.013, central_steps=50, delta=1e-6)
    assert (plan["epsilon_pld"], plan["epsilon_rdp"]) == (drawn.pld, drawn.rdp)
    assert "expected_answers, of S drawn" in sottovoce("plan", *SMALL, "--sigma-dp", 0.006, "--over-select", 1.3).out


def test_warnings_go_to_standard_error(sottovoce: Command) -> None:
    done = sottovoce("plan", *SMALL[:-1], 0.001, "--noise-multiplier", 0.05)
    assert done.code == 0
    assert "warning: delta=0.001 is not below 1/population_size=0.0001" in done.err
    assert "is above 8: next to nothing as a guarantee" in done.err
    assert "warning" not in done.out


def test_numbers_are_never_cut_off_where_the_terminal_is_narrow(
    sottovoce: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = sottovoce("plan", "--paper", "table1")
    assert done.code == 0, done.err
    assert "695,060,000" in done.out
    assert "…" not in done.out
    assert max(len(line.rstrip()) for line in done.out.splitlines()) <= 120
    assert "1.3 [1]" in done.out
    assert "[1] ε prints as 1.3" in done.out


def test_a_paper_table_for_machines(sottovoce: Command) -> None:
    table = json.loads(sottovoce("plan", "--paper", "table1", "--json").out)
    assert table["table"] == "table1"
    private = [row for row in table["rows"] if row["ours"] is not None]
    assert len(private) == 19
    assert all(row["ours"]["epsilon_pld"] <= row["ours"]["epsilon_rdp"] for row in private)


def test_the_papers_table_of_computing(sottovoce: Command) -> None:
    text = sottovoce("plan", "--paper", "table22").out
    assert "1,120" in text
    assert "table16/cv-en-from-ls-100-s1024-local-steps" in text
    rows = json.loads(sottovoce("plan", "--paper", "table22", "--json").out)["rows"]
    assert rows[10]["audio_seconds_per_second"] == pytest.approx(609.5, abs=0.1)


def test_a_plot(sottovoce: Command, tmp_path: Path) -> None:
    done = sottovoce("plan", *SMALL, "--noise-multiplier", 1, "--plot", tmp_path / "plan.svg")
    assert done.code == 0, done.err
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    assert f"wrote {tmp_path / 'plan.svg'}" in done.err.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--population", 10, "--steps", 5], "--cohort, --delta is missing"),
        ([*SMALL], "expected exactly one of noise_multiplier, sigma_dp, target_epsilon; got none"),
        ([*SMALL, "--noise-multiplier", 1, "--sigma-dp", 1], "got noise_multiplier, sigma_dp"),
        ([*SMALL, "--noise-multiplier", 0], "noise_multiplier=0.0: expected a positive number"),
        ([*SMALL, "--noise-multiplier", "nan"], "--noise-multiplier nan: expected a number"),
        ([*SMALL, "--noise-multiplier", 1e-300], "noise_multiplier=1e-300"),
        ([*SMALL, "--target-epsilon", -1], "target_epsilon=-1"),
        ([*SMALL, "--cohort", 20_000, "--noise-multiplier", 1], "cohort_size=20000 exceeds population_size=10000"),
        ([*SMALL, "--delta", 2, "--noise-multiplier", 1], "delta=2.0"),
        ([*SMALL, "--noise-multiplier", 1, "--scale", "10,many"], "--scale 10,many"),
        ([*SMALL, "--noise-multiplier", 1, "--scale", "0"], "scale=0.0"),
        ([*SMALL, "--noise-multiplier", 1, "--max-cohort", 5], "--max-cohort 5"),
        ([*SMALL, "--target-epsilon", 8, "--smallest-population"], "--smallest-population: expected"),
        ([*SMALL, "--noise-multiplier", 1, "--smallest-population"], "--smallest-population: expected"),
        ([*SMALL, "--noise-multiplier", 1, "--plot", "plan.txt"], "plot=plan.txt"),
        ([*SMALL, "--sigma-dp", 1, "--over-select", 0.5], "over-selection by 0.5: expected a factor of at least 1"),
        ([*SMALL, "--sigma-dp", 1, "--over-select", 1.3, "--scale", "10"], "--over-select 1.3 with --scale"),
        ([*SMALL, "--paper", "table1"], "--paper table1 with --population, --cohort"),
        (
            [*SMALL, "--sigma-dp", 1e-5, "--smallest-population", "--target-epsilon", 0.1, "--max-cohort", 10],
            "target_epsilon=0.1 cannot be reached: the best is",
        ),
    ],
)
def test_mistakes_are_one_line(sottovoce: Command, arguments: list[object], message: str) -> None:
    done = sottovoce("plan", *arguments)
    assert done.code == 2
    assert message in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert done.out == ""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has done five steps and committed three."""
    event = poisson_release(1.0, sampling_rate=0.02)
    plan = {"mode": "secure", "population_size": 1000, "cohort_size": 20, "noise_multiplier": 1.0}
    header = Header(run="a", mode="secure", plan=plan, event=event, delta=1e-6, epsilon_budget=8.0)
    ledger = Ledger(tmp_path / "ledger.jsonl", header=header)
    for step in range(5):
        ledger.intend(event, step=step, clip_bound=0.01, parameters="p", cohort="c")
        if step == 2:
            ledger.commit(step=step, result="r")
    ledger.close()
    return tmp_path


def test_a_ledger_is_verified_and_printed(sottovoce: Command, run: Path) -> None:
    expected = poisson_epsilon(1.0, sampling_rate=0.02, central_steps=5, delta=1e-6)
    for place in (run, run / "ledger.jsonl"):
        done = sottovoce("ledger", place, "--json")
        assert done.code == 0, done.err
        report = json.loads(done.out)
        assert (report["valid"], report["steps"], report["committed_step"]) == (True, 5, 2)
        assert report["epsilon_rdp"] == pytest.approx(expected.rdp)
        assert report["epsilon_pld"] == pytest.approx(expected.pld)
    done = sottovoce("ledger", run)
    for text in ("secure", "sampling_rate=0.02", "5 charged, 3 committed", f"{expected.pld:.4g}", "ε ≤ 8 by RDP"):
        assert text in done.out


def test_a_torn_line_is_a_warning_and_a_changed_one_an_error(sottovoce: Command, run: Path) -> None:
    path = run / "ledger.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"hash":')
    done = sottovoce("ledger", run)
    assert done.code == 0
    assert "the last line was never finished" in done.err.replace("\n", " ")
    path.write_bytes(whole.replace(b'"step":3', b'"step":4'))
    for arguments in (["ledger", run], ["ledger", run, "--json"]):
        done = sottovoce(*arguments)
        assert done.code == 2
        assert "line 6 does not follow from the lines before it" in done.err
        assert done.err.count("\n") == 1
    assert json.loads(done.out)["valid"] is False


def test_of_a_suite_its_runs_are_named(sottovoce: Command, run: Path, tmp_path: Path) -> None:
    for label in ("b", "a"):
        (run / label).mkdir()
        shutil.copy(run / "ledger.jsonl", run / label)
    (run / "ledger.jsonl").unlink()
    done = sottovoce("ledger", run, "--json")
    assert done.code == 2
    words = f"{run / 'ledger.jsonl'}: no ledger there, but runs that have one each: expected one of {run}/a, {run}/b"
    assert done.err == f"error: {words}\n"
    assert json.loads(done.out)["problem"] == words
    zip_folder(run, tmp_path / "suite.zip")
    archived = sottovoce("ledger", tmp_path / "suite.zip")
    assert archived.err.endswith(f"expected one of {tmp_path / 'suite.zip'}/a, {tmp_path / 'suite.zip'}/b\n")


def test_no_ledger_and_no_guarantee(sottovoce: Command, tmp_path: Path) -> None:
    done = sottovoce("ledger", tmp_path)
    assert done.code == 2
    assert "ledger.jsonl: no ledger there" in done.err
    event = NoGuarantee("no noise is added [at all]")
    ledger = Ledger(tmp_path / "ledger.jsonl", header=Header(run="a", mode="seeded", plan={}, event=event, delta=1e-6))
    ledger.intend(event, step=0, clip_bound=1.0, parameters="p", cohort="c")
    ledger.close()
    done = sottovoce("ledger", tmp_path)
    assert done.code == 0
    assert "no noise is added [at all]" in done.out
    assert "no guarantee" in done.out
    assert json.loads(sottovoce("ledger", tmp_path, "--json").out)["epsilon_rdp"] is None


@pytest.mark.parametrize("command", ["plan", "ledger"])
def test_help_has_an_example(sottovoce: Command, command: str) -> None:
    done = sottovoce(command, "--help")
    assert done.code == 0
    assert "Example: sottovoce" in done.out


def test_help_does_not_wait_for_the_accountants() -> None:
    heavy = ("dp_accounting", "torch", "scipy", "matplotlib")
    script = (
        f"import sys; import sottovoce.cli.plan, sottovoce.cli.ledger; print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plan_counts_what_is_measured_of_clients(sottovoce: Command) -> None:
    done = sottovoce("plan", *SMALL, "--noise-multiplier", 6, "--client-wers", 4, "--client-wer-noise", 8, "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert plan["client_wer"] == {"measured": 4, "noise_multiplier": 8.0}
    alone = json.loads(sottovoce("plan", *SMALL, "--noise-multiplier", 6, "--json").out)
    assert plan["epsilon_rdp"] > alone["epsilon_rdp"]
    done = sottovoce("plan", *SMALL, "--noise-multiplier", 6, "--client-wers", 4)
    assert done.code == 2
    assert "expected both or neither" in done.err
