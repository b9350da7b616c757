"""Public model and personal parts, group by group: who is worst off, what is given back, and over seeds."""

from typing import Any

import pytest

from sottovoce.base.errors import InputError
from sottovoce.evaluation.personal_groups import (
    EVERYBODY,
    LEAST,
    MOST,
    WORST,
    at_amount,
    compare_groups,
    find_worst_gaps,
    list_groups,
    measure_recovered,
    pool_seeds,
)


def person(number: int, *, public: int, personal: int, trained: int = 2, utterances: int = 8, **more: Any) -> Any:
    return {
        "client": number,
        "groups": {"accent": "en-GB" if number % 2 else "en-US"},
        "words": 20,
        "utterances": utterances,
        "training": {"words": 40, "errors": trained},
        "is_kept": personal < public,
        "errors": {"public": public, "unguarded": personal, "personal": personal},
        "by_amount": [],
        **more,
    }


CROWD = [person(n, public=4 + n % 3, personal=2, trained=n, utterances=n) for n in range(1, 21)]


def test_the_worst_are_so_on_speech_that_they_are_not_tested_on() -> None:
    lucky = [*CROWD, person(21, public=20, personal=0, trained=0)]
    groups = list_groups(lucky)
    assert [one["client"] for one in groups[WORST]] == [20, 19]
    assert [one["client"] for one in groups[LEAST]] == [1, 2, 3, 4, 5]
    assert max(one["utterances"] for one in groups[MOST]) == 20
    assert {"accent en-GB", "accent en-US", EVERYBODY} <= groups.keys()


def test_groups_are_compared_by_person() -> None:
    found = {group.name: group for group in compare_groups(CROWD)}
    everybody = found[EVERYBODY]
    expected = sum(one["errors"]["public"] for one in CROWD) / 400
    assert (everybody.difference.first, everybody.difference.second) == (0.1, expected)
    assert (everybody.kept, everybody.tried, everybody.is_worse) == (20, 20, False)
    assert everybody.difference.interval is not None
    assert everybody.difference.interval[1] < 0
    assert found[WORST].difference.interval is None  # two people
    worse = [person(n, public=1, personal=5) for n in range(8)]
    assert compare_groups(worse)[0].is_worse
    gaps = find_worst_gaps(CROWD)
    assert gaps["public"] is not None
    assert gaps["personal"] is not None
    assert gaps["personal"].gap == 0


def test_seeds_are_summed_by_person_and_only_of_the_same_people() -> None:
    other = [person(n, public=6, personal=6) for n in range(20, 0, -1)]
    (first, *_) = pool_seeds([CROWD, other])
    assert (first["words"], first["errors"]["public"], first["errors"]["personal"]) == (40, 11, 8)
    assert (first["kept"], first["tried"], first["training"]["words"]) == (1, 2, 80)
    with pytest.raises(InputError, match="other people under another seed"):
        pool_seeds([CROWD, [*other[:-1], person(99, public=1, personal=1)]])


def test_what_is_given_back_is_a_share_of_what_noise_costs() -> None:
    quiet = [person(n, public=2, personal=2) for n in range(1, 21)]
    private = [person(n, public=6, personal=4) for n in range(1, 21)]
    found = measure_recovered(private, quiet)
    assert found.share == 0.5
    assert found.interval == (0.5, 0.5)
    assert measure_recovered(quiet, quiet).share is None
    with pytest.raises(InputError, match="of other people"):
        measure_recovered(private, quiet[1:])


def test_an_amount_takes_those_who_were_tried_with_it() -> None:
    errors = {"public": 5, "unguarded": 9, "personal": 5}
    tried = person(1, public=5, personal=1, by_amount=[{"utterances": 2, "is_kept": False, "errors": errors}])
    (found,) = at_amount([tried, CROWD[0]], 2)
    assert (found["errors"], found["is_kept"], found["utterances"]) == (errors, False, 2)
    assert at_amount([tried], 4) == []
