"""`sottovoce prepare`: a corpus as it lies on disk becomes a store, packed by user.

`CORPORA` is the table of corpora; each entry becomes a command.
"""

import time
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import INTERRUPTED, print_json, print_line, progress_bar, stdout
from sottovoce.cli.options import Json
from sottovoce.data.corpora.corpus import Corpus, Speaker
from sottovoce.data.corpora.listing import choose_split_for_hold_out
from sottovoce.data.store import PackingProgress, Store, find_unfinished, pack_corpus
from sottovoce.data.text.spelling import Spelling

app = typer.Typer(help="Turn a corpus into a store, packed by user.", no_args_is_help=True)

S = TypeVar("S")


Several, SomePath, SomeText = list[Path], Path | None, str | None
# Kind and help of arguments, kind, default and help of options. What one corpus has for itself is NAME@CORPUS.
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "source": (Path, "The folder of the corpus."),
    "source@kaldi": (Several, "One or more data folders: wav.scp, utt2spk, text, segments."),
    "source@folder": (Path, "The folder of one person's recordings."),
    "manifest@tsv": (Several, "One or more .tsv, .csv or .jsonl files, one row per clip."),
    "manifest@nemo": (Several, "One or more manifests of JSON lines."),
    "task": (str, "What is spoken and how: crowd, studio, digits, digits-noise, digits-studio or digits-crowd."),
}
OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "out": (Path, Parameter.empty, "The store to write; an old one there is replaced at the end."),
    "language": (str, "en", "Language code; decides how text is normalised."),
    "language@mls": (SomeText, None, "Language code; by default from mls_LANGUAGE."),
    "language@commonvoice": (SomeText, None, "Language code; the folder's own by default."),
    "splits": (list[str] | None, None, "Take only this split; may be given again."),
    "splits@mls": (
        list[str] | None,
        None,
        "Take only this split, or part of train (train-9hr, train-1hr); may be given again.",
    ),
    "split@tsv": (
        SomeText,
        None,
        "Split of every row; by default the manifest's own name, of a single one with --hold-out train.",
    ),
    "split@nemo": (
        SomeText,
        None,
        "Split of every line; by default the manifest's own name, of a single one with --hold-out train.",
    ),
    "split@kaldi": (
        SomeText,
        None,
        "Split of all of it; by default each folder's name, of a single one with --hold-out train.",
    ),
    "split@folder": (str, "train", "Split of all of it."),
    "in_time": (bool, False, "Utterances by number of chapter and utterance, not in the alphabet's order."),
    "cut_seconds": (float, 20.0, "No utterance is longer; stretches of voice are put together up to it."),
    "point": (bool, False, "Point into the FLAC files instead of copying them; they must stay as they are."),
    "spelling": (
        Spelling,
        Spelling.OURS,
        "By whose rules texts are spelled: our own, or those of a paper's released code.",
    ),
    "as_released": (
        bool,
        False,
        "Short for --spelling pelikan2025: skip what no token writes, keep the rest.",
    ),
    "user_column@tsv": (str, "client_id", "Column that names the user."),
    "user_column@nemo": (str, "speaker", "Key that names the user."),
    "path_column": (str, "path", "Column with the audio file, beside the manifest or in clips/."),
    "text_column@tsv": (str, "sentence", "Column with the transcript; without it clips are unlabelled."),
    "text_column@nemo": (str, "text", "Key of the transcript."),
    "split_column": (SomeText, None, "Column that names each row's split."),
    "audio_root": (SomePath, None, "The folder where the audio lies: paths are inside it, absolute or from there on."),
    "hold_out": (SomeText, None, "Speakers to set aside, as in dev=4,test=8: chosen by --seed, moved whole."),
    "seed": (int, 1, "Decides who is held out."),
    "seed@synthetic": (int, 1, "The same seed gives the same crowd."),
    "strict": (bool, False, "Stop at the first unusable recording or row."),
    "user": (SomeText, None, "Who it is; the folder's name by default."),
    "users": (int, 200, "How many speakers, dev and test included."),
    "hours": (float | None, None, "Hours of speech in all; the task's own amount by default."),
    "workers": (int | None, None, "Processes that decode; all cores by default."),
}
FLAGS = {"splits": "--split"}  # of options that are not called like their parameter
NAMELESS = ("tsv", "nemo", "kaldi", "folder")  # a corpus of one's own is called like its store, not like its folder
LEAST = {"users": 3, "workers": 1}


