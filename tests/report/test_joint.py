"""Runs on the same people promise something together, and say so wherever they are shown side by side."""

import json
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.report.conftest import MakeRun
from tests.tampering import rechain
from typer.testing import CliRunner

from sottovoce.base.errors import InputError
from sottovoce.cli import app
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import poisson_release, repeated, replaced
from sottovoce.report.joint import Declared, joint_sentences, unprotected_in
from sottovoce.report.records import RunRecord, read_run

pytestmark = pytest.mark.usefixtures("undrawn")

# Of thirty people twenty-one are clients, three of them a round for four rounds with z = 8: the recipe's.
DELTA = 1e-3


def reported(folder: Path, *runs: Path | str, code: int = 0) -> str:
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
    assert words.index(sentence, 200) < words.index("Scale of ε: up to 1 strong"), "in the headline"


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


def test_another_store_is_no_proof_of_other_people(copied: MakeRun, tmp_path: Path) -> None:
    noisy, release = copied("noisy"), copied("release")
    joint = epsilon(repeated(release_of(noisy), 8), DELTA)
    change(release, store="others")
    assert f"Together, for anybody in both runs: ε = {joint.pld:.4g} (PLD)" in reported(tmp_path, noisy, release)
    digest = json.loads((noisy / "inputs.json").read_text())
    (noisy / "inputs.json").write_text(json.dumps(digest | {"data.store digest": "another"}))
    rechain(noisy)
    assert "Together, for anybody in both runs: ε = " in reported(tmp_path, noisy, release), "nor is another digest"
    change(release, store="somewhere/tones")
    assert "Together" in reported(tmp_path, noisy, release), "the same store, by another way"
    (release / "config.yaml").unlink()
    assert "Together" in reported(tmp_path, noisy, release), "a folder that does not say may have been anybody's"


def test_who_declares_that_nobody_is_in_both_is_quoted(copied: MakeRun, tmp_path: Path) -> None:
    noisy, release = copied("noisy"), copied("release")
    words = reported(tmp_path, noisy, release, "--disjoint", "noisy,release")
    assert "Together" not in words
    assert "Asserted, and not shown by anything here: nobody is in two of noisy and release." in words
    with pytest.raises(InputError, match="--disjoint noisy,nosy: no run is called 'nosy'; expected noisy, release"):
        Declared.read(["noisy,nosy"], ["noisy", "release"])
    with pytest.raises(InputError, match="--disjoint noisy: expected at least two runs"):
        Declared.read(["noisy"], ["noisy", "release"])


def test_people_whom_one_run_uses_and_another_protects_are_named(copied: MakeRun, tmp_path: Path) -> None:
    noisy, release = copied("noisy"), copied("release")
    config = yaml.safe_load((noisy / "config.yaml").read_text())
    config["data"]["store"], config["data"]["dev"] = "others", "tones:train"
    config["federation"]["server_pass"] = {"data": "tones:train"}
    config["federation"]["seed_model"] = "others/seed"
    (noisy / "config.yaml").write_text(yaml.safe_dump(config))
    rechain(noisy)
    words = reported(tmp_path, noisy, release)
    assert (
        "noisy promises nothing to people whom it uses besides its clients: data.dev=tones:train (by name, clients "
        "there); federation.server_pass.data=tones:train (by name, clients there); "
        "federation.seed_model=others/seed. Whoever of them is a client of release has no guarantee" in words
    )
    assert "promises nothing" not in reported(tmp_path, noisy, release, "--disjoint", "noisy,release")


def test_the_seed_part_that_a_server_trains_on_is_told_by_how_people_are_divided(copied: MakeRun) -> None:
    """One store, whose people two runs divide: the same way, or so that one's seed part may be the other's clients."""

    def divided(name: str, share: float) -> RunRecord:
        run = copied(name)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["data"] |= {"seed_part": {"most_utterances_share": share}, "part": "federation"}
        config["federation"]["server_pass"] = {"data": "seed"}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        return read_run(name, run)

    one, same, other = divided("noisy", 0.5), divided("quiet", 0.5), divided("release", 0.2)
    assert unprotected_in(one, same) == ()
    (found,) = unprotected_in(one, other)
    store = one.data["store"]
    assert found.describe(other) == f"federation.server_pass.data={store}:seed (by name, clients there)"


def test_people_whom_a_run_has_compared_itself_are_not_named(runs: Path, tmp_path: Path) -> None:
    assert "promises nothing" not in reported(tmp_path, *(runs / name for name in ("noisy", "quiet", "release")))


