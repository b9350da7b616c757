"""The benchmark's suites: every run fits, differs from its neighbours in what its label says, and in nothing else."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.benches import without_removed_keys

from sottovoce.config import Recipe, Suite, as_yaml, load_experiment, load_recipe, recipe_names
from sottovoce.flat.layout import match_groups
from sottovoce.models.transformer.settings import parameter_kind, parameter_shapes
from sottovoce.privacy.stated import remove_epsilon
from sottovoce.report.archives import open_path
from sottovoce.training.parent_model import find_parent_model

ROOM = "benchmark/"
SUITES = (
    *("clipping", "clipping-imbalanced", "clipping-lars", "learning-rates", "imbalance", "clip-or-normalise"),
    *("seeds", "cohort", "iid", "server", "local", "noise-groups", "size", "language", "best-parts", "mechanisms"),
)
CPU_SUITES = (
    *("cpu/imbalance", "cpu/imbalance-lr", "cpu/seeds", "cpu/cohort", "cpu/iid"),
    *("cpu/server", "cpu/local", "cpu/noise-groups", "cpu/size", "cpu/language", "cpu/whole"),
)
SHARES = ("global", "uniform", "dim")
REPEATED = {"clipping": "", "clipping-imbalanced": "imbalanced-", "clipping-lars": "lars-"}
MODES = {"no-noise", *SHARES, "uniform-normalised", "dim-normalised"}
RATE = "federation.server.schedule.lr"
KEPT = Path(__file__).parent.parent / "results"
OF_GUIDES = re.compile("demo|guide-")  # tests/benchmarks/test_passages.py


@cache
def runs(suite: str) -> Mapping[str, Recipe]:
    loaded = load_experiment(ROOM + suite)
    assert isinstance(loaded, Suite)
    return {label: load_recipe(run.recipe, run.overrides) for label, run in loaded.runs.items()}


def all_runs(suites: Sequence[str] = (*SUITES, *CPU_SUITES)) -> list[tuple[str, str, Recipe]]:
    return [(suite, label, recipe) for suite in suites for label, recipe in runs(suite).items()]


def base_of(suite: str) -> Recipe:
    """The run without privacy that the runs of `suite` are variants of."""
    return load_recipe(ROOM + ("cpu/" if suite in CPU_SUITES else "") + "clipping/no-noise")


def settings(recipe: Recipe) -> str:
    """All that decides how a run goes."""
    return json.dumps(recipe.model_dump(mode="json", exclude={"about", "paper"}), sort_keys=True)


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """The settings in which two dumped recipes differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            yield from differences(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))
    elif one != other:
        yield path


def changed(recipe: Recipe, base: Recipe) -> set[str]:
    return {*differences(json.loads(settings(recipe)), json.loads(settings(base)))}


REMOVED = {("real-had", "denoised")}  # kept runs of a feature that was removed


@pytest.mark.parametrize("suite", [*SUITES, *CPU_SUITES])
def test_no_two_runs_of_a_suite_are_the_same(suite: str) -> None:
    assert len({settings(recipe) for recipe in runs(suite).values()}) == len(runs(suite))


def test_all_start_from_a_seed_that_fits_and_train_the_same_clients() -> None:
    for suite, label, recipe in all_runs():
        where = f"{suite}/{label}"
        clients = base_of(suite).data
        french = suite in ("language", "cpu/language")
        assert recipe.data.part == "federation", where
        assert recipe.data.seed_part == clients.seed_part, where
        assert (recipe.data.store == clients.store) is not french, where
        if recipe.federated.seed_model is None:
            continue
        people_seed = recipe.seed if suite == "cpu/whole" else load_recipe(recipe.federated.seed_model).seed
        parent = find_parent_model(recipe, runs=Path("runs"))
        assert parent is not None
        seed = parent.recipe
        assert seed is not None
        # One model for all repeats, or one for each.
        assert recipe.people_seed == seed.people_seed == seed.seed == people_seed, where
        assert seed.model == recipe.model, where
        if seed.data.store == recipe.data.store:
            assert (seed.data.part, seed.data.seed_part) == ("seed", recipe.data.seed_part), where
            assert seed.data.prepare == recipe.data.prepare, where


@pytest.mark.parametrize(("room", "suites"), [(ROOM, SUITES), (f"{ROOM}cpu/", CPU_SUITES)])
def test_every_seed_is_started_from(room: str, suites: Sequence[str]) -> None:
    seeds = {name for name in recipe_names() if name.startswith(f"{room}seed") and name != f"{room}seeds"}
    assert {recipe.federated.seed_model for _, _, recipe in all_runs(suites)} - {None} == seeds


