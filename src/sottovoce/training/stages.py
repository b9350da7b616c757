"""From a recipe to a result: prepare, train the seed, train, test. What is there and current is not made again."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sottovoce.config import Recipe, as_yaml
from sottovoce.errors import InputError
from sottovoce.evaluation.decoder import emits, searches
from sottovoce.evaluation.evaluate import check_language
from sottovoce.evaluation.losses import usable_speech
from sottovoce.evaluation.measures import LOSS, MEASURES, Measure
from sottovoce.federated.cohort import ClientsHere
from sottovoce.federated.ranks import ClientsOverRanks
from sottovoce.files import read_json, write_json
from sottovoce.flat.layout import Layout
from sottovoce.models.saved import Recogniser, describe_inherited
from sottovoce.models.saved import load as load_recogniser
from sottovoce.models.speech import load_speech
from sottovoce.privacy.correlated_noise import MEMORY
from sottovoce.privacy.ledger import record_results
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.secret_files import SECRETS, forget
from sottovoce.privacy.settings import Mode
from sottovoce.processes import ALONE, Processes, own_device, process_group, restarted
from sottovoce.seeds import derive
from sottovoce.signatures import load_signing_key
from sottovoce.store import Progress, Store
from sottovoce.text.tokens import Tokens
from sottovoce.training import central
from sottovoce.training.agreement import Sealed, agreeing, code_version, sealed, sealed_tensors
from sottovoce.training.client_results import client_results
from sottovoce.training.client_wer import check_client_wer, listeners_here, measured_wers
from sottovoce.training.elsewhere import DEPARTURES, Elsewhere
from sottovoce.training.engines import choose_clients, clients_turns
from sottovoce.training.federation import Federating
from sottovoce.training.group_members import GROUPS, keep_groups
from sottovoce.training.keeper import INTERRUPTED, Ended, Report, Say
from sottovoce.training.marks import check_resumable
from sottovoce.training.places import Places
from sottovoce.training.privacy_report import privacy_report, promise_in
from sottovoce.training.recorded_files import digests_at_end, signed_at_end
from sottovoce.training.run_folder import LEDGER, NO_EPSILON, POPULATION, RESULTS, RunFolder, open_run
from sottovoce.training.seeding import (
    Seed,
    as_trusted,
    find_seed,
    folder_of,
    heard_by,
)
from sottovoce.training.server_pass import build_server_pass
from sottovoce.training.shared_dev import check_understood, choose_shared_dev
from sottovoce.training.speakers import (
    beside_the_paper,
    check_silos,
    choose_tokens,
    order_of_time,
    population_of,
    training_rows,
)
from sottovoce.training.step_log import NO_EVENTS
from sottovoce.training.stores import check_scored, ensure_store
from sottovoce.training.strangers import check_unheard
from sottovoce.training.target import met_target
from sottovoce.training.team import Team
from sottovoce.training.testing import score_models
from sottovoce.training.token_makers import check_tokens, describe_tokens
from sottovoce.training.trained_part import communication, describe_part, trained_part
from sottovoce.users.population import Population

OF_ROUNDS = (MEMORY, GROUPS, DEPARTURES)  # secrets that nobody needs after the last round


@dataclass(frozen=True)
class Surroundings:
    """Where a run lies, computes and reports to; nothing here changes its result.

    `stand_in`: people and noise are not the recipe's (`--smoke`), so that nothing is said of what they would promise.
    `sign`: where the private key lies that ledgers are signed with.
    """

    runs: Path
    stores: Path
    device: torch.device
    on_prepare: Callable[[Progress], None] = lambda _: None
    on_report: Callable[[Report], None] = lambda _: None
    on_stage: Callable[[str], None] = lambda _: None
    say: Say = lambda _: None
    stand_in: bool = False
    sign: Path | None = None

    def silent(self, device: torch.device) -> "Surroundings":
        """For another process than the first."""
        return Surroundings(self.runs, self.stores, device)


@dataclass(frozen=True)
class Outcome:
    """How a run ended in this process: with `results`, or interrupted after the step `stopped_at` (`resume` goes on).

    Processes other than the first have neither.
    """

    folder: Path
    results: dict[str, Any] | None = None
    stopped_at: int | None = None

    def as_json(self) -> dict[str, Any] | None:
        """Its results; where it was interrupted, that and where, in the words in which results say how a run ended."""
        return self.results if self.stopped_at is None else {"ended": Ended(self.stopped_at, INTERRUPTED).as_json()}


def run_recipe(
    recipe: Recipe, *, out: Path, resume: bool, around: Surroundings, elsewhere: Elsewhere | None = None
) -> Outcome:
    """Run `recipe` in the folder `out`, its seed before it; with its store's clients, or those `elsewhere`."""
    device = own_device(around.device)
    resume = resume or restarted() or (out / RESULTS).exists()  # a finished run only has to be shown
    with process_group(device) as processes:
        around = replace(around, device=device) if processes.first else around.silent(device)
        with agreeing(processes) as facts:
            facts |= {"code": code_version(), "recipe": recipe.model_dump(mode="json")}
        with agreeing(processes):
            if processes.first:
                ensure_store(recipe, around.stores, around.on_prepare)
        if recipe.federation is not None:
            return _run_federated(
                recipe, out=out, resume=resume, around=around, processes=processes, elsewhere=elsewhere
            )
        return _run_central(recipe, out=out, resume=resume, around=around, processes=processes)


