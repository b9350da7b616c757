"""The recipes of Pelikan et al. (2025): every experiment is there, with the paper's settings and numbers."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from sottovoce.config import Recipe, Suite, load_experiment, recipe_names
from sottovoce.flat.layout import match_groups
from sottovoce.models.transformer.settings import SIZES, named_settings, parameter_kind, parameter_shapes
from sottovoce.optimisers.schedules import ExponentialDecay
from sottovoce.papers.paper_tables import PaperRow, paper_rows
from sottovoce.privacy.planner import plan_run
from sottovoce.privacy.pld import QUICK

ROOM = "pelikan2025/"
README = Path(str(resources.files("sottovoce"))) / "recipes/pelikan2025/README.md"
GOLDEN = Path(__file__).parent / "golden/epsilon.yaml"

# Every table and figure of the paper that reports training runs, and what the text alone tells of.
TABLES, FIGURES = {1, *range(3, 22)}, {6, 10, 15, 16}
SECTIONS = {"Section 4.3", "Appendix G.4", "Appendix H.3", "Appendix H.5"}
# Runs of which the paper prints no number.
UNPRINTED = ("figure", "appendix", "section", "table13-mu")

SHARES = ("global", "uniform", "dim")
# The tables that `paper_tables.yaml` holds, and the seed of the runs in each, by population.
PRINTED = {
    "table1": {34_753: "central/ls-100"},
    "table17": {34_753: "central/ls-100"},
    "table18": {6_171: "central/cv-fr-10", 6_415: "central/cv-de-10"},
    "table20": {34_753: "central/ls-960"},
}


@cache
def recipes() -> dict[str, Recipe]:
    """All recipes of the paper, without the room's name."""
    found = {name.removeprefix(ROOM): load_experiment(name) for name in recipe_names() if name.startswith(ROOM)}
    return {name: recipe for name, recipe in found.items() if isinstance(recipe, Recipe)}


def federated() -> dict[str, Recipe]:
    return {name: recipe for name, recipe in recipes().items() if recipe.federation is not None}


