"""What whoever sums a cohort asks of an engine."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.federated.weighting import ClientFigures

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Trained:
    """The updates θ_server − θ_local of one client [P] or of several [N, P]. Theirs until the next are asked for.

    `losses` is their mean local loss, on the device; `figures` is what their weights may depend on; `audio_seconds`
    is what they have worked through. `gradient_norms`, on the device too, are the means over their local steps, before
    local clipping; they and the losses end in a simulation's diagnostics.
    """

    update: Tensor
    clients: tuple[int, ...]
    losses: Tensor
    figures: tuple[ClientFigures, ...]
    audio_seconds: float
    gradient_norms: Tensor | None = None


@dataclass(frozen=True, eq=False)
class JointSum:
    """Σ ω·update of several clients [P], what each of them lost, and who had no part in it."""

    sum_P: Tensor
    losses_N: Tensor
    dropped: "tuple[Dropped, ...]"


@dataclass(frozen=True, eq=False)
class JointlyTrained:
    """Several clients of whom nobody needs a single update: `sum` of their weights is all that is computed."""

    clients: tuple[int, ...]
    figures: tuple[ClientFigures, ...]
    audio_seconds: float
    sum: Callable[[Sequence[float]], JointSum]


@dataclass(frozen=True)
class Dropped:
    """A client that could not be trained, and why. Its update counts as zero; the sum is still divided by S."""

    client: int
    reason: str


def drop_or_raise(client: int, error: Exception, *, forgiving: bool) -> Dropped:
    """`client`, dropped because of `error`. Raises it where it is no accident of the client's but a bug of ours.

    A `forgiving` engine cannot tell these two apart, nor may it: a release that failed, or not, with who is in the
    cohort, and was tried again with others, would choose cohorts by a person's data, and nothing counts that.
    """
    if isinstance(error, torch.OutOfMemoryError):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return Dropped(client, "out of memory")
    if isinstance(error, InputError | OSError):
        return Dropped(client, str(error))
    if forgiving:
        return Dropped(client, f"{type(error).__name__}: {error}")
    raise error


class Engine(ABC):
    """Trains a cohort. It may fuse, stack, shard and reorder; it may not change what comes out."""

    waited = 0.0  # seconds that training has waited for data in this round

    def time_waits(self, loading: Iterator[T]) -> Iterator[T]:
        """The items of `loading`, with the time that each one kept training waiting added to `waited`."""
        self.waited = 0.0
        while True:
            asked = time.perf_counter()
            item = next(loading, None)
            self.waited += time.perf_counter() - asked
            if item is None:
                return
            yield item

    def close(self) -> None:  # noqa: B027  # few engines hold anything
        """Give back what it holds besides memory."""

    @abstractmethod
    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | JointlyTrained | Dropped]:
        """Local training of every client in `cohort`, starting from the server's model [P].

        `positions` is where each of them stands on its time line, where it has one; None is at the beginning.
        """


def with_positions(cohort: Sequence[int], positions: Sequence[int] | None) -> Iterator[tuple[int, int]]:
    """Each client, and the position that it is at."""
    return zip(cohort, positions or [0] * len(cohort), strict=True)
