"""Worker processes give the sequential engine's bits, whoever is quick, slow or killed, and end with the engine."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.small import CPU, Small, small, small_context
from tests.federated.trouble import Trouble

from sottovoce.base.errors import InputError
from sottovoce.data.audio.augment import SpecAugmentSettings
from sottovoce.federated.engines import Dropped, Engine, SequentialEngine, Trained, shared_memory, workers
from sottovoce.federated.engines.workers import Job, WorkersEngine, most_work_first

EVERYBODY = range(9)
RANDOM: dict[str, Any] = {  # everything that chance decides, clients of unequal size, and weights that ask for most
    "model": {"dropout": 0.2, "layer_drop": 0.4},
    "local": {"local_epochs": 2, "spec_augment": SpecAugmentSettings()},
    "people": {"holdout": 0.25},
    "privacy": {"weighting": "wer"},
    "cohort_size": 9,
}
Updates = dict[int, torch.Tensor]

pytestmark = pytest.mark.usefixtures("one_thread")  # as in a worker


@pytest.fixture(scope="module")
def three(tones: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkersEngine]:
    """Starting processes takes seconds: these serve several tests."""
    ours = small(tones, tmp_path_factory.mktemp("three") / "ledger.jsonl", **RANDOM)
    with closing(workers_of(ours, workers=3)) as engine:
        yield engine


def trained(engine: Engine, ours: Small, *, step: int = 0) -> tuple[Updates, dict[int, str]]:
    """Everybody's updates, and why there is none."""
    updates, dropped = {}, {}
    for result in engine.train(ours.server.parameters_P, EVERYBODY, step=step):
        if isinstance(result, Dropped):
            dropped[result.client] = result.reason
        else:
            updates[result.clients[0]] = result.update.clone()
    return updates, dropped


def workers_of(ours: Small, *, accidents: Mapping[int, str] | None = None, workers: int = 2) -> WorkersEngine:
    context: Any = ours.context
    if accidents is not None:
        context = Trouble(
            **{field.name: getattr(context, field.name) for field in fields(context)}, accidents=accidents
        )
    return WorkersEngine(context, ours.layout, workers=workers)


def test_updates_have_the_bits_of_the_sequential_engine(three: WorkersEngine, tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", **RANDOM)
    for step in (0, 1):
        expected, _ = trained(ours.engine, ours, step=step)
        found, dropped = trained(three, ours, step=step)
        assert not dropped
        assert found.keys() == expected.keys() == set(EVERYBODY)
        assert all(torch.equal(found[client], expected[client]) for client in EVERYBODY)
    assert figures_of(three, ours) == figures_of(ours.engine, ours)


@pytest.mark.parametrize("weighting", ["loss_released", "wer_released"])
def test_they_measure_what_one_process_does(weighting: str, tones: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = RANDOM | {"privacy": {"weighting": weighting}, "shared_dev": "dev"}
    ours = small(tones, tmp_path / "ledger.jsonl", **changes)
    with closing(workers_of(ours)) as engine:
        expected, found = ({}, {})
        for kept, one in ((expected, ours.engine), (found, engine)):
            for result in one.train(ours.server.parameters_P, EVERYBODY, step=2):
                assert isinstance(result, Trained)
                kept[result.clients[0]] = result.figures
    assert found == expected
    assert found.keys() == set(EVERYBODY)


def figures_of(engine: Engine, ours: Small) -> dict[int, Any]:
    found = {}
    for result in engine.train(ours.server.parameters_P, EVERYBODY, step=2):
        assert isinstance(result, Trained)
        found[result.clients[0]] = (result.figures, float(result.losses), result.audio_seconds)
        assert result.figures[0].wer is not None
    return found


class MostWorkFirst(SequentialEngine):
    """One process, in the order of the workers."""

    def train(
        self, server_P: torch.Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | Dropped]:
        assert positions is None
        return super().train(server_P, most_work_first(self._context, cohort), step=step)


def test_rounds_have_the_bits_of_one_process(three: WorkersEngine, tones: Path, tmp_path: Path) -> None:
    """Updates are summed in one order, whoever is ready first."""
    models = []
    for name in ("workers", "one process"):
        ours = small(tones, tmp_path / f"{name}.jsonl", **RANDOM)
        alone = MostWorkFirst(ours.context, ours.layout, device=CPU)
        ours.engine = alone if name == "one process" else three  # type: ignore[assignment]
        for step in range(3):
            assert ours.figures(step).cohort == 9
        models.append(ours.server.parameters_P)
    assert torch.equal(models[0], models[1])


def test_a_round_that_was_given_up_leaves_nothing_in_the_next(
    three: WorkersEngine, tones: Path, tmp_path: Path
) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", **RANDOM)
    for step in range(20):  # more often than there are slots
        begun = three.train(ours.server.parameters_P + step, EVERYBODY, step=step)
        next(begun)
        begun.close()  # type: ignore[attr-defined]
    expected, _ = trained(ours.engine, ours, step=20)
    found, dropped = trained(three, ours, step=20)
    assert not dropped
    assert all(torch.equal(found[client], expected[client]) for client in EVERYBODY)


def test_accidents_cost_their_clients_and_no_others(tones: Path, tmp_path: Path) -> None:
    """Round after round: a worker that was killed is replaced."""
    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9)
    with closing(workers_of(ours, accidents={2: "unreadable", 5: "killed"})) as engine:
        for step in (0, 1):
            expected, _ = trained(ours.engine, ours, step=step)
            found, dropped = trained(engine, ours, step=step)
            assert dropped == {2: "its audio is damaged", 5: "its process ended with status -9"}
            assert found.keys() == set(EVERYBODY) - {2, 5}
            assert all(torch.equal(found[client], expected[client]) for client in found)


def test_our_own_bugs_are_not_counted_as_a_clients_accident(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9)
    engine = workers_of(ours, accidents={2: "bug"}, workers=1)
    with closing(engine), pytest.raises(RuntimeError, match="ZeroDivisionError"):
        trained(engine, ours)


def test_workers_start_and_work_through_signals_and_end_with_the_engine(tones: Path, tmp_path: Path) -> None:
    """The process that has the engine finishes its round on SIGINT and SIGTERM, which may go to all of them."""
    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9)
    engine = workers_of(ours)
    processes = [child.process.pid for child in engine._pool._children]
    for step in (0, 1):  # first while they start
        for process in processes:
            os.kill(process, signal.SIGINT)
            os.kill(process, signal.SIGTERM)
        updates, dropped = trained(engine, ours, step=step)
        assert (len(updates), dropped) == (9, {})
    assert [child.process.pid for child in engine._pool._children] == processes
    del engine
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def test_workers_end_when_the_engines_process_is_gone(tones: Path, tmp_path: Path) -> None:
    """However it ended, the system has closed its side of the connections."""
    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9)
    with closing(workers_of(ours)) as engine:
        trained(engine, ours)
        busy, idle = engine._pool._children
        busy.connection.send((workers._train_job, (Job(0, 1, slot=1),)))
        for child in (busy, idle):
            child.connection.close()
            assert isinstance(child.process, subprocess.Popen)
            assert child.process.wait() == 0


