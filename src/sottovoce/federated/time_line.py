"""A client's time line: each of its utterances once, in the order of its time (Ramesh et al. 2023).

    store's order ─► batches of neighbours ─► turn 0 │ turn 1 │ … │ nothing left

When a client takes part for the n-th time, it has its n-th turn: the next `local_steps` batches. Which those are is a
function of the client's own speech and of n, and n is how often it was drawn before: nobody else's business, and never
decided by what training made of the earlier turns. docs/decisions/022 says why privacy holds.
"""

from dataclasses import dataclass
from typing import Literal

from sottovoce.audio.batches import Batch, Rows, batches_in_order
from sottovoce.base.errors import InputError

NOTHING_LEFT = "nothing is left of its time line"

Dry = Literal["zero", "skip"]


@dataclass(frozen=True, kw_only=True)
class TimeLine:
    """`dry`: a client with nothing left is drawn like all others and sends `zero`, or is no longer drawn (`skip`).

    With noise it must be `zero`: that somebody is not drawn any more would tell how much they have said.
    """

    dry: Dry = "zero"

    def __post_init__(self) -> None:
        if self.dry not in ("zero", "skip"):
            raise InputError(f"local: time_line.dry={self.dry!r}, expected zero or skip")


def turns_of(
    lengths: Rows, *, max_seconds: float, max_utterances: int | None, local_steps: int
) -> list[tuple[Batch, ...]]:
    """All turns of a client whose utterances have `lengths`, in order; the last may have fewer batches."""
    batches = batches_in_order(lengths, max_seconds=max_seconds, max_utterances=max_utterances)
    return [batches[first : first + local_steps] for first in range(0, len(batches), local_steps)]
