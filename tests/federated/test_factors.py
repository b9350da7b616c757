"""LoRA's factors in turn, or one in a basis that the server keeps orthonormal, in every engine and against slow twins.

The twin of a round is Algorithm 1 on the tensors that the round trains, as if there were no others.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.small import AMPLIFIED, CPU, UNIT, Small, as_model, furthest, small
from tests.reference_round import LAMB, SGD, Gradient, Model, reference_round

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.federated.client import Proximal
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Engine, SequentialEngine, SharedEngine, StackedEngine, Trained
from sottovoce.federated.engines.workers import WorkersEngine
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout
from sottovoce.models.low_rank import singular_basis
from sottovoce.optimisers import State, check_rotates, rotate_state
from sottovoce.privacy.ledger import Charge
from sottovoce.training.refactoring import build_refactoring

ALTERNATE, PROJECT = "lora(r=2, alpha=6, factors=alternate)", "lora(r=2, factors=project)"
PARTS = [ALTERNATE, f"{ALTERNATE}, output", PROJECT, f"{PROJECT}, output"]
ENGINES = ["sequential", "stacked", "shared", "workers"]
LAMB_EPS = 1e-3  # as in `test_round`


class ByTensor:
    """An optimiser of its own for each tensor, which knows of no round but those that train it."""

    def __init__(self, kind: type[SGD | LAMB], **settings: float) -> None:
        self._kind, self._settings, self._own = kind, settings, dict[str, SGD | LAMB]()

    def step(self, theta: Model, gradient: Model, *, lr: float) -> Model:
        moved: Model = {}
        for name, own in gradient.items():
            opt = self._own.setdefault(name, self._kind(**self._settings))
            moved |= opt.step({name: theta[name]}, {name: own}, lr=lr)
        return moved


def engine_of(name: str, ours: Small) -> Engine:
    options: dict[str, Any] = {"dtype": torch.float64}
    match name:
        case "workers":
            return WorkersEngine(ours.context, ours.layout, workers=1, **options)
        case "stacked":
            return StackedEngine(ours.context, ours.layout, device=CPU, size=4, **options)
        case "shared":
            return SharedEngine(ours.context, ours.layout, device=CPU, summed=False, size=4, **options)
    return SequentialEngine(ours.context, ours.layout, device=CPU, **options)


def twin_of(ours: Small, step: int, *, opt: Any, lr: float) -> Model:
    model, local = ours.model(), ours.context.local
    fixed = {name: model.pop(name) for name in ours.layout.held_at(step)}

    def gradient_of(whole: Gradient) -> Gradient:
        def gradient(theta: Model) -> Model:
            found = whole({name: (theta | fixed)[name] for name in ours.layout.names})
            return {name: found[name] for name in theta}

        return gradient

    cohort = ours.plan.sample(step).tolist()
    moved = reference_round(
        model,
        [[gradient_of(whole) for whole in ours.gradients(index, step=step)] for index in cohort],
        opt=opt,
        server_lr=lr,
        local_lr=local.lr,
        local_bound=local.clip_gradients,
        expected_cohort=ours.plan.cohort_size,
        bound=ours.plan.clip_bound,
        share=str(ours.plan.settings.share),
        normalise=str(ours.plan.settings.normalise),
        proximal=None if local.proximal is None else (local.proximal.name, local.proximal.mu),
        noise=noise_of(ours, step) if ours.plan.settings.z else None,
    )
    return {name: (moved | fixed)[name] for name in ours.layout.names}


def noise_of(ours: Small, step: int) -> Model:
    """The plan's noise, which is what it adds to nothing: none in what the round holds, all of it elsewhere."""
    charge = Charge(ours.plan.event, step=step, clip_bound=ours.plan.clip_bound)
    noise = as_model(ours.layout, ours.plan.add_noise(ours.plan.new_total(), charge))
    for name in ours.layout.held_at(step):
        assert not noise.pop(name).any()
    drawn = np.concatenate([layer.ravel() for layer in noise.values()])
    # A deviation of n draws is off by 1/√(2n) of itself on average, and by more than five times that never.
    std = ours.plan.settings.z * ours.plan.clip_bound
    assert np.std(drawn) == pytest.approx(std, rel=5 / math.sqrt(2 * len(drawn)))
    return noise


