"""What would break a guarantee to users raises, also where `python -O` leaves assertions out."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sottovoce

pytest.importorskip("cryptography", reason="the secure mode draws from cryptography's AES")

PACKAGE = Path(sottovoce.__file__).parent
GUARDED = ("privacy/**/*.py", "flat/**/*.py", "data/*.py", "federated/**/*.py")

BREAK_EVERY_INVARIANT = """
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sottovoce.flat.layout import Layout
from sottovoce.privacy.clipping import AdaptiveClipping
from sottovoce.privacy.clipping import Clipper, Share
from sottovoce.privacy.ledger import Charge, Ledger
from sottovoce.privacy.ledger_records import Header
from sottovoce.privacy.noise import add_secure_gaussian
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.randomness import SecureRandom
from sottovoce.privacy.settings import PrivacySettings
from sottovoce.base.seeds import derive

assert False, "assertions are still here: run this with -O"

layout = Layout(("w",), ((3,),))
settings = PrivacySettings(
    population_size=100, privacy_unit="speaker", cohort_size=10, clip_bound=1.0, noise_multiplier=1.0, delta=1e-5,
    mode="secure",
)
plan = Plan(settings, layout)
too_little = replace(settings, adaptive=AdaptiveClipping(target_quantile=0.5, count_noise_std=0.4))
adaptive = Plan(replace(settings, adaptive=AdaptiveClipping(target_quantile=0.5, count_noise_std=5.0)), layout)
seeded = Plan(replace(settings, mode="seeded", root_seed=1, noise_multiplier=0.0, weighting="seconds"), layout)
ledgers = {
    name: Ledger(Path(sys.argv[1]) / f"{name}.jsonl", header=plan.ledger_header(run=name))
    for name in ("order", "event", "commit")
}
written = {"parameters": "00", "cohort": "00"}


def paid(plan, **other):
    return Charge(**{"event": plan.event, "step": 0, "clip_bound": plan.clip_bound} | other)


def twice(release):
    charge = paid(adaptive)
    release(charge)
    release(charge)


def out_of_order():
    plan.charge(ledgers["order"], step=0, **written)
    plan.charge(ledgers["order"], step=2, **written)


def noise(total):
    add_secure_gaussian(total, std=1.0, grid=2.0**-24, random=SecureRandom(), layout=layout)


off_the_grid = layout.zeros(dtype=torch.float64)
off_the_grid[0] = 2.0**-25
too_large = layout.zeros(dtype=torch.float64)
too_large[0] = 2.0**30
update = torch.ones(layout.flat_size)
tensors = plan.clipper.layers

CASES = {
    "a plan whose count spends more than the step": lambda: Plan(too_little, layout),
    "a release at another clip bound than was charged": lambda: plan.add_noise(
        plan.new_total(), paid(plan, clip_bound=0.5)
    ),
    "a release of another event than was charged": lambda: plan.add_noise(
        plan.new_total(), paid(plan, event=seeded.event)
    ),
    "two sums for one charge": lambda: twice(lambda charge: adaptive.add_noise(adaptive.new_total(), charge)),
    "two counts for one charge": lambda: twice(lambda charge: adaptive.adapt(0.0, charge)),
    "a count that nobody charges for": lambda: plan.adapt(0.0, paid(plan)),
    "a sum off the grid": lambda: noise(off_the_grid),
    "a sum too large to be exact": lambda: noise(too_large),
    "a sum in float32": lambda: noise(layout.zeros()),
    "a grid in float32": lambda: plan.accumulate(layout.zeros(), update),
    "a weight where all are equal": lambda: plan.accumulate(plan.new_total(), update, weight=0.5),
    "weights where all are equal": lambda: plan.clip(torch.ones(2, layout.flat_size), weight=torch.ones(2)),
    "a weight above one": lambda: seeded.accumulate(seeded.new_total(), update, weight=1.5),
    "a weight that is not a number": lambda: plan.clipper.clip(update, weight=float("nan")),
    "a weight without a cap": lambda: seeded.weight(3.0),
    "shares of nothing": lambda: Clipper(layers=tensors, clip_bound=1.0, share=Share.WEIGHTED, alpha=(("w", 0.0),)),
    "an update of another layout": lambda: plan.accumulate(plan.new_total()[:-1], update),
    "names without shapes": lambda: Layout(("w", "b"), ((3,),)),
    "a digest of people's data in the ledger of a release": lambda: Header(
        run="r", mode="secure", plan={}, event=plan.event, delta=1e-5, inputs="digest of people"
    ),
    "a charge for another event than the ledger's": lambda: ledgers["event"].intend(
        seeded.event, step=0, clip_bound=1.0, **written
    ),
    "steps out of order": out_of_order,
    "a commit of what was never charged": lambda: ledgers["commit"].commit(step=3, result="00"),
    "a stream named by NumPy's integers": lambda: derive(1, "noise", np.int64(3)),
}
for name, break_it in CASES.items():
    try:
        break_it()
    except (AssertionError, ValueError):
        continue
    except Exception as error:
        print(f"{name}: {error!r}")
    else:
        print(f"{name}: nothing was raised")
"""


@pytest.mark.long
def test_invariants_are_checked_without_assertions(tmp_path: Path) -> None:
    path = str(PACKAGE.parent)
    command = [
        sys.executable,
        "-O",
        "-c",
        f"import sys; sys.path.insert(0, {path!r})\n{BREAK_EVERY_INVARIANT}",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def only_narrows(test: ast.expr) -> bool:
    """Whether an assertion only tells the type checker what is so: without it the next line would raise by itself."""
    match test:
        case ast.Call(func=ast.Name(id="isinstance")):
            return True
        case ast.Compare(ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
        case _:
            return False


@pytest.mark.parametrize("part", GUARDED)
def test_assertions_only_narrow_types(part: str) -> None:
    sources = sorted(PACKAGE.glob(part))
    assert sources
    found = [
        f"{source.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}"
        for source in sources
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert) and not only_narrows(node.test)
    ]
    assert not found, "say it with `check_invariant`, which `python -O` does not leave out"
