"""Passages of ordinary pages that kept runs say: README.md and docs/, between `<!-- kept: … -->` and `<!-- end -->`.

The first comment holds what a template would: `<!-- kept: wer("demo/private") -->`. What follows it is written anew.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, StrictUndefined, TemplateError

from findings.kept import Kept
from sottovoce.base.errors import InputError

PASSAGE = re.compile(r"(?P<asked><!-- kept: (?P<what>[^\n]+?) -->)(?P<said>.*?)(?P<end><!-- end -->)", re.DOTALL)

Functions = Mapping[str, Callable[..., str]]


def pages(root: Path) -> list[Path]:
    """The pages of the project in `root` that have passages."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [path for path in found if path.is_file() and PASSAGE.search(path.read_text(encoding="utf-8"))]


def filled(page: Path, kept: Kept, functions: Callable[[Kept], Functions]) -> str:
    """The page with all its passages written anew; links lead from where it lies."""
    words = functions(replace(kept, document=page.parent))
    jinja = Environment(undefined=StrictUndefined)
    text = page.read_text(encoding="utf-8")

    def anew(found: re.Match[str]) -> str:
        try:
            said = jinja.from_string(f"{{{{ {found['what']} }}}}", globals=dict(words)).render()
        except (InputError, TemplateError) as error:
            raise InputError(f"{page.name}:{text[: found.start()].count(chr(10)) + 1}: {error}") from error
        apart = "\n" if found["said"].startswith("\n") else ""  # a block, and not words of a sentence
        return f"{found['asked']}{apart}{said}{apart}{found['end']}"

    return PASSAGE.sub(anew, text)
