"""From a recipe to a federation: the only place where its people, model, plan and data are put together.

    recipe ─► stores ─► population ─► start model ─► measure ─► plan ─► public speech ─► Federation

`run`, `serve`, simulations, audits, the checks before a run and the estimate of its cost all use what is made here.
Nothing is trained or written: engines, the server and what runs after its steps are made from a `Federation`.
"""

import hashlib
from dataclasses import dataclass, replace

from sottovoce.config import Federation as FederationSettings
from sottovoce.config import Recipe
from sottovoce.errors import InputError
from sottovoce.evaluation.measures import Measure
from sottovoce.evaluation.score import check_language
from sottovoce.federated.client import SharedSpeech
from sottovoce.federated.round import AfterStep
from sottovoce.federated.server import Server
from sottovoce.flat.layout import Layout
from sottovoce.models.saved import Recogniser, describe_inherited
from sottovoce.models.speech import Speech
from sottovoce.models.trainable import Trainable
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode
from sottovoce.processes import ALONE, Processes
from sottovoce.seeds import derive
from sottovoce.store import Store
from sottovoce.text.tokens import Tokens
from sottovoce.training import central
from sottovoce.training.agreement import Sealed, agreeing, sealed
from sottovoce.training.client_wer import check_client_wer
from sottovoce.training.context import Surroundings
from sottovoce.training.dev_measure import choose_measure
from sottovoce.training.elsewhere import Elsewhere
from sottovoce.training.keeper import Say
from sottovoce.training.places import Places
from sottovoce.training.seeding import Seed, heard_by, seed_of
from sottovoce.training.server_pass import build_server_pass, public_speech
from sottovoce.training.shared_dev import check_understood, choose_shared_dev
from sottovoce.training.speakers import check_silos, choose_tokens, order_of_time, population_of
from sottovoce.training.strangers import check_unheard
from sottovoce.training.target import met_target
from sottovoce.training.token_makers import check_tokens
from sottovoce.training.trained_part import trained_part
from sottovoce.users.population import Population


@dataclass(frozen=True, eq=False, kw_only=True)
class Federation:
    """What the rounds of a recipe are made of, before the first of them.

    `parent` is what `start`, the model of round 0, was trained from; `part` is what of it clients train. `measure`
    chooses the best model. `shared_dev` is public speech that weights clients, `public_speech` what the server itself
    trains on after each round. `remote` are clients on other machines; None where they are simulated here.
    `start_digest` is empty for a model without numbers (`assemble`).
    """

    recipe: Recipe
    context: Surroundings
    data: Places
    population: Population
    parent: Seed | None
    start: Recogniser
    start_digest: str
    part: Trainable
    plan: Plan
    measure: Measure
    shared_dev: SharedSpeech | None
    public_speech: Speech | None
    remote: Elsewhere | None

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

    def after_step(self) -> tuple[AfterStep, ...]:
        """What runs after each of the server's steps, in this order."""
        if self.public_speech is None:
            return ()
        return (build_server_pass(self.recipe, self.start, self.public_speech, device=self.context.device),)


def assemble(
    recipe: Recipe,
    *,
    context: Surroundings,
    clients: Elsewhere | None = None,
    processes: Processes = ALONE,
    sketch: Recogniser | None = None,
) -> Federation:
    """The federation of `recipe`, with its store's clients or those on other machines; refuses what does not fit.

    Its store and the model that it starts from must be there. Before that model is trained, `sketch` stands for it:
    shapes without numbers. All `processes` of a run do this, and compare what they have found.
    """
    settings, say = recipe.federated, context.say
    folders = {"runs": context.runs, "stores": context.stores}
    with agreeing(processes) as facts:
        data = Places.of(recipe, context.stores)
        facts |= data.facts()
        parent = seed_of(recipe, runs=context.runs)
        if clients is None:
            population = population_of(recipe, data.store, settings.clients.population(recipe.data))
        else:
            population = clients.population
        check_silos(recipe, population)
        if settings.local.time_line is not None and (unknown := order_of_time(population)) is not None:
            say(unknown)
        # Users are dealt out by their seconds: where those differed, one would be trained twice and another not at all.
        facts["population"] = sealed(population.digest, population.seconds.tobytes())
        if processes.first:  # who is refused here is refused for all
            check_unheard(recipe, population, data.evaluated, seed=parent, **folders)
            check_tokens(recipe, population, say=say, **folders)
        start = starting_model(recipe, parent, data.store, say=say) if sketch is None else sketch
        check_language(start, data.store)
        check_understood(recipe, start)
        shared_dev = None if data.shared_dev is None else choose_shared_dev(recipe, data.shared_dev)
        measure = choose_measure(recipe, start, data, say=say)
        check_client_wer(recipe, start, population, speech_is_here=clients is None)
        start_digest = "" if sketch is not None else _digest(start)
        facts |= {"tokens": Sealed(start.tokens.digest), "start model": Sealed(start_digest)}
        part = trained_part(recipe, start)
        heard = _clients_in(parent, recipe, population, context, beforehand=sketch is not None)
        plan = _plan(recipe, population, Layout.of(part.initial), users_also_in_seed=heard)
        if settings.privacy.target_epsilon is not None and not context.stand_in:
            say(met_target(settings, plan))
        if clients is not None:
            plan = clients.planned(plan)
        facts["plan"] = plan.describe()
        speech = None
        if data.of_server is not None:
            assert settings.server_pass is not None
            check_language(start, data.of_server[0])
            speech = public_speech(recipe, settings.server_pass, start, population, data.of_server)
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
        public_speech=speech,
        remote=clients,
    )


def starting_model(recipe: Recipe, parent: Seed | None, store: Store, *, say: Say = lambda _: None) -> Recogniser:
    """The model of round 0: the parent's, or a fresh one."""
    if parent is not None:
        found = parent.load()
        # A parent of another family hands on a part that knows no tokens, if any.
        is_same = found.family.name == recipe.model.family
        tokens = found.tokens if is_same else _own_tokens(recipe, store)
        # Nor does it know a language, any more than a model that writes no text.
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


def _clients_in(
    parent: Seed | None, recipe: Recipe, population: Population, context: Surroundings, *, beforehand: bool
) -> int:
    """How many clients the parent has heard; refuses numbers of clients that the recipe does not allow."""
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
    heard = heard_by(parent, population, runs=context.runs, stores=context.stores, beforehand=beforehand)
    for folder in heard.unknown:
        why = f"seed model {folder}: nobody can say whether it has heard some of the clients"
        if settings.privacy.mode is Mode.SECURE:
            raise InputError(f"{why} (its recipe or its store as it was is missing); a release needs to know")
        context.say(why)
    return heard.clients


def _plan(recipe: Recipe, population: Population, layout: Layout, *, users_also_in_seed: int) -> Plan:
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
    )
    return Plan(private, layout)


def _digest(start: Recogniser) -> str:
    content = Layout.of(start.parameters).flatten(start.parameters).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
