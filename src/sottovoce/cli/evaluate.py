"""`sottovoce evaluate`: how well a model understands the people of a store."""

import json as serial
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sottovoce.cli.console import Json, print_json, progress_bar, say, stderr, stdout
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
    Normaliser,
    OutsideFamily,
    Temperature,
    Words,
    WordScore,
)
from sottovoce.errors import InputError
from sottovoce.text.normalisers import NormaliserName, choose_normaliser

if TYPE_CHECKING:
    import torch

    from sottovoce.models.saved import Recogniser
    from sottovoce.store import Store


def evaluate(
    model: Model,
    on: Annotated[str, typer.Option(metavar="STORE[:SPLIT]", help="What to recognise; all splits if none is named.")],
    family: OutsideFamily = None,
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

    Example: sottovoce evaluate runs/demo/global --on stores/demo-crowd:test --plot wer.html
    """
    from sottovoce.audio.narrow_band import narrow_in
    from sottovoce.drawing import check_plot
    from sottovoce.evaluation.decoder import choose_decoder
    from sottovoce.evaluation.evaluate import check_language, score, select, told_collapsed
    from sottovoce.evaluation.figure import draw_evaluation
    from sottovoce.evaluation.recognise import choose_device, recognise
    from sottovoce.evaluation.table import evaluation_table
    from sottovoce.models.saved import load
    from sottovoce.store import Store
    from sottovoce.training.ledger_check import check_model_of_run

    if plot is not None:
        check_plot(plot)
    if out is not None and not out.parent.is_dir():
        raise InputError(f"out={out}: the folder {out.parent} does not exist")
    path, split = store_and_split(on)
    check_model_of_run(model)
    store, recogniser, chosen_device = Store(path), load(model, family=family), choose_device(device)
    store.check()
    if recogniser.family.recognition is None:
        asked = (beam_width, lm, lm_weight, words, word_score, ctc_weight, temperature, end_threshold, longest_shift)
        texts = ctc or normaliser != NormaliserName.OURS or plot is not None or out is not None
        if texts or any(option is not None for option in asked):
            raise InputError(
                f"models of family={recogniser.family.name} write nothing down: there is neither a search nor a text"
            )
        _measure(recogniser, store, split, on=on, device=chosen_device, longest=longest, model=model, json=json)
        return
    check_language(recogniser, store)
    rules = choose_normaliser(normaliser, language=store.language)
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
    result = score(store, chosen, hypotheses, normaliser=rules, collapses=collapses)
    elapsed = time.monotonic() - started
    if out is not None:
        _write_texts(out, chosen.ids, chosen.references, hypotheses)
    if json:
        taken = {"elapsed_seconds": elapsed, "real_time_factor": elapsed / result.audio_seconds}
        print_json({"model": str(model)} | result.as_json() | taken)
    else:
        stdout.print(evaluation_table(result, title=f"{model} on {on}"))
        speed = f"{result.audio_seconds:,.0f} s of audio in {elapsed:,.1f} s on {chosen_device}"
        stderr.print(f"{speed} ({result.audio_seconds / elapsed:,.0f} × real time)", highlight=False)
    if plot is not None:
        draw_evaluation(result, plot, title=f"{model.name} on {result.store}" + (f", {split}" if split else ""))
    if result.collapsed:
        stderr.print(told_collapsed(result.collapsed, result.utterances))
    if line := narrow_in(store, chosen.rows):
        say(line)
    for written in (place for place in (plot, out) if place is not None):
        stderr.print(f"wrote {written}", highlight=False)


def _measure(
    recogniser: "Recogniser",
    store: "Store",
    split: str | None,
    *,
    on: str,
    device: "torch.device",
    longest: float,
    model: Path,
    json: bool,
) -> None:
    """The figures of a model that writes nothing down."""
    from sottovoce.evaluation.losses import as_json, mean_figures, usable_speech

    started = time.monotonic()
    speech = usable_speech(recogniser, store, split=split, longest_seconds=longest)
    with progress_bar(f"listening to {on}") as bar:
        (task,) = bar.task_ids
        bar.update(task, total=len(speech.rows), note="utterances")
        figures = mean_figures(
            recogniser, store, device=device, speech=speech, on_progress=lambda done: bar.update(task, completed=done)
        )
    if json:
        print_json({"model": str(model), **as_json(speech, figures), "elapsed_seconds": time.monotonic() - started})
        return
    say(f"{model} on {on}: loss {figures['loss']:.3f} on {speech}", to=stdout)
    if "accuracy" in figures:
        right, guessed = figures["accuracy"], figures["chance"]
        say(f"contrastive accuracy {right:.1%}, by guessing {guessed:.1%}", to=stdout)


def store_and_split(on: str) -> tuple[Path, str | None]:
    """STORE:SPLIT taken apart; a folder whose own name has a colon is just that."""
    path, colon, split = on.rpartition(":")
    return (Path(path), split) if colon and not Path(on).exists() else (Path(on), None)


def _write_texts(out: Path, ids: tuple[str, ...], references: tuple[str, ...], hypotheses: list[str]) -> None:
    from sottovoce.files import as_utf8, written_atomically

    with written_atomically(out) as file:
        for id, reference, hypothesis in zip(ids, references, hypotheses, strict=True):
            row = {"id": id, "reference": reference, "hypothesis": hypothesis}
            file.write(as_utf8(serial.dumps(row, ensure_ascii=False) + "\n"))
