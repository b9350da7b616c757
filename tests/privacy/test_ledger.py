"""The ledger: every charge on disk before its release, and no way to lose, move or invent one unseen."""

import json
import math
import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from sottovoce.base.errors import InputError
from sottovoce.privacy.accounting import rdp_epsilon
from sottovoce.privacy.chain import Mark, read_chain, seal
from sottovoce.privacy.events import NoGuarantee, poisson_release, repeated
from sottovoce.privacy.fingerprint import fingerprint_tensor
from sottovoce.privacy.ledger import BudgetSpent, Charge, Ledger, cohort_commitment, verify
from sottovoce.privacy.ledger_records import Header
from sottovoce.privacy.ledger_report import LedgerReport

EVENT = poisson_release(1.0, sampling_rate=0.02)
DELTA = 1e-6
Mode = Literal["seeded", "secure"]


def header_of(**changes: Any) -> Header:
    values: dict[str, Any] = {"run": "r", "mode": "seeded", "plan": {"clip_bound": 0.5}, "event": EVENT, "delta": DELTA}
    return Header(**{**values, **changes})


def intend(ledger: Ledger, step: int, **changes: Any) -> Charge:
    inputs = {"clip_bound": 0.5, "parameters": f"model {step}", "cohort": f"cohort {step}"}
    return ledger.intend(EVENT, step=step, **{**inputs, **changes})


def spend(ledger: Ledger, steps: range, *, commit: bool = True) -> Mark:
    for step in steps:
        intend(ledger, step)
    if commit:
        return ledger.commit(step=steps[-1], result=f"model {steps[-1] + 1}")
    return ledger.mark


_open: dict[Path, Ledger] = {}


def opened(path: Path, *, header: Header, checkpoint: Mark | None = None) -> Ledger:
    """A ledger in a new process: the one that had it open before was killed, and has let go of the file."""
    if path in _open:
        _open.pop(path).close()
    _open[path] = Ledger(path, header=header, checkpoint=checkpoint)
    return _open[path]


def charged(steps: int) -> float:
    return rdp_epsilon(repeated(EVENT, steps), DELTA)


def test_epsilon_follows_the_accountant(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "l", header=header_of())
    spend(ledger, range(5))
    assert ledger.epsilon == pytest.approx(charged(5), rel=1e-9)
    written = [record["epsilon"] for record in read_chain(tmp_path / "l").records[1:6]]
    assert written == pytest.approx([charged(n) for n in range(1, 6)], rel=1e-9)


