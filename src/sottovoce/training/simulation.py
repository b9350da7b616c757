"""A federation in the hand, for notebooks: a recipe's people, model and plan, and its rounds one at a time.

The rounds are those of `sottovoce run` with the same recipe, to the bit. What a run does besides (a folder that can be
resumed, dev scores, the best checkpoint, tests) is not done here, and a release is none of its business.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
from torch import Tensor

from sottovoce.config import Federation, Recipe
from sottovoce.errors import InputError
from sottovoce.evaluation.evaluate import check_language
from sottovoce.evaluation.recognise import choose_device
from sottovoce.federated.cohort import ClientsHere, as_sent
from sottovoce.federated.engines import Dropped, Engine, Trained
from sottovoce.federated.round import ServerPass, run_round
from sottovoce.federated.server import Server
from sottovoce.models.saved import Recogniser
from sottovoce.models.trainable import Trainable
from sottovoce.privacy.chain import Mark
from sottovoce.privacy.fingerprint import fingerprint
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode
from sottovoce.store import Store
from sottovoce.training.engines import build_engine, clients_turns, likely_fastest
from sottovoce.training.places import Places
from sottovoce.training.run_folder import LEDGER
from sottovoce.training.seeding import Seed, seed_of
from sottovoce.training.server_pass import build_server_pass
from sottovoce.training.shared_dev import check_understood, choose_shared_dev
from sottovoce.training.speakers import check_silos, population_of
from sottovoce.training.stages import Surroundings, private_plan, run_recipe, starting_model
from sottovoce.training.stores import ensure_store
from sottovoce.training.strangers import check_unheard
from sottovoce.training.token_makers import check_tokens
from sottovoce.training.trained_part import trained_part
from sottovoce.users.population import Population


@dataclass(frozen=True, eq=False)
class Gathered:
    """What rounds of a recipe are made of, here and at their beginning."""

    places: Places
    population: Population
    start: Recogniser
    plan: Plan
    engine: Engine
    part: Trainable
    server: Server
    server_pass: ServerPass | None


def gather(recipe: Recipe, *, around: Surroundings, fast: bool = False) -> Gathered:
    """All of it. The recipe's store and its seed model are made first where they are missing.

    One client after another is trained, whatever the recipe asks for, unless it has to be `fast`: other engines have
    no single update to show.
    """
    settings = recipe.federated
    ensure_store(recipe, around.stores, around.on_prepare)
    seed = _trained_seed(recipe, around)
    places = Places.of(recipe, around.stores)
    population = population_of(recipe, places.store, settings.clients.population(recipe.data))
    check_silos(recipe, population)
    check_unheard(recipe, population, places.evaluated, seed=seed, runs=around.runs, stores=around.stores)
    check_tokens(recipe, population, runs=around.runs, stores=around.stores, say=around.say)
    start = starting_model(recipe, seed, places.store)
    check_language(start, places.store)
    check_understood(recipe, start)
    plan = private_plan(recipe, population, start, seed=seed, around=around)
    shared_dev = None if places.shared_dev is None else choose_shared_dev(recipe, places.shared_dev)
    name = likely_fastest(recipe, start, device=around.device) if fast else "sequential"
    engine = build_engine(name, recipe, population, start, plan, device=around.device, shared_dev=shared_dev)
    part = trained_part(recipe, start)
    server_pass = None
    if places.of_server is not None:
        server_pass = build_server_pass(recipe, start, population, places.of_server, device=around.device)
    server = Server(settings.server, plan.layout, plan.layout.flatten(part.initial).to(around.device))
    return Gathered(places, population, start, plan, engine, part, server, server_pass)


@dataclass(frozen=True)
class SimulatedRound:
    """What a round was like.

    `step` counts rounds from 1, `lr` is the server's, `epsilon` is spent so far by RDP (None without a guarantee), and
    `noise_std` is that of the noise on the mean update. `diagnostics` (losses, norms, how many were clipped, signal
    against noise by layer) are by-products of people's data: no ε covers them.
    """

    step: int
    lr: float
    epsilon: float | None
    noise_std: float
    diagnostics: Mapping[str, object]


@final
class Simulation:
    """The federation of `recipe` before its first round, in memory.

    `store`, `population`, `start` (the model of round 0) and `plan` are what `sottovoce run` would have; `step` counts
    the rounds made. The recipe's store and its seed model are made first where they are missing, under `stores` and
    `runs`, by several processes: a script (no notebook) needs `if __name__ == "__main__":` around it. `device` is
    chosen as on the command line unless given.

    Guarantee: none is given to anybody. It is a simulation, whose seed repeats cohorts and noise, and it shows what a
    release would hide; `epsilon` is what the same rounds would spend as a release.

    >>> simulation = Simulation(load_recipe("demo/global"))                # doctest: +SKIP
    >>> for done in simulation.rounds(3):                                  # doctest: +SKIP
    ...     print(done.step, done.epsilon, done.diagnostics["loss"])
    """

    def __init__(
        self, recipe: Recipe, *, stores: Path | str = "stores", runs: Path | str = "runs", device: str | None = None
    ) -> None:
        settings = _simulated(recipe)
        around = Surroundings(Path(runs), Path(stores), choose_device(device))
        found = gather(recipe, around=around)
        self.recipe, self.step = recipe, 0
        self.store: Store = found.places.store
        self.population, self.start, self.plan = found.population, found.start, found.plan
        self._engine, self._part, self._server = found.engine, found.part, found.server
        self._server_pass = found.server_pass
        self._turns = clients_turns(recipe, self.population, self.start, self.plan)
        self._correlated = self.plan.correlated_noise(device=around.device)
        self._header = self.plan.ledger_header(
            run=recipe.about, repeatable=around.device.type == "cpu", central_steps=settings.steps
        )
        self._folder = Path(tempfile.mkdtemp(prefix="sottovoce-simulation-"))  # for the ledger
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._mark: Mark | None = None

    @property
    def model(self) -> Recogniser:
        """The model as it stands, a copy: what `evaluate`, `transcribe` and `export_recogniser` take."""
        trained = self.plan.layout.views(self._server.result_P.clone())
        return replace(self.start, parameters=self._part.frozen.merged(trained))

    def rounds(self, count: int | None = None) -> Iterator[SimulatedRound]:
        """The next `count` rounds, or all that are left of the recipe's. Each is made when it is asked for.

        Ends early where all time lines are used up. Raises BudgetSpent where the recipe's `epsilon_budget` is. A round
        that was interrupted is made again by the next call.
        """
        left = self.recipe.federated.steps - self.step
        for _ in range(left if count is None else min(count, left)):
            if self._turns is not None and self._turns.all_dry:
                return
            yield self._round()

    def update(self, client: int) -> Tensor:
        """θ_server − θ_local [P] of one client, as the next round would have it if it were drawn: private, unclipped.

        `plan.clip` bounds it, `plan.layout.views` gives its tensors by name. Nothing is charged, and nothing moves.
        """
        if not 0 <= client < len(self.population):
            raise InputError(f"client={client}: expected 0 to {len(self.population) - 1}")
        sent_P = as_sent(self._server.parameters_P, self.recipe.federated.model_bits)
        turns = None if self._turns is None else self._turns.of(np.array([client])).tolist()
        (trained,) = self._engine.train(sent_P, [client], step=self.step, turns=turns)
        if isinstance(trained, Dropped):
            raise InputError(f"client={client} could not be trained: {trained.reason}")
        assert isinstance(trained, Trained)
        return trained.update.clone()

    def _round(self) -> SimulatedRound:
        """Opened for each round, the ledger knows what to do after one that did not end."""
        plan, server = self.plan, self._server
        with closing(Ledger(self._folder / LEDGER, header=self._header, checkpoint=self._mark)) as ledger:
            done = run_round(
                server,
                plan=plan,
                clients=ClientsHere(self._engine),
                ledger=ledger,
                step=self.step,
                digest=fingerprint(server.parameters_P),
                server_pass=self._server_pass,
                turns=self._turns,
                model_bits=self.recipe.federated.model_bits,
                correlated=self._correlated,
            )
            self._mark = ledger.commit(step=self.step, result=fingerprint(server.parameters_P))
        self.step, self.plan = self.step + 1, done.plan
        assert done.private is not None
        return SimulatedRound(self.step, done.server.lr, done.epsilon, done.noise_std, done.private.as_json(plan))


def _simulated(recipe: Recipe) -> Federation:
    """What the recipe says of its federation; refuses what is no simulation of rounds."""
    if recipe.federation is None:
        raise InputError(f"recipe {recipe.about!r}: it trains centrally; expected one with a section `federation`")
    if recipe.federation.privacy.mode is Mode.SECURE:
        raise InputError(
            "federation.privacy.mode=secure: a release is made by `sottovoce run`, which keeps its ledger and shows "
            "nothing else; expected seeded"
        )
    if recipe.federation.client_wer is not None:
        raise InputError("federation.client_wer: only `sottovoce run` measures it; expected null")
    return recipe.federation


def _trained_seed(recipe: Recipe, around: Surroundings) -> Seed | None:
    """What the recipe starts from, trained now if it is not there."""
    seed = seed_of(recipe, runs=around.runs)
    if seed is not None and not seed.is_there:
        assert seed.recipe is not None
        outcome = run_recipe(seed.recipe, out=seed.folder, resume=True, around=around)
        if outcome.stopped_at is not None:
            raise KeyboardInterrupt(f"the seed model was stopped after step {outcome.stopped_at:,}, and is kept so far")
    return seed
