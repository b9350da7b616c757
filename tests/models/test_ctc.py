import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.text.tokens import CharacterTokens, Tokens, train_sentence_pieces
from sottovoce.models import ctc
from sottovoce.models.ctc import BLANK, AlignedWord, TokenSpan

TOKENS = 2  # and the blank: 3 symbols, at most 3⁶ alignments
texts = st.lists(st.integers(1, TOKENS), max_size=4)


def random_log_probs(frames: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(frames, TOKENS + 1, generator=random, dtype=torch.float64)).log_softmax(dim=-1)


def alignments(tokens: Sequence[int], frames: int) -> Iterator[tuple[int, ...]]:
    """All sequences of symbols that read `tokens`, straight from the definition."""
    for path in product(range(TOKENS + 1), repeat=frames):
        if [symbol for symbol, _ in groupby(path) if symbol != BLANK] == [*tokens]:
            yield path


def path_score(log_probs_TV: Tensor, path: Sequence[int]) -> float:
    return sum(log_probs_TV[frame, symbol].item() for frame, symbol in enumerate(path))


@given(tokens=texts, frames=st.integers(0, 6))
def test_required_frames_is_the_shortest_with_an_alignment(tokens: list[int], frames: int) -> None:
    assert any(True for _ in alignments(tokens, frames)) == (ctc.required_frames(tokens) <= frames)


@settings(deadline=None, max_examples=40)
@given(tokens=texts.filter(len), frames=st.integers(1, 6), seed=st.integers(0, 2**30))
def test_loss_is_the_sum_over_all_alignments(tokens: list[int], frames: int, seed: int) -> None:
    log_probs_TV = random_log_probs(frames, seed)
    total = sum(math.exp(path_score(log_probs_TV, path)) for path in alignments(tokens, frames))
    batch = log_probs_TV[None], torch.tensor([frames]), torch.tensor([tokens]), torch.tensor([len(tokens)])
    expected = -math.log(total) if total else 0.0
    assert ctc.ctc_losses(*batch).item() == pytest.approx(expected, abs=1e-9)
    assert ctc.has_alignment(*batch[1:]).item() == (total > 0)


def test_the_mean_counts_each_utterance_that_fits_once_and_no_other() -> None:
    log_probs_BTV = torch.stack([random_log_probs(4, seed) for seed in range(5)]).requires_grad_()
    # Fits; fits; too short for its repeats (needs 4 frames, has 3); no text; no frames.
    lengths_B, token_lengths_B = torch.tensor([4, 3, 3, 4, 0]), torch.tensor([2, 1, 3, 0, 1])
    tokens_BU = torch.tensor([[1, 2, 1], [2, 2, 2], [1, 1, 2], [0, 0, 0], [2, 0, 0]])
    loss = ctc.mean_ctc_loss(log_probs_BTV, lengths_B, tokens_BU, token_lengths_B)
    alone = [
        ctc.ctc_losses(log_probs_BTV[row : row + 1], lengths_B[row : row + 1], tokens_BU[row : row + 1], t[None])[0]
        for row, t in enumerate(token_lengths_B[:2])
    ]
    torch.testing.assert_close(loss, (alone[0] + alone[1]) / 2)
    (gradient_BTV,) = torch.autograd.grad(loss, log_probs_BTV)
    assert gradient_BTV[:2].abs().sum() > 0
    assert torch.equal(gradient_BTV[2:], torch.zeros(3, 4, TOKENS + 1, dtype=torch.float64))


def test_a_batch_in_which_nothing_fits_costs_nothing() -> None:
    log_probs_BTV = random_log_probs(2, 0)[None].requires_grad_()
    loss = ctc.mean_ctc_loss(log_probs_BTV, torch.tensor([2]), torch.tensor([[1, 1]]), torch.tensor([2]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert log_probs_BTV.grad is not None
    assert torch.equal(log_probs_BTV.grad, torch.zeros_like(log_probs_BTV))


@settings(deadline=None, max_examples=60)
@given(tokens=texts, frames=st.integers(1, 6), seed=st.integers(0, 2**30))
def test_alignment_is_the_best_path(tokens: list[int], frames: int, seed: int) -> None:
    log_probs_TV = random_log_probs(frames, seed)
    if ctc.required_frames(tokens) > frames:
        with pytest.raises(InputError, match=f"frames={frames}, expected at least"):
            ctc.align_tokens(log_probs_TV, tokens)
        return
    spans = ctc.align_tokens(log_probs_TV, tokens)
    assert [span.token for span in spans] == tokens
    path = np.full(frames, BLANK)
    for span in spans:
        assert (path[span.start : span.end] == BLANK).all()
        path[span.start : span.end] = span.token
    best = max(path_score(log_probs_TV, other) for other in alignments(tokens, frames))
    assert path_score(log_probs_TV, path.tolist()) == pytest.approx(best, abs=1e-9)
    assert tuple(path.tolist()) in set(alignments(tokens, frames))


TEXTS = ["no one knows", "now or no one", "one on one"]


@pytest.mark.parametrize("tokens", [CharacterTokens.seen_in(TEXTS), train_sentence_pieces(TEXTS, size=12)])
@pytest.mark.parametrize("text", TEXTS)
def test_words_join_the_tokens_of_both_kinds_to_the_text(tokens: Tokens, text: str) -> None:
    spans = [TokenSpan(token, 2 * place, 2 * place + 1) for place, token in enumerate(tokens.encode(text))]
    found = ctc.join_words(spans, tokens.pieces())
    assert [word.text for word in found] == text.split()
    assert all(word.start < word.end for word in found)
    assert all(word.end < following.start for word, following in pairwise(found))


def test_words_begin_and_end_with_their_own_tokens() -> None:
    characters = ["", *"no "]
    spans = [
        TokenSpan(3, 0, 1),
        TokenSpan(1, 1, 3),
        TokenSpan(2, 4, 5),
        TokenSpan(3, 5, 6),
        TokenSpan(3, 7, 8),
        TokenSpan(2, 9, 10),
    ]
    assert ctc.join_words(spans, characters) == [AlignedWord("no", 1, 5), AlignedWord("o", 9, 10)]
    pieces = ["", " no", "w", " ", "on"]
    spans = [TokenSpan(1, 0, 2), TokenSpan(2, 3, 4), TokenSpan(3, 5, 6), TokenSpan(4, 6, 8), TokenSpan(1, 9, 11)]
    assert ctc.join_words(spans, pieces) == [
        AlignedWord("now", 0, 4),
        AlignedWord("on", 6, 8),
        AlignedWord("no", 9, 11),
    ]
    assert ctc.join_words([], pieces) == []
