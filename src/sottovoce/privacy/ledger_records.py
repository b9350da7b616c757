"""The records of a ledger: what its header says, which record may follow which, and where they leave a run."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.privacy.accounting import RunningEpsilon
from sottovoce.privacy.chain import Chain, Record
from sottovoce.privacy.events import (
    Composition,
    Event,
    NoGuarantee,
    Release,
    composed,
    event_from_json,
    event_to_json,
    repeated,
)

VERSION = 1


class AttemptsUsed(Exception):
    """All attempts that people have accepted were charged. Nothing of another one was."""

    def __init__(self, what: str, *, accepted: int) -> None:
        super().__init__(f"all {accepted:,} attempts at {what} that people accepted have been made")


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a ledger is about. A run goes on only in a ledger with an equal header, but for its budget.

    `central_steps` is T, fixed before anything is released: the guarantee is ε of all of them. `inputs` is a digest of
    what a seeded run reads (the store, the parent model): replaying a step's noise over other data would let the two
    releases be subtracted. A secure run never replays, and has none: readers of its ledger could try guesses of the
    private data against it. `client_wer` is what each measurement of clients' WER releases, and how often
    (`ClientWer.in_ledger`). `accepted` is how many attempts at steps (`attempts`) and at measurements (`client_wers`)
    the people of a release over a network accepted, repeated ones included. `begun_ahead` is how many steps more than
    the next may be charged, where rounds overlap over a network. `recipe` is SHA-256 of the run's recipe.
    """

    run: str
    mode: Literal["seeded", "secure", "unrepeated"]
    plan: Mapping[str, object]
    event: Release | NoGuarantee
    delta: float
    epsilon_budget: float | None = None
    inputs: str = ""
    central_steps: int | None = None
    client_wer: Mapping[str, Any] | None = None
    accepted: Mapping[str, int] | None = None
    begun_ahead: int | None = None
    recipe: str | None = None

    def __post_init__(self) -> None:
        check_invariant(self.mode != "secure" or not self.inputs, "a digest of private data in the ledger of a release")

    def as_record(self) -> Record:
        names = ("central_steps", "client_wer", "accepted", "begun_ahead", "recipe")
        later = {name: getattr(self, name) for name in names}
        return {
            "kind": "header",
            "version": VERSION,
            "run": self.run,
            "mode": str(self.mode),
            "plan": dict(self.plan),
            "event": event_to_json(self.event),
            "delta": self.delta,
            "epsilon_budget": self.epsilon_budget,
            "inputs": self.inputs,
        } | {name: value for name, value in later.items() if value is not None}


@dataclass
class LedgerState:
    """Where a sequence of records leaves a run."""

    header: Record
    budget: float | None
    spent: RunningEpsilon
    intents: dict[int, Record] = field(default_factory=dict)  # the last attempt at each step
    attempts: int = 0
    last_step: int | None = None  # of the last intent
    top_step: int | None = None  # of all intents
    commits: dict[int, Record] = field(default_factory=dict)
    measured: dict[int, Record] = field(default_factory=dict)  # the last attempt after so many steps
    measured_attempts: int = 0
    results: Record | None = None  # where nothing was released after them
    length: int = 1
    released_length: int = 1  # without results at its end
    settled_length: int = 0  # up to the last commit, or results
    signer: str | None = None  # whom that names
    promised_budget: float | None = None  # that of the first release, unless it was changed since

    @property
    def has_released(self) -> bool:
        return self.attempts > 0 or self.measured_attempts > 0

    @property
    def committed_step(self) -> int | None:
        return max(self.commits, default=None)

    @property
    def begun_ahead(self) -> int:
        """How many steps may be charged beyond the one that is committed."""
        return int(self.header.get("begun_ahead", 0))

    @property
    def is_seeded(self) -> bool:
        return bool(self.header["mode"] == "seeded")

    def check_accepted(self, kind: str) -> None:
        """AttemptsUsed where another record of this `kind` would be more than people have accepted."""
        accepted = self.header.get("accepted")
        if accepted is None:
            return
        made, name, what = self.attempts, "attempts", "rounds"
        if kind == "client_wer":
            made, name, what = self.measured_attempts, "client_wers", "measuring clients' WER"
        if made >= accepted[name]:
            raise AttemptsUsed(what, accepted=accepted[name])


def start_state(header: Record) -> LedgerState:
    _release(header)
    if "client_wer" in header:
        _release(header["client_wer"])
    ahead = header.get("begun_ahead", 1)
    if not isinstance(ahead, int) or ahead < 1:
        raise InputError(f"begun_ahead={ahead!r}: expected a whole number, at least 1")
    for name, count in header.get("accepted", {}).items():
        if not isinstance(count, int) or count < 0:
            raise InputError(f"accepted.{name}={count!r}: expected a whole number, at least 0")
    budget = header["epsilon_budget"]
    return LedgerState(header, budget, RunningEpsilon(delta=header["delta"]), promised_budget=budget)


