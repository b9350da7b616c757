"""A `prepare` that is killed at any moment goes on from what it had saved, to the same store."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.corpora import trees
from tests.points import Point, Watch
from tests.training.forked import forked

from sottovoce.base.errors import InputError
from sottovoce.data.corpora import librilight
from sottovoce.data.corpora.corpus import (
    Clip,
    Corpus,
    Problem,
    ProblemKind,
    ProblemLog,
    RenderedSpeaker,
    RenderedUtterance,
    Speaker,
)
from sottovoce.data.store import PackingProgress, Store, find_unfinished, pack_corpus, packing

SAVE_EVERY = 3
TASKS = 2 * 7 + 1  # two speakers in pieces of a clip, and one who has none


def corpus_of_clips(*, clips: int = 7) -> Corpus[Speaker]:
    """Ada and Bea with a damaged clip each, and Cleo with nothing."""
    listed = [Clip(id=f"{i}", path="", text="a") for i in range(clips)]
    speakers = [Speaker("ada", "dev", listed, {"age": "9"}, in_time=True), Speaker("bea", "train", listed)]
    speakers.insert(1, Speaker("cleo", "dev", []))
    return Corpus("made", "en", speakers, tone, ProblemLog(), clips_per_task=1)


def tone(speaker: Speaker) -> RenderedSpeaker:
    spoken = [
        RenderedUtterance(c.id, np.full(5 + int(c.id), len(speaker.name), np.int16), "a", "A")
        for c in speaker.clips
        if c.id != "1"
    ]
    problems = [Problem(ProblemKind.EMPTY_AUDIO, f"{speaker.name}-1") for c in speaker.clips if c.id == "1"]
    return RenderedSpeaker(speaker.name, speaker.split, spoken, speaker.metadata, problems, speaker.in_time)


def pointed(root: Path) -> Corpus[Speaker]:
    return librilight.read_librilight(root, point=True, cut_seconds=5)


def content(out: Path) -> dict[str, Any]:
    """All that a store is, but for its generation's name."""
    header = json.loads((out / "store.json").read_text())
    files = {path.name: path.read_bytes() for path in (out / header["generation"]).iterdir() if path.is_file()}
    return {"files": files, **{name: header[name] for name in header if name not in ("generation", "seal")}}


def killed_at(
    point: Point, make: Callable[[], Corpus[Speaker]], out: Path, *, tasks_per_save: int = SAVE_EVERY
) -> None:
    """Pack in a process of its own, which is killed there."""
    with forked(pack_until, point, make, out, tasks_per_save) as process:
        process.join()
        assert process.exitcode == -signal.SIGKILL


def pack_until(point: Point, make: Callable[[], Corpus[Speaker]], out: Path, tasks_per_save: int) -> None:
    packing.TASKS_PER_SAVE = tasks_per_save
    with Watch(point):
        pack_corpus(make(), out, workers=1)


POINTS = {
    "before anything was saved": Point("sottovoce.data.store.writing:Writer.add", nth=2),
    "in the first save": Point("sottovoce.data.store.packing:SavedProgress.write", at="call"),
    "with the columns saved and not the state": Point("sottovoce.data.store.writing:Writer.save", nth=2),
    "behind the second save": Point("sottovoce.data.store.packing:SavedProgress.write", nth=2),
    "between two saves": Point("sottovoce.data.store.writing:Writer.add", nth=8),
    "halfway through an utterance": Point("sottovoce.data.store.writing:Writer._append", nth=13),
    "at the end": Point("sottovoce.data.store.writing:Writer.finish", at="call"),
    "right before the commit": Point("sottovoce.data.store.writing:Writer.finish"),
}


