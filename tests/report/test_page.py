"""The page says what the run folders say, names what they lack, and hands on nothing that they did not mean to tell."""

import csv
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape
from tests.report.conftest import MakeRun
from typer.testing import CliRunner

from sottovoce.base.errors import InputError
from sottovoce.cli import app
from sottovoce.evaluation.error_rates import count_word_errors, sum_counts
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import layer_index, parameter_kind
from sottovoce.report.bound_section import _premise_verdict
from sottovoce.report.convergence import convergence_bound
from sottovoce.report.drawings import Drawing
from sottovoce.report.first_screen import FirstScreen
from sottovoce.report.layers import mean_profile, noise_profile, norm_profiles
from sottovoce.report.page import ReportPage, as_html, build_report, write_figures, write_tables
from sottovoce.report.paper_comparison import paper_tables
from sottovoce.report.parts import MacroPart, PageSection
from sottovoce.report.people import align_words
from sottovoce.report.records import RunRecord, find_runs, read_run

LAYERED = {"norms-before", "norms-spread", "norms-after", "noise-to-signal", "trust-ratios"}
OVER_ROUNDS = {"gradients-local", "updates-before", "updates-after", "pseudo-gradient", "pseudo-gradient-noised"}


def reported(folders: Sequence[Path], *, title: str = "A report") -> ReportPage:
    return build_report([read_run(folder.name, folder) for folder in folders], title=title)


