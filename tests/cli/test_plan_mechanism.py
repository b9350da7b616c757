"""`sottovoce plan --mechanism`, as a user types it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

Command = Callable[..., Any]

SMALL = ("--max-cohort", 2000, "--steps", 40, "--delta", 1e-6)


def test_noise_for_machines(sottovoce: Command) -> None:
    done = sottovoce(
        "plan",
        "--mechanism",
        "auto",
        *SMALL,
        "--population",
        50_000,
        "--target-epsilon",
        4,
        "--accountant",
        "rdp",
        "--json",
    )
    assert done.code == 0
    told = json.loads(done.out)
    assert [one["mechanism"]["kind"] for one in told["mechanisms"]] == ["independent", "banded", "blt"]
    assert told["goal"] == "sigma_dp"
    assert told["chosen"]["epsilon_rdp"] == pytest.approx(4.0, rel=2e-3)
    assert told["chosen"]["sigma_dp"] == pytest.approx(min(one["sigma_dp"] for one in told["mechanisms"]), rel=0.011)
    assert told["floor"]["sigma_dp"] < told["chosen"]["sigma_dp"]
    assert told["binds"] in told["epsilon_instead"]


def test_noise_for_people(sottovoce: Command) -> None:
    asked = ("--population", 50_000, "--sigma-dp", 5e-4)
    done = sottovoce("plan", "--mechanism", "banded", *SMALL, *asked)
    assert done.code == 0
    assert "The least ε of these people for σ_DP = 0.0005" in done.out
    assert "no noise beats" in done.out
    assert "mechanism: {kind: banded, bands: " in done.out
    assert "what binds: " in done.out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((*SMALL, "--cohort", 10), "--mechanism auto with --cohort"),
        (("--max-cohort", 10, "--sigma-dp", 1), "--steps, --delta is missing"),
        ((*SMALL, "--population", 50_000), "got population_size"),
        ((*SMALL, "--population", 50_000, "--sigma-dp", 0), "sigma_dp=0"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(sottovoce: Command, words: tuple, reason: str) -> None:
    done = sottovoce("plan", "--mechanism", "auto", *words)
    assert done.code != 0
    assert reason in done.err