def references(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The tables and figures that a recipe reproduces something of: ("Table 4", "seed none, CV-en, S = 8")."""
    assert recipe.paper is not None
    for part in recipe.paper.place.split("; "):
        match = re.fullmatch(r"(Table|Figure|Appendix|Section)s? ([A-Z0-9.]+)(?: and (\d+))?(?:, (.+))?", part)
        assert match, f"{part!r} does not say which table or figure"
        kind, *numbers, cell = match.groups()
        for number in filter(None, numbers):
            yield f"{kind} {number}", cell or ""


def settings(recipe: Recipe) -> str:
    """All that decides how a run goes."""
    return json.dumps(recipe.model_dump(mode="json", exclude={"about", "paper"}), sort_keys=True)


def test_every_table_and_figure_has_recipes() -> None:
    named = {place for recipe in federated().values() for place, _ in references(recipe)}
    expected = {f"Table {number}" for number in TABLES} | {f"Figure {number}" for number in FIGURES}
    assert named == expected | SECTIONS


def place_of(file: str) -> str:
    """What a file is called after: "Table 4" for table04, "Section 4.3" for section-4-3."""
    match = re.fullmatch(r"(table|figure)0?(\d+)(?:-\w+)?|(section|appendix)-(\w)-?(\d)", file)
    assert match, file
    numbered, number, kind, part, section = match.groups()
    return f"{numbered.capitalize()} {number}" if numbered else f"{kind.capitalize()} {part.upper()}.{section}"


def test_recipes_lie_in_the_file_of_a_place_that_they_name() -> None:
    for name, recipe in federated().items():
        assert place_of(name.split("/")[0]) in {place for place, _ in references(recipe)}, name


def test_every_place_is_a_suite_of_all_its_federated_runs() -> None:
    cells = Counter(name.split("/")[0] for name in federated())
    for file, count in cells.items():
        suite = load_experiment(ROOM + file)
        assert isinstance(suite, Suite)
        assert suite.paper is not None
        assert suite.paper.place == place_of(file)
        assert {f"{file}/{label}" for label in suite.runs} == {n for n in federated() if n.startswith(f"{file}/")}
        assert len(suite.runs) == count
    assert len(cells) == len(TABLES) + 1 + len(FIGURES) + len(SECTIONS)  # Table 13 has two


def test_no_two_recipes_are_the_same_run_or_look_the_same() -> None:
    assert [same for same in Counter(map(settings, recipes().values())).values() if same > 1] == []
    assert [about for about, count in Counter(r.about for r in recipes().values()).items() if count > 1] == []


@pytest.mark.parametrize("name", federated())
def test_numbers_are_word_error_rates_of_places_that_the_run_is_tested_on(name: str) -> None:
    recipe = recipes()[name]
    assert recipe.paper is not None
    wer = recipe.paper.wer
    assert set(wer) == (set() if name.startswith(UNPRINTED) else set(recipe.data.test))
    assert all(0 < value < 100 and round(value, 1) == value for value in wer.values())


@pytest.mark.parametrize("name", federated())
def test_seed_models_are_recipes_that_fit_and_have_not_heard_the_clients(name: str) -> None:
    recipe = recipes()[name]
    if recipe.federated.seed_model is None:
        return
    seed = recipes()[recipe.federated.seed_model.removeprefix(ROOM)]
    assert seed.central is not None
    assert (seed.model.size, seed.model.norm, seed.seed) == (recipe.model.size, recipe.model.norm, recipe.seed)
    if seed.data.store == recipe.data.store and not set(seed.data.train).isdisjoint(recipe.data.train):
        assert (seed.data.part, recipe.data.part) == ("seed", "federation")
        assert seed.data.seed_part == recipe.data.seed_part


# Read off the paper once more, one cell at least of each table: the recipe, its WER on the last of its test sets, and
# what makes it this cell.
CELLS: list[tuple[str, float, dict[str, Any]]] = [
    ("table01/sigma-3e-6-dim", 20.4, {"privacy.sigma_dp": 3e-6, "privacy.share": "dim", "steps": 2006}),
    ("table01/sigma-3e-6-global", 31.1, {"privacy.share": "global", "privacy.clip_bound": 0.01, "cohort_size": 1024}),
    ("table01/sigma-1e-5-uniform", 25.0, {"privacy.share": "uniform", "local.local_steps": 10}),
    ("table01/no-noise-clip-1-uniform", 18.9, {"privacy.sigma_dp": None, "privacy.clip_bound": 1.0, "steps": 2000}),
    ("table03/ls-960-s64", 8.8, {"seed_model": None, "local.lr": 0.4, "local.batch_seconds": 360}),
    ("table03/ls-860-from-ls-100-s8", 9.0, {"seed_model": "pelikan2025/central/ls-100", "local.lr": 0.2}),
    ("table04/cv-en-s256", 25.7, {"cohort_size": 256, "local.local_epochs": 10, "local.batch_seconds": 120}),
    ("table04/cv-en-from-ls-100-s256", 18.9, {"steps": 2000, "local.clip_gradients": 1.0}),
    ("table05/ls-960-from-cv-en-s16-iid", 8.4, {"clients.rule": "iid_uniform", "cohort_size": 16}),
    ("table06/cv-en-from-ls-100-s32-iid", 22.7, {"clients.rule": "iid_uniform", "local.batch_seconds": 120}),
    ("table07/ls-100-s1-post-norm", 18.0, {"cohort_size": 1, "steps": 64_000}),
    ("table08/ls-960-from-cv-en-s8-adam", 10.5, {"server.optimiser.name": "adam", "server.schedule.lr": 0.012}),
    ("table09/cv-en-s16-sgd", 86.6, {"server.optimiser.name": "sgd", "server.schedule.lr": 3.0}),
    ("table10/cv-de-90-from-10-s128", 9.3, {"seed_model": "pelikan2025/central/cv-de-10", "cohort_size": 128}),
    ("table11/ls-860-from-ls-100-s16-no-specaugment", 9.5, {"local.spec_augment": None}),
    ("table12/cv-en-from-ls-960-s32-no-specaugment", 20.2, {"local.spec_augment": None, "cohort_size": 32}),
    ("table13/ls-860-from-ls-100-s16-fedprox", 8.3, {"local.proximal.mu": 1.0, "local.proximal.name": "fedprox"}),
    ("table13/cv-en-from-ls-100-s16-fedprox", 26.3, {"local.proximal.mu": 1e-5}),
    ("table14/cv-en-90-from-10-s64-4k", 19.4, {"steps": 4000}),
    ("table15/cv-en-from-undertrained-70-s32", 38.2, {"local.lr": 0.4, "server.schedule.lr": 0.006}),
    ("table16/cv-en-from-ls-100-s2048-local-steps", 17.8, {"local.local_steps": 10, "local.local_epochs": None}),
    ("table17/sigma-1e-4-uniform", 33.9, {"privacy.sigma_dp": 1e-4, "privacy.population_size": None}),
    ("table18/cv-fr-sigma-1e-5-dim", 17.9, {"privacy.clip_bound": 0.01, "steps": 2002}),
    ("table19/cv-en-90-from-10-s256-global", 25.1, {"cohort_size": 256, "privacy.share": "global"}),
    ("table20/cv-en-from-ls-960-sigma-3e-6-dim", 17.8, {"seed_model": "pelikan2025/central/ls-960"}),
    ("table21/deep-sigma-1e-5-uniform", 26.4, {"privacy.sigma_dp": 1e-5, "privacy.share": "uniform", "steps": 2000}),
]


@pytest.mark.parametrize(("name", "wer", "expected"), CELLS, ids=[cell[0] for cell in CELLS])
def test_cells_read_off_the_paper(name: str, wer: float, expected: dict[str, Any]) -> None:
    recipe = recipes()[name]
    assert recipe.paper is not None
    assert recipe.paper.wer[recipe.data.test[-1]] == wer
    found = recipe.federated.model_dump(mode="json")
    for key, value in expected.items():
        section: Any = found
        for part in key.split("."):
            section = section[part]
        assert section == value, key


def test_tables_of_model_variants() -> None:
    assert recipes()["table07/ls-100-s1-post-norm"].model.norm == "post"
    for name in ("narrow", "baseline", "wide", "shallow", "deep"):
        model = recipes()[f"table21/{name}-no-noise"].model
        assert (model.size, model.layer_drop) == ("base" if name == "baseline" else name, 0.1)
        assert model.size in SIZES


@pytest.mark.parametrize(
    ("name", "lr", "begin", "transition"),
    [
        ("table03/ls-960-s8", 0.006, 1000, 500),
        ("table03/ls-960-from-cv-en-s8", 0.003, 1000, 250),
        ("table04/cv-en-s8", 0.006, 1000, 500),
        ("table04/cv-en-95-from-05-s8", 0.002, 750, 750),
        ("table01/sigma-3e-6-dim", 0.002, 750, 750),
        ("table18/cv-de-sigma-3e-6-dim", 0.002, 750, 750),
    ],
)
def test_server_schedules_are_those_of_figures_2_and_3(name: str, lr: float, begin: int, transition: int) -> None:
    schedule = recipes()[name].federated.server.built_schedule()
    assert schedule == ExponentialDecay(lr=lr, transition_begin=begin, transition_steps=transition, decay_rate=0.6)


def private_cells(table: str) -> list[tuple[PaperRow, str, tuple[float, float]]]:
    """Every run of a printed table: its row, its clipping and its WERs."""
    found = []
    for row in paper_rows(table):
        printed = dict(zip(SHARES, (row.wer_global, row.wer_uniform, row.wer_dim), strict=True))
        if row.cohort_size is not None:
            found += [(row, share, wer) for share, wer in printed.items() if wer is not None]
    return found


def build_recipe_population(recipe: Recipe) -> int | None:
    assert recipe.paper is not None
    return recipe.paper.population_size


def test_no_recipe_asks_for_exactly_the_papers_population() -> None:
    """A corpus gives what it gives; the paper's K is there to be compared with."""
    for name, recipe in federated().items():
        assert recipe.federated.privacy.population_size is None, name
        assert build_recipe_population(recipe) is not None, name


def test_numbers_that_nobody_could_check_are_marked() -> None:
    """Of Table 16's right half only S = 2,048 can be read in the copies of the paper at hand."""
    marked = {name for name, recipe in recipes().items() if recipe.paper is not None and recipe.paper.unverified}
    assert marked == {
        f"table16/cv-en-from-{seed}-s{cohort}-local-steps"
        for seed in ("ls-100", "ls-960")
        for cohort in (256, 512, 1024, 3072, 4096, 5120)
    }
    assert marked.isdisjoint(name for name, *_ in CELLS)


def recipe_of(table: str, row: PaperRow, share: str) -> Recipe:
    """The one recipe with the settings of a printed cell."""
    found = []
    for recipe in federated().values():
        run, privacy = recipe.federated, recipe.federated.privacy
        if f"Table {table.removeprefix('table')}" not in {place for place, _ in references(recipe)}:
            continue
        if (
            (run.cohort_size, build_recipe_population(recipe)) == (row.cohort_size, row.population_size)
            and (privacy.sigma_dp or 0.0) == pytest.approx(row.sigma_dp or 0.0)
            and (privacy.share, privacy.clip_bound) == (share, row.clip_bound)
            and run.seed_model == ROOM + PRINTED[table][row.population_size]
        ):
            found.append(recipe)
    assert len(found) == 1, f"{len(found)} recipes for {table}, {row.sigma_dp}, {share}"
    return found[0]


@pytest.mark.parametrize("table", PRINTED)
def test_private_tables_are_complete(table: str) -> None:
    """Against the same tables as the planner prints them."""
    for row, share, wer in private_cells(table):
        recipe = recipe_of(table, row, share)
        assert recipe.paper is not None
        assert (recipe.paper.wer["dev"], recipe.paper.wer["test"]) == wer
        assert recipe.federated.steps == row.printed_steps
        assert recipe.federated.privacy.delta == 1e-9


@pytest.mark.parametrize("table", PRINTED)
def test_epsilons_printed_for_a_noise_are_all_extrapolated_to(table: str) -> None:
    for run, share, _ in private_cells(table):
        if not run.sigma_dp:
            continue
        recipe = recipe_of(table, run, share)
        listed: dict[tuple[int, int | None, int | None], float | None] = {
            (wanted.population_size, wanted.cohort_size, wanted.steps): wanted.paper_epsilon
            for wanted in recipe.federated.privacy.extrapolate
        }
        for row in paper_rows(table):
            same_seed = row.population_size % run.population_size == 0
            if row.sigma_dp == run.sigma_dp and same_seed:
                assert listed[row.population_size, row.cohort_size, row.central_steps] == row.epsilon


@cache
def epsilon_by_rdp(population_size: int, cohort_size: int, steps: int, sigma_dp: float) -> float:
    planned = plan_run(
        population_size, cohort_size=cohort_size, central_steps=steps, delta=1e-9, sigma_dp=sigma_dp, cap=QUICK
    )
    return planned.epsilon.rdp


def test_extrapolations_give_the_golden_epsilons() -> None:
    """z = σ_DP·S (Theorem 1) and q = S/K; the golden file rounds q to three digits, which moves ε in the third."""
    golden = yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))
    found = {}
    for recipe in federated().values():
        privacy = recipe.federated.privacy
        for wanted in privacy.extrapolate:
            assert privacy.sigma_dp is not None
            assert wanted.steps is not None
            z, q = privacy.sigma_dp * wanted.cohort_size, wanted.cohort_size / wanted.population_size
            key = (float(f"{z:.6g}"), float(f"{q:.3g}"), wanted.steps)
            run = (wanted.population_size, wanted.cohort_size, wanted.steps, privacy.sigma_dp)
            found[key] = (run, wanted.paper_epsilon)
    for row in golden:
        run, paper = found[row["z"], row["q"], row["T"]]
        assert paper == row["paper"]
        assert epsilon_by_rdp(*run) == pytest.approx(row["rdp"], abs=0.011)


