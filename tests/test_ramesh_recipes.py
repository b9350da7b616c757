"""The recipes of Ramesh et al. (2023), held against a transcription of Tables 2 and 3 and of Section 4.2."""

import math
import re
from fractions import Fraction
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import pytest

from sottovoce.config import Recipe, Suite, load_experiment, load_recipe, recipe_names
from sottovoce.models.family import find_family

ROOM = "ramesh2023/"
README = Path(str(resources.files("sottovoce"))) / "recipes/ramesh2023/README.md"

# Table 2, WER in per cent: dev-clean, dev-other, test-clean, test-other.
TABLE_2: dict[str, tuple[str, str, str, str]] = {
    "scratch": ("6.84", "17.63", "7.24", "18.42"),
    "central-5k": ("6.81", "17.72", "7.3", "18.2"),
    "fl48-5k": ("6.59", "17.02", "6.80", "17.42"),
    "fl70-5k": ("6.43", "17.17", "6.83", "17.88"),
    "central-52k": ("5.79", "16.29", "6.07", "16.21"),
    "fl48-52k": ("5.83", "16.9", "6.16", "16.34"),
    "fl70-52k": ("5.77", "16.4", "6.05", "16.21"),
}
# Table 3: WER of dev and test, and the gain over no pre-training that is printed beside each, in per cent of it.
SCRATCH_FR = ("46.31", "42.73")
TABLE_3: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "direct-central-52k": (("37.8", "18.37"), ("34.6", "19.02")),
    "direct-fl48-52k": (("37.82", "18.33"), ("34.25", "19.84")),
    "direct-fl70-5k": (("43.27", "6.56"), ("39.69", "7.11")),
    "continued-central-52k": (("35.92", "22.43"), ("32.6", "23.70")),
    "continued-fl48-52k": (("37.63", "18.74"), ("34.12", "20.14")),
    "continued-fl70-5k": (("41.48", "10.42"), ("37.1", "13.17")),
}
ENCODERS = [name for name in TABLE_2 if name != "scratch"]
CONTINUED = ["central-52k", "fl48-52k", "fl70-5k"]
CLIENTS = {"fl48": 48, "fl70": 70}

# Hours of Table 1 and of Section 5.2.
LIBRI_LIGHT, LL_5K, LIBRISPEECH, MLS_FRENCH, TRAIN_215, TRAIN_855 = 51_934, 5_000, 960.9, 1_076.6, 215, 855
SPEAKERS = 6_845

# Section 4.2 and Appendix B. What is clipped or masked is not said, and so nothing is.
LOCAL: dict[str, Any] = {
    "local_steps": 1,
    "local_epochs": None,
    "batch_utterances": 8,
    "time_line": {"dry": "skip"},
    "lr": 1.0,
    "optimiser": {"name": "sgd"},
    "clip_gradients": math.inf,
    "spec_augment": None,
    "proximal": None,
}
ADAM = ({"name": "adam"}, {"name": "constant", "lr": 1e-5})


def encoder(name: str) -> Recipe:
    recipe = load_recipe(f"{ROOM}pretraining/{name}")
    assert recipe.paper is not None
    assert recipe.paper.source == "Ramesh et al. 2023, arXiv:2308.02013"
    assert recipe.paper.wer == {}
    model = recipe.model
    assert (model.family, model.size, model.ahead, model.candidates) == (
        "cpc",
        "ramesh",
        12,
        128,
    )
    return recipe


def check_central(recipe: Recipe) -> None:
    central = recipe.training
    assert (central.optimiser, central.schedule) == ADAM
    assert (central.clip_gradients, central.augment.spec_augment, central.order) == (math.inf, None, None)
    # Buckets of 64 and 32, the latter for cuts of 20 s.
    assert (central.batch_utterances, central.batch_seconds) == (64, 32 * 20)


