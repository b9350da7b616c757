"""RESULTS.md says what the kept runs say, and the kept runs say what the runs said."""

import doctest
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import results as program
from findings import document, keeping, kept, numbers
from findings.document import IMAGES, NOT_RUN, render, unsupported
from findings.keeping import FILES, keep, readable, thinned
from findings.kept import Kept
from findings.rates import difference
from tests.tones import pack_tones
from torch import device

from sottovoce.config import Suite, load_experiment, load_recipe
from sottovoce.config.loading import recipe_names
from sottovoce.errors import InputError
from sottovoce.reporting.curves import series
from sottovoce.reporting.layers import norm_profiles
from sottovoce.reporting.records import read_run
from sottovoce.training.stages import Surroundings, run_recipe

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docs/results.template.md"
RECIPE = """
about: tones
data: {store: tones}
model: {size: tiny}
federation:
  steps: 8
  cohort_size: 3
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, share: dim, noise_multiplier: 0.3, delta: 1e-3}
  engine: sequential
  evaluate_every: 4
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: 8 rounds, private, tested on six speakers."""
    place = tmp_path_factory.mktemp("results")
    pack_tones(place / "stores/tones", people=range(60), letters=(2, 3), utterances=2)
    (place / "tones.yaml").write_text(RECIPE)
    around = Surroundings(runs=place, stores=place / "stores", device=device("cpu"))
    run_recipe(load_recipe(str(place / "tones.yaml")), out=place / "suite/dim", resume=False, around=around)
    return place / "suite/dim"


@pytest.fixture
def results(run: Path, tmp_path: Path) -> Path:
    keep(run, tmp_path / "results/suite/dim")
    return tmp_path / "results"


Copy = Callable[..., Path]


@pytest.fixture
def copy(results: Path) -> Copy:
    """Another kept run: the same but for its label, `settings` of its recipe (old, new), and `errors` per speaker."""

    def make(label: str, *settings: tuple[str, str], errors: list[int] | None = None) -> Path:
        folder = Path(shutil.copytree(results / "suite/dim", results / "suite" / label, dirs_exist_ok=True))
        config = (folder / "config.yaml").read_text()
        for old, new in settings:
            assert old in config
            config = config.replace(old, new)
        (folder / "config.yaml").write_text(config)
        if errors is not None:
            content = json.loads((folder / "results.json").read_text())
            test = content["test"]["test"]
            test["per_speaker"] = [
                {"speaker": str(n), "words": 10, "wer": wrong / 10} for n, wrong in enumerate(errors)
            ]
            test["wer"] = sum(errors) / (10 * len(errors))
            (folder / "results.json").write_text(json.dumps(content))
        return folder

    return make


def rendered(results: Path, text: str) -> str:
    template = results.parent / "docs/results.template.md"
    template.parent.mkdir(exist_ok=True)
    template.write_text(text)
    return render(template, results=results).text.partition("-->\n\n")[2]


# What is in the repository.


def test_the_document_is_what_the_kept_runs_give() -> None:
    made = render(TEMPLATE, results=ROOT / "results")
    assert (ROOT / "docs/RESULTS.md").read_text() == made.text, "make results"
    drawn = {path.stem: path.read_bytes() for path in (ROOT / "docs" / IMAGES).glob("*.svg")}
    assert drawn == made.figures, "make results"


def test_every_claim_shows_its_run() -> None:
    assert unsupported((ROOT / "docs/RESULTS.md").read_text()) == []


def test_what_is_kept_is_small_and_sound() -> None:
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file() and path.name != "README.md"]
    assert {path.name for path in files} <= set(FILES)
    assert sum(path.stat().st_size for path in files) <= 20e6
    for folder in {path.parent for path in files}:
        found = read_run(folder.name, folder)
        assert not found.problems
        assert found.ledger is None or not found.ledger.problem


def test_the_template_names_runs_that_its_recipes_make() -> None:
    known = set(recipe_names())
    macros = " ".join(re.findall(r"{{(.+?)}}", TEMPLATE.read_text()))
    for suite, label in set(re.findall(r"\s([\w-]+)/([\w.-]+)", macros)):
        if f"benchmark/{suite}" in known:
            found = load_experiment(f"benchmark/{suite}")
            assert isinstance(found, Suite)
            assert label in found.runs, f"{suite}/{label}"


# Keeping.