def test_the_papers_epsilons_below_ten_are_upper_bounds_of_ours() -> None:
    """The paper's coarse grid of orders can only overstate; two printed digits leave 0.05."""
    checked = 0
    for recipe in federated().values():
        privacy = recipe.federated.privacy
        for wanted in privacy.extrapolate:
            assert privacy.sigma_dp is not None
            assert wanted.steps is not None
            if wanted.paper_epsilon is not None and wanted.paper_epsilon < 10:
                ours = epsilon_by_rdp(wanted.population_size, wanted.cohort_size, wanted.steps, privacy.sigma_dp)
                assert ours < wanted.paper_epsilon + 0.05
                checked += 1
    assert checked > 20


def parameter_names(recipe: Recipe) -> list[str]:
    return [*parameter_shapes(recipe.model.settings(tokens=30))]


def test_noise_scopes_are_the_kinds_of_parameters_that_the_captions_name() -> None:
    kinds = {"attention": "attention", "projection": "attention_output", "mlp": "mlp", "layer_norm": "layer_norm"}
    scopes: Counter[tuple[object, ...]] = Counter()
    for name, recipe in federated().items():
        scope = recipe.federated.privacy.noise_scope
        if scope is None:
            continue
        names = parameter_names(recipe)
        for parameter, group in zip(names, match_groups(names, scope.groups), strict=True):
            expected = parameter_kind(parameter)
            assert (kinds[group] if group is not None else None) == (expected if expected in kinds.values() else None)
        scopes[name.split("/")[0], tuple(scope.factors.values()), scope.others] += 1
    alone, spared, half = ((1.0,), 0.0), ((0.0,), 1.0), ((0.5,), 1.0)
    assert scopes == {
        ("figure15", *alone): 8,  # four groups, clipped globally and per layer
        **{("figure16", *panel): 4 for panel in (alone, spared, half)},
    }


