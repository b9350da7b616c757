"""Windows are joined where both hear a pause, and the greedy path is its own best alignment."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.evaluation.stitching import Piece, best_path, path_spans, stitch
from sottovoce.models import ctc
from sottovoce.models.ctc import BLANK

TOKENS = 3


def certain(path: list[int]) -> torch.Tensor:
    """Log-probabilities of somebody who is nearly sure of `path`."""
    return torch.log_softmax(8.0 * torch.nn.functional.one_hot(torch.tensor(path), TOKENS + 1).float(), dim=-1)


def cut_into_windows(whole: torch.Tensor, *, window: int, step: int, unsure: int) -> list[Piece]:
    """Windows of `whole` whose outermost `unsure` frames, at cuts only, are nonsense."""
    pieces, start = [], 0
    while True:
        part = whole[start : start + window].clone()
        last = start + window >= len(whole)
        if start:
            part[:unsure] = certain([2] * unsure)
        if not last:
            part[-unsure:] = certain([1] * unsure)
        pieces.append(Piece(start, part))
        if last:
            return pieces
        start += step


@given(st.lists(st.integers(0, TOKENS), min_size=1, max_size=100))
def test_stitched_windows_are_the_whole(path: list[int]) -> None:
    # The overlap is 8 frames, of which the outer quarter at each end may be wrong.
    whole = certain(path)
    pieces = list(stitch(cut_into_windows(whole, window=20, step=12, unsure=2), silent=[BLANK]))
    assert torch.equal(torch.cat([piece.log_probs_TV for piece in pieces]), whole)
    assert [piece.start for piece in pieces] == np.cumsum([0, *(len(p.log_probs_TV) for p in pieces[:-1])]).tolist()


def test_cut_falls_into_the_longest_pause() -> None:
    # Both windows hear the same word, but place it one frame apart: a cut inside it would double or lose a token.
    before = certain([BLANK] * 12 + [BLANK, BLANK, 3, 1, 2, BLANK, BLANK, BLANK])
    after = certain([BLANK, BLANK, BLANK, 3, 1, 2, BLANK, BLANK] + [BLANK] * 12)
    joined = torch.cat([p.log_probs_TV for p in stitch([Piece(0, before), Piece(12, after)], silent=[BLANK])])
    assert [span.token for span in path_spans(best_path(joined))] == [3, 1, 2]


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_greedy_spans_are_the_viterbi_alignment(seed: int, frames: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs_TV = torch.randn(frames, TOKENS + 1, generator=generator).log_softmax(dim=-1)
    spans = path_spans(best_path(log_probs_TV))
    assert spans == ctc.align_tokens(log_probs_TV, [span.token for span in spans])
