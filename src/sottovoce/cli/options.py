"""Options that several commands share, each defined once."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce.data.text.normalisation import NormaliserName

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines instead of tables.")]
Model = Annotated[
    Path, typer.Argument(help="A model folder, or a run folder that holds one; of a suite one of its runs.")
]
Out = Annotated[Path, typer.Option(help="The folder to write; it must not be there yet.")]
OutsideFamily = Annotated[
    str | None,
    typer.Option(
        "--family",
        metavar="MODULE:FAMILY",
        help="Import this model family of your own; a model's folder alone never has anything imported.",
    ),
]
Personal = Annotated[
    Path | None, typer.Option(metavar="PART", help="With a personal part of this model (`sottovoce personalise`).")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one by default.")]
Recipe = Annotated[str, typer.Argument(help="A recipe's name (`sottovoce recipes`), a YAML file, or FILE.yaml/RUN.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, such as central.steps=100.")]
Runs = Annotated[Path, typer.Option(help="Where runs are: parent models are looked for and trained here.")]
Stores = Annotated[Path, typer.Option(help="Where stores are, and where missing ones are prepared.")]
SignKey = Annotated[
    Path | None,
    typer.Option(
        "--sign", metavar="KEY", help="Sign ledgers with this private key (`sottovoce keys`), at every commit."
    ),
]
Track = Annotated[
    str | None,
    typer.Option(
        "--track",
        metavar="TRACKER,…",
        help="Send metrics to tensorboard, mlflow or wandb; by default tensorboard/ in the run's folder, if it is no "
        "release. A release goes to mlflow alone, when it has ended.",
    ),
]
TrackDiagnostics = Annotated[
    bool, typer.Option("--track-diagnostics", help="Send diagnostics.jsonl, too: of simulations only.")
]
Normaliser = Annotated[
    NormaliserName,
    typer.Option(
        help="The rules by which texts are compared: our own, or Whisper's (extra `whisper`).", show_default=True
    ),
]


def split_store_name(on: str) -> tuple[Path, str | None]:
    """STORE:SPLIT taken apart; a folder whose own name has a colon is just that."""
    path, colon, split = on.rpartition(":")
    return (Path(path), split) if colon and not Path(on).exists() else (Path(on), None)


def with_decoding(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of `_decoding` instead of its parameter `decoding`, which gets a `DecodingOptions`."""
    options = inspect.signature(_decoding).parameters
    own = inspect.signature(command).parameters
    parameters = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name in own
        for option in (options.values() if name == "decoding" else [own[name]])
    ]

    @wraps(command)
    def call(**given: Any) -> None:
        from sottovoce.evaluation.decoder import DecodingOptions

        command(decoding=DecodingOptions(**{name: given.pop(name) for name in options}), **given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _decoding(
    beam_width: Annotated[
        int | None, typer.Option(min=1, help="Beam search of this width (by CTC: extra `lm`); greedy by default.")
    ] = None,
    language_model: Annotated[
        Path | None, typer.Option("--lm", help="KenLM file (ARPA or binary) for the beam search.")
    ] = None,
    lm_weight: Annotated[float | None, typer.Option(help="Weight of the language model; 1 by default.")] = None,
    words: Annotated[
        Path | None, typer.Option(help="Word list or ARPA file: nothing but these words comes out.")
    ] = None,
    word_score: Annotated[
        float | None, typer.Option(help="Added to a hypothesis for each word; needs --words.")
    ] = None,
    by_ctc: Annotated[
        bool, typer.Option("--ctc", help="Decode by CTC, also where the model has an attention decoder.")
    ] = False,
    ctc_weight: Annotated[
        float | None, typer.Option(help="Attention search: weight of CTC prefix scores; 0 by default.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Attention search: divides the logits; 1.5 by default.")
    ] = None,
    end_threshold: Annotated[
        float | None,
        typer.Option(help="Attention search: end only where log p is at least so many times the best token's; 1.5."),
    ] = None,
    longest_shift: Annotated[
        int | None, typer.Option(help="Attention search: frames that the attention may move at once; 140 by default.")
    ] = None,
) -> None:
    """The fields of a `DecodingOptions`, as options."""
