"""`sottovoce personalise`: a small part of one's own on top of a public model, trained and kept on this machine."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import print_json, print_line, progress_bar
from sottovoce.cli.options import Device, Json, Model, OutsideFamily

if TYPE_CHECKING:
    from sottovoce.data.population import Population
    from sottovoce.data.store import PackingProgress, Store
    from sottovoce.models.recogniser import Recogniser


def personalise(
    model: Model,
    data: Annotated[
        Path,
        typer.Option(
            metavar="STORE_OR_FOLDER",
            help="Your speech: a store, or a folder of recordings (lights.wav) with their texts (lights.txt).",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="PART", help="The folder to write; it must not be there yet.")],
    part: Annotated[
        str | None, typer.Option(help="What of the model is your own: lora(r=4), biases, output, or names of tensors.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps on your speech.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    margin: Annotated[
        float | None, typer.Option(help="Standard errors by which the part must be better to be kept.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Whose speech it is, where several people's is there.")] = None,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 1,
    family: OutsideFamily = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Train a small part of a public model on your own speech. Nothing leaves this machine, and no ε speaks of it.

    The part is kept only if it does better on speech of yours that it was not trained on. Where it does not, or
    there is too little speech, the public model is kept. `sottovoce transcribe MODEL FILE --personal PART` uses it.

    Example: sottovoce personalise runs/demo/private --data my-recordings --out my-part
    """
    from sottovoce.evaluation.decoder import DecodingOptions
    from sottovoce.evaluation.recognise import choose_device
    from sottovoce.evaluation.score import check_language
    from sottovoce.federated.personal import PersonalTraining, build_personaliser, train_own_part
    from sottovoce.models.personal_part import save_personal_part
    from sottovoce.models.recogniser import load_recogniser

    if out.exists():
        raise InputError(f"--out {out} is there already: expected a new folder")
    given = {"part": part, "steps": steps, "lr": lr, "margin": margin}
    settings = PersonalTraining(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]  # each is of its own kind
    recogniser, chosen = load_recogniser(model, family=family), choose_device(device)
    with _open_speech(data, user=user, language=recogniser.language) as store:
        check_language(recogniser, store)
        people, index = _find_person(store, user)
        personaliser = build_personaliser(
            recogniser, people, settings, seed=seed, device=chosen, decoding=DecodingOptions()
        )
        print_line(f"training {personaliser.parameter_count:,} parameters of your own ({settings.part})")
        found, decision = train_own_part(personaliser, index)
    save_personal_part(found, out)
    if json:
        print_json(
            {"folder": str(out), "part": found.part, "parameters": personaliser.parameter_count}
            | {"is_kept": found.is_kept, "guard": decision.as_json()}
        )
        return
    print_line(decision.describe())
    print_line(f"wrote {out}: `sottovoce transcribe {model} FILE --personal {out}` uses it")


def load_own_model(model: Path, personal: Path | None, *, family: str | None) -> "Recogniser":
    """The model, with one's own part of it where that is named."""
    from sottovoce.models.personal_part import apply_personal_part, load_personal_part
    from sottovoce.models.recogniser import load_recogniser

    recogniser = load_recogniser(model, family=family)
    if personal is None:
        return recogniser
    part = load_personal_part(personal)
    found = apply_personal_part(recogniser, part, where=str(personal))
    if not part.is_kept:
        print_line(f"{personal}: the guard has kept the public model, which is used as it is")
    return found


@contextmanager
def _open_speech(data: Path, *, user: str | None, language: str) -> Iterator["Store"]:
    """A store as it is; of a folder of recordings one that is there for as long as this takes, for its owner alone."""
    from sottovoce.data.corpora.folder import read_folder
    from sottovoce.data.store import Store, pack_corpus
    from sottovoce.data.store.layout import HEADER

    if not data.is_dir() or (data / HEADER).exists():
        yield Store(data)  # which says what is wrong with it
        return
    corpus = read_folder(data, user=user, language=language)
    with tempfile.TemporaryDirectory(prefix="sottovoce-") as place:
        with progress_bar("preparing your recordings") as bar:

            def show(progress: "PackingProgress") -> None:
                bar.update(bar.task_ids[0], completed=progress.tasks_done, total=progress.tasks, note="pieces of work")

            pack_corpus(corpus, Path(place) / "store", workers=1, on_progress=show)
        yield Store(Path(place) / "store")


def _find_person(store: "Store", user: str | None) -> tuple["Population", int]:
    """Everybody in `store`, and which of them is meant: the one called `user`, or the only one there is."""
    from sottovoce.data.population import PopulationSettings, build_population

    people = build_population(store, PopulationSettings(split=tuple(store.splits)), seed=1)
    if user is None and len(people) > 1:
        raise InputError(f"store {store.path} has {len(people):,} speakers: expected --user, whose speech it is")
    for client in people:
        if user in (None, client.id):
            return people, client.index
    raise InputError(f"store {store.path} has no speaker {user!r}")
