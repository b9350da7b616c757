"""The guarantee of a run: ε of all the steps that it plans to make; and that of several runs together.

When a run stops is often decided by looking at what it has released. Then ε of the steps made so far is no guarantee:
the moment of stopping itself depends on the data. ε of the whole plan, fixed before the first release, is one. A budget
stops a run by its accounts alone, so its ε may be stated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sottovoce.base.errors import InputError
from sottovoce.base.units import PrivacyUnit, unit_named
from sottovoce.privacy.accounting import Epsilon, RunningEpsilon, epsilon
from sottovoce.privacy.calibration import calibrate_steps
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
from sottovoce.privacy.plugins import format_plugin_condition

if TYPE_CHECKING:  # they need torch, and whoever verifies a ledger need not have it
    from sottovoce.privacy.client_wer import ClientWer
    from sottovoce.privacy.plan import Plan


@dataclass(frozen=True)
class Guarantee:
    """What a run guarantees for `steps` rounds, of which `made` are made. `event` is all of it, with repeated attempts.

    `measured` counts the measurements of clients' word error rate in all of them. `outside` is the condition that
    plug-ins put on it (`plugins.format_plugin_condition`).
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
        """ε of the run, wherever it is printed."""
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
        """ε of that person at the same δ: larger, since their speech moves the unit's update by up to 2C."""
        return None if self.event_inside is None else epsilon(self.event_inside, self.delta)

    @property
    def release(self) -> Release | NoGuarantee:
        """One step."""
        return parts_of(self.event)[0][0]

    @property
    def words(self) -> str | None:
        """What is guaranteed and how much of it is made; None without a guarantee."""
        if isinstance(self.release, NoGuarantee):
            return None
        measured = f" and {self.measured:,} WERs of clients" if self.measured else ""
        stated = f"ε = {format_epsilons(self.epsilon)} promised for {self.steps:,} rounds{measured}"
        return "; ".join(filter(None, (stated, f"{self.made:,} made", self.words_inside, self.outside)))

    @property
    def words_inside(self) -> str | None:
        """What is guaranteed to one person inside a unit that holds several."""
        if self.epsilon_inside is None or isinstance(self.release, NoGuarantee):
            return None
        inside = format_epsilons(self.epsilon_inside)
        return f"that is for {self.unit.one}; for one {self.unit.inside} inside it ε = {inside}"


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """Rounds made, attempts at them, measurements, attempts at those, and all that was charged for these."""

    steps: int
    attempts: int
    measured: int
    measured_attempts: int
    spent: Event


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """All releases that a run plans, from its plan before it or from its ledger's header after it.

    The only source of a run's ε: whatever prints one asks `guarantee`. `measurement` is what each measurement of the
    clients' WER releases, after `every` so many rounds and after the last. `accepted` is how many attempts at rounds
    (`attempts`) and at measurements (`client_wers`) the people of a release over a network accepted.
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
        return self._releases(self.steps, count_measurements(self.steps, every=self.every))

    def _releases(self, rounds: int, measured: int) -> Composition:
        besides = None if self.measurement is None else repeated(self.measurement, measured)
        return run_event(self.release, rounds, besides)

    def guarantee(self, made: RunProgress | None = None) -> Guarantee:
        """The guarantee with so much `made` (nothing, if not given).

        Steps to come count like those made, and each repeated attempt counts on top. What a budget would not allow is
        left out.
        """
        made = made or self._failed_attempts(0)
        rounds, measured = self._left(made)
        return Guarantee(
            event=composed(made.spent, self._releases(rounds, measured)),
            delta=self.delta,
            privacy_unit=self.privacy_unit,
            simulated=self.simulated,
            steps=made.steps + rounds,
            made=made.steps,
            measured=made.measured + measured,
            outside=self.outside,
        )

    def guarantee_with_spare(self, attempts: int) -> Guarantee:
        """The guarantee where so many attempts at rounds, and at measurements, are repeated before the last."""
        return self.guarantee(self._failed_attempts(attempts))

    def _failed_attempts(self, attempts: int) -> RunProgress:
        """So many attempts at rounds and at measurements that came to nothing."""
        spent = self._releases(attempts, attempts)
        return RunProgress(steps=0, attempts=attempts, measured=0, measured_attempts=attempts, spent=spent)

    def _still_accepted(self, name: str, left: int, *, made: int) -> int:
        """How many of `left` people have accepted, with all attempts that were `made`."""
        return left if self.accepted is None else min(left, max(self.accepted[name] - made, 0))

    def _left(self, made: RunProgress) -> tuple[int, int]:
        """Rounds and measurements that are still to come, as far as people accepted and a budget allows them."""
        rounds, budget = max(self.steps - made.steps, 0), self.epsilon_budget
        rounds = self._still_accepted("attempts", rounds, made=made.attempts)
        if self.measurement is not None:
            measured = max(count_measurements(max(self.steps, made.steps), every=self.every) - made.measured, 0)
            measured = self._still_accepted("client_wers", measured, made=made.measured_attempts)
            return (rounds, measured) if budget is None else self._affordable(made, rounds, measured, budget=budget)
        if rounds and budget is not None:
            try:
                most = calibrate_steps(budget, step_event=self.release, delta=self.delta, accountant="rdp")
            except InputError:  # not a single one
                most = 0
            rounds = min(rounds, max(most - made.attempts, 0))
        return rounds, 0

    def _affordable(self, made: RunProgress, rounds: int, measured: int, *, budget: float) -> tuple[int, int]:
        """How many of these a budget allows, charged in the order in which a run makes them."""
        assert self.measurement is not None
        spent = RunningEpsilon(delta=self.delta)
        spent.add(made.spent)
        # Those that are due by now and were never made (somebody stopped) may still be.
        late = measured - sum(self._is_due(step) for step in range(made.steps + 1, self.steps + 1))
        allowed_rounds = allowed_measurements = 0
        for step in range(made.steps, made.steps + rounds + 1):
            if step > made.steps:
                if spent.peek(self.release) > budget:
                    break
                spent.add(self.release)
                allowed_rounds += 1
            for _ in range(late if step == made.steps else int(self._is_due(step))):
                if spent.peek(self.measurement) <= budget:
                    spent.add(self.measurement)
                    allowed_measurements += 1
        return allowed_rounds, allowed_measurements

    def _is_due(self, step: int) -> bool:
        return is_measurement_due(step, steps=self.steps, every=self.every)


def is_measurement_due(rounds: int, *, steps: int, every: int | None) -> bool:
    """Whether clients' word error rate is measured after `rounds` of `steps`."""
    return rounds == steps or (every is not None and 0 < rounds < steps and rounds % every == 0)


