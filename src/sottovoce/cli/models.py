"""`sottovoce import`: a model of another toolkit, in a folder of its own."""

from pathlib import Path
from typing import Annotated

import typer

from sottovoce.cli.export import print_written
from sottovoce.cli.options import Json, Out

import_app = typer.Typer(no_args_is_help=True, help="Convert a model that another toolkit has trained.")


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

    print_written(out, export_to(read_speechbrain(folder, language=language), out), json)
