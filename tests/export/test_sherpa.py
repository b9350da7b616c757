"""Folders for sherpa-onnx: their own runtime loads them as they are, and writes what ours does."""

import json
import math
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import sherpa_onnx
import soundfile
import torch
from tests.export.test_onnx import PROMISED, pretrained, small
from tests.export.tone_models import STREAMED, WORDS, as_floats, noisy_tones, teach, tones
from tests.guides import DOCS, blocks

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import log_mel
from sottovoce.data.audio.waveforms import pad_waveforms
from sottovoce.data.text.normalisation import normalise_text
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.export.sherpa import export_sherpa
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.decoding import decode_greedily
from sottovoce.models.family import extract_float32_features
from sottovoce.models.recogniser import Recogniser, export_recogniser, load_recogniser

Trained = Callable[..., Recogniser]


def our_texts(recogniser: Recogniser, samples: list[np.ndarray], *, how: SearchOptions | None = None) -> list[str]:
    """By CTC, or by a search."""
    recognition, settings = recogniser.family.recognition, recogniser.settings
    assert recognition is not None
    texts = []
    for own in samples:
        features = extract_float32_features(recogniser.family, pad_waveforms([own]), settings=settings)
        with torch.no_grad():
            if how is None:
                assert recognition.emit is not None
                (found,) = decode_greedily(*recognition.emit(recogniser.parameters, features, settings=settings))
            else:
                assert recognition.search is not None
                found = recognition.search(recogniser.parameters, features, settings=settings, how=how)[0][0]
        texts.append(" ".join(recogniser.tokens.decode(found.tokens).split()))
    return texts


def load_theirs(folder: Path) -> tuple[Any, Mapping[str, Any]]:
    """The recogniser that the folder names, and what else it says."""
    about = json.loads((folder / "sherpa.json").read_text(encoding="utf-8"))
    kind, _, make = about["recogniser"].partition(".")
    arguments: Mapping[str, str] = {name: str(folder / file) for name, file in about["arguments"].items()}
    return getattr(getattr(sherpa_onnx, kind), make)(**arguments), about