def test_learning_rates_end_with_the_rounds() -> None:
    """Nobody who changes one forgets the other."""
    for suite, label, recipe in all_runs():
        assert recipe.federated.server.schedule["total_steps"] == recipe.federated.steps, f"{suite}/{label}"


def test_small_figures_are_runs_of_their_own_whose_seeds_fit() -> None:
    found = runs("figures")
    assert len({settings(recipe) for recipe in found.values()}) == len(found)
    for label, recipe in found.items():
        if recipe.federation is None:
            continue
        assert recipe.federated.server.schedule["total_steps"] == recipe.federated.steps, label
        if recipe.federated.seed_model is not None:
            assert load_recipe(recipe.federated.seed_model).model == recipe.model, label


def test_all_noise_is_the_same_but_for_the_candidates() -> None:
    everywhere: set[float] = set()
    candidates: set[float] = set()
    for suite, label, recipe in all_runs(SUITES):
        privacy = recipe.federated.privacy
        assert suite == "clip-or-normalise" or privacy.clip_bound in (0.01, math.inf), label
        if privacy.sigma_dp is not None:
            (candidates if suite == "best-parts" else everywhere).add(privacy.sigma_dp)
    (noise,) = everywhere
    assert min(candidates) == noise
    at_cpu_scale = {recipe.federated.privacy.sigma_dp for _, _, recipe in all_runs(CPU_SUITES)} - {None}
    assert len(at_cpu_scale) == 1


@pytest.mark.parametrize("suite", REPEATED)
def test_ways_of_clipping_differ_in_clipping_alone_and_come_three_times(suite: str) -> None:
    found = runs(suite)
    once = {"global-normalised"} | ({"no-noise-clipped"} if suite == "clipping" else set())
    assert {*found} == {*MODES, *once, *(f"{mode}-seed{seed}" for mode in MODES for seed in (2, 3))}
    for label, recipe in found.items():
        mode, _, seed = label.partition("-seed")
        assert recipe.seed == int(seed or 1)
        assert changed(recipe, found[mode]) == ({"seed"} if seed else set())
        others = changed(found[mode], found["global"])
        assert all(key.startswith("federation.privacy.") for key in others - {RATE})
        privacy = recipe.federated.privacy
        if mode.startswith("no-noise"):
            assert (privacy.sigma_dp, privacy.noise_multiplier) == (None, None)
        else:
            assert RATE not in others
            share, _, normalised = mode.partition("-")
            assert (privacy.share, privacy.normalise) == (share, "always" if normalised else "never")


def test_the_tables_of_clipping_are_the_same_but_for_what_they_start_from() -> None:
    for label, recipe in runs("clipping-imbalanced").items():
        assert changed(recipe, runs("clipping")[label]) == {"federation.rescale_norms"}
    for label, recipe in runs("clipping-lars").items():
        assert changed(recipe, runs("clipping")[label]) - {RATE} == {"federation.seed_model"}


@pytest.mark.parametrize(("suite", "prefix"), REPEATED.items())
def test_rates_are_the_best_of_those_tried_with_a_worse_one_on_either_side(suite: str, prefix: str) -> None:
    tried, kept = runs("learning-rates"), open_path(KEPT / "learning-rates.zip")
    for mode in MODES:
        table = runs(suite)[mode]
        rates = {}
        for label, recipe in tried.items():
            if not label.startswith(f"{prefix}{mode}-lr"):
                continue
            assert changed(recipe, table) <= {RATE}
            wer = json.loads((kept / label / "results.json").read_text())["model"]["dev_wer"]
            rates[recipe.federated.server.schedule["lr"]] = wer
        chosen = table.federated.server.schedule["lr"]
        assert rates[chosen] == min(rates.values())
        assert min(rates) < chosen < max(rates)
        assert sorted(rates) == pytest.approx([min(rates) * 2**k for k in range(len(rates))])


