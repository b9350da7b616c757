"""Two models on the same speakers, and the worst group of one: differences, intervals, groups and intersections."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream
from sottovoce.data.store import Store
from sottovoce.evaluation.compare import (
    Comparison,
    Difference,
    compare_tests,
    compute_difference,
    explain_incomparable,
    find_worst_group,
    find_worst_group_by_totals,
    read_gap,
)
from sottovoce.evaluation.error_rates import bootstrap_interval
from sottovoce.evaluation.score import score_hypotheses, select_utterances
from sottovoce.evaluation.tables import format_comparison, format_comparison_notes


def scored(
    words: Sequence[int], wrong: Sequence[int], *, groups: Sequence[Mapping[str, str]] = (), **more: Any
) -> dict[str, Any]:
    """What `results.json` says of a test, as far as it is compared."""
    people = [
        {"speaker": f"s{n:04}", "wer": mistakes / said if said else None, "words": int(said)}
        for n, (said, mistakes) in enumerate(zip(words, wrong, strict=True))
    ]
    for person, known in zip(people, groups, strict=False):
        person["groups"] = dict(known)
    return {"wer": sum(wrong) / sum(words), "per_speaker": people, **more}


def two_models(
    trial: int, *, speakers: int, words: int | None = None, better_by: float = 0.9
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Speakers of very different skill, and a first model that makes `better_by` as many errors with each of them."""
    rng = stream(trial, "two models")
    said = rng.integers(5, 200, speakers) if words is None else np.full(speakers, words)
    skill = rng.beta(2, 8, speakers)  # 0.2 in the mean, whatever somebody says
    first, second = rng.binomial(said, better_by * skill), rng.binomial(said, skill)
    return scored(said.tolist(), first.tolist()), scored(said.tolist(), second.tolist())


def width(found: tuple[float, float] | None) -> float:
    assert found is not None
    return found[1] - found[0]


def every(comparison: Comparison) -> list[Difference]:
    crossed = (*comparison.groups.values(), *comparison.intersections.values())
    return [comparison.everybody, *(one for found in crossed for one in found)]


def test_the_interval_covers_the_truth_as_often_as_it_says_and_is_no_wider_than_it_must() -> None:
    trials = 200
    found = [compute_difference(*two_models(trial, speakers=60)) for trial in range(trials)]
    truth = 0.9 * 0.2 - 0.2
    covered = sum(one.interval is not None and one.interval[0] <= truth <= one.interval[1] for one in found)
    # 95 % of 200 are 190, with a standard deviation of sqrt(200 · 0.95 · 0.05) = 3.1; four of them.
    assert covered >= 190 - 4 * math.sqrt(trials * 0.95 * 0.05)
    # The estimates' own spread is known to 1 / sqrt(2 · 200) = 5 %; three times that. Percentiles of 1.96 of it a side.
    spread = np.std([one.difference for one in found])
    assert np.mean([width(one.interval) for one in found]) / (2 * 1.96 * spread) == pytest.approx(1, abs=0.15)


def test_the_interval_of_few_people_covers_the_truth_too() -> None:
    """Eight people vary more than draws from them do, for which `expanded` makes up: it holds as often as with many."""
    found = [compute_difference(*two_models(trial, speakers=8)).interval for trial in range(200)]
    covered = sum(one is not None and one[0] <= 0.9 * 0.2 - 0.2 <= one[1] for one in found)
    assert covered >= 190 - 4 * math.sqrt(200 * 0.95 * 0.05)


def test_pairing_is_tighter_where_people_are_hard_for_both() -> None:
    first, second = two_models(1, speakers=400, words=100, better_by=1.0)
    counts = [
        np.array([[p["words"], round(p["wer"] * p["words"]), 0, 0] for p in test["per_speaker"]])
        for test in (first, second)
    ]
    apart = math.hypot(*(width(bootstrap_interval(one, generator=stream(n))) for n, one in enumerate(counts)))
    # Skill varies by 2 · 8 / (10² · 11) = 0.01455; a hundred words add (0.2 − 0.04 − 0.01455) / 100 = 0.001455 for each
    # model, and that alone is left: sqrt(0.001455 / 0.016) = 0.30. Both widths are known to some 5 %.
    assert width(compute_difference(first, second).interval) / apart == pytest.approx(0.30, rel=0.2)


def test_a_model_beside_itself_differs_by_nothing() -> None:
    test, _ = two_models(1, speakers=40)
    found = compute_difference(test, test)
    assert (found.difference, found.interval, found.better, found.worse) == (0, (0, 0), 0, 0)
    assert not found.is_significant
    assert (
        format_comparison_notes(compare_tests(test, test))[0]
        == "No significant difference on these speakers: 0.0 points (0.0 to 0.0)."
    )