@contextmanager
def _open_folder(
    out: Path,
    recipe: Recipe,
    *,
    inputs: Mapping[str, Any],
    resume: bool,
    processes: Processes,
    stand_in: bool,
    is_release: bool = False,
) -> Iterator[RunFolder]:
    """The run's folder, which the first process holds. One that is refused is refused to all."""
    with ExitStack() as held:
        with agreeing(processes):
            run = RunFolder(out)
            if processes.first:
                opening = open_run(
                    out,
                    config=as_yaml(recipe),
                    inputs=inputs,
                    resume=resume,
                    keeps_times=not is_release,
                    stand_in=stand_in,
                )
                run = held.enter_context(opening)
                if recipe.federation is not None:
                    check_resumable(out)
        yield run


def _seed_model(
    name: str | None, recipe: Recipe, around: Surroundings, processes: Processes
) -> tuple[Seed | None, Outcome | None]:
    """The seed, trained now if it is not there; an outcome where that was interrupted."""
    if name is None:
        return None, None
    with agreeing(processes):
        seed = find_seed(name, runs=around.runs, root_seed=recipe.people_seed)
    if processes.share(seed.is_there):
        return seed, None
    assert seed.recipe is not None
    around.on_stage(f"seed model {name}")
    try:
        with as_trusted(seed):
            outcome = run_recipe(seed.recipe, out=seed.folder, resume=True, around=around)
    except InputError as error:
        raise InputError(
            f"seed model {name}: it is not there, or not finished, and is trained first: {error}"
        ) from None
    return seed, outcome if processes.any(outcome.stopped_at is not None) else None


# Central training.


def _run_central(recipe: Recipe, *, out: Path, resume: bool, around: Surroundings, processes: Processes) -> Outcome:
    seed, stopped = _seed_model(recipe.training.start_from, recipe, around, processes)
    if stopped is not None:
        return stopped
    with agreeing(processes) as facts:
        places = Places.of(recipe, around.stores)
        facts |= places.facts()
        found = None if seed is None else seed.load()
        tokens = choose_tokens(recipe, places.store, seed=found)
        start = central.starting_point(recipe, tokens, found, language=places.store.language)
        if found is not None and found.family is not start.family:
            around.say(describe_inherited(start, found))
        speech = load_speech(
            places.store,
            training_rows(recipe, places.store),
            tokens,
            family=start.family,
            settings=start.settings,
            longest_seconds=min(recipe.data.longest_seconds, recipe.training.batch_seconds),
        )
        around.say(f"training on {speech}")
        measure = choose_measure(recipe, start, places, around)
        facts |= {
            "tokens": Sealed(tokens.digest),
            "training set": sealed(speech.rows.tobytes(), speech.lengths.tobytes()),
            "start model": sealed_tensors(start.parameters),
        }

    def go(run: RunFolder) -> Outcome:
        ended = central.train(
            recipe,
            run,
            speech=speech,
            dev=places.dev,
            measure=measure,
            start=start,
            device=around.device,
            processes=processes,
            on_report=around.on_report,
            say=around.say,
        )
        if not processes.first:
            return Outcome(out)
        if ended.reason == INTERRUPTED:
            return Outcome(out, stopped_at=ended.step)
        best = load_recogniser(run.best)
        team = places.team(ALONE, best, around.device)
        (tested,) = score_models([best], recipe, places.tests, team)
        return _finish(run, {"model": dict(best.about), "test": tested})

    inputs = {**places.digests(), "tokens digest": tokens.digest, "number of processes": processes.world}
    opening = _open_folder(out, recipe, inputs=inputs, resume=resume, processes=processes, stand_in=around.stand_in)
    with opening as run:
        return _known(run, processes) or go(run)


