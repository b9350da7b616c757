"""Kaldi's data folders, whole recordings or segments of them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from sottovoce.base.errors import InputError
from sottovoce.data.corpora import kaldi
from sottovoce.data.corpora.corpus import ProblemKind
from sottovoce.data.corpora.rendering import decode_audio

WriteTone = Callable[[Path], Path]


def write(folder: Path, **files: str) -> Path:
    """A data folder; `_` in a name of ours is a dot in Kaldi's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


@pytest.fixture
def sounds(tmp_path: Path, write_tone: WriteTone) -> Path:
    for name in ("a", "b"):
        write_tone(tmp_path / "wavs" / f"{name}.flac")
    return tmp_path / "wavs"


def test_recordings_with_absolute_paths_lie_in_the_audio_root(tmp_path: Path, sounds: Path) -> None:
    data = write(
        tmp_path / "data" / "test_clean",
        wav_scp=f"u1 {sounds}/a.flac\nu2 flac -c -d -s {sounds}/b.flac |\n",
        utt2spk="u1 ann\nu2 ben\n",
        text="u1 HELLO  THERE\nu2 GOOD DAY\n",
        spk2gender="ann f\n",
    )
    corpus = kaldi.read_kaldi(data, audio_root=sounds)
    assert [(s.name, s.split, s.metadata) for s in corpus.speakers] == [
        ("ann", "test_clean", {"gender": "female"}),
        ("ben", "test_clean", {}),
    ]
    rendered = [corpus.render(speaker) for speaker in corpus.speakers]
    assert [(u.id, u.text) for r in rendered for u in r.utterances] == [("u1", "hello there"), ("u2", "good day")]
    assert not any(r.problems for r in rendered)
    assert not corpus.problems.counts
    with pytest.raises(InputError, match=r"lead out of .*: --audio-root names the folder where the audio lies"):
        kaldi.read_kaldi(data)


def test_segments_are_cut_from_a_file_that_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = np.arange(32_000, dtype=np.int16)  # two seconds in which every sample tells where it is
    data = write(
        tmp_path / "train",
        wav_scp="call call.wav\n",
        utt2spk="ann-1 ann\nann-2 ann\nann-3 ann\nann-4 ann\n",
        text="ann-1 one\nann-2 two\nann-3 three\nann-4 four\n",
        segments="ann-1 call 0.25 0.5\nann-2 call 1.5 2.05\nann-3 call 1.0 3.0\nann-4 call 2.5 3.0\n",
    )
    soundfile.write(data / "call.wav", sound, 16_000)
    corpus = kaldi.read_kaldi(data)
    decoded: list[str] = []
    monkeypatch.setattr(
        "sottovoce.data.corpora.rendering.decode_audio", lambda path: decoded.append(path) or decode_audio(path)
    )
    found = corpus.render(corpus.speakers[0])
    assert decoded == [str(data / "call.wav")]
    assert [(u.id, int(np.asarray(u.samples)[0]), len(u.samples)) for u in found.utterances] == [
        ("ann-1", 4_000, 4_000),
        ("ann-2", 24_000, 8_000),
        ("ann-3", 16_000, 16_000),
    ]
    assert [(p.kind, p.detail) for p in found.problems] == [
        (ProblemKind.SEGMENT_BEYOND, "1 to 3 s of 2 s"),
        (ProblemKind.EMPTY_AUDIO, "2.5 to 3 s of 2 s"),
    ]


def test_what_cannot_be_used_is_counted(tmp_path: Path, sounds: Path) -> None:
    data = write(
        sounds,
        wav_scp=(
            "u1 a.flac\nu1 b.flac\nu2 sph2pipe -f wav b.sph |\nu3 b.flac\nu4 b.flac\nu5 ../b.flac\n\n"
            "u6 flac -c 'a.flac |\n"
        ),
        utt2spk="u1 ann\nu2 ann\nu4 ann\nu5 ben\nu6 ann\n",
        text="u1 hello\nu2 hello\nu3 hello\nu5 hello\nu6 hello\nu9 hello\n",
    )
    corpus = kaldi.read_kaldi(data)
    assert [(s.name, [clip.id for clip in s.clips]) for s in corpus.speakers] == [("ann", ["u1"]), ("ben", [])]
    assert corpus.problems.counts == {
        ProblemKind.DUPLICATE_ROW: 1,
        ProblemKind.EMPTY_ROW: 2,  # an empty line, and u3, who has no speaker
        ProblemKind.UNREADABLE_AUDIO: 2,
        ProblemKind.MISSING_TEXT: 1,
        ProblemKind.PATH_ESCAPES: 1,
        ProblemKind.MISSING_AUDIO: 1,
    }


@pytest.mark.parametrize("times", ["u1 call 1", "u1 call 2 1", "u1 call x 1", "u1 call -1 1", "u1 call nan 1", "u1"])
def test_segments_that_are_none_are_counted(tmp_path: Path, times: str) -> None:
    files = {"wav_scp": "call a.flac\n", "utt2spk": "u1 ann\nu2 ann\n"}
    corpus = kaldi.read_kaldi(write(tmp_path / "x", **files, segments=f"{times}\nu2 call 0 1\n"))
    assert [clip.id for clip in corpus.speakers[0].clips] == ["u2"]
    assert corpus.problems.counts == {ProblemKind.MALFORMED_ROW: 1}


def test_several_folders_are_one_corpus_and_without_text_it_is_unlabelled(
    tmp_path: Path, write_tone: WriteTone
) -> None:
    for name in ("train", "dev"):
        write_tone(write(tmp_path / name, wav_scp=f"{name}-1 x.wav\n", utt2spk=f"{name}-1 {name}-ann\n") / "x.wav")
    corpus = kaldi.read_kaldi([tmp_path / "train", tmp_path / "dev"])
    assert [(s.name, s.split, s.clips[0].text) for s in corpus.speakers] == [
        ("dev-ann", "dev", None),
        ("train-ann", "train", None),
    ]
    assert all(len(corpus.render(speaker).utterances) == 1 for speaker in corpus.speakers)


def test_what_is_no_data_folder_is_said_in_one_line(tmp_path: Path, sounds: Path) -> None:
    with pytest.raises(InputError, match=r"does not hold Kaldi data: expected wav.scp and utt2spk"):
        kaldi.read_kaldi(sounds)
    with pytest.raises(InputError, match="names none"):
        kaldi.read_kaldi([])
    data = write(tmp_path / "x", wav_scp="u a.wav\n", utt2spk="u ann\n")
    with pytest.raises(InputError, match=r"audio_root=.*gone: expected the folder where the audio lies"):
        kaldi.read_kaldi(data, audio_root=tmp_path / "gone")