def words_of(page: str) -> str:
    """What a reader sees: no tags, one space where there are several."""
    return " ".join(unescape(re.sub(r"<(style|svg).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)).split())


@pytest.fixture(scope="module")
def noisy(runs: Path) -> ReportPage:
    return reported([runs / "noisy"])


@pytest.fixture(scope="module")
def page(noisy: ReportPage) -> str:
    """Drawing takes a while: the page of one run is made once."""
    return as_html(noisy)


def text_of(report: ReportPage) -> str:
    """The same without the figures."""
    without = [
        replace(section, parts=tuple(part for part in section.parts if not isinstance(part, Drawing)))
        for section in report.sections
    ]
    return words_of(as_html(replace(report, screen=replace(report.screen, drawing=None), sections=tuple(without))))


def names_of(report: ReportPage) -> set[str]:
    return {drawing.name for drawing in report.drawings}


# One run.


def test_the_page_of_a_simulation_has_every_chapter_and_its_own_numbers(
    runs: Path, noisy: ReportPage, page: str
) -> None:
    assert [section.anchor for section in noisy.sections] == [
        *("verdict", "headline", "settings", "learning", "privacy", "layers", "dynamics", "bound", "people"),
        *("transcripts", "clients", "speed", "ledger", "paper"),
    ]
    assert names_of(noisy) == LAYERED | OVER_ROUNDS | {
        *("dev-wer", "loss", "epsilon", "privacy-utility", "epsilon-population", "speakers-test", "groups-test"),
        *("clients", "throughput", "wer-epsilon"),
    }
    words = words_of(page)
    results = json.loads((runs / "noisy/results.json").read_text())
    privacy = results["privacy"]
    assert f"test word error rate {100 * results['test']['test']['wer']:.1f} %" in words
    assert f"chosen on dev (WER {100 * results['model']['dev_wer']:.1f} %)" in words
    assert f"PLD {privacy['epsilon_pld']:,.4g}, RDP {privacy['epsilon_rdp']:,.4g}; δ = 0.001" in words
    assert f"population for ε ≤ 8 (PLD) {privacy['useful']['pld']['population_size']:,}" in words
    assert "simulated seeded: not a release" in words
    assert "sound; ends as the results say" in words
    assert "Table 9 test 12.3 %" in words
    assert " 900 20 4 7.2 " in words, "the paper's ε stands beside ours for the population it is about"
    (beside,) = (table for table in noisy.tables if table.name == "paper-clients")
    ours = privacy["population_size"]
    assert beside.rows == (("noisy", "25", f"{ours:,}", f"{100 * (ours - 25) / 25:+.2g} %"),)


def test_a_number_that_nobody_could_check_is_marked(runs: Path) -> None:
    run = read_run("noisy", runs / "noisy")
    paper = run.config["paper"] | {"unverified": "not legible"}
    (rates, *_) = paper_tables([replace(run, config=run.config | {"paper": paper})])
    assert [row[3] for row in rates.rows] == ["12.3 % (unverified)"]
    assert rates.note == "Unverified: not legible."


def test_a_release_shows_what_it_may_and_says_why_it_shows_no_more(runs: Path) -> None:
    report = reported([runs / "release"])
    assert names_of(report) == {
        *("dev-wer", "epsilon", "privacy-utility", "epsilon-population", "trust-ratios", "speakers-test"),
        *("groups-test", "wer-epsilon"),
    }
    words = text_of(report)
    assert "release secure randomness" in words
    assert "by-products of private data that no ε covers" in words
    assert "a release keeps no norms of updates" in words
    assert "sound" in words


def test_central_training_has_nothing_about_privacy_but_that_it_is_not(runs: Path) -> None:
    report = reported([runs / "central"])
    anchors = {"verdict", "headline", "settings", "learning", "gradients", "people", "speed"}
    assert {section.anchor for section in report.sections} == anchors
    assert "ε" not in text_of(report)
    assert not any("ε" in drawing.caption for drawing in report.drawings)


def test_the_page_stands_alone(page: str) -> None:
    assert "<script" not in page
    assert not re.search(r"\b(src|srcset|data)=", page)
    assert all(link.startswith("#") for link in re.findall(r'href="([^"]*)"', page))
    assert not re.search(r"url\((?!#)", page), "a colour or a clip path of another page"
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "names, which nobody fetches"


def test_no_two_things_have_one_id_and_every_reference_is_answered(runs: Path) -> None:
    page = as_html(reported([runs / name for name in ("quiet", "release")]))
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page)) <= {(i, "") for i in ids} | {("", i) for i in ids}


def test_every_figure_is_told_in_words(noisy: ReportPage, page: str) -> None:
    for drawing in noisy.drawings:
        assert re.search(r"\d", drawing.alt), f"{drawing.name}: numbers, for whoever cannot see the lines"
        assert f'role="img" aria-label="{escape(drawing.alt)}"' in page
        assert escape(drawing.caption) in page


def test_the_same_folders_give_the_same_bytes(runs: Path, page: str) -> None:
    assert as_html(reported([runs / "noisy"])) == page


def test_a_name_is_a_name_whatever_it_says(copied: MakeRun, tmp_path: Path) -> None:
    hostile = '"><script>alert(1)</script>$x$'
    record = read_run(hostile, copied("release"))
    other = read_run("other", tmp_path / "release")
    page = as_html(build_report([record, other], title=hostile))
    assert "<script" not in page
    assert escape(hostile) in page


# What is missing or spoilt.


@pytest.mark.parametrize("name", ["noisy", "release", "central"])
def test_no_missing_file_breaks_the_page(copied: MakeRun, name: str, tmp_path: Path) -> None:
    folder = copied(name)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    whole = {drawing.name: drawing.alt for drawing in reported([folder]).drawings}
    for file in files:
        kept = file.read_bytes()
        file.unlink()
        report = reported([folder])
        assert names_of(report) <= whole.keys()
        for drawing in report.drawings:
            if drawing.alt != whole[drawing.name]:  # otherwise it has the same numbers, and drawing takes a while
                drawing.draw()
        file.write_bytes(kept)
    for file in files:
        alone = tmp_path / "alone" / file.name
        alone.mkdir(parents=True)
        shutil.copy(file, alone)
        assert reported([alone]).sections, f"{file.name} alone"


def test_an_unfinished_run_is_shown_as_far_as_it_came(copied: MakeRun) -> None:
    folder = copied("noisy")
    (folder / "results.json").unlink()
    report = reported([folder])
    assert {"dev-wer", "epsilon", "norms-before"} <= names_of(report)
    words = text_of(report)
    assert "noisy is not finished" in words
    assert "sound; no results to compare its end with" in words


def test_a_torn_line_is_named_and_what_came_before_it_is_kept(copied: MakeRun) -> None:
    folder = copied("noisy")
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]) + '{"step": 3, "lr"')
    record = read_run("noisy", folder)
    assert [one["step"] for one in record.metrics] == [0, 1, 2]
    assert record.problems == ("metrics.jsonl: line 4 is torn; it and what follows are left out",)
    assert record.problems[0] in text_of(build_report([record], title="Torn"))


