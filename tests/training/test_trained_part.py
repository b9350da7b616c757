"""Federated runs that train a part of a model: what is accounted, what is saved, and what a kill leaves."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sottovoce.base.errors import InputError
from sottovoce.cli import main
from sottovoce.config import load_recipe
from sottovoce.config.smoke import shrink_recipe
from sottovoce.federated.server import Server
from sottovoce.flat.layout import Layout
from sottovoce.models.recogniser import load_recogniser
from sottovoce.models.trainable import parse_part
from sottovoce.privacy.fingerprint import fingerprint_tensor
from sottovoce.training import checkpoint, start_model
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext
from sottovoce.training.start_model import init_start_model, split_trained_part

# The pairs of a block have r·(in + out) numbers each: r·width times 4 (queries, keys, values), 2 (attention's output)
# and twice 5 (the MLP's two). Here r = 2, and there are 4 blocks.
LORA_TINY = 16 * 96 * 2 * 4
CHANGES = ["federation.steps=4", "federation.evaluate_every=2", "federation.checkpoint_every=2"]

Run = Callable[..., Outcome]


@pytest.fixture
def run(federated_recipe: Path, short_stores: Path, tmp_path: Path) -> Run:
    def go(*changes: str, out: str = "run", resume: bool = False) -> Outcome:
        said.clear()
        around = RunContext(runs=tmp_path / "runs", stores=short_stores, device=torch.device("cpu"), say=said.append)
        recipe = load_recipe(str(federated_recipe), [*CHANGES, "federation.privacy.adaptive=null", *changes])
        return run_recipe(recipe, out=tmp_path / out, resume=resume, context=around)

    said: list[str] = []
    go.said = said  # type: ignore[attr-defined]
    return go


def ledger(folder: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines())
    return [line["record"] for line in lines]


def test_a_run_of_pairs_releases_pairs_and_saves_a_plain_model(
    run: Run, federated_recipe: Path, tmp_path: Path
) -> None:
    outcome = run("federation.trainable=lora(r=2, alpha=4)")
    saved, results = load_recogniser(outcome.folder), outcome.results
    assert results is not None
    whole = sum(p.numel() for p in saved.parameters.values())
    assert results["communication"] == {
        "trained_parameters": LORA_TINY,
        "frozen_parameters": whole,
        "bytes_up": 4 * LORA_TINY,
        "bytes_down": 4 * LORA_TINY,
        "bytes_down_first": 4 * (LORA_TINY + whole),
    }
    share = f"training 12,288 of {whole + LORA_TINY:,} parameters (2.17%): 0.05 MB each way per client and round"
    assert share in run.said  # type: ignore[attr-defined]

    recipe = load_recipe(str(federated_recipe), [*CHANGES, "federation.trainable=lora(r=2, alpha=4)"])
    start = init_start_model(recipe, saved.tokens, None, language=saved.language)
    part = split_trained_part(recipe, start)
    found, _ = checkpoint.load_latest_checkpoint(outcome.folder / "checkpoints")
    assert found is not None
    # The average of the pairs, merged, is the model; the server's own pairs are what the ledger has signed.
    flat_P, average_P = found.optimiser[checkpoint.PARAMETERS], found.optimiser["ema"]
    layout = Layout.of(part.initial)
    assert layout.dimension == LORA_TINY
    header, *records = ledger(outcome.folder)
    assert header["plan"]["layout"] == {name: list(tensor.shape) for name, tensor in part.initial.items()}
    merged = part.frozen.merged(layout.views(average_P))
    for name, tensor in found.recogniser.parameters.items():
        assert torch.equal(tensor, merged[name]), name
        moved = name.startswith("blocks.") and ".norm." not in name
        assert torch.equal(tensor, start.parameters[name]) != moved, name
    commits = [record for record in records if record["kind"] == "commit"]
    assert commits[-1]["result"] == fingerprint_tensor(flat_P)


def test_chosen_tensors_move_and_the_rest_of_the_model_does_not(
    run: Run, federated_recipe: Path, tmp_path: Path
) -> None:
    outcome = run("federation.trainable=blocks.3, output")
    saved = load_recogniser(outcome.folder)
    recipe = load_recipe(str(federated_recipe), CHANGES)
    start = init_start_model(recipe, saved.tokens, None, language=saved.language)
    for name, tensor in saved.parameters.items():
        trained = name.startswith(("blocks.03.", "output."))
        assert torch.equal(tensor, start.parameters[name]) != trained, name


@pytest.mark.parametrize(
    "part", ["lora(r=2, alpha=4)", "blocks.3", "lora(r=2, factors=alternate), output", "lora(r=2, factors=project)"]
)
@pytest.mark.parametrize("average", ["0.5", "null"])
def test_a_run_that_breaks_off_goes_on_to_the_same_bits(
    part: str, average: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the server's moments; it breaks off in the third round, charged already, after the checkpoint of two."""
    changes = [f"federation.trainable={part}", f"federation.server.ema={average}"]
    whole = run(*changes, out="whole").folder
    with monkeypatch.context() as patch:
        patch.setattr(Server, "step", breaking_off(Server.step, at=2))
        with pytest.raises(RuntimeError, match="broken off"):
            run(*changes, out="broken")
    broken = run(*changes, out="broken", resume=True).folder
    for file in ("checkpoints/latest/part.safetensors", "checkpoints/latest/optimiser.safetensors", "ledger.jsonl"):
        assert (whole / file).read_bytes() == (broken / file).read_bytes(), file