def products(model: Model, pairs: Sequence[tuple[str, str]]) -> Model:
    """Of the factors that the server makes anew, and everything else as it is."""
    factors = {name for pair in pairs for name in pair}
    rest = {name: layer for name, layer in model.items() if name not in factors}
    return rest | {b: model[b] @ model[a] for a, b in pairs}


CASES: dict[str, dict[str, Any]] = {
    "global": {},
    "noise": {"privacy": {"noise_multiplier": 0.7}},
    "uniform, noise": {"privacy": {"share": "uniform", "noise_multiplier": 0.7}},
    "dim, rescaled": {"privacy": {"share": "dim", "normalise": "always"}},
    "FedProx": {"local": {"proximal": Proximal(mu=0.5)}},
    "momentum": {"optimiser": {"name": "sgd", "momentum": 0.9}},
    "LAMB": {"optimiser": {"name": "lamb", "eps": LAMB_EPS}},
}


@pytest.mark.usefixtures("one_thread")  # as in a worker
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("engine", "name"),
    [*((engine, "noise") for engine in ENGINES), *(("sequential", name) for name in CASES if name != "noise")],
)
def test_rounds_are_those_of_the_twin(part: str, engine: str, name: str, tones: Path, tmp_path: Path) -> None:
    """Each from where ours begins it. What was factored anew is compared as a product, whose factors were rounded once
    more: by u·‖b‖ and, as a has √r rows of length 1, by √r·u·‖b‖. An optimiser that remembers is compared without."""
    case = dict(CASES[name])
    optimiser = case.pop("optimiser", {"name": "sgd"})
    kind, settings = (LAMB, {"eps": LAMB_EPS}) if optimiser["name"] == "lamb" else (SGD, {})
    opt = ByTensor(kind, **settings | ({"momentum": 0.9} if "momentum" in optimiser else {}))
    lr = 0.02 if kind is LAMB else 0.8
    case["server"] = {"optimiser": optimiser, "schedule": {"name": "constant", "lr": lr}}
    case["local"] = {
        "clip_gradients": 0.05,
        **case.get("local", {}),
        **({"local_steps": 1} if engine == "shared" else {}),
    }
    ours = small(tones, tmp_path / "ledger.jsonl", dtype=torch.float64, part=part, **case)
    anew = ours.part.projected if optimiser == {"name": "sgd"} else ()
    after = [build_refactoring(ours.part, ours.server)] if anew else []
    trained = 0
    with closing(LocalClients(engine_of(engine, ours))) as clients:
        for step in range(4):
            trained += len(ours.plan.sample(step))
            start, twin = ours.model(), twin_of(ours, step, opt=opt, lr=lr)
            ours.round(step, clients=clients, after_step=after)
            found = ours.model()
            compared = [products(model, anew) for model in (found, twin, start)]
            assert furthest(*compared) < (1 + 1 + math.sqrt(2) if anew else 1)
            for held in ours.layout.held_at(step):
                if not anew:
                    assert np.array_equal(found[held], start[held])
            for a, _ in anew:
                assert np.abs(found[a] @ found[a].T - np.eye(2)).max() < 4 * UNIT[torch.float32]
    assert trained >= 4


