"""The ledger: what a run has spent, written down before it is spent.

A header says what the run is. Before each release an *intent* is on the disk (step, attempt, event, clip bound, digest
of the parameters, commitment to the cohort, ε so far). Each checkpoint adds a *commit* with digests of the result and
of the saved model, the end *results* with digests of the folder's files, and a changed budget a *budget*. Each
measurement of clients' word error rate is a *client_wer* with the fields of an intent; its step is how many were made
before. A `Charge`, from `intend` or `measure`, pays for one release. There is no clock in it: a resumed simulation
writes the same bytes as one that was never interrupted.

    seeded      steps after the checkpoint are done again with the same cohort and noise: checked, and charged once
    secure      steps after the checkpoint are new attempts with new cohort and noise: charged again
    unrepeated  a simulation whose arithmetic does not repeat itself to the bit (on a GPU): as secure, from a seed
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.base.signatures import SigningKey, fingerprint
from sottovoce.privacy.chain import Chain, ChainWriter, Mark, Record, read_chain
from sottovoce.privacy.events import NoGuarantee, Release, event_to_json
from sottovoce.privacy.ledger_records import (
    Header,
    apply_record,
    attempts_at,
    check_record,
    replay,
    spent_event,
    start_state,
)
from sottovoce.privacy.ledger_report import LedgerReport, json_number, write_ledger_signature
from sottovoce.privacy.sampling import Indices


class BudgetSpent(Exception):
    """The next step would exceed the privacy budget: the run ends here, as it was asked to; no error.

    Nothing of that step was charged or released.
    """

    def __init__(self, *, step: int, epsilon: float, epsilon_next: float, epsilon_budget: float) -> None:
        super().__init__(
            f"step {step} would bring epsilon from {epsilon:.4g} to {epsilon_next:.4g}, "
            f"above epsilon_budget={epsilon_budget:g}"
        )
        self.step, self.epsilon, self.epsilon_next, self.epsilon_budget = step, epsilon, epsilon_next, epsilon_budget


@final
class Charge:
    """A step that is paid for: the right to release one noised sum and, in adaptive clipping, one noised count.

    Guarantee: each at most once. Only a `Ledger` makes one, but for tests and measurements that release nothing.
    """

    def __init__(
        self, event: Release | NoGuarantee, *, step: int, clip_bound: float, attempt: int = 1, row: int | None = None
    ) -> None:
        self.event, self.step, self.clip_bound, self.attempt = event, step, clip_bound, attempt
        self.row = step if row is None else row  # of noise that is correlated over rounds
        self.epsilon: float | None = None  # so far, this step included; None without a guarantee
        self._released: set[str] = set()

    def release(self, what: Literal["sum", "count"]) -> int:
        """Uses up the right to `what`; returns the step."""
        check_invariant(
            what not in self._released, f"step {self.step}: a second {what} for one charge, which pays for one"
        )
        self._released.add(what)
        return self.step


def cohort_commitment(cohort: Indices, *, nonce: bytes) -> str:
    """A commitment to the cohort: a digest that reveals nothing about it without the nonce."""
    indices = np.ascontiguousarray(cohort, dtype="<i8").tobytes()
    return hashlib.blake2b(indices, key=nonce, digest_size=32, person=b"cohort").hexdigest()


@final
class Ledger:
    """A run's open ledger.

    Guarantee: when `intend` returns, the charge is on the disk, and no step is charged twice while it is open. It
    raises `BudgetSpent` rather than exceed the budget, by the RDP ε (an upper bound). `repaired` says what was mended
    on opening, or is None.
    """

    def __init__(
        self, path: Path, *, header: Header, checkpoint: Mark | None = None, key: SigningKey | None = None
    ) -> None:
        """Starts the ledger, or goes on with an existing one from `checkpoint` (None: the run starts over).

        Refuses a file that was changed, cut or rolled back behind the checkpoint, that belongs to another run or is
        open in another process. With a `key` the head is signed at every commit.
        """
        self._path, self._key = path, key
        if checkpoint is not None and not path.exists():
            raise InputError(f"{path} is missing: the checkpoint knows a ledger of {checkpoint.length} lines")
        self._writer = ChainWriter(path)
        try:
            self._open(path, header.as_record(), checkpoint)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, header: Record, checkpoint: Mark | None) -> None:
        chain = self._writer.chain
        self._base = _committed_before(path, chain, checkpoint)
        if chain.records:
            self._state = replay(path, chain)
            _check_same_run(path, self._state.header, header)
        else:  # new, or killed while writing its very first line
            self._state = start_state(header)
        self._writer.cut_torn_end()
        torn = f"{path}: removed {chain.torn} bytes of a last line that was never finished"
        self.repaired = torn if chain.torn else None
        if not chain.records:
            self._writer.append(header)
        elif self._state.budget != header["epsilon_budget"]:  # no part of what was released: it may change
            self._write({"kind": "budget", "epsilon_budget": header["epsilon_budget"]})
        self._next = min(self._state.intents, default=None) if self._base is None else self._base + 1
        self._measured: int | None = None  # after so many steps, since it was opened

    def _write(self, record: Record) -> Mark:
        check_record(self._state, record)
        mark = self._writer.append(record)
        apply_record(self._state, record)
        return mark

    @property
    def epsilon(self) -> float:
        """ε of everything charged so far, by RDP; infinite without a guarantee."""
        return self._state.spent.epsilon

    @property
    def mark(self) -> Mark:
        """Length and head, for the checkpoint."""
        return self._writer.mark

    def next_attempt(self, step: int) -> int:
        """Which attempt at `step` the next one is: the first, unless a crash has lost what was charged for."""
        return self._next_attempt(self._state.intents, step)

    def next_measurement(self, step: int) -> int:
        """The same for measuring clients' word error rate after `step` steps."""
        return self._next_attempt(self._state.measured, step)

    def next_row(self, step: int) -> int:
        """Which row of correlated noise `step` gets: one that no attempt has had, but for a step that is done again."""
        return step if self._state.is_seeded else self._state.attempts

    def _next_attempt(self, known: Mapping[int, Record], step: int) -> int:
        return 1 if self._state.is_seeded else attempts_at(known, step) + 1

    def intend(
        self, event: Release | NoGuarantee, *, step: int, clip_bound: float, parameters: str, cohort: str
    ) -> Charge:
        """Charges `step` before anything of it is released; the plan calls it (`Plan.charge`).

        BudgetSpent, or AttemptsUsed, before anything is charged. `parameters` is a digest of the model before the step,
        `cohort` the commitment to who takes part. A step that a seeded run charged before it was interrupted is
        compared and not charged again.
        """
        expected = self._state.header["event"]
        check_invariant(event_to_json(event) == expected, f"event={event}: the plan accounts for {expected}")
        check_invariant(self._next in (None, step), f"step={step}: the step after the last is {self._next}")
        attempt, row = self.next_attempt(step), self.next_row(step)
        charge = Charge(event, step=step, clip_bound=clip_bound, attempt=attempt, row=row)
        self._pay(charge, "intent", parameters=parameters, cohort=cohort)
        self._next = step + 1
        return charge

    def measure(
        self, event: Release | NoGuarantee, *, step: int, clip_bound: float, parameters: str, cohort: str
    ) -> Charge:
        """Charges one measurement of clients' word error rate after `step` steps, as `intend` charges a step."""
        planned = self._state.header.get("client_wer")
        is_planned = planned is not None and event_to_json(event) == planned["event"]
        check_invariant(is_planned, f"event={event}: the header accounts for {planned}")
        check_invariant(step == self._next, f"client_wer after {step} steps: the step after the last is {self._next}")
        check_invariant(step not in (0, self._measured), f"client_wer after {step} steps: a second one, or of nothing")
        charge = Charge(event, step=step, clip_bound=clip_bound, attempt=self.next_measurement(step))
        self._pay(charge, "client_wer", parameters=parameters, cohort=cohort)
        self._measured = step
        return charge

    def _pay(self, charge: Charge, kind: Literal["intent", "client_wer"], *, parameters: str, cohort: str) -> None:
        """Write `charge` down, unless a seeded run has done so before; BudgetSpent where that is too much."""
        state, step = self._state, charge.step
        bound = json_number(charge.clip_bound)
        inputs = {"event": event_to_json(charge.event), "clip_bound": bound, "parameters": parameters, "cohort": cohort}
        known = state.intents if kind == "intent" else state.measured
        before = known.get(step)
        if before is not None and state.is_seeded:
            _check_same_inputs(before, inputs)
            charge.epsilon = before["epsilon"]
            return
        state.check_accepted(kind)
        after = state.spent.peek(charge.event)
        if state.budget is not None and after > state.budget:
            raise BudgetSpent(step=step, epsilon=self.epsilon, epsilon_next=after, epsilon_budget=state.budget)
        attempt, charge.epsilon = attempts_at(known, step) + 1, json_number(after)
        self._write({"kind": kind, "step": step, "attempt": attempt, **inputs, "epsilon": charge.epsilon})

    def commit(self, *, step: int, result: str, model: Mapping[str, str] | None = None) -> Mark:
        """Seals the steps since the last commit with the digest of their result; the mark goes into the checkpoint.

        `model` are SHA-256 digests of the model that the checkpoint will hold (`models.recogniser.digest_recogniser`).
        """
        state = self._state
        if state.is_seeded and state.committed_step is not None and step <= state.committed_step:
            self.check_restored(step=step, result=result, model=model)
            self._base = step
            self._sign()
            return self.mark
        check_invariant(step in state.intents, f"step={step}: a commit of what was never intended")
        since = state.committed_step if state.is_seeded else self._base
        record: Record = {
            "kind": "commit",
            "first": min(state.intents) if since is None else since + 1,
            "step": step,
            "result": result,
            "epsilon": json_number(state.spent.epsilon),
        }
        if model is not None:
            record["model"] = dict(model)
        mark = self._write(record | _named(self._key))
        self._base = step
        self._sign()
        return mark

    def _sign(self) -> None:
        if self._key is not None:
            write_ledger_signature(self._path, self.mark, key=self._key)

    def check_restored(self, *, step: int, result: str, model: Mapping[str, str] | None = None) -> None:
        """Refuse what is not the result of `step` that was committed, or not the `model` of it, where that is known."""
        known = self._state.commits.get(step)
        if known is not None and known["result"] != result:
            raise InputError(f"step {step} was done again and gave another result: {result}, not {known['result']}")
        for name, digest in (model or {}).items():
            if known is not None and known.get("model", {}).get(name, digest) != digest:
                raise InputError(f"the {name} of the model after step {step} are not those that were committed")

    def check_parameters(self, *, step: int, parameters: str) -> None:
        """Refuse `parameters` that are not of the model before `step`, where that was charged."""
        known = self._state.intents.get(step)
        if known is not None and known["parameters"] != parameters:
            raise InputError(f"the model before step {step} is {parameters}, not {known['parameters']}")

    def close(self) -> None:
        self._writer.close()


