"""Tokens say whose texts made them, and a release takes none that clients' texts, or nobody knows whose, have made."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.tones import identity, pack_tones, rename, speaker
from typer.testing import CliRunner

from sottovoce.base.errors import InputError
from sottovoce.cli import app
from sottovoce.config import load_recipe
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker
from sottovoce.data.store import pack_corpus
from sottovoce.data.text.normalisation import alphabet
from sottovoce.data.text.tokens import CharacterTokens, load_tokens, save_tokens
from sottovoce.report.records import read_run
from sottovoce.report.statement import statement_text
from sottovoce.report.verdict import judge_run
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext

RECIPE = """
about: tones, federated
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
federation:
  steps: 1
  cohort_size: 2
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: sgd}, schedule: {name: constant, lr: 1.0}}
  privacy: {clip_bound: 0.01, noise_multiplier: 8.0, delta: 1e-3, mode: secure}
"""
CENTRAL = """
about: a seed
data: {store: others}
model: {size: tiny, layers: 2, width: 32}
central: {steps: 1, batch_seconds: 4, optimiser: {name: sgd}, schedule: {name: constant, lr: 0.1}}
"""
UNKNOWN = "it is not known whether clients' texts made these tokens"
WHAT_TO_DO = "a release needs others: make them with `sottovoce tokens STORE:split`, from people who are no clients"
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clients, one of whom says what nobody else does; other people; and clients under other names."""
    folder = tmp_path_factory.mktemp("stores")

    def shouts(one: RenderedSpeaker) -> RenderedSpeaker:
        said = [replace(each, text="eeeeeee eeeeeee") for each in one.utterances]
        return replace(one, utterances=said) if one.name == "s00" else one

    pack_tones(folder / "tones", letters=(2, 3), utterances=2, change=shouts)
    pack_tones(folder / "others", people=range(20, 35), letters=(2, 3), utterances=2)
    hidden = [rename("s00", "somebody")(speaker(0, letters=(2, 3), utterances=2))]
    hidden += [speaker(number, letters=(2, 3), utterances=2) for number in (20, 21, 25, 26)]
    pack_corpus(
        Corpus("tones", "en", sorted(hidden, key=lambda one: one.name), identity, ProblemLog()), folder / "hidden"
    )
    return folder


def made_tokens(stores: Path, store: str, out: Path) -> Path:
    """By the command."""
    ended = CliRunner().invoke(app, ["tokens", str(stores / store), "--out", str(out), "--size", "9"])
    assert ended.exit_code == 0, ended.output
    return out


@pytest.fixture
def run(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def go(*changes: str, recipe: str = RECIPE, out: str = "run", say: Callable[[str], None] = print) -> Outcome:
        (tmp_path / "recipe.yaml").write_text(recipe)
        around = RunContext(runs=tmp_path / "runs", stores=stores, device=torch.device("cpu"), say=say)
        given = load_recipe(str(tmp_path / "recipe.yaml"), list(changes))
        return run_recipe(given, out=tmp_path / out, resume=False, context=around)

    return go


def test_the_command_writes_down_whose_texts_it_has_read(stores: Path, tmp_path: Path) -> None:
    path = made_tokens(stores, "others:train", tmp_path / "tokens.json")
    (source,) = json.loads(path.read_text())["made_from"]
    assert source.keys() == {"store", "digest", "split"}
    assert (source["store"], source["split"]) == ("others", "train")
    assert load_tokens(path).size == 9
    (source,) = json.loads(made_tokens(stores, "others", tmp_path / "tokens.json").read_text())["made_from"]
    assert source["split"] is None


def test_one_client_s_words_do_not_become_pieces_of_a_release(run: Run, stores: Path, tmp_path: Path) -> None:
    path = made_tokens(stores, "tones:train", tmp_path / "tokens.json")
    assert any("eee" in piece for piece in load_tokens(path).pieces())
    with pytest.raises(InputError, match="9 of those whose texts made these tokens are clients") as refused:
        run(f"tokens.file={path}")
    assert str(refused.value).endswith(WHAT_TO_DO)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_others_texts_may_and_the_statement_lists_them(run: Run, stores: Path, tmp_path: Path) -> None:
    path = made_tokens(stores, "others:train", tmp_path / "tokens.json")
    outcome = run(f"tokens.file={path}")
    assert outcome.results is not None
    assert outcome.results["tokens"] == {
        "kind": "sentence pieces",
        "size": 9,
        "made_from": "texts of store others, train",
    }
    assert "made_from" not in json.loads((outcome.folder / "model/tokens.json").read_text())
    record = read_run("run", outcome.folder)
    told = statement_text(record, judge_run(record))
    assert "| tokens | 9 sentence pieces, made from texts of store others, train |" in told


def test_without_a_file_they_are_nobodys(run: Run) -> None:
    outcome = run()
    assert outcome.results is not None
    assert outcome.results["tokens"]["made_from"] == "the alphabet of the language: nobody's texts"


def test_an_alphabet_needs_no_provenance_and_other_characters_do(run: Run, tmp_path: Path) -> None:
    letters = alphabet("en")
    assert letters is not None
    save_tokens(CharacterTokens(letters[::-1]), tmp_path / "alphabet.json")
    assert run("tokens.file=alphabet.json").results is not None
    save_tokens(CharacterTokens("abcde "), tmp_path / "seen.json")
    with pytest.raises(InputError, match=rf"tokens.file=seen.json: {UNKNOWN} \(the file has no 'made_from'\)"):
        run("tokens.file=seen.json", out="other")


def test_who_writes_a_set_by_hand_may_declare_that_no_texts_made_it(run: Run, tmp_path: Path) -> None:
    save_tokens(CharacterTokens("abcde "), tmp_path / "written.json", made_from=[])
    outcome = run("tokens.file=written.json")
    assert outcome.results is not None
    assert outcome.results["tokens"]["made_from"] == "no texts of any store, as written.json declares"


def test_a_simulation_says_it_and_goes_on(run: Run, stores: Path, tmp_path: Path) -> None:
    said: list[str] = []
    path = made_tokens(stores, "tones:train", tmp_path / "tokens.json")
    assert run(f"tokens.file={path}", "federation.privacy.mode=seeded", say=said.append).results is not None
    assert f"tokens.file={path}: 9 of those whose texts made these tokens are clients" in said


@pytest.mark.parametrize("damage", ["gone", "changed", "without a split", "no list", "odd"])
def test_where_nobody_knows_whose_texts_they_are_a_release_does_not_begin(
    damage: str, run: Run, stores: Path, tmp_path: Path
) -> None:
    path = made_tokens(stores, "others:train", tmp_path / "tokens.json")
    content = json.loads(path.read_text())
    source = content["made_from"][0]
    content["made_from"] = {
        "gone": [source | {"store": "elsewhere"}],
        "changed": [source | {"digest": "0" * 32}],
        "without a split": [source | {"split": "evening"}],
        "no list": source,
        "odd": [7],
    }[damage]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="is damaged: expected store" if damage == "odd" else UNKNOWN):
        run(f"tokens.file={path}")