def test_a_kept_run_says_the_same(run: Path, results: Path) -> None:
    whole, small = read_run("run", run), read_run("run", results / "suite/dim")
    assert {path.name for path in small.folder.iterdir()} == set(FILES)
    assert small.config == whole.config
    assert small.ledger is not None
    assert small.ledger.report is not None
    assert small.ledger.report.mark == whole.ledger.report.mark  # type: ignore[union-attr]
    for mine, theirs in zip(series(small.metrics, "dev_wer"), series(whole.metrics, "dev_wer"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert len(small.diagnostics) == len(whole.diagnostics) == 8
    full = [n for n, record in enumerate(small.diagnostics) if "layers" in record]
    assert full[0] == 0
    assert full[-1] == 7
    some = [whole.diagnostics[n] for n in full]
    for mine, theirs in zip(norm_profiles(small.diagnostics)[0].rows(), norm_profiles(some)[0].rows(), strict=True):
        assert mine == (*theirs[:2], pytest.approx(theirs[2], rel=0.01))


def test_names_of_people_are_not_kept(run: Path, results: Path) -> None:
    def people(folder: Path) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())["test"]["test"]["per_speaker"]
        return found

    before, after = people(run), people(results / "suite/dim")
    assert [(p["wer"], p["words"]) for p in before] == [(p["wer"], p["words"]) for p in after]
    assert not {p["speaker"] for p in before} & {p["speaker"] for p in after}
    assert len({p["speaker"] for p in after}) == len(before)


def test_the_population_by_pld_is_no_larger_and_useful(results: Path) -> None:
    found = json.loads((results / "suite/dim/planned.json").read_text())
    assert found["pld"]["population_size"] <= found["rdp"]["population_size"]
    assert found["pld"]["epsilon_pld"] <= 8 < found["pld"]["epsilon_rdp"]


def test_thinning_keeps_every_record_and_few_layers() -> None:
    records = [{"step": n, "loss": n + 0.123456789, "layers": {"a": {"norm": 0.123456}}} for n in range(100)]
    few = thinned(records)
    assert [record["step"] for record in few] == list(range(100))
    assert [record["step"] for record in few if "layers" in record] == [0, 25, 50, 74, 99]
    assert few[0] == {"step": 0, "loss": 0.123457, "layers": {"a": {"norm": 0.123}}}
    assert len([r for r in thinned(records, rounds=2) if "layers" in r]) == 2
    assert not any("layers" in record for record in thinned(records, rounds=0))
    assert thinned([{"step": 0, "dev_wer": 0.5}]) == [{"step": 0, "dev_wer": 0.5}]


def test_a_run_kept_in_brief_can_be_shown_in_a_table_of_rates(run: Path, results: Path) -> None:
    keep(run, results / "suite/dim", brief=True)
    small = read_run("run", results / "suite/dim")
    assert not small.problems
    few = {"config.yaml", "inputs.json", "environment.json", "metrics.jsonl", "results.json"}
    assert {path.name for path in small.folder.iterdir()} == few
    assert "per_speaker" not in small.results["test"]["test"]
    assert "%" not in rendered(results, '{{grid suite label="(d)(.+)" show=dev}}')


def test_readable_is_the_same_json() -> None:
    content = {"a": [{"b": 1}, {"c": [None, "ü"]}], "d": {}, "e": 0.1, "f": {"g": {"h": []}}}
    assert json.loads(readable(content)) == content


def test_an_unfinished_run_is_left_out(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = Path(shutil.copytree(run.parent, tmp_path / "suite", symlinks=True))
    half = Path(shutil.copytree(suite / "dim", suite / "half", symlinks=True))
    (half / "results.json").unlink()
    program.keep_runs([suite], results=tmp_path / "results", suite=None, rounds=None, brief=False)
    assert [path.name for path in (tmp_path / "results/suite").iterdir()] == ["dim"]
    assert "half is not finished" in capsys.readouterr().out


# Numbers.


def test_a_difference_is_paired_over_people_and_seeds(results: Path, copy: Copy) -> None:
    """Everybody has one error of ten words less, whatever else they have: exactly −10 points, for any people drawn."""
    seed = ("seed: 1\n", "seed: 2\n")
    copy("worse", errors=[1, 9, 4, 7, 2, 5])
    copy("worse-seed2", seed, errors=[3, 8, 4, 9, 2, 6])
    copy("better", errors=[0, 8, 3, 6, 1, 4])
    copy("better-seed2", seed, errors=[2, 7, 3, 8, 1, 5])
    all_runs = Kept(results, results.parent / "docs")
    better, worse = all_runs.repeats("suite/better"), all_runs.repeats("suite/worse")
    found = difference(better, worse, names=("better", "worse"))
    assert found.seeds == (1, 2)
    assert found.mean == pytest.approx(-0.1)
    assert found.interval == pytest.approx((-0.1, -0.1))
    text = rendered(results, "{{difference suite/better suite/worse}}")
    first = "[1](../results/suite/better)/[1](../results/suite/worse)"
    assert text.startswith(f"−10.0 points (−10.0 to −10.0; seeds {first}, [2](../results/suite/better-seed2)/")


def test_the_mean_is_over_seeds(results: Path, copy: Copy) -> None:
    copy("a", errors=[1] * 6)
    copy("a-seed2", ("seed: 1\n", "seed: 2\n"), errors=[4] * 6)
    text = rendered(results, "{{mean suite/a}}")
    assert text.startswith("25.0 % (10.0–40.0 over seeds [1](../results/suite/a), [2](../results/suite/a-seed2))")


def test_a_repeat_may_differ_in_its_seed_alone(results: Path, copy: Copy) -> None:
    copy("dim-seed2", ("seed: 1\n", "seed: 2\n"), ("share: dim", "share: uniform"))
    with pytest.raises(
        InputError, match=r"dim-seed2: expected suite/dim with another seed.*federation\.privacy\.share"
    ):
        rendered(results, "{{mean suite/dim}}")


def test_a_repeat_has_the_seed_of_its_name(results: Path, copy: Copy) -> None:
    copy("dim-seed3", ("seed: 1\n", "seed: 2\n"))
    with pytest.raises(InputError, match="says seed 3, its recipe says seed=2"):
        rendered(results, "{{mean suite/dim}}")


def test_other_people_cannot_be_compared(results: Path, copy: Copy) -> None:
    copy("a", errors=[1] * 6)
    with pytest.raises(InputError, match=r"results\.template\.md:2.*tested on the same speakers"):
        rendered(results, "\n{{difference suite/a suite/dim}}")


def test_numbers_come_from_the_files(results: Path) -> None:
    told = json.loads((results / "suite/dim/results.json").read_text())
    planned = json.loads((results / "suite/dim/planned.json").read_text())
    text = rendered(
        results,
        "{{wer suite/dim}}\n{{value suite/dim results.privacy.useful.cohort_size ,}}\n{{epsilon suite/dim}}\n"
        "{{population suite/dim}}\n{{ratio suite/dim suite/dim planned.rdp.population_size}}\n{{count suite}}\n"
        "{{ratio suite/dim suite/dim planned.rdp.population_size:planned.pld.population_size .3f}}",
    ).splitlines()
    low, high = (f"{100 * bound:.1f}" for bound in told["test"]["test"]["wer_interval"])
    assert text[0] == f"[{100 * told['test']['test']['wer']:.1f} % ({low}–{high})](../results/suite/dim)"
    assert text[1] == f"[{told['privacy']['useful']['cohort_size']:,}](../results/suite/dim)"
    assert "at δ = 0.001" in text[2]
    assert f"[{told['privacy']['useful']['population_size']:,} people by RDP" in text[3]
    assert text[4].startswith("1.0×")
    assert text[5] == "[1 runs](../results/suite)"
    people = {name: found["population_size"] for name, found in planned.items() if name != "target_epsilon"}
    assert text[6].startswith(f"{people['rdp'] / people['pld']:.3f}×")


def test_tables_show_what_tells_settings_apart(results: Path, copy: Copy) -> None:
    for share in ("dim", "uniform"):
        for lr in ("0.01", "0.1"):
            copy(f"{share}-lr{lr}", ("share: dim", f"share: {share}"), ("      lr: 0.01", f"      lr: {lr}"))
    shutil.rmtree(results / "suite/dim")
    lines = rendered(results, "{{table suite}}").splitlines()
    assert lines[0].startswith("| setting | `schedule.lr` | `share` | start, test WER % | dev WER % | test WER % |")
    assert [line.split(" | ")[:3] for line in lines[2:6]] == [
        ["| dim-lr0.01", "0.01", "dim"],
        ["| dim-lr0.1", "0.1", "dim"],
        ["| uniform-lr0.01", "0.01", "uniform"],
        ["| uniform-lr0.1", "0.1", "uniform"],
    ]
    by_recipe = rendered(results, "{{grid suite rows=share columns=schedule.lr}}").splitlines()
    by_label = rendered(results, '{{grid suite label="(.+)-lr(.+)"}}').splitlines()
    assert by_recipe[0] == "| share \\ schedule.lr | 0.01 | 0.1 |"
    assert by_recipe[2:] == by_label[2:]
    with pytest.raises(InputError, match="both stand at"):
        rendered(results, "{{grid suite rows=share columns=share}}")


def test_figures_are_the_same_bytes_each_time(results: Path, copy: Copy) -> None:
    copy("uniform", ("share: dim", "share: uniform"))
    copy("global", ("share: dim", "share: global"))
    template = results.parent / "docs/results.template.md"
    template.parent.mkdir()
    template.write_text(
        "{{figure wer suite}}\n{{figure curves suite/dim suite/uniform}}\n{{figure norms suite/dim suite/uniform}}\n"
        "{{figure against suite x=cohort_size by=share name=cohort}}\n"
        "{{figure gain suite/dim suite/uniform name=gain}}\n"
    )
    once, again = (render(template, results=results) for _ in range(2))
    assert once == again
    both = "suite-dim-suite-uniform"
    assert list(once.figures) == ["wer-suite", f"curves-{both}", f"norms-{both}", "cohort", "gain"]
    for name, content in once.figures.items():
        assert content.count(b'id="data-') >= 2, name
        assert f"](images/results/{name}.svg)" in once.text


@pytest.mark.parametrize("module", [document, keeping, kept, numbers])
def test_examples_are_true(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


# The document.


def test_missing_runs_are_all_named_and_nothing_is_written(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rendered(results, "{{difference suite/a suite/b}} {{wer suite/dim}} {{table other}} {{wer suite/dim-seed2}}")
    docs = results.parent / "docs"
    assert program.write_document(results=results, docs=docs, allow_missing=False) == 1
    assert "4 runs are named and not kept: suite/a, suite/b, other/…, suite/dim-seed2" in capsys.readouterr().err
    assert not (docs / "RESULTS.md").exists()
    assert program.write_document(results=results, docs=docs, allow_missing=True) == 0
    assert (docs / "RESULTS.md").read_text().count(NOT_RUN) == 3


def test_figures_that_nobody_shows_are_removed(results: Path) -> None:
    docs = results.parent / "docs"
    for text, names in (("{{figure wer suite name=a}}", ["a.svg"]), ("none", [])):
        rendered(results, text)
        assert program.write_document(results=results, docs=docs, allow_missing=False) == 0
        assert [path.name for path in (docs / IMAGES).iterdir()] == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{were suite/dim}}", "unknown macro 'were', did you mean 'wer'"),
        ("{{wer suite/dim\n}}", "expected a macro to end in its own line"),
        ("{{wer dim}}", "expected suite/label"),
        ("{{wer suite/dim test=other}}", "test=other: expected one of test"),
        ("{{value suite/dim results.nothing}}", "no 'nothing' in .*expected one of"),
        ("{{value suite/dim results.privacy.delta x}}", "format=x: it does not fit"),
        ("{{table suite nothing}}", "setting=nothing: expected a setting of these runs"),
        ("{{figure pie suite}}", "expected wer, curves, norms, against or gain"),
        ("{{imbalance suite/dim layer_norm nose}}", "kind=nose: expected one of"),
    ],
)
def test_a_mistake_in_the_template_is_one_clear_line(results: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        rendered(results, text)
    assert "results.template.md:1: " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_spoilt_ledger_is_no_evidence(results: Path) -> None:
    ledger = results / "suite/dim/ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match=r"ledger"):
        rendered(results, "{{wer suite/dim}}")


@pytest.mark.parametrize(
    ("claim", "supported"),
    [
        ("It is better.", True),
        ("It is 3 points better.", False),
        ("It is [3 points](../results/a/b) better.", True),
        ("It is\n3 points better,\nsee [there](../results/a/b).", True),
        ("See [there](../results/a/b). It is 3 points better.", False),
        ("- [1](../results/a/b) is better\n- 2 is worse", False),
        (f"At 3 points it was {NOT_RUN}.", True),
        ("| a | b |\n| --- | --: |\n| [1](../results/a/b) | 2 |", True),
        ("| a | b |\n| --- | --: |\n| 1 | 2 |", False),
        ("1. The setting `s128` wins.", True),
    ],
)
def test_a_number_needs_its_run(claim: str, supported: bool) -> None:
    assert (unsupported(f"# Title\n\n### What we found\n{claim}\n\n### The paper\nIt says 5.") == []) is supported
