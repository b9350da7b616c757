"""Runs whose noise is correlated over rounds: killed anywhere, no row is for two sums, and every row is paid for."""

import json
import signal
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.points import CHARGED, SAVED, Point
from tests.ranks import in_processes
from tests.training import forked
from tests.training.test_agreement import command, expect, folders, run_arguments
from tests.training.test_distributed_runs import run_here

from sottovoce import InputError, Simulation, load_recipe
from sottovoce.models.recogniser import load_recogniser
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import CorrelatedRelease, event_from_json, repeated
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.round_noise import MEMORY, CorrelatedNoise, memory_rows
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.training import checkpoint, federation
from sottovoce.training.run_context import Outcome

__all__ = ["folders"]  # a fixture

STEPS = 6
# Nine clients: in four groups, of which cohorts of two are 8 in 9; or in five groups of one or two, taken whole.
BANDED = "federation.privacy.mechanism={kind: banded, bands: 3, cycle: 4}"
BLT = "federation.privacy.mechanism={kind: blt, buffers: 2, cycle: 5}"
SHORT = [f"federation.steps={STEPS}", f"federation.evaluate_every={STEPS}", "federation.privacy.adaptive=null"]
# A checkpoint follows every second round, and each of these comes before the first one of its process.
CHARGED_AGAIN = replace(CHARGED, nth=2)
DRAWN = Point("sottovoce.privacy.round_noise:CorrelatedNoise._write", nth=2, at="call")
WRITTEN = replace(DRAWN, at="return")
ADDED = Point("sottovoce.privacy.plan:Plan.add_noise", nth=2)
MOVED = Point("sottovoce.federated.round:run_round", nth=2)
SAVING = replace(SAVED, at="call")
FINISHED = Point("sottovoce.training.run_context:write_results")


def killed(arguments: list[object], point: Point) -> None:
    ended = forked.run([*arguments, "--resume"], kill_at=point)
    assert ended.code == -signal.SIGKILL, ended.err


def finish(arguments: list[object]) -> None:
    ended = forked.run([*arguments, "--resume"])
    assert ended.code == 0, ended.err


