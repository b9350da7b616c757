"""The first screen: the right run of several, what it promises, what that costs, who is understood worst."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.report.conftest import MakeRun, with_event
from tests.report.test_page import words_of
from tests.report.test_verdict import scored

from sottovoce.privacy.events import poisson_release
from sottovoce.report.comparisons import NOT_COUNTED, find_noiseless_twin
from sottovoce.report.first_screen import FirstScreen, first_screen
from sottovoce.report.page import as_html, build_report
from sottovoce.report.privacy_picture import BEFORE, NO_NOISE, NOT_KNOWN, EpsilonAxis, _points
from sottovoce.report.records import RunRecord, read_run
from sottovoce.report.verdict import judge_runs


def screen_of(runs: Sequence[RunRecord]) -> FirstScreen:
    return first_screen(runs, judge_runs(runs))


def answers_of(screen: FirstScreen) -> dict[str, tuple[str, str]]:
    return {one.question: (one.short, one.words) for one in screen.answers}


def with_settings(run: RunRecord, label: str, **federation: Any) -> RunRecord:
    """The same run of a recipe with another label and other settings."""
    return replace(run, label=label, config={**run.config, "federation": {**run.federation, **federation}})


@pytest.fixture
def pair(copied: MakeRun) -> list[RunRecord]:
    """A run with noise and the same without, with rates by speaker of which the second are lower."""
    noisy, quiet = copied("noisy"), copied("quiet")
    scored(noisy, {f"s{n}": 0.30 + 0.01 * (n % 4) for n in range(12)})
    scored(quiet, {f"s{n}": 0.20 + 0.01 * (n % 3) for n in range(12)})
    return [read_run("noisy", noisy), read_run("quiet", quiet)]


# What it says.


def test_a_simulation_beside_its_twin_answers_the_three_questions(pair: list[RunRecord]) -> None:
    found = screen_of(pair)
    assert found.badge == "Simulation"
    assert found.about.startswith("About noisy, the only run here with ε ≤ 8. Of 2 runs 1 is ")
    told = answers_of(found)
    short, words = told["What is promised"]
    assert short == "ε = 0.07051: strong"
    assert words.startswith(
        "This simulation protects nobody. A release of its recipe would promise each of 18 people, "
    )
    assert "right at most 51 times in 100; a coin, 50 times. Nothing is promised against the machine" in words
    short, words = told["What it costs"]
    assert short == "+10.5 points of WER"
    assert words.startswith("Privacy costs 10.5 points of word error rate (95 % interval +")
    assert "31.5 % of words wrong on test, 21.0 % with quiet, the same without noise. Before training: 81.5 %" in words
    assert "since then -50.0 points (95 % interval -" in words
    short, words = told["Who is understood worst"]
    assert short == "gender m: 32.0 % WER"
    assert words.startswith("Highest error rate of 2 groups: gender m, 32.0 % against 31.0 % of everybody else")


def test_a_single_run_says_what_it_gained_and_that_its_cost_is_not_known(pair: list[RunRecord]) -> None:
    found = screen_of(pair[:1])
    assert found.about == ""
    short, words = answers_of(found)["What it costs"]
    assert short == "31.5 % WER; cost of noise not known"
    assert "no run here is the same without noise. Before training: 81.5 %, and since then -50.0 points (95 %" in words
    assert answers_of(screen_of(pair[1:]))["What it costs"][1].startswith("Without noise there is no cost: 21.0 % ")


def test_an_epsilon_that_rules_nothing_out_is_told_in_words(releases: Path) -> None:
    found = screen_of([read_run("thousands", releases / "thousands")])
    assert found.badge == "Release, no guarantee"
    short, words = answers_of(found)["What is promised"]
    assert short == "no guarantee worth the name"
    assert words.startswith("ε = 3,933 is so large that it rules nothing out, for anybody")
    assert "10¹" not in words


@pytest.mark.parametrize(
    ("name", "badge", "short", "said"),
    [
        ("eight", "Release", "ε = 8: moderate", "is promised ε = 8 at δ = 0.001."),
        ("silos", "Release", "ε = ", "and one speaker inside it ε = "),
    ],
)
def test_a_release_is_badged_and_says_whom_it_promises_what(
    releases: Path, name: str, badge: str, short: str, said: str
) -> None:
    found = screen_of([read_run(name, releases / name)])
    assert found.badge == badge
    told = answers_of(found)["What is promised"]
    assert told[0].startswith(short)
    assert told[1].startswith("Each of ")
    assert said in told[1]


@pytest.mark.parametrize(
    ("name", "badge", "said"),
    [
        ("central", "Not private", "Training on everybody’s speech in one place"),
        ("quiet", "Not private", "Federated, but without a guarantee: no noise is added"),
    ],
)
def test_a_run_that_promises_nothing_says_so(runs: Path, name: str, badge: str, said: str) -> None:
    found = screen_of([read_run(name, runs / name)])
    short, words = answers_of(found)["What is promised"]
    assert (found.badge, short) == (badge, "nothing")
    assert words.startswith(said)
    assert words.endswith("Whoever has the model may find out who took part, and what they said.")


def test_a_ledger_that_does_not_hold_and_a_run_without_results_promise_nothing_known(copied: MakeRun) -> None:
    folder = copied("noisy")
    (folder / "results.json").unlink()
    found = screen_of([read_run("noisy", folder)])
    assert answers_of(found)["What it costs"] == ("not known", "The run is not finished, and there are no results yet.")
    assert found.drawing is None
    (folder / "ledger.jsonl").unlink()
    found = screen_of([read_run("noisy", folder)])
    assert (found.badge, answers_of(found)["What is promised"][0]) == ("Not verified", "not known")


# Which run it is about, and which is its twin.


def test_of_several_runs_it_is_about_the_best_recipe_with_a_useful_epsilon(runs: Path) -> None:
    """Of seeds the first, not the luckiest; a run with ε above 8 does not count, however few errors it has."""
    noisy = read_run("noisy", runs / "noisy")

    def run(label: str, dev: float, *, seed: int = 1, lr: float = 0.01) -> RunRecord:
        results = {**noisy.results, "model": {**noisy.results["model"], "dev_wer": dev}}
        local = {**noisy.federation["local"], "lr": lr}
        one = replace(with_settings(noisy, label, local=local), results=results)
        return replace(one, config={**one.config, "seed": seed})

    worse, first, lucky = run("worse", 0.4), run("first", 0.3, lr=0.2), run("lucky", 0.2, seed=2, lr=0.2)
    large = with_event(run("large", 0.1), poisson_release(0.3, sampling_rate=1.0))
    found = screen_of([large, worse, first, lucky])
    assert found.about.startswith("About first: of 3 runs with ε ≤ 8, its recipe has the fewest errors on the dev ")
    assert screen_of([large, read_run("quiet", runs / "quiet")]).about.startswith("About large: no run here has ε ≤ 8")
    release = read_run("release", runs / "release")
    assert screen_of([worse, first, release]).about.startswith("About release, the only release here with ε ≤ 8.")
    none = [read_run(name, runs / name) for name in ("central", "quiet")]
    assert screen_of(none).about.startswith("About ")


def test_a_twin_may_have_rates_of_its_own_and_need_not_clip(runs: Path) -> None:
    noisy, quiet = (read_run(name, runs / name) for name in ("noisy", "quiet"))
    tuned = with_settings(quiet, "tuned", local={**quiet.federation["local"], "lr": 0.7})
    free = with_settings(
        quiet, "free", privacy={**quiet.privacy_settings, "clip_bound": float("inf"), "share": "global"}
    )
    longer = with_settings(quiet, "longer", steps=99)
    clipped = with_settings(quiet, "clipped", privacy={**quiet.privacy_settings, "clip_bound": 0.5})
    for twin, said in (
        (quiet, "the same without noise"),
        (tuned, "the same without noise, with learning rates of its own"),
        (free, "the same without clipping and noise"),
    ):
        found = judge_runs([noisy, longer, clipped, twin])[0].cost
        assert found is not None
        assert found.twin is not None
        assert (found.twin.base, found.twin_is) == (twin.label, said)
    assert find_noiseless_twin(noisy, [noisy, longer, clipped]) is None, "other recipes"
    assert find_noiseless_twin(quiet, [noisy, quiet, tuned]) is None, "it has no noise itself"
    assert find_noiseless_twin(noisy, [free, tuned]) is tuned, "which clips as it does"


def test_of_several_twins_the_best_on_dev_is_taken(runs: Path) -> None:
    """An untuned one would show too small a cost."""
    noisy, quiet = (read_run(name, runs / name) for name in ("noisy", "quiet"))
    best = replace(quiet, label="best", results={**quiet.results, "model": {"dev_wer": -1.0}})
    assert find_noiseless_twin(noisy, [quiet, best]) is best


def test_without_counts_by_speaker_the_plain_difference_is_stated(copied: MakeRun) -> None:
    """As in results that are kept in brief."""
    folder = copied("noisy")
    content = json.loads((folder / "results.json").read_text())
    del content["start"]["test"]["test"]["per_speaker"]
    run = replace(read_run("noisy", folder), results=content)
    (found,) = judge_runs([run])
    assert found.cost is not None
    assert found.cost.start is not None
    rates = (content["test"]["test"]["wer"], content["start"]["test"]["test"]["wer"])
    assert found.cost.start.difference == pytest.approx(rates[0] - rates[1])
    assert found.cost.start.interval is None
    assert f"without an interval: {NOT_COUNTED}" in found.cost.words
    content["start"]["test"]["test"]["store"] = "another"
    (found,) = judge_runs([replace(run, results=content)])
    assert found.cost is not None
    assert found.cost.start is None, "other speech"


# The picture.


def test_the_picture_has_the_run_between_its_start_and_its_twin(pair: list[RunRecord]) -> None:
    points = _points(pair[0], pair, judge_runs(pair), "test")
    assert [(one.label, one.is_main) for one in points] == [
        ("before training", True),
        ("noisy", True),
        ("quiet", True),
    ]
    assert [one.place for one in points] == [BEFORE, pytest.approx(0.0705, abs=1e-4), NO_NOISE]
    drawing = screen_of(pair).drawing
    assert drawing is not None
    assert "before training: 81.5 %" in drawing.alt
    assert "noisy at ε = 0.07051: 31.5 %" in drawing.alt
    assert "quiet, no noise: 21.0 %" in drawing.alt
    figure = drawing.draw()
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["81.5 %", "31.5 %", "21.0 %"]


def test_an_axis_has_only_the_ranges_and_columns_that_are_needed(pair: list[RunRecord], runs: Path) -> None:
    unsound = replace(pair[0], label="other", ledger=None)
    records = [*pair, unsound]
    axis = EpsilonAxis.of(_points(pair[0], records, judge_runs(records), "test"))
    assert list(axis.words.values()) == [
        *("strong\nε ≤ 1", "moderate\nε ≤ 8", "weak\nε ≤ 20", "next to\nnothing"),
        *(NO_NOISE, NOT_KNOWN, BEFORE),
    ]
    assert axis.width == 7
    quiet = EpsilonAxis.of(_points(pair[1], pair[1:], judge_runs(pair[1:]), "test"))
    assert list(quiet.words.values()) == [NO_NOISE, BEFORE]


def test_many_runs_are_faint_and_share_one_line_of_the_legend(pair: list[RunRecord]) -> None:
    others = [replace(pair[0], label=f"seed{n}") for n in range(12)]
    records = [*pair, *others]
    drawing = screen_of(records).drawing
    assert drawing is not None
    assert "12 other runs: 31.5 % to 31.5 %." in drawing.alt
    (axes,) = drawing.draw().axes
    assert axes.get_legend_handles_labels()[1] == ["before training", "noisy", "other runs here", "quiet"]
    spread = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1]
    assert max(spread) < axes.get_xlim()[1]


# On the page.


@pytest.mark.usefixtures("undrawn")
def test_the_page_begins_with_it_and_folds_the_rest(pair: list[RunRecord]) -> None:
    page = as_html(build_report(pair, title="A title"))
    first, _, rest = page.partition("</section>")
    assert 'id="first-screen"' in first
    assert "10⁵" not in first
    assert "What is promised ε = 0.07051: strong" in words_of(first).replace("\N{NO-BREAK SPACE}", " ")
    assert "<details" not in first
    assert rest.count("<section") == rest.count('<section aria-labelledby="') >= 10
    for section in rest.split("<section")[1:]:
        assert section.partition(">")[2].strip().startswith("<details>\n<summary><h2 id=")
