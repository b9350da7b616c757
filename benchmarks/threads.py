"""What threads that wait for one another cost beside other work: seconds of speech per second of the demo's seed.

    python benchmarks/threads.py [--busy 2] [--steps 60]

`--busy` processes that do nothing but count stand for whoever else is at work on the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

CORES = len(os.sched_getaffinity(0))
WAYS = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    f"{CORES} threads that sleep while they wait (ours)": {"OMP_NUM_THREADS": str(CORES), "OMP_WAIT_POLICY": "PASSIVE"},
    f"{CORES} threads that spin (torch's)": {"OMP_NUM_THREADS": str(CORES), "OMP_WAIT_POLICY": ""},
}


def speed(given: dict[str, str], *, steps: int, folder: Path) -> float:
    """The median over the steps of a run."""
    settings = [f"central.{name}={steps}" for name in ("steps", "evaluate_every", "checkpoint_every")]
    out = folder / "-".join(given.values())
    words = [sys.executable, "-m", "sottovoce", "run", "demo-clipping/seed", *settings, "--out", str(out)]
    subprocess.run(words, cwd=folder, env=os.environ | given, check=True, capture_output=True)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rates = [float(record["audio_seconds_per_second"]) for record in records if "audio_seconds_per_second" in record]
    return median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=2, help="other processes that are at work")
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(chosen.busy)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, given in WAYS.items():
                found = speed(given, steps=chosen.steps, folder=Path(folder))
                print(f"{name:<45} {found:7.1f} seconds of speech a second", flush=True)
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
