"""CTC prefix scores are sums over all alignments of all texts that begin so."""

import math
from collections import defaultdict
from itertools import groupby, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.models import ctc_prefix
from sottovoce.models.ctc import BLANK

V = 3


def spelled(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(token for token, _ in groupby(path) if token != BLANK)


def brute_force(log_probs_TV: Tensor) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], float]]:
    """p(text) of every text and p(prefix …) of every prefix, path by path."""
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    prefixes: dict[tuple[int, ...], float] = defaultdict(float)
    for path in product(range(V), repeat=len(log_probs_TV)):
        probability = math.exp(sum(log_probs_TV[t, token].item() for t, token in enumerate(path)))
        text = spelled(path)
        texts[text] += probability
        for size in range(len(text) + 1):
            prefixes[text[:size]] += probability
    return texts, prefixes


def random_log_probs(seed: int, utterances: int, frames: int, *, sharpness: float = 1.5) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(utterances, frames, V, generator=random, dtype=torch.float64)).log_softmax(dim=-1)


@given(seed=st.integers(0, 2**30), lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)))
@settings(max_examples=25)
def test_scores_are_sums_over_all_alignments(seed: int, lengths: tuple[int, int]) -> None:
    log_probs_UTV = random_log_probs(seed, 2, 5)
    frames, prefixes = ctc_prefix.begin_prefixes(log_probs_UTV, torch.tensor(lengths), prefixes=2)
    known = [brute_force(log_probs_UTV[u, :length]) for u, length in enumerate(lengths)]
    # Two prefixes of each utterance, walked through repeats and changes, and swapped on the way.
    spelling = [[(), ()], [(), ()]]
    random = torch.Generator().manual_seed(seed + 1)
    for _ in range(4):
        following_UKV = ctc_prefix.score_following(frames, prefixes)
        for u, (texts, begun) in enumerate(known):
            for k, prefix in enumerate(spelling[u]):
                if not (whole := begun.get(prefix, 0.0)):
                    continue
                expected = [texts[prefix], *(begun[(*prefix, token)] for token in range(1, V))]
                found = following_UKV[u, k].exp() * whole
                # Sums of at most 3^5 products in float64.
                assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
                assert prefixes.scores_UK[u, k].exp().item() == pytest.approx(whole, rel=1e-9)
        parents_UK = torch.randint(0, 2, (2, 2), generator=random)
        tokens_UK = torch.randint(1, V, (2, 2), generator=random)
        prefixes = ctc_prefix.extend_prefixes(frames, prefixes, following_UKV, parents_UK, tokens_UK)
        spelling = [
            [(*spelling[u][p], t) for p, t in zip(parents_UK[u].tolist(), tokens_UK[u].tolist(), strict=True)]
            for u in range(2)
        ]


def test_what_follows_is_a_distribution_in_long_and_sharp_speech() -> None:
    """Some hundred frames that are nearly certain: nothing overflows, and the sum over what may follow stays one."""
    log_probs_UTV = random_log_probs(3, 2, 400, sharpness=30.0)
    frames, prefixes = ctc_prefix.begin_prefixes(log_probs_UTV.float(), torch.tensor([400, 250]), prefixes=1)
    for _ in range(100):
        following_UKV = ctc_prefix.score_following(frames, prefixes)
        assert following_UKV.logsumexp(dim=-1).abs().max() < 1e-5, "the log-probabilities came in float32"
        best_UK = following_UKV[..., 1:].argmax(dim=-1) + 1
        prefixes = ctc_prefix.extend_prefixes(frames, prefixes, following_UKV, torch.zeros_like(best_UK), best_UK)


def test_a_text_that_cannot_fit_is_impossible_and_no_worse() -> None:
    frames, prefixes = ctc_prefix.begin_prefixes(random_log_probs(1, 1, 2), torch.tensor([2]), prefixes=1)
    one = torch.ones(1, 1, dtype=torch.int64)
    for _ in range(4):
        following_UKV = ctc_prefix.score_following(frames, prefixes)
        prefixes = ctc_prefix.extend_prefixes(frames, prefixes, following_UKV, torch.zeros_like(one), one)
    assert (ctc_prefix.score_following(frames, prefixes) >= ctc_prefix.IMPOSSIBLE).all()
    assert prefixes.scores_UK.item() < ctc_prefix.IMPOSSIBLE / 2
