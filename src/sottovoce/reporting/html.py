"""From sections to HTML: headings, figures, tables. Nothing is fetched, no script is run."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from sottovoce import __version__
from sottovoce.reporting.cells import Table
from sottovoce.reporting.drawings import Drawing, inline_svg
from sottovoce.reporting.style import style_sheet

# Nothing may be fetched or run, whatever a run's name says: even a page that is handed on stays what it is.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Html:
    """A piece that is HTML already."""

    content: str


@dataclass(frozen=True)
class Fold:
    """Parts behind a line that opens them."""

    title: str
    parts: tuple["Part", ...]
    is_open: bool = False


Part = Drawing | Table | Html | Fold


@dataclass(frozen=True)
class Section:
    """One chapter of a page."""

    anchor: str
    title: str
    intro: str
    parts: tuple[Part, ...]

    @property
    def all_parts(self) -> list[Part]:
        """Those inside folds, too."""
        return [inner for part in self.parts for inner in _inner(part)]


def render(title: str, lead: str, sections: Sequence[Section], *, alarms: Sequence[str] = ()) -> str:
    """The whole page; `alarms`, in red, come before anything that they make worthless."""
    links = "".join(f'<li><a href="#{section.anchor}">{escape(section.title)}</a></li>' for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{style_sheet()}
</style>
</head>
<body>
{"".join(map(_alarm, alarms))}<header>
<p class="eyebrow">Sottovoce report</p>
<h1>{escape(title)}</h1>
<p>{escape(lead)}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{"".join(map(_section, sections))}</main>
<footer><p class="quiet">Made by Sottovoce {escape(__version__)} from run folders alone.</p></footer>
</body>
</html>
"""


def _alarm(words: str) -> str:
    return f'<p class="alarm" role="alert"><strong>NOT SOUND</strong> {escape(words)}</p>\n'


def _inner(part: Part) -> list[Part]:
    return [inner for one in part.parts for inner in _inner(one)] if isinstance(part, Fold) else [part]


def _section(section: Section) -> str:
    intro = f"<p>{escape(section.intro)}</p>\n" if section.intro else ""
    heading = f'<h2 id="{section.anchor}-title">{escape(section.title)}</h2>'
    return (
        f'<section id="{section.anchor}" aria-labelledby="{section.anchor}-title">\n{heading}\n'
        f"{intro}{_parts(section.parts)}</section>\n"
    )


def _parts(parts: Sequence[Part]) -> str:
    """Neighbouring figures stand side by side."""
    found = []
    for are_drawings, group in groupby(parts, key=lambda part: isinstance(part, Drawing)):
        inside = "".join(map(_part, group))
        found.append(f'<div class="figures">\n{inside}</div>\n' if are_drawings else inside)
    return "".join(found)


def _part(part: Part) -> str:
    match part:
        case Drawing():
            return _figure(part)
        case Table():
            return _table(part)
        case Html():
            return part.content + "\n"
        case Fold():
            opened = " open" if part.is_open else ""
            return f"<details{opened}><summary>{escape(part.title)}</summary>\n{_parts(part.parts)}</details>\n"


def _figure(drawing: Drawing) -> str:
    svg = inline_svg(drawing).replace("<svg ", f'<svg role="img" aria-label="{escape(drawing.alt)}" ', 1)
    return (
        f'<figure id="figure-{drawing.name}">\n<h3>{escape(drawing.title)}</h3>\n{svg}\n'
        f"<figcaption>{escape(drawing.caption)}</figcaption>\n</figure>\n"
    )


def _table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{_left(table, place)}>{escape(heading)}</th>' if heading else f"<td{_left(table, place)}></td>"
        for place, heading in enumerate(table.headings)
    )
    rows = "\n".join(f"<tr>{_cells(table, row)}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>\n' if table.note else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(table.title)}">\n'
        f'<table id="table-{table.name}">\n<caption><span>{escape(table.title)}</span></caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>\n{note}"
    )


def _cells(table: Table, row: Sequence[str]) -> str:
    first, *others = row
    cells = [f'<th scope="row"{_left(table, 0)}>{escape(first)}</th>']
    cells += [f"<td{_left(table, place)}>{escape(cell)}</td>" for place, cell in enumerate(others, start=1)]
    return "".join(cells)


def _left(table: Table, place: int) -> str:
    return ' class="words"' if table.all_words or place < table.words else ""
