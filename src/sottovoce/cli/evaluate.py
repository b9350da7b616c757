"""`sottovoce evaluate`: the error rates of a model on a store."""

import json as serial
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import counting_bar, print_json, print_line, stdout
from sottovoce.cli.options import (
    Device,
    Json,
    Model,
    Normaliser,
    OutsideFamily,
    Personal,
    split_store_name,
    with_decoding,
)
from sottovoce.cli.personalise import load_own_model
from sottovoce.data.text.normalisation import NormaliserName, choose_normaliser

if TYPE_CHECKING:
    import torch

    from sottovoce.data.loading import Speech
    from sottovoce.evaluation.decoder import DecodingOptions
    from sottovoce.evaluation.score import Selection
    from sottovoce.models.recogniser import Recogniser


@with_decoding
def evaluate(
    *,
    model: Model,
    on: Annotated[str, typer.Option(metavar="STORE[:SPLIT]", help="What to recognise; all splits if none is named.")],
    personal: Personal = None,
    family: OutsideFamily = None,
    device: Device = None,
    decoding: "DecodingOptions",
    longest: Annotated[float, typer.Option(help="Leave out utterances longer than so many seconds.")] = 60.0,
    normaliser: Normaliser = NormaliserName.OURS,
    plot: Annotated[
        Path | None, typer.Option(help="Draw WER per speaker and by group: FILE.png, .svg or .html.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write each utterance's reference and hypothesis: FILE.jsonl.")
    ] = None,
    json: Json = False,
) -> None:
    """Word error rate of a model on a store: in all, per speaker, by gender, age and accent.

    Of a model that learns from speech alone: its contrastive loss and accuracy. A model that is not what its run's
    ledger says is refused.

    Example: sottovoce evaluate runs/demo/private --on stores/demo-people:test --plot wer.html
    """
    from sottovoce.base.drawing import check_plot
    from sottovoce.data.audio.narrow_band import describe_store_band
    from sottovoce.data.store import Store
    from sottovoce.evaluation.decoder import DecodingOptions, choose_decoder
    from sottovoce.evaluation.losses import select_speech
    from sottovoce.evaluation.recognise import choose_device, recognise_utterances
    from sottovoce.evaluation.score import check_language, format_collapsed, score_hypotheses, select_utterances
    from sottovoce.evaluation.tables import format_evaluation
    from sottovoce.report.evaluation_figure import draw_evaluation
    from sottovoce.training.ledger_check import check_model_of_run
    from sottovoce.training.testing import read_run_decoding

    if plot is not None:
        check_plot(plot)
    if out is not None and not out.parent.is_dir():
        raise InputError(f"out={out}: the folder {out.parent} does not exist")
    path, split = split_store_name(on)
    check_model_of_run(model)
    store, recogniser = Store(path), load_own_model(model, personal, family=family)
    chosen_device, part = choose_device(device), {} if personal is None else {"personal": str(personal)}
    store.check()
    title = f"{model}{'' if personal is None else f' with {personal}'} on {on}"
    if recogniser.family.recognition is None:
        if decoding != DecodingOptions() or normaliser != NormaliserName.OURS or plot is not None or out is not None:
            raise InputError(
                f"models of family={recogniser.family.name} write no text: expected no option about decoding or texts"
            )
        speech = select_speech(recogniser, store, split=split, longest_seconds=longest)
        found = _compute_figures(recogniser, speech, title=title, device=chosen_device, json=json)
        if json:
            print_json({"model": str(model), **part, **found})
        return
    check_language(recogniser, store)
    rules = choose_normaliser(normaliser, language=store.language)
    pieces, settings = recogniser.tokens.pieces(), recogniser.settings
    decode = choose_decoder(recogniser.family, pieces, decoding, settings=settings)
    collapses: list[int] = []
    started = time.monotonic()
    chosen = select_utterances(store, split=split, longest_seconds=longest)
    with counting_bar(f"recognising {on}", total=len(chosen.rows)) as on_progress:
        hypotheses = recognise_utterances(
            recogniser,
            store,
            chosen.rows,
            device=chosen_device,
            decode=decode,
            on_progress=on_progress,
            on_collapse=collapses.append,
        )
    result = score_hypotheses(store, chosen, hypotheses, normaliser=rules, collapses=collapses)
    elapsed = time.monotonic() - started
    if out is not None:
        _write_texts(out, chosen, hypotheses)
    if json:
        taken = {"elapsed_seconds": elapsed, "real_time_factor": elapsed / result.audio_seconds}
        print_json({"model": str(model)} | part | result.as_json() | taken)
    else:
        stdout.print(format_evaluation(result, title=title))
        speed = f"{result.audio_seconds:,.0f} s of audio in {elapsed:,.1f} s on {chosen_device}"
        print_line(f"{speed} ({result.audio_seconds / elapsed:,.0f} × real time)")
    if plot is not None:
        draw_evaluation(result, plot, title=f"{model.name} on {result.store}" + (f", {split}" if split else ""))
    if decoding == DecodingOptions() and (others := read_run_decoding(model)) is not None:
        print_line(f"decoded greedily; the test WERs in the run's own results are by {others}")
    if result.collapsed:
        print_line(format_collapsed(result.collapsed, result.utterances))
    if line := describe_store_band(store, chosen.rows):
        print_line(line)
    for written in (place for place in (plot, out) if place is not None):
        print_line(f"wrote {written}")


def _compute_figures(
    recogniser: "Recogniser", speech: "Speech", *, title: str, device: "torch.device", json: bool
) -> dict[str, Any]:
    """The figures of a model that writes no text, printed unless they are for JSON."""
    from sottovoce.evaluation.losses import compute_mean_figures, summarise_figures

    started = time.monotonic()
    with counting_bar(title, total=len(speech.rows)) as on_progress:
        figures = compute_mean_figures(recogniser, speech, device=device, on_progress=on_progress)
    if not json:
        print_line(f"{title}: loss {figures['loss']:.3f} on {speech}", to=stdout)
        if "accuracy" in figures:
            accuracy, chance = figures["accuracy"], figures["chance"]
            print_line(f"contrastive accuracy {accuracy:.1%}, by guessing {chance:.1%}", to=stdout)
    return summarise_figures(speech, figures) | {"elapsed_seconds": time.monotonic() - started}


def _write_texts(out: Path, chosen: "Selection", hypotheses: list[str]) -> None:
    from sottovoce.base.files import encode_utf8, write_atomically

    with write_atomically(out) as file:
        for id, reference, hypothesis in zip(chosen.ids, chosen.references, hypotheses, strict=True):
            row = {"id": id, "reference": reference, "hypothesis": hypothesis}
            file.write(encode_utf8(serial.dumps(row, ensure_ascii=False) + "\n"))
