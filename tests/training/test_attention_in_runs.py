"""Runs of models that search with attention: what they are chosen by, and attentions that stop listening."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sottovoce.base.errors import InputError
from sottovoce.config import load_recipe
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import CharacterTokens, save_tokens
from sottovoce.evaluation.score import evaluate_recogniser
from sottovoce.models.recogniser import load_recogniser
from sottovoce.report.summary import write_report
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext

CRDNN = ["model={family: crdnn, size: tiny}", "data.test=[test, dev]"]
CENTRAL = [*CRDNN, "central.steps=2", "central.evaluate_every=2", "central.schedule.lr=1e-3"]
FEDERATED = [*CRDNN, "federation.steps=1", "federation.evaluate_every=1", "federation.privacy.adaptive=null"]

Go = Callable[..., tuple[Outcome, list[str]]]


@pytest.fixture
def go(short_stores: Path, tmp_path: Path) -> Go:
    """Runs a recipe with `key=value` changes; how it ended, and what it said."""

    def go(recipe: Path, *changes: str, out: str = "run") -> tuple[Outcome, list[str]]:
        said: list[str] = []
        around = RunContext(tmp_path / "runs", short_stores, torch.device("cpu"), say=said.append)
        return run_recipe(load_recipe(str(recipe), changes), out=tmp_path / out, resume=False, context=around), said

    return go


def evaluated(outcome: Outcome) -> list[dict[str, Any]]:
    records = map(json.loads, (outcome.folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if any(name.startswith("dev_") for name in record)]


@pytest.mark.parametrize(("kind", "changes"), [("central", CENTRAL), ("federated", FEDERATED)])
def test_attentions_that_stop_listening_are_counted_in_records_and_results(
    kind: str, changes: list[str], go: Go, recipe_file: Path, federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    """An untrained attention writes on until it may not."""
    outcome, said = go(recipe_file if kind == "central" else federated_recipe, *changes)
    assert outcome.results is not None
    tested, last = outcome.results["test"], evaluated(outcome)[-1]
    expected = evaluate_recogniser(load_recogniser(outcome.folder), Store(short_stores / "tones"), split="dev")
    assert expected.collapsed is not None
    assert expected.collapsed / expected.utterances >= 0.1
    assert tested["dev"]["collapsed"] == expected.collapsed
    if outcome.results["model"]["step"] == last["step"]:  # the last model is the best one
        assert last["dev_collapsed"] == expected.collapsed
    told = f"the attention collapsed in {expected.collapsed} of {expected.utterances} utterances"
    assert f"dev: {told}" in said
    assert f"run: {told} of dev" in write_report({"run": outcome.folder}, tmp_path, title="Run").notes


@pytest.mark.parametrize(("kind", "changes"), [("central", CENTRAL), ("federated", FEDERATED)])
def test_a_run_may_be_chosen_by_what_ctc_says(
    kind: str, changes: list[str], go: Go, recipe_file: Path, federated_recipe: Path, tmp_path: Path
) -> None:
    section = "central" if kind == "central" else "federation"
    outcome, _ = go(recipe_file if kind == "central" else federated_recipe, *changes, f"{section}.measure=ctc_wer")
    for record in evaluated(outcome):
        assert "dev_ctc_wer" in record
        assert not {"dev_wer", "dev_collapsed"} & record.keys()
    assert "dev_ctc_wer" in load_recogniser(outcome.folder).about
    assert "word error rate by CTC" in write_report({"run": outcome.folder}, tmp_path, title="Run").path.read_text()


def test_tokens_of_another_language_are_refused_before_the_first_round(go: Go, federated_recipe: Path) -> None:
    save_tokens(CharacterTokens("éàçù"), federated_recipe.parent / "french.json")
    with pytest.raises(
        InputError, match=r"tones: not one of the \d+ texts of split=dev can be written with the model's"
    ):
        go(federated_recipe, *FEDERATED, f"tokens.file={federated_recipe.parent / 'french.json'}")


def test_a_model_without_attention_is_not_asked_for_it(go: Go, recipe_file: Path) -> None:
    with pytest.raises(InputError, match="measure=ctc_wer: models of family=ctc_transformer know no attention"):
        go(recipe_file, "central.measure=ctc_wer")


def test_a_model_without_ctc_is_not_asked_for_it(go: Go, recipe_file: Path) -> None:
    with pytest.raises(InputError, match="measure=ctc_wer: models of family=transducer know no CTC"):
        go(recipe_file, "model={family: transducer, size: tiny}", "central.measure=ctc_wer", out="without")
