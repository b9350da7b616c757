"""Makes optimisers.json and optimisers_schedules.json with optax, in float64.

Not run with the tests, since it needs jax and optax: `pip install jax optax` into an environment of its own.

Parameters and gradients are drawn once and stored beside the results. They hold what optimisers trip over: zero
parameters, zero gradients (one tensor always, all tensors at step 2), a scalar, a vector, gradients of 1e-12 (far
below LAMB's eps) and of 1e-6 (at it). Trust ratios are read off optax too: the largest element of an update after
`scale_by_trust_ratio`, divided by the same element before it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

jax.config.update("jax_enable_x64", True)

FOLDER = Path(__file__).parent
STEPS = 5
RECORDED = (1, 2, 5)  # numbers of steps taken

# name in our registry, settings (theirs have the same names), optax's function, learning rate: a number or a schedule
EXPONENTIAL = {"lr": 0.002, "transition_begin": 1, "transition_steps": 2, "decay_rate": 0.6}
CASES = [
    ("sgd", {}, optax.sgd, 0.4),
    ("sgd", {"momentum": 0.9}, optax.sgd, 0.1),
    ("sgd", {"momentum": 0.9, "nesterov": True}, optax.sgd, 0.1),
    ("adam", {}, optax.adam, 0.001),
    ("adam", {"b1": 0.8, "b2": 0.99, "eps": 1e-4, "weight_decay": 0.1}, optax.adamw, 0.01),
    ("adagrad", {}, optax.adagrad, 0.03),
    ("adagrad", {"initial_accumulator_value": 0.0, "eps": 0.0}, optax.adagrad, 0.03),
    ("adadelta", {"rho": 0.95, "eps": 1e-8}, optax.adadelta, 1.0),
    ("lars", {}, optax.lars, 0.5),
    ("lars", {"momentum": 0.5, "trust_coefficient": 0.02, "weight_decay": 0.1, "eps": 1e-6}, optax.lars, 0.5),
    ("lars", {}, optax.lars, EXPONENTIAL | {"lr": 0.5}),
    ("lamb", {}, optax.lamb, 0.006),
    ("lamb", {"b1": 0.8, "b2": 0.99, "eps": 1e-3, "eps_root": 1e-8, "weight_decay": 0.1}, optax.lamb, 0.006),
    ("lamb", {}, optax.lamb, EXPONENTIAL),
]


def draw_problem() -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    draw = np.random.default_rng(2025)
    shapes = {"matrix": (3, 2), "vector": (4,), "scalar": (), "zero": (3,), "still": (2,), "tiny": (3,), "small": (3,)}
    scales = {"still": 0.0, "tiny": 1e-12, "small": 1e-6}
    # Rounded to float32: the numbers mean the same in both precisions.
    parameters = [
        (np.zeros(shape) if name == "zero" else draw.normal(size=shape)).astype(np.float32)
        for name, shape in shapes.items()
    ]
    gradients = [
        [
            np.float32(0.0 if step == 2 else scales.get(name, 1.0)) * draw.normal(size=shape).astype(np.float32)
            for name, shape in shapes.items()
        ]
        for step in range(STEPS)
    ]
    return parameters, gradients


def to_jax(arrays: list[np.ndarray]) -> list[jax.Array]:
    return [jnp.asarray(array, dtype=jnp.float64) for array in arrays]


def optax_schedule(settings: dict) -> optax.Schedule:
    schedule = optax.exponential_decay(
        settings["lr"], settings["transition_steps"], settings["decay_rate"], settings["transition_begin"]
    )
    # optax counts in int32, and jax divides those in float32 even here.
    return lambda count: schedule(count.astype(jnp.float64))


def before_trust_ratio(name: str, settings: dict) -> optax.GradientTransformation:
    """The transforms that optax chains in front of scale_by_trust_ratio."""
    decay = optax.add_decayed_weights(settings.get("weight_decay", 0.0))
    if name == "lars":
        return decay
    moments = {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "eps_root": 0.0}
    return optax.chain(optax.scale_by_adam(**{k: settings.get(k, v) for k, v in moments.items()}), decay)


def read_ratios(name: str, settings: dict, updates: list, parameters: list) -> list[float]:
    trust = {"trust_coefficient": 1.0, "eps": 0.0}
    if name == "lars":  # LAMB's eps is Adam's
        trust = {"trust_coefficient": settings.get("trust_coefficient", 0.001), "eps": settings.get("eps", 0.0)}
    scale = optax.scale_by_trust_ratio(**trust)
    # A zero update shows no ratio; optax multiplies it by 1.
    scaled, _ = scale.update(updates, scale.init(parameters), parameters)
    largest = [int(jnp.argmax(jnp.abs(u))) for u in updates]
    pairs = [(s.ravel()[i], u.ravel()[i]) for s, u, i in zip(scaled, updates, largest, strict=True)]
    return [float(s / u) if u != 0 else 1.0 for s, u in pairs]


def run_case(name: str, settings: dict, make: Callable, lr: float | dict, problem) -> dict:
    parameters, gradients = to_jax(problem[0]), problem[1]
    rate = optax_schedule(lr) if isinstance(lr, dict) else lr
    optimiser = make(rate, **settings)
    state = optimiser.init(parameters)
    has_ratios = name in ("lars", "lamb")
    front = before_trust_ratio(name, settings) if has_ratios else optax.identity()
    front_state = front.init(parameters)
    recorded = {}
    for number, step_gradients in enumerate(map(to_jax, gradients), start=1):
        raw, front_state = front.update(step_gradients, front_state, parameters)
        ratios = read_ratios(name, settings, raw, parameters) if has_ratios else None
        updates, state = optimiser.update(step_gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        if number in RECORDED:
            recorded[number] = {"parameters": [np.asarray(p).tolist() for p in parameters], "trust_ratios": ratios}
    return {"optimiser": name, "settings": settings, "lr": lr, "after": recorded}


def run_schedules() -> list[dict]:
    def case(name: str, settings: dict, schedule: optax.Schedule, steps: list[int]) -> dict:
        values = [float(schedule(jnp.asarray(step, dtype=jnp.float64))) for step in steps]
        return {"schedule": name, "settings": settings, "steps": steps, "values": values}

    steps = [0, 1, 749, 750, 751, 1125, 1499, 1500, 1999, 2000, 5000]
    flagship = {"lr": 0.002, "transition_begin": 750, "transition_steps": 750, "decay_rate": 0.6}
    halving = {"lr": 0.5, "transition_begin": 400, "transition_steps": 700}
    warmup = {"lr": 0.3, "warmup_steps": 750, "total_steps": 2000, "final_lr": 0.01}
    return [
        case("constant", {"lr": 0.4}, optax.constant_schedule(0.4), steps),
        case("exponential", flagship, optax.exponential_decay(0.002, 750, 0.6, 750), steps),
        case(
            "exponential",
            flagship | {"staircase": True},
            optax.exponential_decay(0.002, 750, 0.6, 750, staircase=True),
            steps,
        ),
        case(
            "step",
            halving,
            optax.piecewise_constant_schedule(0.5, dict.fromkeys(range(400, 5001, 700), 0.5)),
            [0, 399, 400, 401, 1099, 1100, 1799, 1800, 5000],
        ),
        case("warmup_cosine", warmup, optax.warmup_cosine_decay_schedule(0.0, 0.3, 750, 2000, 0.01), steps),
    ]


def write(name: str, content: dict) -> None:
    derivation = f"tests/golden/make_optimisers.py, optax {optax.__version__}, jax {jax.__version__}, float64"
    lines = json.dumps({"derivation": derivation} | content, indent=1, ensure_ascii=False)
    (FOLDER / name).write_text(lines + "\n")


if __name__ == "__main__":
    problem = draw_problem()
    cases = [run_case(*case, problem) for case in CASES]
    stored = {
        "parameters": [p.tolist() for p in problem[0]],
        "gradients": [[g.tolist() for g in s] for s in problem[1]],
    }
    write("optimisers.json", stored | {"cases": cases})
    write("optimisers_schedules.json", {"cases": run_schedules()})
