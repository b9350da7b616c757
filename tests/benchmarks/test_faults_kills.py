"""A short campaign of kills: whatever is killed wherever, the same command again ends as if nothing had happened."""

from collections import Counter

import pytest
from faulty.cases import Outcome, Tally
from faulty.kills import campaign


@pytest.mark.long
def test_kills_at_named_points_harm_nothing() -> None:
    tally = Tally()
    campaign(tally, kills=20, seed=1)
    assert not tally.bad
    assert len(tally.counts) == 5
    assert sum(tally.counts.values(), Counter[Outcome]()) == {Outcome.UNHARMED: 20}
