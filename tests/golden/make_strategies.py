"""Makes strategies.json with jax_privacy 2.0.0, in float64: strategies, their errors, sensitivities and ε.

Not run with the tests, since it needs jax: `pip install jax-privacy` into an environment of its own. `squared_errors`
is the mean over prefix sums of jax_privacy's `per_query_error`; columns are divided by their first entry, so that z is
the multiplier of fresh noise. ε is by jax_privacy's own accountants (PLD): of cyclic Poisson sampling for banded
strategies, of a single release for BLTs.
"""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax_privacy.accounting import accountants, analysis
from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

jax.config.update("jax_enable_x64", True)

DELTA = 1e-9
PLD = accountants.PldAccountantConfig(value_discretization_interval=1e-4)
# steps, bands (and cycle), users, cohort, z
BANDED = [
    (200, 4, 1000, 100, 3.0),
    (2000, 8, 3400, 100, 3.5),
    (2001, 16, 10_000, 100, 2.5),
    (2000, 80, 33_900, 100, 2.5),
]
# steps, cycle, buffers, z
BLT = [(2000, 34, 1, 6.0), (2000, 100, 2, 4.0), (2000, 339, 2, 2.0), (2001, 339, 3, 1.5), (2000, 2000, 3, 1.0)]


def params(noise_multiplier: float, **sizes: int) -> analysis.DpParams:
    return analysis.DpParams(noise_multipliers=noise_multiplier, delta=DELTA, **sizes)


def banded(steps: int, bands: int, users: int, cohort: int, z: float) -> dict[str, Any]:
    column = toeplitz.optimize_banded_toeplitz(steps, bands, max_optimizer_steps=1000)
    column = (column / column[0]).at[0].set(1.0)
    norm = math.sqrt(toeplitz.sensitivity_squared(column))
    account = analysis.DpsgdTrainingAccountant(PLD)
    sizes = params(z / norm, num_samples=users, batch_size=cohort, cycle_length=bands)
    return {
        "steps": steps,
        "cycle": bands,
        "sampling_rate": cohort / (users // bands),
        "noise_multiplier": z,
        "strategy": {"kind": "banded", "column": column.tolist()},
        "squared_errors": float(jnp.mean(toeplitz.per_query_error(strategy_coef=column, n=steps))),
        "sensitivity": math.sqrt(toeplitz.minsep_sensitivity_squared(column, bands, n=steps, skip_checks=True)),
        "epsilon": account.compute_epsilon(steps, sizes),
    }


def blt(steps: int, cycle: int, buffers: int, z: float) -> dict[str, Any]:
    found = buffered_toeplitz.optimize(
        n=steps,
        min_sep=cycle,
        max_participations=None,
        error="mean",
        min_buffers=buffers,
        max_buffers=buffers,
    )
    column = found.toeplitz_coefs(steps)
    moved = math.sqrt(toeplitz.minsep_sensitivity_squared(column, cycle, n=steps))
    account = analysis.SingleReleaseTrainingAccountant(PLD)
    return {
        "steps": steps,
        "cycle": cycle,
        "sampling_rate": 1.0,
        "noise_multiplier": z,
        "strategy": {"kind": "blt", "decays": found.buf_decay.tolist(), "scales": found.output_scale.tolist()},
        "squared_errors": float(jnp.mean(toeplitz.per_query_error(strategy_coef=column, n=steps))),
        "sensitivity": moved,
        "epsilon": account.compute_epsilon(steps, params(z / moved, num_samples=cycle, batch_size=1)),
    }


def main() -> None:
    made = {"delta": DELTA, "cases": [*(banded(*case) for case in BANDED), *(blt(*case) for case in BLT)]}
    (Path(__file__).parent / "strategies.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
