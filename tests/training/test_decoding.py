"""`evaluation` of a recipe: which decoder makes the test WERs, that nothing else changes, and what is said of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks import in_processes

from sottovoce.base.errors import InputError
from sottovoce.cli.evaluate import evaluate
from sottovoce.config import as_yaml, load_recipe
from sottovoce.config.smoke import shrink_recipe
from sottovoce.data.store import Store
from sottovoce.evaluation import recognise, score
from sottovoce.evaluation.decoder import DecodingOptions
from sottovoce.evaluation.score import select_utterances
from sottovoce.models.attention_search import GREEDY, SearchOptions
from sottovoce.report.summary import write_report
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext

CRDNN = ["model={family: crdnn, size: tiny}"]
CENTRAL = [*CRDNN, "central.steps=2", "central.evaluate_every=1", "central.schedule.lr=1e-3"]
FEDERATED = [*CRDNN, "federation.steps=1", "federation.evaluate_every=1", "federation.privacy.adaptive=null"]
ASKED = "evaluation={beam_width: 4, temperature: 2.5, end_threshold: 1.2, longest_shift: 9, ctc_weight: 0.3}"
WIDE = SearchOptions(width=4, temperature=2.5, end_threshold=1.2, longest_shift=9, ctc_weight=0.3)
TOLD = "beam 4, ctc weight 0.3, temperature 2.5, end threshold 1.2, longest shift 9"
OPTIONS = DecodingOptions(beam_width=4, temperature=2.5, end_threshold=1.2, longest_shift=9, ctc_weight=0.3)


def run(recipe: Path, changes: list[str], stores: Path, out: Path) -> Outcome:
    torch.set_num_threads(1)
    around = RunContext(out.parent / "runs", stores, torch.device("cpu"))
    return run_recipe(load_recipe(str(recipe), changes), out=out, resume=False, context=around)


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch, short_stores: Path) -> dict[str, list[Any]]:
    """How each split was decoded, whenever one was."""
    store = Store(short_stores / "tones")
    splits = {int(select_utterances(store, split=split).rows[0]): split for split in ("dev", "test")}
    found: dict[str, list[Any]] = {"dev": [], "test": [], "clients": []}
    plain = recognise.recognise_utterances

    def watched(model: Any, store: Store, rows: np.ndarray, *, decode: Any = None, **options: Any) -> list[str]:
        found[splits.get(int(rows[0]), "clients")].append(GREEDY if decode is None else decode)
        return plain(model, store, rows, decode=decode, **options)

    for module in (recognise, score):  # of ranks, and of one process
        monkeypatch.setattr(module, "recognise_utterances", watched)
    return found


@pytest.mark.parametrize(("kind", "changes"), [("central", CENTRAL), ("federated", FEDERATED)])
def test_tests_are_decoded_as_it_says_and_dev_speech_greedily(
    kind: str,
    changes: list[str],
    decoders: dict[str, list[Any]],
    recipe_file: Path,
    federated_recipe: Path,
    short_stores: Path,
    tmp_path: Path,
) -> None:
    recipe = recipe_file if kind == "central" else federated_recipe
    outcome = run(recipe, [*changes, ASKED], short_stores, tmp_path / "run")
    assert outcome.results is not None
    assert outcome.results["decoding"] == TOLD
    assert decoders["dev"]
    assert set(decoders["dev"]) == {GREEDY}
    assert decoders["test"] == [WIDE] * (1 if kind == "central" else 2)  # the best model, and the one it started from
    page = write_report({"run": outcome.folder}, tmp_path, title="Run").path.read_text()
    assert TOLD in page


def test_without_it_everything_is_greedy_and_nothing_is_said_of_it(
    decoders: dict[str, list[Any]], federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    outcome = run(federated_recipe, FEDERATED, short_stores, tmp_path / "run")
    assert outcome.results is not None
    assert "decoding" not in outcome.results
    assert set(decoders["dev"]) == set(decoders["test"]) == {GREEDY}
    assert "evaluation" not in (outcome.folder / "config.yaml").read_text()


def test_tests_along_and_clients_tests_are_decoded_like_the_last_test(
    decoders: dict[str, list[Any]], federated_recipe: Path, stores: Path, short_stores: Path, tmp_path: Path
) -> None:
    changes = ["federation.clients.holdout=0.5", "federation.test_clients=2", "federation.test_along=true"]
    plain = ["federation.privacy.noise_multiplier=0", ASKED]
    outcome = run(federated_recipe, [*FEDERATED, *changes, *plain], stores, tmp_path / "run")
    (record,) = [
        record
        for record in map(json.loads, (outcome.folder / "metrics.jsonl").read_text().splitlines())
        if "test_wer" in record and record["step"] == 1
    ]
    assert outcome.results is not None
    if outcome.results["model"]["step"] == 1:
        assert record["test_wer"]["test"] == outcome.results["test"]["test"]["wer"]
    decoded = [how for split in decoders.values() for how in split]
    assert decoded.count(WIDE) >= 2 + 2 + 1  # models before and after, on the test set and on clients; along
    assert all(how in (WIDE, GREEDY) for how in decoded)


def test_the_score_is_that_of_the_command(
    federated_recipe: Path, short_stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(federated_recipe, [*FEDERATED, ASKED], short_stores, tmp_path / "run")
    assert outcome.results is not None
    ours, on = outcome.results["test"]["test"], f"{short_stores / 'tones'}:test"

    def asked(options: DecodingOptions) -> tuple[dict[str, Any], str]:
        given = {name: getattr(options, name) for name in options.__dataclass_fields__}
        capsys.readouterr()
        evaluate(model=outcome.folder, on=on, json=True, longest=60.0, device="cpu", **given)
        said = capsys.readouterr()
        return json.loads(said.out), said.err

    theirs, _ = asked(OPTIONS)
    names = ("wer", "cer", "substitutions", "deletions", "insertions", "collapsed", "utterances", "per_speaker")
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
    greedy, hint = asked(DecodingOptions())
    assert any(greedy[name] != ours[name] for name in names), "an untrained model writes something else greedily"
    assert f"the test WERs in the run's own results are by {TOLD}" in " ".join(hint.split())


def test_two_processes_decode_alike(federated_recipe: Path, short_stores: Path, tmp_path: Path) -> None:
    changes = [*FEDERATED, ASKED, "federation.engine=sequential", "federation.privacy.sampling=fixed_size"]
    one = run(federated_recipe, changes, short_stores, tmp_path / "one")
    two = in_processes(2, run, federated_recipe, changes, short_stores, tmp_path / "two")[0]
    assert one.results is not None
    assert one.results["start"] == two.results["start"]


def test_the_beam_is_what_the_recipes_of_gao_say_and_small_in_a_smoke_run() -> None:
    recipe = load_recipe("gao2022/table1-fr/user-wer")
    assert recipe.decoding == DecodingOptions(
        beam_width=80, ctc_weight=0.0, temperature=1.5, end_threshold=1.5, longest_shift=140
    )
    assert shrink_recipe(recipe).decoding == replace(recipe.decoding, beam_width=3)


def test_it_is_written_only_where_it_is_given(federated_recipe: Path) -> None:
    assert "evaluation" not in as_yaml(load_recipe(str(federated_recipe)))
    assert "beam_width: 4" in as_yaml(load_recipe(str(federated_recipe), [*CRDNN, ASKED]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["evaluation={beam_width: 4, temperature: 2}"], "evaluation: temperature=2.0 is for models that search with"),
        (
            ["model={family: transducer, size: tiny}", "evaluation={beam_width: 4, longest_shift: 9}"],
            "evaluation: longest_shift=9 means nothing to models of family=transducer",
        ),
        (
            ["model={family: tests.training.mute:FAMILY, size: tiny}", "evaluation={beam_width: 4}"],
            "evaluation: models of family=tests.training.mute:FAMILY write no text; expected null",
        ),
        ([*CRDNN, "evaluation={beam_width: 0}"], "beam_width"),
        ([*CRDNN, "evaluation={temperature: 2}"], "beam_width"),
        ([*CRDNN, "evaluation={beam: 80}"], "beam"),
    ],
)
def test_what_a_family_cannot_do_is_refused_in_one_line(
    changes: list[str], message: str, federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as raised:
        run(federated_recipe, changes, short_stores, tmp_path / "run")
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "run").exists(), "refused before anything is written"


@pytest.mark.parametrize("family", ["transducer", "ctc_transformer"])
def test_other_families_search_their_own_way(
    family: str, recipe_file: Path, short_stores: Path, tmp_path: Path
) -> None:
    if family == "ctc_transformer":
        pytest.importorskip("flashlight.lib.text", reason="the extra `lm` is not installed")
    changes = [f"model={{family: {family}, size: tiny}}", "central.steps=1", "central.evaluate_every=1"]
    asked = ["central.schedule.lr=1e-3", "evaluation={beam_width: 4}"]
    outcome = run(recipe_file, [*changes, *asked], short_stores, tmp_path / "run")
    assert outcome.results is not None
    assert outcome.results["decoding"] == "beam 4"
