"""What each client of open sums has contributed: rounds summed, clipped again, missing and why, by name.

The ledger counts everybody as if they had been in every round for which they might be drawn. A silo that was away has
spent less, and one whose updates had to be clipped again should be asked why. Accounts say who was in a round, so they
are kept only where that hides nobody: in rehearsals, and where everybody is in every round (of their group). Only the
owner of the run can read them: they lie in the run's `secrets/`.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from sottovoce.base.errors import InputError
from sottovoce.base.files import add_digest, check_digest, read_json
from sottovoce.privacy.accounting import Epsilon, epsilon
from sottovoce.privacy.events import GaussianRelease, repeated, run_event
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.plan_sampling import draw_rate
from sottovoce.privacy.secret_files import SECRETS, move_to_secrets, write_secret
from sottovoce.privacy.settings import Mode

ACCOUNTS = "accounts.json"


@dataclass
class Account:
    """Of one client. `missing` has the reasons for rounds that it was drawn for and not summed in."""

    summed: int = 0
    clipped_again: int = 0
    missing: Counter[str] = field(default_factory=Counter)

    def spent(
        self, release: GaussianRelease, *, delta: float, measurement: GaussianRelease | None = None, measured: int = 0
    ) -> Epsilon | None:
        """ε of the rounds that it is in, against somebody who knows which those are; None where there are none.

        Guarantee: against the change that `release` is accounted for: adding or removing it, or replacing it.
        Rounds are charged without amplification, because its presence in them is known. A `measurement` that was made
        so often besides is charged as if it had been asked every time: that is not written down.
        """
        if not self.summed and not measured:
            return None
        besides = None if measurement is None else repeated(measurement.unsampled, measured)
        return epsilon(run_event(release.unsampled, self.summed, besides), delta)


def may_record_participants(plan: Plan) -> bool:
    """Whether who was in a round may be written down: not where a release hides people by sampling."""
    return plan.settings.mode is Mode.SEEDED or draw_rate(plan) == 1


@final
class Accounts:
    """Those of everybody in the run in `folder`; clients are named by their place among `names`."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._path, self._names = _move_to_secrets(folder), tuple(names)
        self.by_name = read_accounts(self._path) if self._path.exists() else {name: Account() for name in names}
        if {*self.by_name} != {*names}:
            raise InputError(f"{self._path} is of other people than the roster's: expected the same for all of a run")

    def add(self, *, summed: Collection[int], clipped_again: Collection[int], missing: Mapping[int, str]) -> None:
        """One attempt at a round, on the disk when this returns."""
        for place in summed:
            self.by_name[self._names[place]].summed += 1
        for place in clipped_again:
            self.by_name[self._names[place]].clipped_again += 1
        for place, reason in missing.items():
            self.by_name[self._names[place]].missing[reason] += 1
        content = add_digest({name: vars(account) for name, account in self.by_name.items()})
        with write_secret(self._path) as file:
            file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def find_accounts(folder: Path) -> Path | None:
    """The file with the accounts of the run in `folder`, or None. Earlier releases kept it beside the ledger."""
    places = (folder / SECRETS / ACCOUNTS, folder / ACCOUNTS)
    return next((place for place in places if os.path.isfile(place)), None)  # no error where it is another's secret


def _move_to_secrets(folder: Path) -> Path:
    """Where the accounts of a run belong. Those that an earlier release has left beside the ledger are moved there."""
    path, earlier = folder / SECRETS / ACCOUNTS, folder / ACCOUNTS
    if earlier.is_file():
        if path.exists():
            raise InputError(f"{earlier} beside {path}: expected one of them, the newer")
        move_to_secrets(earlier, path)
    return path


def read_accounts(path: Path) -> dict[str, Account]:
    """By name; InputError where the file is another."""
    found = check_digest(read_json(path), where=path)
    try:
        return {
            name: Account(one["summed"], one["clipped_again"], Counter(one["missing"])) for name, one in found.items()
        }
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{path} holds no accounts of this release") from None
