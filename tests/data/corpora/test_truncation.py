from pathlib import Path

import numpy as np
import pytest
import soundfile

from sottovoce.data.corpora.truncation import is_truncated


def encode(folder: Path, name: str, *, rate: int = 16_000, **options: str) -> bytes:
    noise = np.random.default_rng(0).normal(scale=0.1, size=rate // 2)
    soundfile.write(folder / name, noise, rate, **options)
    return (folder / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.wav", {}),
        ("a.wav", {"subtype": "FLOAT"}),
        ("a.ogg", {"format": "OGG", "subtype": "OPUS"}),
        ("a.ogg", {"format": "OGG", "subtype": "VORBIS"}),
        ("a.aiff", {}),
        ("a.aiff", {"subtype": "FLOAT"}),
        ("a.au", {}),
        ("a.caf", {}),
        ("a.w64", {}),
        ("a.rf64", {}),
    ],
)
def test_every_cut_is_seen_where_the_container_tells_its_length(
    tmp_path: Path, name: str, options: dict[str, str]
) -> None:
    data = encode(tmp_path, name, **options)
    assert not is_truncated(data)
    known_by = 40 if name.endswith((".au", ".w64")) else 12  # the bytes that tell the container
    assert all(is_truncated(data[:length]) for length in range(known_by, len(data)))


@pytest.mark.parametrize("rate", [16_000, 44_100, 48_000])
def test_every_cut_of_an_mp3_that_counts_its_frames_is_seen(tmp_path: Path, rate: int) -> None:
    data = encode(tmp_path, "a.mp3", rate=rate)
    assert not is_truncated(data)
    missed = [length for length in range(300, len(data)) if not is_truncated(data[:length])]
    # Only the loss of exactly the last frame: the count has one frame of grace, as writers differ in what they count.
    assert len(missed) <= 1


def test_cuts_inside_a_frame_are_seen_where_an_mp3_does_not_count_its_frames(tmp_path: Path) -> None:
    counted = encode(tmp_path, "a.mp3", rate=48_000)
    uncounted = counted[counted.index(b"\xff\xfb", 4) :]  # without its first frame, which holds the count
    assert b"Info" not in uncounted
    assert b"Xing" not in uncounted
    tag = b"ID3\x04\x00\x00\x00\x00\x00\x23" + bytes(35)
    data = tag + uncounted
    assert not is_truncated(data)
    assert not is_truncated(data + b"TAG" + bytes(125))
    missed = [length for length in range(60, len(data)) if not is_truncated(data[:length])]
    frames = soundfile.info(tmp_path / "a.mp3").frames // 1152 + 3
    assert len(missed) <= frames  # the cuts between two frames


def test_a_wav_written_as_a_stream_is_whole(tmp_path: Path) -> None:
    data = bytearray(encode(tmp_path, "a.wav"))
    at = data.index(b"data") + 4
    data[at : at + 4] = b"\xff\xff\xff\xff"
    assert not is_truncated(bytes(data))


@pytest.mark.parametrize("data", [b"", b"RIFF", b"not audio at all", b"fLaC" + bytes(40), b"\xff", b"ID3"])
def test_what_is_no_such_file_is_left_to_the_decoder(data: bytes) -> None:
    assert not is_truncated(data)


def test_noise_that_reads_as_a_million_empty_chunks_is_soon_given_up() -> None:
    assert is_truncated(b"RIFF\x00\x00\x00\x00WAVE" + bytes(8 << 20))