@pytest.mark.parametrize("turns", [True, False], ids=["as it is", "moments that do not turn"])
def test_by_sgd_a_projected_factor_makes_what_one_makes_that_stays(
    turns: bool, tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """b·a is in the span of a, so that its singular vectors are another basis of that: gradients, clips and means turn
    with it. Momentum too, exactly, or products would part."""
    if not turns:
        monkeypatch.setattr("sottovoce.federated.server.rotate_state", lambda *_, **__: None)
    ends = []
    for name in ("anew", "stays"):
        ours = small(
            tones,
            tmp_path / f"{name}.jsonl",
            dtype=torch.float64,
            part=PROJECT,
            local={"local_steps": 1},
            cohort_size=9,
            server={
                "optimiser": {"name": "sgd", "momentum": 0.9},
                "schedule": {"name": "constant", "lr": 0.8},
                "ema": 0.5,
            },
        )
        after = [build_refactoring(ours.part, ours.server)] if name == "anew" else []
        for step in range(5):
            ours.round(step, after_step=after)
        for flat_P in (ours.server.parameters_P, ours.server.result_P):
            ends.append(products(as_model(ours.layout, flat_P), ours.part.projected))
    for anew, stays in zip(ends[:2], ends[2:], strict=True):  # the model, and the average of all models
        apart = max(np.linalg.norm(anew[name] - stays[name]) / np.linalg.norm(stays[name]) for name in stays)
        assert (apart < 5 * AMPLIFIED * UNIT[torch.float32]) == turns, apart


@pytest.mark.parametrize("engine", ["sequential", "stacked", "workers"])
@pytest.mark.parametrize("step", [0, 1])
def test_what_a_round_holds_does_not_move_whatever_the_local_optimiser(
    engine: str, step: int, tones: Path, tmp_path: Path
) -> None:
    """Weight decay would move it without a gradient."""
    local = {"optimiser": {"name": "adam", "weight_decay": 0.1}, "lr": 1e-3}
    ours = small(tones, tmp_path / "ledger.jsonl", part=f"{ALTERNATE}, output", local=local)
    for name, view in ours.layout.views(ours.server.parameters_P).items():
        view += 0.05 * torch.randn(view.shape, generator=torch_stream(1, name))
    with closing(engine_of(engine, ours)) as trains:
        for trained in trains.train(ours.server.parameters_P, range(9), step=step):
            assert isinstance(trained, Trained)
            for name, view in ours.layout.views(trained.update).items():
                assert bool(view.isfinite().all())
                assert bool(view.any()) != (name in ours.layout.held_at(step)), name


# The server.

SHAPES = {"w.lora_a": torch.zeros(2, 6), "w.lora_b": torch.zeros(5, 2), "norm": torch.zeros(4)}
TURNS = (("w.lora_a",), ("w.lora_b",))
OPTIMISERS: list[dict[str, Any]] = [
    {"name": "sgd", "momentum": 0.9},
    {"name": "adam", "weight_decay": 0.1},
    {"name": "adagrad"},
    {"name": "adadelta"},
    {"name": "lars", "weight_decay": 0.1},
    {"name": "lamb", "weight_decay": 0.1},
]


def server_of(optimiser: dict[str, Any], *names: str, held: tuple[tuple[str, ...], ...] = (), **given: Any) -> Server:
    layout = Layout.of({name: SHAPES[name] for name in names or SHAPES}, held=held)
    settings = ServerSettings(optimiser=optimiser, schedule={"name": "constant", "lr": 0.1}, **given)
    return Server(settings, layout, drawn(layout, "start"))


def drawn(layout: Layout, *key: object) -> torch.Tensor:
    return layout.flatten(
        {name: torch.randn(SHAPES[name].shape, generator=torch_stream(1, name, *key)) for name in layout.names}
    )


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=lambda own: own["name"])
def test_a_tensor_moves_as_if_there_were_only_the_rounds_that_train_it(optimiser: dict[str, Any]) -> None:
    """Moments, their corrections by the number of steps, and weight decay: of b, of a and of what is in all rounds."""
    whole = server_of(optimiser, held=TURNS)
    alone = {name: server_of(optimiser, name) for name in SHAPES}
    for step in range(5):
        done = whole.step(drawn(whole.layout, "gradient", step), step=step)
        held = whole.layout.held_at(step)
        for place, (name, own) in enumerate(alone.items()):
            if name not in held:
                one = own.step(drawn(own.layout, "gradient", step), step=step)
                if one.trust_ratios_H is not None:
                    assert done.trust_ratios_H is not None
                    assert torch.equal(done.trust_ratios_H[place], one.trust_ratios_H[0])
    for name, own in alone.items():
        assert torch.equal(whole.layout.views(whole.parameters_P)[name], own.layout.views(own.parameters_P)[name])


@pytest.mark.parametrize("held", [TURNS, TURNS[:1]], ids=["alternate", "project"])
@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=lambda own: own["name"])
def test_a_restored_server_goes_on_with_the_same_bits(optimiser: dict[str, Any], held: Any) -> None:
    whole, first, second = (server_of(optimiser, held=held, ema=0.9) for _ in range(3))
    servers = [(whole, range(4)), (first, range(2))]
    for server, steps in servers:
        for step in steps:
            go_on(server, step)
    kept = {name: tensor.clone() for name, tensor in first.tensors().items()}
    second.restore(first.parameters_P.clone(), kept)
    for step in range(2, 4):
        go_on(second, step)
    assert torch.equal(second.parameters_P, whole.parameters_P)
    assert torch.equal(second.result_P, whole.result_P)