@dataclass(frozen=True)
class CorpusCommand:
    """How one corpus is prepared: its name, its argument and options in their order, and what `--help` says of it."""

    name: str
    takes: str
    help: str
    example: str

    @property
    def parameters(self) -> list[Parameter]:
        argument, *own = self.takes.split()
        names = (argument, "out", *own, "workers")
        return [*map(self._parameter, names), Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=Json)]

    def _parameter(self, name: str) -> Parameter:
        key = f"{name}@{self.name}"
        default: Any = Parameter.empty
        if name in ("source", "manifest", "task"):
            kind, help = ARGUMENTS.get(key) or ARGUMENTS[name]
            declared: Any = typer.Argument(help=help)
        else:
            kind, default, help = OPTIONS.get(key) or OPTIONS[name]
            flag = FLAGS.get(name, "--" + name.replace("_", "-"))
            declared = typer.Option(flag, help=help, min=LEAST.get(name))
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared])

    def read(self, options: dict[str, Any], out: Path) -> Corpus[Any]:
        """The corpus that somebody named on the command line, with its speakers held out."""
        source = options.pop(self.takes.split()[0])
        wish, seed = (options.pop("hold_out"), options.pop("seed")) if "hold_out" in options else (None, 0)
        if wish is not None and "split" in options and options["split"] is None and not options.get("split_column"):
            options["split"] = choose_split_for_hold_out(source)
        if self.name in ("tsv", "nemo"):
            from sottovoce.data.corpora.tsv import NEMO, Columns

            columns = {name.removesuffix("_column"): options.pop(name) for name in list(options) if "_column" in name}
            options["columns"] = replace(NEMO if self.name == "nemo" else Columns(), **columns)
        if self.name == "synthetic":
            options["out"] = out
        module = "tsv" if self.name == "nemo" else self.name
        reader = getattr(import_module(f"sottovoce.data.corpora.{module}"), f"read_{module}")
        corpus = reader(source, **options)
        if self.name in NAMELESS:
            corpus = replace(corpus, name=out.absolute().name)
        return corpus if wish is None else _hold_out(corpus, wish, seed)

    def add_to(self, group: typer.Typer) -> None:
        def command(*, out: Path, workers: int | None, json: bool, **options: Any) -> None:
            _prepare(self.read(options, out), out, workers, json)

        parameters = self.parameters
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # what typer makes a command of
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__doc__ = f"{self.help}\n\nExample: sottovoce prepare {self.name} {self.example}"
        group.command(self.name)(command)


CORPORA = (
    CorpusCommand(
        "librispeech",
        "source language splits hold_out seed in_time strict",
        "LibriSpeech: SPLIT/SPEAKER/CHAPTER folders with *.trans.txt; genders from SPEAKERS.TXT.",
        "LibriSpeech --out stores/ls-100 --split train-clean-100",
    ),
    CorpusCommand(
        "librilight",
        "source cut_seconds point language splits hold_out seed strict",
        "Libri-Light, speech without text: SUBSET/SPEAKER/BOOK/CHAPTER.flac with its JSON, "
        "or what cut_by_vad.py wrote.",
        "librilight --out stores/ll-52k --split large --point",
    ),
    CorpusCommand(
        "mls",
        "source point language splits strict",
        "Multilingual LibriSpeech, FLAC or Opus: SPLIT/transcripts.txt, segments.txt and audio/SPEAKER/BOOK.",
        "mls_french_opus --out stores/mls-fr",
    ),
    CorpusCommand(
        "userlibri",
        "source language splits strict",
        "UserLibri: audio_data/SPLIT/speaker-S-book-B folders; a user is one speaker reading one book.",
        "UserLibri --out stores/userlibri",
    ),
    CorpusCommand(
        "commonvoice",
        "source language splits spelling as_released strict",
        "Common Voice, release 6.1 or later: SPLIT.tsv beside clips/; a user is one client_id.",
        "cv-corpus-13.0/en --out stores/cv-en",
    ),
    CorpusCommand(
        "tsv",
        "manifest language split user_column path_column text_column split_column audio_root hold_out seed strict",
        "Any corpus with a table: a TSV, CSV or JSONL manifest with at least a user and an audio path.",
        "audiomnist/train.tsv --out stores/audiomnist --hold-out dev=4,test=8",
    ),
    CorpusCommand(
        "nemo",
        "manifest language split user_column text_column audio_root hold_out seed strict",
        "NeMo's manifests: JSON lines with audio_filepath, text and a speaker; offset and duration cut longer files.",
        "manifests/train.json --out stores/mine --audio-root /data/wavs",
    ),
    CorpusCommand(
        "kaldi",
        "source language split audio_root hold_out seed strict",
        "Kaldi's data folders; no command in a wav.scp is run. Without `text` it is speech without text.",
        "data/train data/dev data/test --out stores/mine --audio-root /data/wavs",
    ),
    CorpusCommand(
        "folder",
        "source user language split strict",
        "One person's recordings: audio files with their texts beside them (lights.wav, lights.txt), "
        "or a table of them.",
        "my-recordings --out stores/mine",
    ),
    CorpusCommand(
        "synthetic",
        "task users hours seed language",
        "A synthetic crowd that speaks through espeak-ng (extra `demo`): no download, any size, one seed.",
        "crowd --out stores/crowd --users 2000 --hours 30",
    ),
)
for _corpus in CORPORA:
    _corpus.add_to(app)


