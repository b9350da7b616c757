"""What is promised: ε of all the steps that a run set out to make, and of several runs together.

When a run stops is often decided by looking at what it has released: no better model, or somebody who does not go on.
ε at such a moment is no guarantee, since the moment itself tells something; what was promised before the first release,
ε of the whole plan, is one. A budget ends a run by its accounts alone, so that its ε may stand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sottovoce.errors import InputError
from sottovoce.privacy.accounting import Epsilon, RunningEpsilon, epsilon
from sottovoce.privacy.calibration import steps_for
from sottovoce.privacy.client_wer import is_due, planned
from sottovoce.privacy.events import (
    Composition,
    CorrelatedRelease,
    Event,
    GaussianRelease,
    NoGuarantee,
    Release,
    accounted,
    composed,
    event_from_json,
    parts_of,
    repeated,
    replaced,
)
from sottovoce.privacy.ledger_report import LedgerReport
from sottovoce.units import PrivacyUnit, unit_named


@dataclass(frozen=True)
class Promise:
    """A run's promise: `steps` of them, of which `made` are made. `event` is all of it, repeated attempts included.

    `measured` is how often clients' word error rate is measured, in all of them. `outside` is what it rests on that is
    not part of this package (`outside.rests_on`).
    """

    event: Event
    delta: float
    privacy_unit: str | None
    simulated: bool
    steps: int
    made: int
    measured: int = 0
    outside: str | None = None

    @cached_property
    def epsilon(self) -> Epsilon:
        return epsilon(self.event, self.delta)

    @property
    def unit(self) -> PrivacyUnit:
        """Whom ε is for."""
        return unit_named(self.privacy_unit or "client")

    @property
    def event_inside(self) -> Event | None:
        """What is released of one person inside a unit that holds several; None where a unit is one person."""
        return None if self.unit.inside is None else replaced(self.event)

    @cached_property
    def epsilon_inside(self) -> Epsilon | None:
        """ε of that person, at the same δ: larger than the unit's, since their speech changes the unit's update by up
        to twice the clip bound."""
        return None if self.event_inside is None else epsilon(self.event_inside, self.delta)

    @property
    def release(self) -> Release | NoGuarantee:
        """One step."""
        return parts_of(self.event)[0][0]

    @property
    def words(self) -> str | None:
        """What is promised and how much of it is made; None without a guarantee."""
        if isinstance(self.release, NoGuarantee):
            return None
        measured = f" and {self.measured:,} WERs of clients" if self.measured else ""
        told = f"ε = {both(self.epsilon)} promised for {self.steps:,} rounds{measured}; {self.made:,} made"
        return "; ".join(filter(None, (told, self.words_inside, self.outside)))

    @property
    def words_inside(self) -> str | None:
        """What is promised to one person inside a unit that holds several."""
        if self.epsilon_inside is None or isinstance(self.release, NoGuarantee):
            return None
        return f"that is for {self.unit.one}; for one {self.unit.inside} inside it ε = {both(self.epsilon_inside)}"


def promise_of(ledger: LedgerReport, *, central_steps: int | None = None) -> Promise:
    """The promise of the run behind a ledger; `central_steps` is its T where the ledger does not say it (older ones).

    Steps that are still to come are promised with those that are made, each repeated attempt on top. A budget takes
    away what it would not allow.
    """
    release, attempts = parts_of(ledger.spent)[0][0], ledger.attempts
    delta, steps = ledger.header["delta"], ledger.header.get("central_steps") or central_steps or 0
    if not isinstance(steps, int):
        raise InputError(f"{ledger.path} line 1: central_steps={steps!r}: expected a whole number")
    if ledger.header.get("client_wer") is not None:
        return _with_client_wer(ledger, release, steps)
    left = max(steps - ledger.steps, 0)
    if left and ledger.epsilon_budget is not None:
        left = min(left, max(_affordable(release, ledger.epsilon_budget, delta=delta) - attempts, 0))
    return _promise(ledger, repeated(release, attempts + left), steps=ledger.steps + left)


def _promise(ledger: LedgerReport, event: Event, *, steps: int, measured: int = 0) -> Promise:
    return Promise(
        event=event,
        delta=ledger.header["delta"],
        privacy_unit=(ledger.header.get("plan") or {}).get("privacy_unit"),
        simulated=ledger.header["mode"] != "secure",
        steps=steps,
        made=ledger.steps,
        measured=measured,
        outside=ledger.outside,
    )


def _with_client_wer(ledger: LedgerReport, release: Release | NoGuarantee, steps: int) -> Promise:
    """The same where clients' word error rate is measured between the rounds: all that is still to come of both."""
    told = ledger.header["client_wer"]
    every, measure = told.get("every"), event_from_json(told["event"])
    if every is not None and not (isinstance(every, int) and every > 0):
        raise InputError(f"{ledger.path} line 1: client_wer.every={every!r}: expected a whole number, or none")
    rounds = max(steps - ledger.steps, 0)
    measured = max(planned(max(steps, ledger.steps), every=every) - ledger.measured, 0)
    if ledger.epsilon_budget is not None:
        rounds, measured = _paid_for(ledger, release, measure, rounds, measured, steps=steps, every=every)
    event = composed(ledger.spent, repeated(release, rounds), repeated(measure, measured))
    return _promise(ledger, event, steps=ledger.steps + rounds, measured=ledger.measured + measured)


