"""A central run: a recipe's training set and start model, trained and tested."""

from sottovoce.config import Recipe
from sottovoce.models.recogniser import describe_inherited, load_recogniser
from sottovoce.models.speech import load_speech
from sottovoce.processes import ALONE, Processes
from sottovoce.training import central
from sottovoce.training.agreement import Sealed, agreeing, sealed, sealed_tensors
from sottovoce.training.context import Surroundings
from sottovoce.training.dev_measure import choose_measure
from sottovoce.training.keeper import INTERRUPTED
from sottovoce.training.outcome import Outcome, Target, finish, finished_before
from sottovoce.training.places import Places
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.seeding import Seed
from sottovoce.training.speakers import choose_tokens, training_rows
from sottovoce.training.testing import score_models


def run_central(
    recipe: Recipe, target: Target, *, parent: Seed | None, context: Surroundings, processes: Processes
) -> Outcome:
    """Train centrally, from `parent` where there is one, and test the best model."""
    with agreeing(processes) as facts:
        places = Places.of(recipe, context.stores)
        facts |= places.facts()
        found = None if parent is None else parent.load()
        tokens = choose_tokens(recipe, places.store, seed=found)
        start = central.starting_point(recipe, tokens, found, language=places.store.language)
        if found is not None and found.family is not start.family:
            context.say(describe_inherited(start, found))
        speech = load_speech(
            places.store,
            training_rows(recipe, places.store),
            tokens,
            family=start.family,
            settings=start.settings,
            longest_seconds=min(recipe.data.longest_seconds, recipe.training.batch_seconds),
        )
        context.say(f"training on {speech}")
        measure = choose_measure(recipe, start, places, say=context.say)
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
            device=context.device,
            processes=processes,
            on_report=context.on_report,
            say=context.say,
        )
        if not processes.first:
            return Outcome(target.out)
        if ended.reason == INTERRUPTED:
            return Outcome(target.out, stopped_at=ended.step)
        best = load_recogniser(run.best)
        team = places.team(ALONE, best, context.device)
        (tested,) = score_models([best], recipe, places.tests, team)
        return finish(run, {"model": dict(best.about), "test": tested})

    inputs = {**places.digests(), "tokens digest": tokens.digest, "number of processes": processes.world}
    with target.opened(recipe, inputs=inputs, processes=processes) as run:
        return finished_before(run, processes) or go(run)