def count_measurements(steps: int, *, every: int | None) -> int:
    """How often it is due in so many rounds.

    >>> [count_measurements(steps, every=every) for steps, every in ((20, 10), (25, 10), (25, None), (0, None))]
    [2, 3, 1, 0]
    """
    return min(steps, 1) if every is None else -(-steps // every)


def whole_run(plan: "Plan", *, central_steps: int, client_wer: "ClientWer | None" = None) -> WholeRun:
    """All that a run of `plan` plans to release.

    >>> from sottovoce.flat.layout import Layout
    >>> from sottovoce.privacy.client_wer import ClientWer
    >>> from sottovoce.privacy.plan import Plan
    >>> from sottovoce.privacy.settings import PrivacySettings
    >>> settings = PrivacySettings(population_size=1000, privacy_unit="speaker", cohort_size=10, clip_bound=1.0,
    ...                            noise_multiplier=1.0, delta=1e-5, root_seed=7)
    >>> plan = Plan(settings, Layout(("w",), ((4,),)))
    >>> asked = ClientWer(words=50, noise_multiplier=8.0, every=10)
    >>> print(whole_run(plan, central_steps=20, client_wer=asked).guarantee().words)
    ε = 0.455 (PLD) / 1.082 (RDP) promised for 20 rounds and 2 WERs of clients; 0 made
    """
    return WholeRun(
        release=plan.event,
        steps=central_steps,
        delta=plan.settings.delta,
        simulated=plan.settings.mode != "secure",
        privacy_unit=plan.settings.privacy_unit,
        measurement=None if client_wer is None else client_wer.plan(plan).event,
        every=None if client_wer is None else client_wer.every,
        epsilon_budget=plan.settings.epsilon_budget,
        outside=None if isinstance(plan.event, NoGuarantee) else format_plugin_condition(plan.describe()),
    )


def guarantee_of(ledger: LedgerReport, *, central_steps: int | None = None) -> Guarantee:
    """The guarantee of the run behind a ledger; `central_steps` is its T where an old ledger does not say it."""
    header, steps = ledger.header, ledger.header.get("central_steps") or central_steps or 0
    if not isinstance(steps, int):
        raise InputError(f"{ledger.path} line 1: central_steps={steps!r}: expected a whole number")
    client_wer = header.get("client_wer") or {}
    every = client_wer.get("every")
    if every is not None and not (isinstance(every, int) and every > 0):
        raise InputError(f"{ledger.path} line 1: client_wer.every={every!r}: expected a whole number, or none")
    whole = WholeRun(
        release=parts_of(ledger.spent)[0][0],
        steps=steps,
        delta=header["delta"],
        simulated=header["mode"] != "secure",
        privacy_unit=(header.get("plan") or {}).get("privacy_unit"),
        measurement=parts_of(event_from_json(client_wer["event"]))[0][0] if client_wer else None,
        every=every,
        epsilon_budget=ledger.promised_budget,
        accepted=header.get("accepted"),
        outside=ledger.outside,
    )
    made = RunProgress(
        steps=ledger.steps,
        attempts=ledger.attempts,
        measured=ledger.measured,
        measured_attempts=ledger.measured_attempts,
        spent=ledger.spent,
    )
    return whole.guarantee(made)


@dataclass(frozen=True)
class JointGuarantee:
    """What several runs guarantee together to somebody who is in all of them.

    `unbounded` are the runs without a guarantee, and why: with one of them ε is infinite, and `epsilon` is that of the
    others. It is None for fewer than two of those, or for a `reason`. `whom` says whom it is for, where that is not who
    each run protects; `inside` is ε of one person in a unit that holds several.
    """

    epsilon: Epsilon | None
    unbounded: Mapping[str, str]
    reason: str = ""
    whom: str = ""
    inside: Epsilon | None = None


def joint_epsilon(guarantees: Mapping[str, Guarantee], *, same_division: bool = False) -> JointGuarantee:
    """ε of several runs on the same people, by label, at the smallest δ among them.

    Guarantee: whoever sees all of their models learns no more of one client than (ε, δ) allows. Every release of every
    attempt is composed. Runs that protect different units, or silos that were not shown to be the same
    (`same_division`), are composed for one speaker, who is in one silo of each run and is replaced in all of them: that
    bounds adding and removing, too.
    """
    unbounded = {label: one.release.reason for label, one in guarantees.items() if isinstance(one.release, NoGuarantee)}
    private = {label: one for label, one in guarantees.items() if label not in unbounded}
    if len(private) < 2:
        return JointGuarantee(None, unbounded)
    runs, delta = list(private.values()), min(one.delta for one in private.values())
    units, changes = {one.unit for one in runs}, {_change(one) for one in runs}
    whole = composed(*(Composition(accounted(one.event)) for one in runs))  # no two share a chain of noise
    replacing = composed(*(replaced(one.event) for one in runs))
    if len(units) == len(changes) == 1:
        (unit,) = units
        if unit.inside is None:
            return JointGuarantee(epsilon(whole, delta), unbounded)
        if same_division:
            return JointGuarantee(epsilon(whole, delta), unbounded, whom=unit.one, inside=epsilon(replacing, delta))
    if not all(unit.is_known for unit in units):
        each = [f"{label} protects each {one.unit.name} against {_change(one)} one" for label, one in private.items()]
        return JointGuarantee(None, unbounded, f"{' and '.join(each)}: no one ε is for all")
    several = " who is in one silo of each run," if any(unit.inside for unit in units) else ""
    whom = f"one speaker,{several} against replacing them in all"
    return JointGuarantee(epsilon(replacing, delta), unbounded, whom=whom)


def _change(one: Guarantee) -> str:
    assert isinstance(one.release, GaussianRelease | CorrelatedRelease)
    return "adding or removing" if one.release.neighbouring == "add_remove" else "replacing"


def format_epsilons(found: Epsilon) -> str:
    """ε by both accountants, as far as they have one."""
    by_rdp = f"{format_epsilon(found.rdp)} (RDP)"
    return by_rdp if found.pld is None else f"{format_epsilon(found.pld)} (PLD) / {by_rdp}"


def format_epsilon(epsilon: float) -> str:
    """Four significant digits, without an exponent up to 10¹⁰: 207,600 is seen at once to guarantee nothing."""
    return f"{float(f'{epsilon:.4g}'):,.0f}" if 1e4 <= epsilon < 1e10 else f"{epsilon:,.4g}"


def guarantee_to_json(guarantee: Guarantee, ledger: LedgerReport) -> dict[str, Any]:
    """For `results.json`: what is guaranteed, and under `spent` what of it is spent."""
    spent, found = ledger.as_json(), guarantee.epsilon
    has_guarantee, inside = not isinstance(guarantee.release, NoGuarantee), guarantee.epsilon_inside
    figures: dict[str, Any] = {
        "epsilon_pld": found.pld,
        "epsilon_pld_reason": found.pld_reason,
        "epsilon_rdp": found.rdp if has_guarantee else None,
    }
    if inside is not None and has_guarantee:
        figures["unit"] = guarantee.unit.name
        figures["inside"] = {"epsilon_pld": inside.pld, "epsilon_rdp": inside.rdp}
    figures["promised_steps"] = guarantee.steps
    if guarantee.measured:
        figures["promised_client_wers"] = guarantee.measured
    return {**figures, "spent": {name: spent[name] for name in ("epsilon_pld", "epsilon_rdp")}}
