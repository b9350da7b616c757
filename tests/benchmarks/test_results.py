"""RESULTS*.md say what the kept runs say, and the kept runs say what the runs said."""

import doctest
import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import results as program
from findings import document, keeping, kept, numbers, pages
from findings.document import IMAGES, NOT_RUN, render, render_all, render_passages, templates, unsupported
from findings.keeping import FILES, keep
from findings.kept import Kept
from findings.numbers import told_epsilon
from findings.pages import REMOVED, recipe_of, suite_pages
from findings.rates import difference
from jinja2 import Environment
from jinja2.nodes import Const
from tests.benchmarks.rendering import Copy, archived, rendered
from tests.tampering import rechain

from sottovoce.audit.recipe import AUDIT_SUFFIX as AUDIT
from sottovoce.audit.recipe import audit_path, config_digest
from sottovoce.base.errors import InputError
from sottovoce.config import Suite, load_experiment
from sottovoce.report.archives import open_path
from sottovoce.report.records import read_run

ROOT = Path(__file__).parents[2]
TEMPLATES = templates(ROOT / "docs")
DOCUMENTS = ("RESULTS-gao.md", "RESULTS-ramesh.md", "RESULTS.md")

# What is in the repository.


@pytest.fixture(scope="module")
def here() -> Kept:
    """All of it, each run read once: its ledger is verified, which takes some hundredths of a second."""
    return Kept(ROOT / "results", ROOT / "docs")


def test_the_documents_are_what_the_kept_runs_give(here: Kept) -> None:
    made = render_all(here)
    assert sorted(path.name for path in made) == sorted(DOCUMENTS)
    assert sorted(path.name for path in (ROOT / "docs").glob("RESULTS*.md")) == sorted(DOCUMENTS)
    figures: dict[str, bytes] = {}
    for path, found in made.items():
        assert path.read_text() == found.text, "make results"
        assert not figures.keys() & found.figures.keys()
        figures |= found.figures
        pages = {page.stem: page.read_text() for page in (ROOT / "results").glob("*.md") if page.stem != "README"}
        assert pages == found.pages, "make results"
    for path, text in render_passages(here, root=ROOT)[0].items():
        assert path.read_text() == text, f"{path.name}: make results"
    drawn = {path.stem: path.read_bytes() for path in (ROOT / "docs" / IMAGES).glob("*.svg")}
    assert drawn == figures, "make results"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_claim_shows_its_run(document: str) -> None:
    assert unsupported((ROOT / "docs" / document).read_text()) == []


@pytest.mark.parametrize(
    ("document", "fewest"), [("RESULTS-gao.md", 14), ("RESULTS-ramesh.md", 60), ("RESULTS.md", 250)]
)
def test_every_link_leads_to_its_run(document: str, fewest: int) -> None:
    links = set(re.findall(r"\]\(\.\./results/([^)]*)\)", (ROOT / "docs" / document).read_text()))
    assert len(links) > fewest
    for link in links:
        page, _, label = link.partition("#")
        assert f'<a id="{label}"></a>\n\n## {label}\n' in (ROOT / "results" / page).read_text(), link


def test_what_is_kept_is_small_and_sound(here: Kept) -> None:
    assert {path.suffix for path in (ROOT / "results").rglob("*") if path.is_file()} == {".zip", ".md"}
    kept = sum(path.stat().st_size for path in (ROOT / "results").iterdir())
    assert kept <= 11e6  # the benches of three papers, the figures of one, a table of it whole, and what is had
    names = {f"{suite}/{label}" for suite in here.suites() for label in here.labels(suite)}
    assert len(names) > 300
    for suite in here.suites():
        inside = open_path(ROOT / f"results/{suite}.zip")
        files = {path.relative_to(inside) for path in inside.rglob("*") if path.is_file()}
        audits = {path for path in files if path.name.endswith(AUDIT) and path.parent == Path()}
        assert {f"{suite}/{path.name.removesuffix(AUDIT)}" for path in audits} <= names
        files -= audits
        assert {f"{suite}/{path.parent}" for path in files} <= names
        assert {path.name for path in files} <= set(FILES)
    sizes = [path.stat().st_size for name in names for path in here.run(name).folder.iterdir()]
    assert sum(sizes) <= 44e3 * len(names)
    for found in map(here.run, names):
        assert not found.problems
        assert found.ledger is None or not found.ledger.problem


