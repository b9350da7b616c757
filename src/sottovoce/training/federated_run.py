"""A federated run: the federation of a recipe, trained in its folder, tested, and its results written down."""

from typing import Any

import numpy as np

from sottovoce.config import Recipe
from sottovoce.federated.ranks import ClientsOverRanks
from sottovoce.files import write_json
from sottovoce.models.recogniser import load_recogniser
from sottovoce.privacy.correlated_noise import MEMORY
from sottovoce.privacy.ledger import record_results
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.secret_files import SECRETS, forget
from sottovoce.processes import Processes
from sottovoce.signatures import PrivateKey
from sottovoce.training.assemble import Federation, assemble
from sottovoce.training.client_results import client_results
from sottovoce.training.client_wer import measured_wers
from sottovoce.training.context import Surroundings
from sottovoce.training.elsewhere import DEPARTURES, Elsewhere
from sottovoce.training.engines import choose_clients
from sottovoce.training.federation import Federating
from sottovoce.training.group_members import GROUPS, keep_groups
from sottovoce.training.keeper import INTERRUPTED, Ended
from sottovoce.training.outcome import Outcome, Target, finish, finished_before
from sottovoce.training.privacy_report import privacy_report, promise_in
from sottovoce.training.recorded_files import digests_at_end, signed_at_end
from sottovoce.training.run_folder import LEDGER, NO_EPSILON, POPULATION, RunFolder
from sottovoce.training.speakers import beside_the_paper
from sottovoce.training.step_log import NO_EVENTS
from sottovoce.training.team import Team
from sottovoce.training.testing import score_models
from sottovoce.training.token_makers import describe_tokens
from sottovoce.training.trained_part import communication, describe_part

OF_ROUNDS = (MEMORY, GROUPS, DEPARTURES)  # secrets that nobody needs after the last round


def run_federated(
    recipe: Recipe,
    target: Target,
    *,
    context: Surroundings,
    processes: Processes,
    elsewhere: Elsewhere | None = None,
    key: PrivateKey | None = None,
) -> Outcome:
    """Train with the store's clients, or those `elsewhere`, and test the best model and the one it started from."""
    federation = assemble(recipe, context=context, clients=elsewhere, processes=processes)
    tokens = describe_tokens(recipe, federation.start.tokens, runs=context.runs, stores=context.stores)
    inputs = _inputs(federation, processes)
    team = federation.data.team(processes, federation.start, context.device)
    opening = target.opened(recipe, inputs=inputs, processes=processes, is_release=federation.is_release)
    with opening as run:
        if (known := finished_before(run, processes)) is not None:
            if processes.first:  # it may have been killed before it came to that
                forget(run.path / SECRETS, *OF_ROUNDS)
            return known
        if not processes.first:
            followers = choose_clients(federation, run=run, processes=processes)
            assert isinstance(followers, ClientsOverRanks)
            team.follow(followers, federation.plan)
            return Outcome(target.out)
        with team:
            _announce(federation)
            _write_population(federation, run)
            if elsewhere is None:
                clients: Any = choose_clients(federation, run=run, processes=processes)
            else:
                clients = elsewhere.clients(run, federation.plan, federation.start)
            ended = Federating(federation, run, clients=clients, team=team, inputs=inputs, key=key).run()
            if ended.words:
                context.say(ended.words)
            if ended.step < federation.settings.steps and (kept := promise_in(run, federation.settings)) is not None:
                context.say(kept)
            if ended.reason == INTERRUPTED:
                return Outcome(target.out, stopped_at=ended.step)
            context.on_stage("testing")
            results = _results(federation, run, ended, team) | {"tokens": tokens}
            # Before they are written: a run whose results are there has nothing left to do.
            record_results(
                run.path / LEDGER, digests_at_end(run.path, results), key=key, signed_files=signed_at_end(run.path)
            )
            finished = finish(run, results)
            forget(run.path / SECRETS, *OF_ROUNDS)
            return finished


def _inputs(federation: Federation, processes: Processes) -> dict[str, Any]:
    """What must be the same when the run is resumed."""
    inputs = {"tokens digest": federation.start.tokens.digest, "start model digest": federation.start_digest}
    if federation.plan.settings.root_seed is None:
        # A release replays nothing, and whoever sees its folder could try guesses of the data against digests of it.
        # Its sums are exact besides, whereas a simulation's round by how many they are divided among.
        return inputs
    people = {"population digest": federation.population.digest, "number of processes": str(processes.world)}
    return {**inputs, **federation.data.digests(), **people}


def _announce(federation: Federation) -> None:
    """Say what is trained and what is promised."""
    recipe, settings, plan, context = federation.recipe, federation.settings, federation.plan, federation.context
    if settings.trainable is not None:
        context.say(describe_part(federation.part, model_bits=settings.model_bits))
    beside = None if context.stand_in else beside_the_paper(recipe, clients=plan.settings.population_size)
    is_others = context.stand_in and plan.settings.z > 0
    promised = (NO_EPSILON,) if is_others else (*plan.warnings, settings.guarantee(plan))
    for line in filter(None, (beside, *promised, NO_EVENTS if federation.is_release else None)):
        context.say(line)


def _write_population(federation: Federation, run: RunFolder) -> None:
    """What may be said of the clients: in a release, only what the plan has made public anyway."""
    population, plan = federation.population, federation.plan
    if federation.is_release and isinstance(plan.sampler, CyclicSampler):
        keep_groups(run.path / SECRETS, population, plan.sampler, begun=(run.path / LEDGER).exists())
    described: dict[str, Any] = dict(population.describe())
    if plan.settings.root_seed is not None:
        deciles = np.quantile(population.seconds, np.linspace(0, 1, 11)).tolist()
        told = {"accounted": False, **described, "seconds_per_client_deciles": deciles}
    else:
        told = {name: described[name] for name in ("population_size", "privacy_unit", "settings")}
    write_json(run.path / POPULATION, told)


def _results(federation: Federation, run: RunFolder, ended: Ended, team: Team) -> dict[str, Any]:
    recipe, settings, start = federation.recipe, federation.settings, federation.start
    best = load_recogniser(run.best)
    tests, is_release = federation.data.tests, federation.is_release
    after, before = score_models([best, start], recipe, tests, team, is_release=is_release)
    of_clients = client_results(recipe, federation.population, start=start, best=best, team=team)
    return {
        "model": dict(best.about),
        "ended": ended.as_json(),
        "test": after,
        "start": {"test": before},
        "privacy": privacy_report(settings, federation.plan, run),
        "communication": communication(federation.part, model_bits=settings.model_bits),
        **({} if of_clients is None else {"clients": of_clients}),
        **({} if settings.client_wer is None else {"client_wer": measured_wers(run)}),
    }
