"""The document: a template with its macros filled in, and the rule that whoever claims a number shows its run."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from findings.kept import Kept, MissingRunsError
from findings.macros import SINGLE, Page, call
from sottovoce.errors import InputError
from sottovoce.files import written_atomically

IMAGES = "images/results"
NOT_RUN = "*not run*"
HEADER = "<!-- Written by `make results` from {template} and the runs below results/: change those, not this. -->\n\n"
# Under these headings stand our own claims; elsewhere a number may be the paper's.
CLAIMS = ("in short", "what we found")

_MACRO = re.compile(r"\{\{(.+?)\}\}")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[^a-z])")
_LINKED = re.compile(r"\]\([^)]*results/")
_NAMES = re.compile(r"`[^`]*`|\]\([^)]*\)")


@dataclass(frozen=True)
class Document:
    """The text, its figures as SVG by name, and the runs that it asks for in vain."""

    text: str
    figures: dict[str, bytes]
    missing: tuple[str, ...]


def render(template: Path, *, results: Path) -> Document:
    """Fill in the macros of `template` from the runs below `results`; the document lies beside its template."""
    page = Page(Kept(results, template.parent), IMAGES)
    missing: dict[str, None] = {}
    lines = []
    for number, line in enumerate(template.read_text(encoding="utf-8").splitlines(), start=1):

        def fill(match: re.Match[str], *, where: str = f"{template.name}:{number}") -> str:
            try:
                words = shlex.split(match[1])
                lost = _missing(page.kept, words)
                if lost:
                    raise MissingRunsError(*lost)
                return call(page, words)
            except MissingRunsError as found:
                missing.update(dict.fromkeys(found.names))
                return NOT_RUN
            except ValueError as error:  # an InputError, or a quotation mark that is not closed
                raise InputError(f"{where}: {{{{{match[1]}}}}}: {error}") from None

        lines.append(_MACRO.sub(fill, line))
        if "{{" in _MACRO.sub("", line):
            raise InputError(f"{template.name}:{number}: expected a macro to end in its own line")
    text = HEADER.format(template=f"docs/{template.name}") + "\n".join(lines) + "\n"
    return Document(text, page.drawn, tuple(missing))


def unsupported(text: str) -> list[str]:
    """The sentences under our own claims that say a number and show no run.

    >>> unsupported("## What we found\\nIt is 3 points. It is [3](../results/a/b) points.\\n## The paper\\nIt is 5.")
    ['It is 3 points.']
    """
    found = []
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        heading, _, body = part.partition("\n")
        if heading.lstrip("# ").strip().lower() not in CLAIMS:
            continue
        for sentence in (s for block in _blocks(body) for s in _SENTENCE.split(block)):
            claims = any(letter.isdigit() for letter in _NAMES.sub("", sentence))
            if claims and not _LINKED.search(sentence) and NOT_RUN not in sentence:
                found.append(sentence.strip())
    return found


def write(document: Document, path: Path) -> None:
    """Write the text and its figures, and remove figures that no text shows any more."""
    images = path.parent / IMAGES
    images.mkdir(parents=True, exist_ok=True)
    for file in images.glob("*.svg"):
        if file.stem not in document.figures:
            file.unlink()
    for name, content in document.figures.items():
        with written_atomically(images / f"{name}.svg") as file_:
            file_.write(content)
    with written_atomically(path) as file_:
        file_.write(document.text.encode())


def _missing(kept: Kept, words: list[str]) -> list[str]:
    """All runs that a macro names in vain, so that they can be listed at once."""
    lost: list[str] = []
    for word in words[1:]:
        if re.fullmatch(r"[\w.-]+/[\w.-]+", word):
            try:
                (kept.run if words[0] in SINGLE else kept.repeats)(word)
            except MissingRunsError as found:
                lost += found.names
    return lost


def _blocks(body: str) -> list[str]:
    """Paragraphs as one line each; an item of a list and a row of a table are blocks of their own. Figures, captions
    and what stands above a table's rule come from macros or claim nothing."""
    lines = body.splitlines()
    heads = {n - 1 for n, line in enumerate(lines) if re.fullmatch(r"\|[\s:|-]+\|", line)}
    blocks: list[str] = []
    open_ = False
    for n, line in enumerate(lines):
        if not line.strip() or n in heads or n - 1 in heads or line.startswith("!["):
            open_ = False
        elif open_ and not re.match(r"\s*([-*|]|\d+\.) ?", line):
            blocks[-1] += f" {line.strip()}"
        else:
            blocks.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())
            open_ = True
    return blocks
