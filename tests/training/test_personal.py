"""Personal parts in a simulation: nothing else of a run depends on them, a release is refused, and what they say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tones import pack_tones
from typer.testing import CliRunner

from sottovoce.base.errors import InputError
from sottovoce.cli import app
from sottovoce.config import load_recipe
from sottovoce.evaluation.personal_groups import compare_groups
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_folder import CONFIG, ENVIRONMENT, LEDGER, METRICS, PERSONAL, RESULTS

HOLDOUT = ["federation.clients.holdout=0.25"]
ASKED = [*HOLDOUT, 'federation.personal={part: "lora(r=2)", steps: 3, lr: 0.05, folds: 2, people: 4, amounts: [1, 2]}']
CLOCKS = {"seconds", "audio_seconds_per_second", "waited_for_data_seconds", "memory_mib"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine clients with four words each, of which two are held out."""
    folder = tmp_path_factory.mktemp("personal-stores")
    pack_tones(folder / "tones", letters=(2, 3))
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "federated.yaml"
    path.write_text(
        """
about: tones, federated
seed: 5
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
federation:
  steps: 2
  cohort_size: 4
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: sgd}, schedule: {name: constant, lr: 1.0}}
  privacy: {clip_bound: 0.05, noise_multiplier: 8.0, delta: 1e-3}
  engine: sequential
  evaluate_every: 1
  checkpoint_every: 1
"""
    )
    return path


def run(recipe: Path, changes: list[str], stores: Path, out: Path) -> Path:
    torch.set_num_threads(1)
    context = RunContext(runs=out.parent / "runs", stores=stores, device=torch.device("cpu"))
    run_recipe(load_recipe(str(recipe), changes), out=out, resume=False, context=context)
    return out


@pytest.fixture(scope="module")
def with_parts(recipe: Path, stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(recipe, ASKED, stores, tmp_path_factory.mktemp("with") / "run")


def files(folder: Path) -> dict[str, Any]:
    """Everything in a run's folder, without what a clock or a meter has measured and what names the recipe."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name in (CONFIG, ENVIRONMENT, ".lock") or name.startswith("tensorboard/"):
            continue
        found[name] = path.read_bytes()
    for name in (METRICS, "diagnostics.jsonl"):
        lines = [json.loads(line) for line in found[name].decode().splitlines()]
        found[name] = [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]
    return found


def charged(ledger: bytes) -> list[Any]:
    """What a ledger says of every release: not its chain, whose beginning names the recipe."""
    records = [json.loads(line) for line in ledger.decode().splitlines()]
    names = ("intent", "event", "commit", "epsilon", "parameters", "step")
    return [{name: record.get(name) for name in names} for record in records[1:]]


def test_nothing_else_of_a_run_depends_on_personal_parts(
    with_parts: Path, recipe: Path, stores: Path, tmp_path: Path
) -> None:
    ours, without = files(with_parts), files(run(recipe, HOLDOUT, stores, tmp_path / "run"))
    assert ours.keys() - without.keys() == {PERSONAL}
    assert without.keys() <= ours.keys()
    ledgers = [charged(found.pop(LEDGER)) for found in (ours, without)]
    assert ledgers[0] == ledgers[1]
    assert len(ledgers[0]) > 2
    results = [json.loads(found.pop(RESULTS)) for found in (ours, without)]
    assert results[0]["privacy"].pop("head") != results[1]["privacy"].pop("head")  # the ledgers name their recipes
    assert results[0] == results[1]
    ours.pop(PERSONAL)
    for found in (ours, without):  # states name the ledger's head, and have a seal
        for name in [name for name in found if name.endswith("state.json")]:
            found[name] = {key: own for key, own in json.loads(found[name]).items() if key not in ("ledger", "seal")}
    checkpoints = [name for name in ours if name.endswith("model.safetensors")]
    assert len(checkpoints) >= 2
    assert {name for name in ours if ours[name] != without[name]} == set()


def test_every_person_has_public_and_personal_errors(with_parts: Path) -> None:
    found = json.loads((with_parts / PERSONAL).read_text())
    assert (found["accounted"], found["people"], found["part"]) == (False, 4, "lora(r=2)")
    assert 0 < found["parameters"] < 20_000
    people = found["per_client"]
    assert [person["client"] for person in people] == [1, 2, 3, 4]
    for person in people:
        assert (person["utterances"], person["words"]) == (2, 2)
        assert person["groups"] == {"gender": "female"}
        errors = person["errors"]
        assert errors["personal"] == (errors["unguarded"] if person["is_kept"] else errors["public"])
        (one,) = person["by_amount"]  # of two utterances there is one smaller amount
        assert (one["utterances"], one["is_kept"]) == (1, False)
        assert one["errors"]["personal"] == one["errors"]["public"] == errors["public"]
        assert one["guard"]["utterances"] == 1
    assert not any(group.is_worse for group in compare_groups(people))


def test_the_same_people_are_chosen_in_the_same_order_by_any_seed(
    with_parts: Path, recipe: Path, stores: Path, tmp_path: Path
) -> None:
    asked = [*ASKED, "federation.personal.people=2", "federation.personal.amounts=[]", "data.people_seed=5", "seed=6"]
    other = json.loads((run(recipe, asked, stores, tmp_path / "run") / PERSONAL).read_text())
    first = json.loads((with_parts / PERSONAL).read_text())
    seconds = [[person["seconds"] for person in found["per_client"][:2]] for found in (first, other)]
    assert seconds[0] == seconds[1]


def test_a_release_is_refused_them(recipe: Path) -> None:
    with pytest.raises(
        InputError, match=r"personal with privacy\.mode=secure: what a part does for one person is private"
    ):
        load_recipe(str(recipe), [*ASKED, "federation.privacy.mode=secure"])
    with pytest.raises(InputError, match=r"personal without held-out speech to test on: expected clients.holdout"):
        load_recipe(str(recipe), [ASKED[1]])
    with pytest.raises(InputError, match=r"unknown key 'federation.personal.rank'"):
        load_recipe(str(recipe), [*HOLDOUT, "federation.personal={rank: 4}"])


def test_what_is_exported_of_a_run_has_none_of_it(with_parts: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(with_parts), "--out", str(tmp_path / "export")])
    assert done.exit_code == 0, done.output
    content = {path.name: path.read_bytes() for path in (tmp_path / "export").rglob("*") if path.is_file()}
    assert "model.safetensors" in content
    assert PERSONAL not in content
    assert not any(b"per_client" in own or b"unguarded" in own for own in content.values())
