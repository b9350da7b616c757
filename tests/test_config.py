"""Recipes: all that come with the package load, and mistakes in others are one clear line."""

from pathlib import Path

import pytest
import yaml

from sottovoce.base.errors import InputError
from sottovoce.config import as_yaml, load_experiment, load_recipe, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_and_survives_its_own_yaml(name: str, tmp_path: Path) -> None:
    recipe = load_experiment(name)
    path = tmp_path / "again.yaml"
    path.write_text(as_yaml(recipe), encoding="utf-8")
    assert load_experiment(str(path)) == recipe


def test_depth_and_width_vary_without_a_new_size() -> None:
    model = load_recipe("synthetic/central", ["model.layers=6"]).model
    assert (model.settings(tokens=30).layers, model.settings(tokens=30).width) == (6, 96)
    model = load_recipe("synthetic/central", ["model.width=128"]).model
    assert (model.settings(tokens=30).layers, model.settings(tokens=30).width) == (4, 128)


def test_a_recipe_that_leaves_the_size_alone_is_written_as_before_sizes_could_vary() -> None:
    """The text is what a run folder is known by: with a further line in it, no earlier run could be resumed."""
    written = yaml.safe_load(as_yaml(load_recipe("synthetic/central")))
    assert [*written["model"]] == ["size", "dropout", "layer_drop", "norm", "positions", "cape"]


def test_what_came_for_narrow_bands_is_written_where_it_is_asked_for() -> None:
    for name, place in (
        ("synthetic/central", ("central", "augment")),
        ("demo-clipping/global", ("federation", "local")),
    ):
        plain = load_recipe(name).model_dump(mode="json")
        assert "features" not in plain["model"]
        assert "narrow_band" not in plain[place[0]][place[1]]
        asked = [f"{'.'.join(place)}.narrow_band.share=0.3", "model.features.normalise=filter"]
        written = load_recipe(name, asked).model_dump(mode="json")
        assert written["model"]["features"] == {"normalise": "filter", "floor_db": None}
        assert written[place[0]][place[1]]["narrow_band"]["share"] == 0.3


def test_augmentation_in_the_time_domain_is_written_where_it_is_asked_for() -> None:
    """Under the same names for central training and for clients."""
    asked = {"speeds": [0.95, 1.05], "dropped_frequencies": {"most": 2}, "dropped_chunks": {"most": 4}}
    for name, place in (
        ("synthetic/central", ("central", "augment")),
        ("demo-clipping/global", ("federation", "local")),
    ):
        plain = load_recipe(name).model_dump(mode="json")[place[0]][place[1]]
        assert not {"dropped_frequencies", "dropped_chunks"} & plain.keys()
        assert ("speeds" in plain) == (place[0] == "central"), "central training has had it from the beginning"
        overrides = [f"{'.'.join(place)}.{key}={value}" for key, value in asked.items()]
        written = load_recipe(name, overrides).model_dump(mode="json")[place[0]][place[1]]
        assert written["speeds"] == asked["speeds"]
        assert written["dropped_frequencies"] == {"fewest": 0, "most": 2, "width_hz": 800.0}
        assert (written["dropped_chunks"]["most"], written["dropped_chunks"]["shortest_seconds"]) == (4, 0.0625)


def test_balanced_silos_are_written_where_they_are_asked_for() -> None:
    for name in ("gao2022/table1-fr/silo-fedavg", "benchmark/gao/silos/silo"):
        asked = load_recipe(name).model_dump(mode="json")["federation"]["clients"]
        assert (asked["rule"], asked["balance"]) == ("silo", "seconds")
        unasked = load_recipe(name, ["federation.clients.balance=null"])
        silos = unasked.model_dump(mode="json")["federation"]["clients"]
        assert (silos["rule"], "balance" in silos) == ("silo", False)
    users = load_recipe("benchmark/gao/start/user").model_dump(mode="json")["federation"]["clients"]
    assert "balance" not in users


