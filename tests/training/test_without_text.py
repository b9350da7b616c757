"""Runs on speech alone: no token is named, made or saved, no text is read, and figures stand in the place of errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.tones import pack_tones

from sottovoce.base.errors import InputError
from sottovoce.config import as_yaml, load_recipe
from sottovoce.data.corpora.corpus import RenderedSpeaker
from sottovoce.data.text.tokens import NO_TOKENS
from sottovoce.models.recogniser import load_recogniser
from sottovoce.models.speech_lstm import encoder_shapes
from sottovoce.report.summary import write_report
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext

PRE_TRAINED = """
about: tones without text
seed: 3
data: {store: mute}
model: {family: cpc, size: tiny, ahead: 6, candidates: 16}
"""
FEDERATED = (
    PRE_TRAINED
    + """
federation:
  steps: 10
  cohort_size: 6
  local: {batch_seconds: 4, batch_utterances: 8, lr: 1.0, local_steps: 1, clip_gradients: .inf}
  server: {optimiser: {name: adam}, schedule: {name: constant, lr: 0.005}}
  evaluate_every: 5
  checkpoint_every: 5
"""
)
CENTRAL = (
    PRE_TRAINED
    + """
central:
  steps: 4
  batch_seconds: 8
  optimiser: {name: adam}
  schedule: {name: constant, lr: 0.005}
  evaluate_every: 2
  checkpoint_every: 2
"""
)


def without_texts(rendered: RenderedSpeaker) -> RenderedSpeaker:
    """One utterance in four is too short for six predictions, and one speaker has a single short one."""
    spoken = [replace(own, text=None, raw_text=None) for own in rendered.utterances]
    spoken[0] = replace(spoken[0], samples=spoken[0].samples[:3_000])
    return replace(rendered, utterances=spoken)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    pack_tones(folder / "mute", change=without_texts)
    pack_tones(folder / "tones")
    return folder


def run(
    content: str, stores: Path, folder: Path, *changes: str, out: str = "run", said: list[str] | None = None
) -> Outcome:
    (folder / f"{out}.yaml").write_text(content)
    heard = [] if said is None else said
    around = RunContext(runs=folder / "runs", stores=stores, device=torch.device("cpu"), say=heard.append)
    recipe = load_recipe(str(folder / f"{out}.yaml"), list(changes))
    return run_recipe(recipe, out=folder / out, resume=False, context=around)


def test_a_federated_run_learns_and_says_so_by_its_loss_and_accuracy(stores: Path, tmp_path: Path) -> None:
    said: list[str] = []
    outcome = run(FEDERATED, stores, tmp_path, said=said)
    assert outcome.results is not None
    records = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    first, last = records[0], records[-1]
    assert first["dev_chance"] == 1 / 16
    assert last["dev_accuracy"] > max(first["dev_accuracy"], 2 / 16)
    assert last["dev_loss"] < first["dev_loss"]
    before, after = outcome.results["start"]["test"]["test"], outcome.results["test"]["test"]
    assert after["loss"] < before["loss"]
    assert after["left_out"] == {"too short for all predictions": 3}
    assert (after["speakers"], after["utterances"], after["splits"]) == (3, 9, ["test"])
    assert "wer" not in after
    assert "chosen by the loss on 9 utterances, 0.00 h (left out: 3 too short for all predictions)" in said
    summary = write_report({"speech alone": outcome.folder}, tmp_path, title="Speech alone")
    assert summary.headings[2:5] == ("converged", "loss", "accuracy")
    assert "(chance 6.2%)" in summary.rows[-1][4]
    page = (tmp_path / "report.html").read_text()
    assert "Contrastive accuracy on speakers who are not trained on" in page
    assert "word error rate" not in page.lower()


def test_nothing_of_it_names_a_token(stores: Path, tmp_path: Path) -> None:
    outcome = run(FEDERATED, stores, tmp_path, "federation.steps=1")
    assert "tokens" not in (outcome.folder / "config.yaml").read_text()
    found = load_recogniser(outcome.folder)
    assert found.tokens == NO_TOKENS
    assert json.loads((outcome.folder / "model/tokens.json").read_text())["kind"] == "none"


def test_a_recipe_that_names_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(FEDERATED + "tokens: {kind: sentence_pieces}\n")
    with pytest.raises(InputError, match="tokens: models of family=cpc learn from speech alone; expected none"):
        load_recipe(str(tmp_path / "wrong.yaml"), [])
    (tmp_path / "right.yaml").write_text(FEDERATED)
    recipe = load_recipe(str(tmp_path / "right.yaml"), [])
    (tmp_path / "again.yaml").write_text(as_yaml(recipe))
    assert load_recipe(str(tmp_path / "again.yaml"), []) == recipe


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("federation.measure=wer", "measure=wer: models of family=cpc write no text"),
        ("model.ahead=100", "no utterance to train on .*too short for all predictions"),
    ],
)
def test_what_needs_a_text_or_more_speech_is_refused(change: str, words: str, stores: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        run(FEDERATED, stores, tmp_path, change)


def test_a_release_says_no_more_of_people_than_it_does_of_errors(stores: Path, tmp_path: Path) -> None:
    private = ("noise_multiplier=8.0", "clip_bound=0.01", "delta=1e-3", "mode=secure")
    changes = [f"federation.privacy.{change}" for change in private]
    outcome = run(FEDERATED, stores, tmp_path, "federation.steps=2", *changes)
    assert outcome.results is not None
    assert "per_speaker" not in outcome.results["test"]["test"]
    assert outcome.results["test"]["test"]["loss"] > 0
    assert not (outcome.folder / "diagnostics.jsonl").exists()


def test_a_transducer_goes_on_from_it(stores: Path, tmp_path: Path) -> None:
    """Central pre-training, then a run with texts, whose encoder begins where the other ended."""
    first = run(CENTRAL, stores, tmp_path)
    fine_tuned = CENTRAL.replace("store: mute", "store: tones").replace(
        "{family: cpc, size: tiny, ahead: 6, candidates: 16}", "{family: transducer, size: tiny}"
    )
    changes = (f"central.start_from={first.folder}", "central.schedule.lr=1e-9", "central.steps=1")
    second = run(fine_tuned, stores, tmp_path, *changes, out="second")
    assert second.results is not None
    assert "wer" in second.results["test"]["test"]
    summary = write_report({"first": first.folder, "second": second.folder}, tmp_path, title="Both")
    assert summary.headings[2:] == ("converged", "WER", "95 % interval", "loss", "accuracy")
    assert [(bool(row[3]), bool(row[5])) for row in summary.rows] == [(False, True), (True, False)]
    encoder, recogniser = load_recogniser(first.folder), load_recogniser(second.folder)
    assert recogniser.tokens.size > 0
    for name in encoder_shapes(encoder.settings.encoder):
        torch.testing.assert_close(recogniser.parameters[name], encoder.parameters[name], rtol=0, atol=1e-6)


def test_it_goes_on_pre_training_in_another_language(stores: Path, tmp_path: Path) -> None:
    pack_tones(tmp_path / "stores/mute", change=without_texts, language="fr")
    first = run(CENTRAL, stores, tmp_path)
    second = run(CENTRAL, tmp_path / "stores", tmp_path, f"central.start_from={first.folder}", out="second")
    assert load_recogniser(second.folder).language == "fr"