def _hold_out(corpus: Corpus[Speaker], wish: str, seed: int) -> Corpus[Speaker]:
    from sottovoce.data.corpora.listing import hold_out_speakers

    parts = [part.strip().partition("=") for part in wish.split(",")]
    counts = {split: int(number) for split, _, number in parts if split and number.isdecimal() and len(number) < 10}
    if len(counts) != len(parts):
        raise InputError(f"hold-out={wish!r}: expected SPLIT=NUMBER pairs, such as dev=4,test=8, and no split twice")
    return hold_out_speakers(corpus, counts, seed=seed)


def _prepare(corpus: Corpus[S], out: Path, workers: int | None, json: bool) -> None:
    started = time.monotonic()
    store = pack_with_progress(corpus, out, workers)
    elapsed = time.monotonic() - started
    if json:
        print_json({key: value for key, value in store.header.items() if key != "sizes"} | {"seconds": store.seconds})
    else:
        print_line(f"{amounts(store)} ({store.seconds / elapsed:,.0f} s of audio per second)", to=stdout)
        print_line(f"speakers: {count_speakers(store)}; language: {store.language}", to=stdout)
        print_problems(store)
    print_narrow_band(store)


def pack_with_progress(corpus: Corpus[S], out: Path, workers: int | None = None) -> Store:
    """The store `out`, written with a progress bar."""
    with progress_bar(f"preparing {corpus.name}") as bar:
        (task,) = bar.task_ids

        def show(progress: PackingProgress) -> None:
            if progress.resumed:
                print_line(f"{out}: going on after {progress.tasks_done:,} of {progress.tasks:,} pieces of work")
            note = f"pieces of work, {progress.audio_seconds / 3600:.1f} h"
            bar.update(task, completed=progress.tasks_done, total=progress.tasks, note=note)

        try:
            pack_corpus(corpus, out, workers=workers, on_progress=show)
        except (KeyboardInterrupt, SystemExit) as signalled:
            kept = find_unfinished(out)
            print_line(
                f"interrupted: {'the same command goes on from' if kept else 'nothing half-written is left in'} {out}"
            )
            code = signalled.code if isinstance(signalled, SystemExit) else None
            raise typer.Exit(code if isinstance(code, int) else INTERRUPTED) from None
    return Store(out)


def amounts(store: Store) -> str:
    held = f"{store.user_count:,} users, {store.utterance_count:,} utterances, {store.seconds / 3600:.2f} h"
    return f"{store.path}: {held}"


def count_speakers(store: Store) -> str:
    """How many are in which split."""
    return ", ".join(f"{name} {len(users):,}" for name, users in store.splits.items())


def print_problems(store: Store) -> None:
    """What of a corpus is not in its store, or not as it was, with examples."""
    for kind, found in store.header["problems"].items():
        print_line(f"{found['count']:,} × {kind} ({'kept' if found['kept'] else 'left out'})")
        for example in found["examples"]:
            print_line(f"      {example}")


def print_narrow_band(store: Store) -> None:
    """Whether some of a store sounds like a telephone: models that were not trained on such speech fail silently."""
    from sottovoce.data.audio.narrow_band import describe_store_band

    if line := describe_store_band(store):
        print_line(line)
