"""What every process loads, and what it does not: a fleet of workers waits for it, and so does each short command."""

import json
import subprocess
import sys

import pytest

# torch's compiler, and what accounts for privacy or calibrates noise: seconds together, and few ever need them.
HEAVY = {
    "torch._dynamo",
    "sympy",
    "dp_accounting",
    "scipy.signal",
    "scipy.optimize",
    "scipy.stats",
    "matplotlib",
    "jinja2",
}


@pytest.mark.parametrize("module", ["sottovoce.federated.engines.workers", "sottovoce.training.run"])
def test_what_few_need_is_loaded_when_it_is_needed(module: str) -> None:
    told = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    assert "torch" in json.loads(found)
    assert not HEAVY & set(json.loads(found))


@pytest.mark.parametrize("command", [["--help"], ["ledger", "--help"]])
def test_a_short_command_loads_nothing_that_pages_are_made_with(command: list[str]) -> None:
    told = (
        "import atexit, json, sys; from sottovoce.cli import main; "
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)))); "
        f"sys.argv = ['sottovoce', *{command}]; main()"
    )
    found = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    assert not {"matplotlib", "jinja2"} & set(json.loads(found.splitlines()[-1]))
