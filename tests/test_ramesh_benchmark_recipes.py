"""The suites that put Ramesh et al. (2023) to the test: runs differ in what their labels say, and in nothing else."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from tests.benches import changed, runs_of, settings

from sottovoce.config import Recipe, load_recipe
from sottovoce.config.sections import PatienceSettings, SyntheticCorpus
from sottovoce.training.parent_model import find_parent_model

ROOM = "benchmark/ramesh/"
STAGES = f"{ROOM}pretraining/"
SUITES = ("start", "french", "private", "hours", "cohort", "steps")
LEVELS = ("none", "low", "high")
START = {"central.start_from"}
PACE = {f"federation.{key}" for key in ("steps", "evaluate_every", "checkpoint_every")}
CENTRAL_PACE = {f"central.{key}" for key in ("steps", "evaluate_every", "checkpoint_every")}
IN_FRENCH = {"data.store", "data.prepare.language"}


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
    english, french = runs("start")["scratch"], runs("french")["scratch"]
    for where, recipe in all_runs():
        like = french if where.startswith("french/") else english
        assert changed(recipe, like) <= START | {"seed"}, where
    assert changed(french, english) == {*IN_FRENCH, "data.dev", "data.test", "tokens.size"}


def test_fine_tuning_ends_when_it_has_converged_or_after_a_fixed_number_of_steps() -> None:
    for suite in SUITES:
        for label, recipe in runs(suite).items():
            patience = recipe.training.patience
            assert isinstance(patience, PatienceSettings), f"{suite}/{label}"
            assert patience.share == 0.2, f"{suite}/{label}"
            assert (patience.least_steps, recipe.training.steps) == (2000, 12000), f"{suite}/{label}"
    for label, recipe in runs("iban").items():
        own = recipe.training
        assert own.patience is None, label
        assert own.steps == own.schedule["total_steps"] == 1600, label
    for label, recipe in runs("recogniser").items():
        federated = recipe.federated
        assert federated.patience is None, label
        assert federated.steps == federated.server.schedule["total_steps"], label


@pytest.mark.parametrize(
    ("suite", "starts"),
    [
        ("start", {"scratch": None, **{name: name for name in ("federated", "central", "central-epochs")}}),
        (
            "french",  # the seven cells of Table 3
            {
                "scratch": None,
                "direct-central": "central-epochs",
                "direct-federated": "federated",
                "direct-federated-5": "federated-5",
                "continued-central": "fr-central-epochs",
                "continued-federated": "fr-federated",
                "continued-federated-5": "fr-federated-5",
            },
        ),
        ("private", {level: f"private-{level}" for level in LEVELS}),
        ("steps", {name: name for name in ("federated-any", "federated-epochs")}),
        ("hours", {name: name for name in ("federated-5", "central-5-epochs")}),
        ("cohort", {"k6": "federated-k6"}),
    ],
)
def test_labels_say_what_is_started_from(suite: str, starts: Mapping[str, str | None]) -> None:
    found = {label: starts_of(recipe) for label, recipe in runs(suite).items() if "-seed" not in label}
    assert found == {label: None if name is None else STAGES + name for label, name in starts.items()}


def test_french_encoders_continue_those_that_are_started_from_directly() -> None:
    for name in ("central-epochs", "federated", "federated-5"):
        assert starts_of(stage(f"fr-{name}")) == STAGES + name


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
        ("central-epochs", "central", CENTRAL_PACE),
        ("federated-5", "federated", {"data.seed_part", "data.part", "data.people_seed", *PACE}),
        ("central-5-epochs", "central", {"data.seed_part", "data.part", "data.people_seed"}),
        ("federated-k6", "federated", {"federation.cohort_size", *PACE}),
        ("federated-any", "federated", {"federation.local.time_line", *PACE}),
        ("federated-epochs", "federated-any", PACE),
        ("fr-federated", "federated", {*IN_FRENCH, "federation.seed_model"}),
        ("fr-federated-5", "fr-federated", {"federation.seed_model"}),
        ("fr-central-epochs", "central-epochs", {*IN_FRENCH, "central.start_from"}),
        ("private-low", "private-none", {"federation.privacy.noise_multiplier"}),
        ("private-high", "private-none", {"federation.privacy.noise_multiplier"}),
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
    """There are more levels of noise than the encoders have, and none of theirs is missing."""
    levels = [*LEVELS, "mid", "top"]
    assert {label for label in runs("recogniser") if "-seed" not in label} == {*levels}
    for label in levels:
        encoder, recogniser = (
            stage(f"private-{label}" if label in LEVELS else "private-none"),
            runs("recogniser")[label],
        )
        for key in ("store", "prepare", "dev", "test"):
            assert getattr(recogniser.data, key) == getattr(encoder.data, key), (label, key)
        for key in ("sampling", "delta", *(("noise_multiplier",) if label in LEVELS else ())):
            assert getattr(recogniser.federated.privacy, key) == getattr(encoder.federated.privacy, key), (label, key)
        assert recogniser.federated.cohort_size == encoder.federated.cohort_size
        assert changed(recogniser, runs("recogniser")["none"]) <= {"federation.privacy.noise_multiplier"}
    noise = [
        runs("recogniser")[label].federated.privacy.noise_multiplier or 0 for label in ("none", "low", "mid", "high")
    ]
    assert noise == sorted({*noise})
    assert (runs("recogniser")["top"].federated.privacy.noise_multiplier or 0) > noise[-1]


def test_a_recogniser_starts_from_as_many_labelled_speakers_as_the_transducers() -> None:
    own, labelled = load_recipe(f"{ROOM}recogniser/seed").data, runs("start")["scratch"].data
    assert isinstance(own.prepare, SyntheticCorpus)
    assert isinstance(labelled.prepare, SyntheticCorpus)
    assert own.seed_part is not None
    assert own.seed_part.fraction is not None
    assert own.seed_part.fraction * own.prepare.users == labelled.prepare.users  # of both, four in five are trained on
