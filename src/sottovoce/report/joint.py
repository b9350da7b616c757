"""What several runs promise together to somebody who is in all of them, and who that may be.

Unknown means shared. Another name of a store is no proof of other people. What proves that nobody is in two runs is one
division of one store, known by its digest, into a seed part and a federation part; else somebody may declare it, and is
quoted.

A run uses people besides its clients, without any promise to them: those it was chosen on, its server's own, its public
ones, and those its seed model was trained on. A run makes sure that none of these is its own client; no run knows of
another's clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.privacy.guarantee import JointGuarantee, format_epsilons, joint_epsilon
from sottovoce.report.parts import join_labels, merge_labels
from sottovoce.report.records import RunRecord

SEED_PART = "seed"
SERVER_PASS = "federation.server_pass.data"
NOT_PRIVATE = "training without differential privacy"


@dataclass(frozen=True)
class Declared:
    """Groups of runs, by label, of which somebody declares that nobody is in two of them."""

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

    def is_disjoint(self, one: RunRecord, other: RunRecord) -> bool:
        return one.label != other.label and any({one.label, other.label} <= {*group} for group in self.groups)


NOBODY = Declared()


@dataclass(frozen=True)
class JointRuns:
    """Runs that somebody may be in all of, and what they promise together; no `joint` where `missing` says why."""

    runs: tuple[RunRecord, ...]
    joint: JointGuarantee | None
    missing: str = ""

    @property
    def unbounded(self) -> dict[str, str]:
        """The runs that promise nothing, and why."""
        found = {} if self.joint is None else dict(self.joint.unbounded)
        return found | {run.label: NOT_PRIVATE for run in self.runs if run.guarantee is None}

    def as_json(self) -> dict[str, Any]:
        joint = self.joint
        stated = None if joint is None else joint.epsilon
        inside = None if joint is None else joint.inside
        return {
            "runs": [run.label for run in self.runs],
            "epsilon_pld": None if stated is None or self.unbounded else stated.pld,
            "epsilon_rdp": None if stated is None or self.unbounded else stated.rdp,
            "delta": None if stated is None else stated.delta,
            "for": None if joint is None else joint.whom or "anybody in these runs",
            **({} if inside is None else {"inside": {"epsilon_pld": inside.pld, "epsilon_rdp": inside.rdp}}),
            "no_guarantee": self.unbounded,
            "reason": self.missing or (None if joint is None else joint.reason or None),
        }


def joint_sentences(runs: Sequence[RunRecord], declared: Declared = NOBODY) -> tuple[str, ...]:
    """One sentence for every group of runs on the same people in which somebody is promised something; then whom one
    run protects and another may use without a promise, and what was declared."""
    found = [_sentence(group, is_all=len(group.runs) == len(runs)) for group in joint_groups(runs, declared)]
    asserted = [
        f"Asserted, and not shown by anything here: nobody is in two of {join_labels(group)}."
        for group in declared.groups
    ]
    return (*found, *_unprotected_sentences(runs, declared), *asserted)


def joint_groups(runs: Sequence[RunRecord], declared: Declared = NOBODY) -> list[JointRuns]:
    """The groups of more than one run that may share people, directly or by way of others, where one of them promises
    something."""
    groups: list[list[RunRecord]] = []
    for run in runs:
        near = [group for group in groups if any(may_share_people(run, other, declared) for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(other for group in near for other in group), run])
    return [_joint(group) for group in groups if len(group) > 1 and any(map(_is_private, group))]


def _joint(group: Sequence[RunRecord]) -> JointRuns:
    promises = {run.label: run.guarantee for run in group if run.guarantee is not None}
    unknown = [run.label for run in group if run.guarantee is None and _is_private(run)]
    if unknown:
        return JointRuns(tuple(group), None, f"{join_labels(unknown)} left no valid ledger")
    private = [run for run in group if run.guarantee is not None and _is_private(run)]
    return JointRuns(tuple(group), joint_epsilon(promises, same_division=has_same_silos(private)))


def _is_private(run: RunRecord) -> bool:
    """Whether it gives a guarantee, or says so where no ledger shows it."""
    return run.privacy.get("epsilon_rdp") is not None if run.guarantee is None else run.guarantee.words is not None


def _sentence(group: JointRuns, *, is_all: bool) -> str:
    runs, joint, unbounded = group.runs, group.joint, group.unbounded
    named = join_labels([run.label for run in runs])
    if is_all:
        named = "both runs" if len(runs) == 2 else f"all {len(runs)} runs"
    whom = f"Together, for anybody in {named}:"
    if joint is None:
        return f"{whom} no ε is stated, because {group.missing}."
    parts = []
    if unbounded:
        why = "; ".join(f"{labels} ({reason})" for labels, reason in merge_labels(unbounded.items()))
        parts.append(f"no guarantee, because of {why}")
    if joint.epsilon is not None:
        others = f"the other {len(runs) - len(unbounded)}: " if unbounded else ""
        is_simulated = any(run.guarantee is not None and run.guarantee.simulated for run in runs)
        parts.append(f"{others}{_stated(joint)}{' (simulated)' if is_simulated else ''}")
    elif joint.reason:
        parts.append(f"no ε is stated, because {joint.reason}")
    return f"{whom} {'; '.join(parts)}."


def _stated(joint: JointGuarantee) -> str:
    assert joint.epsilon is not None
    delta = f"at δ = {joint.epsilon.delta:g}"
    if joint.inside is not None:
        inside = f"ε = {format_epsilons(joint.inside)} for one speaker inside it"
        return f"ε = {format_epsilons(joint.epsilon)} for {joint.whom} and {inside}, {delta}"
    return f"ε = {format_epsilons(joint.epsilon)} {delta}{f', for {joint.whom}' if joint.whom else ''}"


def _unprotected_sentences(runs: Sequence[RunRecord], declared: Declared) -> list[str]:
    """Of each pair of runs: whom one uses without a promise who are, or may be, clients of the other."""
    lines = []
    for run in runs:
        uses = [
            (other.label, "; ".join(one.describe(other) for one in found))
            for other in runs
            if other is not run and _is_private(other) and (found := unprotected_in(run, other, declared))
        ]
        for others, used in merge_labels(uses):
            lines.append(
                f"{run.label} promises nothing to people whom it uses besides its clients: {used}. Whoever of them is "
                f"a client of {others} has no guarantee against who sees the model of {run.label}, whatever ε says."
            )
    return lines


# Who may be in two runs.


def may_share_people(one: RunRecord, other: RunRecord, declared: Declared = NOBODY) -> bool:
    """Whether somebody may be a client, or trained on, in both."""
    if declared.is_disjoint(one, other):
        return False
    parts = {run.data.get("part") for run in (one, other)}
    return parts != {SEED_PART, "federation"} or not _is_same_store(one, other) or _division(one) != _division(other)


def has_same_silos(runs: Sequence[RunRecord]) -> bool:
    """Whether silos of the same name hold the same people in all of these runs: the number of silos, the rule by which
    people are assigned, and the store are known to be the same."""
    first = runs[0]
    return all(_is_same_store(first, run) and _silos(first) == _silos(run) for run in runs[1:])


@dataclass(frozen=True)
class Unprotected:
    """People whom a run uses without a promise: the `setting` that names them, and the `place`.

    `digest` is that of their store, or of the model that was trained on them, where it is known. `division` is what
    decides who they are where they are the seed part of a store.
    """

    setting: str
    place: str
    digest: str | None
    division: Mapping[str, Any] | None = None

    def is_same(self, other: "Unprotected") -> bool:
        """By what is known: digests where both have one, names, and how people are divided."""
        digests = {self.digest, other.digest} - {None}
        is_named = PurePath(self.place).name == PurePath(other.place).name
        return is_named and len(digests) < 2 and self.division == other.division

    def describe(self, other: RunRecord) -> str:
        """With a note where these are, by name, clients of `other`."""
        store, _, split = self.place.rpartition(":")
        theirs = other.data.get("store")
        is_named = store and theirs and PurePath(store).name == PurePath(theirs).name
        splits = {split} if self.division is None else {*self.division["splits"]}
        is_client = is_named and not splits.isdisjoint(other.data.get("train") or ())
        return f"{self.setting}={self.place}{' (by name, clients there)' if is_client else ''}"


def unprotected_in(run: RunRecord, other: RunRecord, declared: Declared = NOBODY) -> tuple[Unprotected, ...]:
    """Whom `run` uses without a promise, and of whom nothing shows that they are no clients of `other`.

    What does: both runs have the same clients, or the same such people, so that one of them has compared the two.
    """
    if declared.is_disjoint(run, other) or (_is_same_store(run, other) and _clients(run) == _clients(other)):
        return ()
    compared = _unprotected(other)
    return tuple(one for one in _unprotected(run) if not any(one.is_same(known) for known in compared))


def _unprotected(run: RunRecord) -> list[Unprotected]:
    named = {
        "data.dev": run.data.get("dev"),
        SERVER_PASS: (run.federation.get("server_pass") or {}).get("data"),
    }
    found = []
    for setting, name in named.items():
        if name:
            store, split = run.locate_split(str(name))
            division = _division(run) if setting == SERVER_PASS and name == SEED_PART else None
            found.append(Unprotected(setting, f"{store}:{split}", run.inputs.get(f"{setting} digest"), division))
    seed = run.federation.get("seed_model") or (run.config.get("central") or {}).get("start_from")
    if seed:
        setting = "federation.seed_model" if run.federation else "central.start_from"
        found.append(Unprotected(setting, str(seed), run.inputs.get("start model digest")))
    return found


def _clients(run: RunRecord) -> Mapping[str, object]:
    """What decides who is a client, however they are put into silos."""
    floor = (run.federation.get("clients") or {}).get("min_seconds")
    if run.data.get("seed_part") is None:  # the random seed decides nothing then
        return {"splits": run.data.get("train"), "min_seconds": floor}
    return {**_division(run), "part": run.data.get("part"), "min_seconds": floor}


def _silos(run: RunRecord) -> Mapping[str, object]:
    return {**_clients(run), "clients": (run.federation.get("clients") or {}), "people": _people_seed(run)}


def _is_same_store(one: RunRecord, other: RunRecord) -> bool:
    """By their digests, which a release does not publish."""
    digests = [run.population.get("store_digest") or run.inputs.get("data.store digest") for run in (one, other)]
    return None not in digests and digests[0] == digests[1]


def _division(run: RunRecord) -> Mapping[str, Any]:
    """What decides who is in the seed part: two runs with the same divide the same people alike."""
    return {"splits": run.data.get("train"), "seed_part": run.data.get("seed_part"), "seed": _people_seed(run)}


def _people_seed(run: RunRecord) -> object:
    seed = run.data.get("people_seed")
    return run.config.get("seed") if seed is None else seed
