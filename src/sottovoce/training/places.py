"""Where the speech of a run lies, and what each part of it is for."""

from dataclasses import dataclass
from pathlib import Path

import torch

from sottovoce.config import Recipe
from sottovoce.models.recogniser import Recogniser
from sottovoce.processes import Processes
from sottovoce.store import Store
from sottovoce.training.agreement import Facts, Sealed
from sottovoce.training.seeding import SERVER_PASS, SHARED_DEV
from sottovoce.training.stores import find_place, open_place
from sottovoce.training.team import Team


@dataclass(frozen=True)
class Places:
    """The stores of a run: what it trains on, what it chooses by, what it is tested on, its server's own, and what
    its clients are weighted by."""

    store: Store
    dev: tuple[Store, str]
    tests: dict[str, tuple[Store, str]]
    of_server: tuple[Store, str] | None
    shared_dev: tuple[Store, str] | None = None

    @classmethod
    def of(cls, recipe: Recipe, stores: Path) -> "Places":
        tests = {name: find_place(name, recipe, stores) for name in recipe.data.test}
        own = None if recipe.federation is None else recipe.federation.server_pass
        shared = None if recipe.federation is None else recipe.federation.weighed_on
        return cls(
            open_place(recipe.data.store, stores),
            find_place(recipe.data.dev, recipe, stores),
            tests,
            None if own is None else find_place(own.data, recipe, stores),
            None if shared is None else find_place(shared.data or recipe.data.dev, recipe, stores),
        )

    @property
    def evaluated(self) -> dict[str, tuple[Store, str]]:
        shared = {} if self.shared_dev is None else {SHARED_DEV: self.shared_dev}
        return {"data.dev": self.dev} | {f"data.test {name}": place for name, place in self.tests.items()} | shared

    def team(self, processes: Processes, start: Recogniser, device: torch.device) -> Team:
        # Clients are tested on their own speech, too.
        stores = {str(store.path): store for store in (self.store, *(store for store, _ in self.evaluated.values()))}
        return Team(processes, start, stores, device)

    @property
    def all(self) -> dict[str, Store]:
        own = {} if self.of_server is None else {SERVER_PASS: self.of_server[0]}
        return {"data.store": self.store} | {what: store for what, (store, _) in self.evaluated.items()} | own

    def digests(self) -> dict[str, str]:
        return {f"{what} digest": store.digest for what, store in self.all.items()}

    def facts(self) -> Facts:
        return {what: Sealed(store.digest) for what, store in self.all.items()}