def test_clients_under_other_names_are_found_by_their_recordings(run: Run, stores: Path, tmp_path: Path) -> None:
    path = made_tokens(stores, "hidden", tmp_path / "tokens.json")
    with pytest.raises(InputError, match=r"tokens.json: utterance 0-0 is a client's too, sample for sample"):
        run(f"tokens.file={path}")


def test_the_tokens_of_a_run_are_made_from_its_texts(run: Run, tmp_path: Path) -> None:
    """As in recipes that take their tokens from another run's model."""
    pieces = ["tokens.kind=sentence_pieces", "tokens.size=9"]
    run(*pieces, recipe=CENTRAL, out="others")
    outcome = run("tokens.file=others/model/tokens.json", out="run")
    assert outcome.results is not None
    assert outcome.results["tokens"]["made_from"] == "texts of store others, train"
    run(*pieces, "data.store=tones", recipe=CENTRAL, out="theirs")
    with pytest.raises(InputError, match=r"theirs/model/tokens\.json: 9 of those whose texts made these tokens"):
        run("tokens.file=theirs/model/tokens.json", out="other")
    (tmp_path / "others/inputs.json").unlink()
    with pytest.raises(InputError, match=UNKNOWN):
        run("tokens.file=others/model/tokens.json", out="other")


def test_tokens_taken_from_a_run_are_made_from_its_texts(run: Run, tmp_path: Path) -> None:
    """By its recipe's name, which is run first, by its folder, and by the folder of its model."""
    pieces = "tokens: {kind: sentence_pieces, size: 9}\n"
    (tmp_path / "others.yaml").write_text(CENTRAL + pieces)
    (tmp_path / "theirs.yaml").write_text(CENTRAL.replace("store: others", "store: tones") + pieces)
    outcome = run("tokens.take_from=others.yaml", out="run")
    assert outcome.results is not None
    assert outcome.results["tokens"]["made_from"] == "texts of store others, train"
    assert load_tokens(outcome.folder / "model/tokens.json") == load_tokens(tmp_path / "runs/others/model/tokens.json")
    for number, refused in enumerate(["theirs.yaml", "runs/theirs", "runs/theirs/model"]):
        with pytest.raises(InputError, match="9 of those whose texts made these tokens are clients; a release needs"):
            run(f"tokens.take_from={refused}", out=f"other{number}")
    (tmp_path / "runs/others/inputs.json").unlink()
    with pytest.raises(InputError, match=UNKNOWN):
        run("tokens.take_from=runs/others", out="unknown")
    shutil.copytree(tmp_path / "runs/others/model", tmp_path / "alone")
    with pytest.raises(InputError, match=rf"tokens of alone: {UNKNOWN} \(its recipe is missing\)"):
        run("tokens.take_from=alone", out="alone-run")


def test_a_seed_model_with_tokens_of_its_own_is_given_no_others(run: Run, tmp_path: Path) -> None:
    (tmp_path / "seed.yaml").write_text(CENTRAL)
    with pytest.raises(InputError, match=r"tokens.take_from=seed.yaml: the seed model has tokens of its own"):
        run("federation.seed_model=seed.yaml", "tokens.take_from=seed.yaml")
    with pytest.raises(InputError, match="tokens: expected one of file and take_from"):
        run("tokens.file=tokens.json", "tokens.take_from=seed.yaml")


def test_the_tokens_of_a_seed_model_may_be_from_a_file_too(run: Run, stores: Path, tmp_path: Path) -> None:
    """A seed that has heard none of the clients, and writes with pieces of their texts."""
    path = made_tokens(stores, "tones:train", tmp_path / "tokens.json")
    (tmp_path / "seed.yaml").write_text(CENTRAL + f"tokens: {{file: {path}}}\n")
    with pytest.raises(InputError, match="9 of those whose texts made these tokens are clients"):
        run("federation.seed_model=seed.yaml")
    path = made_tokens(stores, "others:train", tmp_path / "theirs.json")
    (tmp_path / "another.yaml").write_text(CENTRAL + f"tokens: {{file: {path}}}\n")
    outcome = run("federation.seed_model=another.yaml", out="other")
    assert outcome.results is not None
    assert outcome.results["tokens"]["made_from"] == "texts of store others, train"
