"""How a report looks: its letters, its widths, and its colours by day and by night."""

from sottovoce.reporting.drawings import theme_colours

_SHEET = """
:root { --paper: #ffffff; --ink: #1f2430; --quiet: #565d6b; --line: #dfe3ea; --panel: #f6f7f9; --accent: #005b8f;
        --shade: #c9ced8;
        --lost: #a33b00; --heard: #00664b; --alarm: #b3001b; @LIGHT@ }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171d; --ink: #e6e8ee; --quiet: #a9b0be; --line: #2d333f; --panel: #1a1e26; --accent: #7cc4f0;
          --shade: #4a5263;
          --lost: #ff9d66; --heard: #4fd6ab; --alarm: #c4122f; @DARK@ }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto,
       "Helvetica Neue", "DejaVu Sans", sans-serif; overflow-wrap: break-word; }
header, main, footer { max-width: 62rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.5rem; }
.alarm { margin: 0; max-width: none; padding: .9rem 1.25rem; background: var(--alarm); color: #ffffff;
         print-color-adjust: exact; }
.eyebrow { margin: 0; font-size: .8rem; letter-spacing: .08em; text-transform: uppercase; color: var(--quiet); }
h1 { font-size: 1.75rem; line-height: 1.25; margin: .3rem 0 1rem; text-wrap: balance; }
h2 { font-size: 1.25rem; margin: 0 0 .4rem; padding-top: 2.25rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 0 0 .25rem; }
section { margin-top: 2.25rem; }
p { margin: .4rem 0 .9rem; max-width: 44rem; }
.quiet, figcaption, .note { color: var(--quiet); font-size: .9rem; }
a { color: var(--accent); text-underline-offset: .2em; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; list-style: none; margin: 0 0 1rem; padding: 0;
         font-size: .9rem; }
.key { display: grid; grid-template-columns: repeat(auto-fit, minmax(12.5rem, 1fr)); gap: 1px; margin: 1.25rem 0;
       background: var(--line); border: 1px solid var(--line); border-radius: .4rem; overflow: hidden; }
.key div { background: var(--paper); padding: .8rem 1rem; }
.key dt { font-size: .85rem; color: var(--quiet); }
.key dd { margin: 0; }
.key .large { font-size: 1.55rem; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.verdict { border: 1px solid var(--line); border-left: 5px solid var(--quiet); border-radius: .4rem;
           background: var(--panel); padding: 1rem 1.25rem; margin: 1rem 0; }
.verdict.release { border-left-color: var(--heard); }
.verdict.weak, .verdict.simulation { border-left-color: var(--lost); }
.verdict.nothing, .verdict.not-private, .verdict.unsound { border-left-color: var(--alarm); }
.verdict-headline { font-size: 1.2rem; font-weight: 600; line-height: 1.4; margin: 0 0 .8rem; max-width: 48rem; }
.verdict dl { display: grid; grid-template-columns: 11rem minmax(0, 1fr); gap: .6rem 1.25rem; margin: 0; }
.verdict dt { color: var(--quiet); font-size: .9rem; padding-top: .1rem; }
.verdict dd { margin: 0; max-width: 44rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); gap: 1.75rem 2rem;
           margin: 1.25rem 0; }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; max-width: 36rem; height: auto; overflow: visible; }
figure svg text { font-family: inherit !important; }
figcaption { margin-top: .35rem; line-height: 1.45; }
/* A shade at the edge where a table goes on. */
.wide { overflow-x: auto; margin: 1rem 0; background:
        linear-gradient(to right, var(--paper) 40%, transparent) left / 2rem 100% no-repeat local,
        linear-gradient(to left, var(--paper) 40%, transparent) right / 2rem 100% no-repeat local,
        linear-gradient(to right, var(--shade), transparent) left / .5rem 100% no-repeat scroll,
        linear-gradient(to left, var(--shade), transparent) right / .5rem 100% no-repeat scroll; }
.wide:focus-visible, summary:focus-visible, a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .35rem; }
/* As wide as the screen, however wide its table is. */
caption span { display: inline-block; position: sticky; left: 0; max-width: calc(100vw - 2.5rem); }
th, td { padding: .35rem .8rem .35rem 0; text-align: right; vertical-align: baseline; white-space: nowrap;
         border-bottom: 1px solid var(--line); font-weight: 400; }
thead th { color: var(--quiet); font-size: .85rem; vertical-align: bottom; }
tbody th { font-weight: 500; }
.words { text-align: left; white-space: normal; min-width: 7rem; }
th.words { min-width: 4.5rem; }
th:last-child, td:last-child { padding-right: 0; }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; padding: .3rem 0; }
.notice { border-left: 3px solid var(--accent); background: var(--panel); padding: .6rem .9rem; max-width: 44rem; }
.transcripts { padding-left: 1.6rem; max-width: 44rem; }
.transcripts li { margin: .35rem 0; }
del { color: var(--lost); text-decoration: line-through; }
ins { color: var(--heard); text-decoration: underline; text-underline-offset: .2em; margin-left: .25em; }
del + ins { margin-left: .3em; }
footer { padding-top: 2rem; padding-bottom: 3rem; }
@media (max-width: 40rem) { table { font-size: .82rem; } th, td { padding-right: .6rem; } .words { min-width: 5rem; }
  .verdict dl { grid-template-columns: minmax(0, 1fr); gap: 0; } .verdict dd { margin: 0 0 .7rem; } }
@media print { nav { display: none; } section { break-inside: avoid; } }
"""


def style_sheet() -> str:
    """The page's style, both themes in it."""
    return _SHEET.replace("@LIGHT@", theme_colours(dark=False)).replace("@DARK@", theme_colours(dark=True)).strip()
