"""The documentation as a site: `make site`. Its pages are the repository's own Markdown, where it lies.

The source folder is the repository, so that links between pages, and to files beside them, mean the same on the site as
in the repository. A link to a file that is no page becomes a download.
"""

import json
import re
from typing import Any

from docs.write_notebooks import render_notebook
from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

import sottovoce

project = "Sottovoce"
author = copyright = "The Sottovoce authors"
release = sottovoce.__version__
root_doc = "docs/site/index"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
include_patterns = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("docs/*.md", "docs/*/*.md", "docs/guides/*.ipynb", "results/*.md", "src/sottovoce/recipes/*/README.md"),
]
# Folders are named so that they are not searched.
exclude_patterns = [".*", "build", "dist", "runs", "stores", "tests", "benchmarks", "docs/*.template.md"]
myst_heading_anchors = 6
html_theme = "furo"
html_title = f"Sottovoce {release}"
html_extra_path = ["root"]  # index.html, which leads to the root page
html_copy_source = False  # the pages' Markdown is in the repository
pygments_style = "default"

ANCHOR = re.compile(r'<a id="([^"]+)">')


class NotebookParser(MystParser):
    """Notebooks as pages of Markdown, with the outputs that they were kept with."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(render_notebook(json.loads(inputstring)), document)


def add_html_anchors(app: Sphinx, document: nodes.document) -> None:
    """Let links lead to `<a id="…">`, which kept runs have: MyST knows the anchors of headings only."""
    slugs: dict[str, Any] = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for raw in document.findall(nodes.raw):
        for name in ANCHOR.findall(raw.astext()):
            slugs[name] = (raw.line, name, name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_source_parser(NotebookParser)
    app.connect("doctree-read", add_html_anchors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