def test_spoilt_settings_are_named(copied: MakeRun) -> None:
    folder = copied("noisy")
    (folder / "config.yaml").write_text("about: [")
    (folder / "results.json").write_text("[]")
    problems = read_run("noisy", folder).problems
    assert [problem.split()[0] for problem in problems] == ["results.json", "config.yaml"]


@pytest.mark.parametrize("content", ["[" * 100_000, "7" * 5_000])
def test_what_is_too_deep_or_too_large_is_named(copied: MakeRun, content: str) -> None:
    folder = copied("noisy")
    for name in ("results.json", "config.yaml", "environment.json"):
        (folder / name).write_text(content)
    (folder / "metrics.jsonl").write_text(content + "\n")
    problems = read_run("noisy", folder).problems
    assert [problem.split()[0].strip(":") for problem in problems] == [
        "results.json",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
    ]


@pytest.mark.parametrize("spoil", ["changed", "shortened"])
def test_a_ledger_that_was_touched_is_called_unsound(copied: MakeRun, spoil: str) -> None:
    folder = copied("noisy")
    ledger = folder / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    # The chain alone cannot show that whole lines are gone: the results know how it ended.
    kept = lines[:-1] if spoil == "shortened" else [*lines[:2], lines[2].replace('"step":1', '"step":7'), *lines[3:]]
    assert kept != lines
    ledger.write_text("".join(kept))
    record = read_run("noisy", folder)
    assert record.ledger is not None
    assert record.ledger.epsilon is None
    assert "NOT SOUND" in text_of(build_report([record], title="Touched"))


# Several runs.


def test_several_runs_are_compared(runs: Path) -> None:
    report = reported([runs / name for name in ("noisy", "quiet", "central")])
    tables = {table.name: table for table in report.tables}
    assert tables["differences"].headings[0] == ""
    assert {"noise", "kind"} <= set(tables["differences"].headings)
    assert [row[0] for row in tables["differences"].rows] == ["noisy", "quiet", "central"]
    assert "seed" in {row[0] for row in tables["settings"].rows}
    both = next(drawing for drawing in report.drawings if drawing.name == "dev-wer")
    assert all(name in both.alt for name in ("noisy", "quiet", "central"))
    assert {"noisy-norms-before", "quiet-norms-before"} <= names_of(report)
    assert "quiet-noise-to-signal" not in names_of(report), "nothing was added to it"


def test_a_run_is_drawn_by_the_measure_it_was_chosen_by(copied: MakeRun, runs: Path) -> None:
    """Also beside one that was chosen by another."""
    folder = copied("noisy")
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().replace('"dev_wer"', '"dev_loss"'))
    alone = reported([folder])
    assert {"dev-loss", "privacy-loss"} <= names_of(alone)
    assert not {"dev-wer", "privacy-utility"} & names_of(alone)
    told = next(drawing.alt for drawing in alone.drawings if drawing.name == "dev-loss")
    assert "%" not in told
    assert {"dev-loss", "dev-wer"} <= names_of(reported([folder, runs / "quiet"]))


def test_runs_are_found_in_suites_and_told_apart(runs: Path, copied: MakeRun, tmp_path: Path) -> None:
    assert list(find_runs([runs])) == ["central", "noisy", "quiet", "release"]
    again = copied("noisy")
    assert list(find_runs([runs / "noisy", again, runs / "noisy"])) == ["runs/noisy", f"{tmp_path.name}/noisy"]
    (tmp_path / "empty").mkdir()
    for nothing in ("empty", "nowhere"):
        with pytest.raises(InputError, match=nothing):
            find_runs([tmp_path / nothing])


# Layers.


def test_norms_of_one_kind_in_a_layer_add_up_as_one_vector() -> None:
    """Round means of the weight 3 and of the bias 4: together 5. The final norm stands outside the blocks."""

    def of_round(weight: float, bias: float) -> dict[str, Any]:
        norms = {"blocks.00.mlp.norm.weight": weight, "blocks.00.mlp.norm.bias": bias, "final.norm.weight": 7.0}
        return {"layers": {name: {"norm_before": norm, "norm_after": norm / 2} for name, norm in norms.items()}}

    before, after = norm_profiles([of_round(2, 4), of_round(4, 4)], place=FAMILY.place)
    assert before.blocks == {"layer_norm": (5.0,)}
    assert before.outside == {"layer_norm": 7.0}
    assert after.blocks == {"layer_norm": (2.5,)}


