"""Documents from kept runs, for tests."""

from collections.abc import Callable
from pathlib import Path

from findings.document import render

from sottovoce.report.archives import zip_folder

Copy = Callable[..., Path]  # makes another kept run: the fixture `copy`


def archived(results: Path) -> Path:
    """The suites of `results`, folders so far, as archives beside them."""
    for folder in results.iterdir():
        if folder.is_dir():
            zip_folder(folder, results / f"{folder.name}.zip")
    return results


def rendered(results: Path, text: str) -> str:
    archived(results)
    template = results.parent / "docs/results.template.md"
    template.parent.mkdir(exist_ok=True)
    template.write_text(text)
    return render(template, results=results).text.partition("-->\n\n")[2]
