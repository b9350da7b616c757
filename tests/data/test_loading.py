"""What can be trained on is kept, what cannot is counted by its reason, and batches are the same from any place."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.data.audio.batches import group_into_steps, plan_epoch
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.loading import DataPosition, count_epoch_steps, iterate_steps, load_speech
from sottovoce.data.store import Store, pack_corpus
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models.transformer import FAMILY

CPU = torch.device("cpu")
TOKENS = CharacterTokens("ab ")
MODEL: dict[str, Any] = {"family": FAMILY, "settings": FAMILY.Options(size="tiny").settings(tokens=TOKENS.size + 1)}


def utterance(id: str, *, seconds: float, text: str | None) -> RenderedUtterance:
    samples = np.ones(int(seconds * SAMPLE_RATE), dtype=np.int16)
    return RenderedUtterance(id=id, samples=samples, text=text, raw_text=text)


def same(rendered: RenderedSpeaker) -> RenderedSpeaker:
    return rendered


@pytest.fixture
def store(tmp_path: Path) -> Store:
    spoken = [
        utterance("good", seconds=1, text="ab"),
        utterance("silent", seconds=1, text=None),
        utterance("long", seconds=3, text="ab"),
        utterance("foreign", seconds=1, text="abc"),
        # 0.26 s are 24 frames of 10 ms, 8 after striding: 5 b's need 9 (a blank between equal neighbours), 8 letters 8.
        utterance("tight", seconds=0.26, text="abababab"),
        utterance("crowded", seconds=0.26, text="bbbbb"),
    ]
    pack_corpus(
        Corpus("mixed", "en", [RenderedSpeaker("ada", "train", spoken)], same, ProblemLog()),
        tmp_path / "mixed",
        workers=1,
    )
    return Store(tmp_path / "mixed")


def test_what_has_no_loss_is_left_out_and_counted(store: Store) -> None:
    speech = load_speech(store, np.arange(6), TOKENS, **MODEL, longest_seconds=2)
    assert [store.utterance(row).id for row in speech.rows.tolist()] == ["good", "tight"]
    assert speech.left_out == {
        "without text": 1,
        "too long": 1,
        "text outside the token set": 1,
        "text too long for its audio": 1,
    }


def test_nothing_to_train_on_says_why(store: Store) -> None:
    with pytest.raises(InputError, match=r"no utterance to train on \(2 too long\)"):
        load_speech(store, np.arange(2), TOKENS, **MODEL, longest_seconds=0.5)


@pytest.mark.parametrize("batches", [1, 2])
def test_going_on_from_any_place_gives_the_same_steps(store: Store, batches: int) -> None:
    speech = load_speech(store, np.array([0, 4]), TOKENS, **MODEL, longest_seconds=2)

    def steps(start: DataPosition) -> list[tuple[DataPosition, list[list[list[int]]]]]:
        endless = iterate_steps(speech, start=start, batches=batches, max_seconds=1.5, seed=3, device=CPU)
        return [(step.following, [said.tokens_UL.tolist() for _, said in step.pieces]) for step in islice(endless, 6)]

    whole = steps(DataPosition())
    for done in range(1, 6):
        assert steps(whole[done - 1][0])[: 6 - done] == whole[done:]


@given(
    seconds=st.lists(st.floats(0.1, 8.0), min_size=3, max_size=60),
    max_utterances=st.sampled_from([None, 1, 2, 7]),
    ascending=st.booleans(),
    batches=st.integers(1, 3),
    place=st.tuples(st.integers(0, 10**6), st.integers(0, 50)),
)
def test_every_epoch_has_as_many_steps(
    seconds: list[float], max_utterances: int | None, ascending: bool, batches: int, place: tuple[int, int]
) -> None:
    """However it is shuffled: so epochs can be counted in steps before the first."""
    lengths = np.array([int(own * SAMPLE_RATE) for own in seconds])
    batching: Any = {"max_seconds": 16.0, "max_utterances": max_utterances, "ascending": ascending}
    seed, epoch = place
    plan = plan_epoch(lengths, seed=seed, epoch=epoch, fixed_shapes=True, **batching)
    assert sorted(row for batch in plan for row in batch.rows.tolist()) == list(range(len(seconds)))
    try:
        expected = len(group_into_steps(plan, size=batches))
    except InputError:  # too few to make whole steps of
        with pytest.raises(InputError):
            count_epoch_steps(lengths, batches=batches, **batching)
        return
    assert count_epoch_steps(lengths, batches=batches, **batching) == expected


def test_fewer_utterances_than_a_step_has_batches_is_one_line(store: Store) -> None:
    speech = load_speech(store, np.array([0]), TOKENS, **MODEL, longest_seconds=2)
    with pytest.raises(InputError, match="1 batches of one utterance each do not make whole steps of batches=2"):
        next(iterate_steps(speech, start=DataPosition(), batches=2, max_seconds=2, seed=3, device=CPU))


def test_speech_without_text_is_taken_where_it_is_asked_for(store: Store) -> None:
    speech = load_speech(store, np.arange(6), None, **MODEL, longest_seconds=2)
    assert [store.utterance(row).id for row in speech.rows.tolist()] == [
        "good",
        "silent",
        "foreign",
        "tight",
        "crowded",
    ]
    assert {reason: count for reason, count in speech.left_out.items() if count} == {"too long": 1}
    ((_, batch),) = next(iterate_steps(speech, start=DataPosition(), max_seconds=10, seed=3, device=CPU)).pieces
    assert batch.tokens_UL.shape == (5, 0), "no text anywhere"
