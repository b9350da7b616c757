"""Recognising a store gives each utterance its own text, however the utterances are batched."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sottovoce.errors import InputError
from sottovoce.evaluation.recognise import choose_device, emissions, recognise
from sottovoce.models.decoding import decode_greedily
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.utterances import record_lines
from sottovoce.store import Store


def one_by_one(recogniser: Recogniser, store: Store, rows: list[int]) -> list[str]:
    texts = []
    for row in rows:
        (found,) = decode_greedily(*emissions(recogniser, record_lines([store.samples(row)])))
        texts.append(" ".join(recogniser.tokens.decode(found.tokens).split()))
    return texts


@pytest.mark.parametrize("batch_seconds", [0.1, 2.0, 5.0, None])
def test_batches_change_nothing(recogniser: Recogniser, store: Store, batch_seconds: float | None) -> None:
    rows = [6, 0, 3, 5, 1]
    expected = one_by_one(recogniser, store, rows)
    assert len(set(expected)) == len(rows), "the texts must tell the utterances apart"
    done: list[int] = []
    found = recognise(recogniser, store, np.array(rows), batch_seconds=batch_seconds, on_progress=done.append)
    assert found == expected
    assert done[-1] == len(rows)
    assert done == sorted(done)


def test_training_parameters_collect_no_gradients(recogniser: Recogniser, store: Store) -> None:
    parameters = {name: p.clone().requires_grad_() for name, p in recogniser.parameters.items()}
    training = replace(recogniser, parameters=parameters)
    assert recognise(training, store, np.array([0])) == recognise(recogniser, store, np.array([0]))


def test_what_goes_wrong_while_reading_is_raised(recogniser: Recogniser, store: Store) -> None:
    with pytest.raises(IndexError):
        recognise(recogniser, store, np.array([0, store.utterance_count]))


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    for name in ("gpu", "cuda:99"):
        with pytest.raises(InputError, match=f"device={name}: cannot be used here"):
            choose_device(name)