def test_noise_to_signal_weighs_tensors_by_their_size() -> None:
    """With noise of std 1, a tensor of d elements has noise of norm √d.

    Signals: 2·√9 = 6 and 0.5·√16 = 2, so the whole has √(36 + 4); noise: √(9 + 16) = 5.
    """
    record = {"signal_to_noise": {"blocks.00.mlp.hidden.weight": 2.0, "blocks.00.mlp.output.weight": 0.5, "conv": None}}
    sizes = {"blocks.00.mlp.hidden.weight": 9, "blocks.00.mlp.output.weight": 16}
    found = noise_profile([record], sizes=sizes, place=FAMILY.place)
    assert found.blocks.keys() == {"mlp"}
    assert found.blocks["mlp"] == pytest.approx((5 / math.sqrt(40),))
    assert found.outside == {}, "a tensor that gets no noise has no ratio"


def test_trust_ratios_are_means_over_rounds() -> None:
    records: list[dict[str, Any]] = [{"step": 0}, {"trust_ratios": {"mlp": [1.0, 2.0], "conv": 3.0}}]
    records.append({"trust_ratios": {"mlp": [3.0, 4.0], "conv": 5.0}})
    found = mean_profile([record["trust_ratios"] for record in records if record.get("trust_ratios")])
    assert (found.blocks, found.outside) == ({"mlp": (2.0, 3.0)}, {"conv": 4.0})


# The bound.


def largest_ratio(record: RunRecord, name: str) -> float:
    kind, layer = parameter_kind(name), layer_index(name)
    seen = [one["trust_ratios"][kind] for one in record.metrics if "trust_ratios" in one]
    return max(one if isinstance(one, float) else max(one) if layer is None else one[layer] for one in seen)


def test_the_noise_term_follows_from_the_run_and_what_is_unknown_is_said(runs: Path) -> None:
    """Eq. 33: Σ_h (R_h·C·σ_DP/ξ)²·d_h with C = 0.01, σ_DP = z/S = 8/3 and LAMB's ξ = 1e-6."""
    record = read_run("noisy", runs / "noisy")
    found = convergence_bound(record)
    assert found.bound is not None
    by_hand = [(largest_ratio(record, name) * 0.01 * 8 / 3 / 1e-6) ** 2 * d for name, d in record.layer_sizes.items()]
    assert found.bound.terms["dp_noise"] == pytest.approx(math.fsum(by_hand))
    unknown = {name for name, value in found.bound.terms.items() if math.isnan(value)}
    assert unknown == {*("local_drift", "trust_ratio", "intra_client", "global_update_noise", "local_update_noise")}
    assert not found.bound.holds
    verdicts = {assumption.name: _premise_verdict(assumption) for assumption in found.bound.assumptions}
    assert verdicts["server_lr·L < 1"] == "not measured"
    assert verdicts["κ > 0"] == "does not hold", "local_lr·local_steps = 0.2 is far from 1"


@pytest.mark.parametrize(
    ("section", "value", "why"),
    [("server", {"optimiser": {"name": "sgd"}}, "about LAMB"), ("local", {"local_steps": None}, "local_epochs")],
)
def test_a_run_that_the_theorems_do_not_cover_has_no_bound(runs: Path, section: str, value: Any, why: str) -> None:
    record = read_run("noisy", runs / "noisy")
    record.federation[section].update(value)
    assert convergence_bound(record).bound is None
    assert why in convergence_bound(record).why


@pytest.mark.parametrize(("setting", "value"), [("noise_scope", {"groups": ["mlp"]}), ("normalise", "always")])
def test_nor_has_one_whose_noise_or_clipping_is_another(runs: Path, setting: str, value: Any) -> None:
    record = read_run("noisy", runs / "noisy")
    assert record.ledger is not None
    assert record.ledger.report is not None
    record.ledger.report.header["plan"][setting] = value
    assert convergence_bound(record).bound is None
    assert setting in convergence_bound(record).why


# Transcripts.

