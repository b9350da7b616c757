"""The dev loss is the mean over utterances, however they are batched and whoever computes them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks import in_processes

from sottovoce.base.errors import InputError
from sottovoce.base.processes import process_group
from sottovoce.data.audio.waveforms import pad_waveforms
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.evaluation.losses import compute_loss, compute_mean_figures, select_speech
from sottovoce.models.recogniser import Recogniser, load_recogniser, save_recogniser

# Padding, which hangs on who shares a batch, changes the order of float32 sums of at most a few hundred terms.
ROUNDING = 1e-5


def mean_loss(recogniser: Recogniser, store: Store, *, split: str, **options: Any) -> float:
    return compute_mean_figures(recogniser, select_speech(recogniser, store, split=split), **options)["loss"]


def one_by_one(recogniser: Recogniser, store: Store, split: str) -> list[float]:
    speech = select_speech(recogniser, store, split=split)
    alone = [
        pad_waveforms([store.samples(row)], [text.tolist()])
        for row, text in zip(speech.rows.tolist(), speech.tokens, strict=True)
    ]
    return [float(compute_loss(recogniser, recordings)) for recordings in alone]


@pytest.mark.parametrize("batch_seconds", [0.1, 2.0, None])
def test_every_utterance_counts_once(recogniser: Recogniser, store: Store, batch_seconds: float | None) -> None:
    losses = one_by_one(recogniser, store, "test")
    assert max(losses) > 1.5 * min(losses), "a mean of batches' means would be another number"
    found = mean_loss(recogniser, store, split="test", batch_seconds=batch_seconds)
    assert found == pytest.approx(np.mean(losses), rel=ROUNDING)
    assert found == mean_loss(recogniser, store, split="test", batch_seconds=batch_seconds), "the same bits again"


def shared_loss(model: Path, place: Path) -> float:
    with process_group(torch.device("cpu")) as processes:
        return mean_loss(load_recogniser(model), Store(place), split="test", processes=processes)


@pytest.mark.parametrize("world", [2, 5])
def test_many_compute_what_one_computes(world: int, recogniser: Recogniser, store: Store, tmp_path: Path) -> None:
    """Five processes are more than there are utterances; the first one knows the mean."""
    assert len(select_speech(recogniser, store, split="test").rows) < 5
    save_recogniser(recogniser, tmp_path)
    first, *others = in_processes(world, shared_loss, tmp_path, store.path)
    assert first == pytest.approx(mean_loss(recogniser, store, split="test"), rel=ROUNDING)
    assert all(np.isnan(others))


def test_training_parameters_collect_no_gradients(recogniser: Recogniser, store: Store) -> None:
    training = replace(recogniser, parameters={n: p.clone().requires_grad_() for n, p in recogniser.parameters.items()})
    assert mean_loss(training, store, split="dev") == mean_loss(recogniser, store, split="dev")


def test_what_has_no_loss_is_left_out_and_counted(recogniser: Recogniser, store: Store) -> None:
    speech = select_speech(recogniser, store, split="test")
    assert speech.left_out["without text"] == 1
    assert "(left out: 1 without text" in str(speech)


def test_speech_that_cannot_be_used_is_one_clear_line(recogniser: Recogniser, store: Store) -> None:
    with pytest.raises(InputError, match="split='nowhere' is not in"):
        mean_loss(recogniser, store, split="nowhere")
    with pytest.raises(InputError, match=r"but store .* is in language=en"):
        mean_loss(replace(recogniser, language="de"), store, split="test")
    with pytest.raises(InputError, match=r"no utterance .*text outside the token set"):
        mean_loss(replace(recogniser, tokens=CharacterTokens.seen_in(["q"])), store, split="test")