def _named(key: SigningKey | None) -> Record:
    """Who signs, for the ledger itself: a signature that is taken away is missed."""
    return {} if key is None else {"signer": fingerprint(key.public_key()).hex()}


def record_results(
    path: Path,
    files: Mapping[str, str],
    *,
    key: SigningKey | None = None,
    signed_files: Mapping[str, str] | None = None,
) -> Mark:
    """Write down how a run has ended: digests of `files` of its folder by name. Once: the same again adds nothing.

    With a `key` the head is signed, and with it digests of `signed_files`.
    """
    writer = ChainWriter(path)
    try:
        state = replay(path, writer.chain)
        record = {"kind": "results", "files": dict(files), **_named(key)}
        check_record(state, record)
        if state.results != record:
            writer.cut_torn_end()
            writer.append(record)
        if key is not None:
            write_ledger_signature(path, writer.mark, key=key, files=signed_files)
        return writer.mark
    finally:
        writer.close()


def _check_same_run(path: Path, found: Record, expected: Record) -> None:
    # A budget may change. Of how many steps are planned, and by which recipe, older ledgers say nothing.
    later = {name: expected.get(name) for name in ("central_steps", "recipe")}
    known = {"epsilon_budget": found.get("epsilon_budget"), **later}
    difference = _first_difference(known | found, expected | {"epsilon_budget": known["epsilon_budget"]})
    if difference is not None:
        name, old, new = difference
        raise InputError(f"{path} belongs to another run: it says {name}={old}, this run has {new}")


