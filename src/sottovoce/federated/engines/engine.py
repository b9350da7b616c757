"""The interface of engines, and what those share that train in this process."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.waveforms import Features
from sottovoce.federated.client import ClientContext, LoadedClient, PlannedClient, load_client, plan_client
from sottovoce.federated.feature_cache import FeatureCache, SizedCache, feature_cache_bytes
from sottovoce.federated.weighting import ClientFigures

T = TypeVar("T")

PLANS_BYTES = 2**26  # of a cohort's plans, from when its groups are formed until its speech is read


@dataclass(frozen=True, eq=False)
class Trained:
    """The updates θ_server − θ_local of one client [P] or of several [N, P]; valid until the next are asked for.

    `losses` (mean local loss) and `gradient_norms` (mean over local steps, before local clipping) are on the device,
    and for a simulation's diagnostics. `figures` is what weights may depend on; `audio_seconds` what was trained on.
    """

    update: Tensor
    clients: tuple[int, ...]
    losses: Tensor
    figures: tuple[ClientFigures, ...]
    audio_seconds: float
    gradient_norms: Tensor | None = None


@dataclass(frozen=True)
class Dropped:
    """A client that could not be trained, and why. Its update counts as zero; the sum is still divided by S."""

    client: int
    reason: str


@dataclass(frozen=True, eq=False)
class JointSum:
    """Σ ω·update of several clients [P], each one's loss, and who had no part in it."""

    sum_P: Tensor
    losses_N: Tensor
    dropped: tuple[Dropped, ...]


@dataclass(frozen=True, eq=False)
class JointlyTrained:
    """Several clients without single updates: `sum`, given their weights, is all that is computed."""

    clients: tuple[int, ...]
    figures: tuple[ClientFigures, ...]
    audio_seconds: float
    sum: Callable[[Sequence[float]], JointSum]


def drop_or_raise(client: int, error: Exception, *, forgiving: bool) -> Dropped:
    """`client`, dropped because of `error`; raises the error where it is a bug of ours and not the client's accident.

    A `forgiving` engine cannot tell these two apart, nor may it: a release that failed or not depending on the cohort,
    and was tried again with others, would choose cohorts by a person's data, which nothing accounts for.
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

    def close(self) -> None:  # noqa: B027  # few engines hold anything
        """Give back what it holds besides memory."""

    def expect(self, cohort: Sequence[int], *, step: int) -> None:  # noqa: B027  # few engines read ahead
        """Be told who will probably be trained after the next `train`, at `step`: their speech may be read meanwhile.

        It changes nothing but the time that this takes.
        """

    @abstractmethod
    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | JointlyTrained | Dropped]:
        """Local training of every client in `cohort`, starting from the server's model [P].

        `positions` is where each of them stands in its stream, where it has one; None is at the beginning.
        """


class Member(NamedTuple):
    """A client of a cohort whose groups are formed before anything is read: what they are formed by."""

    client: int
    position: int
    steps: int
    padded_samples: int


class InProcessEngine(Engine):
    """One that plans, reads and trains clients in this process, and drops those with which something goes wrong."""

    def __init__(self, context: ClientContext, device: torch.device, dtype: torch.dtype) -> None:
        self._context, self._device, self._dtype = context.on(device, dtype), device, dtype
        self._cache = FeatureCache(feature_cache_bytes(device))
        self._plans: SizedCache[PlannedClient] = SizedCache(PLANS_BYTES)

    def _drop(self, client: int, error: Exception) -> Dropped:
        return drop_or_raise(client, error, forgiving=self._context.forgiving)

    def _plan_cohort(
        self, cohort: Sequence[int], positions: Sequence[int] | None, step: int
    ) -> tuple[list[Member], list[Dropped]]:
        """All of `cohort`, by a few numbers for each; plans and texts of a large one would take gigabytes."""
        members, dropped = [], []
        self._plans = SizedCache(PLANS_BYTES)
        for index, position in with_positions(cohort, positions):
            try:
                planned = plan_client(self._context, index, step=step, position=position)
            except Exception as error:
                dropped.append(self._drop(index, error))
            else:
                self._plans.keep(index, planned, size=planned.held_bytes)
                members.append(Member(index, position, len(planned.batches), planned.padded_samples))
        return members, dropped

    def _load_member(self, member: Member, step: int) -> LoadedClient | Dropped:
        """`member` with its speech; what was not kept of its plan is made again, and comes out the same."""
        try:
            planned = self._plans.take(member.client) or plan_client(
                self._context, member.client, step=step, position=member.position
            )
        except Exception as error:
            return self._drop(member.client, error)
        return self._load(planned, step)

    def _load(self, planned: PlannedClient, step: int) -> LoadedClient | Dropped:
        try:
            return load_client(self._context, planned, step=step, device=self._device, cache=self._cache)
        except Exception as error:
            return self._drop(planned.client.index, error)

    def _features(self, member: LoadedClient) -> Features:
        return member.extract_features(self._cache, self._context, dtype=self._dtype)

    def _time_waits(self, loading: Iterator[T]) -> Iterator[T]:
        """The items of `loading`, with the time that each one kept training waiting added to `waited`."""
        self.waited = 0.0
        while True:
            asked = time.perf_counter()
            item = next(loading, None)
            self.waited += time.perf_counter() - asked
            if item is None:
                return
            yield item


def with_positions(cohort: Sequence[int], positions: Sequence[int] | None) -> Iterator[tuple[int, int]]:
    """Each client and its position."""
    return zip(cohort, positions or [0] * len(cohort), strict=True)
