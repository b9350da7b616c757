"""Packing a corpus into a store.

Workers render speakers, this process alone writes, and the last step replaces `store.json`: before it the old store is
untouched, after it the new one is complete. A generation that a killed process left is continued by the next one if it
packs the same corpus, and removed if not.
"""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Self, TypeVar
from uuid import uuid4

from sottovoce import __version__
from sottovoce.base.children import ChildKilled, child_pool, map_in_order
from sottovoce.base.errors import InputError
from sottovoce.base.files import add_digest, check_digest, read_json, remove_leftovers, sync_folder, write_json
from sottovoce.base.interrupts import exit_cleanly_on_signals
from sottovoce.base.parsing import parse_json
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Corpus, ProblemLog, RenderedSpeaker, Speaker
from sottovoce.data.store import layout
from sottovoce.data.store.writing import Writer, can_resume
from sottovoce.data.text.spelling import Spelling

# One speaker of Common Voice English holds 84 hours: rendered in pieces, no worker ever carries more than minutes.
CLIPS_PER_TASK = 200
# Enough rendered speakers waiting that a slow one does not leave the other workers idle.
TASKS_PER_WORKER = 4
# After so much work it is saved, to go on from after a kill: seconds of work, and milliseconds to save it.
TASKS_PER_SAVE = 1000
SAMPLES_PER_SAVE = 1 << 29

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class PackingProgress:
    """How far packing has come."""

    tasks_done: int
    tasks: int
    audio_seconds: float
    resumed: bool = False  # at this point, where an earlier `prepare` was ended


def pack_corpus(
    corpus: Corpus[S],
    out: Path | str,
    *,
    workers: int | None = None,
    on_progress: Callable[[PackingProgress], None] = lambda _: None,
) -> None:
    """Render every speaker of `corpus` and write them as the store `out`.

    Problems are added to `corpus.problems` and kept in the store's header. On any failure, a full disk or a signal
    included (SIGINT, SIGTERM, SIGHUP), the store that was there stays as it was and no worker is left running. After a
    signal or a kill, of a worker too, the same call goes on from what was saved last.
    """
    out = Path(out)
    work = _Work(corpus, list(_tasks(corpus)))
    with exit_cleanly_on_signals(), _exclusive(out), _generation(out, work) as folder:
        _sweep(out, keep={folder.name, _current(out)})  # what a killed process left may be what fills the disk
        with Writer(folder, points=corpus.root is not None) as writer:
            _pack_rest(work, writer, folder, workers=workers or _cpu_count(), on_progress=on_progress)
            corpus.problems.extend(writer.empty_speakers)
            if not writer.user_count:
                raise InputError(f"no usable utterance in the corpus, no store written; {_found(corpus)}")
            header = writer.finish(corpus.name, corpus.language)
            header |= {"generation": folder.name, "problems": corpus.problems.as_json()}
            if corpus.spelling is not Spelling.OURS:
                header["spelling"] = str(corpus.spelling)
            if corpus.root is not None:
                (folder / layout.AUDIO_LINK).unlink(missing_ok=True)
                (folder / layout.AUDIO_LINK).symlink_to(corpus.root)
            sync_folder(folder)
            write_json(out / layout.HEADER, add_digest(header))  # the commit
            writer.forget_saved()
        (folder / layout.UNFINISHED).unlink(missing_ok=True)
        _sweep(out, keep={folder.name})


def _pack_rest(
    work: "_Work[S]", writer: Writer, folder: Path, *, workers: int, on_progress: Callable[[PackingProgress], None]
) -> None:
    """Render and write what is not saved in `folder` already, and save now and then."""
    corpus, tasks = work.corpus, work.tasks
    first, found = 0, ProblemLog()
    if (saved := SavedProgress.read(folder)) is not None:
        first, found = saved.tasks_done, saved.problems
        writer.resume(saved.writer)
        corpus.problems.merge(found)
        on_progress(PackingProgress(first, len(tasks), writer.sample_count / SAMPLE_RATE, resumed=True))
    last_save = first, writer.sample_count
    with closing(_rendered(corpus, tasks[first:], workers=workers)) as rendering:
        for done, rendered in enumerate(rendering, start=first + 1):
            corpus.problems.extend(rendered.problems)
            found.extend(rendered.problems)
            writer.add(rendered)
            on_progress(PackingProgress(done, len(tasks), writer.sample_count / SAMPLE_RATE))
            if done - last_save[0] >= TASKS_PER_SAVE or writer.sample_count - last_save[1] >= SAMPLES_PER_SAVE:
                SavedProgress(work.name, done, writer.save(), found).write(folder)
                last_save = done, writer.sample_count
    writer.end_user()


def _tasks(corpus: Corpus[S]) -> Iterator[S]:
    """The corpus's speakers, those with very many clips in several pieces."""
    most = corpus.clips_per_task or CLIPS_PER_TASK
    for speaker in corpus.speakers:
        if isinstance(speaker, Speaker) and len(speaker.clips) > most:
            for first in range(0, len(speaker.clips), most):
                yield replace(speaker, clips=speaker.clips[first : first + most])
        else:
            yield speaker


