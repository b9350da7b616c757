"""A client's time line: each utterance once, in order, in every engine; who has nothing left sends zero."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.federated.small import CPU, EXACT, UNIT, Small, small, small_context
from tests.federated.test_stacked import relative
from tests.ranks import in_processes

from sottovoce.base.errors import InputError, InvariantError
from sottovoce.base.processes import process_group
from sottovoce.data.audio.batches import plan_in_order
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.federated.client import ClientContext, LocalTraining, plan_client
from sottovoce.federated.client_stream import EXHAUSTED, StreamPositions, StreamSettings, stream_schedule
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Dropped, Engine, StackedEngine
from sottovoce.federated.engines.workers import WorkersEngine
from sottovoce.federated.ranks import ClientsOverRanks, RoundOrder
from sottovoce.flat.layout import Layout
from sottovoce.privacy.ledger_report import EXHAUSTED_CLIENTS
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings

# Four utterances each, at most two in a batch and two batches in a position.
LINE: dict[str, Any] = {
    "local": {"time_line": StreamSettings(), "local_steps": 2, "batch_utterances": 2, "batch_seconds": 1.6},
    "privacy": {"weighting": "utterances", "clip_bound": float("inf"), "time_line": "zero"},
    "cohort_size": 9,
}
EVERYBODY = np.arange(9)
POSITIONS = np.array([0, 1, 2, 0, 1, 0, 9, 1, 0])  # client 6 has run dry long ago


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> Iterator[None]:
    return None


@given(
    lengths=st.lists(st.integers(1, 4 * SAMPLE_RATE), max_size=40),
    most=st.none() | st.integers(1, 8),
)
def test_batches_in_order_hold_every_utterance_once(lengths: list[int], most: int | None) -> None:
    own = np.array(lengths, dtype=np.int64)
    batches = plan_in_order(own, max_seconds=6.0, max_utterances=most)
    assert [row for batch in batches for row in batch.rows.tolist()] == [*range(len(own))]
    for batch in batches:
        assert batch.padded_seconds <= 6.0
        assert own[batch.rows].max() <= batch.padded_samples
        assert most is None or len(batch.rows) <= most


def parts_taken(context: ClientContext, index: int) -> list[list[NDArray[np.int64]]]:
    """The store's rows that client `index` uses, by position and batch; then it says that nothing is left."""
    speech = context.speech(context.population.client(index))
    count = len(context.stream_parts(speech))
    planned = [plan_client(context, index, step=7 * position, position=position) for position in range(count)]
    with pytest.raises(InputError, match=EXHAUSTED):
        plan_client(context, index, step=0, position=count)
    return [[speech.rows[batch.rows] for batch in position.batches] for position in planned]


def test_every_utterance_is_used_once_in_the_stores_order(tones: Path) -> None:
    context = small_context(tones, local=LINE["local"])
    for client in context.population:
        parts = parts_taken(context, client.index)
        assert np.concatenate([rows for part in parts for rows in part]).tolist() == client.utterances.tolist()
        assert all(1 <= len(rows) <= 2 for part in parts for rows in part)
        assert all(len(part) == 2 for part in parts[:-1])
        assert 1 <= len(parts[-1]) <= 2


def test_one_step_is_the_default_and_passes_and_orders_are_refused() -> None:
    common: dict[str, Any] = {"batch_seconds": 2.0, "lr": 1.0, "time_line": StreamSettings()}
    assert LocalTraining(**common).local_steps == 1
    for other in ({"local_epochs": 1}, {"local_steps": 1, "order": "ascending"}):
        with pytest.raises(InputError, match="each utterance is used once, in the order of its time"):
            LocalTraining(**common, **other)
    with pytest.raises(InputError, match=r"time_line\.dry='stop', expected zero or skip"):
        StreamSettings(dry="stop")  # type: ignore[arg-type]


# Engines.


