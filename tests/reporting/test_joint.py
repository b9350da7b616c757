"""Runs on the same people promise something together, and say so wherever they are shown side by side."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.doctoring import rechain
from tests.reporting.conftest import MakeRun
from typer.testing import CliRunner

from sottovoce.cli import app
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import poisson_release, repeated

pytestmark = pytest.mark.usefixtures("undrawn")

# Of thirty people twenty-one are clients, three of them a round for four rounds with z = 8: the recipe's.
DELTA = 1e-3


def reported(folder: Path, *runs: Path, code: int = 0) -> str:
    """What a reader of the page sees, and above it what the command printed."""
    out = folder / "page.html"
    done = CliRunner().invoke(app, ["report", *map(str, runs), "--out", str(out)])
    assert done.exit_code == code, done.output
    page = unescape(re.sub(r"<(style|svg).*?</\1>|<[^>]+>", " ", out.read_text(), flags=re.DOTALL))
    return " ".join(f"{done.output} {page}".split())


def release_of(run: Path) -> Any:
    event = json.loads((run / "ledger.jsonl").read_text().splitlines()[0])["record"]["event"]
    return poisson_release(event["noise_multiplier"], sampling_rate=event["sampling_rate"])


def change(run: Path, **data: object) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"] |= data
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    if (run / "ledger.jsonl").exists():
        rechain(run)


def test_runs_on_the_same_people_state_their_joint_epsilon(runs: Path, tmp_path: Path) -> None:
    words = reported(tmp_path, runs / "noisy", runs / "release")
    joint = epsilon(repeated(release_of(runs / "noisy"), 8), DELTA)
    found = f"ε = {joint.pld:.4g} (PLD) / {joint.rdp:.4g} (RDP) at δ = 0.001 (simulated)"
    sentence = f"Together, for anybody in both runs: {found}."
    assert words.count(sentence) == 2, "once in the terminal and once on the page"
    assert words.index(sentence, 200) < words.index("A large ε promises next to nothing"), "in the headline"


def test_releases_alone_are_not_called_simulated(copied: MakeRun, tmp_path: Path) -> None:
    first = copied("release")
    second = first.rename(tmp_path / "second")
    words = reported(tmp_path, copied("release"), second)
    assert "at δ = 0.001." in words


def test_one_run_without_a_promise_takes_it_from_all(runs: Path, tmp_path: Path) -> None:
    words = reported(tmp_path, *(runs / name for name in ("noisy", "quiet", "release")))
    joint = epsilon(repeated(release_of(runs / "noisy"), 8), DELTA)
    assert "Together, for anybody in all 3 runs: no guarantee, because of quiet (no noise is added" in words
    assert f"the other 2: ε = {joint.pld:.4g} (PLD) / {joint.rdp:.4g} (RDP)" in words
    words = reported(tmp_path, runs / "noisy", runs / "central")
    assert "no guarantee, because of central (training without differential privacy)." in words


def test_other_people_are_another_matter(copied: MakeRun, tmp_path: Path) -> None:
    noisy, release = copied("noisy"), copied("release")
    change(release, store="others")
    assert "Together" not in reported(tmp_path, noisy, release)
    change(release, store="somewhere/tones")
    assert "Together" in reported(tmp_path, noisy, release), "the same store, by another way"
    (release / "config.yaml").unlink()
    assert "Together" in reported(tmp_path, noisy, release), "a folder that does not say may have been anybody's"


def test_a_seed_part_and_the_rest_are_other_people(copied: MakeRun, tmp_path: Path) -> None:
    noisy, central = copied("noisy"), copied("central")
    change(noisy, part="federation", seed_part={"fraction": 0.1})
    change(central, part="seed", seed_part={"fraction": 0.1})
    assert "Together" not in reported(tmp_path, noisy, central)
    change(central, seed_part={"fraction": 0.2})
    assert "because of central" in reported(tmp_path, noisy, central), "another division of the same people"


def test_a_run_whose_ledger_is_gone_leaves_nothing_to_state(copied: MakeRun, tmp_path: Path) -> None:
    noisy, release = copied("noisy"), copied("release")
    (release / "ledger.jsonl").unlink()
    words = reported(tmp_path, noisy, release, code=2)
    assert "NOT SOUND release:" in words
    assert "Together, for anybody in both runs: no ε is stated, because release left no ledger that holds." in words


def test_runs_without_a_promise_need_no_sentence(runs: Path, tmp_path: Path) -> None:
    assert "Together" not in reported(tmp_path, runs / "quiet", runs / "central")
    assert "Together" not in reported(tmp_path, runs / "noisy")


def test_kept_runs_are_still_reported(tmp_path: Path) -> None:
    suite = Path(__file__).parents[2] / "results/clipping.zip"
    some = [suite / label for label in ("dim", "dim-normalised", "dim-normalised-seed2")]
    assert "Together, for anybody in all 3 runs:" in reported(tmp_path, *some)
