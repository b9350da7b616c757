"""Sample transcripts with their errors marked, word by word."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import jiwer

Kind = Literal["equal", "substitute", "delete", "insert"]

# Releases of jiwer name a substitution in two ways.
_KINDS: dict[str, Kind] = {
    "equal": "equal",
    "substitute": "substitute",
    "replace": "substitute",
    "delete": "delete",
    "insert": "insert",
}


@dataclass(frozen=True)
class Stretch:
    """Words that were understood, or how they were not: `said` words became `heard` words."""

    kind: Kind
    said: str
    heard: str


def align(reference: str, hypothesis: str) -> list[Stretch]:
    """The shortest way from what was said to what was recognised.

    >>> [(s.kind, s.said, s.heard) for s in align("one two three", "one too three four")]
    [('equal', 'one', 'one'), ('substitute', 'two', 'too'), ('equal', 'three', 'three'), ('insert', '', 'four')]
    """
    said, heard = reference.split(), hypothesis.split()
    if not said or not heard:
        kind: Kind = "insert" if heard else "delete"
        return [Stretch(kind, " ".join(said), " ".join(heard))] if said or heard else []
    found: list[Stretch] = []
    for step in jiwer.process_words(" ".join(said), " ".join(heard)).alignments[0]:
        found.append(
            Stretch(
                _KINDS[step.type],
                " ".join(said[step.ref_start_idx : step.ref_end_idx]),
                " ".join(heard[step.hyp_start_idx : step.hyp_end_idx]),
            )
        )
    return found


def marked(reference: str, hypothesis: str) -> str:
    """HTML of one transcript: what was said and lost is struck out, what was heard in its place is underlined."""
    return (
        " ".join(_marked(stretch) for stretch in align(reference, hypothesis)) or "<i>nothing said, nothing heard</i>"
    )


def transcript_list(samples: Sequence[dict[str, str]]) -> str:
    """HTML of some transcripts as a list."""
    items = "\n".join(f"<li>{marked(sample['reference'], sample['hypothesis'])}</li>" for sample in samples)
    return f'<ol class="transcripts">\n{items}\n</ol>'


def _marked(stretch: Stretch) -> str:
    if stretch.kind == "equal":
        return escape(stretch.said)
    lost = f"<del>{escape(stretch.said)}</del>" if stretch.said else ""
    heard = f"<ins>{escape(stretch.heard)}</ins>" if stretch.heard else ""
    return lost + heard