def test_a_worker_ends_with_the_engines_process_even_in_the_middle_of_a_client(
    tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("STUCK", str(tmp_path / "pipe"))
    ours = small(tones, tmp_path / "ledger.jsonl")
    with closing(workers_of(ours, accidents={0: "stuck"}, workers=1)) as engine:
        (child,) = engine._pool._children
        child.connection.send((workers._train_job, (Job(0, 1, slot=1),)))
        with (tmp_path / "pipe").open("rb") as training:
            assert training.read(1) == b"."
            child.connection.close()
            assert isinstance(child.process, subprocess.Popen)
            assert child.process.wait() == 0


def test_a_store_prepared_anew_is_refused(tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl")
    monkeypatch.setattr(ours.context.store, "digest", "another")
    with closing(workers_of(ours, workers=1)) as engine, pytest.raises(InputError, match="prepared anew"):
        trained(engine, ours)


def test_who_works_through_most_speech_comes_first(tones: Path) -> None:
    epochs = small_context(tones, local={"local_epochs": 1})
    seconds = epochs.population.seconds[most_work_first(epochs, EVERYBODY)]
    assert (np.diff(seconds) <= 0).all()
    assert len(set(seconds.tolist())) > 1
    steps = small_context(tones, local={"local_steps": 1, "batch_seconds": 0.9})  # everybody fills a batch
    assert most_work_first(steps, [3, 8, 1]) == [3, 8, 1]


@pytest.mark.parametrize(
    ("share", "ranks", "cores"),
    [("max 100000", "1", 8), ("250000 100000", "1", 2), ("50000 100000", "1", 1), ("", "3", 2)],
)
def test_cores_are_those_of_the_container_and_of_this_rank(
    share: str, ranks: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(share)
    monkeypatch.setattr(workers, "CONTAINER_SHARE", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert workers.usable_cores() == cores


def test_shared_memory_gives_back_what_was_put_in(tmp_path: Path) -> None:
    """Arrays and tensors (also views, also of no size or no axis), each its own; what one side writes stays there."""
    arrays = {"a": np.arange(1000), "none": np.zeros(0), "b": np.eye(3, dtype=np.float32)}
    whole = torch.arange(1_000_000.0)
    tensors = {"view": whole[5:15].view(2, 5), "half": whole[:3].bfloat16(), "one": torch.tensor(3.5)}
    file = shared_memory.put((arrays, tensors))
    assert os.fstat(file).st_size < 20_000  # not the storage behind the view
    found_arrays, found_tensors = shared_memory.got(file)  # type: ignore[misc]
    for name, array in arrays.items():
        np.testing.assert_array_equal(found_arrays[name], array)
    for name, tensor in tensors.items():
        assert torch.equal(found_tensors[name], tensor)
        assert found_tensors[name].dtype == tensor.dtype
    found_tensors["view"].zero_()
    assert torch.equal(shared_memory.got(file)[1]["view"], tensors["view"])  # type: ignore[index]
    os.close(file)
