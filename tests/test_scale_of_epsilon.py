"""One scale of ε for whoever signs, whoever takes part and whoever trains; and no simulation that claims one."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sottovoce.config import Suite, load_experiment, recipe_names
from sottovoce.privacy import membership_odds, planner
from sottovoce.privacy.events import poisson_release
from sottovoce.privacy.mechanism_search import single_release
from sottovoce.privacy.membership_odds import bound_membership_odds
from sottovoce.privacy.stated import format_odds
from sottovoce.report import populations as figure
from sottovoce.report.archives import open_path
from sottovoce.report.records import read_run
from sottovoce.report.run_facts import recipe_title, report_title
from sottovoce.report.statement import statement_text
from sottovoce.report.verdict import judge_run, round_up_percent
from sottovoce.training import privacy_report
from sottovoce.training.suites import load_suite_recipes

ROOT = Path(__file__).parents[1]
PAGES = ("docs/privacy.md", "docs/guides/for-whoever-signs.md", "docs/guides/taking-part.md")


def rows_of(page: str) -> list[list[str]]:
    """The rows of its table of ε, without its head."""
    lines = (ROOT / page).read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("| ε | odds"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_the_steps_of_the_scale(page: str) -> None:
    rows = rows_of(page)
    for step, row in zip(membership_odds.SCALE, rows, strict=False):
        last = step is membership_odds.NEXT_TO_NOTHING
        assert row[0] == (f"above {membership_odds.NO_GUARANTEE:g}" if last else f"up to {step.most:g}")
        assert any(re.match(rf"{step.words}\b", cell) for cell in row[2:]), row
        if not last and step.most < 20:
            assert row[1].replace(" to ", " : ") == format_odds(step.most)
    assert len(rows) - len(membership_odds.SCALE) <= 1, "and, for who takes part, that nothing may be promised"


def test_what_the_steps_mean_stands_where_people_read_it() -> None:
    for page in ("docs/privacy.md", "docs/guides/taking-part.md"):
        text = (ROOT / page).read_text()
        assert all(step.means in text for step in membership_odds.SCALE)


def test_right_guesses_are_those_of_one_gaussian_release() -> None:
    for step, row in zip(membership_odds.SCALE[:3], rows_of("docs/privacy.md"), strict=False):
        z = single_release(step.most, delta=1e-6)
        assert int(row[2]) == round_up_percent(bound_membership_odds(poisson_release(z, sampling_rate=1.0)).right)


def test_no_other_page_has_a_scale_of_its_own() -> None:
    """Nobody calls an ε useful, of use or strong by another number."""
    others = re.compile(
        r"(8|10) is (useful|what people call)|8 or 10|promises little|a guarantee of use", re.IGNORECASE
    )
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/guides").glob("*.md")]
    assert [page.name for page in pages if others.search(page.read_text())] == []
    source = [path for path in (ROOT / "src").rglob("*.py") if re.search(r"USEFUL\w* = \d", path.read_text())]
    assert source == []
    assert planner.GUARANTEE == privacy_report.GUARANTEE == figure.GUARANTEE == membership_odds.GUARANTEE == 8


def test_no_recipe_of_a_simulation_says_that_its_epsilon_holds() -> None:
    found = []
    for name in recipe_names():
        experiment = load_experiment(name)
        recipes = load_suite_recipes(experiment) if isinstance(experiment, Suite) else {name: experiment}
        for label, recipe in recipes.items():
            for words in (experiment.about, recipe.about):
                if re.search(r"ε ?[=≤] ?\d", words) and not re.search("would|release", words):
                    found.append((name, label, words))
    assert found == []


def test_no_page_of_kept_runs_has_such_a_title() -> None:
    for page in (ROOT / "results").glob("*.md"):
        outside = re.sub(r"<details>.*?</details>", "", page.read_text(), flags=re.DOTALL)
        assert "for these very people" not in outside, page.name
    for page in ("README.md", "docs/RESULTS.md", "docs/results.template.md"):
        assert not re.search(r"ε = \d+ (holds )?for (these|the) (very|\d)", (ROOT / page).read_text()), page


def test_a_report_says_of_a_simulation_that_a_release_would_have_it() -> None:
    """Also of older runs, whose titles stay as they were."""
    kept = read_run("epsilon-8", open_path(ROOT / "results/had.zip/epsilon-8"))
    older = "1,900 people, each in all of ten rounds, ε = 8 for these very people"
    run = replace(kept, config={**kept.config, "about": older})
    assert recipe_title(run) == "1,900 people, each in all of ten rounds (simulated)"
    release = replace(run, config={**run.config, "federation": {"privacy": {"mode": "secure"}}})
    assert report_title("ε = 8 for all", [release]) == "ε = 8 for all"
    assert report_title("What a release would have: ε = 8", [run]) == "What a release would have: ε = 8"
    assert "very people" not in statement_text(run, judge_run(run))