@pytest.mark.parametrize(
    ("document", "fewest"), [("RESULTS-gao.md", 4), ("RESULTS-ramesh.md", 12), ("RESULTS.md", 100)]
)
def test_the_template_names_runs_that_its_recipes_make(document: str, fewest: int) -> None:
    template = TEMPLATES[ROOT / "docs" / document]
    constants = {found.value for found in Environment().parse(template.read_text()).find_all(Const)}
    named = [str(value).split("/") for value in constants if "/" in str(value)]
    assert len(named) > fewest
    for suite, label in named:
        found = load_experiment(recipe_of(suite))
        assert isinstance(found, Suite)
        assert (label in found.runs) != (REMOVED.get(suite, ("",))[0] == label), f"{suite}/{label}"


# Clients.


def heard_clients(folder: Path, before: list[float], after: list[float]) -> None:
    """Clients with one second more each, in the order of their rates after, as runs write them."""
    people = [
        {"seconds": float(n), "words": 10, "before": b, "after": a}
        for n, (b, a) in enumerate(zip(before, after, strict=True))
    ]
    content = json.loads((folder / "results.json").read_text())
    content["clients"] = {
        "clients": len(people),
        **{when: summarised([p[when] for p in people]) for when in ("before", "after")},
        "better": sum(p["after"] < p["before"] for p in people),
        "worse": sum(p["after"] > p["before"] for p in people),
        "by_seconds": [{"clients": len(people), "seconds": [0.0, 5.0], "before": 0.5, "after": 0.25}],
        "per_client": sorted(people, key=lambda p: p["after"]),
    }
    (folder / "results.json").write_text(json.dumps(content))


def summarised(rates: list[float]) -> dict[str, Any]:
    within = [rate for rate in rates if rate <= 1]
    return {
        "mean": sum(rates) / len(rates),
        "mean_without_above_100": sum(within) / len(within),
        "share_above_50": sum(rate > 0.5 for rate in rates) / len(rates),
        "share_above_100": sum(rate > 1 for rate in rates) / len(rates),
    }


def test_clients_are_compared_with_themselves(results: Path, copy: Copy) -> None:
    """Everybody gains 20 points and 10 more by the better weighting, whatever order their rates have."""
    seed = ("seed: 1\n", "seed: 2\n")
    before = [0.9, 0.3, 0.6, 1.3]
    for label, gained in (("a", 0.2), ("b", 0.3)):
        heard_clients(copy(label), before, [rate - gained for rate in before])
        heard_clients(copy(f"{label}-seed2", seed), before, [rate - gained for rate in before])
    told = rendered(
        results,
        '{{ client_gain("suite/a") }}\n{{ client_difference("suite/b", "suite/a") }}\n{{ client_mean("suite/a") }}\n'
        '{{ client_mean("suite/a", "before") }}\n{{ client_table("suite", only=["a"]) }}\n'
        '{{ client_amounts("suite/a") }}\n{{ client_figure("suite/a", "suite/b", name="clients") }}',
    ).splitlines()
    assert told[0].startswith(
        "−20.0 points (−20.0 to −20.0, whole seeds, not converged; seeds [1](../results/suite.md#a), [2]("
    )
    assert told[1].startswith(
        "−10.0 points (−10.0 to −10.0, whole seeds, not converged; seeds [1](../results/suite.md#b)/"
        "[1](../results/suite.md#a)"
    )
    assert told[2].startswith("57.5 % (57.5–57.5, whole seeds, not converged; seeds ")
    assert told[3].startswith("77.5 % (")
    assert told[6].startswith(
        "| a | 4 | 77.5 (77.5–77.5) | 57.5 (57.5–57.5) | 40.0 (40.0–40.0) | 50.0 (50.0–50.0) | 25.0 "
    )
    assert "| 0–5 | 4 | 50.0 | 25.0 |" in told
    figure = render(results.parent / "docs/results.template.md", results=results).figures["clients"]
    assert figure.count(b'id="data-') == 3, "the start once, and each run"


