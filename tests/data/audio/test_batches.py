"""An epoch is every utterance once, within the memory bound, the same for the same seed, and with little padding."""

import math
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.data.audio.batches import (
    Batch,
    assign_pieces,
    group_into_steps,
    plan_client_batches,
    plan_epoch,
)
from sottovoce.data.audio.features import frame_count

RATE = 16_000
lengths_strategy = st.lists(st.integers(1, 20 * RATE), max_size=120).map(lambda n: np.array(n, dtype=np.int64))


def crowd(utterances: int) -> NDArray[np.int64]:
    """Durations like a crowd's short utterances: log-normal around 3.3 s, all within 1 to 8 s."""
    rng = np.random.default_rng(5)
    return (np.clip(rng.lognormal(np.log(3.3), 0.5, utterances), 1, 8) * RATE).astype(np.int64)


def rows_of(batches: tuple[Batch, ...] | list[Batch]) -> list[int]:
    return [row for batch in batches for row in batch.rows.tolist()]


@given(lengths=lengths_strategy, max_seconds=st.floats(20, 200), seed=st.integers(0, 2**40), fixed=st.booleans())
@settings(max_examples=150, deadline=None)
def test_an_epoch_is_complete_bounded_and_deterministic(
    lengths: NDArray[np.int64], max_seconds: float, seed: int, fixed: bool
) -> None:
    epoch = plan_epoch(lengths, max_seconds=max_seconds, seed=seed, epoch=3, fixed_shapes=fixed)
    assert sorted(rows_of(epoch)) == list(range(len(lengths)))
    for batch in epoch:
        assert len(batch.rows) > 0
        assert batch.padded_samples >= lengths[batch.rows].max()
        assert batch.padded_seconds <= max_seconds
    again = plan_epoch(lengths, max_seconds=max_seconds, seed=seed, epoch=3, fixed_shapes=fixed)
    assert [b.rows.tolist() for b in again] == [b.rows.tolist() for b in epoch]


