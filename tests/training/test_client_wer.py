"""Clients' word error rate in a run that is killed: charged before anybody is asked, and never twice for one answer."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.points import Point
from tests.tones import pack_tones
from tests.training import forked

from sottovoce.privacy.guarantee import guarantee_of
from sottovoce.privacy.ledger import verify

STEPS = 6
MEASURED = 3  # after rounds 2, 4 and 6
ASKED = ["federation.clients.holdout=0.5", "federation.client_wer={words: 3, noise_multiplier: 6.0, every: 2}"]
# Before any answer: just charged. Then when all have answered, and nothing of it is on the disk.
POINTS = {
    "charged": Point("sottovoce.privacy.ledger:Ledger.measure"),
    "answered": Point("sottovoce.federated.client_wer:LocalEvaluationClients.wer"),
    "the second time": Point("sottovoce.privacy.ledger:Ledger.measure", nth=2),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everybody has said four words: two of them are held out."""
    folder = tmp_path_factory.mktemp("stores")
    pack_tones(folder / "tones", letters=(2, 3), utterances=4)
    return folder


@pytest.fixture
def arguments(narrow_recipe: Path, stores: Path) -> list[object]:
    return ["run", narrow_recipe, "--stores", stores, f"federation.steps={STEPS}", *ASKED]


def run(arguments: list[object], out: Path, **how: Any) -> None:
    ended = forked.run([*arguments, "--out", out, "--resume"], **how)
    assert ended.code == (-signal.SIGKILL if how.get("kill_at") else 0), ended.err


@pytest.mark.long
def test_a_simulation_ends_with_the_same_bytes_and_charges_each_once(arguments: list[object], tmp_path: Path) -> None:
    run(arguments, tmp_path / "whole")
    for number, point in enumerate(POINTS.values()):
        broken = tmp_path / f"broken-{number}"
        run(arguments, broken, kill_at=point)
        run(arguments, broken)
        for file in ("ledger.jsonl", "results.json"):
            assert (broken / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
        report = verify(broken / "ledger.jsonl")
        assert (report.steps, report.attempts) == (STEPS, STEPS)
        assert (report.measured, report.measured_attempts) == (MEASURED, MEASURED)
    found = json.loads((tmp_path / "whole" / "results.json").read_text())["client_wer"]
    assert [each["step"] for each in found] == [2, 4, 6]


def test_a_release_pays_for_the_attempt_that_was_lost(arguments: list[object], tmp_path: Path) -> None:
    arguments.append("federation.privacy.mode=secure")
    for number, point in enumerate(POINTS.values()):
        broken = tmp_path / f"broken-{number}"
        run(arguments, broken, kill_at=point)
        run(arguments, broken)
        report = verify(broken / "ledger.jsonl")
        assert (report.steps, report.measured, report.measured_attempts) == (STEPS, MEASURED, MEASURED + 1)
        lines = [json.loads(line) for line in (broken / "ledger.jsonl").read_text().splitlines()]
        records = [line.get("record", line) for line in lines]
        charged = [record for record in records if record["kind"] in ("intent", "client_wer")]
        spent = [record["epsilon"] for record in charged]
        assert spent == sorted(set(spent))  # each is on the disk before the next
        assert len({record["cohort"] for record in charged}) == len(charged)
        results = json.loads((broken / "results.json").read_text())
        assert results["privacy"]["epsilon_rdp"] == guarantee_of(report).epsilon.rdp == report.epsilon.rdp
        assert len(results["client_wer"]) == MEASURED


def test_without_it_nothing_is_said_of_it(narrow_recipe: Path, short_stores: Path, tmp_path: Path) -> None:
    arguments = ["run", narrow_recipe, "--stores", short_stores, "federation.steps=2", "--out", tmp_path / "run"]
    assert forked.run(arguments).code == 0
    for file in ("ledger.jsonl", "results.json", "metrics.jsonl", "config.yaml"):
        assert "client_wer" not in (tmp_path / "run" / file).read_text()
