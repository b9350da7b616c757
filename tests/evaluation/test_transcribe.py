"""Files of any length and kind to words with times; a damaged one does not stop the others."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from tests.evaluation.conftest import noise

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import frame_lengths
from sottovoce.data.audio.waveforms import Waveforms
from sottovoce.data.store import Store
from sottovoce.evaluation import transcribe as transcription
from sottovoce.evaluation.recognise import compute_emissions, recognise_utterances
from sottovoce.evaluation.transcribe import find_audio_files, transcribe_files
from sottovoce.evaluation.transcripts import FailedFile, Transcript
from sottovoce.models.decoding import BeamSearch
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.transformer.network import output_lengths
from sottovoce.models.transformer.settings import SECONDS_PER_FRAME


def transcripts(recogniser: Recogniser, *paths: Path, **options: object) -> list[Transcript]:
    found = list(transcribe_files(recogniser, paths, **options))  # type: ignore[arg-type]
    assert all(isinstance(result, Transcript) for result in found), found
    return found  # type: ignore[return-value]


@pytest.fixture
def files(store: Store, tmp_path: Path) -> list[Path]:
    """The store's utterances as files."""
    paths = []
    for row in range(store.utterance_count):
        paths.append(tmp_path / f"{row}.wav")
        soundfile.write(paths[-1], store.samples(row), 16_000)
    return paths