def test_mechanisms_differ_in_how_noise_is_correlated_at_one_epsilon_and_come_three_times_at_two_rates() -> None:
    found, private = runs("mechanisms"), "federation.privacy."
    kinds = {"independent": set(), "banded": {f"{private}mechanism"}, "blt": {f"{private}mechanism"}}
    assert {*found} == {
        f"{kind}{lr}{seed}" for kind in kinds for lr in ("", "-lr2") for seed in ("", "-seed2", "-seed3")
    }
    like = load_recipe(f"{ROOM}clipping/uniform")
    assert changed(found["independent"], like) == {f"{private}sigma_dp", f"{private}target_epsilon"}
    rate = like.federated.server.schedule["lr"]
    for label, recipe in found.items():
        kind, _, seed = label.removesuffix("-lr2").replace("-lr2-", "-").partition("-seed")
        assert recipe.seed == int(seed or 1)
        assert recipe.federated.server.schedule["lr"] == rate * (2 if "-lr2" in label else 1)
        others = changed(recipe, found["independent"]) - {"seed", RATE}
        # A BLT takes groups whole, and 1,900 people make fifteen of 126 or 127.
        assert others == kinds[kind] | ({"federation.cohort_size"} if kind == "blt" else set())
        assert abs(recipe.federated.cohort_size - like.federated.cohort_size) <= 1


@pytest.mark.parametrize("room", ["", "cpu/"])
def test_parts_change_the_papers_recipe_and_the_best_is_one_of_them(room: str) -> None:
    """A candidate's privacy can be compared only if its δ is that of the others."""
    paper, parts = load_recipe(f"{ROOM}{room}clipping/dim"), runs(f"{room}best-parts")
    for label, recipe in parts.items():
        assert all(key.startswith("federation.") for key in changed(recipe, paper) - {"seed"}), label
        assert recipe.federated.privacy.delta == paper.federated.privacy.delta, label
    assert settings(load_recipe(f"{ROOM}{room}best")) in {settings(recipe) for recipe in parts.values()}


@pytest.mark.parametrize("archive", sorted(path.name for path in KEPT.glob("*.zip") if not OF_GUIDES.match(path.name)))
def test_kept_runs_are_those_of_the_recipes_and_all_of_them(archive: str) -> None:
    suite = re.sub("^(cpu|gao|ramesh)-", r"\1/", archive.removesuffix(".zip"))
    folder = open_path(KEPT / archive)
    labels = {path.name for path in folder.iterdir() if path.is_dir()}  # audits lie beside
    assert {label for label in labels if (suite, label.partition("-")[0]) not in REMOVED} == {*runs(suite)}
    for label, recipe in runs(suite).items():
        kept = without_removed_keys((folder / label / "config.yaml").read_text())
        if remove_epsilon(title := yaml.safe_load(kept)["about"]) != title:  # no recipe is called that any more
            recipe = recipe.model_copy(update={"about": title})
        assert kept == as_yaml(recipe), label


