"""`target_epsilon` in a recipe: the noise that follows is the planner's to the digit, and what cannot be is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.training.test_federation import _asked_at_once
from typer.testing import CliRunner

from sottovoce.base.errors import InputError
from sottovoce.cli import app
from sottovoce.config import PrivacySection, load_recipe
from sottovoce.config.smoke import shrink_recipe
from sottovoce.flat.layout import Layout
from sottovoce.privacy.accounting import rdp_epsilon
from sottovoce.privacy.calibration import calibrate_run_noise
from sottovoce.privacy.client_wer import ClientWer
from sottovoce.privacy.guarantee import whole_run
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.mechanism import MechanismSettings
from sottovoce.privacy.plan import Plan
from sottovoce.training.privacy_report import extrapolate_populations
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext

TARGET = 2.5
WANTED = ["federation.privacy.noise_multiplier=null", f"federation.privacy.target_epsilon={TARGET}"]
SIZES = ["--population", "9", "--cohort", "2", "--steps", "3", "--delta", "1e-3"]
TOO_SMALL = [f"federation.privacy.{one}" for one in ("target_epsilon=1e-9", "delta=1e-12", "accountant=rdp")]
PLAIN = "federation.privacy.adaptive=null"

Go = Callable[..., Outcome]


@pytest.fixture
def go(federated_recipe: Path, short_stores: Path, tmp_path: Path) -> Go:
    def go(*changes: str, out: str = "run", resume: bool = False) -> Outcome:
        go.said.clear()  # type: ignore[attr-defined]
        around = RunContext(tmp_path / "runs", short_stores, torch.device("cpu"), say=go.said.append)  # type: ignore[attr-defined]
        short = ["federation.steps=3", "federation.evaluate_every=3"]
        recipe = load_recipe(str(federated_recipe), [*short, *WANTED, *changes])
        return run_recipe(recipe, out=tmp_path / out, resume=resume, context=around)

    go.said = []  # type: ignore[attr-defined]
    return go


def planned(*options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", *SIZES, "--target-epsilon", str(TARGET), *options, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def privacy_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.results is not None
    found: dict[str, Any] = outcome.results["privacy"]
    return found


@pytest.mark.parametrize("mode", ["seeded", "secure"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_run_and_its_plan_agree_to_the_last_digit(go: Go, mode: str, accountant: str) -> None:
    named = [] if accountant == "pld" else ["federation.privacy.accountant=rdp"]
    # The fixture's adaptive clipping stays on: its count is inside the step's noise.
    outcome = go(f"federation.privacy.mode={mode}", *named)
    found, plan = privacy_of(outcome), planned("--accountant", accountant)
    for name in ("noise_multiplier", "epsilon_pld", "epsilon_rdp", "sigma_dp"):
        assert found[name] == plan[name], name
    assert TARGET - 1e-3 <= found[f"epsilon_{accountant}"] <= TARGET
    ledger = verify(outcome.folder / "ledger.jsonl")
    assert ledger.header["plan"]["noise_multiplier"] == plan["noise_multiplier"]
    assert "target_epsilon: 2.5" in (outcome.folder / "config.yaml").read_text()
    assert any(line.startswith(f"noise_multiplier={plan['noise_multiplier']} follows") for line in go.said)  # type: ignore[attr-defined]


@pytest.mark.long
def test_cohorts_of_fixed_size_reach_the_target_by_rdp(go: Go) -> None:
    outcome = go(PLAIN, "federation.privacy.sampling=fixed_size")
    found = privacy_of(outcome)
    assert found["epsilon_pld"] is None
    assert TARGET - 1e-3 <= found["epsilon_rdp"] <= TARGET
    assert any("by RDP, as no tight PLD is known" in line for line in go.said)  # type: ignore[attr-defined]


@pytest.mark.long
def test_a_resumed_run_has_the_noise_it_began_with(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = go(out="whole")
    with monkeypatch.context() as patch:
        patch.setattr("sottovoce.training.loop.interruptible", _asked_at_once)
        assert go().stopped_at == 1
    calibrate_run_noise.cache_clear()
    resumed = go(resume=True)
    # A polite interrupt adds a commit to the ledger, and nothing else.
    assert privacy_of(resumed) == privacy_of(whole) | {n: privacy_of(resumed)[n] for n in ("head", "length")}
    assert verify(resumed.folder / "ledger.jsonl").header == verify(whole.folder / "ledger.jsonl").header


def test_the_target_of_a_budget_that_lasts_is_reached(go: Go) -> None:
    by_rdp = ["federation.privacy.accountant=rdp", f"federation.privacy.epsilon_budget={TARGET}"]
    outcome = go(PLAIN, *by_rdp)
    assert outcome.results is not None
    assert outcome.results["ended"] == {"step": 3, "reason": "finished"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["federation.privacy.noise_multiplier=1"], "noise_multiplier=1 and target_epsilon=2.5: expected one of"),
        (["federation.privacy.sigma_dp=1"], "sigma_dp=1 and target_epsilon=2.5: expected one of"),
        (["federation.privacy.target_epsilon=0"], "federation.privacy.target_epsilon: Input should be greater than 0"),
        (["federation.privacy.target_epsilon=.inf"], "target_epsilon: Input should be a finite number"),
        ([PLAIN, *TOO_SMALL], "target_epsilon=1e-09 cannot be reached: the best is ε = "),
        (["federation.privacy.accountant=gdp"], "federation.privacy.accountant: Input should be 'pld' or 'rdp'"),
        (["federation.privacy.target_epsilon=null", "federation.privacy.accountant=rdp"], "without target_epsilon"),
        (["federation.steps=null"], "federation.steps: Input should be a valid integer"),
        (["federation.privacy.population_size=10"], "population_size=10: the store has 9 clients"),
        (["federation.privacy.clip_bound=.inf"], "noise but clip_bound is infinite"),
        ([f"federation.privacy.epsilon_budget={TARGET}"], "so that it would end the run early"),
        (["federation.clients.rule=iid"], "target_epsilon=2.5 cannot be kept: "),
        (["federation.privacy.adaptive.count_noise_std=0.1"], "the count alone spends more than the step may"),
    ],
)
def test_what_cannot_be_is_one_line(changes: list[str], message: str, go: Go, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        go(*changes)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "run").exists(), "refused before anything is written"


def test_a_smoked_recipe_keeps_its_target(federated_recipe: Path) -> None:
    recipe = load_recipe(str(federated_recipe), [*WANTED, "federation.privacy.epsilon_budget=9"])
    private = shrink_recipe(recipe).federated.privacy
    assert (private.target_epsilon, private.noise_multiplier, private.epsilon_budget) == (TARGET, None, None)


def test_recipes_without_a_target_are_written_as_before(federated_recipe: Path) -> None:
    written = load_recipe(str(federated_recipe)).federated.model_dump(mode="json")["privacy"]
    assert not {"target_epsilon", "accountant"} & written.keys()


@given(
    mechanism=st.sampled_from([None, {"kind": "blt", "buffers": 1}, {"kind": "banded", "bands": 2}]),
    people=st.integers(3, 60),
    cycle=st.integers(2, 20),
    target=st.floats(4.0, 12.0),
    noise=st.floats(3.0, 6.0),
)
@example(mechanism={"kind": "blt", "buffers": 2}, people=9, cycle=5, target=8.0, noise=3.0)  # few, of whom 2 of 9 ≠ 1/5
@settings(max_examples=15)
def test_the_noise_of_a_target_is_for_the_measurements_that_the_plan_draws(
    mechanism: dict[str, Any] | None, people: int, cycle: int, target: float, noise: float
) -> None:
    """Groups of a cycle take turns in rounds; clients' WER is measured on S of all K, whatever group they are of."""
    cycle = min(cycle, people)
    cohort = -(-people // cycle) if (mechanism or {}).get("kind") == "blt" else people // cycle
    private = PrivacySection(
        clip_bound=1.0,
        target_epsilon=target,
        accountant="rdp",
        delta=1e-5,
        mechanism=None if mechanism is None else MechanismSettings(**mechanism, cycle=cycle),
    )
    asked = ClientWer(words=10, noise_multiplier=noise, every=2)
    own = private.settings(
        population_size=people,
        cohort_size=cohort,
        central_steps=6,
        privacy_unit="speaker",
        no_unit_reason=None,
        users_also_in_seed=0,
        root_seed=5,
        measured=asked.measured(6),
    )
    promised = whole_run(Plan(own, Layout(("w",), ((4,),))), central_steps=6, client_wer=asked).guarantee()
    assert promised.measured == 3
    found = rdp_epsilon(promised.event, 1e-5)
    assert target * (1 - 1e-3) <= found <= target


def test_people_with_an_epsilon_that_will_do_are_as_many_as_it_takes(federated_recipe: Path) -> None:
    """By PLD as by RDP: a table has both for this very population, and no larger one beside an ε of 8."""
    changes = ["federation.steps=10", "federation.cohort_size=1557", "federation.privacy.delta=1e-6", PLAIN]
    settings = load_recipe(str(federated_recipe), [*changes, "federation.privacy.noise_multiplier=2.0651"]).federated
    own = settings.privacy.settings(
        population_size=1557,
        cohort_size=1557,
        central_steps=10,
        privacy_unit="speaker",
        no_unit_reason=None,
        users_also_in_seed=0,
        root_seed=5,
    )
    plan = Plan(own, Layout(("w",), ((4,),)))
    promised = settings.whole_run(plan).guarantee()
    assert promised.epsilon.pld is not None
    assert promised.epsilon.pld <= 8 < promised.epsilon.rdp
    useful = extrapolate_populations(settings, plan, promised)["useful"]
    assert useful["population_size"] > 1557  # by RDP, which is named so
    assert useful["epsilon_rdp"] <= 8
    assert useful["pld"]["population_size"] <= 1557
    assert useful["pld"]["epsilon_pld"] <= 8
