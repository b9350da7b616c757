"""Benchmarks are programs, not a package: their folder must be on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
