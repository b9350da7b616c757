"""Damage to what we wrote ourselves: stores, checkpoints, models, token sets and ledgers.

Here we know what was written, so that reading anything else without a word is a silent loss. A store is read as a run
does that first looks at all of it (`stats --check`, which reads the samples too); a ledger as `sottovoce ledger RUN`
does, with the marks that its folder holds.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from faulty import damage
from faulty.cases import Case
from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.store import Store, pack_corpus
from sottovoce.data.text.tokens import CharacterTokens, load_tokens, save_tokens, train_sentence_pieces
from sottovoce.models import model_files
from sottovoce.models.recogniser import create_recogniser, load_recogniser, save_recogniser
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import Settings
from sottovoce.privacy.events import poisson_release
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.ledger_records import Header
from sottovoce.training import checkpoint
from sottovoce.training.ledger_check import check_ledger

STORES, CHECKPOINTS, MODELS, LEDGERS = "stores", "checkpoints", "models and token sets", "ledgers"
CHARACTERS = CharacterTokens("abc ")
MODEL = Settings(layers=1, width=8, tokens=CHARACTERS.size + 1, heads=2, features=8)
DIGESTS = {"seal", "checksums", "parameters"}
FILES = (*damage.BINARY, damage.flip_one_bit, damage.change_digit, *damage.TEXT)


def stores(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    whole = folder / "store"
    corpus = Corpus("two", "en", [0, 1, 2, 3], _speaker, ProblemLog())
    pack_corpus(corpus, whole, workers=1)
    return _cases(STORES, whole, _read_store, count=count, seed=seed)


def checkpoints(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    model = create_recogniser(FAMILY, MODEL, CHARACTERS, language="en", generator=torch_stream(1, "model"))
    state = {"dev_wer": 0.25, "ledger": {"length": 3, "head": "0" * 64}, "since_best": 2}
    whole = checkpoint.Checkpoint(7, model, {"momentum": torch.arange(6.0)}, checkpoint.checkpoint_name(5), state)
    place = checkpoint.save_checkpoint(folder / "checkpoints", whole)
    return _cases(CHECKPOINTS, place, _read_checkpoint, count=count, seed=seed)


def models(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    """A model's folder for half of the cases, and a set of sentence pieces for the others."""
    model, pieces = folder / "model", folder / "pieces"
    for place in (model, pieces):
        place.mkdir()
    save_recogniser(
        create_recogniser(FAMILY, MODEL, CHARACTERS, language="en", generator=torch_stream(1, "model")), model
    )
    save_tokens(train_sentence_pieces(["a b c ab abc ba cab", "cc bb aa"], size=6), pieces / model_files.TOKENS)
    half = count // 2
    yield from _cases(MODELS, model, _read_model, count=half, seed=seed)
    yield from _cases(MODELS, pieces, _read_pieces, count=count - half, seed=seed)


