"""The page in a real browser: nothing complains, every figure is drawn, both themes are legible, a phone is enough."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.report.browser import Tab, browser, find_browser

from sottovoce.report.page import build_report, write_page
from sottovoce.report.records import read_run
from sottovoce.report.summary import summarise_runs

LAPTOP, PHONE, COMMON_PHONE = 1280, 380, 390
BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 29)"}

# Of every figure: its size on the screen, what is drawn in it, and how large its smallest letters are there.
FIGURES = """[...document.querySelectorAll("figure")].map(figure => {
  const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  const drawn = [...svg.querySelectorAll("[id*=-data-] path, [id*=-data-] use")].filter(part => {
    const size = part.getBoundingClientRect();
    return size.width + size.height > 0;
  });
  const letters = [...svg.querySelectorAll("text")].map(text => parseFloat(getComputedStyle(text).fontSize));
  return {name: figure.id, width: box.width, height: box.height, drawn: drawn.length, words: letters.length,
          letters: Math.min(...letters) * box.width / view.width};
})"""

# WCAG's contrast of text with the page behind it, the least of all kinds of text: 4.5 is what small letters need.
CONTRAST = """(() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = css => {
    const [r, g, b] = css.match(/[\\d.]+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const kinds = "body, a, .quiet, .note, figcaption, td, th, del, ins, summary, .eyebrow, .verdict *";
  const inks = [...document.querySelectorAll(kinds)].map(one => light(getComputedStyle(one).color));
  inks.push(...[...document.querySelectorAll("svg text")].map(one => light(getComputedStyle(one).fill)));
  return Math.min(...inks.map(ink => (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05)));
})()"""

# Whatever lies beyond an edge of the screen and cannot be pushed into it, as a table can within its own box.
CUT_OFF = """[...document.querySelectorAll("body *")]
  .filter(one => !one.closest(".wide") || one.matches(".wide, caption span"))
  .filter(one => {
    const box = one.getBoundingClientRect();
    return box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5);
  }).map(one => `${one.tagName} ${one.id} ${one.textContent.trim().slice(0, 40)}`)"""
# Tables that are wider than their box, in which nobody could reach the rest.
STUCK = """[...document.querySelectorAll(".wide")]
  .filter(one => one.scrollWidth > one.clientWidth && !["auto", "scroll"].includes(getComputedStyle(one).overflowX))
  .length"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no chromium found: the page cannot be tried in a browser")
    with browser(executable, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of three runs, every chapter among them."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    records = [read_run(name, runs / name) for name in ("noisy", "release", "central")]
    write_page(path, build_report(records, title="Three runs in a browser"))
    return path


@pytest.mark.parametrize("width", [LAPTOP, PHONE])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_is_whole_and_legible(tab: Tab, page: Path, theme: str, width: int) -> None:
    tab.open(page, theme=theme, width=width)
    assert tab.complaints == []
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == BACKGROUNDS[theme]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "nobody should have to push it sideways"
    figures = tab.evaluate(FIGURES)
    assert len(figures) >= 12
    for figure in figures:
        assert figure["width"] >= min(300, width - 60), figure
        assert figure["height"] >= 120, figure
        assert figure["drawn"] >= 1, f"an empty plot: {figure}"
        assert figure["words"] >= 4, figure
        assert figure["letters"] >= 7, f"too small to read: {figure}"
    assert tab.evaluate(CONTRAST) >= 4.5


@pytest.fixture(scope="module")
def pages(runs: Path, releases: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What whoever signs has to tell apart: a page of each kind of run, and of several."""
    place = tmp_path_factory.mktemp("pages")
    shown = {
        "simulation": [runs / "noisy"],
        "eight": [releases / "eight"],
        "thousands": [releases / "thousands"],
        "not-private": [runs / "quiet"],
        "suite": [runs / "quiet", runs / "noisy", releases / "eight", releases / "thousands", runs / "central"],
    }
    for name, folders in shown.items():
        records = [read_run(folder.name, folder) for folder in folders]
        summary = summarise_runs(records, path=place / f"{name}.html")
        write_page(summary.path, summary.report(records, title=f"A page of {name}"))
    return {name: place / f"{name}.html" for name in shown}


@pytest.mark.long
@pytest.mark.parametrize("name", ["simulation", "eight", "thousands", "not-private", "suite"])
@pytest.mark.parametrize("width", [LAPTOP, COMMON_PHONE])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_cut_off_whatever_the_verdict(
    tab: Tab, pages: dict[str, Path], name: str, theme: str, width: int
) -> None:
    tab.open(pages[name], theme=theme, width=width)
    assert tab.complaints == []
    tab.evaluate('document.querySelectorAll("details").forEach(one => (one.open = true))')
    assert tab.evaluate("document.scrollingElement.scrollWidth") <= width
    assert tab.evaluate(CUT_OFF) == []
    assert tab.evaluate(STUCK) == 0
    assert tab.evaluate('document.querySelector("main section").id') == "verdict"
    assert tab.evaluate('document.querySelector(".verdict-headline").getBoundingClientRect().top') < 900, (
        "at first sight"
    )
    assert tab.evaluate(CONTRAST) >= 4.5


def test_lines_change_colour_with_the_theme(tab: Tab, page: Path) -> None:
    """The first line of the first figure: Okabe and Ito's blue by day, a lighter one by night."""
    line = """getComputedStyle(document.querySelector("#figure-dev-wer [id*=-data-] > path")).stroke"""
    seen = {}
    for theme in BACKGROUNDS:
        tab.open(page, theme=theme, width=LAPTOP)
        seen[theme] = tab.evaluate(line)
    assert seen == {"light": "rgb(0, 114, 178)", "dark": "rgb(74, 168, 224)"}


def test_a_page_that_is_broken_would_be_noticed(tab: Tab, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<img src='missing.png'><script>console.error('alas'); nowhere();</script>")
    tab.open(broken, theme="light", width=LAPTOP)
    told = " ".join(tab.complaints)
    assert "alas" in told
    assert "Uncaught" in told
    assert "missing.png" in told
