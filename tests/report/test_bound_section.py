"""A run that estimates what the bound is made of: the same rounds, a sum in the report, and nothing in a release."""

import math
from pathlib import Path
from statistics import fmean
from typing import cast

import pytest
import torch
from tests.report.conftest import FEDERATED

from sottovoce.base.errors import InputError
from sottovoce.config import load_recipe
from sottovoce.privacy.bounds import corollary1
from sottovoce.report.bound_section import BOUNDED, TOTAL, bound_drawings, bound_section, bound_tables
from sottovoce.report.convergence import bound_estimates, convergence_bound
from sottovoce.report.parts import show_number
from sottovoce.report.records import RunRecord, read_run
from sottovoce.training.assemble import assemble
from sottovoce.training.remote_clients import RemoteClients
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext

# Local training that goes as far as the theorem wants, 0.5·2, and a server without momentum.
CHANGES = (
    "federation.local.lr=0.5",
    "federation.server.optimiser={name: lamb, b1: 0}",
    "federation.estimate_bound={clients: 4, every: 2, repeats: 3}",
)


@pytest.fixture(scope="module")
def folder(runs: Path) -> Path:
    place = runs.parent
    around = RunContext(runs=place / "bounds", stores=place / "stores", device=torch.device("cpu"))
    found = load_recipe(str(place / "federated.yaml"), list(CHANGES))
    run_recipe(found, out=place / "bounds/estimated", resume=False, context=around)
    without = load_recipe(str(place / "federated.yaml"), list(CHANGES[:2]))
    run_recipe(without, out=place / "bounds/plain", resume=False, context=around)
    return place / "bounds"


@pytest.fixture
def estimated(folder: Path) -> RunRecord:
    return read_run("estimated", folder / "estimated")


def test_estimates_lie_in_the_diagnostics_and_change_no_round(folder: Path, estimated: RunRecord) -> None:
    assert [record["step"] for record in estimated.diagnostics if "bound" in record] == [1, 3]
    bits = [(folder / name / "model/model.safetensors").read_bytes() for name in ("estimated", "plain")]
    assert bits[0] == bits[1]
    plain = read_run("plain", folder / "plain")
    assert [r["loss"] for r in plain.diagnostics] == [r["loss"] for r in estimated.diagnostics]
    assert '"bound"' not in (folder / "estimated/metrics.jsonl").read_text()
    assert all(record["accounted"] is False for record in estimated.diagnostics)
    assert "estimate_bound" not in (folder / "plain/config.yaml").read_text()


def test_the_bound_is_made_of_the_estimates_and_has_a_sum(estimated: RunRecord) -> None:
    found, estimates = convergence_bound(estimated), bound_estimates(estimated)
    run = found.measurement
    assert run is not None
    assert found.bound is not None
    assert run.smoothness == max(one["smoothness"] for one in estimates)
    assert run.gradient_deviation_local**2 == pytest.approx(max(one["local_variance"] for one in estimates))
    assert run.gradient_deviation_global**2 == pytest.approx(max(one["global_variance"] for one in estimates))
    assert run.loss_gap == estimates[0]["loss"]
    for layer in run.layers:
        own = [one["layers"][layer.name] for one in estimates]
        assert layer.gradient_bound >= max(one["gradient_bound"] for one in own)
        assert layer.intra_variance == pytest.approx(fmean(one["intra_variance"] for one in own))
        assert layer.inter_variance == pytest.approx(fmean(one["inter_variance"] for one in own))
        assert layer.trust_deviation == max(one["trust_deviations"][layer.name] for one in estimates)
    assert math.isfinite(found.total)
    assert found.total == pytest.approx(math.fsum(found.bound.terms.values()))
    assert found.bounded == pytest.approx(found.bound.kappa * fmean(one["gradient_norm_squared"] for one in estimates))
    assert 0 <= found.bounded <= found.total
    assert found.corollary == corollary1(run)
    verdicts = {assumption.name: assumption.holds for assumption in found.bound.assumptions}
    assert verdicts["κ > 0"]
    assert verdicts["no server momentum or weight decay"]


def test_the_page_shows_the_sum_its_estimates_and_corollary_1(estimated: RunRecord) -> None:
    found = {estimated.label: convergence_bound(estimated)}
    terms, estimates, corollary, premises = bound_tables(found)
    sums = dict(zip(terms.headings, terms.rows[0], strict=True))
    assert sums[TOTAL] == show_number(found[estimated.label].total)
    assert sums[BOUNDED] == show_number(found[estimated.label].bounded)
    assert "Not measured" not in terms.note
    assert {row[1] for row in estimates.rows} >= {"L", "σ_loc", "σ_glob", "Ψ_intra", "Ψ_inter"}
    assert all("at least" in row[3] for row in estimates.rows if row[1] in ("L", "σ_loc", "M_h"))
    assert corollary.rows[0][1:3] == ("T^-0.5", "does not")
    assert len(corollary.rows) == 2
    assert any("Corollary 1: κ > 0" in row for row in premises.rows)
    (drawing,) = bound_drawings(found)
    labels = [text.get_text() for text in drawing.draw().axes[0].get_yticklabels()]
    assert labels[-2:] == [TOTAL, BOUNDED]
    section = bound_section([estimated])
    assert section is not None
    assert "The sum is" in section.parts[-1].text  # type: ignore[union-attr]


def test_a_run_that_was_not_asked_has_no_sum(folder: Path) -> None:
    plain = read_run("plain", folder / "plain")
    found = convergence_bound(plain)
    assert math.isnan(found.total)
    assert found.corollary is None
    terms, _ = bound_tables({plain.label: found})
    assert TOTAL not in terms.headings
    assert "Not measured: " in terms.note
    assert bound_drawings({plain.label: found}) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (("federation.privacy.mode=secure",), "no ε covers"),
        (("federation.local.local_steps=1",), "local_steps of at least 2"),
        (("federation.local.local_steps=null", "federation.local.local_epochs=1"), "local_steps of at least 2"),
        (("federation.server.optimiser={name: sgd}",), "about sgd and lamb"),
        (("federation.estimate_bound.clients=1",), "clients=1, expected at least 2"),
    ],
)
def test_runs_of_which_nothing_can_be_estimated_are_refused(tmp_path: Path, changes: tuple[str, ...], why: str) -> None:
    (tmp_path / "recipe.yaml").write_text(FEDERATED)
    with pytest.raises(InputError, match=why):
        load_recipe(str(tmp_path / "recipe.yaml"), [*CHANGES, *changes])


def test_clients_on_other_machines_keep_their_gradients(runs: Path) -> None:
    place = runs.parent
    recipe = load_recipe(str(place / "federated.yaml"), list(CHANGES))
    around = RunContext(runs=place / "bounds", stores=place / "stores", device=torch.device("cpu"))
    with pytest.raises(InputError, match="estimate_bound: no gradients of clients on other machines"):
        assemble(recipe, context=around, clients=cast(RemoteClients, object()))