def choose_measure(recipe: Recipe, start: Recogniser, places: Places, around: Surroundings) -> Measure:
    """What the best model is chosen by. Refuses sets that cannot be scored before training, not at the first time."""
    writes = start.family.recognition is not None
    if recipe.measure == "wer" and not writes:
        raise InputError(f"measure=wer: models of family={start.family.name} write nothing down; expected loss or null")
    if recipe.measure == "ctc_wer" and not searches(start.family):
        raise InputError(
            f"measure=ctc_wer: models of family={start.family.name} know no attention; expected wer or loss"
        )
    if recipe.measure == "ctc_wer" and not emits(start.family):
        raise InputError(f"measure=ctc_wer: models of family={start.family.name} know no CTC; expected wer or loss")
    check_scored(places.evaluated.values(), start)
    if recipe.federation is not None and recipe.federation.test_along and not writes:
        raise InputError(f"federation.test_along: models of family={start.family.name} write nothing down")
    measure = MEASURES[recipe.measure or ("wer" if writes else "loss")]
    if measure is LOSS:
        store, split = places.dev
        around.say(f"chosen by the loss on {usable_speech(start, store, split=split)}")
    return measure


def _finish(run: RunFolder, results: dict[str, Any]) -> Outcome:
    write_json(run.path / RESULTS, results)
    return Outcome(run.path, results=results)


def _known(run: RunFolder, processes: Processes) -> Outcome | None:
    """How a run that is finished already has ended, in this process."""
    file = run.path / RESULTS
    if not processes.any(processes.first and file.exists()):
        return None
    return Outcome(run.path, results=read_json(file) if processes.first else None)


# Federated training.


