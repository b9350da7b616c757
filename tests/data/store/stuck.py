"""`sottovoce prepare` of speakers who never come to an end, run as a program: `stuck.py PIPE ARGUMENTS…`.

A worker writes a byte to the named pipe when it begins with one of them, so that others know that it is at work.
"""

import sys
import threading
from pathlib import Path

from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker, Speaker


def stuck(speaker: Speaker) -> RenderedSpeaker:
    with Path(speaker.metadata["pipe"]).open("wb", buffering=0) as pipe:
        pipe.write(b".")
        threading.Event().wait()
    raise AssertionError


def main() -> None:
    from sottovoce.cli import main
    from sottovoce.data.corpora import tsv

    pipe = sys.argv.pop(1)
    speakers = [Speaker(name=f"{i:02}", split="train", clips=[], metadata={"pipe": pipe}) for i in range(20)]
    tsv.read_tsv = lambda *_, **__: Corpus("stuck", "en", speakers, stuck, ProblemLog())  # type: ignore[assignment]
    main()


if __name__ == "__main__":
    main()
