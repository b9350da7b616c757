"""Pages name files that are there, and are written in lines that fit a screen."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "sottovoce"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
# Written by programs from kept runs, docstrings or settings, templates of such pages, or changelogs: lines not wrapped.
GENERATED = re.compile(
    r"docs/(RESULTS.*|results.*\.template|api|cli|history|keys|benchmarks-peers)\.md|results/.*|CHANGELOG\.md"
)
PASSAGE = re.compile(r"<!-- kept:.*?<!-- end -->|(?<!`)`[^`\n]+`(?!`)", re.S)  # generated text, and code within a line
LONGEST = 120


def written_pages() -> list[Path]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(SOURCE / "recipes").rglob("*.md")]
    return sorted(page for page in pages if not GENERATED.fullmatch(page.relative_to(ROOT).as_posix()))


def long_lines(text: str) -> list[str]:
    """Lines of prose above the limit: not of code, tables or headings, nor one long word."""
    found, is_code = [], False
    for line in PASSAGE.sub("", text).splitlines():
        is_code ^= line.lstrip().startswith(("```", "~~~"))
        is_prose = not is_code and not line.lstrip().startswith(("|", "#", "![", "<"))
        if is_prose and len(line) > LONGEST and " " in line.strip()[:LONGEST].lstrip("-* "):
            found.append(line)
    return found


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_fit_a_screen(page: Path) -> None:
    assert not long_lines(page.read_text(encoding="utf-8"))


def test_the_walks_through_the_code_name_files_that_are_there() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|yaml))`", ARCHITECTURE.read_text(encoding="utf-8"))
    assert len({*named}) > 50
    assert not [path for path in named if not (SOURCE / path).is_file()]


def test_every_change_of_the_table_takes_three_files_at_most() -> None:
    _, table = ARCHITECTURE.read_text(encoding="utf-8").split("## I want to change …")
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 15
    assert all(len(re.findall(r"`[\w/]+\.\w+`|the folder of|a module in", row)) <= 3 for row in rows)