TEXT = st.lists(st.sampled_from(["one", "two", "three", "<b>", "&"]), max_size=7).map(" ".join)


@given(reference=TEXT, hypothesis=TEXT)
def test_an_alignment_tells_both_texts_and_counts_every_error(reference: str, hypothesis: str) -> None:
    found = align_words(reference, hypothesis)
    assert " ".join(s.reference for s in found if s.reference) == reference
    assert " ".join(s.hypothesis for s in found if s.hypothesis) == hypothesis
    wrong = sum(max(len(s.reference.split()), len(s.hypothesis.split())) for s in found if s.is_error)
    assert wrong == sum_counts(count_word_errors([reference], [hypothesis])).errors
    assert "<b>" not in "".join(marked((reference, hypothesis)))


def marked(*samples: tuple[str, str]) -> list[str]:
    """HTML of transcripts on a page."""
    block = MacroPart("transcripts", [align_words(*sample) for sample in samples])
    screen = FirstScreen("release", "", "", "", (), None)
    page = as_html(ReportPage("", "", (), screen, (PageSection("transcripts", "", "", (block,)),), ()))
    return re.findall("<li>(.*)</li>", page.partition("<main>")[2])


def test_errors_are_marked_in_place() -> None:
    assert marked(("abc de", "abc d e"), ("a b", ""), ("", ""), ("<b>", "<b>")) == [
        "abc <ins>d</ins> <del>de</del><ins>e</ins>",
        "<del>a b</del>",
        "<i>nothing said, nothing recognised</i>",
        "&lt;b&gt;",
    ]


# Files and the command.


def test_figures_and_tables_are_files_too(runs: Path, tmp_path: Path) -> None:
    report = reported([runs / "release"])
    figures = write_figures(tmp_path / "figures", report)
    assert {path.name for path in figures} == {f"{n}{suffix}" for n in names_of(report) for suffix in (".png", ".svg")}
    assert all(path.stat().st_size > 1000 for path in figures)
    for path, table in zip(write_tables(tmp_path / "tables", report), report.tables, strict=True):
        with path.open(newline="") as file:
            headings, *rows = csv.reader(file)
        words = len(headings) if table.all_words else table.words
        assert [tuple(row[:words]) for row in (headings, *rows)] == [
            row[:words] for row in (table.headings, *table.rows)
        ]
        numbers = [place for place in range(words, len(headings)) if headings[place] != "head"]
        assert all(row[place] == "" or math.isfinite(float(row[place])) for row in rows for place in numbers)
    assert len({table.name for table in report.tables}) == len(report.tables), "no file is written twice"


def test_numbers_of_a_csv_are_those_of_the_page(runs: Path) -> None:
    tests = next(table for table in reported([runs / "noisy", runs / "quiet"]).tables if table.name == "tests")
    headings, *rows = csv.reader(tests.as_csv().splitlines())
    wers = [row[headings.index("WER, %")] for row in rows]
    assert wers == [row[tests.headings.index("WER")].removesuffix(" %") for row in tests.rows]
    lows = [row[headings.index("95 % interval, low, %")] for row in rows]
    assert lows == [
        row[tests.headings.index("95 % interval")].partition(" to ")[0].replace("–", "") for row in tests.rows
    ]


def test_the_command_writes_the_page(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    command = [
        "report",
        str(runs / "quiet"),
        str(runs / "release"),
        "--out",
        str(out),
        "--csv",
        str(tmp_path / "csv"),
        "--json",
    ]
    told = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert list(told["runs"]) == ["quiet", "release"]
    assert all(Path(path).is_file() for path in told["written"])
    words = words_of(out.read_text())
    for name in told["runs"]:
        wer = json.loads((runs / name / "results.json").read_text())["test"]["test"]["wer"]
        assert f"{name} not shown {wer:.1%}" in words  # two evaluations are too few to say that it had converged


@pytest.mark.parametrize(("out", "told"), [("report.pdf", "ends in .html"), ("nowhere/report.html", "does not exist")])
def test_a_place_that_cannot_be_written_is_refused_at_once(runs: Path, tmp_path: Path, out: str, told: str) -> None:
    found = CliRunner().invoke(app, ["report", str(runs), "--out", str(tmp_path / out)])
    assert isinstance(found.exception, InputError)
    assert told in str(found.exception)
