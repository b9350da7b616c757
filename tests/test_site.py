"""The site's sources: generated pages are current, notebooks run as shown, and the build notices what is broken."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docs import write_cli
from docs.write_notebooks import NOTEBOOKS, code_cells, read_notebook, render_notebook, shown
from tests.guides import DOCS
from tests.test_guides import same_words
from typer.main import get_command

from sottovoce.cli import app

START = sorted((DOCS / "start").glob("*.md"))


def test_the_reference_of_the_command_line_is_current() -> None:
    assert write_cli.PAGE.read_text(encoding="utf-8") == write_cli.page(), "`make docs` writes it anew"


def test_there_is_a_page_for_every_audience() -> None:
    assert {page.stem for page in START} == {
        *("researcher", "speech-engineer", "privacy-officer", "operator", "participant")
    }


@pytest.mark.parametrize("page", START, ids=lambda page: page.stem)
def test_a_page_for_an_audience_fits_a_screen_and_its_commands_exist(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    commands = [line.split() for line in lines if line.strip().startswith("sottovoce ")]
    assert commands
    for _, *words in commands:
        command: Any = get_command(app)
        while below := getattr(command, "commands", None):
            command = below[words.pop(0)]
        command.make_parser(command.context_class(command)).parse_args(words)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path, tmp_path: Path) -> None:
    """In a process of its own, from an empty folder: it makes speech, starts processes and writes runs.

    Numbers to one in a hundred: they come from training in float32, whose last bits differ between machines, and are
    rounded to three digits at least.
    """
    copy = tmp_path / path.name
    copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(DOCS / "write_notebooks.py"), str(copy)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kept, found = (code_cells(read_notebook(place)) for place in (path, copy))
    for one, other in zip(kept, found, strict=True):
        lines = zip(shown(one).splitlines(), shown(other).splitlines(), strict=True)
        for line, printed in lines:
            assert same_words(line.split(), printed.split(), tolerance=1e-2), f"{printed!r} is not {line!r}"


def test_a_notebook_as_markdown_has_its_code_commands_and_outputs() -> None:
    output = [{"output_type": "stream", "name": "stdout", "text": ["2\n"]}]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["print(1 + 1)"], "outputs": output},
        {"cell_type": "code", "source": ["!sottovoce recipes"], "outputs": []},
    ]
    assert render_notebook({"cells": cells}) == (
        "# Title\ntext\n\n```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n\n```bash\nsottovoce recipes\n```\n"
    )


FAULTS = {
    "[x](gone.md)": "target not found: 'gone.md'",
    "[x](other.md#gone)": "local id not found in doc 'docs/other': 'gone'",
    "[x](#gone)": "target not found: 'gone'",
    "![x](gone.png)": "image file not readable: docs/gone.png",
}


def build_site(root: Path) -> subprocess.CompletedProcess[str]:
    settings = ["-D", "root_doc=docs/index", "-c", str(DOCS / "site"), "-d", str(root / "trees")]
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", *settings, str(root), str(root / "out")]
    return subprocess.run(words, cwd=DOCS.parent, capture_output=True, text=True)


def write_pages(root: Path, *, text: str) -> None:
    (root / "docs").mkdir(exist_ok=True)
    (root / "docs" / "index.md").write_text(f"# Index\n\n{text}\n\n```{{toctree}}\nother\n```\n", encoding="utf-8")
    (root / "docs" / "other.md").write_text('# Other\n\n<a id="run-0.1"></a>\n\n## run-0.1\n\ntext\n', encoding="utf-8")
    (root / "docs" / "table.txt").write_text("1\n", encoding="utf-8")


def test_the_build_accepts_pages_headings_html_anchors_and_files(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra `site` is not installed")
    write_pages(tmp_path, text="[a](other.md), [b](other.md#other), [c](other.md#run-0.1), [d](table.txt)")
    done = build_site(tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "docs" / "index.html").read_text(encoding="utf-8")
    assert 'href="other.html#run-0.1"' in page
    assert "_downloads/" in page


def test_the_build_refuses_what_is_broken(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra `site` is not installed")
    write_pages(tmp_path, text="\n\n".join(FAULTS))
    (tmp_path / "docs" / "alone.md").write_text("# Alone\n", encoding="utf-8")
    done = build_site(tmp_path)
    assert done.returncode != 0
    for expected in (*FAULTS.values(), "alone.md: WARNING: document isn't included in any toctree"):
        assert expected in done.stderr
