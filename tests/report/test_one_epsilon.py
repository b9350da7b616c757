"""One ε for one run: before it, in its ledger, its results, its reports, its statement and its own model."""

import dataclasses
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tones import pack_tones
from typer.testing import CliRunner

from sottovoce.base.errors import InputError
from sottovoce.cli import app
from sottovoce.config import (
    FederationSettings,
    Recipe,
    Suite,
    load_experiment,
    load_recipe,
    recipe_names,
    validate_recipe,
)
from sottovoce.flat.layout import Layout
from sottovoce.privacy import guarantee, ledger_report
from sottovoce.privacy.accounting import Epsilon, epsilon, rdp_epsilon
from sottovoce.privacy.clipping import Share
from sottovoce.privacy.events import CorrelatedRelease, Event, GaussianRelease, NoGuarantee, parts_of
from sottovoce.privacy.guarantee import format_epsilon, format_epsilons, guarantee_of
from sottovoce.privacy.ledger import BudgetSpent, Ledger, verify
from sottovoce.privacy.ledger_report import LedgerReport
from sottovoce.privacy.membership_odds import MembershipOdds
from sottovoce.privacy.plan import Plan
from sottovoce.report import verdict as verdicts
from sottovoce.report.parts import show_epsilon as cell
from sottovoce.report.records import LedgerCheck, RunRecord, read_run
from sottovoce.report.statement import statement_text
from sottovoce.report.verdict import judge_run
from sottovoce.training.assemble import FederationSettings as Assembled
from sottovoce.training.estimate import compute_end_epsilon, estimate_runs
from sottovoce.training.preflight import check_stages, list_stages
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext

LAYOUT = Layout(("w",), ((4,),))
PEOPLE = 4096  # of recipes that take whoever is there; more than any cohort of theirs
ASKED = {"words": 30.0, "noise_multiplier": 2.0, "every": 7}


# What is told of a plan, and of its ledger, without training.


def by_rdp_alone(event: Event, delta: float) -> Epsilon:
    """Cheap: which events are accounted for is looked at here, not what they come to."""
    return Epsilon(delta, None, rdp_epsilon(event, delta), None, (), None, None, "not asked for")


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (guarantee, ledger_report):
        monkeypatch.setattr(module, "epsilon", by_rdp_alone)
    monkeypatch.setattr(verdicts, "bound_membership_odds", lambda _: MembershipOdds(1.0, 1.0))


def plan_of(federation: FederationSettings, *, people: int) -> Plan:
    private = federation.privacy.settings(
        population_size=people,
        cohort_size=federation.cohort_size,
        central_steps=federation.steps,
        privacy_unit="speaker",
        no_unit_reason=None,
        users_also_in_seed=0,
        root_seed=5,
        measured=federation.measured,
    )
    return Plan(private, LAYOUT)


def estimated(recipe: Recipe, plan: Plan) -> Epsilon | None:
    """As `--estimate` and the lines before a run have it, for the people of `plan`."""
    federation = SimpleNamespace(settings=recipe.federated, plan=plan)
    return compute_end_epsilon(cast(Assembled, federation))


def header_of(federation: FederationSettings, plan: Plan) -> Any:
    asked = federation.client_wer
    told = None if asked is None else asked.in_ledger(asked.plan(plan))
    return plan.ledger_header(run="x", central_steps=federation.steps, client_wer=told)


def charged(path: Path, federation: FederationSettings, plan: Plan, *, rounds: int) -> LedgerReport:
    """The ledger of a run that stops after so many rounds, or when its budget says so."""
    asked, steps = federation.client_wer, federation.steps
    with closing(Ledger(path, header=header_of(federation, plan))) as ledger:
        for step in range(min(rounds, steps)):
            try:
                plan.charge(ledger, step=step, parameters=f"p{step}", cohort=f"c{step}")
            except BudgetSpent:
                break
            if asked is None or not asked.is_due(step + 1, steps=steps):
                continue
            wer = asked.plan(plan)
            names = {"parameters": f"m{step}", "cohort": f"w{step}"}
            try:
                ledger.measure(wer.event, step=step + 1, clip_bound=wer.clip_bound, **names)
            except BudgetSpent:
                continue
    return verify(path)


