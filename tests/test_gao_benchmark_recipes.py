"""The suites that put Gao et al. (2022) to the test: runs differ in what their labels say, and in nothing else."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.benches import changed, runs_of, settings

from sottovoce.config import Recipe, load_recipe, recipe_names
from sottovoce.config.sections import Augmentation, PatienceSettings
from sottovoce.training.parent_model import find_parent_model, find_token_parent, list_parents

ROOM = "benchmark/gao/"
REAL = "real-speech-commands"
ON_A_CPU = ("start", "server-pass", "weighting")  # the others wait for a GPU
REPEATED = (*ON_A_CPU, "weighting-loss", "silos", "scratch", "clients", "own-speech", "private", REAL)
SUITES = (*REPEATED, "learning-rates")
FIXED_ROUNDS = ("private", "learning-rates")
WARM_UP, REAL_WARM_UP = f"{ROOM}warm-up-fr", f"{ROOM}{REAL}/warm-up"
SEED_PARTS = {WARM_UP: {"most_utterances_share": 0.5}, REAL_WARM_UP: {"fraction": 0.02}}
# What was tried, and which run has what was chosen.
RATES = {
    "user": ("start", "user", "federation.local.lr"),
    "silo": ("silos", "silo", "federation.local.lr"),
    "scratch": ("scratch", "scratch-fedavg", "federation.local.lr"),
    "fedadam": ("scratch", "scratch-fedadam", "federation.server.schedule.lr"),
}
# By label: the weighting, and on how many shared utterances clients are measured; False: on none.
WEIGHTS: Mapping[str, tuple[str, int | bool | None]] = {
    "loss": ("loss", False),
    "wer-60": ("wer", 60),
    "wer-all": ("wer", None),
    "released-60": ("wer_released", 60),
    "released-all": ("wer_released", None),
}
PACE = {f"federation.{key}" for key in ("steps", "evaluate_every", "checkpoint_every", "patience.least_steps")}


def runs(suite: str) -> Mapping[str, Recipe]:
    return runs_of(ROOM + suite)


def all_runs() -> list[tuple[str, Recipe]]:
    return [(f"{suite}/{label}", recipe) for suite in SUITES for label, recipe in runs(suite).items()]


def federated_runs() -> list[tuple[str, Recipe]]:
    return [(where, recipe) for where, recipe in all_runs() if recipe.federation is not None]


def warm_up_of(where: str) -> str:
    return REAL_WARM_UP if where.startswith(REAL) else WARM_UP


def is_repeat(name: str) -> bool:
    return "-seed" in name


def test_every_recipe_of_the_bench_is_a_run_of_a_suite_or_a_warm_up_that_is_started_from() -> None:
    of_suites = {f"{ROOM}{suite}" for suite in SUITES}
    of_suites |= {f"{ROOM}{suite}/{label}" for suite in SUITES for label in runs(suite)}
    started = {recipe.federated.seed_model for _, recipe in federated_runs()} - {None}
    of_rates = {f"{ROOM}learning-rates/{name}" for name in RATES}
    assert {name for name in recipe_names() if name.startswith(ROOM)} - of_suites - of_rates == started
    assert started == {WARM_UP, REAL_WARM_UP}


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


def test_a_run_starts_from_the_warm_up_of_its_own_seed_but_for_real_voices() -> None:
    """Who are the clients of real voices is drawn, and has to be the same for all."""
    for where, recipe in all_runs():
        people = 1 if where.startswith(REAL) else None
        assert recipe.data.people_seed == people, where
        for parent in list_parents(recipe, runs=Path("runs")):
            assert parent.recipe is not None
            assert parent.recipe.seed == parent.recipe.people_seed == (people or recipe.seed), where
            again = "" if parent.recipe.seed == 1 else f"-seed{recipe.seed}"
            assert parent.folder.name == warm_up_of(where).replace("/", "-") + again, where


def test_federated_runs_start_from_a_warm_up_that_fits_and_that_heard_no_client() -> None:
    for where, recipe in federated_runs():
        name = warm_up_of(where)
        warmed = {key: of for key, of in settings(recipe)["data"]["seed_part"].items() if of is not None}
        assert (recipe.data.part, warmed) == ("federation", SEED_PARTS[name]), where
        from_nothing = "scratch" in where or "fedadam" in where
        expected = (None, name) if from_nothing else (name, None)
        assert (recipe.federated.seed_model, recipe.tokens.take_from) == expected, where
        found = (find_token_parent if from_nothing else find_parent_model)(recipe, runs=Path("runs"))
        assert found is not None
        seed = found.recipe
        assert seed is not None
        assert (seed.data.part, seed.data.seed_part) == ("seed", recipe.data.seed_part), where
        assert (seed.data.store, seed.data.prepare) == (recipe.data.store, recipe.data.prepare), where
        assert (seed.tokens.kind, seed.tokens.size) == (recipe.tokens.kind, recipe.tokens.size), where
        of_model = {key for key in changed(seed, recipe) if key.startswith("model.")}
        assert of_model == {"model.ctc_epochs"}, where


def test_runs_go_on_until_they_have_converged_but_for_those_of_fixed_rounds() -> None:
    for where, recipe in all_runs():
        training = recipe.training if recipe.federation is None else recipe.federated
        if where.startswith(FIXED_ROUNDS):
            assert training.patience is None, where
            continue
        assert isinstance(training.patience, PatienceSettings), where
        assert training.patience.share == 0.2, where
        assert training.steps is not None, where
        assert training.patience.least_steps < training.steps, where
        assert training.evaluate_every < training.patience.least_steps, where
    warm_up = load_recipe(WARM_UP).training.patience
    assert isinstance(warm_up, PatienceSettings)
    assert warm_up.share == 0.2


def test_clients_train_as_in_the_released_code_but_for_the_rate() -> None:
    for where, recipe in federated_runs():
        local = recipe.federated.local
        assert (local.local_epochs, local.batch_utterances, local.order) == (5, 8, "ascending"), where
        assert (local.optimiser, local.clip_gradients) == ({"name": "sgd"}, 5.0), where
        assert (recipe.model.ctc_epochs, recipe.model.norm) == (4, "layer"), where


@pytest.mark.parametrize(("of_silos", "of_users"), [("silos", "start"), (REAL, REAL)])
def test_silos_differ_from_users_in_who_is_a_client_and_in_how_many_rounds_there_are(
    of_silos: str, of_users: str
) -> None:
    silo, user = runs(of_silos)["silo"], runs(of_users)["user"]
    rule = {f"federation.clients.{key}" for key in ("rule", "silos", "balance")}
    assert changed(silo, user) == {*rule, "federation.cohort_size", *PACE}
    clients = silo.federated.clients
    assert (clients.rule, clients.balance) == ("silo", "seconds")
    assert clients.silos == silo.federated.cohort_size == 10  # all in every round
    assert (user.federated.clients.rule, user.federated.cohort_size) == ("speaker", 20)


def test_the_start_has_the_warm_up_and_all_speech_in_one_place_trained_alike() -> None:
    found, everybody = runs("start"), runs("scratch")["central-all"]
    assert {label for label in found if not is_repeat(label)} == {"warm-up", "user"}
    assert found["warm-up"] == load_recipe(WARM_UP)
    assert changed(everybody, found["warm-up"]) == {"data.part", "data.seed_part"}
    assert everybody.data.seed_part is None


@pytest.mark.parametrize(
    ("suite", "labels", "base"),
    [
        ("weighting", {"user-wer-60", "user-released-60"}, "start"),
        ("weighting-loss", {"user-loss"}, "start"),
        ("silos", {f"silo-{how}" for how in WEIGHTS}, "silos"),
        (REAL, {"user-released-60", "silo-released-60"}, REAL),
    ],
)
def test_weightings_differ_in_weights_alone(suite: str, labels: set[str], base: str) -> None:
    found = {label: recipe for label, recipe in runs(suite).items() if not is_repeat(label)}
    assert {*found} - {"user", "silo", "silo-pass"} == labels
    for label in labels:
        who, _, how = label.partition("-")
        weighting, utterances = WEIGHTS[how]
        without, federation = runs(base)[who], found[label].federated
        assert (without.federated.privacy.weighting, without.federated.shared_dev) == ("utterances", None)
        assert federation.privacy.weighting == weighting
        differ = {"federation.privacy.weighting"}
        if utterances is False:
            assert federation.shared_dev is None
        else:
            assert federation.shared_dev is not None
            assert (federation.shared_dev.data, federation.shared_dev.utterances) == (None, utterances)
            differ |= {"federation.shared_dev"}
        assert changed(found[label], without) == differ


def test_the_extra_pass_is_all_that_differs_from_runs_without() -> None:
    found = runs("server-pass")
    assert {label for label in found if not is_repeat(label)} == {"user"}
    for label, recipe in found.items():
        assert changed(recipe, runs("start")[label]) == {"federation.server_pass"}
    assert changed(runs("silos")["silo-pass"], runs("silos")["silo"]) == {"federation.server_pass"}


def test_the_extra_pass_is_one_epoch_of_the_warm_ups_speech_trained_on_as_clients_train() -> None:
    with_pass = {label: recipe for label, recipe in runs("silos").items() if label.startswith("silo-pass")}
    for label, recipe in {**runs("server-pass"), **with_pass}.items():
        local, own = recipe.federated.local, recipe.federated.server_pass
        assert own is not None
        assert (own.data, own.epochs, own.steps) == ("seed", 1, None), label
        for key in ("batch_seconds", "batch_utterances", "order", "optimiser", "clip_gradients"):
            assert getattr(own, key) == getattr(local, key), (label, key)
        assert local.spec_augment is not None, label
        assert own.augment == Augmentation(spec_augment=local.spec_augment), label
        assert own.lr <= local.lr, label


def test_who_is_a_client_or_k_is_all_that_differs_between_clients() -> None:
    found, user = runs("clients"), runs("start")["user"]
    assert {label for label in found if not is_repeat(label)} == {"two-users", *(f"user-k{k}" for k in (2, 5, 10, 40))}
    for k in (2, 5, 10, 40):
        assert found[f"user-k{k}"].federated.cohort_size == k
        assert changed(found[f"user-k{k}"], user) == {"federation.cohort_size"}
    two = found["two-users"]
    assert changed(two, user) == {f"federation.clients.{key}" for key in ("rule", "speakers_per_device")}
    assert (two.federated.clients.rule, two.federated.clients.speakers_per_device) == ("device", 2)


def test_clients_that_are_tested_on_their_own_speech_are_the_same_otherwise() -> None:
    found = runs("own-speech")["user"]
    assert changed(found, runs("start")["user"]) == {"federation.clients.holdout", "federation.test_clients"}
    assert (found.federated.clients.holdout, found.federated.test_clients) == (0.1, "all")


def test_the_second_half_is_the_clients_speech_from_where_they_start() -> None:
    second = runs("scratch")["second-half"]
    assert changed(second, runs("scratch")["central-all"]) == {"data.part", "data.seed_part", "central.start_from"}
    for federated in (runs("silos")["silo"], runs("start")["user"]):
        assert second.data == federated.data
        assert second.training.start_from == federated.federated.seed_model


def test_runs_from_nothing_take_pieces_alone_from_the_warm_up_and_differ_in_their_algorithm() -> None:
    found = runs("scratch")
    names = {"central-all", "second-half", *(f"scratch-{name}" for name in ("fedavg", "fedprox", "fedadam"))}
    assert {label for label in found if not is_repeat(label)} == names
    fedavg, user = found["scratch-fedavg"], runs("start")["user"]
    own = {"federation.seed_model", "tokens.take_from", "federation.local.lr"}
    assert changed(fedavg, user) == own | PACE - {"federation.steps"}
    assert changed(found["scratch-fedprox"], fedavg) == {"federation.local.proximal"}
    server = {f"federation.server.{key}" for key in ("optimiser.name", "optimiser.eps", "schedule.lr")}
    assert changed(found["scratch-fedadam"], fedavg) == {"federation.local.lr", *server}


def test_private_runs_differ_in_noise_alone_and_from_users_in_what_privacy_asks_for() -> None:
    found = runs("private")
    assert {label for label in found if not is_repeat(label)} == {"none", "noise"}
    assert changed(found["noise"], found["none"]) == {"federation.privacy.noise_multiplier"}
    assert found["none"].federated.privacy.noise_multiplier is None
    needed = {f"federation.privacy.{key}" for key in ("sampling", "weighting", "clip_bound", "delta")}
    assert changed(found["none"], runs("start")["user"]) == {*needed, "federation.steps", "federation.patience"}


def test_rates_that_were_tried_differ_in_the_rate_alone_and_the_chosen_one_is_among_them() -> None:
    tried, brief = runs("learning-rates"), {"federation.steps", "federation.patience"}
    assert {label.partition("-lr")[0] for label in tried} == {*RATES}
    for name, (suite, label, rate) in RATES.items():
        of_name = {key: recipe for key, recipe in tried.items() if key.startswith(f"{name}-lr")}
        first, *others = of_name.values()
        assert others
        assert all(changed(other, first) == {rate} for other in others)
        assert all(changed(recipe, runs(suite)[label]) <= {rate, *brief} for recipe in of_name.values())
        assert any(rate not in changed(recipe, runs(suite)[label]) for recipe in of_name.values())