def test_extends_joins_sections_but_replaces_named_things(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "about: base\ndata: {store: s, train: [a, b]}\nmodel: {size: tiny, dropout: 0.2}\n"
        "central: {steps: 5, batch_seconds: 9, optimiser: {name: lars, momentum: 0.5}, "
        "schedule: {name: constant, lr: 1e-6}}\n"
    )
    (tmp_path / "top.yaml").write_text(
        f"extends: {tmp_path}/base.yaml\nabout: top\nmodel: {{size: small}}\ncentral: {{optimiser: {{name: adam}}}}\n"
    )
    recipe = load_recipe(str(tmp_path / "top.yaml"), ["seed=3", "data.test=[x]"])
    assert (recipe.about, recipe.seed, recipe.data.test) == ("top", 3, ("x",))
    assert (recipe.model.size, recipe.model.dropout) == ("small", 0.2)
    assert recipe.central.optimiser == {"name": "adam"}
    assert recipe.central.schedule["lr"] == 1e-6


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("synthetic/centrall", [], "no recipe 'synthetic/centrall', did you mean 'synthetic/central'?"),
        (
            "synthetic/central",
            ["central.steps=0"],
            "central.steps: Input should be greater than or equal to 1, found 0",
        ),
        ("synthetic/central", ["data.prepare.task=[1]"], "data.prepare"),
        ("synthetic/central", ["model.size=huge"], "size='huge', expected one of tiny, small, base"),
        ("synthetic/central", ["model.layers=0"], "model.layers: Input should be greater than or equal to 1, found 0"),
        ("synthetic/central", ["model.width=90"], "model: width=90, expected a multiple of 4, the heads of size=tiny"),
        ("synthetic/central", ["central.schedule.lr=abc"], "expected a finite number"),
        ("synthetic/central", ["central.batch_seconds=.inf"], "central.batch_seconds: Input should be a finite number"),
        ("synthetic/central", ["central.augment.spec_augment.time_masks=-1"], "time_masks=-1, expected at least 0"),
        ("synthetic/central", ["central.augment.noise={colour: blue}"], "central.augment.noise"),
        ("synthetic/central", ["central.augment.speeds=[0.9, -1]"], "speeds has -1.0, expected numbers from 0.5"),
        (
            "synthetic/central",
            ["central.augment.narrow_band.share=2"],
            "narrow_band: share=2.0, expected a share from 0",
        ),
        (
            "synthetic/central",
            ["model.features.normalise=bin"],
            "model.features.normalise: Input should be 'utterance' or",
        ),
        ("synthetic/central", ["model.features.floor_db=0"], "features: floor_db=0.0, expected a positive number"),
        ("synthetic/central", ["model.as_released=true", "model.features.floor_db=40"], "features with as_released"),
        (
            "synthetic/central",
            ["model.as_released=true", "central.augment.narrow_band.share=0.5"],
            "central.augment.narrow_band: this model of family=ctc_transformer does not say which of its features",
        ),
        (
            "demo-clipping/global",
            ["model.as_released=true", "federation.local.narrow_band.share=1"],
            "federation.local.narrow_",
        ),
        ("synthetic/central", ["central.steps={"], "'{' is not readable as YAML"),
        ("/.yaml", [], "no recipe '/.yaml'"),
        ("synthetic/central", ["data.part=seed"], "part='seed' and seed_part belong together"),
        ("ramesh2023/table3/scratch", ["paper.werr={test: 9.5}"], "and against=None belong together"),
        (
            "demo-clipping/global",
            ["federation.local.speeds=[3]"],
            "local: speeds has 3.0, expected numbers from 0.5 to 2.0",
        ),
        ("synthetic/central", ["central.augment.speeds=[0]"], "speeds has 0.0, expected numbers from 0.5 to 2.0"),
        (
            "gao2022/table1-fr/silo-fedavg",
            ["federation.privacy.clip_bound=1", "federation.privacy.noise_multiplier=1"],
            "clients.balance=seconds with noise or privacy.mode=secure: who is in which silo would depend on how much",
        ),
        ("gao2022/table1-fr/silo-fedavg", ["federation.privacy.mode=secure"], "clients.balance=seconds with noise or"),
        (
            "synthetic/central",
            ["central.augment.spec_augment.masks=3"],
            "unknown key 'central.augment.spec_augment.masks'",
        ),
    ],
)
def test_mistakes(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(name, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pattern_needs_no_quotes() -> None:
    assert (
        load_recipe("demo-clipping/global", ["federation.trainable=*.norm.*, output"]).federated.trainable
        == "*.norm.*, output"
    )


LAUGHS = "[&a0 [x, x, x, x, x, x, x, x, x], " + ", ".join(
    f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 7)
)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"about={LAUGHS}]", "values, those that aliases repeat"),
        ("about=&a [*a]", "an alias stands inside what it names"),
        ("about=" + "[" * 3_000 + "]" * 3_000, "nested too deeply"),
        ("seed=" + "9" * 5_000, "5,000 digits"),
        ("seed=" + "9" * 30, "a whole one below 2⁶³"),
        ("central." + "a." * 3_000 + "a=1", "nested too deeply"),
        ("central.schedule.lr=1e308", "central.schedule.lr=1e+308, expected a number between"),
        ("central.schedule.lr=" + "9" * 400, "digits"),
        ("central.optimiser.name=[1]", "optimiser: name=[1], expected one of sgd, adam"),
        ("central.schedule={lr: 1}", "unknown schedule ''"),
        ("central.optimiser.name=.x:y", "cannot be imported"),
        ("central.steps=!!int x", "not readable as YAML"),
        ("model.layers=1_000_000_000", "model.layers: Input should be less than or equal to 1000"),
        ("central.augment.spec_augment.time_masks=1_000_000_000", "time_masks=1000000000, expected at most"),
        ('data.store="a\\0b"', "a zero byte"),
        ("data.store=" + "a" * 300, "no file can be called so"),
        ("Data={}", "unknown key 'Data', did you mean 'data'?"),
    ],
)
def test_settings_that_nothing_can_compute_with_are_one_line(override: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe("synthetic/central", [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("label", ["a" * 300, "a/b", "..", "''"])
def test_a_label_that_is_no_folder_is_one_line(tmp_path: Path, label: str) -> None:
    (tmp_path / "suite.yaml").write_text(f"about: x\nruns:\n  {label}: {{recipe: demo-clipping/global}}\n")
    with pytest.raises(InputError, match=r"no file can be called so|a run's label names its folder"):
        load_experiment(str(tmp_path / "suite.yaml"))


def test_an_override_changes_one_place_where_an_alias_made_two(tmp_path: Path) -> None:
    same = "federation: {local: {optimiser: &o {name: sgd, momentum: 0.5}}, server: {optimiser: *o}}"
    (tmp_path / "alias.yaml").write_text(f"extends: demo-clipping/global\n{same}\n")
    found = load_recipe(str(tmp_path / "alias.yaml"), ["federation.local.optimiser.momentum=0.9"]).federated
    assert (found.local.optimiser["momentum"], found.server.optimiser["momentum"]) == (0.9, 0.5)
