"""docs/RESULTS*.md: runs are kept small in results/SUITE.zip, and the documents are written from them, never typed.

    python benchmarks/results.py keep runs/benchmark/clipping [--suite NAME]   # a suite, or single runs of one
    python benchmarks/results.py write [--allow-missing]                       # = make results

Templates, and passages of other pages (findings/passages.py), name runs as suite/label; what they may ask for stands in
findings/vocabulary.py. Runs that they name and that are not kept are listed, and nothing is written; with
--allow-missing a document says "not run" in their place.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from findings.document import render_all, render_passages, unsupported, write
from findings.keeping import keep
from findings.kept import Kept

from sottovoce.audit.recipe import audit_path
from sottovoce.base.errors import InputError
from sottovoce.base.files import write_atomically
from sottovoce.report.archives import ZIP, unzip, zip_folder
from sottovoce.report.records import find_runs
from sottovoce.training.run_folder import RESULTS

ROOT = Path(__file__).resolve().parent.parent
LARGE = 150_000  # bytes of one kept run, above which somebody should have a look


def keep_runs(
    paths: list[Path], *, results: Path, suite: str | None, rounds: int | None, brief: bool, speakers: bool = False
) -> None:
    """Keep every finished run among `paths` in the archive of its suite, which the folder around it names."""
    if rounds is not None and (rounds < 0 or rounds == 1):
        raise InputError(f"rounds={rounds}: expected none, or at least 2, the first and the last")
    finished: dict[str, list[Path]] = {}
    for folder in (found.resolve() for found in find_runs(paths).values()):
        if (folder / RESULTS).is_file():
            finished.setdefault(suite or folder.parent.name, []).append(folder)
        else:
            print(f"left out: {folder} is not finished")
    results.mkdir(parents=True, exist_ok=True)
    for name, folders in finished.items():
        archive = results / f"{name}{ZIP}"
        with tempfile.TemporaryDirectory() as place:
            if archive.is_file():
                unzip(archive, Path(place))
            for folder in folders:
                size = keep(folder, Path(place) / folder.name, rounds=rounds, brief=brief, speakers=speakers)
                print(f"kept {name}/{folder.name}: {size / 1000:,.0f} kB" + (" (large)" if size > LARGE else ""))
                if audit_path(folder).is_file() and not audit_path(Path(place) / folder.name).is_file():
                    print(f"left out: {audit_path(folder)} is a release's, or of another recipe")
            zip_folder(Path(place), archive)
    print(f"all that is kept: {sum(file.stat().st_size for file in results.glob(f'*{ZIP}')) / 1e6:,.2f} MB, packed")


def write_documents(*, results: Path, docs: Path, allow_missing: bool) -> int:
    """Write the documents, their figures and the pages of suites; 1 where runs are missing or a claim shows none."""
    kept = Kept(results, docs)
    documents = render_all(kept)
    passages, lost = render_passages(kept, root=docs.parent)
    missing = list(dict.fromkeys([*(name for document in documents.values() for name in document.missing), *lost]))
    if missing and not allow_missing:
        print(f"{len(missing)} runs are named and not kept: {', '.join(missing)}", file=sys.stderr)
        return 1
    if claims := [claim for document in documents.values() for claim in unsupported(document.text)]:
        print(f"a number without its run: {' | '.join(claims)}", file=sys.stderr)
        return 1
    write(documents, results=results)
    for page, text in passages.items():
        with write_atomically(page) as file:
            file.write(text.encode())
    for path, document in documents.items():
        print(f"wrote {path} with {len(document.figures)} figures")
    pages = {suite for document in documents.values() for suite in document.pages}
    print(
        f"wrote {len(pages)} pages of suites, passages of {len(passages)} other pages; {len(missing)} runs are missing"
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="where runs are kept")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where templates and documents lie")
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep")
    keeping.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, or of suites of runs")
    keeping.add_argument("--suite", help="the suite's name; that of the folder around a run by default")
    keeping.add_argument("--rounds", type=int, help="rounds with numbers per layer; by the model's size by default")
    keeping.add_argument("--brief", action="store_true", help="recipe, surroundings, metrics and totals alone")
    keeping.add_argument("--speakers", action="store_true", help="in brief, but with the errors of every test speaker")
    writing = commands.add_parser("write")
    writing.add_argument("--allow-missing", action="store_true", help='say "not run" where a run is missing')
    chosen = parser.parse_args()
    try:
        if chosen.command == "keep":
            keep_runs(
                chosen.runs,
                results=chosen.results,
                suite=chosen.suite,
                rounds=0 if chosen.brief or chosen.speakers else chosen.rounds,
                brief=chosen.brief or chosen.speakers,
                speakers=chosen.speakers,
            )
            return 0
        return write_documents(results=chosen.results, docs=chosen.docs, allow_missing=chosen.allow_missing)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
