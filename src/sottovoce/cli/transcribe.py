"""`sottovoce transcribe`: what is said in audio files, as text, JSON or subtitles."""

import json as serial
import sys
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from sottovoce.cli.console import Json, print_json, progress_bar, say, stderr
from sottovoce.cli.recognition import (
    BeamWidth,
    ByCtc,
    CtcWeight,
    Device,
    EndThreshold,
    LanguageModel,
    LmWeight,
    LongestShift,
    Model,
    OutsideFamily,
    Temperature,
    Words,
    WordScore,
)
from sottovoce.errors import InputError

if TYPE_CHECKING:
    from sottovoce.evaluation.transcribe import Transcript


class Format(StrEnum):
    """What a transcript is written as."""

    text = "text"
    json = "json"
    srt = "srt"


ENDINGS = {Format.text: ".txt", Format.json: ".json", Format.srt: ".srt"}


def transcribe(
    model: Model,
    places: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…|DIR|-", help="Audio files of any rate and length, folders of them; - for a pipe (--stream)."
        ),
    ],
    format: Annotated[Format, typer.Option(help="Plain text, words with their times, or subtitles.")] = Format.text,
    out: Annotated[Path | None, typer.Option(help="Write one file for each recording into this folder.")] = None,
    family: OutsideFamily = None,
    device: Device = None,
    beam_width: BeamWidth = None,
    lm: LanguageModel = None,
    lm_weight: LmWeight = None,
    words: Words = None,
    word_score: WordScore = None,
    ctc: ByCtc = False,
    ctc_weight: CtcWeight = None,
    temperature: Temperature = None,
    end_threshold: EndThreshold = None,
    longest_shift: LongestShift = None,
    window: Annotated[
        float, typer.Option(help="Recognise longer files in overlapping windows of so many seconds.")
    ] = 30.0,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Write as it is heard: 16-bit mono PCM at 16 kHz, raw or WAV, from a pipe (-)."),
    ] = False,
    json: Json = False,
) -> None:
    """What is said in audio files. A file that cannot be read is named on stderr; the others are still transcribed.

    Exit code 0: all were transcribed; 1: some could not be read; 2: none could be.

    With --stream a model that is causal (streaming) writes while somebody speaks:
    arecord -t raw -f S16_LE -r 16000 | sottovoce transcribe runs/mine - --stream

    Example: sottovoce transcribe runs/demo/global interview.flac --format srt --out subtitles
    """
    from sottovoce.audio.narrow_band import is_narrow, told
    from sottovoce.evaluation.recognise import choose_decoder, choose_device, require_recognition
    from sottovoce.evaluation.transcribe import FailedFile, Transcript, find_audio_files
    from sottovoce.evaluation.transcribe import transcribe_files as transcripts_of
    from sottovoce.evaluation.windows import read_audio_blocks
    from sottovoce.models.saved import load

    if stream:
        decoding = (beam_width, lm, lm_weight, words, word_score, ctc_weight, temperature, end_threshold, longest_shift)
        if ctc or json or out is not None or format is not Format.text or any(given is not None for given in decoding):
            raise InputError(
                "--stream writes text, decoded greedily: expected no other option than --device and --family"
            )
        _write_live(model, places, device, family=family)
        return
    files = find_audio_files(places)
    if format is Format.srt and out is None and len(files) > 1 and not json:
        raise InputError(f"{len(files)} files do not make one .srt: name a folder with --out")
    one_document = json or (format is Format.json and out is None)
    targets = {} if out is None else _targets(files, out, places=places, ending=ENDINGS[format])
    recogniser = load(model, family=family)
    require_recognition(recogniser)  # refuses who writes no text, before any file is read
    decode = choose_decoder(
        recogniser.family,
        recogniser.tokens.pieces(),
        beam_width=beam_width,
        language_model=lm,
        lm_weight=lm_weight,
        words=words,
        word_score=word_score,
        by_ctc=ctc,
        ctc_weight=ctc_weight,
        temperature=temperature,
        end_threshold=end_threshold,
        longest_shift=longest_shift,
    )
    found: list[Transcript] = []
    failed: list[FailedFile] = []
    with progress_bar("transcribing") as bar:
        (task,) = bar.task_ids
        bar.update(task, total=len(files), note="files")
        for result in transcripts_of(
            recogniser, files, device=choose_device(device), decode=decode, window_seconds=window
        ):
            bar.advance(task)
            if isinstance(result, FailedFile):
                failed.append(result)
                stderr.print(f"{result.path}: {result.reason}", highlight=False, soft_wrap=True, markup=False)
                continue
            found.append(result)
            if result.collapsed:
                counted = f"{result.path}: the attention collapsed in {result.collapsed:,} windows"
                stderr.print(counted, highlight=False, soft_wrap=True, markup=False)
            if out is not None:
                _write(targets[result.path], _formatted(result, format))
            elif not one_document:
                # Plain print: rich would wrap lines and read brackets as markup.
                print(f"{result.path}: " * (len(files) > 1) + _formatted(result, format), end="", flush=True)
    if one_document:
        print_json({"transcripts": [r.as_json() for r in found], "failed": [r.as_json() for r in failed]})
    if out is not None:
        stderr.print(f"wrote {len(found):,} {ENDINGS[format]} files to {out}", highlight=False, soft_wrap=True)
    if line := told(is_narrow(next(read_audio_blocks(result.path))) for result in found):
        say(line)
    if failed:
        raise typer.Exit(1 if found else 2)


