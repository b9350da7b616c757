"""The verdict a report opens with: in words that a simulation, a release and a large ε each deserve."""

import json
import math
from pathlib import Path

import pytest
from tests.report.conftest import MakeRun, with_event
from tests.tampering import rechain
from typer.testing import CliRunner

from sottovoce.audit.canary_audit import DRAWN_BY_CHANCE, HOLDS_TRUTH
from sottovoce.audit.recipe import audit_path, config_digest
from sottovoce.cli import app
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import fixed_size_release, poisson_release
from sottovoce.privacy.membership_odds import bound_membership_odds
from sottovoce.report.audit import audit_section
from sottovoce.report.page import build_report
from sottovoce.report.parts import MacroPart, Paragraph
from sottovoce.report.records import read_run
from sottovoce.report.sections import verdict_table
from sottovoce.report.statement import statement_text
from sottovoce.report.summary import write_report
from sottovoce.report.verdict import Verdict, judge_run, judge_runs, summarise_verdicts


def verdict_of(folder: Path) -> Verdict:
    return judge_run(read_run(folder.name, folder))


def points_of(found: Verdict) -> dict[str, str]:
    return dict(found.points)


# The cases that whoever signs has to tell apart.


def test_a_simulation_protects_nobody_and_says_what_a_release_would_be_worth(runs: Path) -> None:
    found = verdict_of(runs / "noisy")
    assert found.kind == "simulation"
    assert found.headline == (
        "A simulation, which protects nobody. "
        "A release of this recipe would have ε = 0.07051 at δ = 0.001: a strong guarantee."
    )
    told = points_of(found)
    assert told["What somebody can find out"].startswith("Of a release of the same recipe: somebody who tosses a coin")
    assert "whoever has the seed can take the noise out again" in told["Simulated or released"]
    assert told["Which population"].endswith("by its ledger, as if it were a release. Nothing is extrapolated.")
    assert found.status == ("simulated", "seeded: not a release")


def test_a_release_with_eight_is_one_and_says_what_that_allows(releases: Path) -> None:
    found = verdict_of(releases / "eight")
    assert found.kind == "release"
    assert found.headline == "A release with a moderate guarantee: ε = 8 at δ = 0.001."
    assert found.odds is not None
    told = points_of(found)
    learn = told["What somebody can find out"]
    assert f"right 50 times in 100; with all that is published, at most {math.ceil(100 * found.odds.right)}" in learn
    assert 0.5 < found.odds.right < 0.75, "far below what ε = 8 says by itself"
    assert "Odds of 1 : 1 can become at most 2,981 : 1" in learn
    assert "a suspicion of 1 in 100 at most 97 in 100, but for a chance of δ = 0.001" in learn
    assert told["For whom"].startswith("Each speaker of the run, with everything they said in it.")
    assert "Hidden is whether one speaker took part at all" in told["For whom"]
    assert "Not against the machine that trained" in told["Against whom"]
    assert told["Which population"].startswith("ε = 8 (PLD) / 10.27 (RDP) is for the 18 people of this run")
    assert told["Simulated or released"].startswith("In secure mode: cohorts and noise came from the operating system")
    assert found.status == ("release", "secure randomness")


def test_a_secure_run_with_an_epsilon_in_the_thousands_is_no_proud_release(releases: Path) -> None:
    found = verdict_of(releases / "thousands")
    assert found.kind == "nothing"
    assert found.headline == (
        "A release with practically no guarantee: ε = 3,933 at δ = 0.001, however secure its randomness was."
    )
    told = points_of(found)
    assert "Odds of 1 : 1 may become more than 10¹⁷⁰⁸ : 1, which is certainty" in told["What somebody can find out"]
    # (5/6)⁴ = 48 in 100 are never drawn; of the others all is seen: 50 + 26 of 100 guesses.
    assert "at most 76 times" in told["What somebody can find out"]
    assert "48 in 100 are drawn in no round. Who is drawn may be found out for certain" in found.short
    assert told["Simulated or released"].endswith("this one is practically no guarantee.")
    run = read_run("thousands", releases / "thousands")
    people = run.privacy["useful"]["pld"]["population_size"]
    assert people < run.privacy["useful"]["population_size"] == 484  # by RDP it takes more of them
    told_of_more = f"Extrapolated, not run: with {people} people the same recipe would have ε ≤ 8 (PLD)."
    assert told_of_more in told["Which population"]
    headline = build_report([run], title="A title").sections[1]
    key = next(part.content for part in headline.parts if isinstance(part, MacroPart))
    assert ("status", "not private in practice") in [cells[:2] for cells in key]
    assert "release" not in [cell for cells in key for cell in cells]


