"""What several runs promise together to somebody who is in all of them, in sentences for the headline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sottovoce.privacy.promise import Joint, Promise, both, joint_epsilon
from sottovoce.report.cells import listed, said_once
from sottovoce.report.records import RunRecord
from sottovoce.report.shared_people import (
    NOBODY,
    Declared,
    Unprotected,
    is_protected_in,
    same_silos,
    share_people,
    unprotected_in,
)

WITHOUT = "training without differential privacy"


@dataclass(frozen=True)
class JointRuns:
    """Runs that somebody may be in all of, and what they promise together; no `joint` where `missing` says why."""

    runs: tuple[RunRecord, ...]
    joint: Joint | None
    missing: str = ""

    @property
    def unbounded(self) -> dict[str, str]:
        """The runs that promise nothing, and why."""
        found = {} if self.joint is None else dict(self.joint.unbounded)
        return found | {run.label: WITHOUT for run in self.runs if run.promise is None}

    def as_json(self) -> dict[str, Any]:
        joint = self.joint
        told = None if joint is None else joint.epsilon
        inside = None if joint is None else joint.inside
        return {
            "runs": [run.label for run in self.runs],
            "epsilon_pld": None if told is None or self.unbounded else told.pld,
            "epsilon_rdp": None if told is None or self.unbounded else told.rdp,
            "delta": None if told is None else told.delta,
            "for": None if joint is None else joint.whom or "anybody in these runs",
            **({} if inside is None else {"inside": {"epsilon_pld": inside.pld, "epsilon_rdp": inside.rdp}}),
            "no_guarantee": self.unbounded,
            "reason": self.missing or (None if joint is None else joint.reason or None),
        }


def together(runs: Sequence[RunRecord], declared: Declared = NOBODY) -> tuple[str, ...]:
    """One sentence for every group of runs on the same people in which somebody is promised something; then whom one
    run protects and another may use without a promise, and what was declared."""
    found = [_sentence(group, everybody=len(group.runs) == len(runs)) for group in groups_of(runs, declared)]
    return (*found, *unprotected(runs, declared), *asserted(declared))


def groups_of(runs: Sequence[RunRecord], declared: Declared = NOBODY) -> list[JointRuns]:
    """The groups of more than one run that may share people, where one of them promises something."""
    return [_joint(group) for group in _groups(runs, declared) if len(group) > 1 and any(map(_promises, group))]


def unprotected(runs: Sequence[RunRecord], declared: Declared = NOBODY) -> tuple[str, ...]:
    """Of each pair of runs: whom one uses without a promise who are, or may be, clients of the other."""
    lines = []
    for run in runs:
        told = [
            (other.label, "; ".join(_used(one, is_named=is_protected_in(one, other)) for one in found))
            for other in runs
            if other is not run and _promises(other) and (found := unprotected_in(run, other, declared))
        ]
        for others, uses in said_once(told):
            lines.append(
                f"{run.label} promises nothing to people whom it uses besides its clients: {uses}. Whoever of them is "
                f"a client of {others} has no guarantee against who sees the model of {run.label}, whatever ε says."
            )
    return tuple(lines)


def asserted(declared: Declared) -> tuple[str, ...]:
    """What was declared, as what it is."""
    return tuple(
        f"Asserted, and not shown by anything here: nobody is in two of {listed(group)}." for group in declared.groups
    )


def _used(one: Unprotected, *, is_named: bool) -> str:
    return f"{one.setting}={one.place}{' (by name, clients there)' if is_named else ''}"


def _groups(runs: Sequence[RunRecord], declared: Declared) -> list[list[RunRecord]]:
    """Runs that may share people, directly or by way of others, in the order they came in."""
    groups: list[list[RunRecord]] = []
    for run in runs:
        near = [group for group in groups if any(share_people(run, other, declared) for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(other for group in near for other in group), run])
    return groups


def _joint(group: Sequence[RunRecord]) -> JointRuns:
    promises: dict[str, Promise] = {run.label: run.promise for run in group if run.promise is not None}
    unknown = [run for run in group if run.label not in promises and _promises(run)]
    if unknown:
        return JointRuns(tuple(group), None, f"{_listed(unknown)} left no ledger that holds")
    private = [run for run in group if run.promise is not None and _promises(run)]
    return JointRuns(tuple(group), joint_epsilon(promises, same_division=same_silos(private)))


def _sentence(group: JointRuns, *, everybody: bool) -> str:
    whom = f"Together, for anybody in {_named(group.runs, everybody=everybody)}:"
    joint, unbounded = group.joint, group.unbounded
    if joint is None:
        return f"{whom} no ε is stated, because {group.missing}."
    parts = []
    if unbounded:
        why = "; ".join(f"{labels} ({reason})" for labels, reason in said_once(unbounded.items()))
        parts.append(f"no guarantee, because of {why}")
    if joint.epsilon is not None:
        others = f"the other {len(group.runs) - len(unbounded)}: " if unbounded else ""
        simulated = any(run.promise is not None and run.promise.simulated for run in group.runs)
        parts.append(f"{others}{_stated(joint)}{' (simulated)' if simulated else ''}")
    elif joint.reason:
        parts.append(f"no ε is stated, because {joint.reason}")
    return f"{whom} {'; '.join(parts)}."


def _stated(joint: Joint) -> str:
    assert joint.epsilon is not None
    delta = f"at δ = {joint.epsilon.delta:g}"
    if joint.inside is not None:
        inside = f"ε = {both(joint.inside)} for one speaker inside it"
        return f"ε = {both(joint.epsilon)} for {joint.whom} and {inside}, {delta}"
    return f"ε = {both(joint.epsilon)} {delta}{f', for {joint.whom}' if joint.whom else ''}"


def _promises(run: RunRecord) -> bool:
    """Whether it gives a guarantee, or says so where no ledger shows it."""
    return run.privacy.get("epsilon_rdp") is not None if run.promise is None else run.promise.words is not None


def _named(group: Sequence[RunRecord], *, everybody: bool) -> str:
    if everybody:
        return "both runs" if len(group) == 2 else f"all {len(group)} runs"
    return _listed(group)


def _listed(group: Sequence[RunRecord]) -> str:
    return listed([run.label for run in group])
