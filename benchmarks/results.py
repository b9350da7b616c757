"""docs/RESULTS.md: runs are kept small below results/, and the document is written from them, never typed.

    python benchmarks/results.py keep runs/benchmark/clipping [--suite NAME]   # a suite, or single runs of one
    python benchmarks/results.py write [--allow-missing]                       # = make results
    python benchmarks/results.py macros                                        # what the template may ask for

A template names runs as suite/label. Runs that it names and that are not kept are listed, and nothing is written;
with --allow-missing the document says "not run" in their place.
"""

import argparse
import sys
from pathlib import Path

from findings.document import render, unsupported, write
from findings.keeping import keep
from findings.macros import MACROS

from sottovoce.errors import InputError
from sottovoce.reporting.records import find_runs
from sottovoce.training.run_folder import RESULTS

ROOT = Path(__file__).resolve().parent.parent
LARGE = 150_000  # bytes of one kept run, above which somebody should have a look


def keep_runs(paths: list[Path], *, results: Path, suite: str | None, rounds: int | None, brief: bool) -> None:
    """Keep every finished run among `paths` below `results`, as SUITE/LABEL from the last two names of its folder."""
    if rounds is not None and (rounds < 0 or rounds == 1):
        raise InputError(f"rounds={rounds}: expected none, or at least 2, the first and the last")
    total = 0
    for folder in find_runs(paths).values():
        folder = folder.resolve()
        if not (folder / RESULTS).is_file():
            print(f"left out: {folder} is not finished")
            continue
        name = f"{suite or folder.parent.name}/{folder.name}"
        size = keep(folder, results / name, rounds=rounds, brief=brief)
        total += size
        print(f"kept {name}: {size / 1000:,.0f} kB" + (" (large)" if size > LARGE else ""))
    print(f"{total / 1e6:,.2f} MB; all that is kept: {sum(_sizes(results)) / 1e6:,.2f} MB")


def write_document(*, results: Path, docs: Path, allow_missing: bool) -> int:
    """Write RESULTS.md and its figures; 1 where runs are missing or a claim shows none."""
    document = render(docs / "results.template.md", results=results)
    if document.missing and not allow_missing:
        print(f"{len(document.missing)} runs are named and not kept: {', '.join(document.missing)}", file=sys.stderr)
        return 1
    if claims := unsupported(document.text):
        print(f"a number without its run: {' | '.join(claims)}", file=sys.stderr)
        return 1
    write(document, docs / "RESULTS.md")
    print(f"wrote {docs / 'RESULTS.md'} and {len(document.figures)} figures; {len(document.missing)} runs are missing")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="where runs are kept")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where template and document lie")
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep")
    keeping.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, or of suites of runs")
    keeping.add_argument("--suite", help="the suite's name; that of the folder around a run by default")
    keeping.add_argument("--rounds", type=int, help="rounds with numbers per layer; by the model's size by default")
    keeping.add_argument("--brief", action="store_true", help="recipe, surroundings, metrics and totals alone")
    writing = commands.add_parser("write")
    writing.add_argument("--allow-missing", action="store_true", help='say "not run" where a run is missing')
    commands.add_parser("macros")
    chosen = parser.parse_args()
    try:
        if chosen.command == "keep":
            keep_runs(
                chosen.runs,
                results=chosen.results,
                suite=chosen.suite,
                rounds=0 if chosen.brief else chosen.rounds,
                brief=chosen.brief,
            )
            return 0
        if chosen.command == "write":
            return write_document(results=chosen.results, docs=chosen.docs, allow_missing=chosen.allow_missing)
        print("\n".join(" ".join((macro.__doc__ or "").split()) for macro in MACROS.values()))
        return 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in folder.rglob("*") if file.is_file()]


if __name__ == "__main__":
    sys.exit(main())
