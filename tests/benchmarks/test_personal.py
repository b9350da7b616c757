"""Tables of personal parts from kept runs: over seeds and paired by person; of real voices little is kept."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from findings.keeping import keep
from tests.benchmarks.rendering import Copy, rendered

from sottovoce.base.errors import InputError

SEED = ("seed: 1\n", "seed: 2\n")


def person(number: int, *, public: int, personal: int) -> dict[str, Any]:
    errors = {"public": public, "unguarded": personal, "personal": min(public, personal)}
    few = {"utterances": 2, "is_kept": True, "errors": errors | {"unguarded": public + 1, "personal": public + 1}}
    return {
        "client": number,
        "groups": {"accent": "German" if number <= 8 else f"other {number}", "age": "30"},
        "words": 10,
        "utterances": 6,
        "training": {"words": 10, "errors": public},
        "is_kept": personal < public,
        "errors": errors,
        "guard": {"public_errors": public, "personal_errors": personal},
        "by_amount": [few],
    }


def with_parts(folder: Path, *, public: int, personal: int) -> Path:
    people = [person(number, public=public, personal=personal) for number in range(1, 15)]
    (folder / "personal.json").write_text(json.dumps({"accounted": False, "per_client": people}))
    return folder


def test_tables_are_over_seeds_and_paired_by_person(results: Path, copy: Copy) -> None:
    for label, public, personal in (("private", 6, 3), ("quiet", 2, 2)):
        with_parts(copy(label), public=public, personal=personal)
        with_parts(copy(f"{label}-seed2", SEED), public=public + 2, personal=personal)
    told = rendered(
        results,
        '{{ personal_groups("suite/private") }}\n{{ personal_recovered("suite/private", "suite/quiet") }}\n'
        '{{ personal_amounts("suite/private") }}\n{{ personal_worse("suite/private") }}\n'
        '{{ personal_bounds("suite/private") }}',
    )
    assert "| everybody | 14 | 70.0 | 30.0 | -40.0 | -40.0 to -40.0 | 28 of 28 |" in told
    assert "| accent German | 8 |" in told
    # Noise costs four errors of twenty words a person; the parts take eight away.
    assert "| everybody | 14 | 30.0 | 70.0 | 30.0 | 20.0 | 100 % | 100 to 100 % |" in told
    assert "| 2 | 14 | 70.0 | +10.0 | +10.0 to +10.0 | 0.0 | 0.0 to 0.0 | 100.0 | 0.0 |" in told
    assert "| all that they have | 14 | 70.0 | -40.0 |" in told
    assert "0 of 3 groups ([private](../results/suite.md#private), " in told
    for guard in ("by errors alone", "no more errors"):
        assert f"| `private` | {guard} | 14 | 70.0 | 30.0 | -40.0 | -40.0 to -40.0 | 28 of 28 | 0 of 3 | 0 |" in told
    assert "`private`, seeds [1](../results/suite.md#private) [2](../results/suite.md#private-seed2)." in told


def test_a_run_without_parts_has_no_table(results: Path) -> None:
    with pytest.raises(InputError, match=r"suite/dim: it has no personal parts, expected federation\.personal"):
        rendered(results, '{{ personal_groups("suite/dim") }}')


def test_of_real_voices_only_accents_are_kept_that_enough_share(run: Path, tmp_path: Path) -> None:
    mine = with_parts(Path(shutil.copytree(run, tmp_path / "mine")), public=4, personal=2)
    keep(mine, tmp_path / "kept", brief=True)
    found = json.loads((tmp_path / "kept/personal.json").read_text())["per_client"]
    assert [one["groups"] for one in found] == [{"accent": "German"}] * 8 + [{"accent": "others"}] * 6