def check_federated(recipe: Recipe, *, clients: int) -> None:
    federation = recipe.federated
    found = federation.model_dump(mode="json")
    assert {name: found["local"].get(name) for name in LOCAL} == LOCAL
    assert (found["server"]["optimiser"], found["server"]["schedule"], federation.server.ema) == (*ADAM, None)
    assert (federation.steps, federation.cohort_size, federation.engine) == (22_000, clients, "shared")
    assert federation.clients.rule == "speaker"
    privacy = federation.privacy
    assert (privacy.sampling, privacy.weighting) == ("fixed_size", "utterances")
    assert (privacy.adds_noise, privacy.clip_bound) == (False, math.inf)
    # Eight utterances make a batch, however long: a rung of the ladder is at most a tenth longer than what is on it.
    assert federation.local.batch_seconds >= 8 * 1.1 * recipe.data.longest_seconds


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str) -> None:
    recipe = encoder(name)
    kind, amount = name.split("-")
    assert (recipe.data.store, recipe.data.train, recipe.data.dev) == (
        "librilight-large",
        ("large",),
        "librispeech:dev-other",
    )
    if amount == "5k":
        assert recipe.data.part == "seed"
        assert recipe.data.seed_part is not None
        assert recipe.data.seed_part.fraction is not None
        speakers = math.floor(Fraction(str(recipe.data.seed_part.fraction)) * SPEAKERS)
        assert abs(speakers / SPEAKERS * LIBRI_LIGHT - LL_5K) < LIBRI_LIGHT / SPEAKERS / 2  # nobody nearer
    else:
        assert (recipe.data.part, recipe.data.seed_part) == ("all", None)
    if kind == "central":
        check_central(recipe)
        assert (recipe.training.steps, recipe.training.start_from) == (130_000, None)
    else:
        check_federated(recipe, clients=CLIENTS[kind])
        assert recipe.federated.seed_model is None


@pytest.mark.parametrize("name", CONTINUED)
def test_continued_pre_training_goes_on_as_its_source_was_trained(name: str) -> None:
    recipe = encoder(f"fr-{name}")
    check_french(recipe, part="federation")
    kind, _ = name.split("-")
    source = f"{ROOM}pretraining/{name}"
    if kind == "central":
        check_central(recipe)
        assert recipe.training.start_from == source
        assert recipe.training.steps == round(130_000 * TRAIN_855 / LIBRI_LIGHT)
    else:
        check_federated(recipe, clients=CLIENTS[kind])
        assert recipe.federated.seed_model == source


def check_french(recipe: Recipe, *, part: str) -> None:
    data = recipe.data
    assert (data.store, data.train, data.dev, data.part) == ("mls-french", ("train",), "dev", part)
    assert data.seed_part is not None
    assert data.seed_part.fraction == round(TRAIN_215 / MLS_FRENCH, 2)


def check_fine_tuning(recipe: Recipe) -> None:
    assert (recipe.model.family, recipe.model.size) == ("transducer", "ramesh")
    assert (recipe.tokens.kind, recipe.tokens.size, recipe.tokens.file) == ("sentence_pieces", 2_500, None)
    central = recipe.training
    assert central.optimiser == {"name": "adam"}
    assert (central.schedule["name"], central.schedule["lr"]) == ("warmup_cosine", 5e-4)
    assert central.schedule["total_steps"] == central.steps
    assert central.schedule["warmup_steps"] == central.steps // 20
    assert (central.batch_utterances, central.batch_seconds, central.clip_gradients) == (64, 640, 1.0)
    assert central.augment.spec_augment is None


@pytest.mark.parametrize("name", TABLE_2)
def test_cells_of_table_2(name: str) -> None:
    recipe = load_recipe(f"{ROOM}table2/{name}")
    check_fine_tuning(recipe)
    sets = ("dev-clean", "dev-other", "test-clean", "test-other")
    assert recipe.paper is not None
    assert recipe.paper.wer == dict(zip(sets, map(float, TABLE_2[name]), strict=True))
    data = recipe.data
    assert (data.store, data.dev, data.test, data.part) == ("librispeech", "dev-other", sets, "all")
    assert data.train == ("train-clean-100", "train-clean-360", "train-other-500")
    assert recipe.training.steps == 100_000
    assert recipe.training.start_from == (None if name == "scratch" else f"{ROOM}pretraining/{name}")


