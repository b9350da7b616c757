"""The statement for a data-protection officer: the ledger's facts, what is not covered, and blanks for people."""

import json
import re
from pathlib import Path

import pytest
from tests.report.conftest import MakeRun, with_event
from typer.testing import CliRunner

from sottovoce.base.errors import InputError
from sottovoce.cli import app
from sottovoce.privacy.events import CorrelatedRelease
from sottovoce.privacy.guarantee import guarantee_of
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.strategies import Banded
from sottovoce.report.records import read_run
from sottovoce.report.statement import statement_text, write_statement
from sottovoce.report.verdict import judge_run


def statement_on(folder: Path) -> str:
    run = read_run(folder.name, folder)
    return statement_text(run, judge_run(run))


def facts_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\| ([^|-]+) \| (.*) \|$", text, re.MULTILINE))


def test_facts_are_the_ledgers(releases: Path) -> None:
    text = statement_on(releases / "eight")
    header = json.loads((releases / "eight/ledger.jsonl").read_text().splitlines()[0])["record"]
    last = json.loads((releases / "eight/ledger.jsonl").read_text().splitlines()[-1])
    facts = facts_of(text)
    assert facts["population"].startswith(f"{header['plan']['population_size']} people")
    assert facts["sampling"] == "each person alone, with probability 0.1667 in each round (3 expected)"
    assert facts["rounds"] == "4 promised before the first model was released, 4 made"
    assert facts["clipping"] == "each client's update to an L2 norm of 0.01"
    assert f"Gaussian, {header['event']['noise_multiplier']:g} times" in facts["noise"]
    assert facts["unit of privacy"].startswith("one speaker, added or removed")
    assert facts["δ"] == "0.001, below one over the population (0.056)"
    assert (facts["ε by privacy loss distributions"], facts["ε by Rényi accounting"]) == ("8", "10.27")
    assert facts["ε that counts"].startswith("8:")
    assert last["hash"] in facts["ledger"]
    assert facts["randomness"].startswith("of the operating system")
    assert "> " not in text, "nothing to warn of"


def test_silos_are_not_counted_as_people_and_their_speakers_have_an_epsilon_of_their_own(releases: Path) -> None:
    text = statement_on(releases / "silos")
    facts = facts_of(text)
    assert facts["population"] == "8 silos on a list that was fixed before the run"
    assert facts["speakers in these silos"].startswith("[how many")
    assert facts["sampling"] == "each silo alone, with probability 1 in each round (8 expected)"
    assert facts["unit of privacy"] == "one silo, added or removed, with everything it holds"
    assert facts["δ"].endswith("one over the number of silos (0.12)")
    guarantee = read_run("silos", releases / "silos").guarantee
    assert guarantee is not None
    assert guarantee.epsilon_inside is not None
    assert facts["ε that counts"].startswith(f"{guarantee.epsilon.headline:.4g}:")
    assert facts["ε that counts for one speaker inside a silo"].startswith(f"{guarantee.epsilon_inside.headline:.4g} (")
    assert "people on a list" not in text


def test_the_ledger_command_states_both(releases: Path) -> None:
    said = CliRunner().invoke(app, ["ledger", str(releases / "silos")])
    inside = guarantee_of(verify(releases / "silos/ledger.jsonl")).epsilon_inside
    assert inside is not None
    words = re.sub(r"[^\w.=;()ε]+", " ", said.output)  # without the table's lines
    assert f"that is for one silo; for one speaker inside it ε = {inside.pld:.4g} (PLD)" in words
    told = json.loads(CliRunner().invoke(app, ["ledger", str(releases / "silos"), "--json"]).stdout)["promised"]
    assert told["unit"] == "silo with all its speakers"
    assert told["inside"]["epsilon_pld"] > 2 * told["epsilon_pld"]
    people = json.loads(CliRunner().invoke(app, ["ledger", str(releases / "eight"), "--json"]).stdout)["promised"]
    assert "inside" not in people


def test_what_is_not_covered_and_what_people_must_say_is_all_there(releases: Path) -> None:
    text = statement_on(releases / "eight")
    covered, blanks = (text.split(f"\n## {n}. ")[1].split("\n## ")[0] for n in (3, 4))
    assert covered.count("\n- ") == 8
    for about in ("trying runs", "Side channels", "before the run", "Other runs on the same people"):
        assert about in covered
    assert len(re.findall(r"^- \*\*[\w -]+:\*\* \[[^]]+\]$", blanks, re.MULTILINE)) == blanks.count("\n- ") == 11


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("noisy", "This is a simulation. Its model must not be released as private"),
        ("quiet", "This run promises nobody anything."),
        ("central", "This run promises nobody anything."),
        ("thousands", "so weak that it must not be called one"),
    ],
)
def test_what_nobody_should_sign_for_is_warned_of_at_the_top(
    runs: Path, releases: Path, name: str, warning: str
) -> None:
    text = statement_on((releases if name == "thousands" else runs) / name)
    assert warning in text
    assert text.index(warning) < text.index("## 1.")


def test_a_run_without_a_ledger_that_holds_gets_none(copied: MakeRun, tmp_path: Path) -> None:
    folder = copied("release")
    (folder / "ledger.jsonl").unlink()
    run = read_run("release", folder)
    with pytest.raises(InputError, match=r"nobody can sign for this run: .*ledger\.jsonl is missing"):
        write_statement(tmp_path / "statement.md", run, judge_run(run))
    assert not (tmp_path / "statement.md").exists()


def test_noise_that_is_correlated_over_rounds_is_called_so(runs: Path) -> None:
    chain = CorrelatedRelease(2.0, 0.5, 3, Banded(column=(1.0, 0.75)))
    run = with_event(read_run("release", runs / "release"), chain)
    facts = facts_of(statement_text(run, judge_run(run)))
    assert facts["noise"].startswith("Gaussian, correlated over rounds, 2 times that bound")
    assert facts["sampling"] == "one of 3 groups after the other, each of it with probability 0.5"


def test_names_of_runs_break_no_table(copied: MakeRun) -> None:
    run = read_run("a | <b>", copied("noisy"))
    facts = facts_of(statement_text(run, judge_run(run)))
    assert facts["run"].startswith(r"a \| &lt;b>")


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_it_for_one_run(runs: Path, tmp_path: Path) -> None:
    page, signed = tmp_path / "page.html", tmp_path / "statement.md"
    words = ["report", str(runs / "noisy"), "--out", str(page), "--statement", str(signed), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["written"] == [str(page), str(signed)]
    assert signed.read_text().startswith("# Statement on the privacy")
    several = CliRunner().invoke(app, ["report", str(runs), "--out", str(page), "--statement", str(signed)])
    assert "--statement is on one run: expected one of central, noisy" in str(several.exception)