def go_on(server: Server, step: int) -> None:
    server.step(drawn(server.layout, "gradient", step), step=step)
    server.average()


def test_a_checkpoint_of_other_rounds_is_refused() -> None:
    """One that was saved when all tensors were trained in all rounds."""
    before, ours = server_of({"name": "adam"}), server_of({"name": "adam"}, held=TURNS)
    with pytest.raises(InputError, match="saved optimiser state lacks"):
        ours.restore(before.parameters_P, before.tensors())


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=lambda own: own["name"])
def test_a_change_of_basis_leaves_products_and_turns_what_is_remembered(optimiser: dict[str, Any]) -> None:
    ours = server_of(optimiser, held=TURNS[:1], ema=0.5)
    for step in range(3):
        go_on(ours, step)
    views, average = ours.layout.views(ours.parameters_P), ours.layout.views(ours.result_P)
    a, b = views["w.lora_a"].double(), views["w.lora_b"].double()
    averaged = average["w.lora_b"].double() @ average["w.lora_a"].double()
    before = {name: tensor.clone() for name, tensor in ours.tensors().items()}
    rows, basis = singular_basis(a, b)
    ours.change_basis(rows="w.lora_a", columns="w.lora_b", basis_RR=basis, rows_RI=rows)
    within = 8 * UNIT[torch.float32] * float(a.norm() * b.norm())
    assert float((views["w.lora_b"].double() @ views["w.lora_a"].double() - b @ a).norm()) < within
    assert float((average["w.lora_b"].double() @ average["w.lora_a"].double() - averaged).norm()) < 2 * within
    for name, tensor in ours.tensors().items():
        if name.startswith(("momentum.", "first_moment.")) and tensor.shape == b.shape:
            torch.testing.assert_close(tensor.double(), before[name].double() @ basis)
        elif name.startswith(("second_moment.", "squares.", "moves.")) and tensor.shape == b.shape:
            torch.testing.assert_close(tensor.double(), before[name].double() @ basis.square())
            assert bool((tensor >= 0).all())
        elif name != "ema":
            assert torch.equal(tensor, before[name])


def test_means_of_squares_keep_their_sum_when_they_turn() -> None:
    state = State({"second_moment": [torch.rand(5, 2, dtype=torch.float64, generator=torch_stream(1, "squares"))]})
    before = state.slots["second_moment"][0].clone()
    turn = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64, generator=torch_stream(1, "turn"))).Q
    rotate_state(state, 0, basis_RR=turn)
    torch.testing.assert_close(state.slots["second_moment"][0].sum(dim=1), before.sum(dim=1))
    with pytest.raises(InputError, match="'velocity' cannot be put into another basis"):
        check_rotates(State({"velocity": [before]}))


# How alpha goes together with clipping and noise.


@pytest.mark.parametrize("optimiser", [{"name": "sgd", "momentum": 0.9}, {"name": "adam", "eps": 0.0}])
def test_alpha_is_a_choice_of_rates_and_bound_and_nothing_else(
    optimiser: dict[str, Any], tones: Path, tmp_path: Path
) -> None:
    """W + s·b·a with local rate η, bound C and server's rate λ is W + b·a with s²·η, s·C and λ (s·λ for Adam): b is s
    times as large, to the bit for s = 2, and so is its noise: no choice of alpha has less of it beside the signal."""
    scaled = {"sgd": 1.0, "adam": 2.0}[optimiser["name"]]
    ends = []
    for number, (alpha, local_lr, bound, lr) in enumerate([(4, 0.1, 0.05, 0.5), (2, 0.4, 0.1, 0.5 * scaled)]):
        ours = small(
            tones,
            tmp_path / f"{number}.jsonl",
            part=f"lora(r=2, alpha={alpha}, factors=b)",
            local={"lr": local_lr, "clip_gradients": math.inf},
            privacy={"clip_bound": bound, "noise_multiplier": 0.7},
            server={"optimiser": optimiser, "schedule": {"name": "constant", "lr": lr}},
        )
        for step in range(3):
            ours.round(step)
        ends.append(ours.server.parameters_P * ours.context.frozen.scale)
    assert ends[0].any()
    assert torch.equal(*ends)