def _rendered(corpus: Corpus[S], tasks: list[S], *, workers: int) -> Generator[RenderedSpeaker]:
    """Render `tasks` in worker processes, in their order, with a bounded number waiting."""
    if workers == 1:
        yield from map(corpus.render, tasks)
        return
    try:
        with child_pool(min(workers, len(tasks)), _process_context()) as crew:
            yield from map_in_order(crew, corpus.render, tasks, ahead=TASKS_PER_WORKER * workers)
    except ChildKilled:
        raise _WorkerKilled("a worker process was killed (out of memory?): try fewer --workers") from None


class _WorkerKilled(InputError):
    """A worker was killed, and what was saved before is as good as ever."""


def _process_context() -> Any:
    # A fork of this process would inherit its threads' locks (progress bars have a thread); the fork server is clean.
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _exclusive(out: Path) -> Iterator[None]:
    """Hold `out` against a second `prepare`; a folder made here is taken away again if nothing came of it."""
    if out.exists() and not out.is_dir():
        raise InputError(f"cannot write the store out={out}: it is a file, expected a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / layout.HEADER).exists() and not (out / layout.LOCK).exists():
        raise InputError(f"cannot write the store out={out}: the folder holds other things; name a new or empty one")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / layout.LOCK).open("w")
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
            if not (out / layout.HEADER).exists() and not any(out.glob(f"{layout.GENERATION_PREFIX}*")):
                (out / layout.LOCK).unlink(missing_ok=True)
                if not any(out.iterdir()):
                    out.rmdir()


@contextmanager
def _generation(out: Path, work: "_Work[S]") -> Iterator[Path]:
    """A folder for the new files: the one that a `prepare` of the same corpus left when it was ended, or a new one.

    It is removed on any failure before the commit, but not if something was saved and it was a signal.
    """
    folder = _begun(out, work) or out / f"{layout.GENERATION_PREFIX}{uuid4().hex[:12]}"
    try:
        folder.mkdir(exist_ok=True)
        yield folder
    except BaseException as error:
        signalled = isinstance(error, KeyboardInterrupt | SystemExit | _WorkerKilled)
        # An interrupt may also come right after the commit, and then these files are the store.
        if _current(out) != folder.name and not (signalled and (folder / layout.UNFINISHED).exists()):
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise InputError(f"no space left for the store out={out} ({error.strerror}); nothing was changed") from None
        raise


def find_unfinished(out: Path) -> list[Path]:
    """What a `prepare` that was ended left in `out` to go on from."""
    current = _current(out)
    return [
        folder
        for folder in sorted(out.glob(f"{layout.GENERATION_PREFIX}*"))
        if folder.name != current and (folder / layout.UNFINISHED).exists()
    ]


def _begun(out: Path, work: "_Work[S]") -> Path | None:
    """The generation that was begun with the same corpus and not finished."""
    for folder in find_unfinished(out):
        saved = SavedProgress.read(folder)
        if saved is not None and saved.work == work.name and can_resume(folder, saved.writer):
            return folder
    return None


@dataclass(frozen=True, eq=False)
class _Work(Generic[S]):
    """What is to be packed; its name is the same for the same listing, read in the same way by the same release."""

    corpus: Corpus[S]
    tasks: list[S]

    @cached_property
    def name(self) -> str:
        corpus = self.corpus
        render = corpus.render if is_dataclass(corpus.render) else getattr(corpus.render, "__qualname__", "")
        found = hashlib.blake2b(digest_size=16)
        for part in (__version__, corpus.name, corpus.language, corpus.root, render, *self.tasks):
            found.update(repr(part).encode() + b"\0")
        return found.hexdigest()


def _current(out: Path) -> str | None:
    """The generation that the header names, where there is a header."""
    try:
        return str(parse_json((out / layout.HEADER).read_bytes())["generation"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sweep(out: Path, *, keep: Set[str | None]) -> None:
    """Remove all other generations, and a header that was never finished. Who still maps one keeps its pages."""
    remove_leftovers(out, layout.HEADER)
    for folder in out.glob(f"{layout.GENERATION_PREFIX}*"):
        if folder.name not in keep:
            shutil.rmtree(folder, ignore_errors=True)


def _found(corpus: Corpus[S]) -> str:
    problems = ", ".join(f"{count} × {kind}" for kind, count in corpus.problems.counts.items())
    return f"found {len(corpus.speakers)} speakers" + (f" and {problems}" if problems else "")


@dataclass(frozen=True)
class SavedProgress:
    """Of the work named `work` so many tasks are done, and this is what the writer and the problems were then."""

    work: str
    tasks_done: int
    writer: Mapping[str, Any]
    problems: ProblemLog

    def write(self, folder: Path) -> None:
        """Atomically: before it the last one holds, whose files have only grown since."""
        content = {"work": self.work, "tasks_done": self.tasks_done, "writer": self.writer}
        write_json(folder / layout.UNFINISHED, add_digest(content | {"problems": self.problems.state()}))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """What was saved in `folder`; None where nothing was, or it cannot be trusted."""
        path = folder / layout.UNFINISHED
        try:
            content = check_digest(read_json(path), where=path)
        except InputError:
            return None
        return cls(
            content["work"], content["tasks_done"], content["writer"], ProblemLog.from_state(content["problems"])
        )
