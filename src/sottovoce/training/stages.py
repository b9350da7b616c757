"""From a recipe to a result: prepare what is missing, train, test."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sottovoce.config import ManifestCorpus, Recipe, SyntheticCorpus, as_yaml
from sottovoce.corpora import synthetic, tsv
from sottovoce.corpora.holdout import hold_out
from sottovoce.errors import InputError
from sottovoce.evaluation.evaluate import check_language, evaluate, select
from sottovoce.files import write_json
from sottovoce.models.saved import Recogniser
from sottovoce.models.saved import load as load_recogniser
from sottovoce.processes import joined, own_device
from sottovoce.seeds import derive
from sottovoce.store import Progress, Store, pack
from sottovoce.text.normalise import alphabet
from sottovoce.text.tokens import CharacterTokens, Tokens, load_tokens, train_sentence_pieces
from sottovoce.training.central import Report, starting_point, train
from sottovoce.training.run_folder import RunFolder, open_run
from sottovoce.training.speech import Rows, load_speech
from sottovoce.users import PopulationSettings, build_population

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended in this process: with `results`, or interrupted after the step `stopped_at` (`resume` goes on).

    Processes other than the first have neither.
    """

    results: dict[str, Any] | None = None
    stopped_at: int | None = None


def run_recipe(
    recipe: Recipe,
    *,
    out: Path,
    stores: Path,
    resume: bool,
    device: torch.device,
    on_prepare: Callable[[Progress], None],
    on_report: Callable[[Report], None],
    say: Say,
) -> Outcome:
    """Run `recipe` in the folder `out`."""
    device = own_device(device)
    with joined(device) as processes:
        if processes.first:
            ensure_store(recipe, stores, on_prepare)
        processes.wait()
        store = open_place(recipe.data.store, stores)
        dev = find_place(recipe.data.dev, recipe, stores)
        tests = {name: find_place(name, recipe, stores) for name in recipe.data.test}
        tokens = choose_tokens(recipe, store)
        rows = training_rows(recipe, store)
        longest = min(recipe.data.longest_seconds, recipe.central.batch_seconds)
        speech = load_speech(store, rows, tokens, longest_seconds=longest)
        if processes.first:
            counts = [f"{count:,} {reason}" for reason, count in speech.left_out.items() if count]
            left_out = f" (left out: {', '.join(counts)})" if counts else ""
            say(f"training on {len(speech.rows):,} utterances, {speech.hours:.2f} h{left_out}")
        start = starting_point(recipe, tokens, language=store.language)
        check_scored([dev, *tests.values()], start)

        def go(run: RunFolder) -> Outcome:
            step = train(
                recipe,
                run,
                speech=speech,
                dev=dev,
                start=start,
                device=device,
                processes=processes,
                on_report=on_report,
                say=say,
            )
            if not processes.first:
                return Outcome()
            if step < recipe.central.steps:
                return Outcome(stopped_at=step)
            return Outcome(results=test(run, tests, device=device))

        if not processes.first:
            return go(RunFolder(out))
        stores_used = {"data.store": store, "data.dev": dev[0]} | {f"data.test {n}": s for n, (s, _) in tests.items()}
        inputs: dict[str, Any] = {f"{what} digest": used.digest for what, used in stores_used.items()}
        inputs |= {"tokens digest": tokens.digest, "number of processes": processes.world}
        with open_run(out, config=as_yaml(recipe), inputs=inputs, resume=resume) as run:
            return go(run)


def check_scored(places: Iterable[tuple[Store, str]], recogniser: Recogniser) -> None:
    """Find out before training, not at the first evaluation, that a set cannot be scored."""
    for store, split in places:
        check_language(recogniser, store)
        select(store, split=split)


def test(run: RunFolder, tests: dict[str, tuple[Store, str]], *, device: torch.device) -> dict[str, Any]:
    """Evaluate the best checkpoint on every test set and write `results.json`."""
    best = load_recogniser(run.best)
    results: dict[str, Any] = {"model": dict(best.about), "test": {}}
    for name, (store, split) in tests.items():
        results["test"][name] = evaluate(best, store, split=split, device=device).as_json()
    write_json(run.path / "results.json", results)
    return results


def ensure_store(recipe: Recipe, stores: Path, on_progress: Callable[[Progress], None]) -> None:
    """Make the recipe's store if it can be made and is not there."""
    place, how = stores / recipe.data.store, recipe.data.prepare
    if how is None or (place / "store.json").exists():
        return
    if isinstance(how, SyntheticCorpus):
        made = synthetic.read(how.task, users=how.users, hours=how.hours, seed=how.seed, language=how.language)
        pack(made, place, on_progress=on_progress)
        return
    assert isinstance(how, ManifestCorpus)
    corpus = tsv.read([_expanded(path) for path in how.manifests], language=how.language)
    if how.hold_out:
        corpus = hold_out(corpus, how.hold_out, seed=how.seed)
    pack(corpus, place, on_progress=on_progress)


def _expanded(path: str) -> Path:
    expanded = os.path.expandvars(path)
    if "$" in expanded:
        raise InputError(f"recipe: {path} names an environment variable that is not set")
    return Path(expanded)


def open_place(name: str, stores: Path) -> Store:
    """The store called `name` under `stores`, or at that path."""
    return Store(stores / name if (stores / name).exists() or not Path(name).exists() else Path(name))


def find_place(place: str, recipe: Recipe, stores: Path) -> tuple[Store, str]:
    """`split` of the recipe's store, or `STORE:split`."""
    name, _, split = place.rpartition(":")
    store = open_place(name or recipe.data.store, stores)
    if split not in store.splits:
        raise InputError(f"data: no split={split!r} in store {store.path}, expected one of {', '.join(store.splits)}")
    return store, split


def choose_tokens(recipe: Recipe, store: Store) -> Tokens:
    """Characters of the language (or of its training texts where it has no alphabet), sentence pieces, or a file."""
    if recipe.tokens.file is not None:
        return load_tokens(Path(recipe.tokens.file))
    if recipe.tokens.kind == "characters" and (letters := alphabet(store.language)) is not None:
        return CharacterTokens.seen_in(letters)
    texts = (store.utterance(row).text or "" for row in training_rows(recipe, store).tolist())
    if recipe.tokens.kind == "characters":
        return CharacterTokens.seen_in(texts)
    return train_sentence_pieces((text for text in texts if text), size=recipe.tokens.size)


def training_rows(recipe: Recipe, store: Store) -> Rows:
    """The utterances that the recipe trains on: all speakers of its splits, or one part of them."""
    data = recipe.data
    settings = PopulationSettings(
        split=data.train, seed_part=data.seed_part, part="seed" if data.part == "seed" else "federation"
    )
    population = build_population(store, settings, seed=derive(recipe.seed, "seed part"))
    utterances = [client.utterances for client in population]
    if not utterances:
        raise InputError(f"store {store.path}: nobody to train on in data.train={', '.join(data.train)}")
    return np.sort(np.concatenate(utterances))
