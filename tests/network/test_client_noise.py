"""Noise by clients, all the way: shares in words, masked, summed, topped up, and what the server learns of them."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.network.fleet import Fleet, attempt_of, terms_of

from sottovoce.base.errors import InvariantError
from sottovoce.federated.cohort import CohortSum
from sottovoce.flat.layout import Layout
from sottovoce.network.secure_sum import words as sum_words
from sottovoce.network.secure_sum.terms import NoSum, Phase
from sottovoce.network.secure_sum.words import add_noise_share, decode_sum, epsilon_for_server
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import poisson_release, repeated
from sottovoce.privacy.ledger import Charge, Ledger
from sottovoce.privacy.noise_shares import NoiseShares
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings

N, LENGTH = 9, 4096
SETTINGS = PrivacySettings(
    population_size=N,
    privacy_unit="speaker",
    cohort_size=N,
    clip_bound=1.0,
    noise_multiplier=2.0,
    delta=1e-5,
    mode="secure",  # type: ignore[arg-type]
)
PLAN = Plan(
    SETTINGS,
    Layout(("w",), ((LENGTH,),)),
    sum_bits=32,
    noise_shares=NoiseShares(most=N, least=7, colluding=3),
)
ATTEMPT = attempt_of(terms_of(N, least=7, length=LENGTH))


def signed(words: np.ndarray) -> np.ndarray:
    return words.view(np.int32).astype(np.int64)


def noise_of_clients(gone: dict[int, Phase]) -> tuple[np.ndarray, int]:
    """What the server opens where every update is zero: noise, in cells, and how many shares it is of."""
    shares = {place: np.zeros(LENGTH, dtype=np.uint32) for place in range(N)}
    for words in shares.values():
        add_noise_share(words, plan=PLAN, terms=ATTEMPT.terms)
    opened = Fleet(ATTEMPT, gone=gone, words=shares).opened()
    return signed(opened.total), len(opened.survivors)


@pytest.mark.parametrize("gone", [{}, {2: Phase.SHARES}, {2: Phase.MASKED, 4: Phase.KEYS}])
def test_a_sum_is_never_without_noise_and_what_is_released_always_has_as_much(gone: dict[int, Phase]) -> None:
    cells, shares = noise_of_clients(gone)
    assert PLAN.grid is not None
    within = 5 / math.sqrt(2 * LENGTH)  # five standard deviations of a standard deviation
    assert cells.std() * PLAN.grid == pytest.approx(2.0 * math.sqrt(shares / 6), rel=within)
    charge = Charge(PLAN.event, step=0, clip_bound=PLAN.clip_bound)
    total = torch.from_numpy(cells.astype(np.float64) * PLAN.grid)
    assert float(PLAN.add_noise(total, charge, shares=shares).std()) == pytest.approx(
        2.0 * math.sqrt(9 / 6), rel=within
    )


def test_below_the_honest_minimum_nothing_is_opened() -> None:
    with pytest.raises(NoSum, match="too_few"):
        noise_of_clients(dict.fromkeys(range(3), Phase.MASKED))


def test_a_share_is_for_sums_of_as_many_as_was_accepted() -> None:
    words = np.zeros(LENGTH, dtype=np.uint32)
    with pytest.raises(InvariantError, match="sums of too few"):
        add_noise_share(words, plan=PLAN, terms=terms_of(N, least=6, length=LENGTH))
    with pytest.raises(InvariantError, match="sums of too few"):
        add_noise_share(words, plan=dataclasses.replace(PLAN, noise_shares=None), terms=ATTEMPT.terms)
    with pytest.raises(InvariantError, match="words of 64 bits"):
        add_noise_share(words.astype(np.uint64), plan=PLAN, terms=terms_of(N, least=7, bits=64, length=LENGTH))
    assert not words.any()


def test_shares_are_added_to_what_is_there_and_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        def __init__(self, *, variance: float) -> None:
            assert variance == PLAN.noise.share_variance

        def draw(self, count: int, *, random: object) -> np.ndarray:
            return np.resize(np.array([-3, 0, 5]), count)

    monkeypatch.setattr(sum_words, "DiscreteGaussian", Known)
    words = np.array([1, 2, 2**32 - 1], dtype=np.uint32)
    add_noise_share(words, plan=PLAN, terms=ATTEMPT.terms)
    assert words.tolist() == [2**32 - 2, 2, 4]


def test_what_the_server_learns_is_accounted_without_sampling() -> None:
    """Seven survivors, three of whom tell: four shares, of which six are z. For each round with somebody in it."""
    seen = epsilon_for_server(PLAN, rounds=10, delta=1e-5)
    assert seen == epsilon(repeated(poisson_release(2.0 * math.sqrt(4 / 6), sampling_rate=1.0), 10), 1e-5)
    assert seen.headline > epsilon(repeated(PLAN.event, 10), 1e-5).headline
    with pytest.raises(InvariantError, match="sums as they are"):
        epsilon_for_server(dataclasses.replace(PLAN, noise_shares=None), rounds=10, delta=1e-5)


def test_the_ledger_says_that_clients_add_the_noise(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", header=PLAN.ledger_header(run="test"))
    charge = PLAN.charge(ledger, step=0, parameters="", cohort="")
    summed = CohortSum(PLAN.new_total(), PLAN.denominator, noise_shares=8)
    assert PLAN.add_noise(summed.total, charge, shares=summed.noise_shares).std() > 0
    ledger.close()
    assert '"noise_shares":{"colluding":3,"least":7,"most":9}' in (tmp_path / "ledger.jsonl").read_text()


# One client sends a vector of any size, which nobody can see: others' privacy must not hang on it.


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("shares", [None, NoiseShares(most=N, least=7, colluding=3)], ids=["server", "clients"])
def test_a_vector_at_the_edge_of_the_words_does_not_show_somebodys_cell(bits: int, shares: NoiseShares | None) -> None:
    """It leaves the sum one cell below where words wrap around, and somebody adds that cell, or does not.

    Were the noise added after the modulus, all numbers would be as large as can be, or as small.
    """
    plan = dataclasses.replace(PLAN, sum_bits=bits, noise_shares=shares)
    signs = []
    for cell in (0, 1):
        words = np.full(LENGTH, 2 ** (plan.word_bits - 1) - 1 + cell, dtype=f"<u{bits // 8}")
        charge = Charge(plan.event, step=0, clip_bound=plan.clip_bound)
        noised = plan.add_noise(decode_sum(words, plan), charge, shares=0 if shares is None else 7)
        signs.append(float(torch.sign(noised).mean()))
    assert max(map(abs, signs)) < 5 / math.sqrt(LENGTH)


@pytest.mark.parametrize("word", [2**63 - 1, 2**63, 2**62 + 1, 2**52, 2**64 - 2**52 - 1])
def test_whatever_is_in_a_sum_it_is_released(word: int) -> None:
    """That a sum is too large would be a release of its own, without any noise."""
    plan = dataclasses.replace(PLAN, sum_bits=64, noise_shares=None)
    charge = Charge(plan.event, step=0, clip_bound=plan.clip_bound)
    assert plan.add_noise(decode_sum(np.full(LENGTH, word, dtype="<u8"), plan), charge).isfinite().all()