def stated(report: LedgerReport) -> str:
    """The statement on the run of a ledger."""
    empty: Mapping[str, Any] = {}
    config = {"federation": {"steps": report.header["central_steps"]}}
    run = RunRecord("x", Path("x"), config, empty, empty, empty, empty, (), (), LedgerCheck(report), ())
    return statement_text(run, judge_run(run))


def named(event: Event) -> Iterator[str]:
    """What a guarantee must say of each release that is planned."""
    for part, count in parts_of(event):
        if isinstance(part, NoGuarantee):
            yield part.reason
        elif isinstance(part, CorrelatedRelease):
            yield f"{count:,} rounds with poisson q={part.sampling_rate:g} of one of {part.cycle} groups in turn"
        elif isinstance(part, GaussianRelease) and part.sampling == "poisson":
            yield f" with poisson q={part.sampling_rate:g}, z={part.noise_multiplier:g}"
        else:
            yield f" with fixed_size q={part.cohort_size / part.population_size:g}, z={part.noise_multiplier:g}"  # type: ignore[operator]


def check_told(recipe: Recipe, plan: Plan, started: LedgerReport, ended: LedgerReport) -> None:
    """Everything that says an ε of the run says that of the same releases, from before the first until the last."""
    federation = recipe.federated
    before = federation.whole_run(plan).guarantee()
    for report in (started, ended):
        after = guarantee_of(report)
        assert (after.event, after.delta, after.steps, after.measured) == (
            *(before.event, before.delta, before.steps, before.measured),
        )
    assert estimated(recipe, plan) == before.epsilon == ended.epsilon
    text = stated(ended)
    assert f"ε by Rényi accounting | {format_epsilon(before.epsilon.rdp)} |" in text
    assert f"ε = {format_epsilon(before.epsilon.headline)} at δ = {plan.settings.delta:g}" in text
    guarantee = federation.guarantee(plan)
    assert f"{before.steps:,} rounds with" in guarantee
    assert (f"{before.measured:,} WERs of clients with" in guarantee) == (federation.client_wer is not None)
    for words in named(before.event):
        assert words in guarantee


# Every recipe of the package.


def private_recipes() -> Iterator[Recipe]:
    """All that add noise, once for each way of accounting."""
    seen = set()
    for name in sorted(recipe_names()):
        found = load_experiment(name)
        overrides = [(run.recipe, run.overrides) for run in found.runs.values()] if isinstance(found, Suite) else []
        for recipe in [load_recipe(*one) for one in overrides] if isinstance(found, Suite) else [found]:
            if recipe.federation is None or not recipe.federation.privacy.adds_noise:
                continue
            federation = recipe.federation
            kind = (federation.steps, federation.cohort_size, federation.client_wer, federation.privacy)
            if (key := repr(kind)) not in seen:
                seen.add(key)
                yield recipe


def with_noise(recipe: Recipe, **changes: Any) -> Recipe:
    """A target decides the noise alone, and takes seconds: another test has it. Shares of layers decide nothing."""
    federation = recipe.federated
    privacy = dataclasses.replace(federation.privacy, share=Share.GLOBAL, layer_groups={}, alpha={})
    if privacy.target_epsilon is not None:
        noise = {"target_epsilon": None, "accountant": None, "noise_multiplier": 2.0}
        privacy = dataclasses.replace(privacy, **noise)
    changed = federation.model_copy(update={"privacy": privacy, **changes})
    return recipe.model_copy(update={"federation": changed})


