"""What is kept of clients between rounds stays within its bound."""

import numpy as np
import torch

from sottovoce.federated.heard_before import HeardBefore
from sottovoce.models.heard import hear, record


def test_the_latest_clients_are_kept_within_the_limit() -> None:
    ones = [hear(record([np.zeros(16_000, dtype=np.int16)], [[1]]), dtype=torch.float32) for _ in range(4)]
    before = HeardBefore(2 * ones[0].features_UTF.nbytes)
    before.keep(0, ones[0])
    before.keep(1, ones[1])
    assert before.get(0) is ones[0]
    before.keep(2, ones[2])
    assert (before.get(0), before.get(1), before.get(2)) == (ones[0], None, ones[2])
    HeardBefore(10).keep(0, ones[0])  # too large to be kept
