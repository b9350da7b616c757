"""`sottovoce export`: a run's model in a folder of its own."""

from pathlib import Path
from typing import Annotated

import typer

from sottovoce.cli.console import Json, print_json, say, stdout
from sottovoce.cli.recognition import Model, OutsideFamily


def export(
    model: Model,
    out: Annotated[Path, typer.Option(help="The folder to write; it must not be there yet.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model, also where only a part of it was trained.")
    ] = False,
    family: OutsideFamily = None,
    json: Json = False,
) -> None:
    """Write a run's best model into a folder that can be moved, loaded and started from by itself.

    A run that has trained a part of a model (federation.trainable) exports that part, which fits the model it began
    with and no other; --merged writes the whole model. A model that is not what its run's ledger says is refused.

    Example: sottovoce export runs/lora --merged --out models/lora
    """
    from sottovoce.errors import InputError
    from sottovoce.models.saved import digests, load
    from sottovoce.models.saved import export as export_to
    from sottovoce.models.saved_files import digests_in
    from sottovoce.training.ledger_check import check_model_of_run

    check_model_of_run(model)
    recogniser = load(model, family=family)
    if merged:
        recogniser = recogniser.whole
    written = export_to(recogniser, out)
    if digests_in(out) != digests(recogniser):
        raise InputError(f"{out} is not what was to be written: the disk may be damaged")
    if json:
        print_json(written)
        return
    what = "the whole model" if written["whole"] else "the part that was trained"
    say(f"{out}: {what}, {written['parameters']:,} parameters, {written['bytes'] / 1e6:,.2f} MB", to=stdout)
