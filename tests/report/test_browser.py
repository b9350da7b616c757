"""The page in a real browser: nothing complains, every figure is drawn, both themes are legible, a phone is enough.

Screenshots of the first screen are left in the folder that SOTTOVOCE_SCREENSHOTS names, where it is set.
"""

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.report.browser import Tab, browser, find_browser

from sottovoce.report.page import build_report, write_page
from sottovoce.report.records import read_run
from sottovoce.report.summary import summarise_runs

LAPTOP, TABLET, COMMON_PHONE, PHONE = 1280, 768, 390, 380
HEIGHTS = {LAPTOP: 800, TABLET: 1024, COMMON_PHONE: 844}
PAPER = 696  # pixels of 1/96 inch between the margins of A4
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

# WCAG's contrast of text with what is behind it, the least of all kinds of text: 4.5 is what small letters need.
CONTRAST = """(() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = css => {
    const [r, g, b] = css.match(/[\\d.]+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = one => {
    const css = getComputedStyle(one).backgroundColor;
    return css !== "rgba(0, 0, 0, 0)" || one === document.documentElement ? css : behind(one.parentElement);
  };
  const kinds = "body, a, p, h1, h2, h3, span, dt, dd, td, th, del, ins, summary, figcaption";
  const inks = [...document.querySelectorAll(kinds)].map(one => [light(getComputedStyle(one).color), one]);
  inks.push(...[...document.querySelectorAll("svg text")].map(one => [light(getComputedStyle(one).fill), one]));
  return Math.min(...inks.map(([ink, one]) => {
    const paper = light(behind(one));
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }));
})()"""
OPEN_ALL = 'document.querySelectorAll("details").forEach(one => (one.open = true))'

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
    tab.evaluate(OPEN_ALL)
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
@pytest.mark.parametrize("width", [LAPTOP, TABLET, COMMON_PHONE])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_cut_off_whatever_the_verdict(
    tab: Tab, pages: dict[str, Path], name: str, theme: str, width: int
) -> None:
    tab.open(pages[name], theme=theme, width=width)
    assert tab.complaints == []
    tab.evaluate(OPEN_ALL)
    assert tab.evaluate("document.scrollingElement.scrollWidth") <= width
    assert tab.evaluate(CUT_OFF) == []
    assert tab.evaluate(STUCK) == 0
    assert tab.evaluate('document.querySelector(".verdict-headline").getBoundingClientRect().height') > 0
    assert tab.evaluate(CONTRAST) >= 4.5


@pytest.mark.parametrize("name", ["simulation", "suite"])
@pytest.mark.parametrize("width", HEIGHTS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_first_screen_is_whole(tab: Tab, pages: dict[str, Path], name: str, theme: str, width: int) -> None:
    """On a laptop and a tablet everything fits on it; on a phone the badge and the first answer do."""
    height = HEIGHTS[width]
    tab.open(pages[name], theme=theme, width=width, height=height)
    assert tab.complaints == []
    if folder := os.environ.get("SOTTOVOCE_SCREENSHOTS"):
        tab.screenshot(Path(folder) / f"{name}-{width}-{theme}.png")
    assert tab.evaluate('document.querySelector("main section").id') == "first-screen"
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert tab.evaluate(CUT_OFF) == []
    assert tab.evaluate(CONTRAST) >= 4.5
    last = ".answers div" if width == COMMON_PHONE else "#first-screen"
    assert tab.evaluate(f"document.querySelector('{last}').getBoundingClientRect().bottom") <= height
    figure = tab.evaluate(FIGURES)[0]
    assert figure["name"] == "figure-wer-epsilon"
    assert figure["letters"] >= 8
    assert figure["drawn"] >= 2
    words = tab.evaluate('document.querySelector("#first-screen").innerText')
    assert "10\N{SUPERSCRIPT ONE}" not in words, "odds that nobody can read"


def test_sections_open_by_keyboard_and_by_a_link(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["simulation"], theme="light", width=LAPTOP)
    assert tab.evaluate('document.querySelectorAll("main > section > details[open]").length') == 0
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.textContent.trim()") == "Verdict"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the reader sees where"
    tab.press("Enter")
    assert tab.evaluate('document.querySelector("#verdict").closest("details").open')
    tab.evaluate('location.hash = "ledger"')
    assert tab.evaluate('document.querySelector("#ledger").closest("details").open')


def test_a_screen_reader_is_told_what_is_there(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["suite"], theme="light", width=LAPTOP)
    tab.evaluate(OPEN_ALL)
    told = tab.names_and_roles()
    roles = [role for role, _ in told]
    for landmark in ("banner", "main", "contentinfo", "region"):
        assert landmark in roles, landmark
    assert all(name for role, name in told if role in ("image", "img", "region", "heading", "rowheader"))
    (picture,) = [
        name for role, name in told if role in ("image", "img") and name.startswith("Word error rate on test a")
    ]
    assert "before training" in picture
    headings = tab.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(one => +one.tagName[1])")
    assert headings[0] == 1
    assert all(deeper - level <= 1 for level, deeper in pairwise(headings)), "no level is left out"
    unscoped = tab.evaluate("document.querySelectorAll('th:not([scope])').length")
    assert unscoped == 0


@pytest.mark.parametrize("name", ["simulation", "eight", "thousands", "not-private", "suite"])
def test_it_is_printed_on_two_pages(tab: Tab, pages: dict[str, Path], name: str) -> None:
    tab.open(pages[name], theme="dark", width=PAPER, medium="print")
    assert tab.evaluate("document.documentElement.scrollWidth") <= PAPER, "nothing is cut, as paper does not scroll"
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == BACKGROUNDS["light"]
    assert tab.print_pages() <= 2
    tab.evaluate(OPEN_ALL)
    assert tab.print_pages() > 2, "what the reader has opened is printed, too"


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
