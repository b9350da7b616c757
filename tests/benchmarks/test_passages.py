"""README and guides quote kept runs in place, and these are of the recipes that stand there."""

import re
from pathlib import Path

import pytest
from findings.document import NOT_RUN, render_passages
from findings.kept import Kept
from findings.pages import OF_GUIDES
from findings.passages import PASSAGE
from tests.benches import without_removed_keys
from tests.benchmarks.rendering import archived
from tests.guides import DOCS, blocks

from sottovoce.base.errors import InputError
from sottovoce.config import Suite, load_experiment, load_recipe
from sottovoce.config.loading import as_yaml
from sottovoce.report.archives import open_path

ROOT = DOCS.parent
KEPT = ROOT / "results"
# Of recipes that are runs by themselves: how each run of the suite was started.
STARTED = {
    "guide-corpus": {"private": (), "no-noise": ("federation.privacy.noise_multiplier=0",)},
    "guide-model": {"gru": ()},
}


def page(results: Path, text: str) -> Path:
    archived(results)
    written = results.parent / "README.md"
    written.write_text(text)
    return written


def said(results: Path) -> tuple[str, list[str]]:
    pages, missing = render_passages(Kept(results, results.parent / "docs"), root=results.parent)
    (text,) = pages.values()
    return text, missing


def test_passages_are_written_anew_and_what_is_around_them_stays(results: Path) -> None:
    words = 'It has <!-- kept: wer("suite/dim") -->1 %<!-- end --> here.\n\n'
    page(results, words + '<!-- kept: terminal("suite/dim") -->\nold\n<!-- end -->\nEnd 2 %.\n')
    text, missing = said(results)
    assert not missing
    assert text.startswith('It has <!-- kept: wer("suite/dim") -->[')
    assert "(results/suite.md#dim)<!-- end --> here.\n\n" in text, "links lead from where the page lies"
    assert '<!-- kept: terminal("suite/dim") -->\n```\nOn unseen speakers\n' in text
    assert text.endswith("```\n<!-- end -->\nEnd 2 %.\n")
    page(results, text)
    assert said(results)[0] == text, "writing twice changes nothing"


def test_two_runs_are_compared_as_the_command_says_it(results: Path) -> None:
    page(results, '<!-- kept: compared("suite/dim", "suite/dim") --><!-- end -->')
    assert "-->0.0 points, 0.0 to 0.0, not converged ([suite/dim](results/suite.md#dim) and " in said(results)[0]


def test_what_is_not_kept_is_named_and_a_mistake_is_one_line(results: Path) -> None:
    page(results, 'a\n<!-- kept: wer("suite/lost") -->1<!-- end -->')
    assert said(results) == (f'a\n<!-- kept: wer("suite/lost") -->{NOT_RUN}<!-- end -->', ["suite/lost"])
    page(results, 'a\n<!-- kept: were("suite/dim") -->1<!-- end -->')
    with pytest.raises(InputError, match=r"README\.md:2: 'were' is undefined"):
        said(results)


@pytest.mark.parametrize("suite", sorted(OF_GUIDES))
def test_kept_runs_of_guides_are_those_of_the_recipes(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a recipe changes, its runs are made and kept anew, and the page with them."""
    recipe, guide = OF_GUIDES[suite]
    for block in blocks(DOCS / guide, "python", "yaml"):
        (tmp_path / block.file).write_text(block.content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load_experiment(recipe)
    started = (
        {label: (run.recipe, run.overrides) for label, run in loaded.runs.items()} if isinstance(loaded, Suite) else {}
    )
    started |= {label: (recipe, overrides) for label, overrides in STARTED.get(suite, {}).items()}
    kept = open_path(KEPT / f"{suite}.zip")
    assert {path.name for path in kept.iterdir()} == {*started}
    for label, (name, overrides) in started.items():
        config = without_removed_keys((kept / label / "config.yaml").read_text())
        assert config == as_yaml(load_recipe(name, overrides)), label


@pytest.mark.parametrize(("name", "fewest"), [("README.md", 3), ("docs/guides/your-own-corpus.md", 2)])
def test_pages_have_passages(name: str, fewest: int) -> None:
    assert len(PASSAGE.findall((ROOT / name).read_text(encoding="utf-8"))) >= fewest


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((DOCS / "guides").glob("*.md"))], ids=lambda page: page.stem
)
def test_error_rates_are_those_of_kept_runs(page: Path) -> None:
    """A rate that somebody types goes stale unseen. What a benchmark measures stands with its command; shares of
    parameters stand beside their megabytes, and are counts."""
    around = PASSAGE.sub("", page.read_text(encoding="utf-8"))
    typed = [line for line in around.splitlines() if re.search(r"\d\.\d ?%", line) and "MB |" not in line]
    assert not typed or "python benchmarks/" in around, typed
