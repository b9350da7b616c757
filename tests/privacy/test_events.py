"""Events are data: one spelling each, nothing lost on the way through JSON."""

import json

import dp_accounting
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.privacy.events import (
    Composition,
    Event,
    GaussianRelease,
    NoGuarantee,
    composed,
    event_from_json,
    event_to_json,
    fixed_size_release,
    poisson_release,
    repeated,
    to_dp_event,
)

multipliers = st.floats(1e-6, 1e6)
poisson = st.builds(poisson_release, multipliers, sampling_rate=st.floats(1e-9, 1.0))
fixed = st.builds(
    fixed_size_release, multipliers, cohort_size=st.integers(1, 1000), population_size=st.integers(1000, 10**9)
)
leaves = st.one_of(poisson, fixed, st.builds(NoGuarantee, st.text()))
events = st.one_of(
    leaves, st.lists(st.tuples(leaves, st.integers(0, 10**6)), max_size=4).map(lambda parts: Composition(tuple(parts)))
)


@given(events)
def test_json_gives_back_the_event(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event
    assert event_from_json(event_to_json(event)) == event


def test_equal_events_have_one_spelling() -> None:
    whole, real = poisson_release(1, sampling_rate=1), poisson_release(1.0, sampling_rate=1.0)
    assert whole == real
    assert json.dumps(event_to_json(whole)) == json.dumps(event_to_json(real))


def test_replacing_a_user_halves_the_effective_multiplier() -> None:
    release = fixed_size_release(3.0, cohort_size=10, population_size=100)
    assert release.sensitivity == 2.0
    assert to_dp_event(release) == dp_accounting.SampledWithoutReplacementDpEvent(
        100, 10, dp_accounting.GaussianDpEvent(1.5)
    )
    assert poisson_release(3.0, sampling_rate=0.1).effective_multiplier == 3.0


def test_composed_merges_equal_parts_and_repeated_multiplies() -> None:
    a, b = poisson_release(1.0, sampling_rate=0.1), poisson_release(2.0, sampling_rate=0.1)
    assert composed(a, repeated(b, 2), a).parts == ((a, 2), (b, 2))
    assert repeated(composed(a, b), 5).parts == ((a, 5), (b, 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: poisson_release(0.0, sampling_rate=0.1), "noise_multiplier=0.0"),
        (lambda: poisson_release(float("nan"), sampling_rate=0.1), "noise_multiplier=nan"),
        (lambda: poisson_release(1e-200, sampling_rate=0.1), "noise_multiplier=1e-200"),
        (lambda: poisson_release(float("inf"), sampling_rate=0.1), "noise_multiplier=inf"),
        (lambda: poisson_release(1.0, sampling_rate=1.5), "sampling_rate=1.5"),
        (lambda: poisson_release(1.0, sampling_rate=1e-18), "sampling_rate=1e-18"),
        (lambda: poisson_release(1.0, sampling_rate=float("nan")), "sampling_rate=nan"),
        (lambda: fixed_size_release(1.0, cohort_size=2.5, population_size=10), "cohort_size=2.5: expected a whole"),  # type: ignore[arg-type]
        (lambda: fixed_size_release(1.0, cohort_size=2, population_size=float("nan")), "population_size=nan"),  # type: ignore[arg-type]
        (lambda: fixed_size_release(1.0, cohort_size=11, population_size=10), "cohort_size=11 exceeds"),
        (lambda: GaussianRelease(1.0, "poisson", "add_remove"), "expected sampling_rate"),
        (lambda: GaussianRelease(1.0, "none", "add_remove"), "sampling='none': expected one of poisson, fixed_size"),  # type: ignore[arg-type]
        (lambda: Composition(((poisson_release(1.0, sampling_rate=1.0), -1),)), "count=-1"),
        (lambda: event_from_json({"kind": "laplace"}), "kind='laplace'"),
        (lambda: event_from_json({"kind": "gaussian", "sigma": 1}), "sigma"),
        (
            lambda: event_from_json({"kind": "composition", "parts": [[{"kind": "composition", "parts": []}, 1]]}),
            "flat",
        ),
    ],
)
def test_bad_events_are_refused_in_one_line(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        make()  # type: ignore[operator]
    assert "\n" not in str(error.value)
