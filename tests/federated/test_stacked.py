"""Stacked clients are what they would be one by one: their updates, their accidents, and the rounds made of them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated import test_engines, test_round
from tests.federated.small import CPU, EXACT, Small, rounding, small
from tests.federated.trouble import Trouble
from tests.models.replaying_recorder import ReplayingRecorder
from torch import Tensor

from sottovoce.data.audio.augment import NarrowBandSettings, SpecAugmentSettings
from sottovoce.data.audio.time_domain import DroppedChunks, DroppedFrequencies
from sottovoce.data.loading import read_speech
from sottovoce.federated import client as client_module
from sottovoce.federated.client import ClientContext, LoadedClient, Proximal
from sottovoce.federated.client_stream import StreamSettings
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Dropped, Engine, SequentialEngine, StackedEngine
from sottovoce.federated.engines import engine as engine_module
from sottovoce.federated.feature_cache import features_bytes
from sottovoce.models.cuda_graphs import GraphRecorder
from sottovoce.models.transformer.recorded_stacks import RecordedStacks

EVERYBODY = range(9)


CUDA = torch.device("cuda", 0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def stacked_of(
    ours: Small,
    *,
    size: int = 4,
    full: bool = False,
    context: ClientContext | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    record: Callable[[torch.device], GraphRecorder] | None = None,
) -> StackedEngine:
    """Nine clients in stacks of four: full ones, and one that is not."""
    stacked = ours.context.family.stacking.stacked
    assert stacked is not None
    if record is not None:
        recorded = RecordedStacks(stacked.losses, row_multiple=128, channel_bytes=48, record=record)
        stacked = replace(stacked, losses=recorded)
    return StackedEngine(
        context or ours.context,
        ours.layout,
        stacked=replace(stacked, full=full),
        device=device,
        dtype=dtype,
        size=size,
    )


def updates_of(
    engine: Engine, ours: Small, *, step: int = 0, clients: Sequence[int] = EVERYBODY, device: torch.device = CPU
) -> dict[int, Tensor]:
    updates: dict[int, Tensor] = {}
    for trained in engine.train(ours.server.parameters_P.to(device), clients, step=step):
        assert not isinstance(trained, Dropped), trained
        rows = trained.update if trained.update.dim() == 2 else trained.update[None]
        updates |= {client: row.clone() for client, row in zip(trained.clients, rows, strict=True)}
    return updates


CASES: dict[str, dict[str, Any]] = {
    "local steps": {},
    "local epochs of unequal clients": {"local": {"local_epochs": 2, "batch_seconds": 1.3}},
    "three utterances a step, shortest first": {
        "local": {"local_epochs": 2, "batch_utterances": 3, "order": "ascending", "batch_seconds": 10.0}
    },
    "each its own layers dropped": {"model": {"layers": 4, "layer_drop": 0.5}},
    "post-norm": {"model": {"norm": "post"}},
    "FedProx, epochs": {"local": {"local_epochs": 2, "proximal": Proximal(name="fedprox", mu=0.5)}},
    "FedProx, not squared": {"local": {"local_steps": 3, "proximal": Proximal(name="distance", mu=0.3)}},
    # Adam's first steps are signs: with a larger eps they are as well conditioned as the gradients.
    "Adam, epochs": {"local": {"local_epochs": 2, "optimiser": {"name": "adam", "eps": 1e-2}, "lr": 0.01}},
    "LARS": {"local": {"optimiser": {"name": "lars"}, "lr": 0.1}},
    "masks": {"local": {"spec_augment": SpecAugmentSettings()}},
    "bands": {"local": {"narrow_band": NarrowBandSettings()}},
    "in the time domain, epochs": {
        "local": {
            "local_epochs": 2,
            "speeds": (0.95, 1.0, 1.05),
            "dropped_frequencies": DroppedFrequencies(),
            "dropped_chunks": DroppedChunks(shortest_seconds=0.005, longest_seconds=0.01),
        }
    },
    "dropout": {"model": {"dropout": 0.3}},
    "dropout, each its own layers, epochs": {
        "model": {"layers": 4, "layer_drop": 0.5, "dropout": 0.3},
        "local": {"local_epochs": 1, "batch_seconds": 1.6},
    },
}


def relative(found: dict[int, Tensor], expected: dict[int, Tensor]) -> dict[int, float]:
    """How far each client's updates are apart, of their length."""
    assert found.keys() == expected.keys()
    return {client: float((found[client] - own).norm() / own.norm()) for client, own in expected.items()}


