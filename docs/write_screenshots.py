"""Take the pictures of a report's first screen for the documentation, in three widths and two themes.

`PYTHONPATH=. python docs/write_screenshots.py runs/demo --title "…"`, from the root of the project; needs chromium.
"""

import argparse
import tempfile
from pathlib import Path

from PIL import Image
from tests.report.browser import browser, find_browser

from sottovoce.report.page import write_page
from sottovoce.report.records import find_runs, read_run
from sottovoce.report.summary import summarise_runs

IMAGES = Path(__file__).parent / "images"
# Names of the pictures, with width and height of the window in pixels; of a phone's, the whole first screen is shown.
WINDOWS = {"report": (1280, 800), "report-tablet": (768, 1024), "report-phone": (390, None)}
END = "Math.ceil(document.querySelector('#first-screen').getBoundingClientRect().bottom) + 20"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--title", required=True)
    given = parser.parse_args()
    executable = find_browser()
    if executable is None:
        raise SystemExit("chromium is not installed")
    records = [read_run(label, folder) for label, folder in find_runs(given.runs).items()]
    with tempfile.TemporaryDirectory() as place:
        summary = summarise_runs(records, path=Path(place) / "report.html")
        write_page(summary.path, summary.report(records, title=given.title))
        with browser(executable, Path(place) / "profile") as tab:
            for name, (width, height) in WINDOWS.items():
                for theme in ("light", "dark"):
                    tab.open(summary.path, theme=theme, width=width, height=height or 844)
                    if height is None:
                        tab.open(summary.path, theme=theme, width=width, height=tab.evaluate(END))
                    picture = IMAGES / f"{name}-{theme}.png"
                    tab.screenshot(picture)
                    shrink(picture)


def shrink(picture: Path) -> None:
    """To 256 colours, which are all that letters and lines need: a third of the bytes."""
    colours = {"method": Image.Quantize.MAXCOVERAGE, "dither": Image.Dither.NONE}
    Image.open(picture).convert("RGB").quantize(256, **colours).save(picture, optimize=True)


if __name__ == "__main__":
    main()
