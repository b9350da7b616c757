"""What overlapping rounds cost in WER: the demo's people, the same rounds and noise, updates from older models.

    python benchmarks/staleness.py measure --runs RUNS --stores STORES     # keeps benchmarks/staleness.json
    python benchmarks/staleness.py --write                                 # the table of docs/late-nodes.md, from that

`measure` makes the rounds of `demo/private` with other rounds and cohorts (`CHANGES`), once for each seed, staleness
and learning rate that is not kept yet, and tests each model on the test speakers. Runs of one seed have the same start
model, cohorts and noise: they differ in the models that clients train from and in nothing else. Ten minutes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from late_nodes import with_table

from sottovoce.base.files import write_json
from sottovoce.base.seeds import stream
from sottovoce.config import load_recipe
from sottovoce.data.store import Store
from sottovoce.evaluation.compare import PAIRED_DRAWS
from sottovoce.evaluation.error_rates import CONFIDENCE, bootstrap_rates, percentile_interval
from sottovoce.evaluation.score import evaluate_recogniser
from sottovoce.training.simulation import Simulation

PAGE, KEPT = (Path(__file__).parents[1] / name for name in ("docs/late-nodes.md", "benchmarks/staleness.json"))
RECIPE = "demo/private"
ROUNDS, COHORT = 12, 100
STALENESS, SEEDS = (0, 1, 3), {0.04: (1, 2, 3), 0.02: (1,)}  # by the server's learning rate
CHANGES = (
    f"federation.steps={ROUNDS}",
    f"federation.cohort_size={COHORT}",
    f"federation.server.schedule.total_steps={ROUNDS + 1}",
    "federation.engine=sequential",
)


WANTED = [(lr, seed, staleness) for lr, seeds in SEEDS.items() for seed in seeds for staleness in STALENESS]


def count_errors(model: Any, store: Store) -> tuple[list[int], list[int]]:
    """Words and errors of each test speaker, in the store's order."""
    counts_S4 = evaluate_recogniser(model, store, split="test").speaker_counts_S4
    return counts_S4[:, 0].tolist(), counts_S4[:, 1:].sum(1).tolist()


def measure(runs: Path, stores: Path, kept: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"recipe": RECIPE, "changes": [*CHANGES], "runs": []}
    if kept.exists():
        found = json.loads(kept.read_text())
    done = {(run["lr"], run["seed"], run["staleness"]) for run in found["runs"]}
    for lr, seed, staleness in WANTED:
        if (lr, seed, staleness) in done:
            continue
        late = [f"federation.staleness={staleness}"] if staleness else []
        recipe = load_recipe(RECIPE, [*CHANGES, f"seed={seed}", f"federation.server.schedule.lr={lr}", *late])
        simulation = Simulation(recipe, stores=stores, runs=runs, device="cpu")
        for _ in simulation.rounds():
            pass
        made = {"lr": lr, "seed": seed, "staleness": staleness, "noise_multiplier": simulation.plan.settings.z}
        words, errors = count_errors(simulation.model, simulation.store)
        found["words"] = words
        found["runs"].append(made | {"errors": errors})
        write_json(kept, found)
        print(made, f"WER {sum(errors) / sum(words):.1%}", flush=True)


def table(found: dict[str, Any]) -> str:
    """WER over all seeds, and how it differs from the same rounds without staleness, by speaker."""
    rows = [
        "| server's learning rate | staleness | WER by seed | WER | points more than without, 95 % |",
        "|---|" + "---|" * 4,
    ]
    for lr, seeds in SEEDS.items():
        counts = {
            staleness: [run for run in found["runs"] if (run["lr"], run["staleness"]) == (lr, staleness)]
            for staleness in STALENESS
        }
        words_S = len(seeds) * np.array(found["words"])
        without_S = np.sum([run["errors"] for run in counts[0]], axis=0)
        for staleness, runs in counts.items():
            by_seed = ", ".join(f"{100 * sum(run['errors']) / sum(found['words']):.1f}" for run in runs)
            errors_S = np.sum([run["errors"] for run in runs], axis=0)
            more = "–"
            if staleness:
                generator = stream(1, "staleness", f"{lr}", staleness)
                drawn = bootstrap_rates(words_S, errors_S - without_S, generator=generator, draws=PAIRED_DRAWS)
                low, high = percentile_interval(drawn, confidence=CONFIDENCE)
                mean = (errors_S.sum() - without_S.sum()) / words_S.sum()
                more = f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
            rows.append(f"| {lr} | {staleness} | {by_seed} | {100 * errors_S.sum() / words_S.sum():.1f} | {more} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["measure"])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--stores", type=Path, default=Path("stores"))
    parser.add_argument("--kept", type=Path, default=KEPT)
    parser.add_argument("--write", action="store_true", help="write the table into docs/late-nodes.md")
    asked = parser.parse_args()
    if asked.what == "measure":
        measure(asked.runs, asked.stores, asked.kept)
    found = table(json.loads(asked.kept.read_text()))
    print(found)
    if asked.write:
        PAGE.write_text(with_table(PAGE.read_text(), "staleness", found))


if __name__ == "__main__":
    main()