@pytest.mark.parametrize("full_stacks", [False, True], ids=["as they come", "with idle rows"])
@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_clients_trained_one_by_one(
    name: str, full_stacks: bool, tones: Path, tmp_path: Path
) -> None:
    """In float64 all of them; in float32, where a few are unstable (see `small`), the ordinary one."""
    for dtype in (torch.float64, torch.float32):
        ledger = tmp_path / f"{dtype}.jsonl"
        ours = small(tones, ledger, people={"max_seconds": 3.0}, cohort_size=9, dtype=dtype, **CASES[name])
        engine = stacked_of(ours, full=full_stacks, dtype=dtype)
        apart = []
        for step in (0, 1):
            found, expected = updates_of(engine, ours, step=step), updates_of(ours.engine, ours, step=step)
            assert expected.keys() == set(EVERYBODY)
            apart += relative(found, expected).values()
        if dtype == torch.float64:
            assert max(apart) < EXACT
        else:
            assert statistics.median(apart) < rounding(dtype)


@pytest.mark.parametrize("name", [name for name in CASES if "dropout" not in name])
def test_recorded_stacks_have_the_same_updates(name: str, tones: Path, tmp_path: Path) -> None:
    """Where masks are drawn on the host nothing is recorded."""
    case = {"people": {"max_seconds": 3.0}, "cohort_size": 9, "dtype": torch.float64, **CASES[name]}
    ours = small(tones, tmp_path / "ledger.jsonl", **case)
    recorders: list[ReplayingRecorder] = []

    def record(_: torch.device) -> ReplayingRecorder:
        recorders.append(ReplayingRecorder())
        return recorders[-1]

    engine = stacked_of(ours, full=True, dtype=torch.float64, record=record)
    for step in (0, 1):
        found, expected = updates_of(engine, ours, step=step), updates_of(ours.engine, ours, step=step)
        assert max(relative(found, expected).values()) < EXACT
    assert len(recorders) == 1
    assert recorders[0].room < 100  # something was recorded


def test_a_step_less_of_one_client_is_seen(tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = engine_module.load_client

    def cut_short(*given: Any, **named: Any) -> LoadedClient:
        own = whole(*given, **named)
        return own if own.client.index != 5 else replace(own, lines=own.lines[:-1], draws=own.draws[:-1])

    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9, dtype=torch.float64)
    expected = updates_of(ours.engine, ours)
    monkeypatch.setattr(engine_module, "load_client", cut_short)
    apart = relative(updates_of(stacked_of(ours, dtype=torch.float64), ours), expected)
    assert apart.pop(5) > 1e6 * EXACT
    assert max(apart.values()) < EXACT


