"""Sample transcripts beside what was said, word by word."""

from dataclasses import dataclass

import jiwer


@dataclass(frozen=True)
class Stretch:
    """Words that were understood; or not, if `said` words became other `heard` words."""

    said: str
    heard: str
    is_error: bool


def align_words(reference: str, hypothesis: str) -> list[Stretch]:
    """The shortest way from what was said to what was recognised.

    >>> [(s.said, s.heard, s.is_error) for s in align_words("one two three", "one too three four")]
    [('one', 'one', False), ('two', 'too', True), ('three', 'three', False), ('', 'four', True)]
    """
    said, heard = reference.split(), hypothesis.split()
    if not said or not heard:
        return [Stretch(" ".join(said), " ".join(heard), is_error=True)] if said or heard else []
    return [
        Stretch(
            " ".join(said[step.ref_start_idx : step.ref_end_idx]),
            " ".join(heard[step.hyp_start_idx : step.hyp_end_idx]),
            is_error=step.type != "equal",
        )
        for step in jiwer.process_words(" ".join(said), " ".join(heard)).alignments[0]
    ]