def breaking_off(whole: Any, *, at: int) -> Any:
    def step(self: Server, pseudo_gradient_P: torch.Tensor, *, step: int) -> Any:
        if step == at:
            raise RuntimeError("broken off")
        return whole(self, pseudo_gradient_P, step=step)

    return step


PART, FROZEN = "part.safetensors", "frozen.safetensors"


@pytest.mark.parametrize("part", ["lora(r=2, alpha=4)", "blocks.3, output"])
def test_a_checkpoint_holds_what_was_trained_and_the_rest_lies_once_in_the_folder(
    part: str, run: Run, tmp_path: Path
) -> None:
    folder = run(f"federation.trainable={part}").folder
    found = load_recogniser(folder)
    assert found.part is not None
    trained = sum(tensor.numel() for tensor in found.part.trained.values())
    for place in (folder / "checkpoints").glob("step-*"):
        assert not (place / "model.safetensors").exists()
        header = 8 + int.from_bytes((place / PART).read_bytes()[:8], "little")
        assert (place / PART).stat().st_size == header + 4 * trained
    frozen = load_file(folder / FROZEN)
    assert not frozen.keys() & found.part.trained.keys()
    assert frozen.keys() | found.part.trained.keys() >= found.parameters.keys()


def test_a_checkpoint_of_before_that_holds_the_merged_model_goes_on(
    run: Run, federated_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As runs wrote them once: plain parameters, and the trained part among the optimiser's tensors."""
    changes = ["federation.trainable=lora(r=2, alpha=4)", "federation.server.ema=null"]
    whole = run(*changes, out="whole").folder
    with monkeypatch.context() as patch:
        patch.setattr(Server, "step", breaking_off(Server.step, at=2))
        with pytest.raises(RuntimeError, match="broken off"):
            run(*changes, out="older")
    older = tmp_path / "older"
    found, _ = checkpoint.load_latest_checkpoint(older / "checkpoints")
    assert found is not None
    assert found.recogniser.part is not None
    recipe = load_recipe(str(federated_recipe), [*CHANGES, *changes])
    start = init_start_model(recipe, found.recogniser.tokens, None, language="en")
    trained = {name: found.recogniser.part.trained[name] for name in split_trained_part(recipe, start).initial}
    before = replace(
        found,
        recogniser=found.recogniser.whole,
        optimiser={**found.optimiser, checkpoint.PARAMETERS: Layout.of(trained).flatten(trained)},
    )
    checkpoint.save_checkpoint(older / "checkpoints", before)
    (older / FROZEN).unlink()
    run(*changes, out="older", resume=True)
    for file in (f"checkpoints/latest/{PART}", "checkpoints/latest/optimiser.safetensors"):
        assert (whole / file).read_bytes() == (older / file).read_bytes(), file


def test_a_part_is_nothing_without_the_rest(run: Run, tmp_path: Path) -> None:
    folder = run("federation.trainable=blocks.3").folder
    alone = tmp_path / "alone" / "model"
    shutil.copytree(folder / "model", alone)
    with pytest.raises(InputError, match=r"a part of a model, and no frozen.safetensors .*export RUN --merged"):
        load_recogniser(alone)
    frozen = load_file(folder / FROZEN)
    frozen["conv.bias"][0] += 1
    save_file(frozen, folder / FROZEN)
    with pytest.raises(InputError, match=r"frozen.safetensors is not what the part in .* was trained with"):
        load_recogniser(folder)


def test_export_writes_the_whole_model_or_the_part(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run("federation.trainable=lora(r=2)").folder
    run_export(monkeypatch, folder, "--merged", "--out", tmp_path / "models" / "whole")
    exported, found = load_recogniser(tmp_path / "models" / "whole"), load_recogniser(folder)
    assert exported.part is None
    assert all(torch.equal(exported.parameters[name], tensor) for name, tensor in found.parameters.items())
    assert exported.about == found.about
    run_export(monkeypatch, folder, "--out", tmp_path / "part", "--json")
    assert {file.name for file in (tmp_path / "part").iterdir()} == {
        *(PART, "config.json", "tokens.json"),
        *("privacy.json", "ledger.jsonl", "recipe.yaml"),
    }
    with pytest.raises(SystemExit) as ended:
        run_export(monkeypatch, folder, "--out", tmp_path / "part")
    assert ended.value.code == 2
    assert "is there already: expected the name of a new folder" in capsys.readouterr().err


def run_export(patch: pytest.MonkeyPatch, *words: object) -> None:
    patch.setattr(sys, "argv", ["sottovoce", "export", *map(str, words)])
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


def test_a_part_that_the_model_does_not_have_is_one_clear_line(run: Run) -> None:
    with pytest.raises(InputError, match=r"trainable='blocks.2-5': 'blocks.04' matches no parameter of the model"):
        run("federation.trainable=blocks.2-5")


@pytest.mark.parametrize("factors", ["alternate", "project"])
def test_central_training_has_no_rounds_for_factors_to_alternate_in(
    factors: str, recipe_file: Path, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only models that say themselves what is trained can ask for it."""
    part = parse_part(f"lora(r=2, factors={factors})")
    monkeypatch.setattr(start_model, "choose_trained_part", lambda recipe, start: part)
    around = RunContext(runs=tmp_path / "runs", stores=short_stores, device=torch.device("cpu"))
    with pytest.raises(InputError, match="about rounds of a federation; expected both or b"):
        run_recipe(load_recipe(str(recipe_file)), out=tmp_path / "central", resume=False, context=around)


def test_what_assumes_that_every_round_trains_everything_is_refused(run: Run) -> None:
    bound = "federation.estimate_bound={clients: 2}"
    with pytest.raises(InputError, match=r"estimate_bound with LoRA's factors=alternate or project: .*expected null"):
        run("federation.trainable=lora(r=2, factors=alternate)", "federation.local.local_steps=2", bound)


def test_a_smoke_test_trains_a_part_that_its_tiny_model_has(federated_recipe: Path) -> None:
    for text, expected in (
        ("lora(r=128, alpha=16), output", "lora(r=2), output"),
        ("lora(r=8, alpha=16, factors=project)", "lora(r=2, factors=project)"),
        ("blocks.30-35, output", "blocks.*, output"),
        ("blocks.3?.mlp.*", "blocks.*.mlp.*"),
    ):
        recipe = shrink_recipe(load_recipe(str(federated_recipe), [f"federation.trainable='{text}'"]))
        assert recipe.federated.trainable == expected
        parse_part(expected)