def test_weighted_shares_raise_the_mlps_and_nothing_else() -> None:
    names = [*parameter_shapes(named_settings("base", tokens=30))]
    weighted = [recipe for recipe in federated().values() if recipe.federated.privacy.alpha]
    assert sorted({*recipe.federated.privacy.alpha.values()}.pop() for recipe in weighted) == [1.5, 2.0, 3.0, 10.0]
    for recipe in weighted:
        matched = match_groups(names, {"raised": tuple(recipe.federated.privacy.alpha)})
        assert {n for n, group in zip(names, matched, strict=True) if group} == {
            n for n in names if parameter_kind(n) == "mlp"
        }


def readme_rows() -> set[str]:
    """What the README's table must say: one line for each place that each recipe names."""
    rows = set()
    for name, recipe in recipes().items():
        assert recipe.paper is not None
        numbers = ", ".join(f"{place} {value}" for place, value in recipe.paper.wer.items())
        numbers += " (unverified)" if recipe.paper.unverified else ""
        rows |= {f"| {place} | {cell} | `{name}` | {numbers} |" for place, cell in references(recipe)}
    return rows


def test_the_readme_says_which_recipes_make_each_figure() -> None:
    """All of which are there, at the paper's scale and at ours; 1 (`stats`), 6, 15 and 16 are said elsewhere."""
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \| (.*) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == sorted({*range(2, 24)} - {6, 15, 16})
    small = load_experiment("benchmark/figures")
    assert isinstance(small, Suite)
    made: set[str] = set()
    for number, ours, theirs in rows:
        named = [name for name in re.findall(r"`([^`=]+)`", ours) if name.startswith(("table", "figure", "central"))]
        assert named, number
        assert {f"pelikan2025/{name}" for name in named} <= {*recipe_names()}, number
        made |= {*re.findall(r"`([^`]+)`", theirs)}
    assert made == {*small.runs}


def test_the_readme_lists_every_recipe_and_its_numbers() -> None:
    listed = re.findall(
        r"^\| (?:Table|Figure|Appendix|Section) .*\|$", README.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(listed) == len(set(listed))
    assert set(listed) == readme_rows()
