"""From a recipe to a federation: the only place where its people, model, plan and data are put together.

    recipe ─► stores ─► population ─► start model ─► measure ─► plan ─► public speech ─► Federation

`run`, `serve`, simulations, audits, the checks before a run and the estimate of its cost all use what is made here.
Nothing is trained or written: engines, the server and what runs after its steps are made from a `Federation`.
"""

import hashlib
from dataclasses import dataclass

from sottovoce.base.errors import InputError
from sottovoce.base.processes import ALONE, Processes
from sottovoce.base.seeds import derive
from sottovoce.config import FederationSettings, Recipe
from sottovoce.data.loading import Speech
from sottovoce.data.population import Population
from sottovoce.evaluation.measures import Measure
from sottovoce.evaluation.score import check_language
from sottovoce.federated.client import SharedSpeech
from sottovoce.federated.round import AfterStep
from sottovoce.federated.server import Server
from sottovoce.federated.staleness import RecentModels
from sottovoce.flat.layout import Layout
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.trainable import Trainable
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode
from sottovoce.training.agreement import HiddenDigest, digest_parts, require_equal_across_ranks
from sottovoce.training.disjointness import check_evaluation_speakers, count_clients_in_parent
from sottovoce.training.parent_model import ParentModel, find_parent_model
from sottovoce.training.privacy_report import describe_target_noise
from sottovoce.training.refactoring import build_refactoring
from sottovoce.training.remote_clients import RemoteClients
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_data import RunData, build_recipe_population, check_silos, describe_unknown_order
from sottovoce.training.server_pass import build_server_pass, load_public_speech
from sottovoce.training.start_model import build_start_model, check_trained_part, split_trained_part
from sottovoce.training.testing import check_can_transcribe, check_holdouts, choose_measure, choose_shared_dev
from sottovoce.training.tokens import check_token_sources, load_taken_tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class Federation:
    """What the rounds of a recipe are made of, before the first of them.

    `parent` is what `start`, the model of round 0, was trained from; `part` is what of it clients train. `measure`
    chooses the best model. `shared_dev` is public speech that weights clients, `public_speech` what the server itself
    trains on after each round. `remote` are clients on other machines; None where they are simulated here.
    `start_digest` is empty for a model without numbers (`assemble`).
    """

    recipe: Recipe
    context: RunContext
    data: RunData
    population: Population
    parent: ParentModel | None
    start: Recogniser
    start_digest: str
    part: Trainable
    plan: Plan
    measure: Measure
    shared_dev: SharedSpeech | None
    public_speech: Speech | None
    remote: RemoteClients | None

    @property
    def settings(self) -> FederationSettings:
        return self.recipe.federated

    @property
    def is_release(self) -> bool:
        return self.plan.settings.mode is Mode.SECURE

    def server(self) -> Server:
        """The server before the first round."""
        layout = self.plan.layout
        return Server(self.settings.server, layout, layout.flatten(self.part.initial).to(self.context.device))

    def recent_models(self) -> RecentModels | None:
        """What rounds that overlap keep of earlier models, before the first round; None where they do not."""
        return None if self.settings.staleness is None else RecentModels(self.settings.staleness)

    def after_step(self, server: Server) -> tuple[AfterStep, ...]:
        """What runs after each step of `server`, in this order."""
        found: list[AfterStep] = []
        if self.public_speech is not None:
            device = self.context.device
            found.append(build_server_pass(self.recipe, self.start, self.public_speech, device=device))
        if self.part.projected:
            found.append(build_refactoring(self.part, server))
        return tuple(found)


