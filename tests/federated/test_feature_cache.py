"""What is kept of clients between rounds stays within its bound."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tests.federated.small import small_context

from sottovoce.data.audio.waveforms import pack_waveforms
from sottovoce.federated.feature_cache import FeatureCache, SizedCache, features_bytes, speech_bytes
from sottovoce.models.log_mel import extract_log_mel


def test_the_latest_clients_are_kept_within_the_limit() -> None:
    ones = [
        extract_log_mel(pack_waveforms([np.zeros(16_000, dtype=np.int16)], [[1]]), dtype=torch.float32)
        for _ in range(4)
    ]
    before = FeatureCache(2 * features_bytes(ones[0]))
    before.keep(0, ones[0])
    before.keep(1, ones[1])
    assert before.get(0) is ones[0]
    before.keep(2, ones[2])
    assert (before.get(0), before.get(1), before.get(2)) == (ones[0], None, ones[2])
    FeatureCache(10).keep(0, ones[0])  # too large to be kept


def test_clients_with_hardly_any_speech_are_bounded_too() -> None:
    """Their tensors take more than the numbers in them."""
    limit, clients = 100_000, 1_000
    one = extract_log_mel(pack_waveforms([np.zeros(400, dtype=np.int16)], [[1]]), dtype=torch.float32)
    before = FeatureCache(limit)
    for client in range(clients):
        before.keep(client, one)
    kept = sum(before.get(client) is not None for client in range(clients))
    tensors = one.features_UTF, one.frames_U, one.tokens_UL, one.token_lengths_U
    at_least = sum(
        tensor.nbytes + sys.getsizeof(tensor) + sys.getsizeof(tensor.untyped_storage()) for tensor in tensors
    )
    assert 0 < kept * at_least <= limit


def test_texts_are_kept_within_a_bound_of_bytes(tones: Path) -> None:
    context = small_context(tones)
    clients = [context.population.client(index) for index in range(3)]
    sizes = [speech_bytes(context.speech(client)) for client in clients]
    context = replace(context, _known=SizedCache(sum(sizes[:2])))
    first = [context.speech(client) for client in clients[:2]]
    assert [context.speech(client) for client in clients[:2]] == first
    context.speech(clients[2])
    assert context.speech(clients[1]) is first[1]
    assert context.speech(clients[0]) is not first[0]
