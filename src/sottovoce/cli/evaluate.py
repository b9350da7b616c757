"""`sottovoce evaluate`: how well a model understands the people of a store."""

import json as serial
import time
from pathlib import Path
from typing import Annotated

import typer

from sottovoce.cli.console import Json, print_json, progress_bar, stderr, stdout
from sottovoce.cli.recognition import (
    BeamWidth,
    ByCtc,
    CtcWeight,
    Device,
    EndThreshold,
    LanguageModel,
    LmWeight,
    LongestShift,
    Model,
    Temperature,
    Words,
    WordScore,
)
from sottovoce.errors import InputError


def evaluate(
    model: Model,
    on: Annotated[str, typer.Option(metavar="STORE[:SPLIT]", help="What to recognise; all splits if none is named.")],
    device: Device = None,
    beam_width: BeamWidth = None,
    lm: LanguageModel = None,
    lm_weight: LmWeight = None,
    words: Words = None,
    word_score: WordScore = None,
    ctc: ByCtc = False,
    ctc_weight: CtcWeight = None,
    temperature: Temperature = None,
    end_threshold: EndThreshold = None,
    longest_shift: LongestShift = None,
    longest: Annotated[float, typer.Option(help="Leave out utterances longer than so many seconds.")] = 60.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw WER per speaker and by group: FILE.png, .svg or .html.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write each utterance's reference and hypothesis: FILE.jsonl.")
    ] = None,
    json: Json = False,
) -> None:
    """Word error rate of a model on a store: in all, per speaker, by gender, age and accent.

    Example: sottovoce evaluate runs/demo --on stores/crowd:test --plot wer.html
    """
    from sottovoce.drawing import check_plot
    from sottovoce.evaluation.decoder import choose_decoder
    from sottovoce.evaluation.evaluate import check_language, score, select, told_collapsed
    from sottovoce.evaluation.figure import draw
    from sottovoce.evaluation.recognise import choose_device, recognise
    from sottovoce.evaluation.table import table
    from sottovoce.models.saved import load
    from sottovoce.store import Store

    if plot is not None:
        check_plot(plot)
    if out is not None and not out.parent.is_dir():
        raise InputError(f"out={out}: the folder {out.parent} does not exist")
    path, split = _store_and_split(on)
    store, recogniser, chosen_device = Store(path), load(model), choose_device(device)
    store.check()
    check_language(recogniser, store)
    decode = choose_decoder(
        recogniser.family,
        recogniser.tokens.pieces(),
        beam_width=beam_width,
        language_model=lm,
        lm_weight=lm_weight,
        words=words,
        word_score=word_score,
        by_ctc=ctc,
        ctc_weight=ctc_weight,
        temperature=temperature,
        end_threshold=end_threshold,
        longest_shift=longest_shift,
    )
    collapses: list[int] = []
    started = time.monotonic()
    chosen = select(store, split=split, longest_seconds=longest)
    with progress_bar(f"recognising {on}") as bar:
        (task,) = bar.task_ids
        bar.update(task, total=len(chosen.rows), note="utterances")
        hypotheses = recognise(
            recogniser,
            store,
            chosen.rows,
            device=chosen_device,
            decode=decode,
            on_progress=lambda done: bar.update(task, completed=done),
            on_collapse=collapses.append,
        )
    result = score(store, chosen, hypotheses, collapses=collapses)
    elapsed = time.monotonic() - started
    if out is not None:
        _write_texts(out, chosen.ids, chosen.references, hypotheses)
    if json:
        print_json({"model": str(model)} | result.as_json() | {"elapsed_seconds": elapsed})
    else:
        stdout.print(table(result, title=f"{model} on {on}"))
        speed = f"{result.audio_seconds:,.0f} s of audio in {elapsed:,.1f} s on {chosen_device}"
        stderr.print(f"{speed} ({result.audio_seconds / elapsed:,.0f} × real time)", highlight=False)
    if plot is not None:
        draw(result, plot, title=f"{model.name} on {result.store}" + (f", {split}" if split else ""))
    if result.collapsed:
        stderr.print(told_collapsed(result.collapsed, result.utterances))
    for written in (place for place in (plot, out) if place is not None):
        stderr.print(f"wrote {written}", highlight=False)


def _store_and_split(on: str) -> tuple[Path, str | None]:
    """STORE:SPLIT taken apart; a folder whose own name has a colon is just that."""
    path, colon, split = on.rpartition(":")
    return (Path(path), split) if colon and not Path(on).exists() else (Path(on), None)


def _write_texts(out: Path, ids: tuple[str, ...], references: tuple[str, ...], hypotheses: list[str]) -> None:
    from sottovoce.files import written_atomically

    with written_atomically(out) as file:
        for id, reference, hypothesis in zip(ids, references, hypotheses, strict=True):
            row = {"id": id, "reference": reference, "hypothesis": hypothesis}
            file.write((serial.dumps(row, ensure_ascii=False) + "\n").encode())
