"""Rows of TSV, CSV and JSONL files, streamed: cells in the order of the header, bad rows counted."""

import csv
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.base.files import check_file, read_lines
from sottovoce.base.parsing import ParseError, parse_json
from sottovoce.data.corpora.corpus import ProblemKind, ProblemLog
from sottovoce.data.corpora.listing import NOT_UTF8

SUFFIXES = (".tsv", ".csv", ".jsonl", ".json")

Cells = list[str]
NumberedCells = Iterator[tuple[int, Cells]]


def open_table(path: Path, log: ProblemLog) -> tuple[Sequence[str], NumberedCells]:
    """The column names of a table and its rows, each with its line number and one cell for every column.

    `.tsv` knows no quoting, as Common Voice writes it; `.csv` is RFC 4180; `.jsonl`, or `.json` as NeMo has it, has
    one object a line, and its columns are all the keys that occur.
    """
    if not path.is_file():
        found = "it is a folder" if path.is_dir() else "no such file"
        raise InputError(f"{path}: {found}; expected a table of clips, {', '.join(SUFFIXES)}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"{path}: cannot tell its format; expected a name ending in {', '.join(SUFFIXES)}")
    if suffix in (".jsonl", ".json"):
        header = _jsonl_keys(path)
        return header, _jsonl_rows(path, header, log)
    lines = _csv_lines(path)
    if suffix == ".tsv":
        lines = ((number, line.rstrip("\r\n").split("\t")) for number, line in _numbered_lines(path))
    _, first = next(lines, (0, []))
    header = [name.strip() for name in first]
    if not any(header):
        raise InputError(f"{path}: it is empty; expected a first line with the names of the columns")
    return header, _fitted(lines, path, len(header), log)


def column_position(header: Sequence[str], name: str, *, role: str, path: Path, option: str | None = None) -> int:
    """Where `name` stands in `header`; `option` is the one by which a user can give it another name."""
    if name in header:
        return header.index(name)
    nearest = difflib.get_close_matches(name, header, n=1)
    found = f"the nearest is {nearest[0]!r} of {', '.join(header)}" if nearest else f"there are {', '.join(header)}"
    raise InputError(
        f"{path}: no column {name!r} for the {role}; {found}" + (f": say which with {option}" if option else "")
    )


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    # newline="\n": a stray carriage return inside a sentence does not end the row.
    check_file(path)
    with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
        yield from enumerate(read_lines(file, path=path), start=1)


def _csv_lines(path: Path) -> NumberedCells:
    check_file(path)
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(read_lines(file, path=path), strict=True)
        try:
            for cells in reader:
                yield reader.line_num, cells
        except csv.Error as error:
            # A quote that never closes swallows all that follows: nothing behind it can be trusted.
            raise InputError(f"{path}:{reader.line_num}: {error}; expected quoting as in RFC 4180") from None


def _fitted(lines: NumberedCells, path: Path, width: int, log: ProblemLog) -> NumberedCells:
    """Rows as wide as the header; short ones are filled up, so that columns at the end may be left out."""
    for number, cells in lines:
        if len(cells) != width:
            if any(cells[width:]):
                detail = f"{len(cells)} cells for {width} columns"
                log.add(ProblemKind.MALFORMED_ROW, f"{path}:{number}", detail)
                continue
            cells = cells[:width] + [""] * (width - len(cells))
        if _acceptable(cells, f"{path}:{number}", log):
            yield number, cells


def _acceptable(cells: Cells, where: str, log: ProblemLog) -> bool:
    text = "".join(cells)
    if not text.strip():
        log.add(ProblemKind.EMPTY_ROW, where)
    elif NOT_UTF8 in text:
        log.add(ProblemKind.MALFORMED_ROW, where, "not UTF-8")
    elif "\0" in text:
        log.add(ProblemKind.MALFORMED_ROW, where, "holds a zero byte")
    else:
        return True
    return False


def _jsonl_objects(path: Path) -> Iterator[tuple[int, dict[str, object] | None]]:
    """Line numbers and objects; None for a line that is none."""
    for number, line in _numbered_lines(path):
        try:
            value = parse_json(line) if line.strip() else {}
        except ParseError:
            value = None
        yield number, value if isinstance(value, dict) else None


def _jsonl_keys(path: Path) -> Sequence[str]:
    keys: dict[str, None] = {}
    for _, row in _jsonl_objects(path):
        keys.update(dict.fromkeys(row or ()))
    if not keys:
        raise InputError(f"{path}: no JSON object in it; expected one a line")
    return list(keys)


def _jsonl_rows(path: Path, header: Sequence[str], log: ProblemLog) -> NumberedCells:
    for number, row in _jsonl_objects(path):
        where = f"{path}:{number}"
        if row is None:
            log.add(ProblemKind.MALFORMED_ROW, where, "not a JSON object")
            continue
        cells = [_cell(row.get(key)) for key in header]
        if _acceptable(cells, where, log):
            yield number, cells


def _cell(value: object) -> str:
    """The value as text. Lists and objects are nothing that we look for, and half a surrogate pair is no text."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode() if not value.isascii() else value
    return str(value) if isinstance(value, int | float) else ""