def updates(engine: Engine, ours: Small) -> tuple[dict[int, torch.Tensor], dict[int, int]]:
    """Everybody's update at their positions, and how many utterances each used. Only the one who is dry has none."""
    found, utterances = {}, {}
    for trained in engine.train(ours.server.parameters_P, EVERYBODY.tolist(), step=3, positions=POSITIONS.tolist()):
        if isinstance(trained, Dropped):
            assert trained.reason == EXHAUSTED
            continue
        rows = trained.update if trained.update.dim() == 2 else trained.update[None]
        found |= {client: row.clone() for client, row in zip(trained.clients, rows, strict=True)}
        utterances |= {c: figures.utterances for c, figures in zip(trained.clients, trained.figures, strict=True)}
    return found, utterances


def test_all_engines_train_the_part_at_the_position(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "one.jsonl", **LINE)
    expected, used = updates(ours.engine, ours)
    dry = {client for client in range(9) if POSITIONS[client] >= len(parts_taken(ours.context, client))}
    assert 6 in dry
    assert expected.keys() == set(range(9)) - dry
    for client, amount in used.items():  # weights are by what is used now
        assert amount == sum(len(rows) for rows in parts_taken(ours.context, client)[POSITIONS[client]])
    with closing(WorkersEngine(ours.context, ours.layout, workers=2)) as workers:
        found, theirs = updates(workers, ours)
    assert theirs == used
    assert all(torch.equal(found[client], own) for client, own in expected.items())

    exact = small(tones, tmp_path / "two.jsonl", dtype=torch.float64, **LINE)
    stacked = StackedEngine(exact.context, exact.layout, device=CPU, dtype=torch.float64, size=4)
    found, theirs = updates(stacked, exact)
    assert theirs == used
    assert max(relative(found, updates(exact.engine, exact)[0]).values()) < EXACT


def sum_over_ranks(store: Path, folder: Path) -> NDArray[Any] | None:
    torch.set_num_threads(1)
    with process_group(CPU) as processes:
        ours = small(store, folder / f"{processes.rank}-{processes.world}.jsonl", **LINE)
        clients = ClientsOverRanks(ours.engine, processes, seconds=ours.context.population.seconds)
        if processes.is_first:
            summed = clients.sum(ours.server.parameters_P, EVERYBODY, plan=ours.plan, step=3, positions=POSITIONS)
            return summed.total.double().numpy() / summed.denominator
        order = processes.broadcast_object(None)
        assert isinstance(order, RoundOrder)
        clients.take_part(order, ours.server.parameters_P, plan=ours.plan)
        return None


def test_ranks_learn_the_positions_from_the_first(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "here.jsonl", **LINE)
    here = LocalClients(ours.engine).sum(
        ours.server.parameters_P, EVERYBODY, plan=ours.plan, step=3, positions=POSITIONS
    )
    expected = here.total.double().numpy() / here.denominator
    found = in_processes(2, sum_over_ranks, tones, tmp_path)[0]
    # Weights are at most 1, what they are divided by at least 1: nine sums and three scalings, of all that is added.
    added = sum(update.double().abs() for update in updates(ours.engine, ours)[0].values())
    assert isinstance(added, torch.Tensor)
    assert (np.abs(found - expected) <= 12 * UNIT[torch.float32] * added.numpy()).all()


# Who has nothing left.


def test_a_dry_client_moves_nothing(tones: Path, tmp_path: Path) -> None:
    """To the bit: the sum is what it would be without them, and so is what it is divided by."""
    privacy = {"noise_multiplier": 1.0, "clip_bound": 0.2, "weighting": "uniform", "time_line": "zero"}
    ours = small(tones, tmp_path / "ledger.jsonl", **LINE | {"privacy": privacy})
    clients, server_P = LocalClients(ours.engine), ours.server.parameters_P
    everybody = clients.sum(server_P, EVERYBODY, plan=ours.plan, step=3, positions=POSITIONS)
    others = EVERYBODY[EVERYBODY != 6]
    without = clients.sum(server_P, others, plan=ours.plan, step=3, positions=POSITIONS[others])
    assert torch.equal(everybody.total, without.total)
    assert everybody.denominator == without.denominator == ours.plan.denominator