def _run_federated(
    recipe: Recipe,
    *,
    out: Path,
    resume: bool,
    around: Surroundings,
    processes: Processes,
    elsewhere: Elsewhere | None = None,
) -> Outcome:
    settings = recipe.federated
    if elsewhere is not None and processes.several:
        raise InputError("clients on other machines are asked by one process: expected no torchrun")
    key = None if around.sign is None else load_signing_key(around.sign)
    seed, stopped = _seed_model(settings.seed_model, recipe, around, processes)
    if stopped is not None:
        return stopped
    with agreeing(processes) as facts:
        places = Places.of(recipe, around.stores)
        facts |= places.facts()
        if elsewhere is None:
            population = population_of(recipe, places.store, settings.clients.population(recipe.data))
        else:
            population = elsewhere.population
        check_silos(recipe, population)
        if settings.local.time_line is not None and (unknown := order_of_time(population)) is not None:
            around.say(unknown)
        # Users are dealt out by their seconds: where those differed, one would be trained twice and another not at all.
        facts["population"] = sealed(population.digest, population.seconds.tobytes())
        if processes.first:  # who is refused here is refused for all
            check_unheard(recipe, population, places.evaluated, seed=seed, runs=around.runs, stores=around.stores)
            check_tokens(recipe, population, runs=around.runs, stores=around.stores, say=around.say)
        start = starting_model(recipe, seed, places.store, say=around.say)
        check_language(start, places.store)
        check_understood(recipe, start)
        shared_dev = None if places.shared_dev is None else choose_shared_dev(recipe, places.shared_dev)
        measure = choose_measure(recipe, start, places, around)
        check_client_wer(recipe, start, population, speech_is_here=elsewhere is None)
        model = _digest(Layout.of(start.parameters).flatten(start.parameters).numpy().tobytes())
        facts |= {"tokens": Sealed(start.tokens.digest), "start model": Sealed(model)}
        plan = private_plan(recipe, population, start, seed=seed, around=around)
        if elsewhere is not None:
            plan = elsewhere.planned(plan)
        facts["plan"] = plan.describe()
        server_pass = None
        if places.of_server is not None:
            check_language(start, places.of_server[0])
            if processes.first:
                server_pass = build_server_pass(recipe, start, population, places.of_server, device=around.device)
    tokens = describe_tokens(recipe, start.tokens, runs=around.runs, stores=around.stores)
    inputs = {"tokens digest": start.tokens.digest, "start model digest": model}
    if plan.settings.root_seed is not None:
        # A release replays nothing, and whoever sees its folder could try guesses of the data against digests of it.
        # Its sums are exact besides, whereas a simulation's round by how many they are divided among.
        inputs |= {
            **places.digests(),
            "population digest": population.digest,
            "number of processes": str(processes.world),
        }
    team = places.team(processes, start, around.device)

    def clients(run: RunFolder) -> ClientsHere | ClientsOverRanks:
        return choose_clients(
            recipe,
            population,
            start,
            plan,
            run=run,
            device=around.device,
            processes=processes,
            shared_dev=shared_dev,
        )

    is_release = plan.settings.mode is Mode.SECURE
    opening = _open_folder(
        out,
        recipe,
        inputs=inputs,
        resume=resume,
        processes=processes,
        stand_in=around.stand_in,
        is_release=is_release,
    )
    with opening as run:
        if (known := _known(run, processes)) is not None:
            if processes.first:  # it may have been killed before it came to that
                forget(run.path / SECRETS, *OF_ROUNDS)
            return known
        if not processes.first:
            followers = clients(run)
            assert isinstance(followers, ClientsOverRanks)
            team.follow(followers, plan)
            return Outcome(out)
        with team:
            if settings.trainable is not None:
                around.say(describe_part(trained_part(recipe, start), model_bits=settings.model_bits))
            beside = None if around.stand_in else beside_the_paper(recipe, clients=plan.settings.population_size)
            is_others = around.stand_in and plan.settings.z > 0
            promised = (NO_EPSILON,) if is_others else (*plan.warnings, settings.guarantee(plan))
            for line in filter(None, (beside, *promised, NO_EVENTS if is_release else None)):
                around.say(line)
            if is_release and isinstance(plan.sampler, CyclicSampler):
                keep_groups(run.path / SECRETS, population, plan.sampler, begun=(run.path / LEDGER).exists())
            write_json(run.path / POPULATION, _public(population, plan))
            distant = None if elsewhere is None else elsewhere.clients(run, plan, start)
            federating = Federating(
                recipe,
                run,
                start=start,
                plan=plan,
                clients=clients(run) if distant is None else distant,
                ready=None if distant is None else distant.ready,
                spare_attempts=None if elsewhere is None else elsewhere.spare_attempts,
                end=(lambda _: None) if distant is None else distant.end,
                listeners=listeners_here(recipe, population, start, device=around.device)
                if distant is None
                else distant,
                team=team,
                dev=places.dev,
                measure=measure,
                tests=places.tests,
                inputs=_digest(json.dumps(inputs, sort_keys=True).encode()),
                device=around.device,
                server_pass=server_pass,
                turns=clients_turns(recipe, population, start, plan),
                key=key,
                on_report=around.on_report,
                say=around.say,
            )
            ended = federating.run()
            if ended.words:
                around.say(ended.words)
            if ended.step < settings.steps and (kept := promise_in(run, settings)) is not None:
                around.say(kept)
            if ended.reason == INTERRUPTED:
                return Outcome(out, stopped_at=ended.step)
            around.on_stage("testing")
            results = _results(recipe, run, start, plan, ended, places, population, team) | {"tokens": tokens}
            # Before they are written: a run whose results are there has nothing left to do.
            record_results(
                run.path / LEDGER, digests_at_end(run.path, results), key=key, signed_files=signed_at_end(run.path)
            )
            finished = _finish(run, results)
            forget(run.path / SECRETS, *OF_ROUNDS)
            return finished


