"""What runs are called. A simulation protects nobody, so no title of one names an ε as if it held."""

import re
from collections.abc import Sequence

from sottovoce.report.records import RunRecord

_NAMES_EPSILON = re.compile(r"(?:ε|epsilon) ?(?:=|≤|<=|<|of) ?\d", re.IGNORECASE)
_CONDITIONAL = re.compile(r"\bwould\b", re.IGNORECASE)


def title_for(words: str, runs: Sequence[RunRecord]) -> str:
    """`words` as the title of these runs: of simulations without what it says of ε, which the verdict says."""
    simulated = any(run.is_federated and not run.is_release for run in runs)
    return without_epsilon(words) if simulated else words


def without_epsilon(words: str) -> str:
    """A simulation's title without the parts that name an ε, unless they say that a release *would* have it.

    >>> without_epsilon("1,900 people, each in all of ten rounds, ε = 8 for these very people; denoised by 20 others")
    '1,900 people, each in all of ten rounds; denoised by 20 others (simulated)'
    >>> without_epsilon("ε ≤ 8 with 288 people"), without_epsilon("What a release would have: ε ≤ 8")
    ('A simulation', 'What a release would have: ε ≤ 8')
    """
    if not _NAMES_EPSILON.search(words) or _CONDITIONAL.search(words):
        return words
    pieces = re.split(r"([,;:]\s+)", words)  # parts, and what stands between them
    kept = ""
    for between, part in zip(["", *pieces[1::2]], pieces[::2], strict=True):
        if not _NAMES_EPSILON.search(part):
            kept += f"{between if kept else ''}{part}"
    return f"{kept} (simulated)" if kept else "A simulation"


def about_of(run: RunRecord) -> str | None:
    """What its recipe says that it is about."""
    words = run.config.get("about")
    return None if words is None else title_for(str(words), [run])