def test_silos_of_two_divisions_are_composed_for_one_speaker(releases: Path, copied: MakeRun, tmp_path: Path) -> None:
    """A release tells nobody which store it was, so that its silos may be others'."""
    silos = releases / "silos"
    other = Path(shutil.copytree(silos, tmp_path / "other", symlinks=True))
    step = poisson_release(4.0, sampling_rate=1.0)
    speaker, silo = (epsilon(event, DELTA) for event in (replaced(repeated(step, 8)), repeated(step, 8)))
    assert (
        f"Together, for anybody in both runs: ε = {speaker.pld:.4g} (PLD) / {speaker.rdp:.4g} (RDP) at δ = 0.001, for "
        "one speaker, who is in one silo of each run, against replacing them in all."
        in reported(tmp_path, silos, other)
    )
    both = [read_run(name, place) for name, place in (("silos", silos), ("other", other))]
    known = [replace(run, inputs={"data.store digest": "one"}) for run in both]
    assert f"ε = {silo.pld:.4g} (PLD)" in joint_sentences(known)[0]
    assert "for one silo and ε = " in joint_sentences(known)[0]
    ten = dict(known[1].config)
    ten["federation"] = ten["federation"] | {"clients": ten["federation"]["clients"] | {"silos": 10}}
    assert "for one speaker, who" in joint_sentences([known[0], replace(known[1], config=ten)])[0]
    mixed = reported(tmp_path, silos, copied("release"))
    assert "for one speaker, who is in one silo of each run" in mixed


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
    assert "Together, for anybody in both runs: no ε is stated, because release left no valid ledger." in words


def test_runs_without_a_promise_need_no_sentence(runs: Path, tmp_path: Path) -> None:
    assert "Together" not in reported(tmp_path, runs / "quiet", runs / "central")
    assert "Together" not in reported(tmp_path, runs / "noisy")


def test_kept_runs_are_still_reported(tmp_path: Path) -> None:
    suite = Path(__file__).parents[2] / "results/clipping.zip"
    some = [suite / label for label in ("dim", "dim-normalised", "dim-normalised-seed2")]
    assert "Together, for anybody in all 3 runs:" in reported(tmp_path, *some)


# `sottovoce ledger RUN RUN…`


def test_ledger_composes_the_runs_that_it_is_given(runs: Path) -> None:
    joint = epsilon(repeated(release_of(runs / "noisy"), 8), DELTA)
    noisy, release = str(runs / "noisy"), str(runs / "release")
    said = CliRunner().invoke(app, ["ledger", noisy, release])
    assert said.exit_code == 0
    sentence = f"Together, for anybody in both runs: ε = {joint.pld:.4g} (PLD) / {joint.rdp:.4g} (RDP) at δ = 0.001"
    assert sentence in " ".join(said.output.split())
    told = json.loads(CliRunner().invoke(app, ["ledger", noisy, release, "--json"]).stdout)
    assert told["joint"][0]["epsilon_pld"] == joint.pld
    assert told["joint"][0]["runs"] == ["noisy", "release"]
    assert {label: run["valid"] for label, run in told["runs"].items()} == {"noisy": True, "release": True}
    assert told["runs"]["noisy"]["promised"]["promised_steps"] == 4
    alone = json.loads(CliRunner().invoke(app, ["ledger", f"{noisy}/ledger.jsonl", release, "--json"]).stdout)
    assert alone["joint"][0]["epsilon_pld"] == joint.pld, "a ledger without its folder may be anybody's"
    apart = json.loads(
        CliRunner().invoke(app, ["ledger", noisy, release, "--disjoint", "noisy,release", "--json"]).stdout
    )
    assert (apart["joint"], len(apart["together"])) == ([], 1)


def test_ledger_states_nothing_together_where_one_does_not_hold(copied: MakeRun) -> None:
    noisy, release = copied("noisy"), copied("release")
    lines = (release / "ledger.jsonl").read_text().splitlines()
    (release / "ledger.jsonl").write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    said = CliRunner().invoke(app, ["ledger", str(noisy), str(release)])
    assert isinstance(said.exception, InputError), "which ends the command with exit code 2"
    assert "their joint guarantee is not stated" in str(said.exception)
    assert "NOT SOUND" in said.output
    assert "Together" not in said.output
    told = CliRunner().invoke(app, ["ledger", str(noisy), str(release), "--json"])
    assert isinstance(told.exception, InputError)
    found = json.loads(told.stdout)
    assert (found["joint"], found["runs"]["release"]["valid"], found["runs"]["noisy"]["valid"]) == (None, False, True)
    twice = CliRunner().invoke(app, ["ledger", str(noisy), str(noisy)])
    assert "given twice" in str(twice.exception)


def test_ledger_names_the_run_that_takes_the_promise_from_all(runs: Path) -> None:
    told = json.loads(CliRunner().invoke(app, ["ledger", str(runs / "noisy"), str(runs / "quiet"), "--json"]).stdout)
    assert told["joint"][0]["epsilon_rdp"] is None
    assert list(told["joint"][0]["no_guarantee"]) == ["quiet"]