def test_an_intent_is_on_the_disk_before_the_call_returns(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "l", header=header_of())
    synced: list[int] = []
    fsync = os.fsync

    def recorded(handle: int) -> None:
        synced.append(os.fstat(handle).st_size)
        fsync(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", recorded)
        spend(ledger, range(3), commit=False)
    sizes = np.cumsum([len(line) + 1 for line in (tmp_path / "l").read_bytes().split(b"\n")[:-1]])
    assert synced == sizes[1:].tolist()


@pytest.mark.parametrize("killed_after", range(8))
def test_a_killed_simulation_ends_with_the_same_bytes(tmp_path: Path, killed_after: int) -> None:
    whole = opened(tmp_path / "whole", header=header_of())
    spend(whole, range(3))
    spend(whole, range(3, 8))
    path = tmp_path / "killed"
    first = opened(path, header=header_of())
    checkpoint = spend(first, range(3)) if killed_after >= 3 else None
    start = 3 if checkpoint else 0
    if killed_after > start:
        spend(first, range(start, killed_after), commit=False)
    first.close()
    resumed = opened(path, header=header_of(), checkpoint=checkpoint)
    if not checkpoint:
        spend(resumed, range(3))
    spend(resumed, range(3, 8))
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    assert resumed.epsilon == pytest.approx(charged(8))


def test_a_commit_whose_checkpoint_was_lost(tmp_path: Path) -> None:
    for mode, attempts in (("seeded", 6), ("secure", 9)):
        path = tmp_path / mode
        header = header_of(mode=mode)
        ledger = opened(path, header=header)
        checkpoint = spend(ledger, range(3))
        spend(ledger, range(3, 6))  # killed before this checkpoint was renamed into place
        resumed = opened(path, header=header, checkpoint=checkpoint)
        mark = spend(resumed, range(3, 6))
        report = verify(path)
        assert (report.steps, report.attempts, report.mark) == (6, attempts, mark)
        assert report.epsilon.rdp == pytest.approx(charged(attempts))


def test_a_replay_that_gives_another_result_is_refused(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "l", header=header_of())
    spend(ledger, range(3))
    resumed = opened(tmp_path / "l", header=header_of())
    spend(resumed, range(3), commit=False)
    with pytest.raises(InputError, match="gave another result"):
        resumed.commit(step=2, result="something else")


def test_a_simulation_may_commit_earlier_the_second_time(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "l", header=header_of())
    spend(ledger, range(6), commit=False)
    resumed = opened(tmp_path / "l", header=header_of())
    checkpoint = spend(resumed, range(4))
    again = opened(tmp_path / "l", header=header_of(), checkpoint=checkpoint)
    spend(again, range(4, 8))
    assert verify(tmp_path / "l").attempts == 8


def test_a_release_charges_every_attempt(tmp_path: Path) -> None:
    header = header_of(mode="secure")
    ledger = opened(tmp_path / "l", header=header)
    checkpoint = spend(ledger, range(2))
    spend(ledger, range(2, 5), commit=False)
    for _ in range(2):  # killed twice more at the same place
        ledger = opened(tmp_path / "l", header=header, checkpoint=checkpoint)
        spend(ledger, range(2, 4), commit=False)
    ledger = opened(tmp_path / "l", header=header, checkpoint=checkpoint)
    spend(ledger, range(2, 6))
    report = verify(tmp_path / "l")
    assert (report.steps, report.attempts, report.committed_step) == (6, 2 + 3 + 2 + 2 + 4, 5)
    assert report.epsilon.rdp == pytest.approx(charged(13))
    attempts = [record["attempt"] for record in read_chain(tmp_path / "l").records if record.get("step") == 2]
    assert attempts == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["seeded", "secure"])
def test_steps_may_be_charged_ahead_of_what_is_committed_where_rounds_overlap(tmp_path: Path, mode: Mode) -> None:
    """Killed, a simulation goes on in the same bytes, and a release charges all that had begun again."""
    header, ahead = header_of(mode=mode, begun_ahead=2), 2

    def spend_ahead(ledger: Ledger, steps: range, *, begun: int) -> Mark:
        mark = ledger.mark
        for step in steps:
            while begun <= min(step + ahead, 5):
                intend(ledger, begun)
                begun += 1
            mark = ledger.commit(step=step, result=f"model {step + 1}")
        return mark

    whole = opened(tmp_path / "whole", header=header)
    spend_ahead(whole, range(6), begun=0)
    broken = opened(tmp_path / "broken", header=header)
    mark = spend_ahead(broken, range(3), begun=0)  # steps 3 and 4 have begun
    again = opened(tmp_path / "broken", header=header, checkpoint=mark)
    spend_ahead(again, range(3, 6), begun=3)
    report = verify(tmp_path / "broken")
    assert report.steps == 6
    assert report.attempts == (6 if mode == "seeded" else 8)
    assert rdp_epsilon(report.spent, DELTA) == pytest.approx(charged(report.attempts), rel=1e-9)
    same = (tmp_path / "broken").read_bytes() == (tmp_path / "whole").read_bytes()
    assert same == (mode == "seeded")


