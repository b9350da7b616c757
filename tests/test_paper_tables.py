"""Every federated recipe of Pelikan et al. (2025), setting by setting, against the paper's tables.

`golden/pelikan2025.yaml` was read off the paper's text and knows nothing of the recipes but their names. Here both are
put into the paper's own words and compared; how many comparisons there are is held too, so that none can be lost.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from sottovoce.config import Recipe, load_experiment, recipe_names
from sottovoce.federated.client import Proximal
from sottovoce.models.transformer.settings import named_settings, parameter_shapes
from sottovoce.papers.table2 import printed_subsets

ROOM = "pelikan2025/"
TRANSCRIPT = Path(__file__).parent / "golden/pelikan2025.yaml"
SPLITS = ("dev", "test", "dev-clean", "test-clean", "dev-other", "test-other")
NOT_SETTINGS = ("recipe", "settings", *SPLITS)
OPTIMIZERS = {"lamb": "LAMB", "lars": "LARS", "adam": "Adam", "adagrad": "AdaGrad", "sgd": "SGD"}
LIBRISPEECH = {
    ("train-clean-100",): "LS-100",
    ("train-clean-360", "train-other-500"): "LS-860",
    ("train-clean-100", "train-clean-360", "train-other-500"): "LS-960",
}


class Comparison(NamedTuple):
    recipe: str
    place: str
    what: str
    printed: Any
    found: Any

    @property
    def agrees(self) -> bool:
        # Printed to two digits at least, and S/K not always rounded to the nearest.
        tolerance = 0.01 if self.what == "q" else 1e-9
        if isinstance(self.printed, (int, float)) and isinstance(self.found, (int, float)):
            return math.isclose(self.found, self.printed, rel_tol=tolerance)
        return bool(self.printed == self.found)


@cache
def transcript() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(TRANSCRIPT.read_text(encoding="utf-8"))
    return found


@cache
def recipes() -> Mapping[str, Recipe]:
    """All recipes of the paper, without the room's name."""
    found = {name.removeprefix(ROOM): load_experiment(name) for name in recipe_names() if name.startswith(ROOM)}
    return {name: recipe for name, recipe in found.items() if isinstance(recipe, Recipe)}


def in_the_papers_words(recipe: Recipe) -> dict[str, Any]:
    """What a federated recipe sets, under the names that the transcript has."""
    run, paper = recipe.federated, recipe.paper
    assert paper is not None
    assert paper.population_size is not None
    local, server, privacy = run.local, run.server, run.privacy
    masks, schedule, optimiser = local.spec_augment, server.schedule, server.optimiser
    assert recipe.model.layers is None
    assert recipe.model.width is None
    return {
        "seed": seed_words(run.seed_model),
        "data": data_words(recipe),
        "S": run.cohort_size,
        "K": paper.population_size,
        "q": run.cohort_size / paper.population_size,
        "T": run.steps,
        "local epochs": local.local_epochs,
        "local steps": local.local_steps,
        "batch seconds": local.batch_seconds,
        "local optimizer": OPTIMIZERS[local.optimiser["name"]],
        "local LR": local.lr,
        "local gradient norm": local.clip_gradients,
        "mu": 0 if local.proximal is None else local.proximal.mu,
        "SpecAugment": masks is not None,
        "SpecAugment from step": local.spec_augment_from,
        "frequency masks": masks and [masks.frequency_masks, masks.frequency_width],
        "time masks": masks and [masks.time_masks, masks.time_width, masks.time_ratio],
        "IID": run.clients.rule == "iid_uniform",
        "optimizer": OPTIMIZERS[optimiser["name"]],
        "LAMB": [optimiser.get(key) for key in ("b1", "b2", "eps", "weight_decay")],
        "LR": schedule["lr"],
        "schedule": schedule["name"],
        "decay from": schedule.get("transition_begin"),
        "transition steps": schedule.get("transition_steps"),
        "decay rate": schedule.get("decay_rate"),
        "warmup": schedule.get("warmup_steps", 0),
        **shape(recipe.model.size),
        "LayerNorm": recipe.model.norm,
        "dropout": recipe.model.dropout,
        "layer drop": recipe.model.layer_drop,
        "positions": recipe.model.positions.upper(),
        "sigma": (privacy.sigma_dp or 0.0) * 1e6,
        "C": privacy.clip_bound,
        "clipping": str(privacy.share),
        "delta": privacy.delta,
        "noise on": noise_words(recipe),
        "alpha": sorted(set(privacy.alpha.values())),
    }