FACTS = [
    {"gender": gender, "age": age, "accent": "plain"}
    for gender, age, people in (("f", "old", 6), ("f", "young", 7), ("m", "old", 8), ("m", "young", 3))
    for _ in range(people)
]


@pytest.fixture
def grouped() -> tuple[dict[str, Any], dict[str, Any]]:
    """24 people of two genders and two ages, and two of whom nothing is known. Only old people have trouble."""
    rng, people = stream(5, "grouped"), len(FACTS) + 2
    facts = [*FACTS, {}, {}]
    errors = rng.integers(2, 8, people)
    trouble = [4 if known.get("age") == "old" else 0 for known in facts]
    one = scored([40] * people, (errors + trouble).tolist(), groups=facts)
    return one, scored([40] * people, errors.tolist(), groups=facts)


def test_groups_and_intersections_of_enough_people(grouped: tuple[dict[str, Any], dict[str, Any]]) -> None:
    found = compare_tests(*grouped)
    sizes = {(fact, one.name): one.speakers for fact, among in found.groups.items() for one in among}
    assert sizes == {
        ("gender", "f"): 13,
        ("gender", "m"): 11,
        ("gender", "unknown"): 2,
        ("age", "old"): 14,
        ("age", "young"): 10,
        ("age", "unknown"): 2,
        ("accent", "plain"): 24,
        ("accent", "unknown"): 2,
    }
    # One accent tells nobody apart; three young men are too few.
    assert list(found.intersections) == ["gender × age"]
    assert [(one.name, one.speakers) for one in found.intersections["gender × age"]] == [
        ("f × old", 6),
        ("f × young", 7),
        ("m × old", 8),
    ]
    assert found.too_small == 1
    old, young, _ = found.groups["age"]
    # Four more of forty words for each: there is nothing to vary.
    assert (old.difference, old.interval) == (pytest.approx(0.1), pytest.approx((0.1, 0.1)))
    assert (old.better, old.worse, old.is_significant) == (0, 14, True)
    assert (young.difference, young.interval) == (0, (0, 0))
    assert found.groups["gender"][2].interval is None, "two people"
    assert found.everybody.difference == pytest.approx(4 * 14 / (40 * 26))


def test_the_other_way_round_every_sign_is_turned(grouped: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for first, second in (grouped, two_models(3, speakers=30)):
        there, back = every(compare_tests(first, second)), every(compare_tests(second, first))
        assert [one.name for one in there] == [one.name for one in back]
        for one, other in zip(there, back, strict=True):
            assert (one.better, one.worse, one.first) == (other.worse, other.better, other.second)
            assert one.difference == pytest.approx(-(other.difference or 0), abs=1e-12)
            if one.interval is None:
                assert other.interval is None
            else:
                assert one.interval == pytest.approx([-bound for bound in reversed(other.interval or ())], abs=1e-12)


def test_the_order_of_speakers_and_the_digits_that_are_kept_change_nothing() -> None:
    first, second = two_models(4, speakers=30)
    kept = [{**p, "wer": float(f"{p['wer']:.6g}")} for p in reversed(second["per_speaker"])]
    assert compute_difference(first, {**second, "per_speaker": kept}) == compute_difference(first, second)


def test_too_few_people_have_a_difference_and_no_interval() -> None:
    found = compare_tests(scored([10] * 4, [1] * 4), scored([10] * 4, [3] * 4))
    assert (found.everybody.difference, found.everybody.interval) == (pytest.approx(-0.2), None)
    assert format_comparison_notes(found)[0] == "Fewer than 5 speakers: nothing can be said of others."


OURS = {"name": "sottovoce", "version": 1}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"loss": 0.5}, "a model that writes no text has no word error rate"),
        ({"wer": 0.1}, "there is no count of words by speaker"),
        ({"wer": 0.1, "per_speaker": [{"speaker": "speaker 1", "wer": 0.1}]}, "there is no count of words by speaker"),
        (scored([10] * 6, [1] * 6, store="b"), "they were tested with other stores, a and b"),
        (
            scored([10] * 6, [1] * 6, normalisation=OURS | {"version": 2}),
            "they were tested with other normalisations of text, sottovoce 1 and sottovoce 2",
        ),
        (scored([10] * 5, [1] * 5), "they were tested on other speakers (6 and 5, 5 in both)"),
        (scored([10] * 5 + [9], [1] * 6), "the same speakers said other texts"),
        (scored([10] * 6, [1] * 6, speech="y"), "the same speakers were tested with other recordings or texts"),
        (scored([10] * 6, [1] * 6), ""),  # as in older results, which say less
    ],
)
def test_what_cannot_be_compared_is_refused(other: dict[str, Any], reason: str) -> None:
    one = scored([10] * 6, [2] * 6, store="a", speech="x", normalisation=OURS)
    assert explain_incomparable(one, other).startswith(reason)
    for pair in ((one, other), (other, one)):
        assert bool(explain_incomparable(*pair)) == bool(reason)
        if reason:
            with pytest.raises(InputError, match=r"^cannot be compared: "):
                compute_difference(*pair)