@pytest.mark.parametrize("kind", ["copied", "pointed into"])
@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_a_killed_prepare_goes_on_to_the_same_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: Point, kind: str
) -> None:
    monkeypatch.setattr(packing, "TASKS_PER_SAVE", SAVE_EVERY)
    if kind == "pointed into":
        trees.librilight(tmp_path / "ll", trees.noise)
    make = corpus_of_clips if kind == "copied" else partial(pointed, tmp_path / "ll")
    pack_corpus(make(), tmp_path / "whole", workers=1)
    killed_at(point, make, tmp_path / "killed")
    saves = len(find_unfinished(tmp_path / "killed"))
    seen: list[PackingProgress] = []
    pack_corpus(make(), tmp_path / "killed", workers=1, on_progress=seen.append)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert seen[0].resumed == bool(saves)
    assert seen[0].tasks_done == (seen[0].tasks_done // SAVE_EVERY * SAVE_EVERY if saves else 1)
    assert [*(tmp_path / "killed").rglob("*.part"), *(tmp_path / "killed").rglob("unfinished.json")] == []
    assert len([*(tmp_path / "killed").glob("data-*")]) == 1
    Store(tmp_path / "killed").check(audio=True)


def test_killed_again_and_again_it_comes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "TASKS_PER_SAVE", 1)
    pack_corpus(corpus_of_clips(), tmp_path / "whole", workers=1)
    for _ in range(TASKS - 1):  # each comes one piece further
        killed_at(
            Point("sottovoce.data.store.writing:Writer.add", nth=2),
            corpus_of_clips,
            tmp_path / "killed",
            tasks_per_save=1,
        )
    pack_corpus(corpus_of_clips(), tmp_path / "killed", workers=1)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_another_corpus_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "TASKS_PER_SAVE", SAVE_EVERY)
    killed_at(Point("sottovoce.data.store.writing:Writer.add", nth=8), corpus_of_clips, tmp_path / "killed")
    assert find_unfinished(tmp_path / "killed")
    seen: list[PackingProgress] = []
    pack_corpus(corpus_of_clips(clips=6), tmp_path / "killed", workers=1, on_progress=seen.append)
    assert not any(progress.resumed for progress in seen)
    assert Store(tmp_path / "killed").utterance_count == 10
    assert not find_unfinished(tmp_path / "killed")


def another_number(path: Path) -> None:
    path.write_text(path.read_text().replace('"tasks_done": 6', '"tasks_done": 7'))


def one_byte_less(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("unfinished.json", another_number),
        ("audio_offsets.npy.part", one_byte_less),
        ("user_keys.npy.part", Path.unlink),
        ("audio.i16", Path.unlink),
        ("utterances.jsonl", one_byte_less),
    ],
)
def test_what_was_saved_and_damaged_is_begun_anew(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    # Killed when all is saved and nothing more is written.
    killed_at(Point("sottovoce.data.store.packing:SavedProgress.write", nth=2), corpus_of_clips, tmp_path / "killed")
    (saved,) = find_unfinished(tmp_path / "killed")
    damage(saved / name)
    seen: list[PackingProgress] = []
    pack_corpus(corpus_of_clips(), tmp_path / "killed", workers=1, on_progress=seen.append)
    assert not seen[0].resumed
    pack_corpus(corpus_of_clips(), tmp_path / "whole", workers=1)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def fatal(speaker: Speaker) -> RenderedSpeaker:
    """The first time that Bea's fourth clip is rendered, somebody kills the worker."""
    marker = Path(speaker.metadata["marker"])
    if speaker.name == "bea" and [clip.id for clip in speaker.clips] == ["3"] and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(tone(speaker), metadata={})


def test_a_worker_that_is_killed_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "TASKS_PER_SAVE", SAVE_EVERY)
    speakers = [
        replace(speaker, metadata={"marker": str(tmp_path / "killed once")}) for speaker in corpus_of_clips().speakers
    ]

    def listed() -> Corpus[Speaker]:
        return replace(corpus_of_clips(), speakers=speakers, render=fatal)

    with pytest.raises(InputError, match="a worker process was killed"):
        pack_corpus(listed(), tmp_path / "store", workers=2)
    seen: list[PackingProgress] = []
    pack_corpus(listed(), tmp_path / "store", workers=2, on_progress=seen.append)
    assert seen[0].resumed == (seen[0].tasks_done > 1)
    pack_corpus(listed(), tmp_path / "whole", workers=1)
    assert content(tmp_path / "store") == content(tmp_path / "whole")


def test_an_interrupt_keeps_what_was_saved_and_the_old_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "TASKS_PER_SAVE", SAVE_EVERY)
    out = tmp_path / "store"

    def interrupted(progress: PackingProgress) -> None:
        if progress.tasks_done == 8:
            raise KeyboardInterrupt

    for old in (False, True):
        with pytest.raises(KeyboardInterrupt):
            pack_corpus(corpus_of_clips(), out, workers=1, on_progress=interrupted)
        assert len(find_unfinished(out)) == 1
        assert (out / "store.json").exists() == old
        seen: list[PackingProgress] = []
        pack_corpus(corpus_of_clips(), out, workers=2, on_progress=seen.append)
        assert seen[0] == PackingProgress(6, TASKS, seen[0].audio_seconds, resumed=True)
    pack_corpus(corpus_of_clips(), tmp_path / "whole", workers=1)
    assert content(out) == content(tmp_path / "whole")