def test_short_files_give_what_a_store_of_them_gives(recogniser: Recogniser, store: Store, files: list[Path]) -> None:
    expected = recognise_utterances(recogniser, store, np.arange(store.utterance_count))
    for batch_seconds in (0.1, 60.0):
        found = transcripts(recogniser, *files, batch_seconds=batch_seconds)
        assert [result.text for result in found] == expected
        assert [result.path for result in found] == files
        assert [result.seconds for result in found] == [len(store.samples(row)) / 16_000 for row in range(len(files))]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of what the model is given together, in samples."""
    found: list[list[int]] = []

    def compute(recogniser: Recogniser, recordings: Waveforms) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(recordings.lengths_U.tolist())
        return compute_emissions(recogniser, recordings)

    monkeypatch.setattr(transcription, "compute_emissions", compute)
    return found


def test_files_of_like_lengths_share_a_batch_and_come_back_in_order(
    recogniser: Recogniser, tmp_path: Path, batches: list[list[int]]
) -> None:
    paths = [tmp_path / f"{place}.wav" for place in range(24)]
    for place, path in enumerate(paths):  # short and long ones in turn
        soundfile.write(path, noise(path.name, seconds=0.5 + 0.01 * place if place % 2 else 4 - 0.01 * place), 16_000)
    found = transcripts(recogniser, *paths, batch_seconds=60.0)
    assert [result.path for result in found] == paths
    assert sorted(length for lengths in batches for length in lengths) == sorted(
        soundfile.info(path).frames for path in paths
    )
    batches.clear()
    # One by one: who shares a batch changes no text.
    assert [result.text for result in transcripts(recogniser, *paths, batch_seconds=0.1)] == [r.text for r in found]
    assert all(len(lengths) == 1 for lengths in batches)
    batches.clear()
    transcripts(recogniser, *paths, batch_seconds=8.0)
    padded, spoken = (sum(count(lengths) for lengths in batches) for count in (lambda own: max(own) * len(own), sum))
    assert padded < 1.1 * spoken, "neighbours would take 1.7 times as much"


@pytest.mark.parametrize("first_seconds", [0.1, 3.0, 60.0, 2_000.0])
def test_windows_are_gathered_in_order_few_at_first(first_seconds: float) -> None:
    rng = np.random.default_rng(1)
    windows = [
        transcription._Window(place, 0, np.zeros(int(seconds * 16_000), np.int16))
        for place, seconds in enumerate(rng.uniform(0.5, 8.0, 2_000).tolist())
    ]
    groups = list(transcription._gather(iter(windows), first_seconds=first_seconds))
    assert [window for group in groups for window in group] == windows
    seconds = [sum(len(window.samples) for window in group) / 16_000 for group in groups]
    assert seconds[0] < first_seconds + 8
    assert max(seconds) < max(first_seconds, transcription.SORTED_SECONDS) + 8
    assert all(after > before - 8 for before, after in pairwise(seconds[:-1]))


FRAME_SAMPLES = 480


def loudness_of_each_frame(_: Recogniser, sound: Waveforms) -> tuple[torch.Tensor, torch.Tensor]:
    """A recogniser without memory: the token of a frame is the loudness of its samples. Tokens a … z, space, …"""
    lengths_B = output_lengths(frame_lengths(sound.lengths_U))
    frames_BTN = sound.padded_UN.float().unfold(1, FRAME_SAMPLES, FRAME_SAMPLES)
    level_BT = (frames_BTN.abs().mean(dim=-1) / 100).round().long()
    missing = int(lengths_B.max()) - level_BT.shape[1]
    level_BT = torch.nn.functional.pad(level_BT, (0, max(missing, 0)))
    return torch.log_softmax(9.0 * torch.nn.functional.one_hot(level_BT, 30).float(), dim=-1), lengths_B


@pytest.mark.parametrize("seconds", [3.0, 3.0001, 5.37, 29.99, 30.0])
@pytest.mark.parametrize("window_seconds", [0.6, 1.7])
def test_windows_change_nothing_for_a_model_without_memory(
    recogniser: Recogniser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, window_seconds: float
) -> None:
    monkeypatch.setattr(transcription, "compute_emissions", loudness_of_each_frame)
    levels = np.random.default_rng(3).integers(0, 30, int(seconds / 0.03) + 1) * 100
    samples = np.repeat(levels, FRAME_SAMPLES)[: int(seconds * 16_000)].astype(np.int16)
    soundfile.write(tmp_path / "long.wav", samples, 16_000)
    (whole,) = transcripts(recogniser, tmp_path / "long.wav", window_seconds=60.0)
    (pieces,) = transcripts(recogniser, tmp_path / "long.wav", window_seconds=window_seconds)
    assert len(whole.words) > 2
    assert pieces == whole


def test_times_lie_on_frames_and_in_order(recogniser: Recogniser, files: list[Path]) -> None:
    for result in transcripts(recogniser, *files):
        times = [time for word in result.words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert times[-1] <= result.seconds
        assert np.array(times) / SECONDS_PER_FRAME == pytest.approx(np.rint(np.array(times) / SECONDS_PER_FRAME))


def test_beam_search_has_times_too(recogniser: Recogniser, files: list[Path]) -> None:
    pytest.importorskip("flashlight.lib.text", reason="beam search needs the extra `lm`")
    beam = BeamSearch(recogniser.tokens.pieces(), width=5)
    for result in transcripts(recogniser, *files[:3], decode=beam, window_seconds=0.7):
        assert result.text
        assert all(0 <= word.start < word.end <= result.seconds for word in result.words)


@pytest.mark.parametrize("batch_seconds", [None, 2.0, 0.1])
def test_damaged_files_do_not_stop_the_others(
    recogniser: Recogniser, files: list[Path], tmp_path: Path, batch_seconds: float | None
) -> None:
    good = transcripts(recogniser, *files[:2])
    broken, late = tmp_path / "broken.wav", tmp_path / "late.flac"
    broken.write_bytes(b"RIFF" + bytes(100))
    soundfile.write(late, np.random.default_rng(1).normal(0, 0.1, 16_000 * 25), 16_000)
    late.write_bytes(late.read_bytes()[:500_000])  # its first windows are whole
    found = list(
        transcribe_files(
            recogniser, [broken, files[0], late, files[1]], window_seconds=2.0, batch_seconds=batch_seconds
        )
    )
    assert [type(result) for result in found] == [FailedFile, Transcript, FailedFile, Transcript]
    assert [found[1], found[3]] == good
    assert isinstance(found[2], FailedFile)
    assert found[2].path == late
    assert "shorter than its header says" in found[2].reason


def test_a_long_stereo_file_of_another_rate(recogniser: Recogniser, tmp_path: Path) -> None:
    sound = np.random.default_rng(1).normal(0, 0.1, (8_000 * 70, 2))
    soundfile.write(tmp_path / "long.flac", sound, 8_000)
    (result,) = transcripts(recogniser, tmp_path / "long.flac")
    assert result.seconds == 70
    assert result.words[-1].end > 66, "the last window was heard"


def test_silence_and_the_shortest_files(recogniser: Recogniser, tmp_path: Path) -> None:
    for name, size in (("one.wav", 1), ("short.wav", 600), ("silent.wav", 48_000)):
        soundfile.write(tmp_path / name, np.zeros(size), 16_000)
    one, short, silent = transcripts(recogniser, *(tmp_path / n for n in ("one.wav", "short.wav", "silent.wav")))
    assert one.words == short.words == ()
    assert silent.seconds == 3


def test_find_files(tmp_path: Path) -> None:
    for name in ("b.wav", "a.FLAC", "notes.txt", "sub/c.mp3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    folder = [tmp_path / name for name in ("a.FLAC", "b.wav", "sub/c.mp3")]
    assert find_audio_files([tmp_path]) == folder
    assert find_audio_files([tmp_path / "b.wav", tmp_path, tmp_path / "notes.txt"]) == [
        folder[1],
        folder[0],
        folder[2],
        tmp_path / "notes.txt",
    ]
    with pytest.raises(InputError, match=r"gone\.wav: there is no such file"):
        find_audio_files([tmp_path / "gone.wav"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no audio file in this folder"):
        find_audio_files([tmp_path / "empty"])
