"""Packing a corpus into a store.

Workers render speakers, this process alone writes, and the last act is to replace `store.json`: before it the old
store stands untouched, after it the new one does. A generation left behind by a killed process is swept away by
the next one.
"""

import errno
import fcntl
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import zlib
from array import array
from collections.abc import Callable, Generator, Iterator, Set
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from sottovoce.children import ChildKilled, children, in_order
from sottovoce.corpora.corpus import SAMPLE_RATE, Corpus, RenderedSpeaker, RenderedUtterance, Speaker
from sottovoce.corpora.problems import Kind, Problem
from sottovoce.errors import InputError
from sottovoce.files import sealed, sweep, sync, sync_folder, write_json
from sottovoce.interrupts import ended_in_order
from sottovoce.parsing import parse_json
from sottovoce.seeds import name_key
from sottovoce.store import on_disk

# One speaker of Common Voice English holds 84 hours: rendered in pieces, no worker ever carries more than minutes.
CLIPS_PER_TASK = 200
# Enough rendered speakers waiting that a slow one does not leave the other workers idle.
TASKS_PER_WORKER = 4

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far packing has come."""

    tasks_done: int
    tasks: int
    audio_seconds: float


def pack(
    corpus: Corpus[S],
    out: Path | str,
    *,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Render every speaker of `corpus` and write them as the store `out`.

    Problems are added to `corpus.problems` and kept in the store's header. On any failure, a full disk or a signal
    included (SIGINT, SIGTERM, SIGHUP), `out` is left as it was and no worker is left running.
    """
    out = Path(out)
    tasks = list(_tasks(corpus))
    with ended_in_order(), _exclusive(out), _new_generation(out) as folder:
        _sweep(out, keep={folder.name, _current(out)})  # what a killed process left may be what fills the disk
        with _Writer(folder) as writer, closing(_rendered(corpus, tasks, workers=workers or _cpu_count())) as rendering:
            for done, rendered in enumerate(rendering, start=1):
                corpus.problems.extend(rendered.problems)
                writer.add(rendered)
                on_progress(Progress(done, len(tasks), writer.sample_count / SAMPLE_RATE))
            writer.end_user()
            corpus.problems.extend(writer.empty_speakers)
            if not writer.user_count:
                raise InputError(f"no usable utterance in the corpus, no store written; {_found(corpus)}")
            header = writer.finish(corpus.name, corpus.language)
        header |= {"generation": folder.name, "problems": corpus.problems.as_json()}
        sync_folder(folder)
        write_json(out / on_disk.HEADER, sealed(header))  # the commit
        _sweep(out, keep={folder.name})


def _tasks(corpus: Corpus[S]) -> Iterator[S]:
    """The corpus's speakers, those with very many clips in several pieces."""
    for speaker in corpus.speakers:
        if isinstance(speaker, Speaker) and len(speaker.clips) > CLIPS_PER_TASK:
            for first in range(0, len(speaker.clips), CLIPS_PER_TASK):
                yield replace(speaker, clips=speaker.clips[first : first + CLIPS_PER_TASK])
        else:
            yield speaker


def _rendered(corpus: Corpus[S], tasks: list[S], *, workers: int) -> Generator[RenderedSpeaker]:
    """Render `tasks` in worker processes, in their order, with a bounded number waiting."""
    if workers == 1:
        yield from map(corpus.render, tasks)
        return
    try:
        with children(min(workers, len(tasks)), _process_context()) as crew:
            yield from in_order(crew, corpus.render, tasks, ahead=TASKS_PER_WORKER * workers)
    except ChildKilled:
        raise InputError("a worker process was killed (out of memory?): try fewer --workers") from None


