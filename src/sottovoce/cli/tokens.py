"""`sottovoce tokens`: train sentence pieces on a store's texts."""

from pathlib import Path
from typing import Annotated

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import print_json, print_line, stdout
from sottovoce.cli.options import Json


def tokens(
    store: Annotated[str, typer.Argument(help="STORE or STORE:split, made by `sottovoce prepare`.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write; a recipe takes it as tokens.file.")],
    size: Annotated[int, typer.Option(min=2, max=1_000_000, help="How many sentence pieces.")] = 2500,
    json: Json = False,
) -> None:
    """Train sentence pieces on the texts of a store.

    The file says whose texts they are. A release takes it only if none of its clients are among them.

    Example: sottovoce tokens stores/cv-en:train --out stores/cv-en-2500.json
    """
    from sottovoce.data.store import Store
    from sottovoce.data.text.tokens import save_tokens, train_sentence_pieces

    if not out.parent.is_dir():
        raise InputError(f"out={out}: the folder {out.parent} does not exist")
    # A folder whose own name has a colon is just that.
    path, _, split = store.rpartition(":") if ":" in store and not Path(store).exists() else (store, "", "")
    opened = Store(path)
    opened.check()
    if split and split not in opened.splits:
        raise InputError(f"no split={split!r} in store {path}, expected one of {', '.join(opened.splits)}")
    users = opened.splits[split] if split else range(opened.user_count)
    rows = range(int(opened.user_utterances[users.start]), int(opened.user_utterances[users.stop]))
    source = {"store": opened.path.resolve().name, "digest": opened.digest, "split": split or None}
    pieces = train_sentence_pieces((text for row in rows if (text := opened.utterance(row).text)), size=size)
    try:
        save_tokens(pieces, out, made_from=[source])
    except OSError as error:
        raise InputError(f"out={out}: cannot be written ({error.strerror})") from None
    if json:
        print_json({"size": pieces.size, "digest": pieces.digest, "file": str(out), "made_from": [source]})
    else:
        print_line(f"wrote {out}: {pieces.size:,} sentence pieces", to=stdout)