@pytest.mark.parametrize("begun_ahead", [None, 1])
def test_a_release_is_not_committed_further_behind_than_its_header_says(
    tmp_path: Path, begun_ahead: int | None
) -> None:
    ledger = opened(tmp_path / "l", header=header_of(mode="secure", begun_ahead=begun_ahead))
    spend(ledger, range(4), commit=False)
    with pytest.raises(InputError, match="commit of steps 0 to 1 after step 3: not what was intended"):
        ledger.commit(step=1, result="model 2")


@pytest.mark.parametrize("begun_ahead", [0, -1, 1.5])
def test_no_number_of_steps_ahead_is_refused(tmp_path: Path, begun_ahead: Any) -> None:
    with pytest.raises(InputError, match=f"begun_ahead={begun_ahead}: expected a whole number, at least 1"):
        Ledger(tmp_path / "l", header=header_of(begun_ahead=begun_ahead))


@pytest.mark.parametrize(("changed", "to"), [("parameters", "other"), ("cohort", "other"), ("clip_bound", 0.4)])
def test_a_replay_over_changed_inputs_is_refused(tmp_path: Path, changed: str, to: Any) -> None:
    spend(opened(tmp_path / "l", header=header_of()), range(3), commit=False)
    resumed = opened(tmp_path / "l", header=header_of())
    with pytest.raises(InputError, match=f"{changed}=.* would cancel"):
        intend(resumed, 0, **{changed: to})


@pytest.mark.parametrize("mode", ["seeded", "secure"])
def test_steps_follow_one_another_while_the_ledger_is_open(tmp_path: Path, mode: Mode) -> None:
    """A second go at a step needs a resumed run: in a simulation its noise would be the same over another sum."""
    header = header_of(mode=mode)
    ledger = opened(tmp_path / "l", header=header)
    checkpoint = spend(ledger, range(3))
    spend(ledger, range(3, 5), commit=False)
    for step in (4, 3, 6, 0):
        with pytest.raises(AssertionError, match="the step after the last is 5"):
            intend(ledger, step)
    resumed = opened(tmp_path / "l", header=header, checkpoint=checkpoint)
    for step in (2, 4, 5):
        with pytest.raises(AssertionError, match="the step after the last is 3"):
            intend(resumed, step)
    intend(resumed, 3)


def test_a_charge_is_used_up(tmp_path: Path) -> None:
    charge = intend(opened(tmp_path / "l", header=header_of()), 0)
    assert (charge.release("sum"), charge.release("count")) == (0, 0)
    with pytest.raises(AssertionError, match="a second sum"):
        charge.release("sum")


