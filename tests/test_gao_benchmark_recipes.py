"""The suites that put Gao et al. (2022) to the test: runs differ in what their labels say, and in nothing else."""

import json
from collections.abc import Mapping

import pytest
from tests.benches import changed, runs_of, settings

from sottovoce.config import Recipe, load_recipe, recipe_names

ROOM = "benchmark/gao/"
REAL = "real-speech-commands"
PRIVATE = ("private", "private-noise", "private-loss", "private-loss-noise")
REPEATED = ("weighting", "weighting-it", "clients", "start", "second-half", "server-pass", REAL, *PRIVATE)
SUITES = (*REPEATED, "learning-rates")
RELEASED = ("utterances", "loss_released", "wer_released")
WEIGHTINGS = (*RELEASED, "loss", "wer")
WEIGHTS = {"federation.privacy.weighting", "federation.shared_dev"}
# What was tried, and which run has what was chosen.
RATES = {
    "user": ("clients", "user-k20", "federation.local.lr"),
    "silo": ("clients", "silo", "federation.local.lr"),
    "scratch": ("start", "scratch-fedavg", "federation.local.lr"),
    "fedadam": ("start", "scratch-fedadam", "federation.server.schedule.lr"),
}
WARM_UP, REAL_WARM_UP = {"most_utterances_share": 0.5}, {"fraction": 0.02}


def runs(suite: str) -> Mapping[str, Recipe]:
    return runs_of(ROOM + suite)


def all_runs() -> list[tuple[str, Recipe]]:
    return [(f"{suite}/{label}", recipe) for suite in SUITES for label, recipe in runs(suite).items()]


def test_every_recipe_of_the_bench_is_a_run_of_a_suite_or_a_warm_up_that_is_started_from() -> None:
    of_suites = {f"{ROOM}{suite}" for suite in SUITES}
    of_suites |= {f"{ROOM}{suite}/{label}" for suite in SUITES for label in runs(suite)}
    started = {recipe.federated.seed_model for _, recipe in all_runs() if recipe.federation is not None} - {None}
    of_rates = {f"{ROOM}learning-rates/{name}" for name in RATES}
    assert {name for name in recipe_names() if name.startswith(ROOM)} - of_suites - of_rates == started


def is_repeat(name: str) -> bool:
    return "-seed" in name


@pytest.mark.parametrize("suite", REPEATED)
def test_every_setting_comes_three_times_and_repeats_differ_in_their_seed_alone(suite: str) -> None:
    found = runs(suite)
    once = [label for label in found if not is_repeat(label)]
    assert {*found} == {*once, *(f"{label}-seed{seed}" for label in once for seed in (2, 3))}
    for label, recipe in found.items():
        setting, _, seed = label.partition("-seed")
        assert recipe.seed == int(seed or 1), label
        assert changed(recipe, found[setting]) == ({"seed"} if seed else set()), label
    assert len({json.dumps(settings(recipe), sort_keys=True) for recipe in found.values()}) == len(found)


def test_federated_runs_start_from_a_warm_up_that_fits_and_that_heard_no_client() -> None:
    for where, recipe in all_runs():
        if recipe.federation is None:
            continue
        warmed = {key: of for key, of in settings(recipe)["data"]["seed_part"].items() if of is not None}
        assert recipe.data.part == "federation", where
        assert warmed == (REAL_WARM_UP if where.startswith(REAL) else WARM_UP), where
        if recipe.federated.seed_model is None:
            warm_up = "warm-up-fr" if where.startswith("learning-rates/") else "warm-up-half-fr"
            assert recipe.tokens.take_from == f"benchmark/gao/{warm_up}", where
            continue
        seed = load_recipe(recipe.federated.seed_model)
        assert recipe.people_seed == seed.people_seed == seed.seed, where
        assert (seed.data.part, seed.data.seed_part) == ("seed", recipe.data.seed_part), where
        assert (seed.data.store, seed.data.prepare) == (recipe.data.store, recipe.data.prepare), where
        assert (seed.model.mu, seed.tokens) == (recipe.model.mu, recipe.tokens), where


def test_the_second_half_is_the_clients_speech_from_where_they_start() -> None:
    found = runs("second-half")
    for label, recipe in (("silo", "silo"), ("user", "user-k20")):
        assert found[label] == runs("clients")[recipe]
        assert found["central"].data == found[label].data
        assert found["central"].training.start_from == found[label].federated.seed_model


