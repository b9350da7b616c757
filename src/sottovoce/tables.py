"""What tables for the terminal share: their looks."""

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def plain_table(title: str = "", *, caption: str = "") -> Table:
    """One without columns or rows yet: a line below its headings and none around it."""
    # Both are wrapped in Text: a bracket in a name is no markup.
    return Table(
        title=Text(title, style="bold"),
        title_justify="left",
        caption=Text(caption),
        caption_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
