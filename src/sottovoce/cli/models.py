"""`sottovoce export` and `sottovoce import`: a model in a folder of its own, from a run or from another toolkit."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sottovoce.cli.console import print_json, print_line, stdout
from sottovoce.cli.options import Json, Model, OutsideFamily

Out = Annotated[Path, typer.Option(help="The folder to write; it must not be there yet.")]


def _write_onnx(recogniser: Any, out: Path, *, int8: bool) -> Mapping[str, Any]:
    from sottovoce.export.onnx import export_onnx

    return export_onnx(recogniser, out, int8=int8)


def _write_sherpa(recogniser: Any, out: Path, *, int8: bool) -> Mapping[str, Any]:
    from sottovoce.export.sherpa import export_sherpa

    return export_sherpa(recogniser, out, int8=int8)


# What a model can be written as, besides our own folder.
TARGETS: Mapping[str, Callable[..., Mapping[str, Any]]] = {"onnx": _write_onnx, "sherpa": _write_sherpa}

import_app = typer.Typer(no_args_is_help=True, help="Convert a model that another toolkit has trained.")


def export(
    model: Model,
    out: Out,
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model, also where only a part of it was trained.")
    ] = False,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="For other runtimes (extra `export`): onnx, graphs from samples to log-probabilities, or sherpa, what "
            "sherpa-onnx loads.",
        ),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="With --to: matrices in eight bits.")] = False,
    family: OutsideFamily = None,
    json: Json = False,
) -> None:
    """Write a run's best model into a folder that can be moved, loaded and started from by itself.

    A run that has trained a part of a model (federation.trainable) exports that part, which fits the model it began
    with and no other; --merged writes the whole model. A model that is not what its run's ledger says is refused.
    --to writes the whole model for other runtimes, on phones and small computers.

    Example: sottovoce export runs/demo/global --to sherpa --int8 --out models/phone
    """
    from sottovoce.base.errors import InputError
    from sottovoce.base.importing import suggest_nearest
    from sottovoce.models.model_files import digest_model_files
    from sottovoce.models.recogniser import digest_recogniser, load_recogniser
    from sottovoce.models.recogniser import export_recogniser as export_to
    from sottovoce.training.ledger_check import check_model_of_run

    if to is not None and to not in TARGETS:
        raise InputError(f"--to {to}: unknown target{suggest_nearest(to, TARGETS)}")
    if int8 and to is None:
        raise InputError("--int8 is for other runtimes: expected --to onnx or --to sherpa beside it")
    check_model_of_run(model)
    recogniser = load_recogniser(model, family=family)
    if to is not None:
        _print_written(out, TARGETS[to](recogniser, out, int8=int8), json)
        return
    if merged:
        recogniser = recogniser.whole
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
