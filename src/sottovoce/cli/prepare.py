"""`sottovoce prepare`: a corpus as it lies on disk becomes a store, packed by user."""

import time
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from sottovoce.cli.console import INTERRUPTED, print_json, print_line, progress_bar, stdout
from sottovoce.cli.options import Json
from sottovoce.corpora.corpus import Corpus, Speaker
from sottovoce.errors import InputError
from sottovoce.store import Progress, Store, pack, unfinished

app = typer.Typer(help="Turn a corpus into a store, packed by user.", no_args_is_help=True)

Source = Annotated[Path, typer.Argument(help="The folder of the corpus.")]
Out = Annotated[Path, typer.Option("--out", help="The store to write; an old one there is replaced at the end.")]
Language = Annotated[str, typer.Option(help="Language code; decides how text is normalised.")]
Splits = Annotated[list[str] | None, typer.Option("--split", help="Take only this split; may be given again.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first unusable recording or row.")]
Point = Annotated[
    bool, typer.Option("--point", help="Point into the FLAC files instead of copying them; they must stay as they are.")
]
AudioRoot = Annotated[
    Path | None, typer.Option(help="The folder where the audio lies: paths are inside it, absolute or from there on.")
]
HoldOut = Annotated[
    str | None, typer.Option(help="Speakers to set aside, as in dev=4,test=8: chosen by --seed, moved whole.")
]
HoldOutSeed = Annotated[int, typer.Option(help="Decides who is held out.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes that decode; all cores by default.")]

S = TypeVar("S")


