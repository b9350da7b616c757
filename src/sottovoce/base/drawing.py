"""What every drawing shares: its colours, the page around it, and how it is written.

Drawings are made without pyplot, so nothing global is touched, and the same content gives the same bytes.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sottovoce.base.errors import InputError
from sottovoce.base.files import write_atomically
from sottovoce.base.tables import Table

SUFFIXES = (".png", ".svg", ".html", ".pdf")
Grid = Literal["both", "x", "y"]

# Okabe and Ito's colours, which people with colour blindness can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# Beyond six of them, lines and marks change as well as colours.
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, FAINT, PAPER = "#1f2430", "#8a90a0", "#ffffff"
# What replaces them in the dark theme.
DARK_COLOURS = {
    INK: "#e6e8ee",
    FAINT: "#7d8596",
    "#0072b2": "#4aa8e0",
    "#d55e00": "#ff8a4c",
    "#009e73": "#2ec79b",
    "#cc79a7": "#e39bc4",
    "#e69f00": "#f2b93b",
    "#56b4e9": "#9adcff",
}

# A fixed salt gives the same bytes every time. No mathematics: a dollar sign in a name is only a dollar sign.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "sottovoce", "text.parse_math": False}


@dataclass(frozen=True, kw_only=True)
class FigurePage:
    """What surrounds a figure in HTML. `description` is the alternative text."""

    title: str
    description: str
    table: Table
    notes: Sequence[str] = ()


def check_plot(path: Path | str) -> Path:
    """Refuse a path that cannot be drawn to, before hours of work."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"plot={path}: expected a file name that ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError(f"plot={path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise InputError(f"plot={path}: it is a folder, expected a file")
    return path


def write_drawing(path: Path | str, figure: Callable[[], Figure], page: Callable[[], FigurePage] | None = None) -> None:
    """Write to `path` in the format of its suffix: .png, .svg, .pdf, or .html (one self-contained page, needs `page`).

    An existing file is replaced only once the new one is complete.
    """
    path = check_plot(path)
    suffix = path.suffix.lower()
    with mpl.rc_context(_STYLE):
        if suffix == ".html":
            assert page is not None
            around = page()
            svg = in_theme(_render(figure(), "svg", background="none").decode())
            content = fill_template("drawing.html", title=around.title, page=around, svg=svg).encode()
        else:
            content = _render(figure(), suffix[1:], background=PAPER)
    try:
        with write_atomically(path) as file:
            file.write(content)
    except OSError as error:
        raise InputError(f"plot={path}: cannot be written ({error.strerror})") from None


def style_axes(axes: Axes, *, grid: Grid = "both", grid_alpha: float = 0.3) -> None:
    """A faint grid and no frame."""
    axes.set_facecolor("none")
    axes.tick_params(which="both", color=FAINT, labelcolor=INK)
    axes.grid(axis=grid, color=FAINT, alpha=grid_alpha, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)


def _render(figure: Figure, kind: str, *, background: str) -> bytes:
    buffer = io.BytesIO()
    omitted = {"svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator")}.get(kind, ())
    figure.savefig(buffer, format=kind, dpi=160, facecolor=background, metadata=dict.fromkeys(omitted))
    return buffer.getvalue()


def in_theme(svg: str) -> str:
    """An SVG as part of a page, whose style sheet gives its colours."""
    drawing = svg[svg.index("<svg") :]
    for number, colour in enumerate(DARK_COLOURS):
        drawing = drawing.replace(colour, f"var(--drawn-{number})")
    return drawing.strip()


def fill_template(name: str, **content: Any) -> str:
    """The template of that name in `templates`, filled in. In HTML all but drawings is escaped."""
    jinja = Environment(
        loader=PackageLoader("sottovoce"),
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja.filters["unbroken"] = _unbroken
    return jinja.get_template(name).render(light_colours=DARK_COLOURS, dark_colours=DARK_COLOURS.values(), **content)


def _unbroken(words: str) -> str:
    """An ε and its number stay on one line."""
    for piece in ("ε = ", "δ = ", "ε ≤ ", " : 1", " %"):
        words = words.replace(piece, piece.replace(" ", "\N{NO-BREAK SPACE}"))
    return words