def _first_difference(old: Any, new: Any, name: str = "") -> tuple[str, object, object] | None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            found = _first_difference(old.get(key), new.get(key), f"{name}.{key}" if name else key)
            if found is not None:
                return found
        return None
    return None if old == new else (name, old, new)


def _committed_before(path: Path, chain: Chain, checkpoint: Mark | None) -> int | None:
    """The step of the checkpoint: of the last commit among the lines it knew. Refuses a file that has lost some."""
    if checkpoint is None:
        return None
    if len(chain.records) < checkpoint.length:
        raise InputError(
            f"{path} has {len(chain.records)} lines, the checkpoint knows {checkpoint.length}: it was shortened or "
            "rolled back, and what it forgot has been spent"
        )
    if checkpoint.length < 1 or chain.hashes[checkpoint.length - 1] != checkpoint.head:
        raise InputError(f"{path} is not the ledger that the checkpoint knew: line {checkpoint.length} differs")
    commits = [record["step"] for record in chain.records[: checkpoint.length] if record.get("kind") == "commit"]
    return commits[-1] if commits else None


def _check_same_inputs(known: Record, now: Record) -> None:
    for name, value in now.items():
        if known[name] != value:
            raise InputError(
                f"step {known['step']} was charged with {name}={known[name]} and now has {value}: the same noise over "
                "changed inputs would cancel; start a new run"
            )


def verify(path: Path, *, checkpoint: Mark | None = None) -> LedgerReport:
    """Reads and checks a ledger without touching it; raises InputError with what is wrong.

    Only a `checkpoint` can show that whole lines are missing at its end.
    """
    if not path.is_file():
        raise InputError(f"{path}: no ledger there")
    chain = read_chain(path)
    _committed_before(path, chain, checkpoint)
    state = replay(path, chain)
    return LedgerReport(
        path=path,
        torn_bytes=chain.torn,
        hashes=chain.hashes,
        mark=chain.mark,
        header=state.header,
        epsilon_budget=state.budget,
        steps=len(state.intents),
        attempts=state.attempts,
        committed_step=state.committed_step,
        spent=spent_event(state),
        measured=len(state.measured),
        measured_attempts=state.measured_attempts,
        commits=state.commits,
        parameters={step: record["parameters"] for step, record in state.intents.items()},
        results=state.results,
        released=Mark(state.released_length, chain.hashes[state.released_length - 1]),
        settled_length=state.settled_length,
        signer=state.signer,
        promised_budget=state.promised_budget,
    )