def starting_model(recipe: Recipe, seed: Seed | None, store: Store, *, say: Say = lambda _: None) -> Recogniser:
    """The model of round 0: the seed's, or a fresh one."""
    if seed is not None:
        found = seed.load()
        # A seed of another family hands on a part that knows no tokens, if any.
        is_same = found.family.name == recipe.model.family
        tokens = found.tokens if is_same else _own_tokens(recipe, store)
        # Nor does it know a language, any more than a model that writes nothing down.
        speaks = is_same and found.family.recognition is not None
        start = central.starting_point(recipe, tokens, found, language=found.language if speaks else store.language)
        if not is_same:
            say(describe_inherited(start, found))
    else:
        start = central.starting_point(recipe, _own_tokens(recipe, store), None, language=store.language)
    factor = recipe.federated.rescale_norms
    if factor is None:
        return start
    if start.family.rescaled is None:
        raise InputError(f"federation.rescale_norms={factor}: models of family={start.family.name} cannot be rescaled")
    return replace(start, parameters=start.family.rescaled(start.parameters, factor=factor, settings=start.settings))


def _own_tokens(recipe: Recipe, store: Store) -> Tokens:
    return choose_tokens(recipe, store, may_read_texts=not recipe.federated.privacy.adds_noise)


def private_plan(
    recipe: Recipe,
    population: Population,
    start: Recogniser,
    *,
    seed: Seed | None,
    around: Surroundings,
    beforehand: bool = False,
) -> Plan:
    """The plan for the people who are there; refuses one that assumes more of them."""
    settings = recipe.federated
    assumed = settings.privacy.population_size
    if assumed is not None and len(population) != assumed:
        # Drawing from some of more people would put somebody else in the place of one who leaves.
        raise InputError(
            f"federation.privacy.population_size={assumed}: the store has {len(population)} clients, and ε is worked "
            "out for exactly the number that the plan assumes; =null takes those there are"
        )
    if settings.cohort_size > len(population):
        raise InputError(
            f"federation.cohort_size={settings.cohort_size}: the population has only {len(population)} clients"
        )
    heard = heard_by(seed, population, runs=around.runs, stores=around.stores, beforehand=beforehand)
    for folder in heard.unknown:
        why = f"seed model {folder}: nobody can say whether it has heard some of the clients"
        if settings.privacy.mode is Mode.SECURE:
            raise InputError(f"{why} (its recipe or its store as it was is missing); a release needs to know")
        around.say(why)
    private = settings.privacy.settings(
        population_size=assumed or len(population),
        cohort_size=settings.cohort_size,
        central_steps=settings.steps,
        privacy_unit=population.privacy_unit,
        no_unit_reason=population.no_guarantee,
        users_also_in_seed=heard.clients,
        root_seed=derive(recipe.seed, "privacy"),
        time_line=None if settings.local.time_line is None else settings.local.time_line.dry,
        measured=settings.measured,
    )
    plan = Plan(private, Layout.of(trained_part(recipe, start).initial))
    if settings.privacy.target_epsilon is not None and not around.stand_in:
        around.say(met_target(settings, plan))
    return plan


def _results(
    recipe: Recipe,
    run: RunFolder,
    start: Recogniser,
    plan: Plan,
    ended: Ended,
    places: Places,
    population: Population,
    team: Team,
) -> dict[str, Any]:
    best = load_recogniser(run.best)
    is_release = plan.settings.mode is Mode.SECURE
    after, before = score_models([best, start], recipe, places.tests, team, is_release=is_release)
    of_clients = client_results(recipe, population, start=start, best=best, team=team)
    return {
        "model": dict(best.about),
        "ended": ended.as_json(),
        "test": after,
        "start": {"test": before},
        "privacy": privacy_report(recipe.federated, plan, run),
        "communication": communication(trained_part(recipe, start), model_bits=recipe.federated.model_bits),
        **({} if of_clients is None else {"clients": of_clients}),
        **({} if recipe.federated.client_wer is None else {"client_wer": measured_wers(run)}),
    }


def _public(population: Population, plan: Plan) -> dict[str, Any]:
    """What may be said of the clients: in a release, only what the plan has made public anyway."""
    described = population.describe()
    if plan.settings.root_seed is not None:
        deciles = np.quantile(population.seconds, np.linspace(0, 1, 11)).tolist()
        return {"accounted": False, **described, "seconds_per_client_deciles": deciles}
    return {name: described[name] for name in ("population_size", "privacy_unit", "settings")}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


__all__ = ["Outcome", "Surroundings", "folder_of", "run_recipe"]
