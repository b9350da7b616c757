"""The central runs of Pelikan et al. (2025), setting by setting, against Appendix F in `golden/pelikan2025.yaml`.

The text wins; what the released code has otherwise lies in recipes whose names end in `-released`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.test_paper_recipes import README
from tests.test_paper_tables import OPTIMIZERS, ROOM, Comparison, recipes, shape, transcript

from sottovoce.config import Recipe

RELEASED = "-released"
TENTH = re.compile(r"central/cv-..-10$")
Change = Callable[[Recipe], Recipe]


def central() -> dict[str, Recipe]:
    """All central recipes that follow the text."""
    return {n: r for n, r in recipes().items() if r.central is not None and not n.endswith(RELEASED)}


def in_the_papers_words(recipe: Recipe) -> dict[str, Any]:
    run = recipe.training
    schedule, masks = run.schedule, run.augment.spec_augment
    assert masks is not None
    assert recipe.model.layers is None
    assert recipe.model.width is None
    return {
        "GPUs": run.batches,
        "batch seconds": run.batch_seconds,
        "optimizer": OPTIMIZERS[run.optimiser["name"]],
        "LR": schedule["lr"],
        "warmup": schedule.get("warmup_steps", 0),
        "gradient norm": run.clip_gradients,
        "decay": schedule["name"],
        "decay rate": schedule["decay_rate"],
        "transition steps": schedule["transition_steps"],
        "decay from": schedule["transition_begin"],
        "steps": run.steps,
        **shape(recipe.model.size),
        "LayerNorm": recipe.model.norm,
        "dropout": recipe.model.dropout,
        "layer drop": recipe.model.layer_drop,
        "positions": recipe.model.positions.upper(),
        "frequency masks": [masks.frequency_masks, masks.frequency_width],
        "time masks": [masks.time_masks, masks.time_width, masks.time_ratio],
    }


def said(name: str, recipe: Recipe) -> dict[str, Any]:
    """What the paper says of one of them."""
    text = transcript()["central"]
    start = (recipe.training.start_from or "").removeprefix(ROOM)
    of_start = text["from a tenth of Common Voice"] if TENTH.search(start) else {}
    expected = text["says"] | of_start | text["other"].get(name, {})
    return {what: value for what, value in expected.items() if value is not None}


def compared(change: Change = lambda recipe: recipe) -> Iterator[Comparison]:
    for name, recipe in central().items():
        found = in_the_papers_words(change(recipe))
        for what, printed in said(name, recipe).items():
            ours = found[what]
            if what in ("decay from", "steps"):  # a range
                ours = printed if printed[0] <= ours <= printed[1] else ours
            yield Comparison(name, "Appendix F", what, printed, ours)


def test_every_central_recipe_sets_what_appendix_f_says() -> None:
    assert [comparison for comparison in compared() if not comparison.agrees] == []
    assert len(central()) == 29
    assert len([*compared()]) == 29 * 21 - 3  # of three the number of steps is not told


def scheduled(recipe: Recipe, **changes: Any) -> Recipe:
    return trained(recipe, schedule={**recipe.training.schedule, **changes})


def trained(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"central": recipe.training.model_copy(update=changes)})


def modelled(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"model": replace(recipe.model, **changes)})


PLANTED: dict[str, Change] = {
    "dropout": lambda recipe: modelled(recipe, dropout=0.4),
    "layer drop": lambda recipe: modelled(recipe, layer_drop=0.4),
    "batch seconds": lambda recipe: trained(recipe, batch_seconds=216.0),
    "decay": lambda recipe: scheduled(recipe, name="exponential"),
    "transition steps": lambda recipe: scheduled(recipe, transition_steps=25_000),
    "LR": lambda recipe: scheduled(recipe, lr=0.3),
    "decay from": lambda recipe: scheduled(recipe, transition_begin=340_000),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_change_planted_in_any_central_recipe_is_seen(what: str) -> None:
    seen = [comparison for comparison in compared(PLANTED[what]) if not comparison.agrees]
    assert {comparison.what for comparison in seen} == {what}
    assert {comparison.recipe for comparison in seen} == set(central())


def test_released_settings_are_recipes_beside_the_texts() -> None:
    """What else they set is the same as in the recipe without `-released`."""
    differ = {"dropout", "layer drop", "batch seconds", "decay", "transition steps", "steps"}
    expected = {f"central/cv-{language}-10": differ for language in ("de", "en", "fr")} | {"central/ls-960": {"decay"}}
    found = {}
    for name, recipe in recipes().items():
        if name.endswith(RELEASED):
            theirs, ours = recipe, recipes()[name.removesuffix(RELEASED)]
            assert (theirs.data, theirs.seed) == (ours.data, ours.seed)
            words = in_the_papers_words(theirs), in_the_papers_words(ours)
            found[name.removesuffix(RELEASED)] = {what for what in words[0] if words[0][what] != words[1][what]}
    assert found == expected


def test_the_readme_names_the_tables_that_stand_on_these_seeds() -> None:
    standing: dict[str, set[int]] = {}
    for recipe in recipes().values():
        start = recipe.training.start_from if recipe.federation is None else recipe.federated.seed_model
        if start is None or not re.search(r"central/(cv-..-(05|10)|ls-960)$", start):
            continue
        assert recipe.paper is not None
        for place in re.findall(r"Tables? (\d+)(?: and (\d+))?", recipe.paper.place):
            standing.setdefault(start.removeprefix(ROOM), set()).update(int(number) for number in place if number)
    text = README.read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(central/[\w-]+)` \| ([\d, ]+) \|", text, re.MULTILINE))
    assert {name: {*map(int, tables.split(", "))} for name, tables in listed.items()} == standing
    assert set().union(*standing.values()) == {4, 9, 10, 12, 14, 16, 18, 19, 20}
