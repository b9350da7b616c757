"""How right an audit is: honest rounds at a known ε, and rounds with half of the noise, each many times over.

    python benchmarks/audit.py --out benchmarks/audit.json        # half an hour on one core
    python benchmarks/audit.py --out benchmarks/audit.json --only "groups, BLT"      # the other rows stay as they are

Everything is made by `audit_rounds`: plan, ledger, rounds and canaries are those of an audit. With everybody in every
round, or in every round of the own group, what the attacker sees is exactly Gaussian, and the ledger's ε by PLD is the
truth that an estimate must meet. With some drawn in each round it is a bound that the estimate must stay below.
"""

import argparse
import json
import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from sottovoce.audit.canary_audit import Audit, audit_rounds
from sottovoce.audit.rounds import AuditedRounds
from sottovoce.base.files import write_json
from sottovoce.base.seeds import derive
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout
from sottovoce.privacy import noise, round_noise
from sottovoce.privacy.calibration import calibrate_run_noise
from sottovoce.privacy.mechanism import Correlated, MechanismSettings
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings

LAYOUT = Layout(("blocks.0.weight", "blocks.1.weight", "output"), ((40, 50), (15, 100), (10, 100)))
DELTA = 1e-6
CANARIES = 1000
PEOPLE = 1000  # assumed by the plan; the canaries take their place


@dataclass(frozen=True)
class Way:
    """Who is in a round: each with `rate`, or, with a `mechanism`, all of one group."""

    rate: float
    rounds: int = 4
    epsilons: tuple[float, ...] = (1.0, 2.0, 8.0)
    mechanism: MechanismSettings | None = None

    @property
    def cohort_size(self) -> int:
        return round(self.rate * PEOPLE)

    @property
    def correlated(self) -> Correlated | None:
        if self.mechanism is None:
            return None
        return self.mechanism.for_run(self.rounds, population_size=PEOPLE, cohort_size=self.cohort_size)


WAYS = {
    "everybody": Way(1.0),
    "a tenth": Way(0.1),
    "groups, banded": Way(0.25, 12, (2.0, 8.0), MechanismSettings(kind="banded", bands=4)),
    "groups, BLT": Way(0.25, 12, (2.0, 8.0), MechanismSettings(kind="blt", buffers=2)),
}


def one_audit(way: Way, *, multiplier: float, seed: int) -> Audit:
    settings = PrivacySettings(
        population_size=PEOPLE,
        privacy_unit="speaker",
        cohort_size=way.cohort_size,
        clip_bound=0.5,
        noise_multiplier=multiplier,
        delta=DELTA,
        root_seed=seed,
        mechanism=way.correlated,
    )
    server = Server(
        ServerSettings(optimiser={"name": "sgd"}, schedule={"name": "constant", "lr": 0.1}), LAYOUT, LAYOUT.zeros()
    )
    plan = Plan(settings, LAYOUT)
    return audit_rounds(plan, AuditedRounds(server, way.rounds), canaries=CANARIES, seed=seed)


def halved() -> Any:
    """The noise that is really added is half of what is accounted."""
    whole = noise.add_gaussian
    return patch.object(round_noise, "add_gaussian", lambda total, *, std, **named: whole(total, std=std / 2, **named))


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


def rows_of(name: str, *, runs: int) -> list[dict[str, Any]]:
    way, rows = WAYS[name], []
    # Rounds with independent noise are known by their rate, as they were when there were no others.
    key = name if way.mechanism else str(way.rate)
    for epsilon in way.epsilons:
        multiplier = calibrate_run_noise(
            epsilon,
            population_size=PEOPLE,
            cohort_size=way.cohort_size,
            central_steps=way.rounds,
            delta=DELTA,
            mechanism=way.correlated,
        )
        for kind, context in (("as accounted", nullcontext), ("half", halved)):
            with context():
                audits = [
                    one_audit(way, multiplier=multiplier, seed=derive(1, key, str(epsilon), kind, run))
                    for run in range(runs)
                ]
            row = {
                "in_each_round": name,
                "rounds": way.rounds,
                "noise_multiplier": round(multiplier, 4),
                "noise": kind,
                **summary(audits),
            }
            assert math.isclose(audits[0].promised, epsilon, rel_tol=0.01), row
            print(row, flush=True)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--only", choices=WAYS, help="these rounds alone; other rows of the file stay")
    options = parser.parse_args()
    kept = json.loads(options.out.read_text())["rows"] if options.only else []
    made = {name: rows_of(name, runs=options.runs) for name in WAYS if options.only in (None, name)}
    rows = [row for name in WAYS for row in made.get(name, [row for row in kept if row["in_each_round"] == name])]
    content = {"canaries": CANARIES, "delta": DELTA, "parameters": LAYOUT.dimension, "rows": rows}
    write_json(options.out, content)


if __name__ == "__main__":
    main()
