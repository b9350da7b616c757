"""`sottovoce stats`: how much speech there is, how it is spread over people, and how unlike they sound."""

from pathlib import Path
from typing import Annotated

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import print_json, print_line, stdout
from sottovoce.cli.options import Json


def stats(
    store: Annotated[Path, typer.Argument(help="A store made by `sottovoce prepare`.")],
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw minutes and utterances per speaker (with --heterogeneity: strip plots and maps): "
            "FILE.png, .svg or .html."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Read the whole store first: is it as `prepare` wrote it?")
    ] = False,
    heterogeneity: Annotated[
        bool,
        typer.Option(
            "--heterogeneity",
            help="Listen to it: loudness, log-HNR, permutation entropy and blind SNR over clients, and how well "
            "speaker embeddings tell them apart; definitions are printed below the table. Not private.",
        ),
    ] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="STORE", help="With --heterogeneity: another store beside it.")
    ] = None,
    users: Annotated[
        int | None, typer.Option(help="With --heterogeneity: listen to so many people, chosen by --seed.")
    ] = None,
    utterances: Annotated[
        int | None, typer.Option(help="With --heterogeneity: listen to so many utterances of each, chosen by --seed.")
    ] = None,
    embedding: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --heterogeneity: resemblyzer (the default where installed) or spectrum (needs nothing).",
        ),
    ] = None,
    speakers_per_device: Annotated[
        int | None, typer.Option(help="Draw and count devices, too, that so many speakers share, chosen by --seed.")
    ] = None,
    table2: Annotated[
        bool,
        typer.Option(
            "--table2", help="The subsets of Table 2 of Pelikan et al. 2025 instead, with its numbers; parts by --seed."
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Decides who shares a device, or is in a part; with --heterogeneity who is heard, k-means and the map."
            "  [default: 1]"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Hours, speakers and minutes per speaker of a store, per split and in all; or how unlike its speakers sound.

    Example: sottovoce stats stores/crowd --plot crowd.html
    """
    from sottovoce.data.store import Store
    from sottovoce.data.text.spelling import Spelling

    if plot is not None:
        from sottovoce.base.drawing import check_plot  # only here: matplotlib takes its time to load

        check_plot(plot)
    stores = [Store(path) for path in (store, against) if path is not None]
    for opened in stores:
        opened.check(audio=check)
    if heterogeneity:
        from sottovoce.cli.heterogeneity import report_heterogeneity

        if speakers_per_device is not None:
            raise InputError(f"speakers_per_device={speakers_per_device}: expected without --heterogeneity")
        if table2:
            raise InputError("--table2: expected without --heterogeneity")
        seed = 1 if seed is None else seed
        report_heterogeneity(
            stores, plot=plot, users=users, utterances=utterances, embedding=embedding, seed=seed, json=json
        )
        return
    for name, value in (
        *(("against", against), ("users", users), ("utterances", utterances)),
        *(("embedding", embedding), ("seed", seed if speakers_per_device is None and not table2 else None)),
    ):
        if value is not None:
            raise InputError(f"{name}={value}: expected --heterogeneity with it")
    from sottovoce.data.statistics import (
        compute_statistics,
        device_statistics,
        format_devices,
        make_comparison_table,
        make_statistics_table,
    )

    if table2:
        from sottovoce.papers.table2 import subset_statistics

        if speakers_per_device is not None or plot is not None:
            raise InputError("--table2: expected without --plot and --speakers-per-device")
        subsets = subset_statistics(stores[0], seed=1 if seed is None else seed)
        if json:
            print_json(subsets)
        else:
            stdout.print(make_comparison_table(subsets, title="Table 2 of Pelikan et al. 2025, here and there"))
        return
    figures, devices = compute_statistics(stores[0]), None
    if speakers_per_device is not None:
        devices = device_statistics(
            stores[0], speakers_per_device=speakers_per_device, seed=1 if seed is None else seed
        )
    if json:
        print_json(figures if devices is None else figures | {"devices": devices})
    else:
        spelled = "" if stores[0].spelling == Spelling.OURS else f", texts as {stores[0].spelling}"
        stdout.print(make_statistics_table(figures, title=f"{stores[0].name} ({stores[0].language}{spelled})"))
        for line in [] if devices is None else format_devices(devices):
            stdout.print(line, highlight=False, soft_wrap=True, markup=False)
    if plot is not None:
        from sottovoce.papers.speaker_figure import draw_speakers

        draw_speakers(stores[0], plot, speakers_per_device=speakers_per_device, seed=1 if seed is None else seed)
        print_line(f"wrote {plot}")
