"""Who may be in two runs at once, as far as their folders show it: unknown means shared.

Another name of a store is no proof of other people. What proves that nobody is in two runs is one division of one
store, known by its digest, into a seed part and a federation part; else somebody may declare it, and is quoted.

A run uses people besides its clients, without any promise to them: those it was chosen on, its server's own, its public
ones, and whoever its seed model has heard. A run makes sure that none of these is its own client; no run knows of
another's clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from sottovoce.errors import InputError
from sottovoce.report.records import Record, RunRecord

SEED_PART = "seed"


@dataclass(frozen=True)
class Declared:
    """Groups of runs, by label, of which somebody says that nobody is in two of them."""

    groups: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def read(cls, given: Sequence[str], labels: Sequence[str]) -> "Declared":
        """From options, each with labels between commas. Refuses a label that is not there, and one alone."""
        groups = []
        for words in given:
            group = tuple(dict.fromkeys(label.strip() for label in words.split(",")))
            for label in group:
                if label not in labels:
                    raise InputError(f"--disjoint {words}: no run is called {label!r}; expected {', '.join(labels)}")
            if len(group) < 2:
                raise InputError(f"--disjoint {words}: expected at least two runs, such as {','.join(labels[:2])}")
            groups.append(group)
        return cls(tuple(groups))

    def apart(self, one: str, other: str) -> bool:
        return one != other and any(one in group and other in group for group in self.groups)


NOBODY = Declared()


def share_people(one: RunRecord, other: RunRecord, declared: Declared = NOBODY) -> bool:
    """Whether somebody may be a client, or trained on, in both."""
    if declared.apart(one.label, other.label):
        return False
    parts = {_data(run).get("part") for run in (one, other)}
    return parts != {SEED_PART, "federation"} or not _same_store(one, other) or _division(one) != _division(other)


def same_silos(runs: Sequence[RunRecord]) -> bool:
    """Whether silos of the same name hold the same people in all of these runs: the number of silos, the rule by which
    people are assigned, and the store are known to be the same."""
    first = runs[0]
    return all(_same_store(first, run) and _silos(first) == _silos(run) for run in runs[1:])


@dataclass(frozen=True)
class Unprotected:
    """People whom a run uses without a promise: the `setting` that names them, and the `place`.

    `digest` is that of their store, or of the model that was trained on them, where it is known.
    """

    setting: str
    place: str
    digest: str | None

    def is_same(self, other: "Unprotected") -> bool:
        """By what is known: digests where both have one, and names."""
        digests = {self.digest, other.digest} - {None}
        return self._named == other._named and len(digests) < 2

    @property
    def _named(self) -> str:
        return PurePath(self.place).name


def unprotected_in(run: RunRecord, other: RunRecord, declared: Declared = NOBODY) -> tuple[Unprotected, ...]:
    """Whom `run` uses without a promise, and of whom nothing shows that they are no clients of `other`.

    What does: both runs have the same clients, or the same such people, so that one of them has compared the two.
    """
    if declared.apart(run.label, other.label) or _same_people(run, other):
        return ()
    compared = _unprotected(other)
    return tuple(one for one in _unprotected(run) if not any(one.is_same(known) for known in compared))


def is_protected_in(one: Unprotected, other: RunRecord) -> bool:
    """Whether these are, by name, people whom `other` protects."""
    store, _, split = one.place.rpartition(":")
    data = _data(other)
    return bool(store) and PurePath(store).name == _store(other) and split in (data.get("train") or ())


def _unprotected(run: RunRecord) -> list[Unprotected]:
    federation, data = run.federation, _data(run)
    named = {
        "data.dev": data.get("dev"),
        "federation.server_pass.data": (federation.get("server_pass") or {}).get("data"),
    }
    found = []
    for setting, name in named.items():
        if name:
            store, _, split = str(name).rpartition(":")
            store = store or str(data.get("store"))
            found.append(Unprotected(setting, f"{store}:{split}", run.inputs.get(f"{setting} digest")))
    seed = federation.get("seed_model") or (run.config.get("central") or {}).get("start_from")
    if seed:
        setting = "federation.seed_model" if federation else "central.start_from"
        found.append(Unprotected(setting, str(seed), run.inputs.get("start model digest")))
    return found


def _same_people(one: RunRecord, other: RunRecord) -> bool:
    """Whether both have the very same clients, however they are put into silos."""
    return _same_store(one, other) and _clients(one) == _clients(other)


def _clients(run: RunRecord) -> Mapping[str, object]:
    data, floor = _data(run), (run.federation.get("clients") or {}).get("min_seconds")
    if data.get("seed_part") is None:  # no seed decides then who is there
        return {"splits": data.get("train"), "min_seconds": floor}
    return {**_division(run), "part": data.get("part"), "min_seconds": floor}


def _silos(run: RunRecord) -> Mapping[str, object]:
    return {**_clients(run), "clients": (run.federation.get("clients") or {}), "people": _people_seed(run)}


def _same_store(one: RunRecord, other: RunRecord) -> bool:
    digests = [_digest(run) for run in (one, other)]
    return None not in digests and digests[0] == digests[1]


def _digest(run: RunRecord) -> str | None:
    """Of its store; a release tells nobody."""
    found: str | None = run.population.get("store_digest") or run.inputs.get("data.store digest")
    return found


def _data(run: RunRecord) -> Record:
    return run.config.get("data") or {}


def _store(run: RunRecord) -> str | None:
    """Its name, without the way there."""
    found = _data(run).get("store")
    return PurePath(found).name if found else None


def _division(run: RunRecord) -> Mapping[str, object]:
    """What decides who is in the seed part: two runs with the same divide the same people alike."""
    data = _data(run)
    return {"splits": data.get("train"), "seed_part": data.get("seed_part"), "seed": _people_seed(run)}


def _people_seed(run: RunRecord) -> object:
    seed = _data(run).get("people_seed")
    return run.config.get("seed") if seed is None else seed
