"""Reports say what travels between a client and the server."""

import json
from pathlib import Path

from tests.report.test_summary import a_run, flat

from sottovoce.report.summary import write_report
from sottovoce.training.start_model import format_communication


def test_a_report_says_what_travels_and_what_is_trained(tmp_path: Path) -> None:
    sent = {
        "whole": {"trained_parameters": 500_000, "frozen_parameters": 0, "bytes_up": 2_000_000},
        "part": {
            "trained_parameters": 50_000,
            "frozen_parameters": 500_000,
            "bytes_up": 200_000,
            "bytes_down_first": 2_200_000,
        },
    }
    folders = {label: a_run(tmp_path / label, wer=0.3) for label in sent}
    for label, folder in folders.items():
        results = json.loads((folder / "results.json").read_text())
        (folder / "results.json").write_text(json.dumps(results | {"communication": sent[label]}))
    whole, part = write_report(folders, tmp_path, title="A title").notes[:2]
    assert "cohort 12 of 240, 2.00 MB each way per client and round; δ=1e-06" in whole
    assert "0.20 MB each way per client and round (50,000 of 550,000 parameters are trained; 2.20 MB down" in part
    assert part in flat((tmp_path / "report.txt").read_text())


def test_bytes_of_a_few_numbers_are_not_rounded_to_nothing() -> None:
    assert format_communication({"bytes_up": 4 * 576}) == "2.3 kB each way per client and round"
    assert format_communication({"bytes_up": 20_000, "bytes_down": 10_000}) == (
        "0.02 MB up and 0.01 MB down per client and round"
    )
