"""A simulated federation for notebooks: a recipe's people, model and plan, and its rounds one at a time.

The rounds are those of `sottovoce run` with the same recipe, to the bit. What a run does besides (a folder that can be
resumed, dev scores, the best checkpoint, tests) is not done here, and releases are refused.
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

from sottovoce.base.errors import InputError
from sottovoce.config import FederationSettings, Recipe
from sottovoce.data.store import Store
from sottovoce.evaluation.recognise import choose_device
from sottovoce.federated.cohort import LocalClients, quantise_model
from sottovoce.federated.engines import Dropped, Trained
from sottovoce.federated.round import RoundState, run_round
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.chain import Mark
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.settings import Mode
from sottovoce.training.assemble import Federation, assemble
from sottovoce.training.engines import build_federation_engine, build_turns
from sottovoce.training.parent_model import list_untrained_ancestors
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_data import ensure_store
from sottovoce.training.run_folder import LEDGER


def assemble_with_parent(recipe: Recipe, *, context: RunContext) -> Federation:
    """The federation of `recipe`. Its store and its seed model are made first where they are missing."""
    ensure_store(recipe, context.stores, context.on_prepare)
    for parent in list_untrained_ancestors(recipe, runs=context.runs):
        assert parent.recipe is not None
        outcome = run_recipe(parent.recipe, out=parent.folder, resume=True, context=context)
        if outcome.stopped_at is not None:
            raise KeyboardInterrupt(f"{parent.title} was stopped after step {outcome.stopped_at:,}, and is kept so far")
    return assemble(recipe, context=context)


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

    >>> simulation = Simulation(load_recipe("demo-clipping/global"))                # doctest: +SKIP
    >>> for done in simulation.rounds(3):                                  # doctest: +SKIP
    ...     print(done.step, done.epsilon, done.diagnostics["loss"])
    """

    def __init__(
        self, recipe: Recipe, *, stores: Path | str = "stores", runs: Path | str = "runs", device: str | None = None
    ) -> None:
        settings = _simulated(recipe)
        context = RunContext(Path(runs), Path(stores), choose_device(device))
        federation = assemble_with_parent(recipe, context=context)
        self.recipe, self.step = recipe, 0
        self.store: Store = federation.data.store
        self.population, self.start, self.plan = federation.population, federation.start, federation.plan
        self._engine = build_federation_engine(federation, "sequential")  # others have no single update to show
        self._part, self._server = federation.part, federation.server()
        self._after_step = federation.after_step(self._server)
        self._turns = build_turns(federation)
        self._correlated = self.plan.correlated_noise(device=context.device)
        self._recent = federation.recent_models()
        self._header = self.plan.ledger_header(
            run=recipe.about, repeatable=context.device.type == "cpu", central_steps=settings.steps
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
            if self._turns is not None and self._turns.all_exhausted:
                return
            yield self._round()

    def update(self, client: int) -> Tensor:
        """θ_server − θ_local [P] of one client, as the next round would have it if it were drawn: private, unclipped.

        `plan.clip` bounds it, `plan.layout.views` gives its tensors by name. Nothing is charged, and nothing moves.
        """
        if not 0 <= client < len(self.population):
            raise InputError(f"client={client}: expected 0 to {len(self.population) - 1}")
        current_P = self._server.parameters_P
        sent_P = current_P if self._recent is None else self._recent.sent(current_P)
        sent_P = quantise_model(sent_P, self.recipe.federated.model_bits)
        turns = None if self._turns is None else self._turns.of(np.array([client])).tolist()
        (trained,) = self._engine.train(sent_P, [client], step=self.step, positions=turns)
        if isinstance(trained, Dropped):
            raise InputError(f"client={client} could not be trained: {trained.reason}")
        assert isinstance(trained, Trained)
        return trained.update.clone()

    def _round(self) -> SimulatedRound:
        """Opened for each round, the ledger knows what to do after one that did not end."""
        plan = self.plan
        with closing(Ledger(self._folder / LEDGER, header=self._header, checkpoint=self._mark)) as ledger:
            state = RoundState(self._server, plan, ledger, self._turns, self._correlated, self._recent)
            done = run_round(
                state,
                LocalClients(self._engine),
                step=self.step,
                after_step=self._after_step,
                model_bits=self.recipe.federated.model_bits,
            )
            self._mark = ledger.commit(step=self.step, result=state.digest)
        assert done.private is not None
        private = done.private.as_json(plan, step=self.step)
        self.step, self.plan = self.step + 1, state.plan
        return SimulatedRound(self.step, done.server.lr, done.epsilon, done.noise_std, private)


def _simulated(recipe: Recipe) -> FederationSettings:
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
