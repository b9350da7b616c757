"""The suites that put Ramesh et al. (2023) to the test: runs differ in what their labels say, and in nothing else."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from tests.benches import changed, runs_of, settings

from sottovoce.config import Recipe, load_recipe
from sottovoce.config.sections import SyntheticCorpus
from sottovoce.training.parent_model import find_parent_model

ROOM = "benchmark/ramesh/"
STAGES = f"{ROOM}pretraining/"
SUITES = ("start", "hours", "cohort", "steps", "french", "private", "long")
START = {"central.start_from"}
PACE = {f"federation.{key}" for key in ("steps", "evaluate_every", "checkpoint_every")}


def runs(suite: str) -> Mapping[str, Recipe]:
    return runs_of(ROOM + suite)


def all_runs() -> list[tuple[str, Recipe]]:
    return [(f"{suite}/{label}", recipe) for suite in SUITES for label, recipe in runs(suite).items()]


@cache
def stage(name: str) -> Recipe:
    return load_recipe(STAGES + name)


def starts_of(recipe: Recipe) -> str | None:
    return recipe.central.start_from if recipe.central is not None else recipe.federated.seed_model


def test_every_encoder_is_started_from_under_all_of_its_seeds_and_no_other() -> None:
    encoders = runs("pretraining")
    repeats = {(f"{STAGES}{label.partition('-seed')[0]}", recipe.seed) for label, recipe in encoders.items()}
    started = [(starts_of(recipe), recipe.seed) for _, recipe in all_runs()]
    started += [(starts_of(recipe), recipe.seed) for recipe in encoders.values()]
    assert repeats == {found for found in started if found[0] is not None}


@pytest.mark.parametrize("suite", [*SUITES, "pretraining", "iban", "iban-pretraining", "recogniser"])
def test_every_setting_is_repeated_and_repeats_differ_in_their_seed_alone(suite: str) -> None:
    found = runs(suite)
    once = [label for label in found if "-seed" not in label]
    assert {*found} == {*once, *(f"{label}-seed{seed}" for label in once for seed in (2, 3))}
    for label, recipe in found.items():
        setting, _, seed = label.partition("-seed")
        assert recipe.seed == int(seed or 1), label
        assert changed(recipe, found[setting]) == ({"seed"} if seed else set()), label
    assert len({json.dumps(settings(recipe), sort_keys=True) for recipe in found.values()}) == len(found)


def test_all_are_fine_tuned_alike() -> None:
    base, french = runs("start")["scratch"], runs("french")["scratch"]
    for where, recipe in all_runs():
        own = french if where.startswith("french/") else base
        longer = {"central.steps", "central.schedule.total_steps"} if where.startswith("long/") else set()
        assert changed(recipe, own) <= START | {"seed"} | longer, where
    other = {"data.store", "data.prepare.language", "data.dev", "data.test", "tokens.size"}
    assert changed(french, base) == other


def test_a_run_starts_from_the_encoder_of_its_own_seed(tmp_path: Path) -> None:
    for where, recipe in all_runs():
        while (found := find_parent_model(recipe, runs=tmp_path)) is not None:
            assert found.recipe is not None
            assert found.recipe.seed == recipe.seed, where
            recipe = found.recipe


def test_who_is_heard_hangs_on_no_seed() -> None:
    for label, recipe in runs("pretraining").items():
        assert recipe.data.seed_part is None or recipe.data.people_seed == 6, label
    assert all(recipe.data.seed_part is None for _, recipe in all_runs())


def test_labelled_speakers_are_others_than_the_encoders() -> None:
    labelled, crowd = runs("start")["scratch"].data, stage("federated").data
    assert labelled.store != crowd.store
    assert labelled.prepare is not None
    assert crowd.prepare is not None
    assert labelled.prepare.seed != crowd.prepare.seed


def test_federated_and_central_encoders_take_the_same_steps_on_as_much_speech() -> None:
    federated, central = stage("federated").federated, stage("central").training
    assert federated.cohort_size * (federated.local.batch_utterances or 0) == central.batch_utterances
    assert federated.server.optimiser == central.optimiser
    assert federated.server.schedule == central.schedule
    assert federated.local.clip_gradients == central.clip_gradients == float("inf")


@pytest.mark.parametrize(
    ("name", "base", "differ"),
    [
        ("central-epochs", "central", {f"central.{key}" for key in ("steps", "evaluate_every", "checkpoint_every")}),
        ("federated-5", "federated", {"data.seed_part", "data.part", "data.people_seed", *PACE}),
        ("central-5-epochs", "central", {"data.seed_part", "data.part", "data.people_seed"}),
        ("federated-k6", "federated", {"federation.cohort_size", *PACE}),
        ("federated-k16", "federated", {"federation.cohort_size", *PACE}),
        ("federated-any", "federated", {"federation.local.time_line", *PACE}),
        ("federated-epochs", "federated-any", PACE),
        ("fr-federated", "federated", {"data.store", "data.prepare.language", "federation.seed_model"}),
        ("fr-central", "central", {"data.store", "data.prepare.language", "central.start_from"}),
        ("private-low", "private-none", {"federation.privacy.noise_multiplier"}),
        ("private-mid", "private-none", {"federation.privacy.noise_multiplier"}),
        ("private-high", "private-none", {"federation.privacy.noise_multiplier"}),
        ("private-top", "private-none", {"federation.privacy.noise_multiplier"}),
        ("private-time-line", "private-mid", {"federation.local.time_line", "federation.local.batch_utterances"}),
    ],
)
def test_encoders_differ_in_what_their_names_say(name: str, base: str, differ: set[str]) -> None:
    assert changed(stage(name), stage(base)) <= differ


def test_iban_is_fine_tuned_alike_whatever_it_starts_from() -> None:
    found = runs("iban")
    for label, recipe in found.items():
        assert changed(recipe, found["scratch"]) <= START | {"seed"}, label
    started = {starts_of(recipe) for recipe in (*found.values(), *runs("iban-pretraining").values())}
    assert started - {None} == {
        f"{ROOM}iban-pretraining/{name}" for name in runs("iban-pretraining") if "-seed" not in name
    }


def test_iban_is_heard_after_english_as_it_is_alone() -> None:
    encoders = runs("iban-pretraining")
    assert changed(encoders["english-iban-federated"], encoders["iban-federated"]) == {"federation.seed_model"}
    assert encoders["iban-federated"].data == runs("iban")["scratch"].data
    others = [encoders[name].data for name in ("english-federated", "english-central", "english-texts")]
    assert others[0] == others[1] == others[2]


def test_a_private_recogniser_has_the_crowd_the_cohorts_and_the_noise_of_the_encoders() -> None:
    for label in ("none", "low", "mid", "high", "top"):
        encoder, recogniser = stage(f"private-{label}"), runs("recogniser")[label]
        for key in ("store", "prepare", "dev", "test"):
            assert getattr(recogniser.data, key) == getattr(encoder.data, key), (label, key)
        for key in ("sampling", "noise_multiplier", "delta"):
            assert getattr(recogniser.federated.privacy, key) == getattr(encoder.federated.privacy, key), (label, key)
        assert recogniser.federated.cohort_size == encoder.federated.cohort_size
        assert changed(recogniser, runs("recogniser")["none"]) <= {"federation.privacy.noise_multiplier"}


def test_a_recogniser_starts_from_as_many_labelled_speakers_as_the_transducers() -> None:
    own, labelled = load_recipe(f"{ROOM}recogniser/seed").data, runs("start")["scratch"].data
    assert isinstance(own.prepare, SyntheticCorpus)
    assert isinstance(labelled.prepare, SyntheticCorpus)
    assert own.seed_part is not None
    assert own.seed_part.fraction is not None
    assert own.seed_part.fraction * own.prepare.users == labelled.prepare.users  # of both, four in five are trained on