def _write_live(model: Path, places: Sequence[Path], device: str | None, *, family: str | None) -> None:
    """Text on standard output as it is heard, until the pipe ends or somebody stops it."""
    from sottovoce.evaluation.recognise import choose_device
    from sottovoce.evaluation.streaming import CHUNK_SECONDS, read_chunks, transcribe_stream
    from sottovoce.models.saved import load

    if len(places) != 1:
        raise InputError(f"--stream hears one pipe, expected - or one file, not {len(places)}")
    seconds, computing = 0.0, [0.0]
    try:
        with sys.stdin.buffer if str(places[0]) == "-" else _opened(places[0]) as pipe:
            for increment in transcribe_stream(
                load(model, family=family), read_chunks(pipe), device=choose_device(device)
            ):
                print(increment.text, end="", flush=True)
                seconds = increment.audio_seconds
                computing.append(increment.compute_seconds)
    except OSError as error:
        raise InputError(f"{places[0]}: cannot be read ({error.strerror or error})") from None
    except KeyboardInterrupt:
        pass  # how one stops listening to a microphone
    print(flush=True)
    say(
        f"heard {seconds:.1f} s, computed in {sum(computing):.1f} s; a chunk of {1000 * CHUNK_SECONDS:.0f} ms took at "
        f"most {1000 * max(computing):.0f} ms"
    )


def _opened(place: Path) -> BinaryIO:
    """A file, or a named pipe: to wait for who writes to it is what was asked for. Devices give samples without end."""
    if place.is_char_device() or place.is_block_device() or place.is_socket():
        raise InputError(f"{place} is a device or a socket, expected a file or a pipe; `cat {place} |` and - hear one")
    return place.open("rb")


def _targets(files: Sequence[Path], out: Path, *, places: Sequence[Path], ending: str) -> dict[Path, Path]:
    """Where each file's transcript goes: named after it, in the same subfolders as below the folder that was given."""
    if out.exists() and not out.is_dir():
        raise InputError(f"out={out}: it is a file, expected a folder")
    folders = [place for place in places if place.is_dir()]
    inside = {
        file: next((file.relative_to(f) for f in folders if f in file.parents), Path(file.name)) for file in files
    }
    short = Counter(path.with_suffix(ending) for path in inside.values())
    targets: dict[Path, Path] = {}
    for file, path in inside.items():
        # talk.wav and talk.flac would both be talk.txt: they keep their endings.
        name = path.with_suffix(ending) if short[path.with_suffix(ending)] == 1 else path.with_name(path.name + ending)
        if out / name in targets.values():
            raise InputError(f"{file}: another file's transcript is called {name} as well; give them one by one")
        targets[file] = out / name
    return targets


def _formatted(transcript: "Transcript", format: Format) -> str:
    from sottovoce.evaluation.subtitles import format_srt

    if format is Format.srt:
        return format_srt(transcript.words)
    if format is Format.json:
        return serial.dumps(transcript.as_json(), indent=2, ensure_ascii=False) + "\n"
    return transcript.text + "\n"


def _write(path: Path, content: str) -> None:
    from sottovoce.files import as_utf8, written_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    with written_atomically(path) as file:
        file.write(as_utf8(content))