def test_the_cases_have_clients_of_unequal_size(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", people={"max_seconds": 3.0}, cohort_size=9)
    assert len({len(ours.context.speech(client).rows) for client in ours.context.population}) > 1


@pytest.mark.parametrize("name", test_round.CASES)
def test_rounds_are_those_of_the_twin(name: str, tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small_and_stacked(*arguments: Any, **options: Any) -> Small:
        ours = small(*arguments, **options)
        ours.engine = stacked_of(ours, dtype=torch.float64)  # type: ignore[assignment]
        return ours

    monkeypatch.setattr(test_round, "small", small_and_stacked)
    test_round.test_three_rounds_are_those_of_the_twin(name, tones, tmp_path)


@needs_cuda
def test_on_cuda_dropout_is_the_same_in_distribution(tones: Path, tmp_path: Path) -> None:
    """Mean and spread over many rounds, which differ in nothing but dropout; and no two clients share a mask.

    Means of n draws each lie √((Σ₁+Σ₂)/n) apart, Σ being the trace of a covariance. Without the rescaling by
    1/(1 − p), or with dropout in one place only, they lie many times as far apart.
    """
    rounds, clients = 40, range(3)
    ours = small(
        tones,
        tmp_path / "ledger.jsonl",
        model={"dropout": 0.4, "positions": "sinusoidal"},
        local={"local_steps": 1, "batch_seconds": 30.0, "clip_gradients": float("inf"), "lr": 0.01},
        cohort_size=9,
    )
    drawn = {}
    alone = SequentialEngine(ours.context, ours.layout, device=CUDA)
    for name, engine in (("one by one", alone), ("stacked", stacked_of(ours, size=3, device=CUDA))):
        per_round = [updates_of(engine, ours, step=step, clients=clients, device=CUDA) for step in range(rounds)]
        drawn[name] = torch.stack([torch.stack([own[client] for client in clients]) for own in per_round]).double()
    means = {name: draws_RNP.mean(0) for name, draws_RNP in drawn.items()}
    spreads = {name: draws_RNP.var(0).sum(1) for name, draws_RNP in drawn.items()}

    apart_N = (means["stacked"] - means["one by one"]).square().sum(1)
    expected_N = (spreads["stacked"] + spreads["one by one"]) / rounds
    assert float((apart_N / expected_N).mean()) == pytest.approx(1, abs=0.5)
    assert float(spreads["stacked"].sum()) == pytest.approx(float(spreads["one by one"].sum()), rel=0.2)

    directions_RNP = torch.nn.functional.normalize(drawn["stacked"] - means["stacked"], dim=2)
    alike_NN = torch.einsum("rnp,rmp->nm", directions_RNP, directions_RNP) / rounds
    assert alike_NN.fill_diagonal_(0).abs().max() < 0.5


@needs_cuda
@pytest.mark.parametrize("full_stacks", [False, True], ids=["as they come", "with idle rows"])
def test_on_cuda_dropout_is_a_clients_own_whoever_else_is_in_the_stack(
    full_stacks: bool, tones: Path, tmp_path: Path
) -> None:
    """On a CPU the masks are those of the client alone, which the cases above compare."""
    case = CASES["dropout, each its own layers, epochs"]
    ours = small(tones, tmp_path / "ledger.jsonl", people={"max_seconds": 3.0}, cohort_size=9, **case)
    engine = stacked_of(ours, size=9, device=CUDA, full=full_stacks)
    whole = updates_of(engine, ours, device=CUDA)
    apart: list[float] = []
    for fewer in ([5], [0, 5, 7], [4, 5, 6, 7, 8]):
        found = updates_of(engine, ours, clients=fewer, device=CUDA)
        apart += relative(found, {client: whole[client] for client in fewer}).values()
    assert statistics.median(apart) < rounding(torch.float32)


def read_by(engine: StackedEngine, ours: Small, monkeypatch: pytest.MonkeyPatch, **training: Any) -> list[int]:
    """How many utterances are read for clients, one after another, while the engine trains."""
    counts: list[int] = []

    def count(speech: Any, used: Any) -> Any:
        counts.append(len(used))
        return read_speech(speech, used)

    with monkeypatch.context() as patched:
        patched.setattr(client_module, "read_speech", count)
        updates_of(engine, ours, **training)
    return counts


def test_the_expected_cohort_is_read_beforehand_and_trained_alike(
    tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9)
    engine, plain = stacked_of(ours), stacked_of(ours)
    engine.expect([2, 3, 4, 5], step=1)
    assert len(read_by(engine, ours, monkeypatch, clients=[0, 1, 2])) == 6  # 3, 4 and 5, too
    assert read_by(engine, ours, monkeypatch, step=1, clients=[2, 3, 4, 5]) == []
    assert len(read_by(engine, ours, monkeypatch, step=2, clients=[0, 6])) == 1  # what was expected once is forgotten
    updates_of(plain, ours, clients=[0, 1, 2])
    for step, clients in ((1, [2, 3, 4, 5]), (3, [1, 6, 7])):
        found, expected = (updates_of(one, ours, step=step, clients=clients) for one in (engine, plain))
        assert all(torch.equal(found[client], own) for client, own in expected.items())


def test_reading_ahead_takes_half_of_what_is_kept_at_most(
    tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9)
    one = stacked_of(ours)
    updates_of(one, ours, clients=[8])
    monkeypatch.setattr(engine_module, "feature_cache_bytes", lambda _: 2 * features_bytes(one._cache.get(8)))
    engine = stacked_of(ours)
    engine.expect([1, 2, 3, 4], step=1)
    assert len(read_by(engine, ours, monkeypatch, clients=[0])) <= 1 + 2


@pytest.mark.parametrize(
    "local",
    [
        pytest.param({"time_line": StreamSettings(), "local_steps": 1}, id="used once"),
        pytest.param({"dropped_chunks": DroppedChunks()}, id="augmented"),
    ],
)
def test_nothing_is_read_ahead_that_could_not_be_kept(
    local: dict[str, Any], tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", local=local, cohort_size=9)
    engine = stacked_of(ours)
    loaded: list[int] = []
    whole = engine_module.load_client

    def count(context: Any, planned: Any, **named: Any) -> LoadedClient:
        loaded.append(planned.client.index)
        return whole(context, planned, **named)

    monkeypatch.setattr(engine_module, "load_client", count)
    engine.expect([1, 2, 3], step=1)
    updates_of(engine, ours, clients=[0])
    assert loaded == [0]


@pytest.mark.parametrize("mode", ["seeded", "secure"])
def test_rounds_say_whom_they_expect_next_but_in_a_release(mode: str, tones: Path, tmp_path: Path) -> None:
    """The next cohort of a release is nobody's to know, this process's included."""
    seed = {"root_seed": 5} if mode == "seeded" else {"root_seed": None}
    ours = small(
        tones, tmp_path / "ledger.jsonl", cohort_size=4, privacy={"mode": mode, "noise_multiplier": 1.0, **seed}
    )
    told: list[tuple[list[int], int]] = []

    class Told(SequentialEngine):
        def expect(self, cohort: Sequence[int], *, step: int) -> None:
            told.append((list(cohort), step))

    engine = Told(ours.context, ours.layout, device=CPU)
    cohort = ours.plan.sample(0)
    LocalClients(engine).sum(ours.server.parameters_P, cohort, plan=ours.plan, step=0)
    assert told == ([(ours.plan.sample(1).tolist(), 1)] if mode == "seeded" else [])


def test_a_client_that_is_not_finite_spoils_its_own_row_only(tones: Path, tmp_path: Path) -> None:
    """Bit for bit: the other rows are as if its numbers were fine."""
    bad = 3
    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9)
    spoiling = test_engines.hearing(ours.context, bad, test_engines.not_finite)
    whole, spoilt = (updates_of(stacked_of(ours, size=9, context=context), ours) for context in (None, spoiling))
    assert spoilt[bad].isnan().any()
    for client in set(EVERYBODY) - {bad}:
        assert torch.equal(spoilt[client], whole[client])

    ours.engine = stacked_of(ours, size=9, context=spoiling)  # type: ignore[assignment]
    figures = ours.figures(0).as_json(ours.plan)
    assert (figures["cohort"], figures["non_finite"], figures["dropped"]) == (9, 1, {})
    assert ours.server.parameters_P.isfinite().all()


@pytest.mark.parametrize(
    ("accident", "reason"), [(test_engines.unreadable, "audio is damaged"), (test_engines.gone, "Input/output error")]
)
def test_a_client_that_cannot_be_read_is_dropped_and_its_stack_goes_on(
    accident: Any, reason: str, tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9, dtype=torch.float64)
    expected = updates_of(ours.engine, ours)
    accident(ours, monkeypatch)
    rows: dict[int, Tensor] = {}
    dropped: dict[int, str] = {}
    for result in stacked_of(ours, dtype=torch.float64).train(ours.server.parameters_P, EVERYBODY, step=0):
        if isinstance(result, Dropped):
            dropped[result.client] = result.reason
        else:
            rows |= {client: row.clone() for client, row in zip(result.clients, result.update, strict=True)}
    assert dropped.keys() == {test_engines.BAD}
    assert reason in dropped[test_engines.BAD]
    assert rows.keys() == set(EVERYBODY) - {test_engines.BAD}
    assert max(relative(rows, {client: expected[client] for client in rows}).values()) < EXACT


def test_a_client_that_fails_in_training_is_dropped_and_its_stack_goes_on(tones: Path, tmp_path: Path) -> None:
    """As in a release: the stack is trained in halves until the bad one is alone."""
    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9, dtype=torch.float64)
    expected = updates_of(ours.engine, ours)
    known = {field.name: getattr(ours.context, field.name) for field in fields(ours.context)}
    ours.context = Trouble(**known | {"forgiving": True}, accidents={test_engines.BAD: "in training"})
    found: dict[int, Tensor] = {}
    dropped: list[int] = []
    for result in stacked_of(ours, size=9, dtype=torch.float64).train(ours.server.parameters_P, EVERYBODY, step=0):
        if isinstance(result, Dropped):
            dropped.append(result.client)
        else:
            found |= {client: row.clone() for client, row in zip(result.clients, result.update, strict=True)}
    assert dropped == [test_engines.BAD]
    assert found.keys() == set(EVERYBODY) - {test_engines.BAD}
    assert max(relative(found, {client: expected[client] for client in found}).values()) < EXACT
