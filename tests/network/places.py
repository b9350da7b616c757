"""A place to run a federation at: keys, a roster and a recipe in a folder, and everybody's speech beside it.

The same recipe is run there in three ways: by a simulation, by participants in this process, and, in `test_served`, by
processes over TLS.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tests.network.local_cluster import NAMES, content

from sottovoce.base.files import read_json
from sottovoce.config import Recipe, load_recipe
from sottovoce.data.store import Store
from sottovoce.federated.client_wer import LocalEvaluationClients
from sottovoce.federated.cohort import LocalClients
from sottovoce.models.model_files import PARAMETERS, PART
from sottovoce.models.recogniser import Recogniser
from sottovoce.network import keys
from sottovoce.network.node.participant import Participant
from sottovoce.network.roster import format_roster_entry, load_roster
from sottovoce.network.server.clients import ClientsOverNetwork
from sottovoce.network.server.population import roster_population
from sottovoce.network.server.setup import ServeOptions, connect_clients, with_word_sums
from sottovoce.network.transport.link import AnswerFunction, LocalLink
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.plan import Plan
from sottovoce.training.checkpoint import LATEST
from sottovoce.training.client_wer import build_local_wer_clients
from sottovoce.training.engines import build_engine
from sottovoce.training.remote_clients import RemoteClients
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext
from sottovoce.training.run_data import build_recipe_population
from sottovoce.training.run_folder import LEDGER, RESULTS, RunFolder

ROUNDS = 3
CPU = torch.device("cpu")

Planned = Callable[[Plan], Plan]


@dataclass
class Place:
    """`stores` holds everybody's own speech under their name, and all of it as `tones`."""

    folder: Path
    stores: Path
    people: list[str] = field(default_factory=lambda: list(NAMES))

    @property
    def recipe_file(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def recipe(self) -> Recipe:
        return load_recipe(str(self.recipe_file))

    @property
    def around(self) -> RunContext:
        return RunContext(self.folder / "runs", self.stores, CPU)

    def write_files(self, *, model: Mapping[str, Any] | None = None, **federation: Any) -> None:
        """Write everything down that both sides need."""
        now, folder = datetime.now(UTC), self.folder / "keys"
        given = content(**{"steps": ROUNDS, "evaluate_every": 2, "checkpoint_every": 1} | federation)
        self.recipe_file.write_text(yaml.safe_dump(given if model is None else given | {"model": dict(model)}))
        keys.make_authority(folder / "authority", now=now)
        keys.make_server(folder / "server", authority=folder / "authority", hosts=["127.0.0.1"], now=now)
        for name in self.people:
            keys.make_node(folder / name)
        lines = [format_roster_entry(name, keys.load_public_key(folder / name / keys.NODE)) for name in self.people]
        (self.folder / "roster.yaml").write_text("\n".join(["users:", *lines, ""]))

    def change_privacy(self, **privacy: Any) -> None:
        """The same recipe with something else in its section on privacy."""
        given = yaml.safe_load(self.recipe_file.read_text())
        given["federation"]["privacy"] |= privacy
        self.recipe_file.write_text(yaml.safe_dump(given))

    # The same recipe in two ways.

    def simulate(self, out: str, *, planned: Planned = with_word_sums) -> Path:
        """In this process, as `sottovoce run` does, but on the grid that a network needs. Of all in `tones`."""
        recipe, store = self.recipe, Store(self.stores / "tones")
        population = build_recipe_population(recipe, store, recipe.federated.clients.population(recipe.data))

        def clients(run: RunFolder, plan: Plan, start: Recogniser) -> _Here:
            return _Here(
                LocalClients(build_engine("sequential", recipe, population, start, plan, device=CPU)),
                build_local_wer_clients(recipe, population, start, device=CPU),
            )

        elsewhere = RemoteClients(population, planned, clients)
        run_recipe(recipe, out=self.folder / out, resume=False, context=self.around, remote=elsewhere)
        return self.folder / out

    def run_here(
        self,
        out: str,
        *,
        secure: bool,
        planned: Planned = with_word_sums,
        resume: bool = False,
        meddle: Mapping[str, Callable[[AnswerFunction], AnswerFunction]] | None = None,
        spare: int | None = None,
        wait_for: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Outcome:
        """Over a `LocalLink`, with a participant for each person, all in this process."""
        roster = load_roster(self.folder / "roster.yaml")
        with ExitStack() as held:
            people = {user: held.enter_context(self.participant(user.name)) for user in roster.users}

            def listen(digest: bytes) -> LocalLink:
                for participant in people.values():
                    if not participant.has_accepted(digest):
                        participant.accept(digest)
                changed = meddle or {}
                return LocalLink(
                    {user.node.hex(): changed.get(user.name, _as_it_is)(own.answer) for user, own in people.items()}
                )

            options = ServeOptions(
                keys=self.folder / "keys" / "server",
                listen=listen,
                wait_for=len(roster) if wait_for is None else wait_for,
                is_secure=secure,
                least=3 if secure else None,
                spare_attempts=spare or 0,
                say=say,
            )

            def clients(run: RunFolder, plan: Plan, start: Recogniser) -> ClientsOverNetwork:
                return connect_clients(options, self.recipe, roster, run=run, plan=plan, start=start)

            identities = tuple(user.node for user in roster.users)
            elsewhere = RemoteClients(roster_population(roster, self.recipe), planned, clients, spare, identities)
            return run_recipe(self.recipe, out=self.folder / out, resume=resume, context=self.around, remote=elsewhere)

    @contextmanager
    def participant(self, name: str) -> Iterator[Participant]:
        folder = self.folder / "keys" / name
        participant = Participant(
            folder / "home",
            key=keys.load_private_key(folder / keys.NODE_KEY),
            authority=keys.load_certificate(self.folder / "keys" / "authority" / keys.AUTHORITY),
            store=Store(self.stores / name),
            now=lambda: datetime.now(UTC),
        )
        with closing(participant):
            yield participant


def _as_it_is(answer: AnswerFunction) -> AnswerFunction:
    return answer


@dataclass(frozen=True)
class _Here:
    """All clients in this process, always ready."""

    here: LocalClients
    evaluation_clients: LocalEvaluationClients | None = None

    def ready(self, interrupted: Callable[[], bool], *, row: int | None = None) -> bool:
        return True

    def begin(self, *arguments: Any, **named: Any) -> None:
        pass

    def end(self, rounds: int) -> None:
        pass

    def sum(self, *arguments: Any, **named: Any) -> Any:
        return self.here.sum(*arguments, **named)

    def wer(self, *arguments: Any, **named: Any) -> Any:
        assert self.evaluation_clients is not None
        return self.evaluation_clients.wer(*arguments, **named)

    def close(self) -> None:
        self.here.close()


def check_same(one: Path, other: Path) -> None:
    """The same model to the bit, the same results, and a ledger that says the same."""
    models = [load_file(_weights(folder / "checkpoints" / LATEST)) for folder in (one, other)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert _said(one) == _said(other)
    results = [read_json(folder / RESULTS) for folder in (one, other)]
    for found in results:
        assert found["privacy"].pop("head")  # which is another where the ledger names its signer
    assert results[0] == results[1]


def _weights(model: Path) -> Path:
    return model / (PART if (model / PART).exists() else PARAMETERS)


def _said(folder: Path) -> list[dict[str, Any]]:
    """All that a ledger says, but for who signs it, and for digests of what a server cannot know of clients."""
    records = [
        {name: value for name, value in one.items() if name != "signer"} for one in read_chain(folder / LEDGER).records
    ]
    assert records[-1]["kind"] == "results"
    records[-1]["files"] = {"metrics.jsonl": records[-1]["files"]["metrics.jsonl"]}
    return records
