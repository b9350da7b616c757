"""What every drawing shares: its colours, the page around it, and how it is written.

Drawings are made without pyplot, so nothing global is touched, and the same content gives the same bytes.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from sottovoce.errors import InputError
from sottovoce.files import written_atomically

SUFFIXES = (".png", ".svg", ".html")

# Okabe and Ito's colours, told apart by nearly every eye.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, FAINT, PAPER = "#1f2430", "#8a90a0", "#ffffff"
# What a page in dark colours shows in their place.
IN_THE_DARK = {
    INK: "#e6e8ee",
    FAINT: "#7d8596",
    "#0072b2": "#4aa8e0",
    "#d55e00": "#ff8a4c",
    "#009e73": "#2ec79b",
    "#cc79a7": "#e39bc4",
    "#e69f00": "#f2b93b",
    "#56b4e9": "#9adcff",
}

# A fixed salt for the same bytes every time. No mathematics: a dollar sign in somebody's name is just that.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "sottovoce", "text.parse_math": False}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --paper: #ffffff; --ink: #1f2430; --quiet: #5b6270; --line: #e3e6ec; {light} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #14171d; --ink: #e6e8ee; --quiet: #a2a9b8; --line: #2b303b; {dark} }}
}}
body {{ margin: 2rem auto; max-width: 56rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; }}
figure {{ margin: 0; }}
svg {{ width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .4rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th[colspan] {{ text-align: center; border: 0; padding-bottom: 0; }}
th:first-child, td:first-child {{ text-align: left; }}
.total {{ font-weight: 600; }}
p {{ color: var(--quiet); font-size: .9rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<figure role="img" aria-label="{description}">
{svg}
</figure>
<div class="wide">
<table>
<thead>
{head}
</thead>
<tbody>
{rows}
</tbody>
</table>
</div>
{notes}
</body>
</html>
"""


@dataclass(frozen=True, kw_only=True)
class Page:
    """What stands around a drawing in HTML. `description` is for whoever cannot see it.

    `total` is the row set in bold, if any; `spans` are words over several columns each, above the headings.
    """

    title: str
    description: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: int | None
    spans: Sequence[tuple[str, int]] = ()
    notes: Sequence[str] = ()


def check_plot(path: Path | str) -> Path:
    """Refuse a place that cannot be drawn to; worth asking before hours of work."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"plot={path}: expected a file name that ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError(f"plot={path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise InputError(f"plot={path}: it is a folder, expected a file")
    return path


def write_drawing(path: Path | str, figure: Callable[[], Figure], page: Callable[[], Page]) -> None:
    """Write to `path` what its suffix says: .png, .svg, or .html (one self-contained page).

    An existing file is replaced only once the new one is complete.
    """
    path = check_plot(path)
    suffix = path.suffix.lower()
    with mpl.rc_context(_STYLE):
        if suffix == ".html":
            content = _html(page(), svg=_rendered(figure(), "svg", background="none").decode()).encode()
        else:
            content = _rendered(figure(), suffix[1:], background=PAPER)
    try:
        with written_atomically(path) as file:
            file.write(content)
    except OSError as error:
        raise InputError(f"plot={path}: cannot be written ({error.strerror})") from None


def _rendered(figure: Figure, kind: str, *, background: str) -> bytes:
    buffer = io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator")) if kind == "svg" else None
    figure.savefig(buffer, format=kind, dpi=160, facecolor=background, metadata=metadata)
    return buffer.getvalue()


def _html(page: Page, *, svg: str) -> str:
    """The page: drawing and table inside, nothing fetched, in the reader's light or dark theme."""
    drawing = svg[svg.index("<svg") :]
    for number, colour in enumerate(IN_THE_DARK):
        drawing = drawing.replace(colour, f"var(--drawn-{number})")
    head = ["".join(f'<th colspan="{width}">{escape(text)}</th>' for text, width in page.spans)] if page.spans else []
    head.append("".join(f"<th>{escape(heading)}</th>" for heading in page.headings))
    total = None if page.total is None else page.total % len(page.rows)
    return _PAGE.format(
        title=escape(page.title),
        description=escape(page.description),
        light=" ".join(f"--drawn-{number}: {colour};" for number, colour in enumerate(IN_THE_DARK)),
        dark=" ".join(f"--drawn-{number}: {colour};" for number, colour in enumerate(IN_THE_DARK.values())),
        svg=drawing,
        head="\n".join(f"<tr>{cells}</tr>" for cells in head),
        rows="\n".join(_row(cells, is_total=number == total) for number, cells in enumerate(page.rows)),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in page.notes),
    )


def _row(cells: Sequence[str], *, is_total: bool) -> str:
    start = '<tr class="total">' if is_total else "<tr>"
    return start + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