def check_record(state: LedgerState, record: Record) -> None:
    """Refuses a record that a run cannot have written here."""
    match record.get("kind"):
        case "intent":
            _check_accepted(state, "intent")
            _check_intent(state, record)
        case "client_wer":
            _check_accepted(state, "client_wer")
            _check_measured(state, record)
        case "commit":
            _check_commit(state, record)
        case "results":
            if not record["files"] or not all(isinstance(digest, str) for digest in record["files"].values()):
                raise InputError("results: expected a digest for each of their files")
        case "budget":
            if record["epsilon_budget"] is not None and not record["epsilon_budget"] > 0:
                raise InputError(f"epsilon_budget={record['epsilon_budget']}: expected a positive number")
        case kind:
            raise InputError(f"kind={kind!r}: expected intent, commit, client_wer, budget or results")


def _check_accepted(state: LedgerState, kind: str) -> None:
    try:
        state.check_accepted(kind)
    except AttemptsUsed as used:
        raise InputError(f"one more attempt, though {used}") from None


def _check_intent(state: LedgerState, record: Record) -> None:
    step, top, expected = record["step"], state.top_step, state.header["event"]
    if top is not None and (step > top + 1 or (state.is_seeded and step != top + 1)):
        raise InputError(f"step={step} after step {top}: a step is missing or repeated")
    if record["event"] != expected:
        raise InputError(f"event={record['event']} at step {step}: the header says {expected}")
    _check_charge(state, record, state.intents)


def _check_measured(state: LedgerState, record: Record) -> None:
    step, planned = record["step"], state.header.get("client_wer")
    if planned is None or record["event"] != planned["event"]:
        raise InputError(f"client_wer={record['event']} after step {step}: the header says {planned}")
    if state.top_step is None or not 0 < step <= state.top_step + 1 or (state.is_seeded and step in state.measured):
        raise InputError(f"client_wer after {step} steps: a step is missing, or it is repeated")
    _check_charge(state, record, state.measured)


def _check_charge(state: LedgerState, record: Record, known: Mapping[int, Record]) -> None:
    """The next attempt at its step, with the ε that its events add up to."""
    step, expected = record["step"], attempts_at(known, record["step"]) + 1
    if record["attempt"] != expected:
        raise InputError(f"attempt={record['attempt']} at step {step}: expected {expected}")
    _check_epsilon(record, state.spent.peek(_release(record)))


def _check_commit(state: LedgerState, record: Record) -> None:
    first, step = record["first"], record["step"]
    # A simulation that resumes may commit steps it had intended to go beyond; a release never goes back.
    committed = -1 if state.committed_step is None else state.committed_step
    last = state.last_step or 0
    expected = committed < step <= last if state.is_seeded else last - state.begun_ahead <= step <= last
    if not expected or first > step or any(s not in state.intents for s in range(first, step + 1)):
        raise InputError(f"commit of steps {first} to {step} after step {state.last_step}: not what was intended")
    _check_epsilon(record, state.spent.epsilon)


def _check_epsilon(record: Record, computed: float) -> None:
    """What a record says was spent is what was: equal, or as near as another version of the accountant may come."""
    written = math.inf if record["epsilon"] is None else record["epsilon"]
    if not math.isclose(written, computed, rel_tol=1e-6):
        raise InputError(f"epsilon={record['epsilon']} at step {record['step']}: its events add up to {computed}")


def apply_record(state: LedgerState, record: Record) -> None:
    """Moves the state on by one record that has been checked."""
    state.length += 1
    if record["kind"] != "results":
        state.released_length = state.length
    if record["kind"] != "budget":
        state.results = record if record["kind"] == "results" else None
    if record["kind"] in ("commit", "results"):
        state.settled_length, state.signer = state.length, record.get("signer")
    match record["kind"]:
        case "intent":
            step = record["step"]
            state.spent.add(_release(record))
            state.intents[step] = record
            state.attempts += 1
            state.last_step = step
            state.top_step = step if state.top_step is None else max(state.top_step, step)
        case "commit":
            state.commits[record["step"]] = record
        case "client_wer":
            state.spent.add(_release(record))
            state.measured[record["step"]] = record
            state.measured_attempts += 1
        case "budget":
            state.budget = budget = record["epsilon_budget"]
            # One that is changed after a release may be so for what was released: it promises nothing any more.
            state.promised_budget = None if state.has_released else budget


def attempts_at(known: Mapping[int, Record], step: int) -> int:
    return known[step]["attempt"] if step in known else 0


def _release(record: Record) -> Release | NoGuarantee:
    event = event_from_json(record["event"])
    if not isinstance(event, Composition):
        return event
    raise InputError("event: expected one release")


def replay(path: Path, chain: Chain) -> LedgerState:
    if not chain.records or chain.records[0].get("kind") != "header":
        raise InputError(f"{path}: expected a header in its first line")
    header = chain.records[0]
    if header.get("version") != VERSION:
        raise InputError(f"{path}: version={header.get('version')}, expected {VERSION}")
    with _at(f"{path} line 1"):
        state = start_state(header)
    for number, record in enumerate(chain.records[1:], start=2):
        with _at(f"{path} line {number}"):
            check_record(state, record)
            apply_record(state, record)
    return state


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Says where a record is that cannot be what a run wrote."""
    try:
        yield
    except KeyError as missing:
        raise InputError(f"{place}: {missing} is missing") from missing
    except (InputError, TypeError) as problem:
        raise InputError(f"{place}: {problem}") from problem


def spent_event(state: LedgerState) -> Event:
    rounds = repeated(_release(state.header), state.attempts)
    planned = state.header.get("client_wer")
    return rounds if planned is None else composed(rounds, repeated(_release(planned), state.measured_attempts))