def test_a_round_counts_a_turn_for_everybody_in_it(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", **LINE | {"cohort_size": 4})
    positions = StreamPositions(9)
    drawn = np.zeros(9, dtype=np.int64)
    for step in range(6):
        drawn[ours.plan.sample(step)] += 1
        ours.round(step, positions=positions)
    assert positions.tensor().tolist() == drawn.tolist()
    assert positions.share_used is None
    assert not positions.all_exhausted
    again = StreamPositions(9)
    again.restore(positions.tensor())
    assert again.of(EVERYBODY).tolist() == drawn.tolist()
    with pytest.raises(InputError, match="the checkpoint has 9 time lines, expected 8"):
        StreamPositions(8).restore(positions.tensor())


def test_a_schedule_knows_who_has_how_much_left(tones: Path) -> None:
    context = small_context(tones, local=LINE["local"])
    schedule = stream_schedule(context)
    assert schedule.parts_K.tolist() == [len(parts_taken(context, client)) for client in range(9)]
    assert schedule.seconds_used(schedule.parts_K) == pytest.approx(context.population.seconds.sum())
    positions = StreamPositions(9, schedule=schedule, skips=True)
    assert (positions.share_used, positions.all_exhausted) == (0.0, False)
    for _ in range(9):
        positions.advance(EVERYBODY[:8])
    assert positions.among is not None
    assert positions.among.tolist() == [8]
    assert positions.share_used == pytest.approx(1 - context.population.seconds[8] / context.population.seconds.sum())
    for _ in range(9):
        positions.advance(EVERYBODY)
    assert (positions.share_used, positions.all_exhausted) == (1.0, True)


# What the plan says and refuses.


def plan_of(tones: Path, **privacy: Any) -> Plan:
    common: dict[str, Any] = {
        "population_size": 9,
        "privacy_unit": "speaker",
        "cohort_size": 4,
        "clip_bound": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "root_seed": 7,
    }
    return Plan(PrivacySettings(**common | privacy), Layout.of({"w": torch.zeros(2)}))


def test_plan_and_ledger_say_that_the_dry_are_drawn(tones: Path) -> None:
    before, plan = plan_of(tones), plan_of(tones, time_line="zero")
    assert "time_line" not in before.describe()  # as it was before there were any
    assert EXHAUSTED_CLIENTS not in before.guarantee
    assert plan.describe() == {**before.describe(), "time_line": "zero"}
    assert plan.ledger_header(run="r").as_record()["plan"]["time_line"] == "zero"
    assert plan.guarantee == f"{before.guarantee}; {EXHAUSTED_CLIENTS}"
    assert plan.event == before.event
    assert [plan.sample(step).tolist() for step in range(9)] == [before.sample(step).tolist() for step in range(9)]


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"time_line": "skip"}, "who is not drawn any more has nothing left"),
        ({"time_line": "zero", "sampling": "fixed_size"}, "no bound is known for that; expected poisson"),
        ({"time_line": "zero", "mode": "secure", "root_seed": None}, "a release writes that nowhere"),
    ],
)
def test_with_noise_availability_must_tell_nothing(privacy: dict[str, Any], words: str, tones: Path) -> None:
    with pytest.raises(InputError, match=words):
        plan_of(tones, **privacy)


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
def test_without_noise_cohorts_are_drawn_among_those_who_have_something_left(sampling: str, tones: Path) -> None:
    plan = plan_of(tones, noise_multiplier=0.0, time_line="skip", sampling=sampling)
    left = np.array([1, 2, 4, 6, 8])
    cohorts = [plan.sample(step, among=left) for step in range(200)]
    assert all(set(cohort.tolist()) <= set(left.tolist()) for cohort in cohorts)
    sizes = [len(cohort) for cohort in cohorts]
    # As many as ever, four of five: 200 rounds of variance 0.8 each, 5 standard deviations.
    assert abs(sum(sizes) - 800) <= (0 if sampling == "fixed_size" else 5 * (200 * 0.8) ** 0.5)
    assert plan.sample(0, among=left[:2]).tolist() == [1, 2]
    assert plan.sample(0, among=left[:0]).tolist() == []
    assert np.array_equal(plan.sample(3, among=EVERYBODY), plan.sample(3))


def test_a_private_plan_draws_among_everybody(tones: Path) -> None:
    with pytest.raises(InvariantError, match="a cohort of some, accounted as of all"):
        plan_of(tones, time_line="zero").sample(0, among=EVERYBODY)