@pytest.mark.long
@pytest.mark.parametrize("mechanism", [BANDED, BLT])
def test_a_simulation_killed_anywhere_ends_with_the_same_bits_and_charges_each_row_once(
    mechanism: str, narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    arguments = ["run", narrow_recipe, *SHORT, mechanism, "--stores", short_stores, "--out"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish([*arguments, whole])
    for point in (CHARGED_AGAIN, ADDED, MOVED, SAVING):
        killed([*arguments, broken], point)
    finish([*arguments, broken])
    for file in ("model.safetensors", "optimiser.safetensors"):
        expected, found = (run / "checkpoints/latest" / file for run in (whole, broken))
        assert found.read_bytes() == expected.read_bytes()
    memory = load_file(broken / "checkpoints/latest/optimiser.safetensors")["noise"]
    event = event_from_json(verify(broken / "ledger.jsonl").header["event"])
    assert isinstance(event, CorrelatedRelease)
    assert len(memory) == memory_rows(event.strategy) > 0
    for file in ("ledger.jsonl", "results.json"):
        assert (broken / file).read_bytes() == (whole / file).read_bytes()
    assert verify(broken / "ledger.jsonl").attempts == STEPS
    assert not (broken / SECRETS).exists()


def memory_of(run: Path) -> tuple[int, Any]:
    """How many rows a release's memory knows, and what it has of them."""
    with (run / SECRETS / MEMORY).open("rb") as file:
        return int(np.load(file)), np.load(file)


def test_a_release_killed_anywhere_uses_no_row_twice_pays_for_all_and_leaves_no_secret(
    narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = ["run", narrow_recipe, *SHORT, BANDED, "federation.privacy.mode=secure"]
    arguments += ["--stores", short_stores, "--out", run]
    seen: dict[int, bytes] = {}
    charged = 0
    # With how many more rounds are charged, and of how many the row is not written. Where one is not, the next process
    # makes it up first, and writes it.
    for point, more, unwritten in (
        (CHARGED_AGAIN, 2, 1),
        (DRAWN, 1, 1),
        (WRITTEN, 1, 0),
        (ADDED, 2, 0),
        (MOVED, 2, 0),
        (SAVING, 2, 0),
    ):
        killed(arguments, point)
        attempts = verify(run / "ledger.jsonl").attempts
        rows, memory = memory_of(run)
        assert (attempts, rows) == (charged + more, charged + more - unwritten)
        for row in range(max(rows - 2, 0), rows):
            # Of three bands the last two rows are kept, row t at t mod 2: never drawn again, and no two the same.
            content = memory[row % 2].tobytes()
            assert seen.setdefault(row, content) == content
        assert len(set(seen.values())) == len(seen)
        assert stat.S_IMODE((run / SECRETS / MEMORY).stat().st_mode) == 0o600
        assert stat.S_IMODE((run / SECRETS).stat().st_mode) == 0o700
        charged = attempts
    killed(arguments, FINISHED)
    assert (run / SECRETS / MEMORY).exists()
    before = (run / "ledger.jsonl").read_bytes()
    finish(arguments)
    assert not (run / SECRETS).exists()
    assert (run / "ledger.jsonl").read_bytes() == before
    assert "noise" not in load_file(run / "checkpoints/latest/optimiser.safetensors")

    report = verify(run / "ledger.jsonl")
    assert (report.steps, report.attempts) == (STEPS, charged + STEPS)
    event = event_from_json(report.header["event"])
    assert isinstance(event, CorrelatedRelease)
    assert report.spent == repeated(event, report.attempts)
    told = json.loads((run / "results.json").read_text())["privacy"]
    expected = epsilon(repeated(event, report.attempts), report.header["delta"])
    assert (told["epsilon_pld"], told["epsilon_rdp"]) == (expected.pld, expected.rdp)
    assert told["mechanism"] == report.header["plan"]["mechanism"]


def test_a_release_whose_memory_is_gone_does_not_go_on(narrow_recipe: Path, short_stores: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["run", narrow_recipe, *SHORT, BLT, "federation.privacy.mode=secure"]
    arguments += ["--stores", short_stores, "--out", run]
    killed(arguments, ADDED)
    (run / SECRETS / MEMORY).unlink()
    ended = forked.run([*arguments, "--resume"])
    assert ended.code == 2
    assert "knows 0 rows of noise, the ledger has charged 2" in ended.err
    assert verify(run / "ledger.jsonl").attempts == 2


def test_a_budget_ends_a_run_within_it_and_its_secret_goes(
    narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    changes = [*SHORT, BLT, "federation.privacy.mode=secure"]
    whole = run_here(narrow_recipe, changes, short_stores, tmp_path / "whole")
    spent = [json.loads(line).get("epsilon") for line in (whole.folder / "metrics.jsonl").read_text().splitlines()]
    budget = spent[4]
    ended = run_here(
        narrow_recipe, [*changes, f"federation.privacy.epsilon_budget={budget}"], short_stores, tmp_path / "short"
    )
    assert ended.results is not None
    assert (ended.results["ended"]["step"], ended.results["ended"]["reason"]) == (4, "budget")
    assert ended.results["privacy"]["epsilon_rdp"] == pytest.approx(budget)
    assert not (ended.folder / SECRETS).exists()


@pytest.mark.parametrize("mechanism", [BANDED, BLT])
def test_where_bits_do_not_repeat_lost_rows_are_burned_and_made_again_from_the_seed(
    mechanism: str, narrow_recipe: Path, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: rounds 3 and 4 are lost with the checkpoint that would have covered them, and so are their rows."""
    monkeypatch.setattr(federation.FederatedLoop, "_repeatable", False)
    changes, out, save = [*SHORT, mechanism], tmp_path / "run", checkpoint.save_checkpoint

    def lost(folder: Path, saved: checkpoint.Checkpoint) -> Path:
        if saved.step == 4:
            raise InputError("killed")
        return save(folder, saved)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_checkpoint", lost)
        with pytest.raises(InputError, match="killed"):
            run_here(narrow_recipe, changes, short_stores, out)
    rows: list[int] = []
    given = CorrelatedNoise.row
    monkeypatch.setattr(CorrelatedNoise, "row", lambda own, row: (rows.append(row), given(own, row))[1])
    run_here(narrow_recipe, changes, short_stores, out, resume=True)
    assert rows == [2, 3, 4, 5, 6, 7]  # the first two are burned
    report = verify(out / "ledger.jsonl")
    assert (report.header["mode"], report.steps, report.attempts) == ("unrepeated", STEPS, STEPS + 2)
    state = json.loads((out / "checkpoints/latest/state.json").read_text())
    assert state["noise_rows"] == STEPS + 2


# Whoever trains, and wherever.


def one_thread_run(*arguments: Any) -> Outcome:
    torch.set_num_threads(1)
    return run_here(*arguments)


@pytest.mark.long
def test_engines_and_ranks_come_to_the_same(narrow_recipe: Path, short_stores: Path, tmp_path: Path) -> None:
    """Cohorts of two at most, whose sum has the same bits whoever adds it up; a stack rounds in its own way."""
    ways = {
        "sequential": (1, "sequential"),
        "workers": (1, "workers"),
        "ranks": (2, "sequential"),
        "stacked": (1, "stacked"),
    }
    models = {}
    for name, (count, engine) in ways.items():
        changes = [*SHORT, BLT, "federation.workers=2", f"federation.engine={engine}"]
        found = in_processes(count, one_thread_run, narrow_recipe, changes, short_stores, tmp_path / name)[0]
        models[name] = load_recogniser(found.folder / "checkpoints/latest").parameters
    for name, expected in models["sequential"].items():
        assert torch.equal(models["workers"][name], expected)
        assert torch.equal(models["ranks"][name], expected)
        torch.testing.assert_close(models["stacked"][name], expected, rtol=1e-4, atol=1e-5)


def other_numbers(rank: int) -> None:
    from sottovoce.privacy import mechanism
    from sottovoce.privacy.strategies import Banded

    if rank == 1:
        mechanism.optimal_banded = lambda **_: Banded(column=(1.0, 0.5, 0.25))  # type: ignore[assignment]


def test_one_rank_with_another_strategy_ends_all(narrow_recipe: Path, folders: list[Path], tmp_path: Path) -> None:
    same = run_arguments(narrow_recipe, tmp_path / "out", *SHORT, BANDED)
    ended = in_processes(2, command, folders, [same, same], other_numbers)
    ours = load_recipe(str(narrow_recipe), [*SHORT, BANDED]).federated.privacy.mechanism
    assert ours is not None
    column = [*ours.for_run(STEPS, population_size=9, cohort_size=2).strategy.column]  # type: ignore[union-attr]
    line = f"rank 1's plan differs from rank 0's: mechanism.strategy.column is [1.0, 0.5, 0.25], not {column}"
    expect(ended, line, out=tmp_path / "out")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mechanism", [BANDED, BLT])
def test_rounds_in_the_hand_are_those_of_a_run(
    mechanism: str, narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    changes = [*SHORT, mechanism, "federation.engine=sequential"]
    run_here(narrow_recipe, changes, short_stores, tmp_path / "run")
    last = load_recogniser(tmp_path / "run/checkpoints/latest").parameters
    recipe = load_recipe(str(narrow_recipe), changes)
    simulation = Simulation(recipe, stores=short_stores, runs=tmp_path / "runs")
    assert len([*simulation.rounds()]) == STEPS
    assert all(torch.equal(simulation.model.parameters[name], tensor) for name, tensor in last.items())


def test_a_target_is_met_and_clients_errors_are_measured_within_it(
    narrow_recipe: Path, stores: Path, tmp_path: Path
) -> None:
    """Rounds in groups and measurements on anybody: one ε for both."""
    changes = [*SHORT, BANDED, "federation.privacy.noise_multiplier=null", "federation.privacy.target_epsilon=2"]
    changes += ["federation.client_wer={words: 10, noise_multiplier: 20}", "federation.clients.holdout=0.5"]
    ended = run_here(narrow_recipe, changes, stores, tmp_path / "run")
    assert ended.results is not None
    told = ended.results["privacy"]
    assert 1.99 < told["epsilon_pld"] <= 2
    assert told["promised_client_wers"] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["federation.privacy.adaptive={target_quantile: 0.5}"], "mechanism with adaptive clipping"),
        (["federation.privacy.sampling=fixed_size"], "mechanism with sampling=fixed_size"),
        (["federation.privacy.mechanism.cycle=5"], "expected a cycle of at most 4"),
        (["federation.local.time_line={dry: zero}"], "mechanism with time_line"),
        (["federation.privacy.noise_multiplier=0"], "there is no noise to correlate"),
        (["federation.privacy.extrapolate=[{population_size: 90, cohort_size: 20}]"], "extrapolate with a mechanism"),
        (["federation.privacy.mechanism.bands=5"], "no more bands than the cycle"),
        (["federation.privacy.mechanism.kind=dense"], "federation.privacy.mechanism.kind"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    changes: list[str], words: str, narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    ended = forked.run(
        ["run", narrow_recipe, *SHORT, BANDED, *changes, "--stores", short_stores, "--out", tmp_path / "run"]
    )
    assert ended.code == 2
    assert words in ended.err
    assert len([line for line in ended.err.splitlines() if line.startswith("error")]) == 1
