"""Columns and records of a store, memory-mapped."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.parsing import parse_json


def load_column(path: Path, dtype: type[np.int64 | np.uint64 | np.bool_], length: int) -> Any:
    try:
        # A plain array over the mapping: np.memmap's own subclass costs microseconds at each index.
        column = np.asarray(np.load(path, mmap_mode="r"))
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged header reaches Python's own parser, which raises many things
        raise InputError(f"store is damaged: {path} is no table ({type(error).__name__}); prepare it again") from None
    if column.dtype != dtype or column.shape != (length,):
        raise InputError(f"store is damaged: {path} is not the table that its header describes; prepare it again")
    return column


def map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def load_record(records: mmap.mmap, offsets: NDArray[np.int64], row: int) -> dict[str, Any]:
    try:
        record: dict[str, Any] = parse_json(records[offsets[row] : offsets[row + 1]])
    except ValueError as error:
        raise InputError(f"record {row} of the store is damaged ({error})") from None
    if not (isinstance(record, dict) and record.keys() & {"id", "name", "path"}):
        raise InputError(f"record {row} of the store is damaged (expected an object with an id, a name or a path)")
    return record