def test_an_evaluation_tells_what_is_needed(store: Store) -> None:
    chosen = select_utterances(store)
    right = score_hypotheses(store, chosen, chosen.references).as_json()
    wrong = score_hypotheses(store, chosen, ["" for _ in chosen.references]).as_json()
    found = compare_tests(wrong, right)
    assert (found.everybody.first, found.everybody.second, found.everybody.difference) == (1, 0, 1)
    assert {fact: [one.name for one in among] for fact, among in found.groups.items()} == {
        "gender": ["female", "male", "unknown"],
        "age": ["old", "unknown"],
    }
    assert right["normalisation"] == {"name": "sottovoce", "version": 1}
    part = select_utterances(store, split="test")
    assert explain_incomparable(score_hypotheses(store, part, part.references).as_json(), right)


def test_the_table_says_all_of_it_in_eighty_columns(grouped: tuple[dict[str, Any], dict[str, Any]]) -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(format_comparison(compare_tests(*grouped), title="WER on [test]"))
    text = console.export_text()
    assert "WER on [test]" in text
    for line in (
        "all",
        "gender × age",
        "  m × old",
        "B is better: +5.4 points",
        "one in twenty",
        "fewer than 5 speakers: 1",
    ):
        assert line in text, line
    assert "+10.0 to +10.0" in text
    assert "…" not in text


def scores_of(people: list[tuple[float, dict[str, str]]], *, words: int = 100) -> dict[str, Any]:
    """What `results.json` says of people with a rate and facts each."""
    told = [
        {"speaker": f"s{n:03}", "wer": rate, "words": words, "groups": facts} for n, (rate, facts) in enumerate(people)
    ]
    return {"wer": float(np.mean([rate for rate, _ in people])), "speakers": len(people), "per_speaker": told}


def crowd(rates: dict[str, list[float]], *, fact: str = "accent") -> dict[str, Any]:
    return scores_of([(rate, {fact: name}) for name, found in rates.items() for rate in found])


def test_the_worst_is_the_group_furthest_above_everybody_else() -> None:
    found = find_worst_group(crowd({"north": [0.1] * 8, "south": [0.4] * 6, "west": [0.2] * 10}))
    assert found is not None
    assert (found.fact, found.group, found.groups) == ("accent", "south", 3)
    assert found.wer == pytest.approx(0.4)
    assert found.others_wer == pytest.approx((8 * 0.1 + 10 * 0.2) / 18)
    assert found.interval is not None
    assert found.interval[0] < found.gap < found.interval[1]
    assert found.interval[0] > 0, "so far apart is no chance"
    assert read_gap(found.as_json()) == found


def test_small_groups_and_those_of_whom_nothing_is_known_are_not_named() -> None:
    few = find_worst_group(crowd({"north": [0.1] * 8, "south": [0.9] * 4, "west": [0.2] * 10}))
    assert few is not None
    assert few.group == "west"
    assert find_worst_group(crowd({"north": [0.1] * 8})) is None, "there is nobody else"
    unknown = scores_of([(0.9, {})] * 8 + [(0.1, {"gender": "female"})] * 6)
    found = find_worst_group(unknown)
    assert found is not None
    assert (found.group, found.groups) == ("female", 1)
    assert found.gap < 0


def test_the_interval_holds_for_all_groups_at_once() -> None:
    """Of people who are all alike the worst of six groups is above 0 by construction; its interval must hold 0.

    The share of crowds where it does not is at most 5 %, and 100 of them exceed 12 % less than once in 300 times.
    """
    generator = np.random.default_rng(1)
    missed = 0
    for _ in range(100):
        people = [(float(rate), {"accent": f"a{n % 6}"}) for n, rate in enumerate(generator.beta(2, 8, size=60))]
        found = find_worst_group(scores_of(people))
        assert found is not None
        assert found.interval is not None
        assert found.gap >= 0
        missed += found.interval[0] > 0
    assert missed <= 12


def test_without_words_by_speaker_it_has_no_interval() -> None:
    """As older releases have it, and runs kept in brief."""

    def counted(speakers: int, words: int, wrong: int) -> dict[str, int]:
        return {"speakers": speakers, "words": words, "substitutions": wrong, "deletions": 0, "insertions": 0}

    groups = {"gender": {"female": counted(6, 600, 60), "male": counted(7, 700, 210), "unknown": counted(9, 1, 1)}}
    test = {"wer": 0.2, "groups": groups, **counted(22, 1301, 271)}
    found = find_worst_group_by_totals(test)
    assert found is not None
    assert (found.group, found.interval) == ("male", None)
    assert found.wer == pytest.approx(0.3)
    assert found.others_wer == pytest.approx(61 / 601)
    assert find_worst_group_by_totals({"wer": 0.2}) is None
