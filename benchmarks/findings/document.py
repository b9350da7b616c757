"""Documents: templates filled in from kept runs, and the rule that whoever claims a number shows its run."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from findings.kept import Kept, MissingRunsError
from findings.pages import suite_pages
from findings.passages import filled, pages
from findings.templates import fill
from findings.vocabulary import Vocabulary
from sottovoce.base.errors import InputError
from sottovoce.base.files import write_atomically

IMAGES = "images/results"
NOT_RUN = "*not run*"
HEADER = "<!-- Written by `make results` from {template} and the runs below results/: change those, not this. -->\n\n"
# Under these headings stand our own claims; elsewhere a number may be the paper's.
CLAIMS = ("in short", "what we found")

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[^a-z])")
_LINKED = re.compile(r"\]\([^)]*results/")
_NAMES = re.compile(r"`[^`]*`|\]\([^)]*\)")


@dataclass(frozen=True)
class Document:
    """The text, its figures as SVG by name, the pages of suites that it links to, and the runs it asks for in vain."""

    text: str
    figures: dict[str, bytes]
    pages: dict[str, str]
    missing: tuple[str, ...]


def templates(docs: Path) -> dict[Path, Path]:
    """By the document that each of them becomes: `results-gao.template.md` is for `RESULTS-gao.md`."""
    found = sorted(docs.glob("results*.template.md"))
    return {docs / path.name.replace("results", "RESULTS").replace(".template", ""): path for path in found}


def render_all(kept: Kept) -> dict[Path, Document]:
    """Every document of the folder that `kept` writes links for."""
    pages = suite_pages(kept)
    return {path: _render(template, kept, pages) for path, template in templates(kept.document).items()}


def render_passages(kept: Kept, *, root: Path) -> tuple[dict[Path, str], list[str]]:
    """README.md and the pages in docs/ that quote kept runs, written anew; and the runs that they ask for in vain."""
    missing: dict[str, None] = {}

    def functions(at: Kept) -> dict[str, Callable[..., str]]:
        return {name: _patient(found, missing) for name, found in Vocabulary(at, IMAGES).functions().items()}

    return {page: filled(page, kept, functions) for page in pages(root)}, list(missing)


def render(template: Path, *, results: Path) -> Document:
    """Fill in `template` from the runs kept in `results`; the document lies beside its template."""
    kept = Kept(results, template.parent)
    return _render(template, kept, suite_pages(kept))


def _render(template: Path, kept: Kept, pages: dict[str, str]) -> Document:
    vocabulary = Vocabulary(kept, IMAGES)
    missing: dict[str, None] = {}
    asked = {name: _patient(function, missing) for name, function in vocabulary.functions().items()}
    text = HEADER.format(template=f"docs/{template.name}") + fill(template, asked)
    return Document(text, vocabulary.drawn, pages, tuple(missing))


def _patient(function: Callable[..., str], missing: dict[str, None]) -> Callable[..., str]:
    """`function`, but that it notes runs that are missing, so that all of them can be named."""

    def ask(*words: object, **options: object) -> str:
        try:
            inspect.signature(function).bind(*words, **options)
        except TypeError as error:
            raise InputError(f"{function.__name__}(…): {error}") from None
        try:
            return function(*words, **options)
        except MissingRunsError as found:
            missing.update(dict.fromkeys(found.names))
            return NOT_RUN

    return ask


def unsupported(text: str) -> list[str]:
    """The sentences under our own claims that say a number and show no run.

    >>> unsupported("## What we found\\nIt is 3 points. It is [3](../results/a.md#b) points.\\n## The paper\\nIt is 5.")
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


def write(documents: Mapping[Path, Document], *, results: Path) -> None:
    """Write texts, figures and the pages of suites; remove figures and pages that are of nothing any more."""
    drawn: dict[Path, bytes] = {}
    for path, document in documents.items():
        figures = {path.parent / IMAGES / f"{name}.svg": content for name, content in document.figures.items()}
        if twice := drawn.keys() & figures.keys():
            raise InputError(f"name={min(twice).stem}: a figure of two documents, expected names of their own")
        drawn |= figures
    pages = {
        results / f"{s}.md": page.encode() for document in documents.values() for s, page in document.pages.items()
    }
    for folder in {path.parent / IMAGES for path in documents}:
        folder.mkdir(parents=True, exist_ok=True)
        for old in {*folder.glob("*.svg"), *results.glob("*.md")} - {*drawn, *pages, results / "README.md"}:
            old.unlink()
    texts = {path: document.text.encode() for path, document in documents.items()}
    for place, content in {**drawn, **pages, **texts}.items():
        with write_atomically(place) as file:
            file.write(content)


def _blocks(body: str) -> list[str]:
    """Paragraphs as one line each; an item of a list and a row of a table are blocks of their own. Figures, captions
    and what stands above a table's rule come from functions or claim nothing."""
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