def ledgers(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    """Runs that were finished, with the checkpoint that knows how long their ledger is; any file may be damaged."""
    run = folder / "run"
    run.mkdir()
    event = poisson_release(1.0, sampling_rate=0.05)
    header = Header(run="damaged", mode="secure", plan={"cohort_size": 5}, event=event, delta=1e-6)
    with closing(Ledger(run / "ledger.jsonl", header=header)) as ledger:
        for step in range(1, 7):
            ledger.intend(event, step=step, clip_bound=1.0, parameters="0" * 64, cohort="0" * 64)
            mark = ledger.commit(step=step, result="0" * 64)
    model = create_recogniser(FAMILY, MODEL, CHARACTERS, language="en", generator=torch_stream(1, "model"))
    model = replace(model, about={"step": 6})
    known = checkpoint.Checkpoint(6, model, {}, checkpoint.checkpoint_name(6), {"ledger": asdict(mark)})
    checkpoint.save_checkpoint(run / "checkpoints", known)
    return _cases(LEDGERS, run, _read_ledger, count=count, seed=seed, only="*.jsonl", kinds=(*damage.TEXT, *EDITS))


def _cases(
    what: str,
    whole: Path,
    read: Callable[[Path], object],
    *,
    count: int,
    seed: int,
    only: str = "*",
    kinds: tuple[damage.Damage, ...] = FILES,
) -> Iterator[Case]:
    """Copies of `whole` with one file damaged in each."""
    original = read(whole)
    assert original is not None, f"{what}: not even the whole one is read"
    files = sorted(path.relative_to(whole) for path in whole.rglob(only) if path.is_file() and path.stat().st_size)
    for number in range(count):
        rng = stream(seed, what, whole.name, number)
        file = files[int(rng.integers(len(files)))]
        kind = kinds[int(rng.integers(len(kinds)))]
        copy = whole.with_name(f"{whole.name}-{number}")
        shutil.copytree(whole, copy, symlinks=True)
        older = number % 4 == 3
        if older:
            _forget_digests(copy)
        (copy / file).write_bytes(kind((copy / file).read_bytes(), rng))
        words = f"case {number}, {kind.__name__} of {file.name}" + " without digests" * older
        differs = partial(_differs, original)
        yield Case(what, words, partial(_read_and_remove, read, copy), (lambda _: False) if older else differs)


def _forget_digests(folder: Path) -> None:
    """As older releases wrote it, where a changed letter may go unseen; but it may not bring anything down."""
    for path in folder.rglob("*.json"):
        content = json.loads(path.read_bytes())
        path.write_text(json.dumps({name: value for name, value in content.items() if name not in DIGESTS}, indent=2))


def _read_and_remove(read: Callable[[Path], object], copy: Path) -> object:
    try:
        return read(copy)
    finally:
        shutil.rmtree(copy)


def _differs(original: object, found: object) -> bool:
    return original != found


# What is read of each.


def _speaker(number: int) -> RenderedSpeaker:
    name, rng = f"person-{number}", stream(number, "samples")
    spoken = [
        RenderedUtterance(f"{name}-{i}", rng.integers(-9, 9, 40).astype(np.int16), "say it", "Say it!")
        for i in range(3)
    ]
    return RenderedSpeaker(name, ("dev", "train")[number // 2], spoken, {"age": str(30 + number)})


def _read_store(folder: Path) -> object:
    store = Store(folder)
    store.check(audio=True)
    people = [store.user(row) for row in range(store.user_count)]
    utterances = [store.utterance(row) for row in range(store.utterance_count)]
    found = [store.find(person.name, split=person.split).row for person in people]
    columns = [store.user_keys.tolist(), store.seconds, store.digest, store.splits]
    texts = [(one.id, one.text, one.raw_text, one.metadata, one.samples.tobytes()) for one in utterances]
    return people, texts, found, columns


def _read_checkpoint(place: Path) -> object:
    found = checkpoint.load_checkpoint(place)
    tensors = {**found.recogniser.parameters, **found.optimiser}
    return found.step, found.best, found.state, {name: tensor.tolist() for name, tensor in tensors.items()}


def _read_model(folder: Path) -> object:
    found = load_recogniser(folder)
    parameters = {name: tensor.tolist() for name, tensor in found.parameters.items()}
    return found.settings, found.tokens.as_json(), found.language, found.about, parameters


def _read_pieces(folder: Path) -> object:
    found = load_tokens(folder / model_files.TOKENS)
    return found.as_json(), found.encode("a cab")


def _read_ledger(run: Path) -> object:
    """What it records as spent, without a last line that was never finished."""
    checked = check_ledger(run)
    report = checked.report
    return (
        None
        if report.torn_bytes or checked.unread
        else (report.epsilon.rdp, report.steps, report.attempts, report.mark)
    )


# What somebody might do to a ledger by hand.


def _shorten(data: bytes, rng: np.random.Generator) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[: int(rng.integers(1, len(lines)))])


def _less_noise(data: bytes, _: np.random.Generator) -> bytes:
    return data.replace(b'"noise_multiplier":1.0', b'"noise_multiplier":9.0')


def _less_epsilon(data: bytes, rng: np.random.Generator) -> bytes:
    at = data.index(b'"epsilon":', int(rng.integers(len(data) // 2)))
    return data[: at + 10] + b"0." + data[at + 12 :]


def _deep_line(data: bytes, rng: np.random.Generator) -> bytes:
    return data + b'{"hash":"","record":' + (b"[" * 3_000 if rng.integers(2) else b"7" * 5_000) + b"}\n"


EDITS: tuple[damage.Damage, ...] = (
    *(_shorten, _shorten, _less_noise, _less_epsilon, _deep_line),
    *(damage.change_digit, damage.flip_one_bit),
)
