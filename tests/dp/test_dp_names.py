"""What `sottovoce.dp` promises, and what it loads: counted in modules, in processes of their own."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sottovoce import dp

# What a federation of somebody else's has no use for.
SPEECH = {
    *("soundfile", "soxr", "sentencepiece", "jiwer", "matplotlib", "jinja2", "tensorboard", "transformers"),
    *(f"sottovoce.{name}" for name in ("data", "models", "evaluation", "federated", "training", "config", "cli")),
}
PLAN = (
    "from sottovoce import dp; "
    "plan = dp.plan_run(40, cohort_size=8, central_steps=2, delta=1e-3, noise_multiplier=1.0, clip_bound=0.5); "
)
LOOP = (
    "import numpy as np; model = {'w': np.zeros(3)}; run = dp.start_run(plan, model, folder='run'); "
    "turn = run.next_round(model); turn.release(); run.commit(model); run.close(); "
)


def modules_after(program: str, *, folder: Path) -> set[str]:
    told = "import sys, json; before = set(sys.modules); " + program
    told += "print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, cwd=folder)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_it_loads_nothing_else(tmp_path: Path) -> None:
    found = modules_after("import sottovoce.dp; ", folder=tmp_path)
    assert {name for name in found if name.startswith(("sottovoce", "torch", "numpy"))} == {"sottovoce", "sottovoce.dp"}
    assert not SPEECH & found
    assert len(found) <= 20  # the rest is what `importlib` itself is made of


def test_runs_need_torch_and_no_speech_and_planning_and_statements_neither(tmp_path: Path) -> None:
    found = modules_after(PLAN + LOOP, folder=tmp_path)
    assert "torch" in found
    assert not SPEECH & found
    found = modules_after(PLAN + "dp.PoissonSampler; dp.verify_ledger; str(dp.state_run('run')); ", folder=tmp_path)
    assert "dp_accounting" in found
    assert not ({"torch"} | SPEECH) & found


@pytest.mark.parametrize("name", sorted(dp.__all__))
def test_a_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(dp, name).__doc__
    assert name in dir(dp)


def test_type_checkers_are_told_of_the_same_names_at_the_same_places() -> None:
    stub = ast.parse(Path(str(dp.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    told = {
        str(alias.asname): (str(node.module), alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(told) == sorted(dp.__all__)
    for name, (module, attribute) in told.items():
        assert getattr(importlib.import_module(module), attribute) is getattr(dp, name)
    (listed,) = [node.value for node in stub.body if isinstance(node, ast.Assign)]
    assert sorted(ast.literal_eval(listed)) == sorted(dp.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'plan'"):
        _ = dp.plan  # type: ignore[attr-defined]
