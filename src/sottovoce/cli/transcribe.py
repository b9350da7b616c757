"""`sottovoce transcribe`: what is said in audio files, as text, JSON or subtitles."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import print_json, print_line, progress_bar
from sottovoce.cli.options import Device, Json, Model, OutsideFamily, Personal, with_decoding
from sottovoce.cli.personalise import load_own_model
from sottovoce.evaluation.transcripts import (
    FailedFile,
    Transcript,
    TranscriptFormat,
    format_transcript,
    name_transcripts,
)

if TYPE_CHECKING:
    import torch

    from sottovoce.evaluation.decoder import DecodingOptions
    from sottovoce.models.recogniser import Recogniser


@with_decoding
def transcribe(
    *,
    model: Model,
    places: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…|DIR|-", help="Audio files of any rate and length, folders of them; - for a pipe (--stream)."
        ),
    ],
    format: Annotated[
        TranscriptFormat, typer.Option(help="Plain text, words with their times, or subtitles.")
    ] = TranscriptFormat.text,
    out: Annotated[Path | None, typer.Option(help="Write one file for each recording into this folder.")] = None,
    personal: Personal = None,
    family: OutsideFamily = None,
    device: Device = None,
    decoding: "DecodingOptions",
    window: Annotated[
        float, typer.Option(help="Recognise longer files in overlapping windows of so many seconds.")
    ] = 30.0,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Write text at once: 16-bit mono PCM at 16 kHz, raw or WAV, from a pipe (-)."),
    ] = False,
    json: Json = False,
) -> None:
    """What is said in audio files. A file that cannot be read is named on stderr; the others are still transcribed.

    Exit code 0: all were transcribed; 1: some could not be read; 2: none could be.

    With --stream a causal (streaming) model writes while somebody speaks:
    arecord -t raw -f S16_LE -r 16000 | sottovoce transcribe runs/mine - --stream

    Example: sottovoce transcribe runs/demo/private interview.flac --format srt --out subtitles
    """
    from sottovoce.data.audio.narrow_band import format_narrow_count, is_narrow_band
    from sottovoce.evaluation.decoder import DecodingOptions, choose_decoder
    from sottovoce.evaluation.recognise import choose_device, require_recognition
    from sottovoce.evaluation.transcribe import find_audio_files, transcribe_files
    from sottovoce.evaluation.windows import read_audio_blocks
    from sottovoce.models.attention_search import SearchOptions

    if stream:
        if json or out is not None or format is not TranscriptFormat.text or decoding != DecodingOptions():
            raise InputError(
                "--stream writes text, decoded greedily: expected no other option than --device, --family, --personal"
            )
        if len(places) != 1:
            raise InputError(f"--stream reads one pipe, expected - or one file, not {len(places)}")
        _print_stream(load_own_model(model, personal, family=family), places[0], device=choose_device(device))
        return
    files = find_audio_files(places)
    if format is TranscriptFormat.srt and out is None and len(files) > 1 and not json:
        raise InputError(f"{len(files)} files do not make one .srt: name a folder with --out")
    one_document = json or (format is TranscriptFormat.json and out is None)
    targets = {} if out is None else name_transcripts(files, out, places=places, suffix=format.suffix)
    recogniser = load_own_model(model, personal, family=family)
    recognition = require_recognition(recogniser)  # before any file is read
    pieces, settings = recogniser.tokens.pieces(), recogniser.settings
    decode = choose_decoder(recogniser.family, pieces, decoding, settings=settings)
    untimed = recognition.untimed(settings) if isinstance(decode, SearchOptions) else None
    if format is TranscriptFormat.srt and untimed is not None:
        raise InputError(f"--format srt: {untimed}; expected text or json")
    found: list[Transcript] = []
    failed: list[FailedFile] = []
    with progress_bar("transcribing") as bar:
        (task,) = bar.task_ids
        bar.update(task, total=len(files), note="files")
        for result in transcribe_files(
            recogniser, files, device=choose_device(device), decode=decode, window_seconds=window
        ):
            bar.advance(task)
            if isinstance(result, FailedFile):
                failed.append(result)
                print_line(f"{result.path}: {result.reason}")
                continue
            found.append(result)
            if result.collapsed:
                print_line(f"{result.path}: the attention collapsed in {result.collapsed:,} windows")
            if out is not None:
                _write(targets[result.path], format_transcript(result, format))
            elif not one_document:
                # Plain print: rich would wrap lines and read brackets as markup.
                print(f"{result.path}: " * (len(files) > 1) + format_transcript(result, format), end="", flush=True)
    if one_document:
        print_json({"transcripts": [r.as_json() for r in found], "failed": [r.as_json() for r in failed]})
    if untimed is not None and (json or format is TranscriptFormat.json):
        print_line(f"words have no times: {untimed}")
    if out is not None:
        print_line(f"wrote {len(found):,} {format.suffix} files to {out}")
    if line := format_narrow_count(is_narrow_band(next(read_audio_blocks(result.path))) for result in found):
        print_line(line)
    if failed:
        raise typer.Exit(1 if found else 2)


def _print_stream(recogniser: "Recogniser", place: Path, *, device: "torch.device") -> None:
    """Text on standard output as it is spoken, until the pipe ends or somebody stops it."""
    from sottovoce.evaluation.streaming import CHUNK_SECONDS, open_pipe, read_chunks, transcribe_stream

    seconds, computing = 0.0, [0.0]
    try:
        with sys.stdin.buffer if str(place) == "-" else open_pipe(place) as pipe:
            for added in transcribe_stream(recogniser, read_chunks(pipe), device=device):
                print(added.text, end="", flush=True)
                seconds = added.audio_seconds
                computing.append(added.compute_seconds)
    except OSError as error:
        raise InputError(f"{place}: cannot be read ({error.strerror or error})") from None
    except KeyboardInterrupt:
        pass  # how one stops recording from a microphone
    print(flush=True)
    print_line(
        f"{seconds:.1f} s of audio, computed in {sum(computing):.1f} s; a chunk of {1000 * CHUNK_SECONDS:.0f} ms took "
        f"at most {1000 * max(computing):.0f} ms"
    )


def _write(path: Path, content: str) -> None:
    from sottovoce.base.files import encode_utf8, write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as file:
        file.write(encode_utf8(content))
