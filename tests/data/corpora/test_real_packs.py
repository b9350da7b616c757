"""Every pack of real speech lists and renders whole, with the counts of its README."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from sottovoce.data.corpora import commonvoice, librispeech, tsv, userlibri
from sottovoce.data.corpora.corpus import Corpus, ProblemKind, Speaker
from sottovoce.data.corpora.rendering import FileRenderer

Read = Callable[[Path], Corpus[Speaker]]
PACKS: dict[str, tuple[Read, dict[str, int], int, float]] = {
    # reader, speakers by split, clips, hours
    "audiomnist": (lambda d: tsv.read_tsv(d / "audiomnist/train.tsv"), {"train": 48}, 6_720, 1.21),
    "audiomnist as Common Voice": (
        lambda d: commonvoice.read_commonvoice(d / "audiomnist"),
        {"train": 48},
        6_720,
        1.21,
    ),
    "iban": (
        lambda d: tsv.read_tsv([d / "iban/train.tsv", d / "iban/dev.tsv"], language="iba"),
        {"train": 14, "dev": 3},
        881,
        2.24,
    ),
    "speech-commands-3w": (lambda d: tsv.read_tsv(d / "speech-commands-3w/train.tsv"), {"train": 1_000}, 3_351, 0.91),
    "librispeech-mini": (
        lambda d: librispeech.read_librispeech(d / "librispeech-mini"),
        {"train-clean-100": 90, "test-other": 6},
        150,
        0.43,
    ),
    "LibriSpeech sample": (lambda d: librispeech.read_librispeech(d / "layout-samples"), {"test-clean": 1}, 1, 0.00),
    "userlibri-mini": (
        lambda d: userlibri.read_userlibri(d / "userlibri-mini"),
        {"test-clean": 2, "test-other": 3},
        8,
        0.02,
    ),
    "Common Voice en": (
        lambda d: commonvoice.read_commonvoice(d / "layout-samples/cv-corpus", language="en"),
        {"validated": 3},
        3,
        0.00,
    ),
    "Common Voice ja": (
        lambda d: commonvoice.read_commonvoice(d / "layout-samples/cv-corpus/ja"),
        {"validated": 1},
        1,
        0.00,
    ),
}


@pytest.mark.parametrize("pack", PACKS)
def test_counts_equal_the_readme(real_speech: Path, pack: str) -> None:
    read, speakers, clips, hours = PACKS[pack]
    corpus = read(real_speech)
    assert Counter(speaker.split for speaker in corpus.speakers) == speakers
    assert sum(len(speaker.clips) for speaker in corpus.speakers) == clips
    assert not corpus.problems.counts
    if pack.endswith("as Common Voice"):
        return
    rendered = [corpus.render(speaker) for speaker in corpus.speakers]
    assert sum(len(speaker.utterances) for speaker in rendered) == clips
    seconds = sum(len(u.samples) for speaker in rendered for u in speaker.utterances) / 16_000
    assert round(seconds / 3_600, 2) == hours
    kinds = {problem.kind for speaker in rendered for problem in speaker.problems}
    assert kinds == ({ProblemKind.RESAMPLED} if pack.startswith("Common Voice") else set())


def test_genders_match_speakers_txt(real_speech: Path) -> None:
    lines = (real_speech / "librispeech-mini/LibriSpeech/SPEAKERS.TXT").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[:3]] for line in lines if not line.startswith(";")]
    expected = {id: ({"F": "female", "M": "male"}[sex], subset) for id, sex, subset in rows}
    for speaker in librispeech.read_librispeech(real_speech / "librispeech-mini").speakers:
        assert (speaker.metadata["gender"], speaker.split) == expected[speaker.name]


@pytest.mark.parametrize(
    "clip",
    [
        "layout-samples/cv-corpus/en/clips/common_voice_en_22058264.mp3",  # an MP3 that does not count its frames
        "layout-samples/mls_spanish_opus/train/audio/13697/11991/13697_11991_000000.opus",
        "iban/clips/iban_ibf_002_001.mp3",
        "librispeech-mini/LibriSpeech/test-other/1998/15444/1998-15444-0000.flac",
    ],
)
@pytest.mark.parametrize("share", [0.5, 0.95])
def test_real_files_cut_short_are_left_out(real_speech: Path, tmp_path: Path, clip: str, share: float) -> None:
    data = (real_speech / clip).read_bytes()
    path = tmp_path / Path(clip).name
    path.write_bytes(data[: int(share * len(data))])
    corpus = tsv.read_tsv(write_manifest(tmp_path, path.name))
    rendered = corpus.render(corpus.speakers[0])
    assert [problem.kind for problem in rendered.problems] == [ProblemKind.TRUNCATED_AUDIO]
    assert isinstance(corpus.render, FileRenderer)
    assert corpus.render.folders[0] == os.path.realpath(tmp_path)


def write_manifest(folder: Path, name: str) -> Path:
    (folder / "train.tsv").write_text(f"client_id\tpath\tsentence\nu\t{name}\thello\n")
    return folder / "train.tsv"
