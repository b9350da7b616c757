"""`sottovoce probe`: how much of who speaks, and of what is said, an encoder's vectors hold."""

import time
from typing import Annotated

import typer

from sottovoce.cli.console import print_json, print_line, progress_bar, stderr, stdout
from sottovoce.cli.options import Device, Json, Model, OutsideFamily, split_store_name


def probe(
    model: Model,
    on: Annotated[
        str, typer.Option(metavar="STORE[:SPLIT]", help="The speech to probe with; all splits if none is named.")
    ],
    minutes: Annotated[float, typer.Option(min=0.1, help="At most so many minutes of speech.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Decides who is chosen and who is held out.")] = 1,
    family: OutsideFamily = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """How much a linear layer can read off an encoder's vectors: who speaks, and which letters are said.

    Example: sottovoce probe runs/pre-trained --on stores/crowd:test

    Beside it stand an untrained encoder of the same shape, or the base model that it was made from, and chance.
    """
    from sottovoce.base.tables import Table
    from sottovoce.data.store import Store
    from sottovoce.evaluation.recognise import choose_device
    from sottovoce.models.recogniser import load_recogniser
    from sottovoce.papers.probe import probe_encoder

    path, split = split_store_name(on)
    store, recogniser, chosen_device = Store(path), load_recogniser(model, family=family), choose_device(device)
    store.check()
    started = time.monotonic()
    with progress_bar(f"probing {on}") as bar:
        (task,) = bar.task_ids
        bar.update(task, note="utterances")
        found = probe_encoder(
            recogniser,
            store,
            split=split,
            minutes=minutes,
            device=chosen_device,
            seed=seed,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    elapsed = time.monotonic() - started
    if json:
        print_json({"model": str(model), **found.as_json(), "elapsed_seconds": elapsed})
        return
    rows = []
    if (speaker := found.speaker) is not None:
        rates = (f"{rate:.1%}" for rate in (speaker.accuracy, speaker.untrained, speaker.chance))
        rows.append((f"which of {speaker.speakers:,} speakers", *rates, f"{speaker.tried_on:,} utterances"))
    if (letters := found.letters) is not None:
        rates = (f"{rate:.1%}" for rate in (letters.error_rate, letters.untrained, letters.chance))
        rows.append((f"{letters.letters:,} letters: errors", *rates, f"{letters.tried_on:,} utterances"))
    before = "base model" if recogniser.family.transfer.origin(recogniser.settings) else "untrained"
    headings = ("a linear layer finds", "this model", before, "chance", "tested on")
    stdout.print(Table("probe", f"{model} on {on}", headings, tuple(rows)).for_terminal())
    for what, why in found.missing.items():
        print_line(f"{what}: {why}")
    stderr.print(f"{found.audio_seconds:,.0f} s of speech, {elapsed:,.1f} s on {chosen_device}", highlight=False)
