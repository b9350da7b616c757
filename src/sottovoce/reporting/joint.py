"""What several runs promise together to somebody who is in all of them, in a sentence for the headline.

Who was in a run is known by what its folder says: its store, and which part of the people it trained on. A folder that
does not say so may have been anybody's, and is counted in.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from sottovoce.privacy.promise import both, joint_epsilon
from sottovoce.reporting.cells import listed, said_once
from sottovoce.reporting.records import Record, RunRecord

WITHOUT = "training without differential privacy"


def together(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """One sentence for every group of runs on the same people in which somebody is promised something."""
    groups = [group for group in _groups(runs) if len(group) > 1 and any(map(_promises, group))]
    return tuple(_sentence(group, everybody=len(group) == len(runs)) for group in groups)


def share_people(one: RunRecord, other: RunRecord) -> bool:
    """Whether somebody may be in both: unless their stores differ, or they are the two parts of one division."""
    stores = [_store(run) for run in (one, other)]
    if None not in stores and stores[0] != stores[1]:
        digests = [run.population.get("store_digest") for run in (one, other)]
        return None not in digests and digests[0] == digests[1]  # the same under another name
    parts = [_data(run).get("part") for run in (one, other)]
    return set(parts) != {"seed", "federation"} or _division(one) != _division(other)


def _groups(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Runs that may share people, directly or by way of others, in the order they came in."""
    groups: list[list[RunRecord]] = []
    for run in runs:
        near = [group for group in groups if any(share_people(run, other) for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(other for group in near for other in group), run])
    return groups


def _sentence(group: Sequence[RunRecord], *, everybody: bool) -> str:
    whom = f"Together, for anybody in {_named(group, everybody=everybody)}:"
    promises = {run.label: run.promise for run in group if run.promise is not None}
    unknown = [run for run in group if run.label not in promises and _promises(run)]
    if unknown:
        return f"{whom} no ε is stated, because {_listed(unknown)} left no ledger that holds."
    joint = joint_epsilon(promises)
    unbounded = dict(joint.unbounded) | {run.label: WITHOUT for run in group if run.label not in promises}
    parts = []
    if unbounded:
        why = "; ".join(f"{labels} ({reason})" for labels, reason in said_once(unbounded.items()))
        parts.append(f"no guarantee, because of {why}")
    if joint.epsilon is not None:
        others = f"the other {len(group) - len(unbounded)}: " if unbounded else ""
        simulated = " (simulated)" if any(one.simulated for one in promises.values()) else ""
        parts.append(f"{others}ε = {both(joint.epsilon)} at δ = {joint.epsilon.delta:g}{simulated}")
    elif joint.reason:
        parts.append(f"no ε is stated, because {joint.reason}")
    return f"{whom} {'; '.join(parts)}."


def _promises(run: RunRecord) -> bool:
    """Whether it gives a guarantee, or says so where no ledger shows it."""
    return run.privacy.get("epsilon_rdp") is not None if run.promise is None else run.promise.words is not None


def _named(group: Sequence[RunRecord], *, everybody: bool) -> str:
    if everybody:
        return "both runs" if len(group) == 2 else f"all {len(group)} runs"
    return _listed(group)


def _listed(group: Sequence[RunRecord]) -> str:
    return listed([run.label for run in group])


def _data(run: RunRecord) -> Record:
    return run.config.get("data") or {}


def _store(run: RunRecord) -> str | None:
    """Its name, without the way there."""
    found = _data(run).get("store")
    return PurePath(found).name if found else None


def _division(run: RunRecord) -> Mapping[str, object]:
    """What decides who is in the seed part: two runs with the same divide the same people alike."""
    data = _data(run)
    seed = data.get("people_seed")
    return {
        "splits": data.get("train"),
        "seed_part": data.get("seed_part"),
        "seed": run.config.get("seed") if seed is None else seed,
    }