def _process_context() -> Any:
    # A fork of this process would inherit its threads' locks (progress bars have a thread); the fork server is clean.
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Writer:
    """Appends rendered speakers to the files of one generation. Pieces of one speaker come one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._digest = hashlib.blake2b(digest_size=16)
        self._checksums: dict[str, int] = {}  # CRC-32 of each file
        self._user: tuple[str, str] | None = None
        self._splits: dict[str, list[int]] = {}
        self._audio_offsets = array("q", [0])
        self._utterance_offsets = array("q", [0])
        self._user_offsets = array("q", [0])
        self._user_utterances = array("q", [0])
        self._user_keys = array("Q")
        self._users_in_time = array("b")
        self.empty_speakers: list[Problem] = []

    def __enter__(self) -> "_Writer":
        self._audio, self._utterances, self._users = (
            self._files.enter_context((self._folder / name).open("wb"))
            for name in (on_disk.AUDIO, on_disk.UTTERANCES, on_disk.USERS)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @property
    def user_count(self) -> int:
        return len(self._user_keys)

    @property
    def utterance_count(self) -> int:
        return len(self._audio_offsets) - 1

    @property
    def sample_count(self) -> int:
        return self._audio_offsets[-1]

    def add(self, speaker: RenderedSpeaker) -> None:
        identity = (speaker.split, speaker.name)
        if identity != self._user:
            assert self._user is None or self._user < identity, f"speakers out of order: {self._user}, {identity}"
            self.end_user()
            self._user = identity
            self._metadata = dict(speaker.metadata)
            self._in_time = True
        self._in_time &= speaker.in_time
        for utterance in speaker.utterances:
            self._add_utterance(utterance)

    def _add_utterance(self, utterance: RenderedUtterance) -> None:
        assert utterance.samples.dtype == np.int16, utterance.samples.dtype
        assert len(utterance.samples), utterance.id
        self._append(self._audio, self._audio_offsets, utterance.samples.astype("<i2", copy=False).tobytes(), unit=2)
        record: dict[str, Any] = {"id": utterance.id}
        if utterance.text is not None:
            record["text"] = utterance.text
        if utterance.raw_text != utterance.text:
            record["raw_text"] = utterance.raw_text
        if utterance.metadata:
            record["metadata"] = dict(utterance.metadata)
        self._append(self._utterances, self._utterance_offsets, _line(record))

    def end_user(self) -> None:
        """Close the current user; one who brought nothing gets no row."""
        if self._user is None:
            return
        split, name = self._user
        self._user = None
        if self._user_utterances[-1] == self.utterance_count:
            self.empty_speakers.append(Problem(Kind.EMPTY_SPEAKER, f"{split}/{name}"))
            return
        row = self.user_count
        self._splits.setdefault(split, [row, row])[1] = row + 1
        self._user_utterances.append(self.utterance_count)
        self._user_keys.append(name_key(name))
        self._users_in_time.append(self._in_time)
        record: dict[str, Any] = {"name": name}
        if self._metadata:
            record["metadata"] = self._metadata
        self._append(self._users, self._user_offsets, _line(record))

    def finish(self, name: str, language: str) -> dict[str, Any]:
        """Write the tables, flush everything to disk, and return the header that describes it."""
        keys = np.frombuffer(self._user_keys, dtype=np.uint64)
        columns: dict[str, NDArray[Any]] = {
            on_disk.AUDIO_OFFSETS: np.frombuffer(self._audio_offsets, dtype=np.int64),
            on_disk.UTTERANCE_OFFSETS: np.frombuffer(self._utterance_offsets, dtype=np.int64),
            on_disk.USER_OFFSETS: np.frombuffer(self._user_offsets, dtype=np.int64),
            on_disk.USER_UTTERANCES: np.frombuffer(self._user_utterances, dtype=np.int64),
            on_disk.USER_KEYS: keys,
            on_disk.USER_ORDER: np.argsort(keys, kind="stable").astype(np.int64),
        }
        if any(self._users_in_time):
            columns[on_disk.USERS_IN_TIME] = np.frombuffer(self._users_in_time, dtype=np.bool_)
        for file in (self._audio, self._utterances, self._users):
            sync(file)
        for column, values in columns.items():
            content = io.BytesIO()
            np.save(content, values)
            # By way of memory, because on a full disk NumPy's own writing raises an error that does not say so.
            self._checksums[column] = zlib.crc32(content.getbuffer())
            with (self._folder / column).open("wb") as file:
                file.write(content.getbuffer())
                sync(file)
        self._digest.update(json.dumps([on_disk.VERSION, language, self._splits, SAMPLE_RATE]).encode())
        self._digest.update(self._audio_offsets.tobytes() + self._user_utterances.tobytes())
        if any(self._users_in_time):  # else as it always was
            self._digest.update(self._users_in_time.tobytes())
        return {
            "format": on_disk.FORMAT,
            "version": on_disk.VERSION,
            "name": name,
            "language": language,
            "sample_rate": SAMPLE_RATE,
            "users": self.user_count,
            "utterances": self.utterance_count,
            "splits": self._splits,
            "digest": self._digest.hexdigest(),
            "sizes": {path.name: path.stat().st_size for path in sorted(self._folder.iterdir())},
            "checksums": dict(sorted(self._checksums.items())),
        }

    def _append(self, file: BinaryIO, offsets: "array[int]", content: bytes, *, unit: int = 1) -> None:
        file.write(content)
        self._digest.update(content)
        name = Path(file.name).name
        self._checksums[name] = zlib.crc32(content, self._checksums.get(name, 0))
        offsets.append(offsets[-1] + len(content) // unit)


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


@contextmanager
def _exclusive(out: Path) -> Iterator[None]:
    """Hold `out` against a second `prepare`; a folder made here is taken away again if nothing came of it."""
    if out.exists() and not out.is_dir():
        raise InputError(f"cannot write the store out={out}: it is a file, expected a folder")
    if (
        out.is_dir()
        and any(out.iterdir())
        and not (out / on_disk.HEADER).exists()
        and not (out / on_disk.LOCK).exists()
    ):
        raise InputError(f"cannot write the store out={out}: the folder holds other things; name a new or empty one")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / on_disk.LOCK).open("w")
    except OSError as error:
        raise InputError(f"cannot write the store out={out}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"cannot write the store out={out}: another `prepare` is writing it") from None
        try:
            yield
        finally:
            if not (out / on_disk.HEADER).exists():
                (out / on_disk.LOCK).unlink(missing_ok=True)
                if not any(out.iterdir()):
                    out.rmdir()


@contextmanager
def _new_generation(out: Path) -> Iterator[Path]:
    """A folder for the new files, removed on any failure before the commit."""
    folder = out / f"{on_disk.GENERATION_PREFIX}{uuid4().hex[:12]}"
    try:
        folder.mkdir()
        yield folder
    except BaseException as error:
        # An interrupt may also come right after the commit, and then these files are the store.
        if _current(out) != folder.name:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise InputError(f"no space left for the store out={out} ({error.strerror}); nothing was changed") from None
        raise


def _current(out: Path) -> str | None:
    """The generation that the header names, where there is a header."""
    try:
        return str(parse_json((out / on_disk.HEADER).read_bytes())["generation"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sweep(out: Path, *, keep: Set[str | None]) -> None:
    """Remove all other generations, and a header that was never finished. Readers that still map one keep it until they
    let go."""
    sweep(out, on_disk.HEADER)
    for folder in out.glob(f"{on_disk.GENERATION_PREFIX}*"):
        if folder.name not in keep:
            shutil.rmtree(folder, ignore_errors=True)


def _found(corpus: Corpus[S]) -> str:
    problems = ", ".join(f"{count} × {kind}" for kind, count in corpus.problems.counts.items())
    return f"found {len(corpus.speakers)} speakers" + (f" and {problems}" if problems else "")
