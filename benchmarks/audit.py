"""How right an audit is: honest rounds at a known ε, and rounds with half of the noise, each many times over.

    python benchmarks/audit.py --out benchmarks/audit.json        # a quarter of an hour on one core

Everything is made by `audit_rounds`: plan, ledger, rounds and canaries are those of an audit. With everybody in every
round, what the attacker sees is exactly Gaussian, and the ledger's ε by PLD is the truth that an estimate must meet.
With some drawn in each round it is a bound that the estimate must stay below.
"""

import argparse
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from sottovoce.auditing.audit import Audit, audit_rounds
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.files import write_json
from sottovoce.flat.layout import Layout
from sottovoce.privacy import noise, plan
from sottovoce.privacy.calibration import noise_of_run
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings
from sottovoce.seeds import derive

LAYOUT = Layout(("blocks.0.weight", "blocks.1.weight", "output"), ((40, 50), (15, 100), (10, 100)))
EPSILONS = (1.0, 2.0, 8.0)
DELTA = 1e-6
ROUNDS = 4
CANARIES = 1000
PEOPLE = 1000  # assumed by the plan; the canaries take their place


def one_audit(*, multiplier: float, rate: float, seed: int) -> Audit:
    settings = PrivacySettings(
        population_size=PEOPLE,
        privacy_unit="speaker",
        cohort_size=round(rate * PEOPLE),
        clip_bound=0.5,
        noise_multiplier=multiplier,
        delta=DELTA,
        root_seed=seed,
    )
    server = Server(
        ServerSettings(optimiser={"name": "sgd"}, schedule={"name": "constant", "lr": 0.1}), LAYOUT, LAYOUT.zeros()
    )
    return audit_rounds(Plan(settings, LAYOUT), server=server, people=[], rounds=ROUNDS, canaries=CANARIES, seed=seed)


def halved() -> Any:
    """The noise that is really added is half of what is accounted."""
    whole = noise.add_gaussian
    return patch.object(plan, "add_gaussian", lambda total, *, std, **named: whole(total, std=std / 2, **named))


def summary(audits: list[Audit]) -> dict[str, Any]:
    promised = audits[0].promised
    estimates = np.array([audit.fit.epsilon for audit in audits])
    bounds = np.array([audit.bound.epsilon for audit in audits])
    return {
        "runs": len(audits),
        "promised": round(promised, 4),
        "estimate_mean": round(float(estimates.mean()), 3),
        "estimate_std": round(float(estimates.std(ddof=1)), 3),
        "interval_holds_it": sum(audit.fit.low <= promised <= audit.fit.high for audit in audits),
        "interval_above_it": sum(audit.fit.low > promised for audit in audits),
        "bound_mean": round(float(bounds.mean()), 3),
        "bound_largest": round(float(bounds.max()), 3),
        "bound_above_it": int((bounds > promised).sum()),
        "noise_missing": sum(audit.noise is not None and audit.noise.is_missing for audit in audits),
        "verdicts": {name: sum(a.verdict == name for a in audits) for name in ("consistent", "alarm", "broken")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    rows = []
    for rate in (1.0, 0.1):
        for epsilon in EPSILONS:
            cohort_size = round(rate * PEOPLE)
            multiplier = noise_of_run(
                epsilon, population_size=PEOPLE, cohort_size=cohort_size, central_steps=ROUNDS, delta=DELTA
            )
            for kind, context in (("as accounted", nullcontext), ("half", halved)):
                with context():
                    audits = [
                        one_audit(multiplier=multiplier, rate=rate, seed=derive(1, str(rate), str(epsilon), kind, run))
                        for run in range(options.runs)
                    ]
                row = {
                    "sampling_rate": rate,
                    "noise_multiplier": round(multiplier, 4),
                    "noise": kind,
                    **summary(audits),
                }
                assert math.isclose(audits[0].promised, epsilon, rel_tol=0.01), row
                print(row, flush=True)
                rows.append(row)
    content = {"canaries": CANARIES, "rounds": ROUNDS, "delta": DELTA, "parameters": LAYOUT.dimension, "rows": rows}
    write_json(options.out, content)


if __name__ == "__main__":
    main()
