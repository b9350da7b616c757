"""Libri-Light: `<subset>/<speaker>/<book>/<chapter>.flac` with its JSON beside it, or what `cut_by_vad.py` made of it.

There is no text. A speaker's time runs through books by name and chapters by natural sort: no file says more. Chapters
are cut in pauses, which their JSON lists, without a second copy.
"""

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_file
from sottovoce.base.parsing import ParseError, parse_json
from sottovoce.data.corpora.corpus import (
    SAMPLE_RATE,
    Clip,
    Corpus,
    Problem,
    ProblemKind,
    ProblemLog,
    RenderedSpeaker,
    RenderedUtterance,
    Speaker,
    Unusable,
)
from sottovoce.data.corpora.listing import (
    choose_splits,
    list_audio_files,
    list_books,
    list_subfolders,
    natural_key,
    wrong_layout,
)
from sottovoce.data.corpora.rendering import LONGEST_SECONDS, FileRenderer, make_file_corpus, take_part

# The paper's rounds come to 15 to 22 s for each of their utterances (48 or 70 clients with 8 each, 51,934 hours).
CUT_SECONDS = 20.0
SUBSETS = ("small", "medium", "large", "duplicate")
_ALREADY_CUT = re.compile(r".+_[0-9]{4,}")  # cut_by_vad.py numbers what it makes of a chapter
_VOICE_STEP = 0.08  # seconds: the detector's own resolution, by which it may overrun a file's end
_JSON = ".json"
_LAYOUT = "<subset>/<speaker>/<book>/<chapter>.flac and .json, as in large/100/sea_fairies_0812_librivox_64kb_mp3/"


def read_librilight(
    root: str | Path,
    *,
    splits: Sequence[str] | None = None,
    language: str = "en",
    cut_seconds: float = CUT_SECONDS,
    point: bool = False,
    strict: bool = False,
) -> Corpus[Speaker]:
    """Libri-Light under `root`, the folder of its subsets or one of them; or the output of `cut_by_vad.py`.

    A split is a subset's name; speakers who lie in no subset are in "train". No utterance is longer than
    `cut_seconds`. `point`: the store is to point into the FLAC files and not to copy them.
    """
    if not (math.isfinite(cut_seconds) and cut_seconds >= 1):
        raise InputError(f"cut_seconds={cut_seconds}: expected at least 1")
    log = ProblemLog(strict=strict)
    base = Path(root)
    found = _splits_in(base)
    if not found:
        raise wrong_layout(base, corpus="Libri-Light", expected=_LAYOUT)
    folders = {split: found[split] for split in choose_splits(list(found), splits, where=base)}
    speakers = [
        Speaker(entry.name, split, _chapters(entry, log), in_time=True)
        for split, folder in folders.items()
        for entry in list_subfolders(folder)
    ]
    corpus = make_file_corpus(
        "librilight",
        language=language,
        speakers=speakers,
        folders=folders.values(),
        log=log,
        root=base if point else None,
    )
    assert isinstance(corpus.render, FileRenderer)
    render = ChapterRenderer(corpus.render, cut_samples=int(cut_seconds * SAMPLE_RATE))
    return replace(corpus, render=render, clips_per_task=1)  # a chapter lasts up to an hour or two


def _splits_in(base: Path) -> dict[str, Path]:
    """The subsets in `base`, or `base` itself as the one there is."""
    if not base.is_dir():
        return {}
    subsets = {subset: base / subset for subset in SUBSETS if (base / subset).is_dir()}
    if subsets or next(base.glob("*/*/*.flac"), None) is None:
        return subsets
    name = base.resolve().name
    return {name if name in SUBSETS else "train": base}


def _chapters(speaker: os.DirEntry[str], log: ProblemLog) -> list[Clip]:
    """A speaker's chapters in the order of time: what each holds is seen when it is rendered."""
    clips = []
    for book, folder in sorted(list_books(speaker), key=lambda found: natural_key(found[0])):
        audio = list_audio_files(folder, log)
        for name in sorted(audio, key=natural_key):
            id = "/".join(filter(None, (speaker.name, book, name)))
            clips.append(Clip(id, os.path.join(folder, audio[name]), None, {"book": book, "chapter": name}))
        alone = sorted(name for name in os.listdir(folder) if name.endswith(_JSON) and name[: -len(_JSON)] not in audio)
        log.extend(Problem(ProblemKind.MISSING_AUDIO, os.path.join(folder, name)) for name in alone)
    return clips


