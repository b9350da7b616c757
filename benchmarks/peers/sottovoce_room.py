"""The workload as Sottovoce takes it: its users as a store and a population, its batches and draws in a client's room.

A module of its own, because worker processes import it by name. The room overrides where batches and draws come from
(so that they are the workload's, as for everybody else) and nothing of how they are trained.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from sottovoce.models.recogniser import StepDraws, draw_steps
from workload import (
    CLIP_GRADIENTS,
    LOCAL_LR,
    SEED,
    TOKENS,
    WORKLOADS,
    Workload,
    batch_checksum,
    user,
)

from sottovoce.audio.batches import Batch, client_batches
from sottovoce.federated.client import ClientRoom, LocalTraining
from sottovoce.models.speech import Speech
from sottovoce.models.transformer.network import Draws
from sottovoce.privacy.sampling import Indices
from sottovoce.seeds import derive, name_key, torch_stream
from sottovoce.store import Store
from sottovoce.text.tokens import CharacterTokens
from sottovoce.users import PopulationSettings, build_population
from sottovoce.users.population import Client

LETTERS = CharacterTokens("".join(chr(ord("A") + number) for number in range(1, TOKENS)))


class UsersInMemory(Store):
    """A store of the workload's users, who lie in memory as they do for the other contestants."""

    def __init__(self, name: str) -> None:
        workload = WORKLOADS[name]
        users = [user(workload, number) for number in range(workload.users)]
        self._all_samples = [samples for one in users for samples in one.samples]
        self._all_tokens = [tokens for one in users for tokens in one.tokens]
        lengths = [len(samples) for samples in self._all_samples]
        self.name, self.language, self.path, self.digest = name, "en", Path(name), name
        self.splits = {"train": range(workload.users)}
        self.audio_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.user_utterances = np.concatenate([[0], np.cumsum([len(one.samples) for one in users])]).astype(np.int64)
        self.user_keys = np.array([name_key(str(number)) for number in range(workload.users)], dtype=np.uint64)

    def __reduce__(self) -> Any:
        return (UsersInMemory, (self.name,))

    def samples(self, row: int) -> Any:
        return self._all_samples[row]

    def utterance(self, row: int) -> Any:
        return SimpleNamespace(text=LETTERS.decode(self._all_tokens[row]))

    def user(self, row: int) -> Any:
        return SimpleNamespace(name=str(row))


@dataclass(frozen=True, eq=False)
class WorkloadRoom(ClientRoom):
    """Batches and draws are the workload's. What was planned travels back with what a client leaves out: nothing."""

    name: str = ""

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.name]

    def speech(self, client: Client) -> Speech:
        return replace(super().speech(client), left_out={})  # each round counts for itself

    def plan_batches(self, client: Client, speech: Speech, *, step: int) -> Iterator[Batch]:
        number = int(client.id)
        batches = client_batches(
            speech.lengths,
            max_seconds=self.local.batch_seconds,
            seed=derive(SEED, "client", step, number),
            local_steps=self.local.local_steps,
            fixed_shapes=True,
        )
        for index, batch in enumerate(batches):
            lengths = [int(speech.lengths[row]) for row in batch.rows]
            sums = [int(speech.tokens[row].sum()) for row in batch.rows]
            shape = (len(batch.rows), batch.padded_samples, *lengths, *sums)
            _count(speech.left_out, steps=1, checksum=batch_checksum(f"{step}/{number}/{index}", shape))
            yield batch

    def draws(self, client: Client, speech: Speech, batches: Sequence[Batch], *, step: int) -> list[StepDraws]:
        settings = self.model
        if not self.workload.drop:
            none = StepDraws(masks=None, model=Draws(tuple(range(settings.layers)), positions=None, dropout_seed=0))
            return [none] * len(batches)
        drawn = []
        for local_step, batch in enumerate(batches):
            drawn += draw_steps(
                [len(batch.rows)],
                samples=[batch.padded_samples],
                settings=settings,
                spec_augment=self.workload.spec_augment,
                generator=torch_stream(SEED, "draws", step, int(client.id), local_step),
            )
        return drawn


def _count(tally: dict[str, int], **amounts: int) -> None:
    for name, amount in amounts.items():
        tally[name] = tally.get(name, 0) + amount


def workload_room(name: str) -> WorkloadRoom:
    workload = WORKLOADS[name]
    population = build_population(UsersInMemory(name), PopulationSettings(split=("train",)), seed=SEED)
    local = LocalTraining(
        batch_seconds=workload.batch_seconds,
        lr=LOCAL_LR,
        local_steps=workload.local_steps,
        clip_gradients=CLIP_GRADIENTS,
        spec_augment=workload.spec_augment,
    )
    return WorkloadRoom(
        population, LETTERS, workload.settings, local, seed=SEED, cohort_size=workload.cohort_size, name=name
    )


def indices_of(room: ClientRoom) -> Callable[[Sequence[int]], Indices]:
    """Gives the clients that are the users of some numbers."""
    place = {int(client.id): client.index for client in room.population}
    return lambda numbers: np.array([place[number] for number in numbers], dtype=np.int64)
