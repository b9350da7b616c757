"""What is promised: ε of all the steps that a run set out to make, and of several runs together.

When a run stops is often decided by looking at what it has released: no better model, or somebody who does not go on.
ε at such a moment is no guarantee, since the moment itself tells something; what was promised before the first release,
ε of the whole plan, is one. A budget ends a run by its accounts alone, so that its ε may stand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.units import PrivacyUnit, unit_named
from sottovoce.privacy.accounting import Epsilon, RunningEpsilon, epsilon
from sottovoce.privacy.calibration import steps_for
from sottovoce.privacy.client_wer import ClientWer, is_due, planned
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
    run_event,
)
from sottovoce.privacy.ledger_report import LedgerReport
from sottovoce.privacy.outside import rests_on
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode


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
        """Every ε that is told of the run."""
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


@dataclass(frozen=True, kw_only=True)
class Made:
    """How much of a run is made: rounds, attempts at them, measurements, attempts at those, and all that was charged
    for these."""

    steps: int
    attempts: int
    measured: int
    measured_attempts: int
    spent: Event


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """All releases that a run sets out to make, as its plan has them before it and the header of its ledger after.

    The only source of what is promised: whatever prints an ε of a run asks `promise`. `measurement` is what measuring
    clients' word error rate releases each time, after every so many rounds and after the last. `accepted` is how many
    attempts at rounds (`attempts`) and measurements (`client_wers`) the people of a release over a network accepted.
    """

    release: Release | NoGuarantee
    steps: int
    delta: float
    simulated: bool
    privacy_unit: str | None = None
    measurement: Release | NoGuarantee | None = None
    every: int | None = None
    epsilon_budget: float | None = None
    accepted: Mapping[str, int] | None = None
    outside: str | None = None

    @property
    def event(self) -> Composition:
        """Every release that is planned, whether a budget allows it or not."""
        besides = None
        if self.measurement is not None:
            besides = repeated(self.measurement, planned(self.steps, every=self.every))
        return run_event(self.release, self.steps, besides)

    def promise(self, made: Made | None = None) -> Promise:
        """What is promised, with so much of it `made` (nothing, if not given).

        Steps that are still to come are promised with those that are made, each repeated attempt on top. A budget
        takes away what it would not allow.
        """
        made = made or self._spare(0)
        rounds, measured = self._left(made)
        event = composed(made.spent, repeated(self.release, rounds))
        if self.measurement is not None:
            event = composed(event, repeated(self.measurement, measured))
        return Promise(
            event=event,
            delta=self.delta,
            privacy_unit=self.privacy_unit,
            simulated=self.simulated,
            steps=made.steps + rounds,
            made=made.steps,
            measured=made.measured + measured,
            outside=self.outside,
        )

    def promise_with_spare(self, attempts: int) -> Promise:
        """What is promised where so many attempts at rounds, and at measurements, are repeated before the last."""
        return self.promise(self._spare(attempts))

    def _spare(self, attempts: int) -> Made:
        """Nothing but so many attempts at rounds and at measurements that came to nothing."""
        spent = repeated(self.release, attempts)
        if self.measurement is not None:
            spent = composed(spent, repeated(self.measurement, attempts))
        return Made(steps=0, attempts=attempts, measured=0, measured_attempts=attempts, spent=spent)

    def _still_accepted(self, name: str, left: int, *, made: int) -> int:
        """How many of `left` people have accepted, with all attempts that were `made`."""
        return left if self.accepted is None else min(left, max(self.accepted[name] - made, 0))

    def _left(self, made: Made) -> tuple[int, int]:
        """Rounds and measurements that are still to come, as far as people accepted and a budget allows them."""
        rounds, budget = max(self.steps - made.steps, 0), self.epsilon_budget
        rounds = self._still_accepted("attempts", rounds, made=made.attempts)
        if self.measurement is not None:
            measured = max(planned(max(self.steps, made.steps), every=self.every) - made.measured, 0)
            measured = self._still_accepted("client_wers", measured, made=made.measured_attempts)
            return (rounds, measured) if budget is None else self._paid_for(made, rounds, measured, budget=budget)
        if rounds and budget is not None:
            rounds = min(rounds, max(_affordable(self.release, budget, delta=self.delta) - made.attempts, 0))
        return rounds, 0

    def _paid_for(self, made: Made, rounds: int, measured: int, *, budget: float) -> tuple[int, int]:
        """How many of these a budget allows, in the order in which they come: as a run will find out."""
        assert self.measurement is not None
        spent = RunningEpsilon(delta=self.delta)
        spent.add(made.spent)
        # Those that are due by now and were never made (somebody stopped) may still be.
        late = measured - sum(self._is_due(step) for step in range(made.steps + 1, self.steps + 1))
        allowed = [0, 0]
        for step in range(made.steps, made.steps + rounds + 1):
            if step > made.steps:
                if spent.peek(self.release) > budget:
                    break
                spent.add(self.release)
                allowed[0] += 1
            for _ in range(late if step == made.steps else int(self._is_due(step))):
                if spent.peek(self.measurement) <= budget:
                    spent.add(self.measurement)
                    allowed[1] += 1
        return allowed[0], allowed[1]

    def _is_due(self, step: int) -> bool:
        return is_due(step, steps=self.steps, every=self.every)


def whole_run(plan: Plan, *, central_steps: int, client_wer: ClientWer | None = None) -> WholeRun:
    """All that a run of `plan` sets out to release, before anything is.

    >>> from sottovoce.flat.layout import Layout
    >>> from sottovoce.privacy.settings import PrivacySettings
    >>> settings = PrivacySettings(population_size=1000, privacy_unit="speaker", cohort_size=10, clip_bound=1.0,
    ...                            noise_multiplier=1.0, delta=1e-5, root_seed=7)
    >>> plan = Plan(settings, Layout(("w",), ((4,),)))
    >>> asked = ClientWer(words=50, noise_multiplier=8.0, every=10)
    >>> print(whole_run(plan, central_steps=20, client_wer=asked).promise().words)
    ε = 0.455 (PLD) / 1.082 (RDP) promised for 20 rounds and 2 WERs of clients; 0 made
    """
    return WholeRun(
        release=plan.event,
        steps=central_steps,
        delta=plan.settings.delta,
        simulated=plan.settings.mode is not Mode.SECURE,
        privacy_unit=plan.settings.privacy_unit,
        measurement=None if client_wer is None else client_wer.plan(plan).event,
        every=None if client_wer is None else client_wer.every,
        epsilon_budget=plan.settings.epsilon_budget,
        outside=None if isinstance(plan.event, NoGuarantee) else rests_on(plan.describe()),
    )


def promise_of(ledger: LedgerReport, *, central_steps: int | None = None) -> Promise:
    """The promise of the run behind a ledger; `central_steps` is its T where an old ledger does not say it."""
    header, steps = ledger.header, ledger.header.get("central_steps") or central_steps or 0
    if not isinstance(steps, int):
        raise InputError(f"{ledger.path} line 1: central_steps={steps!r}: expected a whole number")
    told = header.get("client_wer") or {}
    every = told.get("every")
    if every is not None and not (isinstance(every, int) and every > 0):
        raise InputError(f"{ledger.path} line 1: client_wer.every={every!r}: expected a whole number, or none")
    whole = WholeRun(
        release=parts_of(ledger.spent)[0][0],
        steps=steps,
        delta=header["delta"],
        simulated=header["mode"] != "secure",
        privacy_unit=(header.get("plan") or {}).get("privacy_unit"),
        measurement=parts_of(event_from_json(told["event"]))[0][0] if told else None,
        every=every,
        epsilon_budget=ledger.epsilon_budget,
        accepted=header.get("accepted"),
        outside=ledger.outside,
    )
    made = Made(
        steps=ledger.steps,
        attempts=ledger.attempts,
        measured=ledger.measured,
        measured_attempts=ledger.measured_attempts,
        spent=ledger.spent,
    )
    return whole.promise(made)


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
