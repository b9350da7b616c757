"""Long recordings in windows: the sentences of each speaker of LibriSpeech's test-other behind one another.

    python benchmarks/long_files.py --model moonshine-tiny-en

Needs $SOTTOVOCE_DATA and $SOTTOVOCE_MODELS.
"""

import argparse
import os
import tempfile
from pathlib import Path

import jiwer
import numpy as np
import soundfile
import torch

from sottovoce.data.text.normalisation import normalise_text
from sottovoce.evaluation.transcribe import transcribe_files
from sottovoce.evaluation.transcripts import Transcript
from sottovoce.models.huggingface import family
from sottovoce.models.huggingface.settings import Options
from sottovoce.models.recogniser import Recogniser


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="moonshine-tiny-en")
    parser.add_argument("--windows", type=float, nargs="+", default=[30.0, 15.0, 10.0])
    given = parser.parse_args()
    corpus = Path(os.environ["SOTTOVOCE_DATA"]) / "librispeech-mini" / "LibriSpeech" / "test-other"
    recogniser = load_pretrained(given.model)
    with tempfile.TemporaryDirectory() as folder:
        sentences, recordings, texts = _join_sentences(corpus, Path(folder))
        print(f"{len(sentences)} sentences one by one: {_wer(recogniser, sentences, texts):.1%}")
        joined = [" ".join(texts[path] for path in parts) for parts in recordings.values()]
        known = dict(zip(recordings, joined, strict=True))
        for seconds in given.windows:
            wer = _wer(recogniser, list(recordings), known, window_seconds=seconds)
            print(f"{len(recordings)} recordings, windows of {seconds:g} s: {wer:.1%}", flush=True)


def load_pretrained(name: str) -> Recogniser:
    options = Options(source=name)
    tokens = family.own_tokens(options, "en")
    assert tokens is not None
    settings = options.settings(tokens=tokens.size + 1)
    parameters = family.FAMILY.init(settings, generator=torch.Generator())
    return Recogniser(family.FAMILY, settings, tokens, parameters, "en")


def _join_sentences(corpus: Path, folder: Path) -> tuple[list[Path], dict[Path, list[Path]], dict[Path, str]]:
    """The files of sentences, a recording of each speaker's with the files in it, and the sentences' texts."""
    recordings: dict[Path, list[Path]] = {}
    texts: dict[Path, str] = {}
    for table in sorted(corpus.glob("*/*/*.trans.txt")):
        said = dict(line.split(" ", 1) for line in table.read_text().splitlines())
        found = {file: said[file.stem] for file in sorted(table.parent.glob("*.flac"))}
        joined = folder / f"{table.parent.name}.wav"
        soundfile.write(joined, np.concatenate([soundfile.read(file, dtype="int16")[0] for file in found]), 16_000)
        recordings[joined] = list(found)
        texts |= found
    return list(texts), recordings, texts


def _wer(recogniser: Recogniser, paths: list[Path], texts: dict[Path, str], *, window_seconds: float = 30.0) -> float:
    found = list(transcribe_files(recogniser, paths, window_seconds=window_seconds))
    assert all(isinstance(result, Transcript) for result in found)
    written = [normalise_text(result.text, language="en") for result in found if isinstance(result, Transcript)]
    said = [normalise_text(texts[path], language="en") for path in paths]
    return float(jiwer.wer(said, written))


if __name__ == "__main__":
    main()