def ended_by_replacing(path: Path, recipe: Recipe, plan: Plan) -> tuple[LedgerReport, LedgerReport]:
    """A fresh ledger, and what it says when all of the plan is charged, without writing thousands of lines."""
    started, whole = charged(path, recipe.federated, plan, rounds=0), recipe.federated.whole_run(plan)
    promised = whole.guarantee()
    ended = dataclasses.replace(
        started,
        steps=promised.steps,
        attempts=promised.steps,
        measured=promised.measured,
        measured_attempts=promised.measured,
        spent=whole.event,
    )
    return started, ended


@pytest.mark.usefixtures("cheap")
def test_every_recipe_of_the_package_tells_one_epsilon(tmp_path: Path) -> None:
    count = 0
    for recipe in private_recipes():
        if recipe.federated.privacy.noise_scope is not None:  # for analysis: nothing is promised
            continue
        asked = validate_recipe(
            {**BASE, "federation": {**BASE["federation"], "client_wer": ASKED}}, where="x"
        ).federated
        for number, changes in enumerate(({}, {"client_wer": asked.client_wer})):
            one = with_noise(recipe, **changes)
            people = one.federated.privacy.population_size or PEOPLE
            if (mechanism := one.federated.privacy.mechanism) is not None and mechanism.kind == "blt":
                assert mechanism.cycle is not None
                people = mechanism.cycle * one.federated.cohort_size - 1  # whole groups, of which one is smaller
            plan = plan_of(one.federated, people=people)
            check_told(one, plan, *ended_by_replacing(tmp_path / f"{count}-{number}", one, plan))
            count += 1
    assert count > 100


# Random ones.

BASE: dict[str, Any] = {
    "about": "tones, federated",
    "seed": 5,
    "data": {"store": "tones"},
    "model": {"size": "tiny"},
    "federation": {
        "steps": 3,
        "cohort_size": 2,
        "clients": {"holdout": 0.5},
        "local": {"batch_seconds": 2, "lr": 0.1, "local_steps": 1},
        "server": {"optimiser": {"name": "lamb"}, "schedule": {"name": "constant", "lr": 0.01}},
        "privacy": {"clip_bound": 0.01, "noise_multiplier": 8.0, "delta": 1e-3},
        "engine": "sequential",
        "evaluate_every": 3,
    },
}