@given(
    lengths=lengths_strategy,
    max_seconds=st.floats(20, 200),
    most=st.integers(1, 9),
    fixed=st.booleans(),
    ascending=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_batches_by_number_are_bounded_by_it_too(
    lengths: NDArray[np.int64], max_seconds: float, most: int, fixed: bool, ascending: bool
) -> None:
    options: dict[str, Any] = {"max_seconds": max_seconds, "max_utterances": most, "fixed_shapes": fixed, "seed": 1}
    epochs = [plan_epoch(lengths, epoch=number, ascending=ascending, **options) for number in range(2)]
    for epoch in epochs:
        assert sorted(rows_of(epoch)) == list(range(len(lengths)))
        assert all(len(batch.rows) <= most and batch.padded_seconds <= max_seconds for batch in epoch)
    if fixed:
        assert len(epochs[0]) == len(epochs[1])
    if ascending:
        in_order = lengths[rows_of(epochs[0])]
        assert np.all(np.diff(in_order) >= 0)
        assert rows_of(epochs[0]) == rows_of(epochs[1])


def test_eight_utterances_are_eight_where_the_seconds_suffice() -> None:
    lengths = crowd(100)
    epoch = plan_epoch(lengths, max_seconds=8 * 9, max_utterances=8, ascending=True, seed=1, epoch=0, fixed_shapes=True)
    assert [len(batch.rows) for batch in epoch] == [8] * 12 + [4]


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("max_seconds", [40, 120, 960])
def test_a_crowd_needs_little_padding(max_seconds: int, fixed_shapes: bool) -> None:
    lengths = crowd(8_000)
    epoch = plan_epoch(lengths, max_seconds=max_seconds, seed=1, epoch=0, fixed_shapes=fixed_shapes)
    padded_seconds = sum(batch.padded_seconds for batch in epoch)
    assert 1 - lengths.sum() / RATE / padded_seconds <= 0.10
    # The whole budget is used: no more than a tenth of the batches beyond what the audio alone would need.
    assert len(epoch) <= 1.15 * lengths.sum() / RATE / max_seconds + 1


def test_fixed_shapes_are_few_and_whole_numbers_of_steps() -> None:
    lengths = crowd(8_000)
    shapes = set()
    for number in range(3):
        epoch = plan_epoch(lengths, max_seconds=120, seed=1, epoch=number, fixed_shapes=True)
        shapes |= {(len(batch.rows), batch.padded_samples) for batch in epoch}
    assert all(frame_count(padded) % 6 == 0 for _, padded in shapes)
    # One shape for each rung from 1 to 8 s (⌈ln 8 / ln 1.1⌉ = 22 if all were a tenth apart; whole steps bring them
    # a little closer), and one short last batch of its own size per epoch.
    assert len(shapes) <= 22 + 6 + 3


def test_another_epoch_and_another_seed_mix_the_utterances_anew() -> None:
    lengths = crowd(500)
    plans = [plan_epoch(lengths, max_seconds=40, seed=s, epoch=e) for s, e in ((1, 0), (1, 1), (2, 0))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        companions_a = {frozenset(batch.rows.tolist()) for batch in plans[a]}
        companions_b = {frozenset(batch.rows.tolist()) for batch in plans[b]}
        assert len(companions_a & companions_b) < 3
    first_lengths = [lengths[batch.rows].max() for batch in plans[0]]
    assert first_lengths != sorted(first_lengths)
    assert first_lengths != sorted(first_lengths, reverse=True)


def test_golden_plan_stays_the_same_across_versions() -> None:
    # Integer arithmetic alone decides (seeds.keyed_order); written down once from this implementation, so that a
    # resumed run on another machine or after an upgrade meets the batches it would have met.
    lengths = np.array([2, 2, 2, 2, 2, 1, 1]) * RATE
    epoch = plan_epoch(lengths, max_seconds=4, seed=11, epoch=2)
    assert [batch.rows.tolist() for batch in epoch] == [[0, 2], [5], [4, 1], [3, 6]]


def test_overlong_utterances_are_refused_or_batched_alone() -> None:
    lengths = np.array([1.0, 30.0, 2.0, 31.5, 29.9]) * RATE
    with pytest.raises(
        InputError, match=r"1 of 5 utterances are longer than max_seconds=30 \(the longest has 31.5 s\)"
    ):
        plan_epoch(lengths, max_seconds=30, seed=1, epoch=0)
    epoch = plan_epoch(lengths, max_seconds=30, seed=1, epoch=0, allow_overlong=True)
    assert [3] in [batch.rows.tolist() for batch in epoch]
    assert all(batch.padded_seconds <= 30 for batch in epoch if 3 not in batch.rows)


def test_an_utterance_without_samples_is_refused() -> None:
    with pytest.raises(InputError, match="utterance 1 has 0 samples"):
        plan_epoch(np.array([5, 0]), max_seconds=1, seed=1, epoch=0)


@given(
    utterances=st.integers(1, 60),
    size=st.integers(1, 9),
    world=st.integers(1, 12),
    max_seconds=st.sampled_from([8, 20, 60]),
    seed=st.integers(0, 9),
)
@settings(max_examples=100, deadline=None)
def test_steps_are_complete_and_processes_share_them_completely(
    utterances: int, size: int, world: int, max_seconds: int, seed: int
) -> None:
    lengths = crowd(utterances)
    batches = plan_epoch(lengths, max_seconds=max_seconds, seed=seed, epoch=0)
    if -(-len(batches) // size) * size > utterances:
        with pytest.raises(
            InputError, match=f"batches of one utterance each do not make whole steps of batches={size}"
        ):
            group_into_steps(batches, size=size)
        return
    steps = group_into_steps(batches, size=size)
    assert {len(step) for step in steps} == {size}
    assert sorted(row for step in steps for row in rows_of(step)) == list(range(utterances))
    for step in steps:
        assert all(batch.padded_seconds <= max_seconds for batch in step)
        dealt = [assign_pieces(step, rank=rank, world=world) for rank in range(world)]
        pieces = [piece for own in dealt for piece in own]
        for number, batch in enumerate(step):
            parts = sorted((piece for piece in pieces if piece.number == number), key=lambda piece: piece.part or 0)
            assert np.concatenate([piece.batch.rows for piece in parts]).tolist() == batch.rows.tolist()
            assert math.isclose(sum(piece.weight for piece in parts), 1)
            assert (parts[0].part is None) == (len(parts) == 1)
        amounts = [len(own) for own in dealt]
        assert max(amounts) - min(amounts) <= 1
        assert len(pieces) == max(size, min(world, sum(len(batch.rows) for batch in step)))


def test_a_client_takes_so_many_steps_reshuffling_each_pass() -> None:
    lengths = crowd(12)
    per_epoch = len(plan_epoch(lengths, max_seconds=20, seed=4, epoch=0, fixed_shapes=True))
    steps = 3 * per_epoch + 1
    batches = list(plan_client_batches(lengths, max_seconds=20, seed=4, local_steps=steps, fixed_shapes=True))
    assert len(batches) == steps
    # With fixed shapes each pass has as many batches; within a pass nothing repeats.
    passes = [batches[i : i + per_epoch] for i in range(0, 3 * per_epoch, per_epoch)]
    assert all(sorted(rows_of(one)) == list(range(12)) for one in passes)
    assert rows_of(passes[0]) != rows_of(passes[1])


def test_local_epochs_are_whole_passes() -> None:
    batches = list(plan_client_batches(crowd(7), max_seconds=16, seed=4, local_epochs=5))
    assert sorted(rows_of(batches)) == sorted(list(range(7)) * 5)


def test_a_client_without_utterances_gives_no_batches() -> None:
    empty = np.array([], dtype=np.int64)
    assert list(islice(plan_client_batches(empty, max_seconds=16, seed=4, local_steps=10), 1)) == []