def test_two_writers_never_share_a_ledger(tmp_path: Path) -> None:
    """Each would write over the other's charges. The second one is another process, as it would be."""
    opened(tmp_path / "l", header=header_of())
    script = (
        "import pathlib, sys; from sottovoce.privacy.chain import ChainWriter; ChainWriter(pathlib.Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "l"], capture_output=True, text=True)
    assert "is open in another run" in done.stderr.splitlines()[-1]


def test_a_changed_budget_is_written_down_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "l"
    first = opened(path, header=header_of(epsilon_budget=charged(2) + 1e-9))
    checkpoint = spend(first, range(2))
    with pytest.raises(BudgetSpent):
        intend(first, 2)
    raised = opened(path, header=header_of(epsilon_budget=charged(4) + 1e-9), checkpoint=checkpoint)
    checkpoint = spend(raised, range(2, 4))
    with pytest.raises(BudgetSpent):
        intend(raised, 4)
    assert verify(path).epsilon_budget == charged(4) + 1e-9
    before = path.read_bytes()
    opened(path, header=header_of(epsilon_budget=charged(4) + 1e-9), checkpoint=checkpoint)
    assert path.read_bytes() == before  # nothing changed, nothing to say
    lowered = opened(path, header=header_of(epsilon_budget=0.1), checkpoint=checkpoint)
    with pytest.raises(BudgetSpent):
        intend(lowered, 4)
    opened(path, header=header_of(), checkpoint=checkpoint)
    assert verify(path).epsilon_budget is None
    assert [record["kind"] for record in read_chain(path).records].count("budget") == 3


def test_a_release_keeps_no_digest_of_private_data() -> None:
    with pytest.raises(AssertionError, match="digest of private data"):
        header_of(mode="secure", inputs="digest of the store")


def test_the_budget_stops_before_the_step_that_exceeds_it(tmp_path: Path) -> None:
    budget = charged(4) + 1e-9
    header = header_of(epsilon_budget=budget)
    ledger = opened(tmp_path / "l", header=header)
    spend(ledger, range(4))
    before = (tmp_path / "l").read_bytes()
    with pytest.raises(BudgetSpent, match="step 4 would bring epsilon") as caught:
        intend(ledger, 4)
    assert not isinstance(caught.value, InputError)
    assert caught.value.epsilon <= budget < caught.value.epsilon_next
    assert (tmp_path / "l").read_bytes() == before


def test_no_guarantee_is_written_as_such(tmp_path: Path) -> None:
    event = NoGuarantee("no noise is added")
    ledger = opened(tmp_path / "l", header=header_of(event=event))
    assert ledger.intend(event, step=0, clip_bound=math.inf, parameters="p", cohort="c").epsilon is None
    assert math.isinf(ledger.epsilon)
    report = verify(tmp_path / "l")
    assert (report.as_json()["epsilon_rdp"], report.as_json()["epsilon_pld"]) == (None, None)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(report.table())
    assert "no guarantee" in capture.get()
    assert "no noise is added" in capture.get()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "other"}, "run=r, this run has other"),
        ({"plan": {"clip_bound": 0.4}}, r"plan.clip_bound=0.5, this run has 0.4"),
        ({"delta": 1e-5}, "delta=1e-06"),
        ({"inputs": "another store"}, "inputs=, this run has another store"),
        ({"mode": "secure"}, "mode=seeded"),
    ],
)
def test_a_foreign_ledger_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    spend(opened(tmp_path / "l", header=header_of()), range(2))
    with pytest.raises(InputError, match=f"belongs to another run: it says {message}"):
        opened(tmp_path / "l", header=header_of(**changes))


def test_a_shortened_rolled_back_or_missing_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = opened(path, header=header_of(mode="secure"))
    known = astuple(spend(ledger, range(3)))
    earlier = path.read_bytes()
    checkpoint = spend(ledger, range(3, 6))
    lines = path.read_bytes().splitlines(keepends=True)

    def resume_with(data: bytes | None) -> None:
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        opened(path, header=header_of(mode="secure"), checkpoint=checkpoint)

    for shorter in (b"".join(lines[:-1]), b"".join(lines)[:-5], lines[0], b""):
        with pytest.raises(InputError, match="shortened or rolled back"):
            resume_with(shorter)
    with pytest.raises(InputError, match="is missing"):
        resume_with(None)
    # Rolled back and gone on with: long enough, but not the lines the checkpoint knew.
    path.write_bytes(earlier)
    other = opened(path, header=header_of(mode="secure"), checkpoint=Mark(*known))
    for step in range(3, 9):
        intend(other, step, parameters="other")
    with pytest.raises(InputError, match="is not the ledger that the checkpoint knew"):
        opened(path, header=header_of(mode="secure"), checkpoint=checkpoint)


