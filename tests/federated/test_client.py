"""Local training: its settings, FedProx, and what chance decides for one client."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.federated.small import loaded_client, small_context

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.data.audio.augment import SpecAugmentSettings
from sottovoce.data.audio.time_domain import DroppedChunks, DroppedFrequencies
from sottovoce.data.audio.waveforms import Waveforms
from sottovoce.federated.client import LocalTraining, Proximal, plan_client


@pytest.mark.parametrize("name", ["fedprox", "distance"])
@given(mu=st.just(0.0) | st.floats(1e-6, 10), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_proximal_pull_is_the_gradient_of_its_term(name: Any, mu: float, scale: float, seed: int) -> None:
    generator = torch_stream(seed, "proximal")
    server_P = torch.randn(50, generator=generator)
    weights_P = (server_P + scale * torch.randn(50, generator=generator)).requires_grad_()
    away_P = (weights_P - server_P).double()
    term = mu / 2 * away_P.square().sum() if name == "fedprox" else mu * away_P.norm()
    (expected_P,) = torch.autograd.grad(term, weights_P)
    found_P = Proximal(name=name, mu=mu).pull(weights_P.detach(), server_P)
    torch.testing.assert_close(found_P, expected_P, rtol=1e-5, atol=1e-6 * mu * scale)


@pytest.mark.parametrize("name", ["fedprox", "distance"])
def test_there_is_no_pull_where_local_training_starts(name: Any) -> None:
    server_P = torch.ones(5)
    assert not Proximal(name=name, mu=3.0).pull(server_P.clone(), server_P).any()


@given(
    step=st.integers(0, 10**6),
    client=st.integers(0, 8),
    other=st.integers(0, 8),
    cohort_size=st.integers(1, 9),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_chance_decides_for_a_client_hangs_on_its_name_and_the_step(
    tones: Path, step: int, client: int, other: int, cohort_size: int
) -> None:
    """Batches, masks, positions, dropout and layer-drop: asked for in any order, and of a population without others."""
    options: dict[str, Any] = {
        "model": {"dropout": 0.2, "layer_drop": 0.5},
        "local": {"spec_augment": SpecAugmentSettings()},
        "cohort_size": cohort_size,
    }
    context, elsewhere = small_context(tones, **options), small_context(tones, **options)
    loaded_client(elsewhere, other, step=step)  # somebody else first
    one, same = (loaded_client(r, client, step=step) for r in (context, elsewhere))
    assert isinstance(one.sound, Waveforms)
    assert isinstance(same.sound, Waveforms)
    assert torch.equal(one.sound.samples_N, same.sound.samples_N)
    assert all(torch.equal(a, b) for a, b in zip(one.lines, same.lines, strict=True))
    for first, second in zip(one.draws, same.draws, strict=True):
        assert first.masks is not None
        assert second.masks is not None
        assert torch.equal(first.masks, second.masks)
        assert (first.model.kept, first.model.dropout_seed) == (second.model.kept, second.model.dropout_seed)


TIME_DOMAIN: dict[str, Any] = {
    "speeds": (0.9, 1.1),
    "dropped_frequencies": DroppedFrequencies(fewest=1),
    "dropped_chunks": DroppedChunks(fewest=1),
}


def test_waveforms_are_augmented_anew_in_every_step_by_the_clients_own_draws(tones: Path) -> None:
    local = {"local_epochs": 2, **TIME_DOMAIN}
    context, elsewhere = small_context(tones, local=local), small_context(tones, local=local, cohort_size=7)
    loaded_client(elsewhere, 2, step=3)  # somebody else first
    one, same = (loaded_client(r, 5, step=3) for r in (context, elsewhere))
    later, other = loaded_client(context, 5, step=4), loaded_client(replace(context, seed=9), 5, step=3)
    assert isinstance(one.sound, Waveforms)
    assert isinstance(same.sound, Waveforms)
    assert torch.equal(one.sound.samples_N, same.sound.samples_N)
    for changed in (later, other):
        assert isinstance(changed.sound, Waveforms)
        assert not torch.equal(one.sound.lengths_U, changed.sound.lengths_U) or not torch.equal(
            one.sound.samples_N, changed.sound.samples_N
        )
    # Each utterance is there once for each pass, and nowhere as it was.
    assert torch.equal(torch.cat(one.lines), torch.arange(len(one.sound)))
    assert len(one.sound) == 2 * len(one.speech.rows)
    played = {round(int(length) * speed) for length in one.speech.lengths for speed in (1 / 0.9, 1 / 1.1)}
    assert all(min(abs(length - p) for p in played) <= 1 for length in one.sound.lengths_U.tolist())
    assert not one.whole, "features of augmented speech are not kept for another round"


def test_without_it_masks_and_batches_are_as_they_were(tones: Path) -> None:
    """Its draws come from a stream of their own."""
    spec = {"local_epochs": 2, "spec_augment": SpecAugmentSettings()}
    plain, augmented = (
        loaded_client(small_context(tones, local=local), 5, step=3) for local in (spec, spec | TIME_DOMAIN)
    )
    assert [len(lines) for lines in plain.lines] == [len(lines) for lines in augmented.lines]
    for before, after in zip(plain.draws, augmented.draws, strict=True):
        assert before.masks is not None
        assert after.masks is not None
        assert torch.equal(before.masks, after.masks)


def test_what_is_too_short_at_the_fastest_speed_is_left_out_and_counted(tones: Path) -> None:
    plain = small_context(tones)
    shortest = int(plain.speech(plain.population.client(0)).lengths.min())

    def unusable(_: Any, samples: int, tokens: Any) -> str | None:
        return "too short" if samples < shortest else None

    for speeds, found in ((None, 0), ((0.5, 1.0), 0), ((1.0, 1.05), 1)):
        context = small_context(tones, local={"speeds": speeds})
        context = replace(context, family=replace(context.family, unusable=unusable))
        assert context.speech(context.population.client(0)).left_out.get("too short", 0) == found


def test_a_client_goes_through_its_speech_in_another_order_each_round(tones: Path) -> None:
    context = small_context(tones, local={"local_epochs": 1, "batch_seconds": 1.5})
    client = context.population.client(0)
    speech = context.speech(client)
    orders = [[b.rows.tolist() for b in context.plan_batches(client, speech, step=step)] for step in range(8)]
    assert all(sorted(row for batch in order for row in batch) == [0, 1, 2, 3] for order in orders)
    assert len(set(map(str, orders))) > 2


def test_in_ascending_order_nothing_is_shuffled(tones: Path) -> None:
    """Every epoch of every round: so many utterances a step, from the shortest to the longest."""
    local = {"local_epochs": 2, "order": "ascending", "batch_utterances": 3, "batch_seconds": 10.0}
    context = small_context(tones, local=local)
    for step in (0, 1):
        planned = plan_client(context, 4, step=step)
        assert [len(batch.rows) for batch in planned.batches] == [3, 1, 3, 1]
        lengths = planned.speech.lengths[np.concatenate([batch.rows for batch in planned.batches])]
        assert lengths.tolist() == 2 * sorted(planned.speech.lengths.tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "local_steps=None, local_epochs=None: expected exactly one"),
        ({"local_steps": 1, "local_epochs": 1}, "local_steps=1, local_epochs=1: expected exactly one"),
        ({"local_steps": 1, "batch_utterances": 0}, "batch_utterances=0, expected at least 1"),
        ({"local_steps": 1, "order": "ascending"}, "order=ascending with local_steps=1: .*; expected local_epochs"),
        ({"local_steps": 0}, "local_steps=0, expected at least 1"),
        ({"local_steps": 1, "lr": float("nan")}, "lr=nan, expected a positive number"),
        ({"local_steps": 1, "batch_seconds": 0.0}, "batch_seconds=0.0, expected a positive number"),
        ({"local_steps": 1, "clip_gradients": 0.0}, "clip_gradients=0.0, expected a positive number or inf"),
        ({"local_steps": 1, "spec_augment_from": -1}, "spec_augment_from=-1, expected at least 0"),
        ({"local_steps": 1, "optimiser": {"name": "sdg"}}, "unknown optimiser 'sdg', did you mean 'sgd'?"),
    ],
)
def test_mistakes_in_local_settings_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        LocalTraining(**{"batch_seconds": 2.0, "lr": 0.1} | changes)


@pytest.mark.parametrize("mu", [-1.0, float("nan"), float("inf")])
def test_a_proximal_term_that_pushes_away_is_refused(mu: float) -> None:
    with pytest.raises(InputError, match="expected a finite number, at least 0"):
        Proximal(mu=mu)


def test_a_family_may_know_how_far_local_training_is(tones: Path) -> None:
    """Epochs are counted within a client's round."""
    context = small_context(
        tones, family="crdnn", model={"ctc_epochs": 1}, local={"local_epochs": 3, "batch_seconds": 1.0}
    )
    for step in (0, 5):
        loaded = loaded_client(context, 4, step=step)
        sizes, passes = [len(lines) for lines in loaded.lines], len(loaded.speech.rows)
        first = [sum(sizes[:number]) < passes for number in range(len(sizes))]
        assert sum(first) * 3 == len(first)
        assert [draws.model.with_ctc for draws in loaded.draws] == first