def their_texts(folder: Path, samples: list[np.ndarray]) -> list[str]:
    """By the recogniser that the folder names, all recordings at once."""
    recogniser, about = load_theirs(folder)
    streams = [recogniser.create_stream() for _ in samples]
    for stream, own in zip(streams, samples, strict=True):
        stream.accept_waveform(about["sample_rate"], as_floats(own))
    recogniser.decode_streams(streams)
    return [" ".join(stream.result.text.split()) for stream in streams]


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize(("family", "pieces"), [("ctc_transformer", False), ("crdnn", True)])
def test_their_runtime_writes_what_ours_does(
    family: str, pieces: bool, int8: bool, trained: Trained, tmp_path: Path
) -> None:
    recogniser = trained(family, pieces=pieces)
    export_sherpa(recogniser, tmp_path / "out", int8=int8)
    spoken = tones(pitches=(1.0, 1.03))
    ours, theirs = our_texts(recogniser, spoken), their_texts(tmp_path / "out", spoken)
    assert sum(text == word for text, word in zip(ours, WORDS * 2, strict=True)) >= len(WORDS)
    differ = sum(one != other for one, other in zip(ours, theirs, strict=True))
    assert differ <= (len(ours) // 10 if int8 else 0), list(zip(ours, theirs, strict=True))


def test_files_say_nothing_of_where_they_were_written(trained: Trained, tmp_path: Path) -> None:
    export_sherpa(trained("ctc_transformer"), tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["model.onnx", "sherpa.json", "tokens.txt"]
    for file in (tmp_path / "out").iterdir():
        for place in (str(Path.home()), str(tmp_path), str(Path(__file__).parents[2]), ".py", "site-packages"):
            assert place.encode() not in file.read_bytes(), (file.name, place)
    assert (tmp_path / "out/tokens.txt").read_text() == "<blk> 0\na 1\nb 2\nc 3\nd 4\ne 5\n"


def test_the_network_is_as_exact_as_promised_far_into_a_recording(tmp_path: Path) -> None:
    """Of the same filterbanks, in half a minute of clear tones, where most filters are nearly empty.

    Filterbanks themselves differ more there: what rounding leaves of an empty filter is another in every library.
    """
    recogniser = small("ctc_transformer", layers=2, width=48, positions="sinusoidal")
    parameters = {name: 3 * p if p.dim() > 1 else p for name, p in recogniser.parameters.items()}
    export_sherpa(replace(recogniser, parameters=parameters), tmp_path / "out")
    spoken = np.concatenate(tones() * 5)
    features_1TF, frames = log_mel(torch.from_numpy(spoken)[None], torch.tensor([len(spoken)]))
    as_kaldi = (features_1TF + 2 * math.log(2.0**15)).numpy()
    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
    theirs, _ = session.run(None, {"x": as_kaldi, "x_lens": frames.numpy()})
    features = extract_float32_features(recogniser.family, pad_waveforms([spoken]), settings=recogniser.settings)
    with torch.no_grad():
        emit = recogniser.family.recognition.emit  # type: ignore[union-attr]
        ours, _ = emit(parameters, features, settings=recogniser.settings)  # type: ignore[misc]
    assert ours.exp().std() > 0.01, "outputs that depend on the input"
    assert ours.shape[1] > 900
    assert float(np.abs(ours.numpy() - theirs[:, : ours.shape[1]]).max()) < PROMISED


@pytest.mark.long
@pytest.mark.parametrize("kind", ["wav2vec2", "xls-r", "wav2vec2-bert"])
def test_pretrained_ctc_models(kind: str, tmp_path: Path) -> None:
    recogniser = pretrained(kind, tmp_path / "pretrained", silence_seconds=0.0)
    export_sherpa(recogniser, tmp_path / "out")
    spoken = noisy_tones()
    theirs = [normalise_text(text, "en") for text in their_texts(tmp_path / "out", spoken)]
    ours = our_texts(recogniser, spoken)
    assert any(ours)
    assert theirs == ours


@pytest.mark.long
def test_moonshine_reads_real_recordings(real_speech: Path, tmp_path: Path) -> None:
    """The real one, which SOTTOVOCE_MODELS names the place of."""
    from sottovoce.models.family import find_family

    try:
        options = find_family("huggingface").Options(source="moonshine-tiny-en")
        tokens = find_family("huggingface").training.own_tokens(options, "en")
    except InputError as error:
        pytest.skip(f"no Moonshine to test with: {error}")
    family = find_family("huggingface")
    settings = options.settings(tokens=tokens.size + 1)
    recogniser = Recogniser(family, settings, tokens, family.init(settings, generator=torch.Generator()), "en")
    export_sherpa(recogniser, tmp_path / "out")
    files = sorted((real_speech / "librispeech-mini").rglob("*.flac"))[:10]
    spoken = [soundfile.read(file, dtype="int16")[0] for file in files]
    ours = our_texts(recogniser, spoken, how=SearchOptions(width=1))
    theirs = [normalise_text(text, "en") for text in their_texts(tmp_path / "out", spoken)]
    assert theirs == ours
    assert len(" ".join(ours).split()) > 50


# Streams.


def our_streams(recogniser: Recogniser, samples: list[np.ndarray]) -> list[list[tuple[str, int]]]:
    """The pieces of each recording, with their steps."""
    stream, pieces = recogniser.family.recognition.stream, recogniser.tokens.pieces()  # type: ignore[union-attr]
    assert stream is not None
    found = (stream(recogniser.parameters, own, None, settings=recogniser.settings)[0] for own in samples)
    return [[(pieces[token], step) for token, step in own] for own in found]


def their_streams(folder: Path, samples: list[np.ndarray], *, chunk: int) -> list[list[tuple[str, int]]]:
    """All recordings side by side, each given in chunks; times are those of steps of 40 ms."""
    recogniser, about = load_theirs(folder)
    spoken = [np.concatenate([as_floats(own), np.zeros(about["tail_samples"], np.float32)]) for own in samples]
    streams = [recogniser.create_stream() for _ in spoken]
    for first in range(0, max(map(len, spoken)), chunk):
        for stream, own in zip(streams, spoken, strict=True):
            stream.accept_waveform(about["sample_rate"], own[first : first + chunk])
        while ready := [stream for stream in streams if recogniser.is_ready(stream)]:
            recogniser.decode_streams(ready)
    results = [recogniser.get_result_all(stream) for stream in streams]
    return [
        [(token, round(time / 0.04)) for token, time in zip(own.tokens, own.timestamps, strict=True)] for own in results
    ]


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def test_their_stream_writes_what_ours_does_step_by_step(int8: bool, trained: Trained, tmp_path: Path) -> None:
    """With pieces, one of which writes nothing."""
    recogniser = trained("streamed", pieces=True)
    export_sherpa(recogniser, tmp_path / "out", int8=int8)
    spoken = tones(pitches=(1.0, 1.03))
    ours = our_streams(recogniser, spoken)
    texts = ["".join(piece for piece, _ in own).strip() for own in ours]
    assert sum(text == word for text, word in zip(texts, WORDS * 2, strict=True)) >= len(WORDS)
    for chunk in (1_600, 333):
        theirs = their_streams(tmp_path / "out", spoken, chunk=chunk)
        differ = sum(one != other for one, other in zip(ours, theirs, strict=True))
        assert differ <= (len(ours) // 10 if int8 else 0), list(zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def digits(real_speech: Path) -> tuple[Recogniser, list[np.ndarray]]:
    """A recogniser that knows ten real recordings by heart, and forty more by people whom it has not heard."""
    files = sorted((real_speech / "audiomnist").rglob("*.flac"))
    rows = (real_speech / "audiomnist/train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    said = {row.split("\t")[1]: row.split("\t")[2] for row in rows}
    words = list(dict.fromkeys(said[file.name] for file in files))
    one_each = [next(file for file in files if said[file.name] == word) for word in words]
    known, others = (
        [soundfile.read(file, dtype="int16")[0] for file in chosen]
        for chosen in (one_each, files[:: len(files) // 40][:40])
    )
    tokens = CharacterTokens.seen_in(words)
    return teach(known, words, tokens=tokens, options=STREAMED, steps=400), [*known, *others]


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def test_their_stream_reads_real_recordings_as_ours_does(
    int8: bool, digits: tuple[Recogniser, list[np.ndarray]], tmp_path: Path
) -> None:
    recogniser, spoken = digits
    export_sherpa(recogniser, tmp_path / "out", int8=int8)
    ours, theirs = our_streams(recogniser, spoken), their_streams(tmp_path / "out", spoken, chunk=1_600)
    assert len({"".join(piece for piece, _ in own) for own in ours}) > 5, "texts that differ from one another"
    differ = sum(one != other for one, other in zip(ours, theirs, strict=True))
    assert differ <= (len(ours) // 4 if int8 else 0), list(zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", [{}, {"input": "filterbanks"}, {"prediction": "stateless"}], ids=str)
def test_transducers_that_cannot_be_streamed_there_are_told_what_to_train(
    options: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"model\.input=filterbanks and model\.prediction=stateless, or --to"):
        export_sherpa(small("transducer", **options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What is refused.


@pytest.mark.parametrize(
    ("recogniser", "why"),
    [
        (lambda _: small("ctc_transformer", as_released=True), "Kaldi's filterbanks, and as_released has others"),
        (lambda place: pretrained("parakeet_ctc", place), "no recogniser that takes the features of this model"),
        (lambda place: pretrained("wavlm", place), "no recogniser that takes the features of this model"),
        (lambda place: pretrained("whisper", place), "runs whisper with a decoder of another form"),
    ],
    ids=["as released", "parakeet", "wavlm", "whisper"],
)
def test_what_does_not_fit_is_refused_with_its_reason(
    recogniser: Callable[[Path], Recogniser], why: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=re.escape(why)):
        export_sherpa(recogniser(tmp_path / "model"), tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("name", ["ctc_transformer", "streamed"])
def test_the_guides_program_runs_where_only_their_packages_are(name: str, trained: Trained, tmp_path: Path) -> None:
    """A new environment with sherpa-onnx and soundfile, taken from this one: nothing of ours can be imported."""
    (program,) = blocks(DOCS / "guides/on-a-phone.md", "py")
    (tmp_path / program.file).write_text(program.content, encoding="utf-8")
    export_sherpa(trained(name), tmp_path / "phone")
    soundfile.write(tmp_path / "word.wav", tones()[0], 16_000)
    place = tmp_path / "clean"
    venv.create(place, with_pip=False)
    packages = next(place.glob("lib/python*/site-packages"))
    here = Path(sherpa_onnx.__file__).parents[1]
    for name in ("sherpa_onnx*", "soundfile*", "_soundfile*", "numpy*", "cffi*", "_cffi*", "pycparser*", "typing_ext*"):
        for found in here.glob(name):
            (packages / found.name).symlink_to(found)
    arguments = [place / "bin/python", "-I", tmp_path / program.file, tmp_path / "phone", tmp_path / "word.wav"]
    ended = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == WORDS[0]
    missing = subprocess.run([str(place / "bin/python"), "-I", "-c", "import torch"], capture_output=True, check=False)
    assert missing.returncode != 0


def test_the_command_line_exports_and_refuses(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sottovoce.cli import main

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["sottovoce", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + " ".join(said.err.split())

    export_recogniser(trained("ctc_transformer"), tmp_path / "model")
    assert load_recogniser(tmp_path / "model").family.name == "ctc_transformer"
    code, said = run(tmp_path / "model", "--to", "sherpa", "--int8", "--out", tmp_path / "out", "--json")
    assert code == 0, said
    assert json.loads(said)["files"].keys() == {"model.int8.onnx", "sherpa.json", "tokens.txt"}
    shutil.rmtree(tmp_path / "out")
    code, said = run(tmp_path / "model", "--to", "onxn", "--out", tmp_path / "out")
    assert (code, "'onxn' is not one of" in said and "'onnx'" in said) == (2, True)
    code, said = run(tmp_path / "model", "--int8", "--out", tmp_path / "out")
    assert (code, "expected --to onnx or --to sherpa" in said) == (2, True)
    assert not (tmp_path / "out").exists()