@st.composite
def random_recipes(draw: st.DrawFn) -> tuple[Recipe, Plan]:
    people = draw(st.integers(2, 40))
    cohort, steps = draw(st.integers(1, people)), draw(st.integers(1, 7))
    noise, delta = st.floats(0.5, 20.0), draw(st.sampled_from([1e-3, 1e-6, 1e-9]))
    private: dict[str, Any] = {"clip_bound": 0.5, "noise_multiplier": draw(noise), "delta": delta}
    kind = draw(st.sampled_from(["poisson", "fixed_size", "adaptive", "banded", "blt"]))
    if kind == "fixed_size":
        private["sampling"] = kind
    elif kind == "adaptive":
        private["adaptive"] = {"target_quantile": 0.5, "count_noise_std": 40.0}
    elif kind == "banded":
        cycle = draw(st.integers(1, max(people // cohort, 1)))
        private["mechanism"] = {"kind": kind, "bands": draw(st.integers(1, cycle)), "cycle": cycle}
    elif kind == "blt":
        cycle = draw(st.integers(1, people))
        cohort = -(-people // cycle)
        private["mechanism"] = {"kind": kind, "buffers": 1, "cycle": cycle}
    private["mode"] = draw(st.sampled_from(["seeded", "secure"]))
    federation = {**BASE["federation"], "steps": steps, "cohort_size": cohort, "privacy": private}
    if draw(st.booleans()):
        every = draw(st.none() | st.integers(1, 4))
        federation["client_wer"] = {"words": 30, "noise_multiplier": draw(noise), "every": every}
    if draw(st.booleans()):  # of which none, some or all are used up
        recipe = validate_recipe({**BASE, "federation": federation}, where="x")
        whole = recipe.federated.whole_run(plan_of(recipe.federated, people=people))
        private["epsilon_budget"] = draw(st.floats(0.3, 1.1)) * rdp_epsilon(whole.event, delta)
    recipe = validate_recipe({**BASE, "federation": federation}, where="x")
    return recipe, plan_of(recipe.federated, people=people)


def check_random(recipe: Recipe, plan: Plan, *, rounds: int) -> None:
    promised = recipe.federated.whole_run(plan).guarantee()
    if not promised.steps:  # such a run refuses to begin
        return
    with tempfile.TemporaryDirectory() as folder:
        ended = charged(Path(folder) / "whole", recipe.federated, plan, rounds=recipe.federated.steps)
        check_told(recipe, plan, charged(Path(folder) / "part", recipe.federated, plan, rounds=rounds), ended)
    budget = plan.settings.epsilon_budget
    assert budget is None or promised.epsilon.rdp <= budget * (1 + 1e-12)


QUIETLY = [HealthCheck.function_scoped_fixture]  # one patch for all examples is as good


@pytest.mark.usefixtures("cheap")
@settings(max_examples=25, suppress_health_check=QUIETLY)
@given(drawn=random_recipes(), rounds=st.integers(0, 7))
def test_random_recipes_tell_one_epsilon(drawn: tuple[Recipe, Plan], rounds: int) -> None:
    check_random(*drawn, rounds=rounds)


@pytest.mark.long
@pytest.mark.usefixtures("cheap")
@settings(max_examples=1500, suppress_health_check=QUIETLY)
@given(drawn=random_recipes(), rounds=st.integers(0, 7))
def test_many_random_recipes_tell_one_epsilon(drawn: tuple[Recipe, Plan], rounds: int) -> None:
    check_random(*drawn, rounds=rounds)


# Whole runs.

PRIVATE = "federation.privacy."
TARGET = [f"{PRIVATE}noise_multiplier=null", f"{PRIVATE}target_epsilon=8"]
RUNS = {
    "poisson": ["federation.client_wer={words: 3, noise_multiplier: 0.5, every: 2}"],
    "correlated": [
        *TARGET,
        f"{PRIVATE}mechanism={{kind: blt, buffers: 2, cycle: 5}}",
        "federation.client_wer={words: 3, noise_multiplier: 1.0, every: 2}",
    ],
    "released, within a budget": [
        f"{PRIVATE}mode=secure",
        f"{PRIVATE}epsilon_budget=1.6",  # two rounds and one measurement; not three of the first
        f"{PRIVATE}noise_multiplier=2.0",
        "federation.client_wer={words: 3, noise_multiplier: 4.0, every: 1}",
    ],
}
MORE_RUNS = {
    "fixed size": [f"{PRIVATE}sampling=fixed_size", "federation.client_wer={words: 3, noise_multiplier: 4.0}"],
    "banded": [
        *TARGET,
        f"{PRIVATE}mechanism={{kind: banded, bands: 2, cycle: 3}}",
        "federation.client_wer={words: 3, noise_multiplier: 1.0, every: 1}",
    ],
    "without": [],
    "released": [f"{PRIVATE}mode=secure", "federation.client_wer={words: 3, noise_multiplier: 1.0, every: 3}"],
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine people have said four words each: two of them are held out."""
    folder = tmp_path_factory.mktemp("stores")
    pack_tones(folder / "tones", letters=(2, 3), utterances=4)
    return folder


def everything_told(recipe: Recipe, stores: Path, folder: Path) -> None:
    said: list[str] = []
    around = RunContext(folder / "runs", stores, torch.device("cpu"), say=said.append)
    stages = list_stages({"run": (recipe, folder / "run")}, folder=folder)
    found = estimate_runs(stages, check_stages(stages, around), around)
    (cost,) = found.costs
    outcome = run_recipe(recipe, out=folder / "run", resume=False, context=around)
    assert outcome.results is not None
    ledger = verify(outcome.folder / "ledger.jsonl")
    promised, private = guarantee_of(ledger), outcome.results["privacy"]
    # Before it: the estimate, in numbers and in words.
    one = promised.epsilon
    assert cost.epsilon == one
    assert cost.as_json()["epsilon"] == {"rdp": one.rdp, "pld": one.pld}
    assert f"ε = {format_epsilons(one)} at its end" in found.lines()
    # Nothing of the plan was left out, so that what is spent is what was promised.
    assert ledger.spent == promised.event
    assert one == epsilon(ledger.spent, ledger.header["delta"]) == ledger.epsilon
    # Its results, and the command that reads the ledger.
    assert (private["epsilon_pld"], private["epsilon_rdp"]) == (one.pld, one.rdp)
    told = json.loads(CliRunner().invoke(app, ["ledger", str(outcome.folder), "--json"]).stdout)
    for account in (told, told["promised"]):
        assert (account["epsilon_pld"], account["epsilon_rdp"]) == (one.pld, one.rdp)
    # Its pages.
    run = read_run("run", outcome.folder)
    judged = judge_run(run)
    assert judged.epsilon == one.headline
    text = statement_text(run, judged)
    facts = dict(re.findall(r"^\| ([^|-]+) \| (.*) \|$", text, re.MULTILINE))
    assert facts["ε by Rényi accounting"] == format_epsilon(one.rdp)
    assert facts["ε by privacy loss distributions"] in (format_epsilon(one.headline), f"none: {one.pld_reason}")
    assert facts["ε that counts"].startswith(f"{format_epsilon(one.headline)}:")
    done = CliRunner().invoke(app, ["report", str(outcome.folder), "--out", str(folder / "page.html")])
    assert done.exit_code == 0, done.output
    page = (folder / "page.html").read_text()
    assert f"ε = {format_epsilons(one)}" in page.replace("\N{NO-BREAK SPACE}", " ")
    assert cell(one.headline) in page
    # Its own model names every release that ε is of, as the lines before the run and the results do.
    guarantee = json.loads((outcome.folder / "model/config.json").read_text())["about"]["guarantee"]
    assert guarantee == private["guarantee"]
    assert guarantee in said
    for words in named(promised.event):
        assert words in guarantee
    # What a kept run says of other people is of all that was promised, too.
    if "population_size" in (useful := private.get("useful") or {}):
        (outcome.folder / "planned.json").write_text(json.dumps({"rdp": useful}))
        assert CliRunner().invoke(app, ["ledger", str(outcome.folder)]).exit_code == 0
    target = recipe.federated.privacy.target_epsilon
    assert target is None or target - 1e-2 <= one.headline <= target


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS.keys())
def test_a_run_tells_one_epsilon(changes: list[str], stores: Path, tmp_path: Path) -> None:
    everything_told(_recipe(tmp_path, changes), stores, tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("changes", MORE_RUNS.values(), ids=MORE_RUNS.keys())
def test_more_runs_tell_one_epsilon(changes: list[str], stores: Path, tmp_path: Path) -> None:
    everything_told(_recipe(tmp_path, changes), stores, tmp_path)


def _recipe(folder: Path, changes: list[str]) -> Recipe:
    (folder / "base.yaml").write_text(json.dumps(BASE))
    return load_recipe(str(folder / "base.yaml"), changes)


def test_a_budget_that_allows_nothing_is_refused_before_a_round(stores: Path, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, [f"{PRIVATE}epsilon_budget=1e-6"])
    assert recipe.federated.whole_run(plan_of(recipe.federated, people=9)).guarantee().steps == 0
    around = RunContext(tmp_path / "runs", stores, torch.device("cpu"))
    with pytest.raises(InputError, match="not one round can be paid for"):
        run_recipe(recipe, out=tmp_path / "run", resume=False, context=around)
