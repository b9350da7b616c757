"""The workload as Sottovoce takes it: its users as a store and a population, and a plain client's context around them.

A module of its own, because worker processes import it by name.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from workload import CLIP_GRADIENTS, LOCAL_LR, SEED, TOKENS, WORKLOADS, Tally, step_name, user

from sottovoce.base.seeds import name_key
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.federated.client import ClientContext, LocalTraining, plan_client
from sottovoce.privacy.sampling import Indices

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

    def samples(self, row: int, *, start: int = 0, count: int | None = None) -> Any:
        return self._all_samples[row][start : None if count is None else start + count]

    def utterance(self, row: int) -> Any:
        return SimpleNamespace(text=LETTERS.decode(self._all_tokens[row]))

    def user(self, row: int) -> Any:
        return SimpleNamespace(name=str(row))


def workload_context(name: str) -> ClientContext:
    workload = WORKLOADS[name]
    population = build_population(UsersInMemory(name), PopulationSettings(split=("train",)), seed=SEED)
    local = LocalTraining(
        batch_seconds=workload.batch_seconds,
        lr=LOCAL_LR,
        local_steps=workload.local_steps,
        clip_gradients=CLIP_GRADIENTS,
        spec_augment=workload.spec_augment,
    )
    return ClientContext(
        population,
        LETTERS,
        workload.family,
        workload.settings,
        local,
        seed=SEED,
        cohort_size=workload.cohort_size,
    )


def planned_work(context: ClientContext, clients: Indices, *, round_number: int) -> Tally:
    """What these clients will compute in a round, by what they plan themselves."""
    tally = Tally()
    for index in clients.tolist():
        planned = plan_client(context, index, step=round_number)
        speech = planned.speech
        for local_step, batch in enumerate(planned.batches):
            tally.add(
                step_name(planned.client.id, round_number=round_number, local_step=local_step),
                lengths=speech.lengths[batch.rows].tolist(),
                token_sums=[int(speech.tokens[row].sum()) for row in batch.rows],
            )
    return tally


def indices_of(context: ClientContext) -> Callable[[Sequence[int]], Indices]:
    """Gives the clients that are the users of some numbers."""
    place = {int(client.id): client.index for client in context.population}
    return lambda numbers: np.array([place[number] for number in numbers], dtype=np.int64)