@cache
def shape(size: str) -> dict[str, int]:
    """How large a model is."""
    model = named_settings(size, tokens=30)
    widest, _ = parameter_shapes(model)["blocks.00.mlp.hidden.weight"]
    return {"layers": model.layers, "embedding": model.width, "MLP": widest, "heads": model.heads}


def seed_words(seed_model: str | None) -> str:
    """LS-100 of central/ls-100, CV-en-10 of central/cv-en-10, LS-100 (30 steps), LS-100 (deep)."""
    if seed_model is None:
        return "none"
    name = seed_model.removeprefix(ROOM)
    if match := re.fullmatch(r"central/ls-100-undertrained-(\d+)", name):
        return f"LS-100 ({match[1]} steps)"
    if match := re.fullmatch(r"table21/seed-(\w+)", name):
        return f"LS-100 ({match[1]})"
    corpus, _, rest = name.removeprefix("central/").partition("-")
    return f"{corpus.upper()}-{rest}"


def data_words(recipe: Recipe) -> str:
    if recipe.data.store == "librispeech":
        return LIBRISPEECH[recipe.data.train]
    assert recipe.data.train == ("train",)
    whole = "CV" + recipe.data.store.removeprefix("commonvoice")
    if recipe.data.seed_part is None:
        return whole
    assert recipe.data.part == "federation"
    assert recipe.data.seed_part.fraction is not None
    return f"{whole}-{100 - round(100 * recipe.data.seed_part.fraction)}"


def noise_words(recipe: Recipe) -> list[Any]:
    """Which groups have another share of the noise, and what all others have."""
    scope = recipe.federated.privacy.noise_scope
    return ["all", 1.0] if scope is None else [*(word for pair in scope.factors.items() for word in pair), scope.others]