def test_where_odds_are_beyond_all_bounds_every_guess_may_be_right(runs: Path) -> None:
    run = with_event(read_run("release", runs / "release"), poisson_release(0.01, sampling_rate=0.9))
    learn = points_of(judge_run(run))["What somebody can find out"]
    assert "may be right every time" in learn
    assert "drawn in no round" not in learn


def test_between_the_two_a_guarantee_is_weak(runs: Path) -> None:
    release = read_run("release", runs / "release")
    weak = judge_run(with_event(release, poisson_release(0.4, sampling_rate=1 / 6)))
    assert weak.epsilon is not None
    assert 8 < weak.epsilon < 20
    assert weak.kind == "weak"
    assert weak.headline.startswith("A release with a weak guarantee: ε = ")
    leaking = judge_run(with_event(release, poisson_release(8.0, sampling_rate=1 / 6), population_size=1000))
    assert leaking.kind == "weak"
    assert "it allows one person’s leak" in points_of(leaking)["A large δ"]
    assert judge_run(with_event(read_run("noisy", runs / "noisy"), poisson_release(0.02, sampling_rate=0.2))).brief == (
        "simulated; a release would guarantee next to nothing"
    )


def test_what_is_not_private_says_so_and_why(runs: Path) -> None:
    quiet, central = verdict_of(runs / "quiet"), verdict_of(runs / "central")
    for found in (quiet, central):
        assert found.kind == "not private"
        assert found.headline == "Not private: nothing is promised to anybody."
        assert "For whom" not in points_of(found)
        assert found.epsilon is None
    assert "no noise is added" in points_of(quiet)["Why"]
    assert "in one place" in points_of(central)["Why"]


def test_without_a_ledger_that_holds_there_is_no_verdict(copied: MakeRun) -> None:
    broken = copied("noisy")
    lines = (broken / "ledger.jsonl").read_text().splitlines()
    (broken / "ledger.jsonl").write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    found = verdict_of(broken)
    assert found.kind == "unsound"
    assert found.headline.startswith("No verdict: ")
    missing = copied("quiet")
    (missing / "ledger.jsonl").unlink()
    assert verdict_of(missing).headline == "No verdict: there is no ledger."


def test_cohorts_of_fixed_size_hide_a_replacement_and_silos_say_what_is_left_for_one_speaker(runs: Path) -> None:
    run = read_run("release", runs / "release")
    fixed = with_event(run, fixed_size_release(8.0, cohort_size=3, population_size=18), privacy_unit="silo")
    told = points_of(judge_run(fixed))["For whom"]
    assert "whether it was one silo or another in their place" in told
    assert "One speaker inside a silo has less: ε = " in told, "by the name of older ledgers too"
    served = with_event(run, poisson_release(8.0, sampling_rate=0.1), sum_bits=32)
    assert "Not against the server" in points_of(judge_run(served))["Against whom"]


def test_of_silos_both_are_stated_the_silo_and_one_speaker_inside(releases: Path) -> None:
    """Four rounds with all silos and z = 4 are one Gaussian with z = 2; one speaker moves it by up to 2C: z = 1."""
    run = read_run("silos", releases / "silos")
    assert run.guarantee is not None
    silo, speaker = (epsilon(poisson_release(z, sampling_rate=1.0), 1e-3).pld for z in (2.0, 1.0))
    inside = run.guarantee.epsilon_inside
    assert inside is not None
    assert run.guarantee.epsilon.pld == pytest.approx(silo, abs=1e-3)
    assert inside.pld == pytest.approx(speaker, abs=1e-3)
    found = judge_run(run)
    assert found.headline == (
        f"A release with a moderate guarantee: ε = {silo:.4g} for one silo and ε = {speaker:.4g} for one speaker "
        "inside it, at δ = 0.001."
    )
    told = points_of(found)
    assert f"Each silo, with everything it holds: ε = {silo:.4g} (PLD)" in told["For whom"]
    assert f"One speaker inside a silo has less: ε = {speaker:.4g} (PLD)" in told["For whom"]
    assert "is for the 8 silos of this run" in told["Which population"]
    assert found.odds == bound_membership_odds(run.guarantee.event_inside), "guesses are about people"
    assert found.as_json()["epsilon_inside"] == inside.headline
    assert found.as_json()["unit"] == "silo with all its speakers"


def test_a_silo_guarantee_that_is_weak_for_its_speakers_is_called_weak(releases: Path) -> None:
    run = read_run("silos", releases / "silos")
    weak = judge_run(with_event(run, poisson_release(1.6, sampling_rate=1.0)))
    assert weak.epsilon is not None
    assert weak.epsilon_inside is not None
    assert weak.epsilon < 8 < weak.epsilon_inside
    assert weak.kind == "weak"


