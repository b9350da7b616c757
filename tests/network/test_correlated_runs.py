"""Whole runs over a network whose noise is correlated over rounds: a simulation's bits, and releases killed anywhere.

Server and participants are one process here, which a kill takes all at once; in `test_killed_servers` they are many.
"""

import json
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from tests.network.local_cluster import NAMES
from tests.network.places import Place, check_same
from tests.network.test_availability import leaving
from tests.points import CHARGED, SAVED, Point, Watch
from tests.training.forked import forked
from tests.training.test_correlated_runs import memory_of

from sottovoce.base.errors import InputError
from sottovoce.network.messages import OrderKind, parse_order
from sottovoce.network.roster import load_roster
from sottovoce.network.server.accounts import ACCOUNTS
from sottovoce.network.transport.link import AnswerFunction
from sottovoce.privacy.accounting import epsilon, pld_epsilon
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.events import CorrelatedRelease, event_from_json, repeated
from sottovoce.privacy.ledger import LedgerReport, verify
from sottovoce.privacy.round_noise import MEMORY
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.privacy.strategies import first_column
from sottovoce.training.federated_run import GROUPS
from sottovoce.training.federation import TOO_FEW
from sottovoce.training.run_folder import LEDGER

STEPS, CYCLE, EVERYBODY = 4, 3, len(NAMES)
WHOLE = EVERYBODY // CYCLE  # a cohort is a group
BANDED = {"kind": "banded", "bands": 3, "cycle": CYCLE}
BLT = {"kind": "blt", "buffers": 2, "cycle": CYCLE}
GROUPS_OF_THREE = CyclicSampler(cycle=CYCLE, sampling_rate=1.0).groups(EVERYBODY)
Privacy = Mapping[str, Any]


def placed(folder: Path, stores: Path, mechanism: Mapping[str, Any], *, cohort_size: int = WHOLE, **more: Any) -> Place:
    folder.mkdir(exist_ok=True)
    place = Place(folder, stores)
    given: dict[str, Any] = {"steps": STEPS, "evaluate_every": STEPS, "cohort_size": cohort_size} | more
    place.write_files(**given | {"privacy": {"mechanism": mechanism} | more.get("privacy", {})})
    return place


# To the bit.


@pytest.mark.parametrize(
    ("mechanism", "cohort_size", "secure"),
    [(BANDED, 2, False), (BANDED, WHOLE, True), (BLT, WHOLE, False), (BLT, WHOLE, True)],
    ids=["banded, sampled, open", "banded, secure", "BLT, open", "BLT, secure"],
)
def test_a_run_is_the_simulation_s(
    tmp_path: Path, cluster_stores: Path, mechanism: Mapping[str, Any], cohort_size: int, secure: bool
) -> None:
    place = placed(tmp_path, cluster_stores, mechanism, cohort_size=cohort_size)
    outcome = place.run_here("served", secure=secure, wait_for=WHOLE)
    assert outcome.results is not None
    check_same(outcome.folder, place.simulate("simulated"))
    rows = rows_answered(place)
    assert {row for found in rows.values() for row in found} == {*range(STEPS)}
    check_turns(rows)


def test_a_rehearsal_that_breaks_makes_its_rounds_again_with_the_same_rows(
    tmp_path: Path, cluster_stores: Path
) -> None:
    place = placed(tmp_path, cluster_stores, BLT)
    first, *_, last = in_order_of_asking(place, group=2)
    with pytest.raises(RuntimeError, match="the server breaks"):
        place.run_here("served", secure=False, wait_for=WHOLE, meddle={last: breaks_at(1)})
    place.run_here("served", secure=False, wait_for=WHOLE, resume=True)
    check_same(tmp_path / "served", place.simulate("simulated"))
    assert rows_answered(place)[first] == [2, 2]


def member(group: int) -> str:
    return NAMES[int(GROUPS_OF_THREE[group][-1])]


def in_order_of_asking(place: Place, *, group: int) -> list[str]:
    """Within one process nodes are asked one after another, by their keys, which are new in every test."""
    users = load_roster(place.folder / "roster.yaml").users
    members = [users[number] for number in GROUPS_OF_THREE[group].tolist()]
    return [user.name for user in sorted(members, key=lambda user: user.node.hex())]


