"""The samples of a store that points into the corpus's own files."""

import os
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.corpora.corpus import AudioFile
from sottovoce.corpora.pointing import Changed, check_samples, check_unchanged, read_span
from sottovoce.store import on_disk
from sottovoce.store.tables import load_column, load_record, map_file


class PointedAudio:
    """Decodes utterances out of the files they lie in, and tells if one of those is not what it was."""

    def __init__(self, folder: Path, *, utterances: int, files: int) -> None:
        self._root = folder / on_disk.AUDIO_LINK
        self._files_of: NDArray[np.int64] = load_column(folder / on_disk.UTTERANCE_FILES, np.int64, utterances)
        self._starts: NDArray[np.int64] = load_column(folder / on_disk.UTTERANCE_STARTS, np.int64, utterances)
        self._records = map_file(folder / on_disk.FILES)
        self._offsets: NDArray[np.int64] = load_column(folder / on_disk.FILE_OFFSETS, np.int64, files + 1)
        self._unchanged: dict[int, tuple[int, int]] = {}  # what the system said of a file when we found it unchanged

    def samples(self, row: int, length: int, *, start: int = 0) -> NDArray[np.int16]:
        number = int(self._files_of[row])
        file = self._file(number)
        path = str(self._root / file.path)
        try:
            status = os.stat(path)
            seen = (status.st_mtime_ns, status.st_ino)
            if self._unchanged.get(number) != seen:
                check_unchanged(path, file)
                self._unchanged[number] = seen
            return read_span(path, int(self._starts[row]) + start, length)
        except (Changed, OSError) as reason:
            self._refuse(path, reason)

    def check(self) -> None:
        """Decode every file."""
        for number in range(len(self._offsets) - 1):
            file = self._file(number)
            path = str(self._root / file.path)
            try:
                check_unchanged(path, file)
                check_samples(path)
            except (Changed, OSError) as reason:
                self._refuse(path, reason)

    def _file(self, number: int) -> AudioFile:
        return AudioFile(**load_record(self._records, self._offsets, number))

    def _refuse(self, path: str, reason: Changed | OSError) -> NoReturn:
        if not self._root.exists():
            raise InputError(
                f"the store points into {os.readlink(self._root)}, and nothing is there: "
                f"where it was moved, `ln -sfn NEW {self._root}`"
            ) from None
        what = reason.strerror if isinstance(reason, OSError) else f"it was changed after `prepare`: {reason}"
        raise InputError(f"the store points into {path}, which is not as it was ({what}); prepare it again") from None
