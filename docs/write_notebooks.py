"""Run the notebooks of docs/guides and write their outputs into them: `make docs`. The site shows them as Markdown.

A notebook is run as its reader would: its cells in order, `!` before a command of the shell, from an empty folder. No
kernel is needed, so neither the tests nor the site depend on Jupyter.
"""

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GUIDES = Path(__file__).parent / "guides"
NOTEBOOKS = sorted(GUIDES.glob("*.ipynb"))
COMMAND = re.compile(r"^!(.+)$", re.M)
Cell = dict[str, Any]


def read_notebook(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def render_notebook(notebook: dict[str, Any]) -> str:
    """As Markdown: code cells as fenced blocks, each followed by what it printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        is_shell = all(line.startswith("!") for line in source.splitlines())
        language, written = ("bash", COMMAND.sub(r"\1", source)) if is_shell else ("python", source)
        parts.append(f"```{language}\n{written}\n```")
        if printed := shown(cell).rstrip():
            parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def shown(cell: Cell) -> str:
    """What a code cell printed when it was last run."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def run_cells(cells: list[Cell]) -> list[str]:
    """What each code cell prints, run in order in one namespace, which is that of the main module as in a notebook."""
    namespace = vars(sys.modules["__main__"])
    namespace["_run_command"] = _run_command
    printed = []
    for cell in cells:
        source = COMMAND.sub(lambda found: f"_run_command({found[1]!r})", "".join(cell["source"]))
        ast.parse(source)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(source, f"<cell {len(printed) + 1}>", "exec"), namespace)
        printed.append(output.getvalue())
    return printed


def _run_command(line: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(line, shell=True, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{line}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    print(done.stdout, end="")


def code_cells(notebook: dict[str, Any]) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def main(paths: list[Path]) -> None:
    for path in paths:
        notebook = read_notebook(path)
        cells = code_cells(notebook)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            printed = run_cells(cells)
        for count, (cell, text) in enumerate(zip(cells, printed, strict=True), 1):
            cell["execution_count"] = count
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell["outputs"] = [stream] if text else []
        path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]] or NOTEBOOKS)
