"""In a release whatever goes wrong with one client is a zero update: the run goes on, and each step is charged once.

Were the attempt given up and made again with another cohort, cohorts would be chosen by a person's data.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.small import MODELS, start_stream
from tests.federated.trouble import Trouble
from tests.ranks import in_processes
from tests.training.test_distributed_runs import run_here

from sottovoce.config import load_recipe
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Dropped
from sottovoce.flat.layout import Layout
from sottovoce.models.family import DEFAULT, find_family
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings
from sottovoce.training import engines

BAD, EVERYBODY = 2, 9
ACCIDENTS = ("boom", "memory", "in training")
STEPS = 2
RELEASE = [
    "federation.privacy.mode=secure",
    "federation.privacy.adaptive=null",
    f"federation.cohort_size={EVERYBODY}",
    f"federation.steps={STEPS}",
    f"federation.evaluate_every={STEPS}",
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in a worker: matrix products of two threads add up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def with_trouble(accident: str) -> Any:
    return partial(Trouble, accidents={BAD: accident})


@pytest.mark.parametrize("accident", ACCIDENTS)
@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_the_sum_is_that_of_the_others_to_the_bit(
    engine: str, accident: str, federated_recipe: Path, short_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No release is made in stacks; what they do with a bad client: tests/federated/test_stacked.py."""
    recipe = load_recipe(str(federated_recipe), [*RELEASE, "federation.workers=1"])
    tokens = CharacterTokens.seen_in("abcde")
    family = find_family(DEFAULT)
    settings = family.Settings(tokens=tokens.size + 1, **MODELS[DEFAULT])
    start = Recogniser(family, settings, tokens, family.init(settings, generator=start_stream()), "en")
    population = build_population(Store(short_stores / "tones"), PopulationSettings(split=("train",)), seed=1)
    layout = Layout.of(start.parameters)
    plan = Plan(
        PrivacySettings(
            population_size=EVERYBODY,
            privacy_unit="speaker",
            cohort_size=EVERYBODY,
            clip_bound=0.01,
            noise_multiplier=8.0,
            delta=1e-3,
            mode=Mode.SECURE,
        ),
        layout,
    )
    server_P = layout.flatten(start.parameters)

    def summed(cohort: list[int]) -> tuple[Any, list[int]]:
        """The sum, and who was dropped from it."""
        built = engines.build_engine(engine, recipe, population, start, plan, device=CPU)
        with closing(LocalClients(built)) as clients:
            found = clients.sum(server_P, np.array(cohort), plan=plan, step=0)
            return found, [one.client for one in built.train(server_P, cohort, step=0) if isinstance(one, Dropped)]

    others = [index for index in range(EVERYBODY) if index != BAD]
    expected, nobody = summed(others)
    monkeypatch.setattr(engines, "ClientContext", with_trouble(accident))
    found, dropped = summed([*range(EVERYBODY)])
    assert expected.total.any()
    assert torch.equal(found.total, expected.total)
    assert (dropped, nobody) == ([BAD], [])
    assert found.diagnostics is None, "how many came, and how many failed, no release keeps"


def troubled_run(accident: str, *arguments: Any) -> Any:
    engines.ClientContext = with_trouble(accident)  # type: ignore[misc]
    return run_here(*arguments)


@pytest.mark.parametrize(
    ("engine", "accident"), [("sequential", "in training"), ("workers", "boom"), ("ranks", "boom")]
)
def test_the_run_goes_on_and_each_step_is_charged_once(
    engine: str,
    accident: str,
    federated_recipe: Path,
    short_stores: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "run"
    changes = [*RELEASE, f"federation.engine={'sequential' if engine == 'ranks' else engine}", "federation.workers=1"]
    if engine == "ranks":
        outcome = in_processes(2, troubled_run, accident, federated_recipe, changes, short_stores, out)[0]
    else:
        monkeypatch.setattr(engines, "ClientContext", with_trouble(accident))
        outcome = run_here(federated_recipe, changes, short_stores, out)
    assert outcome.results is not None
    assert outcome.results["ended"]["reason"] == "finished"
    report = verify(out / "ledger.jsonl")
    assert (report.steps, report.attempts) == (STEPS, STEPS)
    # How many failed, and why, is as private as who came.
    published = b"".join(
        path.read_bytes() for path in out.rglob("*") if path.is_file() and path.suffix != ".safetensors"
    )
    assert b"boom" not in published
    assert b"dropped" not in published


def test_a_simulation_shows_our_bugs(
    federated_recipe: Path, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ClientContext", with_trouble("boom"))
    changes = [*RELEASE, "federation.privacy.mode=seeded", "federation.engine=sequential"]
    with pytest.raises(RuntimeError, match="boom"):
        run_here(federated_recipe, changes, short_stores, tmp_path / "run")


class Died(BaseException):
    """What no engine may catch: as if the process had been killed."""


def test_an_attempt_that_takes_the_process_with_it_is_paid_for(
    federated_recipe: Path, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is charged before anybody trains, so that another cohort is another attempt, and costs again."""

    def dies(*_: Any, **__: Any) -> Any:
        raise Died

    changes = [*RELEASE, "federation.engine=sequential"]
    with monkeypatch.context() as patch:
        patch.setattr("sottovoce.federated.engines.sequential.train_locally", dies)
        with pytest.raises(Died):
            run_here(federated_recipe, changes, short_stores, tmp_path / "run")
    assert verify(tmp_path / "run" / "ledger.jsonl").attempts == 1
    run_here(federated_recipe, changes, short_stores, tmp_path / "run", resume=True)
    report = verify(tmp_path / "run" / "ledger.jsonl")
    assert (report.steps, report.attempts) == (STEPS, STEPS + 1)