def printed_rows(place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The runs of a place: the recipe, and all that the paper says of it there."""
    table = transcript()["places"][place]
    for cells in table["runs"]:
        *row, ours = cells if isinstance(cells[-1], dict) else [*cells, {}]
        own = dict(zip(table["columns"], row, strict=True)) | ours.get("meant", {})
        said = table.get("says", {}) | own
        corpus = transcript()["corpora"][said["data"][:2]]
        settings = said.pop("settings", "without a seed" if said["seed"] == "none" else "with a seed")
        expected = transcript()["everywhere"] | corpus["always"] | corpus[settings] | said
        if not expected["SpecAugment"]:
            expected |= {"frequency masks": None, "time masks": None}
        # What was tuned for each run, or each run with another optimiser or schedule than the usual one, is not told.
        if place == "Table 7" or (expected["optimizer"], expected["schedule"]) != ("LAMB", "exponential"):
            expected = {key: value for key, value in expected.items() if key not in table["tuned"]}
        yield (
            str(expected.pop("recipe")),
            {key: value for key, value in expected.items() if value is not None or key in own},
        )


def wer_found(recipe: Recipe, place: str, split: str) -> float | None:
    """The recipe's WER; where it says that this table prints another one, that."""
    assert recipe.paper is not None
    for part in recipe.paper.place.split("; "):
        otherwise = re.match(rf"{place.partition(',')[0]}\b.*prints ([\d.]+) and ([\d.]+)", part)
        if otherwise:
            return float(otherwise[1 + ("dev", "test").index(split)])
    return None if recipe.paper.unverified else recipe.paper.wer.get(split)


def compared(place: str, change: Callable[[Recipe], Recipe] = lambda recipe: recipe) -> Iterator[Comparison]:
    """Every comparison of a place's runs with their recipes, which may be changed first."""
    for name, expected in printed_rows(place):
        recipe = change(recipes()[name])
        found = in_the_papers_words(recipe)
        for what, printed in expected.items():
            ours = wer_found(recipe, place, what) if what in SPLITS else found[what]
            yield Comparison(name, place, what, printed, ours)


def compared_epsilons(place: str) -> Iterator[Comparison]:
    """The ε that a place prints for a noise, with each recipe of the place that has it."""
    table = transcript()["places"][place]
    own = [(name, expected) for name, expected in printed_rows(place) if expected["sigma"]]
    for cells in table.get("epsilons", ()):
        z, sigma, clip, cohort, population, rate, steps, epsilon, _, *ours = cells
        meant = {"T": steps, "sigma": sigma, "epsilon": epsilon} | (ours[0]["meant"] if ours else {})
        yield Comparison("", place, "z", z, meant["sigma"] * 1e-6 * cohort)
        yield Comparison("", place, "q", rate, cohort / population)
        for name, expected in own:
            if expected["sigma"] != meant["sigma"] or population % expected["K"]:
                continue
            privacy = recipes()[name].federated.privacy
            planned = {(at.population_size, at.cohort_size): at for at in privacy.extrapolate}
            at = planned.get((population, cohort))
            yield Comparison(name, place, f"T at K = {population}", meant["T"], at and at.steps)
            yield Comparison(name, place, f"epsilon at K = {population}", meant["epsilon"], at and at.paper_epsilon)
            yield Comparison(name, place, "C", clip, privacy.clip_bound)


def central_recipe(seed: str, data: str) -> Recipe:
    """The one central run on `data` that starts from `seed`, with the paper's batch."""
    found = [
        recipe
        for name, recipe in recipes().items()
        if recipe.central is not None
        and not re.search(r"undertrained|batch-3x|post-norm|again|table21|released", name)
        and seed_words(recipe.central.start_from) == seed
        and central_data(recipe) == data
    ]
    assert len(found) == 1, f"{len(found)} central recipes on {data} from {seed}"
    return found[0]


def central_data(recipe: Recipe) -> str:
    if recipe.data.part != "seed":
        return data_words(recipe)
    assert recipe.data.seed_part is not None
    assert recipe.data.seed_part.fraction is not None
    return f"CV{recipe.data.store.removeprefix('commonvoice')}-{round(100 * recipe.data.seed_part.fraction):02}"


def compared_central(place: str) -> Iterator[Comparison]:
    """The columns of seed models before federated training, and of central training."""
    table = transcript()["places"][place]
    splits = [column for column in table["columns"] if column in SPLITS]
    elsewhere = table.get("table 3 prints", {})
    for seed, printed in table.get("seeds", {}).items():
        undertrained = re.fullmatch(r"LS-100 \((\d+) steps\)", seed)
        recipe = recipes()[f"central/ls-100-undertrained-{undertrained[1]}"] if undertrained else None
        recipe = recipe or central_recipe("none", seed)
        of_store = f"{'librispeech' if 'dev-clean' in printed else 'commonvoice-en'}:"
        for split, value in (printed | elsewhere.get(seed, {})).items():
            assert recipe.paper is not None
            found = recipe.paper.wer.get(split, recipe.paper.wer.get(of_store + split))
            yield Comparison(f"seed {seed}", place, split, value, found)
    for cells in table.get("central", ()):
        seed, data, *rest = cells
        *wers, ours = rest if isinstance(rest[-1], dict) else [*rest, {}]
        recipe = central_recipe(seed, data)
        assert recipe.paper is not None
        for split, value in (dict(zip(splits, wers, strict=True)) | ours.get("meant", {})).items():
            yield Comparison(f"central {data} from {seed}", place, split, value, recipe.paper.wer[split])
    for name, wers in table.get("others", {}).items():
        paper = recipes()[name].paper
        assert paper is not None
        for split, value in zip(splits, wers, strict=True):
            yield Comparison(name, place, split, value, paper.wer[split])


@cache
def everything() -> tuple[Comparison, ...]:
    return tuple(
        comparison
        for place in transcript()["places"]
        for kind in (compared, compared_epsilons, compared_central)
        for comparison in kind(place)
    )


def test_every_recipe_sets_what_the_paper_prints() -> None:
    assert [comparison for comparison in everything() if not comparison.agrees] == []


def test_every_federated_recipe_is_compared_and_no_comparison_is_lost() -> None:
    federated = {name for name, recipe in recipes().items() if recipe.federation is not None}
    assert {name for place in transcript()["places"] for name, _ in printed_rows(place)} == federated
    assert len(federated) == 359
    assert len(everything()) == 16_625


@pytest.mark.parametrize(
    ("seed", "data"), [("none", "LS-960"), ("CV-en", "LS-960"), ("none", "CV-en"), ("LS-100", "CV-en")]
)
def test_the_sweeps_of_appendix_g4_span_the_ranges_that_were_tuned(seed: str, data: str) -> None:
    """Together with the chosen run of Table 3 or 4, and one setting away from it at a time."""
    (chosen,) = (
        recipe
        for name, recipe in recipes().items()
        if re.fullmatch(r"table0[34]/.*-s8", name) and found_data(recipe) == (seed, data)
    )
    runs = [recipe for name, recipe in recipes().items() if name.startswith("appendix-g4/")]
    words = [in_the_papers_words(recipe) for recipe in [chosen, *runs] if found_data(recipe) == (seed, data)]
    for what, printed in transcript()["places"]["Appendix G.4"]["ranges"].items():
        tried = {each[what] for each in words}
        assert tried == set(printed) if what == "schedule" else [min(tried), max(tried)] == printed
    for each in words[1:]:
        assert sum(each[what] != words[0][what] for what in ("LR", "local LR", "schedule", "S")) == 1


def found_data(recipe: Recipe) -> tuple[str, str]:
    return seed_words(recipe.federated.seed_model), data_words(recipe)


def test_the_subsets_of_stats_and_the_recipes_populations_are_table_2s() -> None:
    printed = transcript()["speakers"]
    assert len(printed) == 16
    rows = {name: row["paper"] for corpus in printed_subsets().values() for name, row in corpus.items()}
    assert rows == printed
    for name, recipe in recipes().items():
        if recipe.federation is not None:
            assert recipe.paper is not None
            data = re.sub(r"^CV-(..)", r"CV-\1-train", data_words(recipe))
            assert recipe.paper.population_size == printed[data][1], name


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """A copy with other settings of its federated training."""
    return recipe.model_copy(update={"federation": recipe.federated.model_copy(update=changes)})


def changed_locally(recipe: Recipe, **changes: Any) -> Recipe:
    return changed(recipe, local=replace(recipe.federated.local, **changes))


def longer(recipe: Recipe) -> Recipe:
    """One more local step, or epoch, whichever it has."""
    local = recipe.federated.local
    if local.local_steps is not None:
        return changed_locally(recipe, local_steps=local.local_steps + 1)
    return changed_locally(recipe, local_epochs=(local.local_epochs or 0) + 1)


def faster(recipe: Recipe) -> Recipe:
    server = recipe.federated.server
    return changed(recipe, server=replace(server, schedule={**server.schedule, "lr": 1.5 * server.schedule["lr"]}))


class Planted(NamedTuple):
    change: Callable[[Recipe], Recipe]
    seen_in: set[str]
    untold: frozenset[str] = frozenset()  # what the paper leaves open for whole files of recipes


PLANTED = {
    "S": Planted(
        lambda recipe: changed(recipe, cohort_size=recipe.federated.cohort_size + 1),
        {"S", "q"},
        frozenset({"appendix-g4"}),
    ),
    "LR": Planted(faster, {"LR"}, frozenset({"table07"})),
    "mu": Planted(lambda recipe: changed_locally(recipe, proximal=Proximal(mu=0.5)), {"mu"}),
    "T": Planted(
        lambda recipe: changed(recipe, steps=recipe.federated.steps + 1),
        {"T"},
        frozenset({"appendix-h3", "appendix-h5"}),
    ),
    "local steps": Planted(longer, {"local steps", "local epochs"}, frozenset({"table07"})),
    "batch": Planted(lambda recipe: changed_locally(recipe, batch_seconds=240.0), {"batch seconds"}),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_change_planted_in_any_recipe_is_seen(what: str) -> None:
    """One setting at a time, in a copy of each: seen wherever the paper tells that setting, and nothing else is."""
    planted = PLANTED[what]
    disagreements = [
        comparison
        for place in transcript()["places"]
        for comparison in compared(place, planted.change)
        if not comparison.agrees
    ]
    assert {comparison.what for comparison in disagreements} <= planted.seen_in
    unseen = {name for name, recipe in recipes().items() if recipe.federation is not None}
    unseen -= {comparison.recipe for comparison in disagreements}
    assert {name.split("/")[0] for name in unseen} == planted.untold


if __name__ == "__main__":  # python -m tests.test_paper_tables: the audit in figures
    for at in transcript()["places"]:
        of_place = [comparison for comparison in everything() if comparison.place == at]
        print(f"{at}: {len(of_place):,} compared, {sum(not one.agrees for one in of_place)} disagree")
    print(f"in all {len(everything()):,}, of {len({one.recipe for one in everything() if '/' in one.recipe})} recipes")