def test_a_torn_last_line_is_repaired_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = opened(path, header=header_of())
    checkpoint = spend(ledger, range(3))
    whole = path.read_bytes()
    spend(ledger, range(3, 4), commit=False)
    line = path.read_bytes()[len(whole) :]
    for cut in (1, len(line) // 2, len(line) - 1):
        path.write_bytes(whole + line[:cut])
        assert verify(path).torn_bytes == cut
        resumed = opened(path, header=header_of(), checkpoint=checkpoint)
        assert resumed.repaired is not None
        assert f"removed {cut} bytes" in resumed.repaired
        assert path.read_bytes() == whole
        spend(resumed, range(3, 4), commit=False)
        assert path.read_bytes() == whole + line
    path.write_bytes(whole.splitlines(keepends=True)[0][:10])  # killed in its very first line
    fresh = opened(path, header=header_of())
    assert fresh.repaired is not None
    assert verify(path).steps == 0


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "l"
    ledger = opened(path, header=header_of())
    spend(ledger, range(2))
    before = path.read_bytes()
    write = os.pwrite

    def full_disk(handle: int, data: bytes, offset: int) -> int:
        if len(data) < 40:
            raise OSError(28, "No space left on device")
        return write(handle, data[: len(data) // 2], offset)

    monkeypatch.setattr(os, "pwrite", full_disk)
    with pytest.raises(OSError, match="No space left"):
        intend(ledger, 2)
    monkeypatch.undo()
    assert path.read_bytes() == before
    intend(ledger, 2)
    with_intent = path.read_bytes()
    monkeypatch.setattr(os, "pwrite", full_disk)
    with pytest.raises(OSError, match="No space left"):
        ledger.commit(step=2, result="model 3")
    monkeypatch.undo()
    assert path.read_bytes() == with_intent
    ledger.commit(step=2, result="model 3")  # once there is room again
    assert verify(path).committed_step == 2


# Fuzzing: whatever is done to the file, it is either told, or a torn end is cut and reported.


@pytest.fixture(scope="module", params=["seeded", "secure"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Header, Mark, bytes]:
    mode: Mode = request.param
    path = tmp_path_factory.mktemp("ledger") / "l"
    header = header_of(mode=mode)
    ledger = opened(path, header=header)
    spend(ledger, range(3))
    mark = spend(ledger, range(3, 6))
    return header, mark, path.read_bytes()


def assert_refused(folder: Path, finished: tuple[Header, Mark, bytes], data: bytes) -> None:
    header, mark, original = finished
    path = folder / "fuzzed"
    path.write_bytes(data)
    if data == original:
        return
    with pytest.raises(InputError):
        opened(path, header=header, checkpoint=mark)
    with pytest.raises(InputError):
        verify(path, checkpoint=mark)
    # Without the checkpoint a whole-line cut at the end cannot be seen; everything else can.
    report = problem_or_report(path)
    assert isinstance(report, InputError) or report.torn_bytes > 0 or original.startswith(data)


def problem_or_report(path: Path) -> LedgerReport | InputError:
    try:
        return verify(path)
    except InputError as problem:
        return problem


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(data=st.data())
@FUZZ
def test_flipped_bytes(tmp_path: Path, finished: tuple[Header, Mark, bytes], data: st.DataObject) -> None:
    original = bytearray(finished[2])
    place = data.draw(st.integers(0, len(original) - 1))
    original[place] = data.draw(st.one_of(st.sampled_from(b'\n "0}'), st.integers(0, 255)))
    assert_refused(tmp_path, finished, bytes(original))


@given(data=st.data())
@FUZZ
def test_cut_anywhere(tmp_path: Path, finished: tuple[Header, Mark, bytes], data: st.DataObject) -> None:
    original = finished[2]
    start = data.draw(st.integers(0, len(original)))
    stop = data.draw(st.integers(start, len(original)))
    assert_refused(tmp_path, finished, original[:start] + original[stop:])


@given(data=st.data())
@FUZZ
def test_lines_moved_doubled_or_dropped(
    tmp_path: Path, finished: tuple[Header, Mark, bytes], data: st.DataObject
) -> None:
    lines = finished[2].splitlines(keepends=True)
    order = data.draw(st.lists(st.sampled_from(range(len(lines))), max_size=len(lines) + 2))
    if order[: len(lines)] == list(range(len(lines))) and len(order) > len(lines):
        order[-1] = 0  # lines after the whole file: still told
    assert_refused(tmp_path, finished, b"".join(lines[i] for i in order))


@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        (2, {"epsilon": 0.001}, "its events add up to"),
        (2, {"step": 7}, "a step is missing or repeated"),
        (2, {"attempt": 2}, "expected 1"),
        (2, {"kind": "remark"}, "expected intent, commit, client_wer, budget or results"),
        (2, {"kind": "budget"}, "'epsilon_budget' is missing"),
        (2, {"kind": "budget", "epsilon_budget": -1}, "epsilon_budget=-1"),
        (2, {"event": {"kind": "gaussian", "noise_multiplier": 9}}, "the header says"),
        (2, {"step": "two"}, "not supported"),
        (4, {"first": 2, "step": 9}, "not what was intended"),
        (4, {"epsilon": 0.001}, "its events add up to"),
        (0, {"event": {"kind": "gaussian", "noise_multiplier": -1}}, "privacy event"),
        (0, {"delta": 2}, "delta=2"),
        (0, {"version": 7}, "version=7"),
    ],
)
def test_a_consistent_chain_over_impossible_records_is_told(
    tmp_path: Path, line: int, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "l"
    spend(opened(path, header=header_of()), range(3))
    records = [dict(record) for record in read_chain(path).records]
    records[line].update(changes)
    forged, head = b"", "0" * 64
    for record in records:
        sealed, head = seal(record, after=head)
        forged += sealed
    path.write_bytes(forged)
    with pytest.raises(InputError, match=message) as caught:
        verify(path)
    assert f"line {line + 1}:" in str(caught.value) or "version" in message
    assert "\n" not in str(caught.value)


def test_the_report_is_json(tmp_path: Path) -> None:
    spend(opened(tmp_path / "l", header=header_of()), range(3))
    report = json.loads(json.dumps(verify(tmp_path / "l").as_json()))
    assert (report["valid"], report["steps"], report["committed_step"]) == (True, 3, 2)
    assert report["epsilon_rdp"] == pytest.approx(charged(3))
    assert 0 < report["epsilon_pld"] < report["epsilon_rdp"]
    with pytest.raises(InputError, match="no ledger there"):
        verify(tmp_path / "nothing")


def test_the_commitment_binds_and_hides() -> None:
    cohort = np.array([1, 5, 9])
    commitment = cohort_commitment(cohort, nonce=b"n" * 32)
    assert commitment == cohort_commitment(cohort.astype(np.int32), nonce=b"n" * 32)
    assert commitment != cohort_commitment(np.array([1, 5, 8]), nonce=b"n" * 32)
    assert commitment != cohort_commitment(cohort, nonce=b"m" * 32)


@given(st.integers(1, 200), st.integers(0, 199), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
@settings(deadline=None)
def test_the_fingerprint_sees_every_element(size: int, place: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(size, dtype=dtype)
    changed = tensor.clone()
    changed[place % size] += 1
    assert fingerprint_tensor(tensor) == fingerprint_tensor(tensor.clone())
    assert len({fingerprint_tensor(t) for t in (tensor, changed, torch.cat([tensor, tensor.new_zeros(1)]))}) == 3
    if size > 1:
        assert fingerprint_tensor(tensor) != fingerprint_tensor(tensor.roll(1))


def test_the_fingerprint_against_its_slow_twin() -> None:
    """In Python's integers: Σ mix(bits + mix(place ^ key)) mod 2⁶⁴. Ledgers hold it, so it may never change."""

    def mix(x: int) -> int:
        x %= 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    tensor = torch.tensor([0.0, -1.5, 3e38, 1e-45])
    bits = [int.from_bytes(np.float32(value).tobytes(), "little", signed=True) for value in tensor.tolist()]
    lanes = [
        sum(mix(value + mix(place ^ key)) for place, value in enumerate(bits, start=1)) % 2**64
        for key in (0x1F3D5B79_2468ACE1, 0x5851F42D_4C957F2D)
    ]
    assert fingerprint_tensor(tensor) == f"float32-4-{lanes[0]:016x}{lanes[1]:016x}"