def test_other_clients_cannot_be_compared(results: Path, copy: Copy) -> None:
    heard_clients(copy("a"), [0.5, 0.5], [0.4, 0.4])
    heard_clients(copy("b"), [0.5] * 3, [0.4] * 3)
    with pytest.raises(InputError, match="expected runs with the same clients"):
        rendered(results, '{{ client_difference("suite/a", "suite/b") }}')
    with pytest.raises(InputError, match="say nothing of single clients"):
        rendered(results, '{{ client_mean("suite/dim") }}')
    with pytest.raises(InputError, match="when=later: expected one of before, after"):
        rendered(results, '{{ client_mean("suite/a", "later") }}')


# Pages of suites.


def test_a_page_says_what_its_runs_say(run: Path, results: Path, copy: Copy) -> None:
    copy("other", ("about: tones", "about: other tones"), ("seed: 1\n", "seed: 2\n"), ("share: dim", "share: global"))
    keep(run, results / "suite/short", brief=True)
    page = suite_pages(Kept(archived(results), results))["suite"]
    parts = dict(zip(*[iter(re.split(r'<a id="(.+)"></a>\n', page)[1:])] * 2, strict=True))
    assert list(parts) == ["dim", "other", "short"]
    told = read_run("dim", results / "suite/dim")
    test, mark = told.tests["test"], told.ledger.report.mark  # type: ignore[union-attr]
    low, high = (f"{100 * bound:.1f}" for bound in test["wer_interval"])
    for line in (
        f"| test WER % | {100 * test['wer']:.1f} ({low}–{high}) |",
        f"| start WER % | {100 * told.results['start']['test']['test']['wer']:.1f}, not converged |",
        "| converged | not shown |",
        f"| dev WER % | {100 * told.results['model']['dev_wer']:.1f} |",
        f"| ledger | {mark.length} lines, the last with hash `{mark.head}` |",
        f"| privacy | {told_epsilon(told)} |",
        "| rounds or steps | 8 |",
        "| engine | sequential: the recipe asks for it |",
        "| again | `sottovoce run benchmark/suite --only dim` |",
    ):
        assert f"\n{line}\n" in parts["dim"]
    assert f"```yaml\n{(run / 'config.yaml').read_text()}```\n\n</details>\n" in parts["dim"]
    assert "\nother tones\n" in parts["other"]
    assert parts["other"].endswith(
        '\nRecipe: that of [dim](#dim), but `federation.privacy.share: "global"`, `seed: 2`.\n\n'
    )
    assert parts["short"].endswith("\nRecipe: that of [dim](#dim).\n")
    assert "\n| ledger | not kept |\n" in parts["short"]


# Encoders.


def test_an_audit_is_told_beside_its_run(results: Path, copy: Copy) -> None:
    audit_of(results / "suite/dim")
    copy("bare")
    text = '{{ audit("suite/dim") }}\n{{ value("suite/dim", "audit.canaries") }}\n{{ audit("suite/bare") }}'
    told = rendered(results, text).splitlines()
    assert told[0] == (
        "[ε promised 7.98, estimated 7.81 (what an attack achieved: 7.02–8.64), at least 2.2, by 1,000 canaries in 20 "
        "rounds: "
        "no alarm](../results/suite.md#dim)"
    )
    assert told[1] == "[1000](../results/suite.md#dim)"
    assert told[2] == NOT_RUN
    document = render(results.parent / "docs/results.template.md", results=results)
    assert document.missing == ("the audit of suite/bare",)
    page = suite_pages(Kept(results, results.parent / "docs"))["suite"]
    assert page.count("| audit | ε promised 7.98, ") == 1
    audit_of(
        results / "suite/dim", verdict="broken", estimate={"epsilon": None, "interval": [9.0, None], "level": 0.98}
    )
    (results / "suite.zip").unlink()
    broken = rendered(results, '{{ audit("suite/dim") }}')
    assert "estimated ∞ (what an attack achieved: 9–∞)" in broken
    assert broken.endswith(": **broken**](../results/suite.md#dim)")


