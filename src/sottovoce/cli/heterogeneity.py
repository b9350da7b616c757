"""`sottovoce stats --heterogeneity`: how much the clients of a store, or of two, differ in sound."""

from pathlib import Path

from sottovoce.cli.console import print_json, print_line, progress_bar, stdout
from sottovoce.data.store import Store
from sottovoce.papers.embeddings import INSTALL, SPECTRUM, Embedding, choose_embedding
from sottovoce.papers.heterogeneity import (
    Heterogeneity,
    heterogeneity_json,
    heterogeneity_table,
    measure_heterogeneity,
)


def report_heterogeneity(
    stores: list[Store],
    *,
    plot: Path | None,
    users: int | None,
    utterances: int | None,
    embedding: str | None,
    seed: int,
    json: bool,
) -> None:
    chosen = choose_embedding(embedding)
    if embedding is None and chosen is SPECTRUM:
        print_line(f"purity by statistics of the spectrum; for a trained speaker encoder: {INSTALL}")
    found = [_measure(store, embedding=chosen, seed=seed, users=users, utterances=utterances) for store in stores]
    figures = heterogeneity_json(found, seed=seed)
    if json:
        print_json(figures)
    else:
        stdout.print(heterogeneity_table(figures))
    if plot is not None:
        from sottovoce.papers import heterogeneity_figure

        if not heterogeneity_figure.has_tsne():
            print_line(f"the map shows two principal axes; for t-SNE: {heterogeneity_figure.INSTALL}")
        heterogeneity_figure.draw_heterogeneity(found, figures, plot)
        print_line(f"wrote {plot}")


def _measure(
    store: Store, *, embedding: Embedding, seed: int, users: int | None, utterances: int | None
) -> Heterogeneity:
    with progress_bar(f"measuring {store.path}") as bar:
        (task,) = bar.task_ids
        bar.update(task, note="utterances")
        return measure_heterogeneity(
            store,
            embedding=embedding,
            seed=seed,
            users=users,
            utterances=utterances,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
