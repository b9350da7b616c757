"""Accounts of single clients: kept of open sums where that hides nobody, and shown with what each has spent."""

import json
import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.network.nodes import LAYOUT, fleet, plan_for
from tests.network.places import ROUNDS, Place
from tests.network.test_clients import TOO_SHORT, says, silent_in, summed
from typer.testing import CliRunner

from sottovoce.base.errors import InputError
from sottovoce.cli import app
from sottovoce.network.messages import OrderKind
from sottovoce.network.server.accounts import (
    ACCOUNTS,
    Account,
    Accounts,
    find_accounts,
    may_record_participants,
    read_accounts,
)
from sottovoce.privacy.accounting import epsilon, rdp_epsilon
from sottovoce.privacy.events import composed, fixed_size_release, poisson_release, repeated
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.privacy.settings import Mode
from sottovoce.training.run_folder import LEDGER

EVERYBODY = 5


def test_everybody_s_account_says_what_became_of_them(tmp_path: Path) -> None:
    largest = np.full(LAYOUT.dimension, 2**31 - 1, dtype="<i4").tobytes()
    odd = {0: silent_in(OrderKind.TRAIN), 1: says(largest), 2: says(TOO_SHORT)}
    found = fleet(tmp_path, EVERYBODY, meddle=odd, accounts=True, revoked=frozenset({3}))
    summed(found, step=0)
    summed(found, step=1, cohort=[1, 4])
    assert read_accounts(tmp_path / SECRETS / ACCOUNTS) == {
        "p0": Account(missing=Counter({"away, too late, or with too large an answer": 1})),
        "p1": Account(summed=2, clipped_again=2),
        "p2": Account(missing=Counter({"an update of another length": 1})),
        "p3": Account(missing=Counter({"not here when the round began": 1})),
        "p4": Account(summed=2),
    }


def test_accounts_go_on_and_are_of_one_roster(tmp_path: Path) -> None:
    for _ in range(2):
        Accounts(tmp_path, ["a", "b"]).add(summed=[1], clipped_again=[], missing={0: "away"})
    assert read_accounts(tmp_path / SECRETS / ACCOUNTS)["b"] == Account(summed=2)
    with pytest.raises(InputError, match="is of other people than the roster's"):
        Accounts(tmp_path, ["a", "c"])


def test_only_the_owner_of_a_run_can_read_who_was_in_it(tmp_path: Path) -> None:
    Accounts(tmp_path, ["a", "b"]).add(summed=[1], clipped_again=[], missing={})
    assert [path.name for path in tmp_path.iterdir()] == [SECRETS]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / SECRETS, tmp_path / SECRETS / ACCOUNTS)]
    assert modes == [0o700, 0o600]


def test_accounts_that_an_earlier_release_left_open_are_put_away_and_go_on(tmp_path: Path) -> None:
    Accounts(tmp_path, ["a", "b"]).add(summed=[1], clipped_again=[], missing={0: "away"})
    (tmp_path / SECRETS / ACCOUNTS).rename(tmp_path / ACCOUNTS)
    (tmp_path / SECRETS).rmdir()
    (tmp_path / ACCOUNTS).chmod(0o644)
    assert find_accounts(tmp_path) == tmp_path / ACCOUNTS
    Accounts(tmp_path, ["a", "b"]).add(summed=[0], clipped_again=[], missing={})
    assert not (tmp_path / ACCOUNTS).exists()
    kept = find_accounts(tmp_path)
    assert kept == tmp_path / SECRETS / ACCOUNTS
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert {name: one.summed for name, one in read_accounts(kept).items()} == {"a": 1, "b": 1}
    (tmp_path / ACCOUNTS).write_text("{}")
    with pytest.raises(InputError, match="expected one of them"):
        Accounts(tmp_path, ["a", "b"])


def test_a_release_writes_down_nobody_whom_it_hides_by_drawing() -> None:
    release = {"noise_multiplier": 1.0, "root_seed": None, "mode": Mode.SECURE}
    assert may_record_participants(plan_for(EVERYBODY))
    assert may_record_participants(plan_for(EVERYBODY, cohort_size=3))
    assert may_record_participants(plan_for(EVERYBODY, **release))
    assert not may_record_participants(plan_for(EVERYBODY, cohort_size=3, **release))


def test_what_somebody_has_spent_is_of_the_rounds_they_are_in() -> None:
    release = poisson_release(2.0, sampling_rate=0.1)
    spent = Account(summed=4).spent(release, delta=1e-5)
    assert spent == epsilon(repeated(poisson_release(2.0, sampling_rate=1.0), 4), 1e-5)
    assert Account().spent(release, delta=1e-5) is None


def test_of_cohorts_of_fixed_size_it_is_against_replacing_them() -> None:
    release = fixed_size_release(2.0, cohort_size=3, population_size=9)
    measurement = fixed_size_release(8.0, cohort_size=3, population_size=9)
    spent = Account(summed=4).spent(release, delta=1e-5, measurement=measurement, measured=2)
    # One who is known to be in it and is replaced by another moves the sum by 2C: half the multiplier, no sampling.
    moved = composed(
        repeated(poisson_release(1.0, sampling_rate=1.0), 4), repeated(poisson_release(4.0, sampling_rate=1.0), 2)
    )
    assert spent is not None
    assert spent.neighbouring == "replace_one"
    assert spent.rdp == pytest.approx(rdp_epsilon(moved, 1e-5), rel=1e-9)
    asked_only = Account().spent(release, delta=1e-5, measurement=measurement, measured=2)
    assert asked_only is not None
    assert 0 < asked_only.rdp < spent.rdp


def test_the_ledger_shows_accounts_of_open_sums_alone(tmp_path: Path, cluster_stores: Path) -> None:
    place = Place(tmp_path, cluster_stores)
    place.write_files(cohort_size=9)
    served = place.run_here("served", secure=False).folder
    shown = CliRunner().invoke(app, ["ledger", str(served)])
    assert shown.exit_code == 0
    assert "Account of each client" in shown.output
    told = json.loads(CliRunner().invoke(app, ["ledger", str(served), "--json"]).output)
    assert told["accounts"].keys() == set(place.people)
    everybody = verify(served / LEDGER).epsilon  # all of them are in every round
    for one in told["accounts"].values():
        assert one == {
            "summed": ROUNDS,
            "clipped_again": 0,
            "missing": {},
            "epsilon_pld": everybody.pld,
            "epsilon_rdp": everybody.rdp,
        }
    kept = served / SECRETS / ACCOUNTS
    kept.write_text(kept.read_text().replace(": 3", ": 2"))
    assert isinstance(CliRunner().invoke(app, ["ledger", str(served)]).exception, InputError)
    masked = replace(place, folder=tmp_path / "masked")
    masked.folder.mkdir()
    masked.write_files(cohort_size=9)
    assert not (masked.run_here("served", secure=True).folder / SECRETS).exists()