def audit_of(folder: Path, **changes: Any) -> None:
    """As `sottovoce audit` leaves it beside the run in `folder`."""
    content = {
        "accounted": False,
        "config_digest": config_digest((folder / "config.yaml").read_text()),
        "verdict": "consistent",
        "why": "nothing speaks against what is promised",
        "canaries": 1000,
        "rounds": 20,
        "promised": {"epsilon_pld": 7.98, "epsilon_rdp": 9.1},
        "estimate": {"epsilon": 7.81, "interval": [7.02, 8.64], "level": 0.98},
        "lower_bound": {"epsilon": 2.2},
    }
    audit_path(folder).write_text(json.dumps({**content, **changes}))


def test_an_audit_is_kept_with_its_run_unless_it_is_a_release_s(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, archive = Path(shutil.copytree(run, tmp_path / "suite/mine")), tmp_path / "results/suite.zip"

    def kept() -> list[str]:
        program.keep_runs([mine], results=tmp_path / "results", suite=None, rounds=None, brief=False)
        return sorted(path.name for path in open_path(archive).iterdir())

    assert kept() == ["mine"]
    audit_of(mine)
    assert kept() == ["mine", "mine.audit.json"]
    assert (open_path(archive) / "mine.audit.json").read_bytes() == audit_path(mine).read_bytes()
    assert read_run("mine", open_path(archive / "mine")).ledger is not None
    audit_of(mine, config_digest="another's")
    assert kept() == ["mine"]
    assert f"left out: {audit_path(mine)} is a release's, or of another recipe" in capsys.readouterr().out
    config = mine / "config.yaml"
    config.write_text(config.read_text().replace("mode: seeded", "mode: secure"))
    audit_of(mine)
    assert read_run("mine", mine).is_release
    assert kept() == ["mine"]
    audit_path(mine).write_text("{")
    config.write_text(config.read_text().replace("mode: secure", "mode: seeded"))
    with pytest.raises(InputError, match=r"mine\.audit\.json"):
        kept()


def test_encoders_are_told_by_their_loss_and_by_what_is_read_off_them(results: Path, copy: Copy) -> None:
    for label, seed, loss, told in (("enc", 1, 14.0, 0.8), ("enc-seed2", 2, 15.0, 0.9)):
        folder = copy(label, *([("seed: 1\n", f"seed: {seed}\n")] if seed > 1 else []))
        content = json.loads((folder / "results.json").read_text())
        content["test"] = content["start"]["test"] = {"test": {"loss": loss, "accuracy": 0.2, "chance": 0.03}}
        (folder / "results.json").write_text(json.dumps(content))
        probe = {"speaker": {"accuracy": told}, "letters": {"error_rate": 0.25}}
        (folder / "probe.json").write_text(json.dumps(probe))
    told_lines = rendered(
        results,
        '{{ loss("suite/enc") }}\n{{ probe("suite/enc", "speaker", "accuracy") }}\n'
        '{{ table("suite", "loss", "accuracy", "speakers", "letters", only=["enc"]) }}',
    ).splitlines()
    assert told_lines[0].startswith("14.50 (14.00–15.00) (seeds [1](../results/suite.md#enc), [2](")
    assert told_lines[1].startswith("85.0 % (80.0–90.0, whole seeds, not converged; seeds ")
    assert told_lines[4].startswith(
        "| enc | 14.50 (14.00–15.00) | 20.0 (20.0–20.0) | 85.0 (80.0–90.0) | 25.0 (25.0–25.0) |"
    )
    page = suite_pages(Kept(archived(results), results))["suite"]
    part = page.partition('<a id="enc"></a>')[2].partition("<a id=")[0]
    assert "| test loss | 14.00 |" in part
    assert "WER" not in part


# Numbers.


def test_a_difference_is_paired_over_people_and_seeds(results: Path, copy: Copy) -> None:
    """Everybody has one error of ten words less, whatever else they have: exactly −10 points, for any people drawn."""
    seed = ("seed: 1\n", "seed: 2\n")
    copy("worse", errors=[1, 9, 4, 7, 2, 5])
    copy("worse-seed2", seed, errors=[3, 8, 4, 9, 2, 6])
    copy("better", errors=[0, 8, 3, 6, 1, 4])
    copy("better-seed2", seed, errors=[2, 7, 3, 8, 1, 5])
    all_runs = Kept(archived(results), results.parent / "docs")
    better, worse = all_runs.repeats("suite/better"), all_runs.repeats("suite/worse")
    found = difference(better, worse, names=("better", "worse"))
    assert found.seeds == (1, 2)
    assert found.mean == pytest.approx(-0.1)
    assert found.interval == pytest.approx((-0.1, -0.1))
    text = rendered(results, '{{ difference("suite/better", "suite/worse") }}')
    first = "[1](../results/suite.md#better)/[1](../results/suite.md#worse)"
    assert text.startswith(
        f"−10.0 points (−10.0 to −10.0, whole seeds, not converged; seeds {first}, "
        "[2](../results/suite.md#better-seed2)/"
    )


def test_a_gain_is_paired_with_each_seeds_own_start(results: Path, copy: Copy) -> None:
    """Two of ten words better than where it started under one seed, four under the other: −30 points for anybody."""
    for label, more, ends, starts in (
        ("a", (), [1, 5, 4, 0, 2, 3], [3, 7, 6, 2, 4, 5]),
        ("a-seed2", (("seed: 1\n", "seed: 2\n"),), [3, 5, 4, 0, 2, 6], [7, 9, 8, 4, 6, 10]),
    ):
        place = copy(label, *more, errors=starts) / "results.json"
        before = json.loads(place.read_text())["test"]
        place = copy(label, *more, errors=ends) / "results.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | {"start": {"test": before}}))
        rechain(place.parent)
    text = rendered(results, '{{ gain("suite/a") }}')
    assert text.startswith(
        "−30.0 points (−30.0 to −30.0, whole seeds, not converged; seeds [1](../results/suite.md#a), "
    )
    place = copy("nothing-before") / "results.json"
    place.write_text(json.dumps({k: v for k, v in json.loads(place.read_text()).items() if k != "start"}))
    rechain(place.parent)
    with pytest.raises(InputError, match="gain suite/nothing-before: expected a tested start"):
        rendered(results, '{{ gain("suite/nothing-before") }}')


def test_the_mean_is_over_seeds(results: Path, copy: Copy) -> None:
    copy("a", errors=[1] * 6)
    copy("a-seed2", ("seed: 1\n", "seed: 2\n"), errors=[4] * 6)
    text = rendered(results, '{{ mean("suite/a") }}')
    assert text.startswith(
        "25.0 % (10.0–40.0, whole seeds, not converged; seeds [1](../results/suite.md#a), "
        "[2](../results/suite.md#a-seed2))"
    )


def test_letters_are_counted_beside_words(results: Path, copy: Copy) -> None:
    for seed, rate in ((1, 0.2), (2, 0.3)):
        folder = copy("a" if seed == 1 else "a-seed2", ("seed: 1\n", f"seed: {seed}\n"))
        content = json.loads((folder / "results.json").read_text())
        content["test"]["test"]["cer"] = rate
        (folder / "results.json").write_text(json.dumps(content))
    text = rendered(results, '{{ cer("suite/a") }}\n{{ table("suite", "cer", only=["a"]) }}').splitlines()
    assert text[0].startswith("25.0 % (20.0–30.0, whole seeds, not converged; seeds [1](../results/suite.md#a), [2](")
    assert text[1] == "| setting | test CER % | converged | runs by seed |"
    assert text[3].startswith("| a | 25.0 (20.0–30.0) | not shown | [1](")


def test_a_repeat_may_differ_in_its_seed_alone(results: Path, copy: Copy) -> None:
    copy("dim-seed2", ("seed: 1\n", "seed: 2\n"), ("share: dim", "share: uniform"))
    with pytest.raises(
        InputError, match=r"dim-seed2: expected suite/dim with another seed.*federation\.privacy\.share"
    ):
        rendered(results, '{{ mean("suite/dim") }}')


def test_a_repeat_has_the_seed_of_its_name(results: Path, copy: Copy) -> None:
    copy("dim-seed3", ("seed: 1\n", "seed: 2\n"))
    with pytest.raises(InputError, match="says seed 3, its recipe says seed=2"):
        rendered(results, '{{ mean("suite/dim") }}')


def test_other_people_cannot_be_compared(results: Path, copy: Copy) -> None:
    copy("a", errors=[1] * 6)
    with pytest.raises(InputError, match=r"results\.template\.md:2.*tested on the same speakers"):
        rendered(results, '\n{{ difference("suite/a", "suite/dim") }}')


def test_numbers_come_from_the_files(results: Path) -> None:
    told = json.loads((results / "suite/dim/results.json").read_text())
    planned = json.loads((results / "suite/dim/planned.json").read_text())
    text = rendered(
        results,
        '{{ wer("suite/dim") }}\n{{ value("suite/dim", "results.privacy.useful.cohort_size", ",") }}\n'
        '{{ epsilon("suite/dim") }}\n{{ population("suite/dim") }}\n'
        '{{ ratio("suite/dim", "suite/dim", "planned.rdp.population_size") }}\n'
        '{{ ratio("suite/dim", "suite/dim", "planned.rdp.population_size", "results.privacy.population_size") }}',
    ).splitlines()
    low, high = (f"{100 * bound:.1f}" for bound in told["test"]["test"]["wer_interval"])
    assert (
        text[0] == f"[{100 * told['test']['test']['wer']:.1f} % ({low}–{high}, not converged)](../results/suite.md#dim)"
    )
    assert text[1] == f"[{told['privacy']['useful']['cohort_size']:,}](../results/suite.md#dim)"
    assert "at δ = 0.001" in text[2]
    assert f"[{told['privacy']['useful']['population_size']:,} people by RDP" in text[3]
    assert text[4].startswith("1.0×")
    larger = planned["rdp"]["population_size"] / told["privacy"]["population_size"]
    assert larger > 1.1
    assert text[5].startswith(f"{larger:.1f}× (")


def test_a_dev_rate_is_by_what_the_model_was_chosen_by(results: Path, copy: Copy) -> None:
    other = copy("by-ctc") / "results.json"
    other.write_text(other.read_text().replace('"dev_wer": ', '"dev_ctc_wer": '))
    rate = f"{100 * json.loads(other.read_text())['model']['dev_ctc_wer']:.1f}"
    text = rendered(
        results,
        '{{ dev("suite/dim") }}\n{{ dev("suite/by-ctc", "ctc_wer") }}\n{{ table("suite", "dev", "dev-ctc") }}',
    ).splitlines()
    assert text[0] == f"[{rate} %](../results/suite.md#dim) (one seed, not converged)"
    assert text[1] == f"[{rate} %](../results/suite.md#by-ctc) (one seed, not converged)"
    assert text[2].startswith("| setting | dev WER % | dev WER by CTC % |")
    assert [line.split(" | ")[1:3] for line in text[4:6]] == [["–", rate], [rate, "–"]]
    with pytest.raises(InputError, match="suite/by-ctc: expected a rate in each of its runs"):
        rendered(results, '{{ dev("suite/by-ctc") }}')


def test_tables_and_grids_show_their_settings_in_order(results: Path, copy: Copy) -> None:
    for share in ("dim", "uniform"):
        for lr in ("0.01", "0.1"):
            copy(f"{share}-lr{lr}", ("share: dim", f"share: {share}"), ("      lr: 0.01", f"      lr: {lr}"))
    shutil.rmtree(results / "suite/dim")
    table = rendered(
        results, '{{ table("suite", "schedule.lr", "share", "dev", "test", only=["uniform-lr0.1", "dim-lr0.1"]) }}'
    )
    assert [line.split(" | ")[0] for line in table.splitlines()[2:4]] == ["| uniform-lr0.1", "| dim-lr0.1"]
    lines = rendered(results, '{{ table("suite", "schedule.lr", "share", "start", "dev", "test") }}').splitlines()
    assert lines[0].startswith(
        "| setting | `schedule.lr` | `share` | start, test WER %, not converged | dev WER % | test WER % | converged |"
    )
    assert [line.split(" | ")[:3] for line in lines[2:6]] == [
        ["| dim-lr0.01", "0.01", "dim"],
        ["| dim-lr0.1", "0.1", "dim"],
        ["| uniform-lr0.01", "0.01", "uniform"],
        ["| uniform-lr0.1", "0.1", "uniform"],
    ]
    rate = lines[2].split(" | ")[5]
    grid = rendered(results, '{{ grid("suite", label="(.+)-lr(.+)") }}').splitlines()
    assert grid[0] == "| not converged | 0.01 | 0.1 |"
    first, second = (f"[{rate}](../results/suite.md#dim-lr{lr})" for lr in ("0.01", "0.1"))
    assert grid[2] == f"| dim | {first.replace(rate, f'**{rate}**', 1)} | {second} |"
    assert len(grid) == 4
    with pytest.raises(InputError, match="both stand at"):
        rendered(results, '{{ grid("suite", label="(d|u).+(0).+") }}')


def test_figures_are_the_same_bytes_each_time(results: Path, copy: Copy) -> None:
    copy("uniform", ("share: dim", "share: uniform"))
    copy("global", ("share: dim", "share: global"))
    rendered(
        results,
        '{{ wer_figure("suite", name="all") }}\n{{ norms_figure("suite/dim", "suite/uniform", name="norms") }}\n'
        '{{ gain_figure("suite/dim", "suite/uniform", name="gain") }}\n',
    )
    once, again = (render(results.parent / "docs/results.template.md", results=results) for _ in range(2))
    assert once == again
    assert list(once.figures) == ["all", "norms", "gain"]
    for name, content in once.figures.items():
        assert content.count(b'id="data-') >= 2, name
        assert f"](images/results/{name}.svg)" in once.text


@pytest.mark.parametrize("module", [document, keeping, kept, numbers, pages])
def test_examples_are_true(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


# The document.


def test_missing_runs_are_all_named_and_nothing_is_written(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rendered(
        results,
        '{{ difference("suite/a", "suite/b") }} {{ wer("suite/dim") }}{{ table("other") }} {{ wer("suite/dim-seed2") }}'
        '{{ gain_figure("suite/dim-6", "suite/dim", name="g") }} {{ norms_figure("suite/dim", "suite/c", name="n") }}',
    )
    docs = results.parent / "docs"
    assert program.write_documents(results=results, docs=docs, allow_missing=False) == 1
    lost = "suite/a, suite/b, other/…, suite/dim-seed2, suite/dim-6, suite/global-6, suite/global, suite/c"
    assert f"8 runs are named and not kept: {lost}\n" in capsys.readouterr().err
    assert [path.name for path in docs.iterdir()] == ["results.template.md"]
    assert not list(results.glob("*.md"))
    assert program.write_documents(results=results, docs=docs, allow_missing=True) == 0
    assert (docs / "RESULTS.md").read_text().count(NOT_RUN) == 5
    assert [path.name for path in results.glob("*.md")] == ["suite.md"]


def test_figures_that_nobody_shows_and_pages_of_no_suite_are_removed(results: Path) -> None:
    docs = results.parent / "docs"
    for text, names in (('{{ wer_figure("suite", name="a") }}', ["a.svg"]), ("none", [])):
        rendered(results, text)
        assert program.write_documents(results=results, docs=docs, allow_missing=False) == 0
        assert [path.name for path in (docs / IMAGES).iterdir()] == names
    (results / "README.md").touch()
    (results / "suite.zip").rename(results / "other.zip")
    assert program.write_documents(results=results, docs=docs, allow_missing=False) == 0
    assert {path.name for path in results.glob("*.md")} == {"README.md", "other.md"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{{ were("suite/dim") }}', "'were' is undefined"),
        ("{{ wer(dim) }}", "'dim' is undefined"),
        ("{{ wer suite/dim }}", "expected token"),
        ('{{ wer("suite/dim" }}', "unexpected '}'"),
        ('{{ wer("dim") }}', "run=dim: expected suite/label"),
        ("{{ wer(1) }}", "run=1: expected suite/label"),
        ("{{ wer() }}", r"wer\(…\): missing a required argument: 'run'"),
        ('{{ wer("suite/dim", teste="x") }}', r"wer\(…\): got an unexpected keyword argument 'teste'"),
        ('{{ wer("suite/dim", test="other") }}', "test=other: expected one of test"),
        ('{{ value("suite/dim", "results.nothing") }}', "no 'nothing' in .*expected one of"),
        ('{{ value("suite/dim", "results.privacy.delta", "x") }}', "format=x: it does not fit"),
        ('{{ table("suite", "nothing") }}', "setting=nothing: expected a setting of these runs"),
        ('{{ grid("suite", label="(.+)", show="both") }}', "show=both: expected one of test, dev"),
        ('{{ grid("suite", label=".+") }}', "expected a pattern with two groups"),
        ('{{ wer_figure("suite", name="a") }}{{ wer_figure("suite", name="a") }}', "name=a: another figure"),
        ('{{ imbalance("suite/dim", "layer_norm", "nose") }}', "kind=nose: expected one of"),
    ],
)
def test_a_mistake_in_the_template_is_one_clear_line(results: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        rendered(results, text)
    assert str(raised.value).startswith("results.template.md:1: ")
    assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match=r"results\.template\.md:4: "):
        rendered(results, f'# Title\n\nAt {{{{ wer("suite/dim") }}}}\nand {text}')


def test_a_spoilt_ledger_is_no_evidence(results: Path) -> None:
    ledger = results / "suite/dim/ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match=r"ledger"):
        rendered(results, '{{ wer("suite/dim") }}')


@pytest.mark.parametrize(
    ("claim", "supported"),
    [
        ("It is better.", True),
        ("It is 3 points better.", False),
        ("It is [3 points](../results/a.md#b) better.", True),
        ("It is\n3 points better,\nsee [there](../results/a.md#b).", True),
        ("See [there](../results/a.md#b). It is 3 points better.", False),
        ("- [1](../results/a.md#b) is better\n- 2 is worse", False),
        (f"At 3 points it was {NOT_RUN}.", True),
        ("| a | b |\n| --- | --: |\n| [1](../results/a.md#b) | 2 |", True),
        ("| a | b |\n| --- | --: |\n| 1 | 2 |", False),
        ("1. The setting `s128` wins.", True),
    ],
)
def test_a_number_needs_its_run(claim: str, supported: bool) -> None:
    assert (unsupported(f"# Title\n\n### What we found\n{claim}\n\n### The paper\nIt says 5.") == []) is supported