def _paid_for(
    ledger: LedgerReport, release: Event, measure: Event, rounds: int, measured: int, *, steps: int, every: int | None
) -> tuple[int, int]:
    """How many of these a budget allows, in the order in which they come: as a run will find out."""
    assert ledger.epsilon_budget is not None
    spent, budget = RunningEpsilon(delta=ledger.header["delta"]), ledger.epsilon_budget
    spent.add(ledger.spent)
    # Those that are due by now and were never made (somebody stopped) may still be.
    late = measured - sum(is_due(step, steps=steps, every=every) for step in range(ledger.steps + 1, steps + 1))
    made = [0, 0]
    for step in range(ledger.steps, ledger.steps + rounds + 1):
        if step > ledger.steps:
            if spent.peek(release) > budget:
                break
            spent.add(release)
            made[0] += 1
        for _ in range(late if step == ledger.steps else int(is_due(step, steps=steps, every=every))):
            if spent.peek(measure) <= budget:
                spent.add(measure)
                made[1] += 1
    return made[0], made[1]


def _affordable(release: Event, epsilon_budget: float, *, delta: float) -> int:
    try:
        return steps_for(epsilon_budget, step_event=release, delta=delta, accountant="rdp")
    except InputError:  # not one
        return 0


@dataclass(frozen=True)
class Joint:
    """What several runs promise together to somebody who is in all of them.

    `unbounded` are the runs that promise nothing, and why: with one of them ε is infinite, and `epsilon` is that of
    the others. None where nothing can be said of those: fewer than two, or `reason`. `whom` it is for, where that is
    not simply who is protected by each of them; `inside` is ε of one person in a unit that holds several.
    """

    epsilon: Epsilon | None
    unbounded: Mapping[str, str]
    reason: str = ""
    whom: str = ""
    inside: Epsilon | None = None


def joint_epsilon(promises: Mapping[str, Promise], *, same_division: bool = False) -> Joint:
    """ε of several runs on the same people, by label, at the smallest δ among them.

    Guarantee: whoever sees all of their models learns no more of one client than (ε, δ) allows. Every release of every
    attempt is composed. Runs that protect different units, or silos of which nobody has shown that they are the same
    (`same_division`), are composed for one speaker, who is in one silo of each run and is replaced in all of them: that
    bounds adding and removing, too.
    """
    unbounded = {label: one.release.reason for label, one in promises.items() if isinstance(one.release, NoGuarantee)}
    private = {label: one for label, one in promises.items() if label not in unbounded}
    if len(private) < 2:
        return Joint(None, unbounded)
    runs, delta = list(private.values()), min(one.delta for one in private.values())
    units, changes = {one.unit for one in runs}, {_change(one) for one in runs}
    whole = composed(*(Composition(accounted(one.event)) for one in runs))  # no two share a chain of noise
    replacing = composed(*(replaced(one.event) for one in runs))
    if len(units) == len(changes) == 1:
        (unit,) = units
        if unit.inside is None:
            return Joint(epsilon(whole, delta), unbounded)
        if same_division:
            return Joint(epsilon(whole, delta), unbounded, whom=unit.one, inside=epsilon(replacing, delta))
    if not all(unit.is_known for unit in units):
        told = [f"{label} protects each {one.unit.name} against {_change(one)} one" for label, one in private.items()]
        return Joint(None, unbounded, f"{' and '.join(told)}: no one ε is for all")
    several = " who is in one silo of each run," if any(unit.inside for unit in units) else ""
    return Joint(epsilon(replacing, delta), unbounded, whom=f"one speaker,{several} against replacing them in all")


def _change(one: Promise) -> str:
    assert isinstance(one.release, GaussianRelease | CorrelatedRelease)
    return "adding or removing" if one.release.neighbouring == "add_remove" else "replacing"


def both(found: Epsilon) -> str:
    """ε by both accountants, as far as they have one."""
    by_rdp = f"{written_out(found.rdp)} (RDP)"
    return by_rdp if found.pld is None else f"{written_out(found.pld)} (PLD) / {by_rdp}"


def written_out(epsilon: float) -> str:
    """Four digits that count, written out: somebody who reads 207,600 sees at once that it is no promise."""
    return f"{float(f'{epsilon:.4g}'):,.0f}" if 1e4 <= epsilon < 1e10 else f"{epsilon:,.4g}"


def figures(promise: Promise, ledger: LedgerReport) -> dict[str, Any]:
    """For `results.json`: what is promised, and what of it is spent, under its own name."""
    spent = ledger.as_json()
    found = promise.epsilon
    return {
        "epsilon_pld": found.pld,
        "epsilon_pld_reason": found.pld_reason,
        "epsilon_rdp": None if isinstance(promise.release, NoGuarantee) else found.rdp,
        **_inside_figures(promise),
        "promised_steps": promise.steps,
        **({"promised_client_wers": promise.measured} if promise.measured else {}),
        "spent": {name: spent[name] for name in ("epsilon_pld", "epsilon_rdp")},
    }


def _inside_figures(promise: Promise) -> dict[str, Any]:
    """Of one person inside a unit that holds several, where something is promised."""
    inside = promise.epsilon_inside
    if inside is None or isinstance(promise.release, NoGuarantee):
        return {}
    return {"unit": promise.unit.name, "inside": {"epsilon_pld": inside.pld, "epsilon_rdp": inside.rdp}}
