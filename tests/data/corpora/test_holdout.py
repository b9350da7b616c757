from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import Clip, Corpus, ProblemLog, RenderedSpeaker, Speaker
from sottovoce.data.corpora.listing import hold_out_speakers

PEOPLE = [f"spk{number:02}" for number in range(48)]


def corpus_of(names: Iterable[str], split: str = "train") -> Corpus[Speaker]:
    speakers = [Speaker(name, split, [Clip(f"{name}-0", f"{name}.wav", "six")], {"age": "teens"}) for name in names]
    return Corpus("c", "en", speakers, render, ProblemLog())


def render(speaker: Speaker) -> RenderedSpeaker:
    raise AssertionError("setting speakers aside reads no audio")


def by_split(corpus: Corpus[Speaker]) -> dict[str, set[str]]:
    splits: dict[str, set[str]] = {}
    for speaker in corpus.speakers:
        splits.setdefault(speaker.split, set()).add(speaker.name)
    return splits


@st.composite
def crowds_and_counts(draw: st.DrawFn) -> tuple[list[str], dict[str, int]]:
    names = draw(st.lists(st.text(min_size=1), min_size=2, max_size=30, unique=True))
    left, counts = len(names) - 1, {}
    for split in draw(st.lists(st.sampled_from(["dev", "test", "later"]), unique=True)):
        if left:
            counts[split] = draw(st.integers(1, left))
            left -= counts[split]
    return names, counts


@given(crowds_and_counts(), st.integers(0, 2**63 - 1))
def test_everybody_is_in_one_split_and_nobody_is_lost(crowd: tuple[list[str], dict[str, int]], seed: int) -> None:
    names, counts = crowd
    before = corpus_of(names)
    after = hold_out_speakers(before, counts, seed=seed)
    assert Counter(speaker.split for speaker in after.speakers) == {
        **counts,
        "train": len(names) - sum(counts.values()),
    }
    brought = {speaker.name: (speaker.clips, speaker.metadata) for speaker in after.speakers}
    assert brought == {speaker.name: (speaker.clips, speaker.metadata) for speaker in before.speakers}
    assert len(after.speakers) == len(names)
    # The store takes them in this order only.
    assert [(s.split, s.name) for s in after.speakers] == sorted((s.split, s.name) for s in after.speakers)


@given(crowds_and_counts(), st.randoms(use_true_random=False))
def test_the_order_of_the_listing_does_not_matter(crowd: tuple[list[str], dict[str, int]], random: object) -> None:
    names, counts = crowd
    shuffled = sorted(names, key=lambda name: random.random())  # type: ignore[attr-defined]
    assert (
        hold_out_speakers(corpus_of(shuffled), counts, seed=3).speakers
        == hold_out_speakers(corpus_of(names), counts, seed=3).speakers
    )


@given(st.sampled_from(PEOPLE))
def test_somebody_who_leaves_changes_nobody_elses_split(leaver: str) -> None:
    counts = {"dev": 4, "test": 8}
    before = by_split(hold_out_speakers(corpus_of(PEOPLE), counts, seed=1))
    after = by_split(hold_out_speakers(corpus_of(name for name in PEOPLE if name != leaver), counts, seed=1))
    if leaver in before["train"]:
        assert (after["dev"], after["test"]) == (before["dev"], before["test"])
    else:  # the queue moves up by one: a place in dev is filled from test's first, one in test from training
        assert len(after["dev"] - before["dev"]) <= 1
        assert len(after["test"] - before["test"]) <= 1


def test_the_seed_decides_and_the_choice_never_changes() -> None:
    chosen = {seed: by_split(hold_out_speakers(corpus_of(PEOPLE), {"dev": 4, "test": 8}, seed=seed)) for seed in (1, 2)}
    assert chosen[1]["test"] != chosen[2]["test"]
    # The first four and the next eight by SplitMix64(name_key(name) ^ derive(1, "hold out")), worked out with Python's
    # own integers. Another choice would make results on held-out people incomparable with earlier ones.
    assert chosen[1]["dev"] == {"spk13", "spk33", "spk20", "spk10"}
    assert chosen[1]["test"] == {"spk14", "spk16", "spk31", "spk22", "spk27", "spk46", "spk24", "spk03"}


def test_a_person_in_two_splits_is_moved_whole() -> None:
    twice = corpus_of(["ann", "bob", "cem"]), corpus_of(["ann", "bob", "cem"], split="other")
    both = Corpus("c", "en", [*twice[0].speakers, *twice[1].speakers], render, ProblemLog())
    after = hold_out_speakers(both, {"test": 1}, seed=1)
    names = Counter(speaker.name for speaker in after.speakers if speaker.split == "test")
    assert list(names.values()) == [2]
    assert not by_split(after)["test"] & (by_split(after)["train"] | by_split(after)["other"])


@pytest.mark.parametrize("counts", [{"dev": 0}, {"dev": -1, "test": 2}, {"dev": 1, "test": 2}, {"test": 4}])
def test_impossible_wishes_are_refused(counts: Mapping[str, int]) -> None:
    with pytest.raises(InputError) as caught:
        hold_out_speakers(corpus_of(["ann", "bob", "cem"]), counts, seed=1)
    wish = ", ".join(f"{split}={count}" for split, count in counts.items())
    assert str(caught.value) == f"hold_out {wish}: expected at least 1 each, and fewer in all than the 3 speakers"
