"""Attention search: width 1 is greedy, a wide beam finds the best text there is, and no beam is worse than greedy."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.models.toy_decoder import Toy, plain_greedy, score_of
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.models import attention_search, ctc_prefix
from sottovoce.models.attention_search import END, GREEDY, JUMP_COST, AttentionDecoder, SearchOptions, search_attention
from sottovoce.models.decoding import Hypothesis

PLAIN = SearchOptions(width=1, temperature=1.0, end_threshold=None, longest_shift=None, normalised=False)
LENGTHS = [7, 3, 0, 12, 1]


def emissions(seed: int, frames: int, outputs: int, utterances: int = len(LENGTHS)) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(utterances, frames, outputs, generator=random)).log_softmax(dim=-1)


@given(seed=st.integers(0, 2**30), end=st.floats(-3, 3))
@settings(max_examples=25)
def test_width_one_is_greedy(seed: int, end: float) -> None:
    toy = Toy(outputs=6, size=8, seed=seed, end=end)
    decoder, (memory_UTD, lengths_U) = toy.decoder(), toy.memory(LENGTHS)
    found = search_attention(decoder, memory_UTD, lengths_U, how=GREEDY)
    expected = plain_greedy(decoder, memory_UTD, lengths_U)
    assert [(texts[0].tokens, texts[0].frames) for texts in found] == expected
    assert [texts[0].ended for texts in found] == [
        len(text) < length or not length for (text, _), length in zip(expected, LENGTHS, strict=True)
    ]


HOW = st.builds(
    dict,
    temperature=st.sampled_from([1.0, 1.5]),
    end_threshold=st.sampled_from([None, 1.0, 1.5]),
    longest_shift=st.sampled_from([None, 1, 3]),
    shortest=st.sampled_from([0.0, 0.3]),
    longest=st.sampled_from([0.5, 1.0, 1.7]),
    ctc_weight=st.sampled_from([0.0, 0.4, 1.0]),
    normalised=st.booleans(),
)


@given(seed=st.integers(0, 2**30), how=HOW, width=st.integers(2, 9), end=st.floats(-2, 2))
@settings(max_examples=60)
def test_no_beam_is_worse_than_greedy(seed: int, how: dict[str, Any], width: int, end: float) -> None:
    """Under the score of its own settings, whatever they are."""
    toy = Toy(outputs=5, size=6, seed=seed, end=end)
    memory_UTD, lengths_U = toy.memory(LENGTHS)
    ctc = emissions(seed, max(LENGTHS), 5)
    one, many = (
        search_attention(toy.decoder(), memory_UTD, lengths_U, ctc_log_probs_UTV=ctc, how=SearchOptions(width=n, **how))
        for n in (1, width)
    )
    for (greedy,), (best,) in zip(one, many, strict=True):
        # The decoder's matrix products round differently for more rows: about 10 operations of 1e-7 for each token.
        assert best.score >= greedy.score - 1e-6 * (1 + abs(greedy.score)) * 12


def every_text(outputs: int, longest: int) -> list[list[int]]:
    return [list(text) for size in range(longest + 1) for text in product(range(1, outputs), repeat=size)]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_beam_that_keeps_everything_finds_the_best_text(seed: int, normalised: bool) -> None:
    toy = Toy(outputs=3, size=5, seed=seed)
    decoder, (memory_UTD, lengths_U) = toy.decoder(), toy.memory([4])
    (found,) = search_attention(
        decoder, memory_UTD, lengths_U, how=replace(PLAIN, width=64, results=64, normalised=normalised)
    )
    scores = {}
    for text in every_text(3, 4):
        ended = len(text) < 4
        total = score_of(decoder, memory_UTD[0], text, ended=ended)
        scores[tuple(text)] = total / (len(text) + ended) if normalised else total
    best = sorted(scores, key=lambda text: -scores[text])
    assert found[0].tokens == list(best[0])
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    for one in found:
        assert one.score == pytest.approx(scores[tuple(one.tokens)], abs=1e-5)
    assert len({tuple(one.tokens) for one in found}) == len(found), "none twice"


def test_with_ctc_alone_the_most_probable_text_is_found() -> None:
    log_probs_UTV = emissions(4, 4, 3, utterances=1)
    toy = Toy(outputs=3, size=5)
    how = replace(PLAIN, width=64, ctc_weight=1.0)
    ((found,),) = search_attention(toy.decoder(), *toy.memory([4]), ctc_log_probs_UTV=log_probs_UTV, how=how)
    costs = {}
    for text in every_text(3, 3):
        lengths = torch.tensor([4]), torch.tensor([text or [1]]), torch.tensor([len(text)])
        costs[tuple(text)] = torch.nn.functional.ctc_loss(
            log_probs_UTV.mT.permute(2, 0, 1), lengths[1], lengths[0], lengths[2], reduction="sum"
        ).item()
    best = min(costs, key=lambda text: costs[text])
    assert found.tokens == list(best)
    assert found.score == pytest.approx(-costs[best], abs=1e-4)


@given(seed=st.integers(0, 2**30), width=st.integers(1, 6), ctc_weight=st.sampled_from([0.0, 0.3]))
@example(seed=16174, width=1, ctc_weight=0.3)  # the decoder insists on a text that its frames cannot spell
@settings(max_examples=20)
def test_an_utterance_is_found_as_it_is_alone(seed: int, width: int, ctc_weight: float) -> None:
    toy = Toy(outputs=6, size=8, seed=seed)
    decoder, (memory_UTD, lengths_U) = toy.decoder(), toy.memory(LENGTHS)
    ctc = emissions(seed, max(LENGTHS), 6)
    how = SearchOptions(width=width, ctc_weight=ctc_weight)
    together = search_attention(decoder, memory_UTD, lengths_U, ctc_log_probs_UTV=ctc, how=how)
    for u, length in enumerate(LENGTHS):
        if length:
            own = (memory_UTD[u : u + 1, :length], lengths_U[u : u + 1])
            ((alone,),) = search_attention(decoder, *own, ctc_log_probs_UTV=ctc[u : u + 1, :length], how=how)
            assert together[u][0].score == pytest.approx(alone.score, abs=1e-4)
            assert (together[u][0].tokens, together[u][0].frames) == (alone.tokens, alone.frames)
        else:
            assert together[u] == [Hypothesis([], [], 0.0, ended=True)]


class Counter(tuple[Tensor]):
    """A state of one tensor: how many tokens there were."""

    def __new__(cls, *tensors: Tensor) -> "Counter":
        return super().__new__(cls, tensors)


def scripted(probs_SV: Tensor, frames_S: list[int]) -> AttentionDecoder:
    """Says the same whatever it has said before: row s of `probs_SV` at step s, looking at frame `frames_S[s]`."""
    log_probs_SV, frames = probs_SV.log(), torch.tensor(frames_S)

    def step(memory_BTD: Tensor, _l: Tensor, _t: Tensor, state: Any) -> tuple[Tensor, Any, Tensor]:
        at_B = state[0].clamp(max=len(log_probs_SV) - 1)
        attention_BT = torch.nn.functional.one_hot(frames[at_B], memory_BTD.shape[1]).float()
        return log_probs_SV[at_B], Counter(state[0] + 1), attention_BT

    return AttentionDecoder(
        start=lambda memory_BTD, _l: Counter(torch.zeros(len(memory_BTD), dtype=torch.int64)), step=step
    )


def test_a_text_ends_only_where_its_end_is_nearly_as_probable_as_the_best_token() -> None:
    # log 0.25 = 2 log 0.5, log 0.4 = 1.3 log 0.5; ending at once, 0.25, beats 0.5 · 0.4, which beats 0.5 · 0.5 · 0.7.
    probs = torch.tensor([[0.25, 0.5, 0.25], [0.4, 0.1, 0.5], [0.7, 0.15, 0.15]])
    memory = torch.zeros(1, 9, 1), torch.tensor([9])
    found = {
        threshold: search_attention(
            scripted(probs, [0, 1, 2]), *memory, how=replace(PLAIN, width=9, end_threshold=threshold)
        )
        for threshold in (1.0, 1.5, 2.5)
    }
    assert [len(found[threshold][0][0].tokens) for threshold in (1.0, 1.5, 2.5)] == [2, 1, 0]


def test_an_attention_that_jumps_loses_to_one_that_does_not() -> None:
    """Where there is no other, its text is found all the same, and costs."""
    probs = torch.tensor([[0.1, 0.9], [0.1, 0.9], [0.9, 0.1]])
    memory = torch.zeros(1, 300, 1), torch.tensor([300])
    for shift, jumps in ((None, 0), (140, 1), (139, 2)):
        ((found,),) = search_attention(
            scripted(probs, [10, 150, 291]), *memory, how=replace(PLAIN, longest_shift=shift)
        )
        assert (found.tokens, found.frames) == ([1, 1], [10, 150])
        assert found.score == pytest.approx(3 * math.log(0.9) - jumps * JUMP_COST, rel=1e-6)
    ((beam,),) = search_attention(
        scripted(probs, [10, 150, 291]), *memory, how=replace(PLAIN, longest_shift=139, width=2)
    )
    assert beam.tokens == [], "to end at once costs less than to jump"


def test_a_collapsed_attention_is_noticed() -> None:
    going_on = scripted(torch.tensor([[0.1, 0.9]]), [3])
    ((found,),) = search_attention(going_on, torch.zeros(1, 20, 1), torch.tensor([20]), how=PLAIN)
    assert (found.tokens, found.ended, found.collapsed) == ([1] * 20, False, True)
    ends = torch.tensor([[0.1, 0.9]] * 5 + [[0.9, 0.1]])
    for frames, collapsed in (([3] * 6, True), ([3, 3, 3, 3, 4, 4], False)):
        ((found,),) = search_attention(scripted(ends, frames), torch.zeros(1, 20, 1), torch.tensor([20]), how=PLAIN)
        assert (len(found.tokens), found.ended, found.collapsed) == (5, True, collapsed)


def test_a_decoder_that_gives_no_numbers_is_found_out() -> None:
    broken = scripted(torch.full((1, 3), math.nan), [0])
    ((found,),) = search_attention(broken, torch.zeros(1, 5, 1), torch.tensor([5]), how=SearchOptions(width=3))
    assert (found.tokens, found.collapsed) == ([], True)


def test_lengths() -> None:
    probs = torch.tensor([[0.9, 0.1]])
    memory = torch.zeros(1, 20, 1), torch.tensor([20])
    ((found,),) = search_attention(scripted(probs, [0]), *memory, how=replace(PLAIN, shortest=0.25))
    assert len(found.tokens) == 5
    ((found,),) = search_attention(scripted(1 - probs, [0]), *memory, how=replace(PLAIN, longest=0.25))
    assert (len(found.tokens), found.ended) == (5, False)


def test_a_language_model_ranks_the_best_texts_again() -> None:
    toy = Toy(outputs=4, size=5, seed=2)
    how = replace(PLAIN, width=8)
    (before,) = search_attention(toy.decoder(), *toy.memory([6]), how=replace(how, results=8))
    favourite = before[-1].tokens
    liking = replace(how, language_model=lambda tokens: 0.0 if list(tokens) == favourite else -1.0, lm_weight=100.0)
    ((found,),) = search_attention(toy.decoder(), *toy.memory([6]), how=liking)
    assert found == before[-1]


@pytest.mark.parametrize("how", [GREEDY, SearchOptions(width=5), SearchOptions(width=4, ctc_weight=0.3, results=3)])
def test_how_often_the_host_asks_changes_nothing(how: SearchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(outputs=6, size=8, seed=1, end=1.0)
    memory_UTD, lengths_U = toy.memory([30, 5, 17, 0, 9, 2])
    ctc = emissions(2, 30, 6, utterances=6)
    found = []
    for steps in (1, 3, 8, 100):
        monkeypatch.setattr(attention_search, "STEPS_A_QUESTION", {"cpu": steps})
        found.append(search_attention(toy.decoder(), memory_UTD, lengths_U, ctc_log_probs_UTV=ctc, how=how))
    read = [[[(one.tokens, one.frames, one.ended) for one in texts] for texts in every] for every in found]
    assert all(one == read[0] for one in read)


def test_rows_are_dropped_as_utterances_end() -> None:
    """A decoder is asked once for all hypotheses of all utterances, and no more after the last of them is decided."""
    toy = Toy(outputs=6, size=8, seed=1, end=4.0)
    plain = toy.decoder()
    rows: list[int] = []

    def step(memory_BTD: Tensor, *rest: Any) -> Any:
        rows.append(len(memory_BTD))
        return plain.step(memory_BTD, *rest)

    search_attention(replace(plain, step=step), *toy.memory([50, 40, 30, 20]), how=replace(GREEDY, width=4))
    assert rows[0] == 16
    assert len(rows) < 50
    assert rows == sorted(rows, reverse=True)


def test_settings_that_make_no_sense() -> None:
    for name, value in (
        ("width", 0),
        ("temperature", 0.0),
        ("ctc_weight", 1.5),
        ("end_threshold", 0.5),
        ("results", 99),
    ):
        with pytest.raises(InputError, match=f"attention search: {name}={value}, expected"):
            SearchOptions(**{name: value})
    with pytest.raises(InputError, match=r"ctc_weight=0\.5 needs a model with CTC"):
        search_attention(Toy(3, 4).decoder(), *Toy(3, 4).memory([3]), how=SearchOptions(width=2, ctc_weight=0.5))


def test_the_end_is_the_blank() -> None:
    assert END == ctc_prefix.BLANK
