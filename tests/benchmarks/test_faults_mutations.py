"""Some hundred damaged inputs of every kind: each is read or refused with one line, and none in silence.

In processes of their own: the cases are tried in forks, which this one, with its threads, should not make.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.long
def test_a_short_campaign_ends_well_and_has_tried_everything(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "faults.py"), "mutations", "--short", "--json", str(tmp_path / "found")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert found["bad"] == []
    counts = found["counts"]
    assert {"audio files", "tables", "recipes", "overrides of recipes", "stores", "checkpoints", "ledgers"} < {*counts}
    assert sum(count["tried"] for count in counts.values()) >= 460
    assert all(count["clean error"] for count in counts.values()), "damage that nobody notices is no damage"
    assert all(sum(count.values()) == 2 * count["tried"] for count in counts.values())


@pytest.mark.long
def test_a_short_campaign_of_invalid_commands_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "faults.py"), "surfaces", "--short", "--json", str(tmp_path / "found")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert found["bad"] == []
    assert sum(count["tried"] for count in found["counts"].values()) >= 230
    assert all(count["clean error"] for count in found["counts"].values()), "what nobody refuses is not invalid"


CASES = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from faulty import cases
from faulty.cases import Tally
from sottovoce.base.errors import InputError

def fail(error):
    raise error

def spin():
    while True:
        pass

cases.CPU_SECONDS = 1
tally = Tally()
endings = {
    "unharmed": lambda: 7, "counted": lambda: None, "clean": lambda: fail(InputError("one line")),
    "two lines": lambda: fail(InputError("one line\\nanother")), "traceback": lambda: fail(TypeError("x")),
    "exit": lambda: sys.exit(0), "crash": os.abort, "hang": spin, "memory": lambda: bytearray(1 << 40),
    "loss": lambda: 8,
}
cases.try_all((cases.Case(name, name, read, lambda found: found != 7) for name, read in endings.items()), tally)
print(json.dumps(tally.as_json()))
"""


def test_every_ending_is_told_from_the_others_and_ends_no_other_case() -> None:
    command = [sys.executable, "-c", CASES, str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    endings = {
        name: [outcome for outcome, count in counts.items() if count and outcome != "tried"]
        for name, counts in json.loads(done.stdout).items()
    }
    assert endings == {
        "unharmed": ["unharmed"],
        "counted": ["clean error"],
        "clean": ["clean error"],
        "two lines": ["traceback"],
        "traceback": ["traceback"],
        "exit": ["traceback"],
        "crash": ["traceback"],
        "hang": ["hang"],
        "memory": ["traceback"],
        "loss": ["silent loss"],
    }
