"""`sottovoce stats --heterogeneity`: how unlike one another the clients of a store, or of two, sound."""

from pathlib import Path

from sottovoce.cli.console import print_json, progress_bar, say, stdout
from sottovoce.papers import embeddings, maps
from sottovoce.papers.heterogeneity import Heterogeneity, as_json, measure
from sottovoce.papers.table import table
from sottovoce.store import Store


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
    chosen = embeddings.choose_embedding(embedding)
    if embedding is None and chosen is embeddings.SPECTRUM:
        say(f"purity by statistics of the spectrum; for a trained speaker encoder: {embeddings.INSTALL}")
    found = [_listen(store, embedding=chosen, seed=seed, users=users, utterances=utterances) for store in stores]
    figures = as_json(found, seed=seed)
    if json:
        print_json(figures)
    else:
        stdout.print(table(figures))
    if plot is not None:
        from sottovoce.papers.figure import draw

        if not maps.has_neighbourhoods():
            say(f"the map shows two principal axes; for t-SNE: {maps.INSTALL}")
        draw(found, figures, plot)
        say(f"wrote {plot}")


def _listen(
    store: Store, *, embedding: embeddings.Embedding, seed: int, users: int | None, utterances: int | None
) -> Heterogeneity:
    with progress_bar(f"listening to {store.path}") as bar:
        (task,) = bar.task_ids
        bar.update(task, note="utterances")
        return measure(
            store,
            embedding=embedding,
            seed=seed,
            users=users,
            utterances=utterances,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
