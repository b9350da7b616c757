"""`sottovoce compare`: which of two models makes fewer errors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import counting_bar, print_json, stdout
from sottovoce.cli.options import Device, Json, Normaliser, OutsideFamily, split_store_name
from sottovoce.data.text.normalisation import NormaliserName

Test = Mapping[str, Any]


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run folder, or a model folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another, which A is compared with.")],
    on: Annotated[
        str | None,
        typer.Option(
            metavar="STORE[:SPLIT]",
            help="What both are to recognise, or the name of a test set of both runs; all of these by default.",
        ),
    ] = None,
    normaliser: Normaliser = NormaliserName.OURS,
    family: OutsideFamily = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """The difference of two word error rates on the same speech, paired by speaker: in all, by group, by intersections.

    Example: sottovoce compare runs/demo/private runs/demo/no-noise

    Of runs that were tested on the same speech, what their results say is compared; nothing is recognised again.
    """
    from sottovoce.evaluation.compare import compare_tests, explain_incomparable
    from sottovoce.evaluation.tables import format_comparison
    from sottovoce.models.family import find_family

    kept = _kept_tests(first), _kept_tests(second)
    if normaliser != NormaliserName.OURS:  # runs keep counts of words, and not the words
        if on is None:
            raise InputError(f"normaliser={normaliser}: expected --on STORE[:SPLIT], since runs keep no texts")
        kept = {}, {}
    shared = [name for name in kept[0] if name in kept[1]]
    if on is None and not shared:
        raise InputError(f"{first} and {second} have no test set in common: expected --on STORE[:SPLIT]")
    pairs = {name: (kept[0][name], kept[1][name]) for name in (shared if on is None else [on]) if name in shared}
    if on is not None and not pairs:
        if family is not None:
            find_family(family)
        pairs = {on: _evaluate_both((first, second), on, normaliser=normaliser, device=device)}
    for name, pair in pairs.items():
        if reason := explain_incomparable(*pair):
            again = f"sottovoce compare {first} {second} --on {_find_place(first, name)} tests both anew"
            raise InputError(f"{first} and {second} cannot be compared on {name}: {reason}; {again}")
    found = {name: compare_tests(*pair) for name, pair in pairs.items()}
    if json:
        tests = {name: _normalisation(pairs[name][0]) | comparison.as_json() for name, comparison in found.items()}
        print_json({"first": str(first), "second": str(second), "tests": tests})
        return
    for name, comparison in found.items():
        rules = "" if normaliser == NormaliserName.OURS else f", texts normalised by {normaliser}"
        stdout.print(format_comparison(comparison, title=f"WER on {name}{rules}\nA: {first}\nB: {second}"))


def _normalisation(test: Test) -> dict[str, Any]:
    """The rules by which texts were compared; older results do not name them."""
    return {"normalisation": test["normalisation"]} if "normalisation" in test else {}


def _kept_tests(path: Path) -> Mapping[str, Test]:
    """What the run in `path` has said of its test sets; nothing where it is a model, or not finished."""
    from sottovoce.base.files import read_json
    from sottovoce.report.archives import open_path
    from sottovoce.training.run_folder import CONFIG, RESULTS

    folder = open_path(path)
    if not folder.is_dir():
        raise InputError(f"{path}: expected the folder of a run or a model")
    if (folder / RESULTS).is_file():
        tests: Mapping[str, Test] = read_json(folder / RESULTS).get("test") or {}
        return tests
    inside = [child.name for child in sorted(folder.iterdir()) if (child / RESULTS).is_file()]
    if inside and not (folder / CONFIG).is_file():
        raise InputError(f"{path} holds several runs: expected one of {', '.join(inside)}")
    return {}


def _find_place(run: Path, test: str) -> str:
    """Where the speech of a run's test set lies, as its recipe says it; `STORE:SPLIT` where that is not there."""
    from sottovoce.report.archives import open_path
    from sottovoce.report.records import read_run

    own, _, split = test.rpartition(":")
    name = own or str(read_run(run.name, open_path(run)).config.get("data", {}).get("store"))
    places = (place for place in (Path("stores") / name, Path(name)) if place.is_dir())
    return f"{next(places, 'STORE')}:{split}"


def _evaluate_both(models: tuple[Path, Path], on: str, *, normaliser: str, device: str | None) -> tuple[Test, Test]:
    """What `evaluate` says of each of `models` on the same utterances."""
    from sottovoce.data.store import Store
    from sottovoce.evaluation.recognise import choose_device
    from sottovoce.evaluation.score import evaluate_recogniser, select_utterances
    from sottovoce.models.recogniser import Recogniser, load_recogniser

    path, split = split_store_name(on)
    store, chosen_device = Store(path), choose_device(device)
    store.check()
    recognisers = [load_recogniser(model) for model in models]
    for model, recogniser in zip(models, recognisers, strict=True):
        if recogniser.family.recognition is None:
            raise InputError(f"{model}: models of family={recogniser.family.name} write no text: there is no WER")
    total = len(select_utterances(store, split=split).rows)

    def evaluate_one(model: Path, recogniser: Recogniser) -> Test:
        with counting_bar(f"{model} on {on}", total=total) as on_progress:
            return evaluate_recogniser(
                recogniser,
                store,
                split=split,
                device=chosen_device,
                normaliser=normaliser,
                on_progress=on_progress,
            ).as_json()

    return evaluate_one(models[0], recognisers[0]), evaluate_one(models[1], recognisers[1])
