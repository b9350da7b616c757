"""The READMEs' tables of differences between paper, released code and recipe are those of their transcriptions, and
the transcriptions (docs/differences/*.yaml) fit the recipes: every key is named, every value that is held is the same.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from docs import write_differences
from docs.write_differences import PAPERS, Claim, claims, find_mistakes, leaves, page, readme, render, value_at

LEAST_ROWS = {"pelikan2025": 50, "gao2022": 45, "ramesh2023": 40}
every_paper = pytest.mark.parametrize("paper", PAPERS)


@cache
def loaded(paper: str) -> Mapping[str, Any]:
    return write_differences.loaded_settings(paper)


@cache
def transcription(paper: str) -> Mapping[str, Any]:
    """Not to be changed."""
    return write_differences.transcription(paper)


def one_of_each_file(paper: str) -> Mapping[str, Any]:
    return {name: loaded(paper)[name] for name in {name.split("/")[0]: name for name in loaded(paper)}.values()}


def mistakes(paper: str, *, transcribed: Mapping[str, Any] | None = None, **changed: Any) -> list[str]:
    """What is found wrong with `changed` in place of recipes, whose other runs are left out if there is any."""
    return find_mistakes(paper, transcribed or transcription(paper), changed or loaded(paper))


def rows(transcribed: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for chapter in transcribed["different"].values() for row in chapter]


@every_paper
def test_the_transcription_fits_the_recipes(paper: str) -> None:
    assert mistakes(paper) == []
    assert len(rows(transcription(paper))) >= LEAST_ROWS[paper]


@every_paper
def test_the_readme_has_the_transcription(paper: str) -> None:
    written = readme(paper).read_text(encoding="utf-8")
    assert page(paper, written=written) == written, "`make docs` writes the tables anew"


@pytest.mark.parametrize("paper", ["gao2022", "ramesh2023"])
def test_values_of_settings_that_differ_are_held(paper: str) -> None:
    """Pelikan et al.'s are also held by `test_paper_tables.py`, run by run."""
    assert [
        claim.key for claim in claims(transcription(paper)) if claim.part == "different" and not claim.is_held
    ] == []


def concerned(claim: Claim, paper: str) -> Iterator[str]:
    return (name for name, settings in loaded(paper).items() if claim.concerns(name, settings))


def with_value(settings: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = deepcopy(dict(settings))
    *path, last = key.split(".")
    inner = changed
    for part in path:
        inner = inner.setdefault(part, {})
    inner[last] = value
    return changed


@every_paper
def test_a_change_of_any_held_value_is_seen(paper: str) -> None:
    held = [claim for claim in claims(transcription(paper)) if claim.is_held]
    for claim in held:
        for name in [*concerned(claim, paper)][:1]:
            before = {name: loaded(paper)[name]}
            after = {name: with_value(before[name], claim.key, "planted")}
            new = {*mistakes(paper, **after)} - {*mistakes(paper, **before)}
            assert any(f"{name} has {claim.key}: planted" in line for line in new), (claim.name, claim.key, name)


@every_paper
def test_a_new_key_of_any_recipe_is_seen(paper: str) -> None:
    for name, settings in one_of_each_file(paper).items():
        for section in ("data", "model", "federation", "central"):
            if section in settings:
                found = mistakes(paper, **{name: with_value(settings, f"{section}.planted", 1)})
                assert f"{name}: {section}.planted is not named" in found


@every_paper
def test_a_key_that_is_lost_from_the_transcription_is_seen(paper: str) -> None:
    """One assignment at a time is taken out; a key that it named is then found to be unnamed."""
    for part in ("same", "ours"):
        for place, lost in enumerate(transcription(paper)[part]):
            changed = {**transcription(paper), part: [one for one in transcription(paper)[part] if one is not lost]}
            of_lost = claims({"different": {}, "same": [], "ours": [], part: [lost]})
            name = next(name for claim in of_lost for name in concerned(claim, paper) if sets(name, claim.key, paper))
            found = mistakes(paper, transcribed=changed, **{name: loaded(paper)[name]})
            assert any(line.endswith("is not named") for line in found), (part, place, lost)


def sets(name: str, key: str, paper: str) -> bool:
    return value_at(loaded(paper)[name], key) is not None


@every_paper
def test_a_key_is_not_named_as_the_same_and_as_different(paper: str) -> None:
    changed = deepcopy(transcription(paper))
    claim = next(claim for claim in claims(changed) if claim.part == "different" and claim.is_held and claim.value)
    changed["same"].append({"where": "§1", "keys": [claim.key]})
    assert any("is named as different and as same" in line for line in mistakes(paper, transcribed=changed))


@every_paper
def test_an_option_that_does_as_the_paper_or_the_code_can_be_set(paper: str) -> None:
    changed = deepcopy(transcription(paper))
    first = rows(changed)[0]
    first["as_code"] = "data.planted=1"
    assert any(
        f"{first['setting']}: data.planted=1 cannot be set" in line for line in mistakes(paper, transcribed=changed)
    )


@every_paper
def test_a_change_of_any_cell_is_seen(paper: str) -> None:
    written = readme(paper).read_text(encoding="utf-8")
    table = render(transcription(paper))
    assert table in written
    for line in table.splitlines():
        if line.startswith("|") and "---" not in line:
            changed = written.replace(line, f"{line[:-2]} planted |")
            assert page(paper, written=changed) != changed


@every_paper
def test_every_value_of_a_row_can_be_seen_in_the_table(paper: str) -> None:
    table = render(transcription(paper))
    for row in rows(transcription(paper)):
        assert all(str(row.get(column, "")) in table for column in ("setting", "paper", "here"))
    assert all(f"`{claim.key}" in table for claim in claims(transcription(paper)))


if __name__ == "__main__":  # python -m tests.test_differences: the tables in figures
    for at in PAPERS:
        made = claims(transcription(at))
        keys = {key for settings in loaded(at).values() for key in leaves(settings)}
        named = {
            part: {k for k in keys if any(c.part == part and c.names(k) for c in made)}
            for part in ("different", "same", "ours")
        }
        held = sum(
            value_at(loaded(at)[name], claim.key) == claim.value
            for claim in made
            if claim.is_held
            for name in concerned(claim, at)
        )
        print(
            f"{at}: {len(rows(transcription(at)))} rows; of {len(keys)} keys in {len(loaded(at))} recipes "
            + ", ".join(f"{len(found)} {part}" for part, found in named.items())
            + f"; {len(made)} claims, {held:,} values compared"
        )