def assemble(
    recipe: Recipe,
    *,
    context: RunContext,
    clients: RemoteClients | None = None,
    processes: Processes = ALONE,
    sketch: Recogniser | None = None,
) -> Federation:
    """The federation of `recipe`, with its store's clients or those on other machines; refuses what does not fit.

    Its store and the model that it starts from must be there. Before that model is trained, `sketch` stands for it:
    shapes without numbers. All `processes` of a run do this, and compare what they have found.
    """
    settings, say = recipe.federated, context.say
    if clients is not None and settings.estimate_bound is not None:
        raise InputError("federation.estimate_bound: no gradients of clients on other machines are here; expected null")
    if clients is None and settings.expected_answers is not None and settings.privacy.mode is Mode.SECURE:
        raise InputError(
            f"federation.expected_answers={settings.expected_answers} with privacy.mode=secure: in this process no "
            "client is late; expected null, or `sottovoce serve`"
        )
    with require_equal_across_ranks(processes) as facts:
        context.tracking.check(is_release=settings.privacy.mode is Mode.SECURE)
        data = RunData.of(recipe, context.stores)
        facts |= data.facts()
        parent = find_parent_model(recipe, runs=context.runs)
        if clients is None:
            population = build_recipe_population(recipe, data.store, settings.clients.population(recipe.data))
        else:
            population = clients.population
        check_silos(recipe, population)
        if settings.local.time_line is not None and (unknown := describe_unknown_order(population)) is not None:
            say(unknown)
        # Users are dealt out by their seconds: where those differed, one would be trained twice and another not at all.
        facts["population"] = digest_parts(population.digest, population.seconds.tobytes())
        if processes.is_first:  # refused here, all are refused
            check_evaluation_speakers(recipe, population, data, parent=parent, context=context)
            check_token_sources(recipe, population, runs=context.runs, stores=context.stores, say=say)
        start = sketch
        if start is None:
            taken = load_taken_tokens(recipe, runs=context.runs)
            start = build_start_model(recipe, parent, data.store, taken=taken, say=say)
        check_language(start, data.store)
        check_can_transcribe(recipe, start)
        shared_dev = None if data.shared_dev is None else choose_shared_dev(recipe, data.shared_dev)
        measure = choose_measure(recipe, start, data, say=say)
        if clients is None:
            check_holdouts(recipe, population)
        start_digest = "" if sketch is not None else _digest(start)
        facts |= {"tokens": HiddenDigest(start.tokens.digest), "start model": HiddenDigest(start_digest)}
        part = split_trained_part(recipe, start)
        if part.held and settings.estimate_bound is not None:
            raise InputError(
                "federation.estimate_bound with LoRA's factors=alternate or project: its terms are those of steps that "
                "train everything; expected null"
            )
        if settings.staleness is not None:
            _check_staleness(settings, part, staleness=settings.staleness)
        if sketch is None and processes.is_first:
            check_trained_part(start, part)
        in_parent = _count_in_parent(parent, recipe, population, context, is_planned=sketch is not None)
        plan = _build_plan(recipe, population, part.layout, users_also_in_seed=in_parent)
        if settings.privacy.target_epsilon is not None and not context.stand_in:
            say(describe_target_noise(settings, plan))
        if clients is not None:
            plan = clients.planned(plan)
        facts["plan"] = plan.describe()
        public_speech = None
        if data.of_server is not None:
            check_language(start, data.of_server.store)
            public_speech = load_public_speech(recipe, start, population, data.of_server)
    return Federation(
        recipe=recipe,
        context=context,
        data=data,
        population=population,
        parent=parent,
        start=start,
        start_digest=start_digest,
        part=part,
        plan=plan,
        measure=measure,
        shared_dev=shared_dev,
        public_speech=public_speech,
        remote=clients,
    )


def _count_in_parent(
    parent: ParentModel | None, recipe: Recipe, population: Population, context: RunContext, *, is_planned: bool
) -> int:
    """How many clients the parent was trained on; refuses numbers of clients that the recipe does not allow."""
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
    found = count_clients_in_parent(parent, population, runs=context.runs, stores=context.stores, is_planned=is_planned)
    for folder in found.unknown:
        why = f"seed model {folder}: it is not known whether it was trained on some of the clients"
        if settings.privacy.mode is Mode.SECURE:
            raise InputError(f"{why} (its recipe or its store as it was is missing); a release needs to know")
        context.say(why)
    return found.clients


def _build_plan(recipe: Recipe, population: Population, layout: Layout, *, users_also_in_seed: int) -> Plan:
    """The plan for the people who are there."""
    settings = recipe.federated
    private = settings.privacy.settings(
        population_size=len(population),
        cohort_size=settings.cohort_size,
        central_steps=settings.steps,
        privacy_unit=population.privacy_unit,
        no_unit_reason=population.no_guarantee,
        users_also_in_seed=users_also_in_seed,
        root_seed=derive(recipe.seed, "privacy"),
        time_line=None if settings.local.time_line is None else settings.local.time_line.dry,
        measured=settings.measured,
        expected_answers=settings.expected_answers,
    )
    return Plan(private, layout)


def _check_staleness(settings: FederationSettings, part: Trainable, *, staleness: int) -> None:
    """A cohort must know all that it trains by when it begins, so many steps before its sum is added."""
    given = f"federation.staleness={staleness}"
    if settings.privacy.adaptive is not None:
        raise InputError(
            f"{given} with privacy.adaptive: a cohort that begins before earlier sums are released cannot know its "
            "clip bound; expected one of them"
        )
    if settings.estimate_bound is not None:
        raise InputError(
            f"{given} with estimate_bound: the bound is about updates from the server's present model; expected one of "
            "them"
        )
    if part.held or part.projected:
        raise InputError(
            f"{given} with LoRA's factors=alternate or project: an update would be added beside other factors than it "
            "was trained beside; expected null, or factors=both or b"
        )


def _digest(start: Recogniser) -> str:
    content = Layout.of(start.parameters).flatten(start.parameters).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
