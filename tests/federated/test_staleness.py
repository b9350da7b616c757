"""Overlapping rounds: each cohort trains from the model of so many steps before; a twin computes it by hand."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sottovoce.base.errors import InputError, InvariantError
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Engine, Trained
from sottovoce.federated.round import RoundState, run_round
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.federated.staleness import RecentModels
from sottovoce.federated.weighting import ClientFigures
from sottovoce.flat.layout import Layout
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.ledger import Charge, Ledger, verify
from sottovoce.privacy.ledger_report import LedgerReport
from sottovoce.privacy.mechanism import MechanismSettings
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings

USERS, STEPS, SIZE, LR, BOUND = 6, 7, 5, 0.4, 0.5
LAYOUT = Layout.of({"w": torch.zeros(SIZE)})
START = torch.linspace(-1, 1, SIZE)
WISHES = torch.from_numpy(np.random.default_rng(3).normal(size=(USERS, SIZE)))  # float64: where each would go

Change = Callable[[Tensor], Tensor]


class _Users(Engine):
    """Each moves the model halfway to its own wish."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained]:
        self.seen.append(LAYOUT.views(server_P.clone())["w"])
        for user in cohort:
            update = 0.5 * (self.seen[-1] - WISHES[user].float())
            figures = (ClientFigures(utterances=1, seconds=1.0, loss=0.0, wer=0.0),)
            yield Trained(LAYOUT.flatten({"w": update}), (user,), torch.zeros(1), figures, audio_seconds=0.0)


def plan_of(noise_multiplier: float, **options: Any) -> Plan:
    private = {"cohort_size": 3, "clip_bound": BOUND, "delta": 1e-3, "root_seed": 4, **options}
    return Plan(
        PrivacySettings(population_size=USERS, privacy_unit="user", noise_multiplier=noise_multiplier, **private),
        LAYOUT,
    )


def made(plan: Plan, staleness: int | None, folder: Path) -> tuple[list[Tensor], list[Tensor], LedgerReport]:
    """The models before all steps and after the last, those that cohorts saw, and the ledger."""
    sgd = ServerSettings(optimiser={"name": "sgd"}, schedule={"name": "constant", "lr": LR})
    server, users = Server(sgd, LAYOUT, LAYOUT.flatten({"w": START})), _Users()
    models = [START.clone()]
    folder.mkdir(exist_ok=True)
    recent = None if staleness is None else RecentModels(staleness)
    with closing(Ledger(folder / "ledger.jsonl", header=plan.ledger_header(run="toy", central_steps=STEPS))) as ledger:
        state = RoundState(server, plan, ledger, None, plan.correlated_noise(), recent)
        for step in range(STEPS):
            run_round(state, LocalClients(users), step=step)
            models.append(LAYOUT.views(server.parameters_P.clone())["w"])
    return models, users.seen, verify(folder / "ledger.jsonl")


def twin(plan: Plan, staleness: int) -> list[Tensor]:
    """In float64, from the definition: the step of cohort t moves the last model by what it made of an earlier one."""
    models = [START.double()]
    for step in range(STEPS):
        trained_from = models[max(step - staleness, 0)]
        total = torch.zeros(SIZE, dtype=torch.float64)
        for user in plan.sample(step).tolist():
            update = 0.5 * (trained_from - WISHES[user])
            total += update * min(1.0, BOUND / float(update.norm()))
        charge = Charge(plan.event, step=step, clip_bound=BOUND)
        noise = LAYOUT.views(plan.add_noise(plan.new_total(), charge))["w"].double()
        models.append(models[-1] - LR * (total + noise) / plan.denominator)
    return models


@pytest.mark.parametrize("staleness", [1, 2, 3, 20])
@pytest.mark.parametrize("noise_multiplier", [0.0, 0.7])
def test_rounds_that_overlap_are_those_of_the_twin(staleness: int, noise_multiplier: float, tmp_path: Path) -> None:
    plan = plan_of(noise_multiplier)
    found, seen, _ = made(plan, staleness, tmp_path)
    for ours, theirs in zip(found, twin(plan, staleness), strict=True):
        # Some fifty float32 operations on numbers below 2: far above their rounding, far below any step.
        assert torch.allclose(ours.double(), theirs, rtol=0, atol=1e-5)
    for step, model in enumerate(seen):
        assert torch.equal(model, found[max(step - staleness, 0)])


def test_the_twin_sees_one_round_more_or_less(tmp_path: Path) -> None:
    found, _, _ = made(plan_of(0.7), 2, tmp_path)
    for other in (0, 1, 3):
        assert not torch.allclose(found[-1].double(), twin(plan_of(0.7), other)[-1], rtol=0, atol=1e-3)


def test_without_staleness_they_are_the_rounds_without_overlap(tmp_path: Path) -> None:
    found, seen, _ = made(plan_of(0.7), None, tmp_path)
    for ours, theirs in zip(found, twin(plan_of(0.7), 0), strict=True):
        assert torch.allclose(ours.double(), theirs, rtol=0, atol=1e-5)
    assert all(torch.equal(model, before) for model, before in zip(seen, found, strict=False))


@pytest.mark.parametrize("mechanism", [None, MechanismSettings(kind="blt", buffers=2, cycle=3)])
def test_cohorts_events_and_epsilon_are_those_of_the_same_rounds_without_overlap(
    mechanism: MechanismSettings | None, tmp_path: Path
) -> None:
    """Only the models differ: what is charged, when, for whom and in which row of noise does not."""
    options: dict[str, Any] = {}
    if mechanism is not None:
        options = {"cohort_size": 2, "mechanism": mechanism.for_run(STEPS, population_size=USERS, cohort_size=2)}
    reports, intents = [], []
    for name, staleness in (("without", None), ("with", 3)):
        reports.append(made(plan_of(0.7, **options), staleness, tmp_path / name)[2])
        records = read_chain(tmp_path / name / "ledger.jsonl").records
        intents.append([{k: v for k, v in one.items() if k != "parameters"} for one in records[1:]])
    without, overlapping = reports
    assert overlapping.spent == without.spent
    assert overlapping.header == without.header
    assert intents[0] == intents[1]
    assert overlapping.parameters[1] == without.parameters[1]  # nothing was delayed before the first step
    assert overlapping.parameters[2] != without.parameters[2]


# What a checkpoint keeps.


def test_models_are_copies_and_no_more_than_are_needed() -> None:
    recent, own = RecentModels(2), torch.zeros(SIZE)
    assert recent.sent(own) is own
    for step in range(5):
        own.fill_(step)
        recent.keep(own)
    own.fill_(9)
    assert recent.sent(own)[0] == 3
    assert {step: float(model[0]) for step, model in recent.models(step=5).items()} == {3: 3.0, 4: 4.0}
    again = RecentModels(2)
    again.restore(recent.tensor(), step=5, device=torch.device("cpu"))
    assert torch.equal(again.tensor(), recent.tensor())


@pytest.mark.parametrize(("staleness", "step"), [(2, 1), (3, 5), (1, 5)])
def test_another_number_of_earlier_models_is_refused(staleness: int, step: int) -> None:
    with pytest.raises(InputError, match="the checkpoint has 2 earlier models, expected "):
        RecentModels(staleness).restore(torch.zeros(2, SIZE), step=step, device=torch.device("cpu"))


def test_no_staleness_is_no_number() -> None:
    with pytest.raises(InvariantError, match="staleness=0"):
        RecentModels(0)