def breaks_at(nth: int) -> Any:
    """Everything breaks when the node is asked to train for the `nth` time."""

    def breaks(answer: AnswerFunction) -> AnswerFunction:
        trained = 0

        def breaking(data: bytes) -> bytes | None:
            nonlocal trained
            trained += parse_order(data, limit=1 << 30).kind is OrderKind.TRAIN
            if trained == nth:
                raise RuntimeError("the server breaks")
            return answer(data)

        return breaking

    return breaks


# What nodes have answered, by their own ledgers.


def rows_answered(place: Place) -> dict[str, list[int]]:
    found = {}
    for name in place.people:
        path = place.folder / "keys" / name / "home" / "ledger.jsonl"
        records = read_chain(path).records if path.exists() else []
        found[name] = [record["row"] for record in records if record.get("answered") == "train"]
    return found


def check_turns(rows: Mapping[str, list[int]]) -> None:
    """The participation that is charged for: everybody in the rows of one group, in a release each row once."""
    for group, places in enumerate(GROUPS_OF_THREE):
        for place in places.tolist():
            assert all(row % CYCLE == group for row in rows[NAMES[place]])


def check_spent(report: LedgerReport, results: Mapping[str, Any]) -> None:
    """ε is that of all attempts, by this package as for a run in one process, and by dp-accounting's own events."""
    event = event_from_json(report.header["event"])
    assert isinstance(event, CorrelatedRelease)
    assert report.spent == repeated(event, report.attempts)
    told, found = results["privacy"], epsilon(report.spent, report.header["delta"])
    assert (told["epsilon_pld"], told["epsilon_rdp"]) == (found.pld, found.rdp)
    column, rows = first_column(event.strategy, report.attempts), report.attempts
    theirs: dp_accounting.DpEvent
    if event.sampling_rate == 1:
        moved = sum(np.concatenate([np.zeros(start), column[: rows - start]]) for start in range(0, rows, CYCLE))
        theirs = dp_accounting.GaussianDpEvent(event.noise_multiplier / np.linalg.norm(moved))
    else:
        once = dp_accounting.GaussianDpEvent(event.noise_multiplier / np.linalg.norm(column))
        sampled = dp_accounting.PoissonSampledDpEvent(event.sampling_rate, once)
        theirs = dp_accounting.SelfComposedDpEvent(sampled, -(-rows // CYCLE))
    accountant = dp_accounting.pld.PLDAccountant().compose(theirs)
    assert pld_epsilon(report.spent, report.header["delta"]) == pytest.approx(
        accountant.get_epsilon(report.header["delta"]), rel=0.01
    )


# Killed.

ASKED = Point("sottovoce.network.server.clients:AttemptCounter.begin")
ANSWERED = Point("sottovoce.network.node.ledger:NodeLedger.add", nth=2)
SUMMED = Point("sottovoce.network.server.clients:ClientsOverNetwork.sum")
DRAWN = Point("sottovoce.privacy.round_noise:CorrelatedNoise._write", at="call")
WRITTEN = replace(DRAWN, at="return")
NOISED = Point("sottovoce.privacy.plan:Plan.add_noise")
MOVED = Point("sottovoce.federated.round:run_round")
SAVING = replace(SAVED, at="call")
FINISHED = Point("sottovoce.training.run_context:write_results")
# With whether the row of the round that was charged is in the memory, and whether nodes were asked in it.
POINTS = {
    "charged": (CHARGED, False, False),
    "about to ask": (ASKED, False, False),
    "answered": (ANSWERED, False, True),
    "summed": (SUMMED, False, True),
    "drawn": (DRAWN, False, True),
    "written": (WRITTEN, True, True),
    "noised": (NOISED, True, True),
    "moved": (MOVED, True, True),
    "saving": (SAVING, True, True),
}
EVERYWHERE = tuple(name for each in POINTS for name in ((each, "making up") if each == "charged" else (each,)))
SPARE = 12


def run_until(folder: Path, stores: Path, secure: bool, resume: bool, point: Point | None) -> None:
    with Watch(point):
        Place(folder, stores).run_here("served", secure=secure, wait_for=WHOLE, resume=resume, spare=SPARE)


def killed_at(place: Place, point: Point | None, *, secure: bool) -> int | None:
    resume = (place.folder / "served" / LEDGER).exists()
    with forked(run_until, place.folder, place.stores, secure, resume, point) as process:
        process.join()
        return process.exitcode


def rows_known(run: Path) -> int:
    """How many rows a release's memory knows."""
    return memory_of(run)[0] if (run / SECRETS / MEMORY).exists() else 0


@pytest.mark.parametrize(
    ("mechanism", "secure", "points"),
    [
        pytest.param(BANDED, False, ("charged", "making up", "drawn", "noised"), id="banded, open"),
        pytest.param(BANDED, True, ("answered", "written"), id="banded, secure"),
        pytest.param(BANDED, False, EVERYWHERE, id="banded, open, everywhere", marks=pytest.mark.long),
        pytest.param(BANDED, True, EVERYWHERE, id="banded, secure, everywhere", marks=pytest.mark.long),
        pytest.param(BLT, True, EVERYWHERE, id="BLT, secure, everywhere", marks=pytest.mark.long),
    ],
)
def test_a_release_killed_anywhere_uses_no_row_twice_and_keeps_to_the_turns(
    tmp_path: Path, cluster_stores: Path, mechanism: Mapping[str, Any], secure: bool, points: tuple[str, ...]
) -> None:
    place = placed(tmp_path, cluster_stores, mechanism, privacy={"mode": "secure"})
    run = tmp_path / "served"
    seen: dict[int, bytes] = {}
    charged, is_behind = 0, False
    for name in points:
        # Where the row that was charged is not in the memory yet, the next process makes it first, and writes it.
        if name == "making up":
            assert is_behind
            assert killed_at(place, DRAWN, secure=secure) == -9
            assert (verify(run / LEDGER).attempts, rows_known(run)) == (charged, charged - 1)
            continue
        point, is_written, was_asked = POINTS[name]
        if point in (DRAWN, WRITTEN):
            point = replace(point, nth=1 + is_behind)
        assert killed_at(place, point, secure=secure) == -9
        report = verify(run / LEDGER)
        charged, is_behind = charged + 1, not is_written
        assert report.attempts == charged
        rows = rows_known(run)
        assert rows == charged - is_behind
        if mechanism is BANDED:
            for row in range(max(rows - 2, 0), rows):  # of three bands the last two rows are kept, row t at t mod 2
                content = memory_of(run)[1][row % 2].tobytes()
                assert seen.setdefault(row, content) == content
            assert len({*seen.values()}) == len(seen)
        answered = rows_answered(place)
        check_turns(answered)
        assert any(charged - 1 in found for found in answered.values()) == was_asked
        assert {stat.S_IMODE(path.stat().st_mode) for path in (run / SECRETS).iterdir()} == {0o600}
    assert killed_at(place, FINISHED, secure=secure) == -9
    before = (run / LEDGER).read_bytes()
    assert killed_at(place, None, secure=secure) == 0
    assert (run / LEDGER).read_bytes() == before
    # What its owner goes on needing stays: whole groups take turns, so who was in which round is no secret of sampling.
    assert [path.name for path in (run / SECRETS).glob("*")] == ([] if secure else [ACCOUNTS])

    report = verify(run / LEDGER)
    # The model that was being saved when the server was killed is not there, but for the last.
    assert (report.steps, report.attempts) == (STEPS, charged + STEPS)
    assert report.header["accepted"]["attempts"] == STEPS + SPARE
    answered = rows_answered(place)
    check_turns(answered)
    assert all(len({*found}) == len(found) for found in answered.values())
    for row in range(charged, report.attempts):  # rounds that were finished were of the whole group
        assert {name for name, found in answered.items() if row in found} == {
            NAMES[member] for member in GROUPS_OF_THREE[row % CYCLE].tolist()
        }
    check_spent(report, json.loads((run / "results.json").read_text()))


# Whoever is away, and whatever is lost.


@pytest.mark.parametrize("secure", [False, True], ids=["open", "secure"])
def test_absent_members_of_a_group_count_as_zero_and_rows_go_on(
    tmp_path: Path, cluster_stores: Path, secure: bool
) -> None:
    """One of each group is silent when it is asked to train. Of three, two make no secure sum: it is noise alone."""
    place = placed(tmp_path, cluster_stores, BLT, privacy={"mode": "secure"})

    def silent(answer: AnswerFunction) -> AnswerFunction:
        return lambda data: None if parse_order(data, limit=1 << 30).kind is OrderKind.TRAIN else answer(data)

    absent = {member(group): silent for group in range(CYCLE)}
    outcome = place.run_here("served", secure=secure, wait_for=WHOLE, meddle=absent, spare=SPARE)
    report = verify(outcome.folder / LEDGER)
    assert (report.steps, report.attempts) == (STEPS, STEPS)
    assert outcome.results is not None
    check_spent(report, outcome.results)
    answered = rows_answered(place)
    check_turns(answered)
    for name, found in answered.items():
        group = next(g for g, places in enumerate(GROUPS_OF_THREE) if NAMES.index(name) in places)
        assert found == ([] if name in absent else list(range(group, STEPS, CYCLE)))


def test_a_run_ends_at_the_turn_of_a_group_of_which_too_few_are_left(tmp_path: Path, cluster_stores: Path) -> None:
    """Nobody takes their place: members of other groups would be in rounds that lie too close together."""
    place = placed(tmp_path, cluster_stores, BLT, privacy={"mode": "secure"})
    gone = {member(0): leaving(place, member(0), at=1)}
    said: list[str] = []
    outcome = place.run_here("served", secure=True, wait_for=WHOLE, meddle=gone, spare=1, say=said.append)
    assert outcome.results is not None
    ended = outcome.results["ended"]
    assert (ended["reason"], ended["step"]) == (TOO_FEW, CYCLE)
    line = f"only 2 of 3 nodes of group 1 of 3 can still take part, and a round needs 3 ({member(0)} (left for good))"
    assert ended["words"].startswith(line)
    assert f"{member(0)}: left for good; 8 of 9 nodes can still take part" in said
    assert verify(outcome.folder / LEDGER).attempts == CYCLE
    assert not (outcome.folder / SECRETS).exists()


def test_a_release_that_draws_within_groups_costs_what_is_planned(tmp_path: Path, cluster_stores: Path) -> None:
    """Two of three on average, drawn by the system: what people were promised, and what dp-accounting says."""
    place = placed(tmp_path, cluster_stores, BANDED, cohort_size=2, privacy={"mode": "secure"})
    outcome = place.run_here("served", secure=False, wait_for=WHOLE, spare=1)
    report = verify(outcome.folder / LEDGER)
    assert outcome.results is not None
    check_spent(report, outcome.results)
    check_turns(rows_answered(place))
    event = event_from_json(report.header["event"])
    assert isinstance(event, CorrelatedRelease)
    assert (event.sampling_rate, event.cycle) == (pytest.approx(2 / 3), CYCLE)
    assert not (outcome.folder / SECRETS).exists()  # nor who was drawn


def test_word_error_rates_are_measured_on_anybody_and_composed(tmp_path: Path, four_each: Path) -> None:
    """To the bit what a simulation measures, between rounds of which each is one group's."""
    asked: dict[str, Any] = {"client_wer": {"words": 2, "noise_multiplier": 2.0, "every": 2}}
    place = placed(tmp_path, four_each, BANDED, cohort_size=2, clients={"holdout": 0.5}, **asked)
    outcome = place.run_here("served", secure=False, wait_for=WHOLE)
    check_same(outcome.folder, place.simulate("simulated"))
    report = verify(outcome.folder / LEDGER)
    assert (report.attempts, report.measured_attempts) == (STEPS, STEPS // 2)
    check_turns(rows_answered(place))


# Groups stay.


def swapped(place: Place, one: str, other: str) -> None:
    """The same people in a roster in which two have each other's names, and so each other's places."""
    path = place.folder / "roster.yaml"
    path.write_text(path.read_text().replace(one, "somebody").replace(other, one).replace("somebody", other))


def test_a_release_does_not_go_on_with_people_in_other_groups(tmp_path: Path, cluster_stores: Path) -> None:
    place = placed(tmp_path, cluster_stores, BLT, privacy={"mode": "secure"})
    with pytest.raises(RuntimeError, match="the server breaks"):
        place.run_here("served", secure=False, wait_for=WHOLE, meddle={member(1): breaks_at(1)}, spare=SPARE)
    kept = tmp_path / "served" / SECRETS / GROUPS
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kept.parent, kept)] == [0o700, 0o600]
    before = (tmp_path / "served" / LEDGER).read_bytes()
    swapped(place, member(0), member(1))
    with pytest.raises(InputError, match="no longer in the groups in which this release began") as refused:
        place.run_here("served", secure=False, wait_for=WHOLE, resume=True, spare=SPARE)
    assert "restore the roster" in str(refused.value)
    assert (tmp_path / "served" / LEDGER).read_bytes() == before  # nothing is charged for it
    swapped(place, member(0), member(1))
    outcome = place.run_here("served", secure=False, wait_for=WHOLE, resume=True, spare=SPARE)
    assert outcome.results is not None
    check_spent(verify(outcome.folder / LEDGER), outcome.results)
    check_turns(rows_answered(place))