def test_a_unit_of_somebody_else_is_not_said_to_be_a_person(runs: Path) -> None:
    other = with_event(
        read_run("release", runs / "release"), poisson_release(8.0, sampling_rate=0.1), privacy_unit="ward"
    )
    told = points_of(judge_run(other))
    assert told["For whom"].startswith("Each ward. Whether that is one person, the ledger does not say.")
    assert "18 units (ward)" in told["Which population"]


def test_the_odds_are_the_ledgers_own(releases: Path) -> None:
    run = read_run("eight", releases / "eight")
    assert run.guarantee is not None
    assert judge_run(run).odds == bound_membership_odds(run.guarantee.event)
    assert judge_run(run).epsilon == run.guarantee.epsilon.headline


# What it costs, and who pays.


def scored(folder: Path, rates: dict[str, float], *, start: float = 0.5) -> None:
    """Other rates by speaker in a run's results, half of them of one gender."""
    content = json.loads((folder / "results.json").read_text())
    for test, change in ((content["test"]["test"], 0.0), (content.get("start", {}).get("test", {}).get("test"), start)):
        if test is not None:
            people = [
                {"speaker": name, "words": 100, "wer": rate + change, "groups": {"gender": "fm"[n % 2]}}
                for n, (name, rate) in enumerate(rates.items())
            ]
            test |= {"per_speaker": people, "wer": sum(one["wer"] for one in people) / len(people)}
    (folder / "results.json").write_text(json.dumps(content))
    rechain(folder)


def test_a_run_is_told_beside_its_start_and_beside_its_twin_without_noise(copied: MakeRun) -> None:
    noisy, quiet = copied("noisy"), copied("quiet")
    scored(noisy, {f"s{n}": 0.30 + 0.01 * (n % 4) for n in range(12)})
    scored(quiet, {f"s{n}": 0.20 + 0.01 * (n % 3) for n in range(12)})
    alone = verdict_of(noisy)
    assert alone.cost is not None
    assert "-50.0 points compared with the model it started from (95 % interval" in alone.cost.words
    assert alone.cost.words.endswith("fewer errors.")
    both = [read_run(folder.name, folder) for folder in (noisy, quiet)]
    found = judge_run(both[0], both)
    assert found.cost is not None
    assert found.cost.twin is not None
    assert found.cost.twin.base == "quiet"
    assert found.cost.twin.difference == pytest.approx(0.105)
    assert "+10.5 points compared with quiet, the same without noise (95 % interval" in found.cost.words
    assert found.cost.start == alone.cost.start, "it stands beside its start as well"
    assert found.cost.words.endswith("more errors.")
    assert judge_run(both[1], both).cost == judge_run(both[1]).cost, "which has no twin with less noise"


def test_the_worst_group_stands_in_the_verdict(copied: MakeRun) -> None:
    noisy = copied("noisy")
    scored(noisy, {f"s{n}": 0.2 + 0.2 * (n % 2) + 0.01 * (n % 3) for n in range(12)})
    told = points_of(verdict_of(noisy))["The worst group"]
    assert told.startswith("Highest error rate of 2 groups: gender m, 41.0 % against 21.0 % of everybody else, +20.0")
    assert "for all 2 groups at once" in told


def test_a_release_says_its_worst_group_before_names_go(copied: MakeRun) -> None:
    release = copied("release")
    content = json.loads((release / "results.json").read_text())
    content["test"]["test"]["worst_group"] = {
        "fact": "gender",
        "group": "female",
        "groups": 3,
        "wer": 0.4,
        "others_wer": 0.3,
        "gap": 0.1,
        "interval": [-0.05, 0.25],
    }
    (release / "results.json").write_text(json.dumps(content))
    told = points_of(verdict_of(release))["The worst group"]
    assert "gender female, 40.0 % against 30.0 %" in told
    assert told.endswith("not significant.")


# Where it stands.


def test_several_runs_have_a_sentence_a_table_and_words_of_their_own(runs: Path, releases: Path) -> None:
    records = [read_run(path.name, path) for path in (runs / "noisy", runs / "quiet", releases / "thousands")]
    found = judge_runs(records)
    assert summarise_verdicts(found) == (
        "Of 3 runs 1 is not private, 1 is a simulation and 1 is not private in practice; "
        "none is a release with a guarantee."
    )
    table = verdict_table(found)
    assert [row[:2] for row in table.rows] == [
        ("noisy", "simulated"),
        ("quiet", "not private"),
        ("thousands", "not private in practice"),
    ]
    assert table.headings[2:6] == (
        *("twin without noise", "ε (PLD, else RDP)", "right guesses in 100", "odds of 1 : 1 become"),
    )
    assert table.headings[6:10] == ("points from start", "95 % interval", "points from twin", "95 % interval")
    assert [row[2] for row in table.rows] == ["quiet", "–", "quiet"], "also of a release, which is not paired with it"
    assert table.rows[2][3:6] == ("3,933", "76", "more than 10¹⁷⁰⁸ : 1")
    assert table.note.endswith("Points are WER less that of the model that a run started from, or of the same run "
                               "without noise.")  # fmt: skip
    assert "thousands,not private in practice,quiet,3933,76," in table.as_csv()
    report = build_report(records, title="Three")
    assert report.sections[0].anchor == "verdict"
    assert "verdicts" in {table.name for table in report.tables}