@pytest.mark.parametrize("suite", ["noise-groups", "cpu/noise-groups"])
def test_noise_goes_to_the_one_kind_of_parameters_that_the_label_names(suite: str) -> None:
    kinds = {"attention": "attention", "projection": "attention_output", "mlp": "mlp", "layer-norm": "layer_norm"}
    for label, recipe in runs(suite).items():
        share, _, group = label.partition("-")
        privacy = recipe.federated.privacy
        if label == "none":
            assert privacy.sigma_dp is None
            continue
        assert privacy.share == share
        if group == "all":
            assert privacy.noise_scope is None
            continue
        scope = privacy.noise_scope
        assert scope is not None
        names = [*parameter_shapes(recipe.model.settings(tokens=30))]
        factors = [
            scope.others if found is None else scope.factors.get(found, scope.others)
            for found in match_groups(names, scope.groups)
        ]
        noisy = {name for name, factor in zip(names, factors, strict=True) if factor}
        assert noisy == {name for name in names if parameter_kind(name) == kinds[group]}
        assert {*factors} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("suite", "baseline", "others"),
    [("size", (8, 256), ((4, 16), (128, 384))), ("cpu/size", (4, 96), ((2, 8), (64, 144)))],
)
def test_sizes_vary_one_thing_at_a_time(
    suite: str, baseline: tuple[int, int], others: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    shapes = {
        label.rpartition("-")[0] if label.endswith(("global", "uniform")) else label.removesuffix("-no-noise"): (
            recipe.model.settings(tokens=30).layers,
            recipe.model.settings(tokens=30).width,
        )
        for label, recipe in runs(suite).items()
    }
    assert shapes == {
        "baseline": baseline,
        **{f"layers-{layers}": (layers, baseline[1]) for layers in others[0]},
        **{f"width-{width}": (baseline[0], width) for width in others[1]},
    }


def test_the_tables_of_imbalance_differ_in_what_their_labels_say() -> None:
    """A seed of the run changes nothing but itself, and every rate is one of those that were tried."""
    found, tried = runs("cpu/imbalance"), runs("cpu/imbalance-lr")
    own_seed, rescaled = "federation.seed_model", "federation.rescale_norms"
    starts = {"adam": set(), "lars": {own_seed}, "rescaled": {rescaled}, "extreme": {own_seed, rescaled}}
    tuned_as = {"rescaled": "adam", "extreme-no-noise": "lars"}
    for label, recipe in found.items():
        run, _, seed = label.partition("-seed")
        assert recipe.seed == int(seed or 1)
        assert changed(recipe, found[run]) == ({"seed"} if seed else set()), label
        start, _, mode = run.partition("-")
        like = load_recipe(f"{ROOM}cpu/clipping/{mode}")
        assert changed(found[run], like) - {"federation.server.schedule.lr"} == starts[start], label
        rate = f"{recipe.federated.server.schedule['lr']:g}"
        tuned = tuned_as.get(run, tuned_as.get(start, start))
        chosen = tried[f"{tuned}-{mode.replace('global-normalised', 'global')}-lr{rate}"]
        clipping = {"federation.privacy.normalise"} if mode == "global-normalised" else set()
        assert changed(found[run], chosen) - {rescaled} == clipping, label
    repeated = [label for label in found if label.startswith(("adam", "lars")) and "global-normalised" not in label]
    assert all(f"{label.partition('-seed')[0]}-seed3" in found for label in repeated)


def test_whole_repeats_are_the_runs_from_long_trained_seeds_with_other_people() -> None:
    found, shared = runs("cpu/whole"), runs("cpu/imbalance")
    modes = ("no-noise", *SHARES)
    assert {*found} == {f"{mode}{again}" for mode in modes for again in ("", "-seed2", "-seed3")}
    for label, recipe in found.items():
        mode, _, seed = label.partition("-seed")
        whole = {"seed", "data.people_seed"} if seed else set()
        assert recipe.seed == recipe.data.people_seed == int(seed or 1), label
        assert changed(recipe, found[mode]) == whole, label
        assert changed(recipe, shared[f"lars-{mode}"]) == {"federation.evaluate_every", *whole}, label
        assert changed(recipe, shared[f"lars-{label}"]) == {"federation.evaluate_every", *(whole - {"seed"})}, label


# Table 1 of the paper at small scale.


def test_table_1_has_the_papers_cells_three_times_and_differs_in_noise_bound_and_clipping_alone() -> None:
    found = runs("table01")
    once = {label: recipe for label, recipe in found.items() if recipe.seed == 1}
    theirs = [load_recipe(f"pelikan2025/table01/{label}") for label in load_suite("pelikan2025/table01").runs]

    def cells(recipes: Sequence[Recipe]) -> list[tuple[str, float, int]]:
        """Clipping, bound and how much noise, from 0: none."""
        privacy = [recipe.federated.privacy for recipe in recipes]
        noises = sorted({one.sigma_dp or 0.0 for one in privacy})
        return sorted((one.share.value, one.clip_bound, noises.index(one.sigma_dp or 0.0)) for one in privacy)

    assert cells([*once.values()]) == cells(theirs)
    assert len(once) == 17
    assert {*found} == {f"{label}{again}" for label in once for again in ("", "-seed2", "-seed3")}
    base = found["no-noise-clip-1e-2-global"]
    allowed = {f"federation.privacy.{name}" for name in ("share", "sigma_dp", "clip_bound", "extrapolate")}
    for label, recipe in found.items():
        assert changed(recipe, base) <= allowed | ({"seed"} if "-seed" in label else set()), label


def test_table_1_prints_the_papers_number_in_each_cell_and_its_noise_multipliers() -> None:
    printed = {
        load.paper.place: load.paper.wer["test"]
        for load in map(load_cell, load_suite("pelikan2025/table01").runs)
        if load.paper
    }
    for recipe in runs("table01").values():
        assert recipe.paper is not None
        (place,) = [place for place in printed if place.split(";")[0] == recipe.paper.place]
        assert recipe.paper.wer == {"test": printed[place]}
        privacy = recipe.federated.privacy
        for other in privacy.extrapolate:
            assert privacy.sigma_dp is not None
            z = round(privacy.sigma_dp * other.cohort_size, 6)
            assert z in (0.2048, 0.3072, 0.384, 0.512, 0.6144, 1.024, 1.536, 2.048)


def load_suite(name: str) -> Suite:
    loaded = load_experiment(name)
    assert isinstance(loaded, Suite)
    return loaded


def load_cell(label: str) -> Recipe:
    return load_recipe(f"pelikan2025/table01/{label}")
