"""The paper's figures say what runs have written down, and nothing of a release."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.conftest import MakeRun

from sottovoce.models.transformer import FAMILY
from sottovoce.report.bound_section import bound_tables
from sottovoce.report.convergence import convergence_bound
from sottovoce.report.curves import dynamics_section, learning_drawings, noised_norms
from sottovoce.report.drawings import Drawing
from sottovoce.report.gradients import DEVIATIONS, NORMS, gradient_profile, gradient_section
from sottovoce.report.layers import layer_drawings, layer_profiles, spread_profiles
from sottovoce.report.page import build_report
from sottovoce.report.paper_comparison import cohort_lines, cohort_section
from sottovoce.report.parts import PageSection
from sottovoce.report.populations import population_drawings
from sottovoce.report.records import RunRecord, read_run
from sottovoce.report.summary import summarise_runs


def read(runs: Path, name: str) -> RunRecord:
    return read_run(name, runs / name)


def names_of(section: PageSection | None) -> list[str]:
    assert section is not None
    return [part.name for part in section.all_parts]  # type: ignore[union-attr]


# Figures 5, 10, 19 and 21 to 23, and the bound.


def layer(before: float, spread: float) -> dict[str, float]:
    return {"norm_before": before, "norm_after": before / 2, "std_before": spread, "std_after": spread / 2}


def test_spreads_are_over_all_clients_of_all_rounds_with_norms_and_matrices_apart() -> None:
    """Two rounds of two clients each, whose norms are 1 and 3, then 5 and 7."""
    rounds = [
        {"layers": {f"blocks.00.mlp.{name}.weight": layer(mean, 1.0) for name in ("hidden", "output", "norm")}}
        for mean in (2.0, 6.0)
    ]
    assert FAMILY.presentation.fine_place is not None
    before, after = spread_profiles(rounds, place=FAMILY.presentation.fine_place)
    expected = float(np.std([1, 3, 5, 7]))
    assert before.blocks == {kind: (pytest.approx(expected),) for kind in ("w1", "w2", "ln2")}
    assert after.blocks["w1"] == (pytest.approx(expected / 2),)


def test_norms_are_drawn_apart_where_spreads_are_known_and_as_ever_where_not(runs: Path) -> None:
    new = read(runs, "noisy")
    old = replace(new, diagnostics=[_without_spreads(record) for record in new.diagnostics])
    profiles = {"new": (new, layer_profiles(new)), "old": (old, layer_profiles(old))}
    drawn = {
        name: {d.name: d.alt for d in layer_drawings(run, own, prefix="", among=[own])}
        for name, (run, own) in profiles.items()
    }
    assert "MLP in (w1)" in drawn["new"]["norms-before"]
    assert "norm 2 (ln2)" in drawn["new"]["norms-spread"]
    assert "norms-spread" not in drawn["old"]
    assert "MLP " in drawn["old"]["norms-before"]
    assert "(w1)" not in drawn["old"]["norms-before"]


def _without_spreads(record: Mapping[str, Any]) -> dict[str, Any]:
    layers = {n: {k: v for k, v in one.items() if k.startswith("norm")} for n, one in record["layers"].items()}
    return {**record, "layers": layers}


def test_the_variance_over_clients_enters_the_bound(runs: Path) -> None:
    """Eq. 68: 5·(η·T_loc)²/q · Σ_h (R_h·M_h/(ξ·C_h))²·Ψ_h, with Ψ_h = E_t[Var_k]."""
    run = read(runs, "noisy")
    bound = convergence_bound(run).bound
    assert bound is not None
    name = "blocks.00.mlp.hidden.weight"
    psi = np.mean([record["layers"][name]["std_before"] ** 2 for record in run.diagnostics])
    reach = 0.1 * 2
    size, total = run.layer_sizes[name], sum(run.layer_sizes.values())
    gradient = max(record["layers"][name]["norm_before"] for record in run.diagnostics) / reach
    ratio = max(record["trust_ratios"]["mlp"][0] for record in run.metrics if "trust_ratios" in record)
    spread = (ratio * gradient / (0.01 * math.sqrt(size / total)) / 1e-6) ** 2
    rate = 3 / run.privacy["population_size"]
    assert bound.layer_terms["inter_client"][name] == pytest.approx(5 * reach**2 / rate * spread * psi)
    terms, _ = bound_tables({run.label: convergence_bound(run)})
    assert "variance over clients" in terms.headings
    assert "which weighs the same" in terms.note


# Figures 7, 13 and 14.


def test_norms_over_rounds_are_those_that_were_written_down(runs: Path) -> None:
    run = read(runs, "noisy")
    section = dynamics_section([run])
    assert names_of(section) == [
        *("gradients-local", "updates-before", "updates-after", "pseudo-gradient", "pseudo-gradient-noised")
    ]
    assert section is not None
    first, last = run.diagnostics[0]["pseudo_gradient_norm"], run.diagnostics[-1]["pseudo_gradient_norm"]
    (drawing,) = (part for part in section.parts if getattr(part, "name", "") == "pseudo-gradient")
    assert f"noisy from {first:,.4g} to {last:,.4g}" in drawing.alt  # type: ignore[union-attr]
    noised = dict(noised_norms(run.metrics))
    # z·C/S on each of P parameters: far more than what the clients say.
    assert noised[1] == pytest.approx(8 / 3 * 0.01 * math.sqrt(sum(run.layer_sizes.values())), rel=0.05)


def test_a_release_shows_no_norms_whatever_lies_in_its_folder(runs: Path, copied: MakeRun) -> None:
    folder = copied("release")
    shutil.copyfile(runs / "noisy/diagnostics.jsonl", folder / "diagnostics.jsonl")
    assert dynamics_section([read_run("release", folder)]) is None


# Figures 8, 9, 17, 18 and 20.


def test_central_gradients_are_means_over_windows_in_which_there_were_any(runs: Path) -> None:
    windows = [{"step": 1, NORMS: {"w1": [2.0, 0.0], "conv": 1.0}}, {"step": 2, NORMS: {"w1": [4.0, 3.0], "conv": 2.0}}]
    profile = gradient_profile(windows, NORMS)
    assert profile.blocks == {"w1": (3.0, 3.0)}
    assert profile.outside == {"conv": 1.5}
    run = read(runs, "central")
    assert names_of(gradient_section([run])) == ["gradients", "gradients-along", "gradients"]
    older = replace(run, metrics=[{k: v for k, v in record.items() if k != DEVIATIONS} for record in run.metrics])
    assert gradient_section([older]) is None, "the last step of each window is no mean"


# Figures 11 and 12, and what a run is known by.


def scored_on(run: RunRecord, *, cohort: int = 3, label: str = "run", **rates: float) -> RunRecord:
    """`run` with other test sets, and another cohort."""
    config = json.loads(json.dumps(run.config))
    config["federation"]["cohort_size"] = cohort
    test = {name.replace("_", "-"): {**run.tests["test"], "wer": rate} for name, rate in rates.items()}
    results = {**run.results, "test": test, "start": {"test": test}}
    return replace(run, label=label, config=config, results=results)


def test_the_headline_is_a_test_set_that_nothing_was_chosen_on(runs: Path) -> None:
    run = read(runs, "noisy")
    assert scored_on(run, dev=0.1, test=0.2).headline_test == "test"
    assert scored_on(run, dev_clean=0.1, test_clean=0.2, test_other=0.3).headline_test == "test-clean"
    assert scored_on(run, dev=0.1, crowd=0.2).headline_test == "crowd"
    assert scored_on(run, dev=0.1).headline_test == "dev"
    assert not scored_on(run, dev=0.1).is_chosen_on("elsewhere:dev")
    rows = summarise_runs([scored_on(run, dev=0.1, test=0.2)], path=Path("report.html")).rows
    assert [row[:4] for row in rows] == [
        ("before federation", "test", "not shown", "20.0%"),
        ("before federation", "dev (chosen on)", "not shown", "10.0%"),
        ("run", "test", "not shown", "20.0%"),
        ("run", "dev (chosen on)", "not shown", "10.0%"),
    ]


def test_test_sets_over_rounds_leave_out_what_was_chosen_on(runs: Path) -> None:
    run = read(runs, "noisy")
    metrics = [{"step": step, "dev_wer": 0.5, "test_wer": {"dev": 0.5, "test": 0.6 - step / 10}} for step in (0, 2, 4)]
    drawn = {drawing.name: drawing for drawing in learning_drawings([replace(run, metrics=metrics)])}
    assert {*drawn} == {"dev-wer", "along-test", "loss"}
    assert "noisy from 60.0% to 20.0%" in drawn["along-test"].alt
    assert "by whom the model was chosen" in drawn["dev-wer"].caption


# Figures 2 to 4.


def test_cohorts_are_drawn_by_what_tells_runs_apart(runs: Path) -> None:
    run = read(runs, "noisy")

    def made(seed_model: str | None, cohort: int, rate: float, rule: str = "speaker") -> RunRecord:
        found = scored_on(run, cohort=cohort, test=rate)
        federation = {**found.federation, "seed_model": seed_model, "clients": {"rule": rule}}
        return replace(found, config={**found.config, "federation": federation})

    seeded = [made("a/seed", 8, 0.3), made("a/seed", 32, 0.2), made("a/seed", 32, 0.1)]
    assert cohort_lines(seeded) == {"all": [(8.0, 0.3), (32.0, pytest.approx(0.15))]}
    fresh = [made(None, 8, 0.9), made(None, 32, 0.8)]
    shuffled = [made("a/seed", 8, 0.25, "iid"), made("a/seed", 32, 0.12, "iid")]
    alone = [made("another", 8, 0.5)]
    assert [*cohort_lines([*seeded, *fresh, *alone])] == ["from seed", "no seed"]
    assert [*cohort_lines([*seeded, *shuffled])] == ["by speaker", "IID"]
    assert [*cohort_lines([*seeded, *fresh, *shuffled])] == [
        "from seed, by speaker",
        "no seed, by speaker",
        "from seed, IID",
    ]
    assert cohort_section([*alone, read(runs, "central")]) is None
    assert names_of(cohort_section([*seeded, read(runs, "central")])) == ["cohorts"]


def test_what_is_compared_has_the_same_axis(runs: Path) -> None:
    """Rates over rounds and over ε; norms before and after; the layers of two runs; two test sets of one run."""

    def ends(parts: Sequence[object], *names: str, axis: str = "y") -> set[tuple[float, float]]:
        known = {part.name: part for part in parts if isinstance(part, Drawing)}
        shown = [known[name].draw().axes[0] for name in names]
        return {one.get_ylim() if axis == "y" else one.get_xlim() for one in shown}

    found = [read(runs, "noisy"), read(runs, "quiet")]
    parts = build_report(found, title="Two runs").drawings
    assert len(ends(parts, "dev-wer", "privacy-utility")) == 1
    assert len(ends(parts, "updates-before", "updates-after")) == 1
    assert len(ends(parts, "pseudo-gradient", "pseudo-gradient-noised")) == 1
    norms = [f"{run}-norms-{when}" for run in ("noisy", "quiet") for when in ("before", "after")]
    assert len(ends(parts, *norms)) == 1
    assert len(ends(parts, "noisy-trust-ratios", "quiet-trust-ratios")) == 1
    worse = json.loads(json.dumps(found[0].tests["test"]))
    for person in worse["per_speaker"]:
        person["wer"] = 3.0
    worse["groups"]["gender"]["female"] |= {"wer": 3.0, "wer_interval": [2.5, 3.5]}
    two = replace(found[0], results={**found[0].results, "test": {"test": found[0].tests["test"], "other": worse}})
    parts = build_report([two], title="Two test sets").drawings
    assert len(ends(parts, "speakers-test", "speakers-other")) == 1
    assert len(ends(parts, "groups-test", "groups-other", axis="x")) == 1


def test_epsilon_against_population_is_that_of_the_plan(runs: Path) -> None:
    """From the run's own people to where its recipe has ε ≤ 8, as `results.json` knows it, and on."""
    run = read(runs, "noisy")
    (drawing,) = population_drawings([run])
    line = drawing.draw().axes[0].lines[0]
    people, epsilons = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert people[0] == run.privacy["population_size"]
    assert epsilons[0] == pytest.approx(run.privacy["epsilon_pld"], rel=0.01)
    assert (np.diff(epsilons) < 0).all()
    assert "with 18 people" in drawing.alt
    assert population_drawings([read(runs, "quiet"), read(runs, "central")]) == []
    twice = population_drawings([run, replace(run, label="again")])
    assert "noisy and 1 more" in twice[0].alt