def test_clients_train_as_in_the_released_code_but_for_the_rate() -> None:
    for where, recipe in all_runs():
        if recipe.federation is None:
            continue
        local = recipe.federated.local
        assert (local.local_epochs, local.batch_utterances, local.order) == (5, 8, "ascending"), where
        assert (local.optimiser, local.clip_gradients) == ({"name": "sgd"}, 5.0), where
        with_ctc = None if where.startswith("private-loss") else 4
        assert (recipe.model.ctc_epochs, recipe.model.norm) == (with_ctc, "layer"), where


@pytest.mark.parametrize(
    ("suite", "weightings"),
    [
        ("weighting", {"user": WEIGHTINGS, "silo": WEIGHTINGS, "two-users": RELEASED}),
        ("weighting-it", {"user": RELEASED, "silo": RELEASED}),
        (REAL, dict.fromkeys(("user", "silo"), ("utterances", "loss", "wer", "wer_released"))),
    ],
)
def test_weightings_differ_in_weights_alone(suite: str, weightings: Mapping[str, tuple[str, ...]]) -> None:
    found = runs(suite)
    labels = {f"{who}-{how.replace('_', '-')}": (who, how) for who, hows in weightings.items() for how in hows}
    assert {label for label in found if not is_repeat(label)} == {*labels}
    for label, (who, how) in labels.items():
        federation = found[label].federated
        assert federation.privacy.weighting == how
        assert (federation.clients.holdout, federation.test_clients) == (0.1, "all")
        assert changed(found[label], found[f"{who}-utterances"]) <= WEIGHTS


def test_italian_runs_are_the_french_ones_with_other_people() -> None:
    for label, recipe in runs("weighting-it").items():
        other = {"data.store", "data.prepare.language", "federation.seed_model"}
        assert changed(recipe, runs("weighting")[label]) == other


def test_the_extra_pass_is_all_that_differs_from_runs_without() -> None:
    for label, without in (("silo", "silo"), ("user", "user-k20")):
        assert changed(runs("server-pass")[label], runs("clients")[without]) == {"federation.server_pass"}


def test_k_is_all_that_differs_between_cohorts() -> None:
    for k in (5, 10, 40):
        found = runs("clients")[f"user-k{k}"]
        assert found.federated.cohort_size == k
        assert changed(found, runs("clients")["user-k20"]) == {"federation.cohort_size"}


NOISE = "federation.privacy.noise_multiplier"


@pytest.mark.parametrize(
    ("suite", "levels"), [("private", {"none", "low", "high"}), ("private-noise", {"none", "higher", "highest"})]
)
def test_private_runs_pay_the_same_for_either_weighting(suite: str, levels: set[str]) -> None:
    found = runs(suite)
    assert {label.split("-")[1] for label in found} == levels
    for level in levels:
        equal, capped = (found[f"{how}-{level}"] for how in ("equal", "capped"))
        assert changed(capped, equal) == {
            f"federation.privacy.{key}" for key in ("denominator", "weight_cap", "weighting")
        }
        assert changed(equal, runs("private")["equal-none"]) == (set() if level == "none" else {NOISE})


@pytest.mark.parametrize(
    ("suite", "of_weights", "measured"),
    [("private-loss", "private", set()), ("private-loss-noise", "private-noise", {"federation.measure"})],
)
def test_losses_pay_the_same(suite: str, of_weights: str, measured: set[str]) -> None:
    for label, recipe in runs(suite).items():
        loss, _, level = label.partition("-seed")[0].rpartition("-")
        assert recipe.federated.privacy == runs(of_weights)[f"equal-{level}"].federated.privacy, label
        apart = changed(recipe, runs(suite)[f"joint-{level}"]) - {"seed"}
        assert apart == (set() if loss == "joint" else {"federation.seed_model", "model.mu"} | measured), label


def test_rates_that_were_tried_differ_in_the_rate_alone_and_the_chosen_one_is_among_them() -> None:
    tried = runs("learning-rates")
    for name, (suite, label, rate) in RATES.items():
        of_name = {key: recipe for key, recipe in tried.items() if key.startswith(f"{name}-lr")}
        first, *others = of_name.values()
        assert all(changed(other, first) == {rate} for other in others)
        assert any(rate not in changed(recipe, runs(suite)[label]) for recipe in of_name.values())
