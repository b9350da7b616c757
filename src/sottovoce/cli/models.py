"""`sottovoce export` and `sottovoce import`: a model in a folder of its own, from a run or from another toolkit."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce.cli.console import print_json, print_line, stdout
from sottovoce.cli.options import Json, Model, OutsideFamily

Out = Annotated[Path, typer.Option(help="The folder to write; it must not be there yet.")]


class Target(StrEnum):
    """Whose layout a model is exported in."""

    SOTTOVOCE = "sottovoce"
    HUGGINGFACE = "huggingface"


import_app = typer.Typer(no_args_is_help=True, help="Convert a model that another toolkit has trained.")


def export(
    model: Model,
    out: Out,
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model, also where only a part of it was trained.")
    ] = False,
    to: Annotated[Target, typer.Option(help="Whose layout: this project's own, or Hugging Face's.")] = Target.SOTTOVOCE,
    base: Annotated[
        str | None, typer.Option(metavar="NAME", help="huggingface: the base model's name on the hub.")
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(metavar="[STORE=]NAME", help="huggingface: a store's name on the hub, for the card's results."),
    ] = None,
    date: Annotated[str | None, typer.Option(help="huggingface: when it was evaluated, for the results.")] = None,
    family: OutsideFamily = None,
    json: Json = False,
) -> None:
    """Write a run's best model into a folder that can be moved, loaded and started from by itself.

    A run that has trained a part of a model (federation.trainable) exports that part, which fits the model it began
    with and no other; --merged writes the whole model. A model that is not what its run's ledger says is refused.

    With --to huggingface a pretrained model is written as `from_pretrained` of transformers or peft loads it, with a
    card.

    Example: sottovoce export runs/lora --merged --out models/lora
    """
    from sottovoce.base.errors import InputError
    from sottovoce.models.model_files import digest_model_files
    from sottovoce.models.recogniser import digest_recogniser, load_recogniser
    from sottovoce.models.recogniser import export_recogniser as export_to
    from sottovoce.training.ledger_check import check_model_of_run

    if to is not Target.HUGGINGFACE and (base or dataset or date):
        raise InputError("--base, --dataset and --date are for a card: expected --to huggingface beside them")
    check_model_of_run(model)
    recogniser = load_recogniser(model, family=family)
    if merged:
        recogniser = recogniser.whole
    if to is Target.HUGGINGFACE:
        from sottovoce.export.hub import HubNames, export_to_hub

        names = HubNames(base=base, datasets=tuple(dataset or ()), date=date)
        written = export_to_hub(model, recogniser, out, names=names)
        _print_written(out, written, json)
        if not written["results"]:
            print_line("no error rate has data with a name on the hub (--dataset): the card has them as text alone")
        return
    written = export_to(recogniser, out)
    if digest_model_files(out) != digest_recogniser(recogniser):
        raise InputError(f"{out} is not what was to be written: the disk may be damaged")
    _print_written(out, written, json)


@import_app.command()
def speechbrain(
    folder: Annotated[Path, typer.Argument(help="Where model.ckpt (or asr.ckpt) and tokenizer.ckpt are.")],
    out: Out,
    language: Annotated[str, typer.Option(help="The language of the model, such as fr.")],
    json: Json = False,
) -> None:
    """Read a checkpoint of SpeechBrain's CRDNN recipe (CTC and attention), and write it as a model of family crdnn.

    Example: sottovoce import speechbrain results/CKPT+latest --language fr --out models/crdnn-fr
    """
    from sottovoce.models.recogniser import export_recogniser as export_to
    from sottovoce.models.speechbrain import read_speechbrain

    _print_written(out, export_to(read_speechbrain(folder, language=language), out), json)


def _print_written(out: Path, written: Mapping[str, Any], json: bool) -> None:
    if json:
        print_json(written)
        return
    what = "the whole model" if written["whole"] else "the part that was trained"
    print_line(f"{out}: {what}, {written['parameters']:,} parameters, {written['bytes'] / 1e6:,.2f} MB", to=stdout)
