"""Recognising a store gives each utterance its own text, however it is batched and dealt out over processes."""

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
from sottovoce.evaluation.recognise import (
    choose_device,
    compute_emissions,
    recognise_across_processes,
    recognise_utterances,
)
from sottovoce.evaluation.score import evaluate_recogniser, score_hypotheses, select_utterances
from sottovoce.models.decoding import decode_greedily
from sottovoce.models.recogniser import Recogniser, load_recogniser, save_recogniser


def one_by_one(recogniser: Recogniser, store: Store, rows: list[int]) -> list[str]:
    texts = []
    for row in rows:
        (found,) = decode_greedily(*compute_emissions(recogniser, pad_waveforms([store.samples(row)])))
        texts.append(" ".join(recogniser.tokens.decode(found.tokens).split()))
    return texts


@pytest.mark.parametrize("batch_seconds", [0.1, 2.0, 5.0, None])
def test_batches_change_nothing(recogniser: Recogniser, store: Store, batch_seconds: float | None) -> None:
    rows = [6, 0, 3, 5, 1]
    expected = one_by_one(recogniser, store, rows)
    assert len(set(expected)) == len(rows), "the texts must tell the utterances apart"
    done: list[int] = []
    found = recognise_utterances(
        recogniser, store, np.array(rows), batch_seconds=batch_seconds, on_progress=done.append
    )
    assert found == expected
    assert done[-1] == len(rows)
    assert done == sorted(done)


def test_training_parameters_collect_no_gradients(recogniser: Recogniser, store: Store) -> None:
    parameters = {name: p.clone().requires_grad_() for name, p in recogniser.parameters.items()}
    training = replace(recogniser, parameters=parameters)
    assert recognise_utterances(training, store, np.array([0])) == recognise_utterances(
        recogniser, store, np.array([0])
    )


def test_what_goes_wrong_while_reading_is_raised(recogniser: Recogniser, store: Store) -> None:
    with pytest.raises(IndexError):
        recognise_utterances(recogniser, store, np.array([0, store.utterance_count]))


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    for name in ("gpu", "cuda:99"):
        with pytest.raises(InputError, match=f"device={name}: cannot be used here"):
            choose_device(name)


def shared_evaluation(model: Path, place: Path) -> dict[str, Any]:
    store, recogniser = Store(place), load_recogniser(model)
    with process_group(torch.device("cpu")) as processes:
        chosen = select_utterances(store)
        hypotheses = recognise_across_processes(recogniser, store, chosen.rows, processes=processes)
    return score_hypotheses(store, chosen, hypotheses).as_json()


@pytest.mark.parametrize("world", [2, 9])
def test_many_hear_what_one_hears(world: int, recogniser: Recogniser, store: Store, tmp_path: Path) -> None:
    """Nine processes are more than there are utterances."""
    assert len(select_utterances(store).rows) < 9
    save_recogniser(recogniser, tmp_path)
    alone = evaluate_recogniser(recogniser, store)
    assert alone.words.substitutions + alone.words.insertions > 0, "it must hear something"
    assert in_processes(world, shared_evaluation, tmp_path, store.path)[0] == alone.as_json()
