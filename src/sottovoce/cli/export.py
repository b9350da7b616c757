"""`sottovoce export` and `sottovoce verify`: a model with its guarantee, and the check of both by its receiver."""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import print_json, print_line, stdout
from sottovoce.cli.options import Json, Model, Out, OutsideFamily

if TYPE_CHECKING:
    from sottovoce.models.recogniser import Recogniser


class Target(StrEnum):
    """Whose layout a model is exported in."""

    SOTTOVOCE = "sottovoce"
    HUGGINGFACE = "huggingface"
    ONNX = "onnx"
    SHERPA = "sherpa"


def export(
    model: Model,
    out: Out,
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model, also where only a part of it was trained.")
    ] = False,
    to: Annotated[
        Target,
        typer.Option(help="Whose layout: this project's own, Hugging Face's, or (extra `export`) other runtimes'."),
    ] = Target.SOTTOVOCE,
    int8: Annotated[bool, typer.Option("--int8", help="onnx, sherpa: matrices in eight bits.")] = False,
    base: Annotated[
        str | None, typer.Option(metavar="NAME", help="huggingface: the base model's name on the hub.")
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(metavar="[STORE=]NAME", help="huggingface: a store's name on the hub, for the card's results."),
    ] = None,
    date: Annotated[str | None, typer.Option(help="huggingface: when it was evaluated, for the results.")] = None,
    family: OutsideFamily = None,
    sign: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="Sign all files with this private key, or folder of `sottovoce keys`."),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An audit that travels along: RUN.audit.json; of a release on other people."),
    ] = None,
    published: Annotated[
        str | None, typer.Option(metavar="DATE", help="The day of publication, YYYY-MM-DD, for privacy.json.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a run's best model, with what it promises, into a folder for others.

    A run that has trained a part of a model (federation.trainable) exports that part, which fits the model it began
    with and no other; --merged writes the whole model. A model that is not what its run's ledger says is refused.

    With --to huggingface a pretrained model is written as `from_pretrained` of transformers or peft loads it, with a
    card. With --to onnx or --to sherpa the whole model is written for other runtimes, on phones and small computers.

    What is promised of a run travels along (privacy.json, ledger.jsonl, recipe.yaml): `sottovoce verify` checks it.

    Example: sottovoce export runs/lora --merged --out models/lora
    """
    from sottovoce.base.files import new_folder
    from sottovoce.base.signatures import load_signing_key
    from sottovoce.export.guarantee import ExportOptions, read_export_source, write_guarantee
    from sottovoce.models.recogniser import load_recogniser

    if to is not Target.HUGGINGFACE and (base or dataset or date):
        raise InputError("--base, --dataset and --date are for a card: expected --to huggingface beside them")
    if int8 and to not in (Target.ONNX, Target.SHERPA):
        raise InputError("--int8 is for other runtimes: expected --to onnx or --to sherpa beside it")
    if published is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", published):
        raise InputError(f"--published {published}: expected YYYY-MM-DD")
    key = None if sign is None else load_signing_key(sign)
    source = read_export_source(model)
    if source is None and (key or audit or published):
        raise InputError(f"{model}: of no run, so nothing is known to state or sign: expected the folder of a run")
    recogniser = load_recogniser(model, family=family)
    if merged:
        recogniser = recogniser.whole
    with new_folder(out) as place:
        match to:
            case Target.HUGGINGFACE:
                from sottovoce.export.hub import HubNames, export_to_hub

                names = HubNames(base=base, datasets=tuple(dataset or ()), date=date)
                written = export_to_hub(model, recogniser, place, names=names)
            case Target.ONNX:
                from sottovoce.export.onnx import export_onnx

                written = export_onnx(recogniser, place, int8=int8)
            case Target.SHERPA:
                from sottovoce.export.sherpa import export_sherpa

                written = export_sherpa(recogniser, place, int8=int8)
            case Target.SOTTOVOCE:
                written = _write_model(recogniser, place)
        # Whatever has written the model's files: the guarantee comes last, and its digests cover all of them.
        stated = None
        if source is not None:
            stated = write_guarantee(source, place, ExportOptions(key, audit, published))
    described = {**written, "folder": str(out)}
    if stated is not None:
        described |= {"notice": stated["notice"], "kind": stated["sottovoce"]["kind"], "signed": key is not None}
    print_written(out, described, json)
    if to is Target.SOTTOVOCE and not written["whole"]:
        print_line("it needs the model it began with; --merged writes a whole one, which transcribes by itself")
    if to is Target.HUGGINGFACE and not written["results"]:
        print_line("no error rate has data with a name on the hub (--dataset): the card has them as text alone")


def _write_model(recogniser: "Recogniser", place: Path) -> dict[str, Any]:
    """The model in our own format, read back and compared."""
    from sottovoce.models.model_files import digest_model_files
    from sottovoce.models.recogniser import digest_recogniser
    from sottovoce.models.recogniser import export_recogniser as export_to

    written = export_to(recogniser, place)
    if digest_model_files(place) != digest_recogniser(recogniser):
        raise InputError(f"{place} is not what was to be written: the disk may be damaged")
    return written


def print_written(out: Path, written: Mapping[str, Any], json: bool) -> None:
    """What an export or import has written."""
    if json:
        print_json(written)
        return
    what = "the whole model" if written["whole"] else "the part that was trained"
    print_line(f"{out}: {what}, {written['parameters']:,} parameters, {written['bytes'] / 1e6:,.2f} MB", to=stdout)
    if "notice" in written:
        print_line(written["notice"], to=stdout)


def verify(
    folder: Annotated[Path, typer.Argument(help="A folder that `sottovoce export` has written, or a copy of it.")],
    key: Annotated[
        str | None,
        typer.Option(metavar="PUBLIC", help="Refuse what this key has not signed: its file, or its fingerprint."),
    ] = None,
    json: Json = False,
) -> None:
    """Check what an exported model promises, offline: ε computed anew, ledger, model, recipe, files, signature.

    ε is recomputed from the ledger's events by dp-accounting's own accountants. Five lines say what is stated, what is
    proved, what is only asserted, what an audit adds and who has signed. Exit code 2, and one line, for anything that
    was changed; 0 where nothing contradicts anything (`proved` in --json says whether an ε is proved).

    Example: sottovoce verify models/lora --key keys/lab/signing.pub
    """
    from sottovoce.base.signatures import read_fingerprint
    from sottovoce.export.verify import verify_export

    try:
        found = verify_export(folder, expected_key=None if key is None else read_fingerprint(key))
    except InputError as problem:
        if json:
            print_json({"valid": False, "problem": str(problem)})
        raise
    if json:
        print_json(found.as_json())
        return
    for name, words in found.lines:
        print_line(f"{name}: {words}", to=stdout)