@dataclass(frozen=True)
class ChapterRenderer:
    """Cuts a speaker's chapters into utterances of at most `cut_samples`."""

    files: FileRenderer
    cut_samples: int

    def __call__(self, speaker: Speaker) -> RenderedSpeaker:
        utterances: list[RenderedUtterance] = []
        problems: list[Problem] = []
        for clip in speaker.clips:
            try:
                utterances += self._cut(clip, problems)
            except Unusable as reason:
                problems.append(Problem(reason.kind, clip.path, reason.detail))
        return RenderedSpeaker(speaker.name, speaker.split, utterances, speaker.metadata, problems, speaker.in_time)

    def _cut(self, clip: Clip, problems: list[Problem]) -> Iterator[RenderedUtterance]:
        sound, conversions = self.files.sound(clip.path)
        problems.extend(Problem(kind, clip.path, detail) for kind, detail in conversions)
        described = _described(clip, problems)
        if described is None:
            voiced, known = [(0, len(sound))], {}
        else:
            voiced, known = _voiced(described, clip, len(sound), problems), _known(described)
        for number, (start, stop) in enumerate(cut_voice(voiced, most=self.cut_samples)):
            metadata = {**clip.metadata, **known, "start": f"{start / SAMPLE_RATE:.2f}"}
            yield RenderedUtterance(f"{clip.id}-{number:04}", take_part(sound, start, stop), None, None, metadata)


def cut_voice(voiced: Sequence[tuple[int, int]], *, most: int) -> Iterator[tuple[int, int]]:
    """Neighbouring stretches of voice put together, with the pauses between them, to at most so many samples.

    A stretch that is longer by itself is divided evenly.

    >>> list(cut_voice([(0, 4), (5, 9), (12, 14), (20, 45)], most=10))
    [(0, 9), (12, 14), (20, 28), (28, 36), (36, 45)]
    """
    together: list[tuple[int, int]] = []
    for start, stop in voiced:
        if together and stop - together[-1][0] <= most:
            together[-1] = (together[-1][0], stop)
        else:
            together.append((start, stop))
    for start, stop in together:
        pieces = math.ceil((stop - start) / most)
        for piece in range(pieces):
            yield start + (stop - start) * piece // pieces, start + (stop - start) * (piece + 1) // pieces


def _described(clip: Clip, problems: list[Problem]) -> dict[str, Any] | None:
    """What the JSON beside a chapter says, if it says where there is voice; nothing is beside what was cut before."""
    path = os.path.splitext(clip.path)[0] + _JSON
    try:
        content = parse_json(read_file(Path(path)))
    except FileNotFoundError:
        if not _ALREADY_CUT.fullmatch(clip.metadata["chapter"]):
            problems.append(Problem(ProblemKind.NO_VOICE_ACTIVITY, clip.path, "it has no JSON"))
        return None
    except (ParseError, OSError, InputError):
        problems.append(Problem(ProblemKind.NO_VOICE_ACTIVITY, path, "it cannot be read as JSON"))
        return None
    if not (isinstance(content, dict) and _are_segments(content.get("voice_activity"))):
        problems.append(Problem(ProblemKind.NO_VOICE_ACTIVITY, path, "expected voice_activity, a list of [start, end]"))
        return None
    return content


def _are_segments(value: object) -> bool:
    """Whether it is a list of stretches in seconds, one after another."""
    if not isinstance(value, list):
        return False
    earlier = 0.0
    for segment in value:
        if not (isinstance(segment, list) and len(segment) == 2 and all(type(at) in (int, float) for at in segment)):
            return False
        if not earlier <= segment[0] <= segment[1] <= LONGEST_SECONDS:
            return False
        earlier = segment[1]
    return True


def _voiced(described: dict[str, Any], clip: Clip, length: int, problems: list[Problem]) -> list[tuple[int, int]]:
    """Where there is voice, in samples, within the file's own length."""
    segments = described["voice_activity"]
    if not segments:
        raise Unusable(ProblemKind.NO_VOICE, "its voice_activity is empty")
    beyond = [end for _, end in segments if end > length / SAMPLE_RATE + _VOICE_STEP]
    if beyond:
        detail = f"{len(beyond)} of {len(segments)} segments, to {beyond[-1]:g} s of {length / SAMPLE_RATE:g} s"
        problems.append(Problem(ProblemKind.BEYOND_THE_END, clip.path, detail))
    voiced = [(round(start * SAMPLE_RATE), min(round(end * SAMPLE_RATE), length)) for start, end in segments]
    voiced = [(start, stop) for start, stop in voiced if start < stop]
    if not voiced:
        raise Unusable(ProblemKind.NO_VOICE, "no voice_activity within its length")
    return voiced


def _known(described: dict[str, Any]) -> dict[str, str]:
    """The signal-to-noise ratio, where it is a number."""
    snr = described.get("snr")
    return {"snr": f"{snr:g}"} if type(snr) in (int, float) else {}
