"""`sottovoce import`: a model that another toolkit has trained, as one of ours."""

from pathlib import Path
from typing import Annotated

import typer

from sottovoce.cli.console import print_json, print_line, stdout
from sottovoce.cli.options import Json

app = typer.Typer(no_args_is_help=True, help="Take over a model that another toolkit has trained.")


@app.command(name="speechbrain")
def speechbrain(
    folder: Annotated[Path, typer.Argument(help="Where model.ckpt (or asr.ckpt) and tokenizer.ckpt are.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not be there yet.")],
    language: Annotated[str, typer.Option(help="The language of the model, such as fr.")],
    json: Json = False,
) -> None:
    """Read a checkpoint of SpeechBrain's CRDNN recipe (CTC and attention), and write it as a model of family crdnn.

    Example: sottovoce import speechbrain results/CKPT+latest --language fr --out models/crdnn-fr
    """
    from sottovoce.models.importing import read_speechbrain
    from sottovoce.models.saved import export

    written = export(read_speechbrain(folder, language=language), out)
    if json:
        print_json(written)
        return
    print_line(f"{out}: a model with {written['parameters']:,} parameters, {written['bytes'] / 1e6:,.2f} MB", to=stdout)