@app.command()
def librispeech(
    source: Source,
    out: Out,
    language: Language = "en",
    split: Splits = None,
    in_time: Annotated[
        bool,
        typer.Option("--in-time", help="Utterances by number of chapter and utterance, not in the alphabet's order."),
    ] = False,
    strict: Strict = False,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """LibriSpeech: SPLIT/SPEAKER/CHAPTER folders with *.trans.txt; genders from SPEAKERS.TXT.

    Example: sottovoce prepare librispeech LibriSpeech --out stores/ls-100 --split train-clean-100
    """
    from sottovoce.corpora import librispeech

    corpus = librispeech.read(source, splits=split, language=language, in_time=in_time, strict=strict)
    _pack(corpus, out, workers, json)


@app.command()
def librilight(
    source: Source,
    out: Out,
    cut_seconds: Annotated[
        float, typer.Option(help="No utterance is longer; stretches of voice are put together up to it.")
    ] = 20.0,
    point: Point = False,
    language: Language = "en",
    split: Splits = None,
    hold_out: HoldOut = None,
    seed: HoldOutSeed = 1,
    strict: Strict = False,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Libri-Light, speech without text: SUBSET/SPEAKER/BOOK/CHAPTER.flac with its JSON, or what cut_by_vad.py wrote.

    Example: sottovoce prepare librilight librilight --out stores/ll-52k --split large --point
    """
    from sottovoce.corpora import librilight

    corpus = librilight.read(
        source, splits=split, language=language, cut_seconds=cut_seconds, point=point, strict=strict
    )
    _pack(_with_hold_out(corpus, hold_out, seed), out, workers, json)


@app.command()
def mls(
    source: Source,
    out: Out,
    point: Point = False,
    language: Annotated[str | None, typer.Option(help="Language code; by default from mls_LANGUAGE.")] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            "--split", help="Take only this split, or part of train (train-9hr, train-1hr); may be given again."
        ),
    ] = None,
    strict: Strict = False,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Multilingual LibriSpeech, FLAC or Opus: SPLIT/transcripts.txt, segments.txt and audio/SPEAKER/BOOK.

    Example: sottovoce prepare mls mls_french_opus --out stores/mls-fr
    """
    from sottovoce.corpora import mls

    _pack(mls.read(source, splits=split, language=language, point=point, strict=strict), out, workers, json)


@app.command()
def userlibri(
    source: Source,
    out: Out,
    language: Language = "en",
    split: Splits = None,
    strict: Strict = False,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """UserLibri: audio_data/SPLIT/speaker-S-book-B folders; a user is one speaker reading one book.

    Example: sottovoce prepare userlibri UserLibri --out stores/userlibri
    """
    from sottovoce.corpora import userlibri

    _pack(userlibri.read(source, splits=split, language=language, strict=strict), out, workers, json)


@app.command()
def commonvoice(
    source: Source,
    out: Out,
    language: Annotated[str | None, typer.Option(help="Language code; the folder's own by default.")] = None,
    split: Splits = None,
    as_released: Annotated[
        bool,
        typer.Option(
            "--as-released",
            help="Spell as the released code of Pelikan et al. 2025: skip what no token writes, keep the rest.",
        ),
    ] = False,
    strict: Strict = False,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Common Voice, release 6.1 or later: SPLIT.tsv beside clips/; a user is one client_id.

    Example: sottovoce prepare commonvoice cv-corpus-13.0/en --out stores/cv-en
    """
    from sottovoce.corpora import commonvoice

    corpus = commonvoice.read(source, splits=split, language=language, as_released=as_released, strict=strict)
    _pack(corpus, out, workers, json)


@app.command()
def tsv(
    manifest: Annotated[list[Path], typer.Argument(help="One or more .tsv, .csv or .jsonl files, one row per clip.")],
    out: Out,
    language: Language = "en",
    split: Annotated[str | None, typer.Option(help="Split of every row; by default the manifest's own name.")] = None,
    user_column: Annotated[str, typer.Option(help="Column that names the user.")] = "client_id",
    path_column: Annotated[
        str, typer.Option(help="Column with the audio file, beside the manifest or in clips/.")
    ] = "path",
    text_column: Annotated[
        str, typer.Option(help="Column with the transcript; without it clips are unlabelled.")
    ] = "sentence",
    split_column: Annotated[str | None, typer.Option(help="Column that names each row's split.")] = None,
    audio_root: AudioRoot = None,
    hold_out: HoldOut = None,
    seed: HoldOutSeed = 1,
    strict: Strict = False,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Any corpus with a table: a TSV, CSV or JSONL manifest with at least a user and an audio path.

    Example: sottovoce prepare tsv audiomnist/train.tsv --out stores/audiomnist --hold-out dev=4,test=8
    """
    from sottovoce.corpora import tsv as manifests

    columns = manifests.Columns(user=user_column, path=path_column, text=text_column, split=split_column)
    corpus = manifests.read(
        manifest, columns=columns, language=language, split=split, audio_root=audio_root, strict=strict
    )
    _pack(_with_hold_out(corpus, hold_out, seed), out, workers, json)


@app.command()
def nemo(
    manifest: Annotated[list[Path], typer.Argument(help="One or more manifests of JSON lines.")],
    out: Out,
    language: Language = "en",
    split: Annotated[str | None, typer.Option(help="Split of every line; by default the manifest's own name.")] = None,
    user_column: Annotated[str, typer.Option(help="Key that names the user.")] = "speaker",
    text_column: Annotated[str, typer.Option(help="Key of the transcript.")] = "text",
    audio_root: AudioRoot = None,
    hold_out: HoldOut = None,
    seed: HoldOutSeed = 1,
    strict: Strict = False,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """NeMo's manifests: JSON lines with audio_filepath, text and a speaker; offset and duration cut longer files.

    Example: sottovoce prepare nemo manifests/train.json --out stores/mine --audio-root /data/wavs
    """
    from dataclasses import replace

    from sottovoce.corpora import tsv as manifests

    columns = replace(manifests.NEMO, user=user_column, text=text_column)
    corpus = manifests.read(
        manifest, columns=columns, language=language, split=split, audio_root=audio_root, strict=strict
    )
    _pack(_with_hold_out(corpus, hold_out, seed), out, workers, json)


@app.command()
def kaldi(
    source: Annotated[list[Path], typer.Argument(help="One or more data folders: wav.scp, utt2spk, text, segments.")],
    out: Out,
    language: Language = "en",
    split: Annotated[str | None, typer.Option(help="Split of all of it; by default each folder's name.")] = None,
    audio_root: AudioRoot = None,
    hold_out: HoldOut = None,
    seed: HoldOutSeed = 1,
    strict: Strict = False,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Kaldi's data folders; no command in a wav.scp is run. Without `text` it is speech without text.

    Example: sottovoce prepare kaldi data/train data/dev data/test --out stores/mine --audio-root /data/wavs
    """
    from sottovoce.corpora import kaldi

    corpus = kaldi.read(source, language=language, split=split, audio_root=audio_root, strict=strict)
    _pack(_with_hold_out(corpus, hold_out, seed), out, workers, json)


@app.command()
def folder(
    source: Annotated[Path, typer.Argument(help="The folder of one person's recordings.")],
    out: Out,
    user: Annotated[str | None, typer.Option(help="Who it is; the folder's name by default.")] = None,
    language: Language = "en",
    split: Annotated[str, typer.Option(help="Split of all of it.")] = "train",
    strict: Strict = False,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """One person's recordings: audio files with their texts beside them (lights.wav, lights.txt), or a table of them.

    Example: sottovoce prepare folder my-recordings --out stores/mine
    """
    from sottovoce.corpora import folder

    _pack(folder.read(source, user=user, language=language, split=split, strict=strict), out, workers, json)


@app.command()
def synthetic(
    task: Annotated[
        str, typer.Argument(help="What is spoken and how: crowd, studio, digits, digits-studio or digits-crowd.")
    ],
    out: Out,
    users: Annotated[int, typer.Option(min=3, help="How many speakers, dev and test included.")] = 200,
    hours: Annotated[
        float | None, typer.Option(help="Hours of speech in all; the task's own amount by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same crowd.")] = 1,
    language: Language = "en",
    workers: Workers = None,
    json: Json = False,
) -> None:
    """A synthetic crowd that speaks through espeak-ng (extra `demo`): no download, any size, one seed.

    Example: sottovoce prepare synthetic crowd --out stores/crowd --users 2000 --hours 30
    """
    from sottovoce.corpora import synthetic

    _pack(synthetic.read(task, users=users, hours=hours, seed=seed, language=language, out=out), out, workers, json)


def _with_hold_out(corpus: Corpus[Speaker], wish: str | None, seed: int) -> Corpus[Speaker]:
    from sottovoce.corpora.holdout import hold_out

    return corpus if wish is None else hold_out(corpus, _counts(wish), seed=seed)


def _counts(text: str) -> dict[str, int]:
    parts = [part.strip().partition("=") for part in text.split(",")]
    counts = {split: int(number) for split, _, number in parts if split and number.isdecimal() and len(number) < 10}
    if len(counts) != len(parts):
        raise InputError(f"hold-out={text!r}: expected SPLIT=NUMBER pairs, such as dev=4,test=8, and no split twice")
    return counts


def _pack(corpus: Corpus[S], out: Path, workers: int | None, json: bool) -> None:
    started = time.monotonic()
    store = packed(corpus, out, workers)
    elapsed = time.monotonic() - started
    if json:
        print_json({key: value for key, value in store.header.items() if key != "sizes"} | {"seconds": store.seconds})
        tell_narrow_band(store)
        return
    print_line(f"{amounts(store)} ({store.seconds / elapsed:,.0f} s of audio per second)", to=stdout)
    tell_problems(store)
    tell_narrow_band(store)


def packed(corpus: Corpus[S], out: Path, workers: int | None = None) -> Store:
    """The store `out`, written with a progress bar."""
    with progress_bar(f"preparing {corpus.name}") as bar:
        (task,) = bar.task_ids

        def show(progress: Progress) -> None:
            if progress.resumed:
                print_line(f"{out}: going on after {progress.tasks_done:,} of {progress.tasks:,} pieces of work")
            note = f"pieces of work, {progress.audio_seconds / 3600:.1f} h"
            bar.update(task, completed=progress.tasks_done, total=progress.tasks, note=note)

        try:
            pack(corpus, out, workers=workers, on_progress=show)
        except (KeyboardInterrupt, SystemExit) as signalled:
            kept = unfinished(out)
            print_line(
                f"interrupted: {'the same command goes on from' if kept else 'nothing half-written is left in'} {out}"
            )
            code = signalled.code if isinstance(signalled, SystemExit) else None
            raise typer.Exit(code if isinstance(code, int) else INTERRUPTED) from None
    return Store(out)


def amounts(store: Store) -> str:
    held = f"{store.user_count:,} users, {store.utterance_count:,} utterances, {store.seconds / 3600:.2f} h"
    return f"{store.path}: {held}"


def tell_problems(store: Store) -> None:
    """What of a corpus is not in its store, or not as it was, with examples."""
    for kind, found in store.header["problems"].items():
        print_line(f"{found['count']:,} × {kind} ({'kept' if found['kept'] else 'left out'})")
        for example in found["examples"]:
            print_line(f"      {example}")


def tell_narrow_band(store: Store) -> None:
    """Whether some of a store sounds like a telephone: models that were not made for it fail in silence."""
    from sottovoce.audio.narrow_band import narrow_in

    if line := narrow_in(store):
        print_line(line)