@pytest.mark.usefixtures("undrawn")
def test_it_opens_page_and_text_and_is_there_for_machines(runs: Path, tmp_path: Path) -> None:
    summary = write_report({"noisy": runs / "noisy"}, tmp_path, title="A title")
    assert summary.verdict.startswith("A simulation, which protects nobody.")
    assert (tmp_path / "report.txt").read_text().splitlines()[2] == summary.verdict
    page = summary.path.read_text()
    assert page.index('id="verdict"') < page.index('id="headline"')
    result = CliRunner().invoke(app, ["report", str(runs / "noisy"), "--out", str(tmp_path / "page.html"), "--json"])
    told = json.loads(result.stdout)["verdicts"]["noisy"]
    assert told["verdict"] == "simulation"
    assert told["odds"] == pytest.approx(math.exp(told["epsilon"]))
    assert 0.5 < told["right_guesses"] < 0.51
    assert told["cost"]["beside"] == "start"


@pytest.mark.parametrize("verdict", ["alarm", "broken"])
def test_an_audit_that_speaks_against_the_promise_comes_before_all_else(verdict: str, copied: MakeRun) -> None:
    folder, quiet = copied("noisy"), copied("quiet")
    _audited(folder, verdict=verdict, why="releases hold 24.8% of the noise that is claimed in output")
    run, other = read_run("mine", folder), read_run("other", quiet)
    found = judge_run(run)
    assert found.headline.startswith("Its audit contradicts what is promised. By the ledger: A simulation, ")
    assert found.points[0][0] == "What an audit found"
    assert "Releases hold 24.8% of the noise" in found.short
    assert found.brief == "contradicted by its audit"
    assert "Audits contradict what is promised: mine." in summarise_verdicts(judge_runs([run, other]))
    (alarm,) = build_report([run, other], title="A title").alarms
    assert alarm == f"mine: {found.against}"
    assert alarm.endswith("Releases hold 24.8% of the noise that is claimed in output.")


def test_an_audit_that_finds_nothing_is_no_alarm_nor_is_one_of_a_release(copied: MakeRun) -> None:
    for name, verdict in (("noisy", "consistent"), ("release", "broken")):
        folder = copied(name)
        before = verdict_of(folder)
        _audited(folder, verdict=verdict, why="as it may be")
        assert verdict_of(folder) == before
        assert not build_report([read_run(name, folder)], title="A title").alarms


@pytest.mark.usefixtures("undrawn")
def test_an_interval_is_said_to_hold_the_truth_only_where_everybody_takes_part(copied: MakeRun, tmp_path: Path) -> None:
    """Of 21 people three are drawn in a round: 0 of 30 intervals held the truth where a tenth was (docs/audit.md)."""
    folder = copied("noisy")
    _audited(folder, verdict="consistent", why="nothing speaks against what is promised")
    run = read_run("noisy", folder)
    everybody = with_event(run, poisson_release(8.0, sampling_rate=1.0))
    for one, said, other in ((run, DRAWN_BY_CHANCE, HOLDS_TRUTH), (everybody, HOLDS_TRUTH, DRAWN_BY_CHANCE)):
        section = audit_section([one])
        assert section is not None
        page = " ".join(
            part.text if isinstance(part, Paragraph) else getattr(part, "note", "") for part in section.parts
        )
        text = statement_text(one, judge_run(one))
        for where in (page, text):
            assert said.lower() in where.lower()
            assert other.lower() not in where.lower()
    assert "98" not in statement_text(run, judge_run(run)).split("| audit |")[1].splitlines()[0]


def _audited(folder: Path, *, verdict: str, why: str) -> None:
    """As if `sottovoce audit` had said that of the run in `folder`."""
    found = {
        "config_digest": config_digest((folder / "config.yaml").read_text()),
        "verdict": verdict,
        "why": why,
        "promised": {"epsilon_pld": 0.07, "epsilon_rdp": 0.08},
        "estimate": {"epsilon": 1.2, "interval": [0.9, 1.5], "level": 0.98, "effect": 0.3},
        "lower_bound": {"epsilon": 0.02},
        "noise": None,
        "canaries": 100,
    }
    audit_path(folder).write_text(json.dumps(found))
