"""What `evaluate` and `transcribe` share: which model, on which device, and how it decodes."""

from pathlib import Path
from typing import Annotated

import typer

from sottovoce.data.text.normalisation import NormaliserName

Model = Annotated[
    Path, typer.Argument(help="A model folder, or a run folder that holds one; of a suite one of its runs.")
]
OutsideFamily = Annotated[
    str | None,
    typer.Option(
        "--family",
        metavar="MODULE:FAMILY",
        help="Import this family of your own, of which the model is; a model's folder alone has nothing imported.",
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one by default.")]
Normaliser = Annotated[
    NormaliserName,
    typer.Option(
        help="The rules by which texts are compared: our own, or Whisper's (extra `whisper`).", show_default=True
    ),
]
BeamWidth = Annotated[
    int | None,
    typer.Option(min=1, help="Beam search of this width (by CTC: extra `lm`); greedy by default."),
]
LanguageModel = Annotated[Path | None, typer.Option("--lm", help="KenLM file (ARPA or binary) for the beam search.")]
LmWeight = Annotated[float | None, typer.Option(help="Weight of the language model; 1 by default.")]
Words = Annotated[Path | None, typer.Option(help="Word list or ARPA file: nothing but these words comes out.")]
WordScore = Annotated[float | None, typer.Option(help="Added to a hypothesis for each word; needs --words.")]

# For models that search with attention.
ByCtc = Annotated[bool, typer.Option("--ctc", help="Decode by CTC, also where the model has an attention decoder.")]
CtcWeight = Annotated[float | None, typer.Option(help="Attention search: weight of CTC prefix scores; 0 by default.")]
Temperature = Annotated[float | None, typer.Option(help="Attention search: divides the logits; 1.5 by default.")]
EndThreshold = Annotated[
    float | None,
    typer.Option(help="Attention search: end only where log p is at least so many times the best token's; 1.5."),
]
LongestShift = Annotated[
    int | None, typer.Option(help="Attention search: frames that the attention may move at once; 140 by default.")
]