@pytest.mark.parametrize("name", ["scratch", *TABLE_3])
def test_cells_of_table_3(name: str) -> None:
    recipe = load_recipe(f"{ROOM}table3/{name}")
    check_fine_tuning(recipe)
    check_french(recipe, part="seed")
    printed = SCRATCH_FR if name == "scratch" else tuple(wer for wer, _ in TABLE_3[name])
    assert recipe.data.test == ("dev", "test")
    assert recipe.paper is not None
    assert recipe.paper.wer == dict(zip(recipe.data.test, map(float, printed), strict=True))
    if name == "scratch":
        assert (recipe.paper.werr, recipe.paper.against) == (None, None)
    else:
        gains = (float(gain) for _, gain in TABLE_3[name])
        assert recipe.paper.werr == dict(zip(recipe.data.test, gains, strict=True))
        scratch = load_recipe(f"{ROOM}table3/scratch").paper
        assert scratch is not None
        assert recipe.paper.against == scratch.place
    assert recipe.training.steps == round(100_000 * TRAIN_215 / LIBRISPEECH, -2)
    how, _, source = name.partition("-")
    starts = {"scratch": None, "direct": f"{ROOM}pretraining/{source}", "continued": f"{ROOM}pretraining/fr-{source}"}
    assert recipe.training.start_from == starts[how]


@pytest.mark.parametrize("name", TABLE_3)
def test_the_transcribed_wers_have_the_printed_gains(name: str) -> None:
    """The paper cuts gains off after two digits, and does not round them."""
    for scratch, (wer, gain) in zip(SCRATCH_FR, TABLE_3[name], strict=True):
        exact = 100 * (1 - Fraction(wer) / Fraction(scratch))
        assert math.floor(100 * exact) == 100 * Fraction(gain)


def test_every_cell_is_there_and_nothing_else() -> None:
    expected = {"pretraining", "table2", "table3", "table3/scratch"}
    expected |= {f"table2/{name}" for name in TABLE_2} | {f"table3/{name}" for name in TABLE_3}
    expected |= {f"pretraining/{name}" for name in ENCODERS} | {f"pretraining/fr-{name}" for name in CONTINUED}
    assert {name.removeprefix(ROOM) for name in recipe_names() if name.startswith(ROOM)} == expected


@pytest.mark.parametrize(("table", "rows"), [("table2", [*TABLE_2]), ("table3", ["scratch", *TABLE_3])])
def test_a_table_has_the_papers_rows_in_its_order(table: str, rows: list[str]) -> None:
    suite = load_experiment(ROOM + table)
    assert isinstance(suite, Suite)
    assert [*suite.runs] == rows


def test_the_readme_lists_every_cell_with_its_encoder_and_its_numbers() -> None:
    three = {"scratch": SCRATCH_FR} | {name: (dev[0], test[0]) for name, (dev, test) in TABLE_3.items()}
    printed = {f"table2/{name}": wers for name, wers in TABLE_2.items()}
    expected = []
    for name, wers in (printed | {f"table3/{name}": wers for name, wers in three.items()}).items():
        recipe = load_recipe(ROOM + name)
        numbers = ", ".join(f"{place} {wer}" for place, wer in zip(recipe.data.test, wers, strict=True))
        source = (recipe.training.start_from or "").removeprefix(f"{ROOM}pretraining/")
        expected.append((f"`{name}`", f"`{source}`" if source else "", numbers))
    rows = re.findall(r"^\| Table \d \|.*\|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert [tuple(cell.strip() for cell in row.split("|")[3:6]) for row in rows] == expected


def test_models_have_the_papers_layers() -> None:
    """Of 3 × 512 dense and 6 × 1,024 LSTM units, 2 × 1,024 more, and 2,500 pieces beside the blank."""
    pre_trained = load_recipe(f"{ROOM}pretraining/fl48-52k").model.settings()
    transducer = load_recipe(f"{ROOM}table2/fl48-52k").model.settings(tokens=2_500 + 1)
    shapes = {name: find_family(name).shapes(of) for name, of in (("cpc", pre_trained), ("transducer", transducer))}
    encoders = [
        {name: shape for name, shape in found.items() if name.startswith("encoder.")} for found in shapes.values()
    ]
    assert encoders[0] == encoders[1]
    assert sum(map(prod, encoders[0].values())) == 49_202_688
    assert sum(map(prod, shapes["transducer"].values())) == 71_120_837
