"""No error rate of a run that has not converged stands on a page without the word; intervals say what they cover."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from findings.kept import Kept
from findings.pages import suite_pages
from tests.benchmarks.rendering import Copy, archived, rendered

from sottovoce.base.errors import InputError
from sottovoce.evaluation.converged import judge_metrics
from sottovoce.report.archives import open_path

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "docs").glob("RESULTS*.md"))
OTHERS = [ROOT / "README.md", *sorted((ROOT / "docs/guides").glob("*.md"))]
WORDS = "not converged"
# At least so many rates in prose, and rows and cells of tables: a scan that finds fewer has missed some.
FEWEST = {"RESULTS": (40, 41), "RESULTS-gao": (14, 5), "RESULTS-ramesh": (31, 32)}

LINK = re.compile(r"\[(?P<said>[^\]]*)\]\([^)]*results/(?P<suite>[^)#/]+)\.md#(?P<label>[^)]+)\)")
BRACKET = r"\((?P<inside>(?:\[[^\]]*\]\([^)]*\)|[^()])*)\)"
# "27.0 % (…)", "−3.1 points (…)", "+2.0 points, −0.9 to +4.8, … (…)"; "[38.2 % (35.1–41.0)](…)"; "[38.2 %](…) (…)".
PHRASE = re.compile(rf"\d\.\d (?:%|points)(?P<before>, [^()]*)? {BRACKET}")
SINGLE = re.compile(r"\[(?P<inside>[^\]]*\d % \([^)]*\))\](?P<link>\([^)]*\))")
ALONE = re.compile(rf"\[[\d.]+ %\](?P<link>\([^)]*\)) {BRACKET}")
CELL = re.compile(r"\[\**\d+\.\d\**\](?P<link>\([^)]*results/[^)]*\))")


@cache
def verdict(suite: str, label: str) -> str:
    """By the files themselves."""
    folder = open_path(ROOT / f"results/{suite}.zip") / label
    results = json.loads((folder / "results.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = (results.get("ended") or {}).get("step", records[-1]["step"])
    return judge_metrics(records, results["model"], last_step=last)


def verdicts(text: str) -> list[str]:
    return [verdict(found["suite"], found["label"]) for found in LINK.finditer(text)]


def phrases(text: str) -> Iterator[tuple[str, list[str], bool]]:
    """Every rate or difference in a sentence: what it is, what its runs are, and whether the word stands beside it."""
    for found in PHRASE.finditer(text):
        if runs := verdicts(found["inside"]):
            yield found[0], runs, WORDS in f"{found['before']}{found['inside']}"
    for pattern in (SINGLE, ALONE):
        for found in pattern.finditer(text):
            if runs := verdicts(f"[]{found['link']}"):
                yield found[0], runs, WORDS in found["inside"]


def tables(text: str) -> Iterator[list[str]]:
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        yield block.splitlines()


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def said_of(runs: list[str]) -> str:
    return runs[0] if len(set(runs)) == 1 else f"{runs.count('yes')} of {len(runs)}"


# What is in the repository.


@pytest.mark.parametrize(
    ("page", "fewest"),
    [*((page, FEWEST[page.stem][0]) for page in RESULTS), *((page, 0) for page in OTHERS)],
    ids=lambda found: found.stem if isinstance(found, Path) else "",
)
def test_no_rate_stands_without_the_word(page: Path, fewest: int) -> None:
    text = page.read_text(encoding="utf-8")
    found = list(phrases(text))
    assert len(found) >= fewest
    assert [said for said, runs, marked in found if {*runs} != {"yes"} and not marked] == []
    for shown in re.findall(r"^On unseen speakers\n(.*)$", text, flags=re.MULTILINE):
        assert shown.split()[0] == "converged"


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_every_table_of_runs_says_which_had_converged(page: Path) -> None:
    counted = 0
    for head, _, *rows in tables(page.read_text(encoding="utf-8")):
        if "runs by seed" in head:
            place = cells(head).index("converged")
            for row in rows:
                assert cells(row)[place] == said_of(verdicts(cells(row)[-1])), row
                counted += 1
        else:
            for cell in (cell for row in rows for cell in cells(row) if CELL.search(cell)):
                assert {*verdicts(cell)} == {"yes"} or WORDS in cells(head)[0] or WORDS in cell, cell
                counted += 1
    assert counted >= FEWEST[page.stem][1]


def test_every_page_of_a_suite_says_which_runs_had_converged() -> None:
    counted = 0
    for page in sorted((ROOT / "results").glob("*.md")):
        parts = re.split(r'<a id="(.+)"></a>\n', page.read_text(encoding="utf-8"))[1:]
        for label, part in zip(*[iter(parts)] * 2, strict=True):
            assert f"\n| converged | {verdict(page.stem, label)} |\n" in part, f"{page.stem}/{label}"
            counted += 1
    kept = sum(path.is_dir() for archive in (ROOT / "results").glob("*.zip") for path in open_path(archive).iterdir())
    assert counted == kept


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_the_words_are_explained_once(page: Path) -> None:
    template = page.with_name(page.name.replace("RESULTS", "results").replace(".md", ".template.md")).read_text()
    reading = template.partition("## How to read this page")[2].partition("\n## ")[0]
    for words in (WORDS, "*not shown*", "*One seed model*", "*Whole seeds*", "covers test speakers"):
        assert reading.count(words) == 1, words


# Runs that were made up.


def ended(folder: Path, *scores: float) -> None:
    """As if the dev WER had been `scores`, evenly over its eight rounds."""
    rounds = [{"step": step} for step in range(1, 9)]
    records = [{"step": n, "dev_wer": score} for n, score in enumerate(scores, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*records, *rounds[len(records) :]]))


CONVERGED = (0.9, 0.5, 0.4, 0.45, 0.45, 0.42, 0.44, 0.41)
IMPROVING = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
SECOND = ("seed: 1\n", "seed: 2\n")
EVERYWHERE = (
    '{{ wer("suite/a") }}\n{{ mean("suite/a") }}\n{{ dev("suite/a") }}\n{{ difference("suite/a", "suite/b") }}\n'
    '{{ compared("suite/a", "suite/b") }}\n{{ value("suite/a", "results.model.dev_wer", ".1%") }}\n'
    '{{ grid("suite", label="(a|b)()") }}\n{{ wer_figure("suite", name="f", only=["a", "b"]) }}\n'
)


@pytest.mark.parametrize(("scores", "said"), [(CONVERGED, "yes"), (IMPROVING, "no"), ((0.4,), "not shown")])
def test_the_word_stands_wherever_a_rate_does(results: Path, copy: Copy, scores: tuple[float, ...], said: str) -> None:
    for label, more in (("a", ()), ("a-seed2", (SECOND,)), ("b", ()), ("b-seed2", (SECOND,))):
        ended(copy(label, *more), *scores)
    told = rendered(results, EVERYWHERE).splitlines()
    at_all = [WORDS in line for line in told[:6]]
    assert at_all == [said != "yes"] * 6, told[:6]
    assert told[6].startswith("| converged |" if said == "yes" else f"| {WORDS} |")
    assert ("Converged: none of 4 runs." in told[-1]) is (said != "yes")
    table = rendered(results, '{{ table("suite", "test", only=["a"]) }}').splitlines()
    assert cells(table[0])[-2:] == ["converged", "runs by seed"]
    assert cells(table[2])[-2] == said
    page = suite_pages(Kept(archived(results), results))["suite"]
    assert f"| converged | {said} |" in page.partition('<a id="a"></a>')[2].partition("<a id=")[0]


def test_of_several_seeds_it_is_how_many(results: Path, copy: Copy) -> None:
    ended(copy("a"), *CONVERGED)
    ended(copy("a-seed2", SECOND), *IMPROVING)
    ended(copy("b"), *CONVERGED)
    told = rendered(results, '{{ table("suite", "test", only=["a", "b"]) }}\n{{ mean("suite/a") }}').splitlines()
    assert [cells(row)[-2] for row in told[2:4]] == ["1 of 2", "yes"]
    assert WORDS in told[-1]
    corner, _, *rows = rendered(results, '{{ grid("suite", label="(a|b)()") }}').splitlines()
    assert corner.startswith("|  |")
    assert [WORDS in row for row in rows[:2]] == [True, False]


def test_a_start_speaks_for_itself(results: Path, copy: Copy) -> None:
    folder = copy("a")
    ended(folder, *IMPROVING)
    assert WORDS in rendered(results, '{{ startwer("suite/a") }}')
    content = json.loads((folder / "results.json").read_text())
    content["start"]["converged"] = "yes"
    (folder / "results.json").write_text(json.dumps(content))
    told = rendered(
        results, '{{ startwer("suite/a") }}\n{{ mean("suite/a") }}\n{{ table("suite", "start", only=["a"]) }}'
    )
    assert [WORDS in line for line in told.splitlines()[:3]] == [False, True, False]


# Seeds.

STARTED = ("seed_model: null", "seed_model: benchmark/seed-lars")
PEOPLE = ("  store: tones\n", "  store: tones\n  people_seed: {}\n")


def people(seed: int) -> tuple[str, str]:
    return PEOPLE[0], PEOPLE[1].format(seed)


def test_what_seeds_share_stands_beside_what_they_say(results: Path, copy: Copy) -> None:
    for label in ("a", "b"):
        copy(label, STARTED, people(1))
        copy(f"{label}-seed2", STARTED, SECOND, people(1))
        copy(f"{label}-whole2", STARTED, SECOND, people(2))
        copy(f"{label}-own", STARTED)
        copy(f"{label}-own-seed2", STARTED, SECOND)
    for setting, words, beneath in (
        ("{}", "one seed model", "Seeds share one seed model."),
        ("{}-whole", "whole seeds", "Each seed has its own start."),
        ("{}-own", "whole seeds", "Each seed has its own start."),  # without people_seed, a seed model follows the seed
    ):
        a, b = setting.format("a"), setting.format("b")
        text = f'{{{{ difference("suite/{a}", "suite/{b}") }}}}\n{{{{ mean("suite/{a}") }}}}\n'
        told = rendered(results, text + f'{{{{ table("suite", "test", only=["{a}"]) }}}}').splitlines()
        assert f", {words}, " in told[0]
        assert f", {words}, " in told[1]
        assert told[-1].endswith(beneath)
    mixed = rendered(results, '{{ difference("suite/a", "suite/b-own") }}')
    assert ", one seed model, " in mixed, "it is enough that one of the two shares it"


def test_whole_repeats_are_a_setting_of_their_own_with_the_first_run(results: Path, copy: Copy) -> None:
    copy("a", STARTED, people(1))
    for seed in (2, 3):
        copy(f"a-whole{seed}", STARTED, ("seed: 1\n", f"seed: {seed}\n"), people(seed))
    kept = Kept(archived(results), results.parent / "docs")
    assert {seed: run.label for seed, run in kept.repeats("suite/a-whole").items()} == {
        1: "suite/a",
        2: "suite/a-whole2",
        3: "suite/a-whole3",
    }
    assert list(kept.repeats("suite/a")) == [1]
    assert kept.settings("suite") == ["suite/a", "suite/a-whole", "suite/dim"]


def test_under_the_usual_name_repeats_may_be_whole_if_all_are(results: Path, copy: Copy) -> None:
    copy("a", STARTED, people(1))
    copy("a-seed2", STARTED, SECOND, people(2))
    assert ", whole seeds, " in rendered(results, '{{ mean("suite/a") }}')
    copy("a-seed3", STARTED, ("seed: 1\n", "seed: 3\n"), people(1))
    with pytest.raises(InputError, match=r"expected suite/a with another seed, but it differs in data\.people_seed"):
        rendered(results, '{{ mean("suite/a") }}')


def test_a_repeat_that_is_called_whole_must_be(results: Path, copy: Copy) -> None:
    copy("a", STARTED, people(1))
    copy("a-whole2", STARTED, SECOND, people(1))
    with pytest.raises(InputError, match=r"suite/a-whole: expected data\.people_seed to be the seed of each"):
        rendered(results, '{{ mean("suite/a-whole") }}')
