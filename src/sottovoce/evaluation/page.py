"""An evaluation as one HTML page: figure and table inside, nothing fetched from anywhere."""

from collections.abc import Mapping
from html import escape

from sottovoce.evaluation.evaluate import Evaluation
from sottovoce.evaluation.table import HEADINGS, group_rows, summary

PAGE = """<!doctype html>
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
svg {{ width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .4rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
tbody tr:first-child {{ font-weight: 600; }}
p {{ color: var(--quiet); font-size: .9rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<figure role="img" aria-label="Speakers by word error rate, and groups of speakers" style="margin:0">
{svg}
</figure>
<div class="wide">
<table>
<thead><tr>{headings}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
{notes}
<p>Intervals hold 95 % of the rates of speakers drawn anew (bootstrap). Every speaker counts once in the spread.</p>
</body>
</html>
"""


def evaluation_page(evaluation: Evaluation, *, title: str, svg: str, in_the_dark: Mapping[str, str]) -> str:
    """The page. Colours of the drawing that `in_the_dark` names change with the reader's light or dark theme."""
    drawing = svg[svg.index("<svg") :]
    for number, colour in enumerate(in_the_dark):
        drawing = drawing.replace(colour, f"var(--drawn-{number})")
    return PAGE.format(
        title=escape(title),
        light=" ".join(f"--drawn-{number}: {colour};" for number, colour in enumerate(in_the_dark)),
        dark=" ".join(f"--drawn-{number}: {colour};" for number, colour in enumerate(in_the_dark.values())),
        svg=drawing,
        headings="".join(f"<th>{heading}</th>" for heading in HEADINGS),
        rows="\n".join(_row(cells) for cells in group_rows(evaluation)),
        notes="\n".join(f"<p>{escape(line)}</p>" for line in summary(evaluation)),
    )


def _row(cells: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
