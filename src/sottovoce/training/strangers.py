"""People who are called public are no clients: not by name, and not by what is to be heard of them."""

import numpy as np

from sottovoce.errors import InputError
from sottovoce.models.speech import Rows
from sottovoce.store import Store
from sottovoce.training.seeding import Keys, check_strangers
from sottovoce.training.speakers import store_of
from sottovoce.users.population import Population

GLIMPSE = 256  # samples out of the middle, by which two recordings are first compared


def check_public(where: str, store: Store, *, keys: Keys, rows: Rows, clients: Population, instead: str) -> None:
    """Refuse people of `store` with these `keys`, who have said `rows`, where a client is heard, and say what is right.

    `where` is the setting that calls them public.
    """
    check_strangers(clients, {where: keys}, instead=instead)
    if (heard := heard_twice(clients, store, rows)) is not None:
        name = store.utterance(heard).id
        raise InputError(f"{where}: utterance {name} is a client's too, sample for sample, whatever its speaker's name")


def heard_twice(population: Population, store: Store, rows: Rows) -> int | None:
    """The first of `rows` whose samples a client of `population` has too; None where there is none.

    Of all that the clients have, only what is as long as one of `rows` is looked at, and read whole only where its
    middle is the same.
    """
    clients = store_of(population)
    theirs = population.utterance_rows()
    lengths = store.audio_offsets[rows + 1] - store.audio_offsets[rows]
    their_lengths = clients.audio_offsets[theirs + 1] - clients.audio_offsets[theirs]
    public: dict[tuple[int, bytes], list[int]] = {}
    for row in rows[lengths > 0].tolist():
        public.setdefault(_glimpse(store.samples(row)), []).append(row)
    for row in theirs[np.isin(their_lengths, lengths[lengths > 0])].tolist():
        samples = clients.samples(row)
        for other in public.get(_glimpse(samples), ()):
            if np.array_equal(samples, store.samples(other)):
                return other
    return None


def _glimpse(samples: np.ndarray) -> tuple[int, bytes]:
    middle = max(0, (len(samples) - GLIMPSE) // 2)
    return len(samples), samples[middle : middle + GLIMPSE].tobytes()
