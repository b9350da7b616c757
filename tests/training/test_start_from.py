"""Stages: a run takes the encoder of another, of another family, which is trained before it; each resumes alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.points import SAVED
from tests.tones import pack_tones
from tests.training import forked

from sottovoce.base.errors import InputError
from sottovoce.config import load_recipe
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, load_recogniser
from sottovoce.privacy.ledger import verify
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext

PRE_TRAINED = """
about: pre-trained without text
data: {{store: {store}, train: [train]}}
model: {{family: "tests.training.encoders:MUTE", {model}}}
federation:
  steps: 4
  cohort_size: 3
  {seed}
  local: {{batch_seconds: 2, lr: 1.0, batch_utterances: 1, clip_gradients: .inf, time_line: {{dry: skip}}}}
  server: {{optimiser: {{name: adam}}, schedule: {{name: constant, lr: 0.01}}}}
  privacy: {{weighting: utterances}}
  engine: shared
  evaluate_every: 2
  checkpoint_every: 1
"""
CENTRAL = """
about: fine-tuned centrally
data: {{store: {store}}}
model: {{family: "tests.training.encoders:WRITER", {model}}}
central:
  start_from: {seed}
  steps: 4
  batch_seconds: 4
  optimiser: {{name: adam}}
  schedule: {{name: constant, lr: 0.001}}
  evaluate_every: 2
  checkpoint_every: 1
"""
FEDERATED = """
about: fine-tuned by clients
data: {{store: {store}}}
model: {{family: "tests.training.encoders:WRITER", {model}}}
federation:
  seed_model: {seed}
  steps: 1
  cohort_size: 2
  local: {{batch_seconds: 2, lr: 0.0001, local_steps: 1}}
  server: {{optimiser: {{name: sgd}}, schedule: {{name: constant, lr: 0.0001}}}}
"""


@pytest.fixture(autouse=True)
def named() -> None:
    """As `--family` does: the folder of a model alone has nothing imported."""
    for name in ("MUTE", "WRITER"):
        find_family(f"tests.training.encoders:{name}")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    pack_tones(folder / "english", letters=(2, 3), utterances=2)
    pack_tones(folder / "french", people=range(20, 35), language="fr", letters=(2, 3), utterances=2)
    return folder


def written(path: Path, text: str, **filled: str) -> str:
    path.write_text(text.format(**{"model": "width: 8", "store": "english", "seed": "", **filled}))
    return str(path)


def pre_trained(folder: Path, *, name: str = "pre", **filled: str) -> str:
    return written(folder / f"{name}.yaml", PRE_TRAINED, **filled)


def run(recipe: str, stores: Path, folder: Path, said: list[str] | None = None) -> Outcome:
    around = RunContext(
        runs=folder / "runs", stores=stores, device=torch.device("cpu"), say=([] if said is None else said).append
    )
    return run_recipe(load_recipe(recipe), out=folder / "out", resume=False, context=around)


def start_of(folder: Path) -> Recogniser:
    """The model of a run after its first step, whose learning rate hardly moves it."""
    return load_recogniser(folder / "checkpoints/step-000001")


@pytest.mark.usefixtures("one_thread")
def test_a_chain_of_stages_killed_in_each_ends_with_the_same_bits(stores: Path, tmp_path: Path) -> None:
    seed = pre_trained(tmp_path)
    recipe = written(tmp_path / "fine.yaml", CENTRAL, seed=seed)
    ends = []
    for name in ("whole", "broken"):
        folder = tmp_path / name
        arguments = ["run", recipe, "--stores", stores, "--runs", folder / "runs", "--out", folder / "out"]
        if name == "broken":  # twice while the encoder is trained, twice after it
            for nth in (2, 1, 3, 1):
                assert forked.run([*arguments, "--resume"], kill_at=replace(SAVED, nth=nth)).code == -9
        ended = forked.run([*arguments, "--resume"])
        assert ended.code == 0, ended.err
        (of_seed,) = (folder / "runs").iterdir()
        assert verify(of_seed / "ledger.jsonl").attempts == 4
        files = (of_seed / "checkpoints/latest", folder / "out/checkpoints/latest")
        ends.append([(place / file).read_bytes() for place in files for file in STATE])
        pre, first = (
            load_recogniser(of_seed, family="tests.training.encoders:MUTE"),
            load_recogniser(folder / "out/model", family="tests.training.encoders:WRITER"),
        )
        assert (pre.family.recognition, first.family.recognition is not None) == (None, True)
    assert ends[0] == ends[1]


STATE = ("model.safetensors", "optimiser.safetensors")


def test_central_training_takes_the_encoder_and_nothing_else(stores: Path, tmp_path: Path) -> None:
    said: list[str] = []
    recipe = written(tmp_path / "fine.yaml", CENTRAL, seed=pre_trained(tmp_path), store="french")
    out = run(recipe, stores, tmp_path, said).folder
    (of_seed,) = (tmp_path / "runs").iterdir()
    seed = load_recogniser(of_seed)
    begun = load_recogniser(out / "checkpoints/latest")
    assert begun.language == "fr"
    assert begun.tokens.digest != seed.tokens.digest
    assert begun.parameters.keys() == {"encoder.0.weight", "encoder.0.bias", "output.weight", "output.bias"}
    for name in ("encoder.0.weight", "encoder.0.bias"):
        # Four steps of Adam move a number by no more than four times the rate, and a little for its corrections.
        assert (begun.parameters[name] - seed.parameters[name]).abs().max() < 5e-3
    taken, unused = 80 * 8 + 8, sum(p.numel() for n, p in seed.parameters.items() if n.startswith("guess."))
    assert any(line.startswith(f"{taken:,} of ") and f"other {unused:,} are left behind" in line for line in said)


def test_clients_fine_tune_an_encoder_too_in_another_language(stores: Path, tmp_path: Path) -> None:
    seed = pre_trained(tmp_path)
    recipe = written(tmp_path / "fine.yaml", FEDERATED, seed=seed, store="french")
    said: list[str] = []
    out = run(recipe, stores, tmp_path, said).folder
    (of_seed,) = (tmp_path / "runs").iterdir()
    torch.testing.assert_close(
        load_recogniser(out / "checkpoints/latest").parameters["encoder.0.weight"],
        load_recogniser(of_seed).parameters["encoder.0.weight"],
        rtol=0,
        atol=1e-6,  # one step of 1e-4 times 1e-4, with gradients clipped to 1
    )
    assert load_recogniser(out).language == "fr"
    assert any("are left behind" in line for line in said)


def test_pre_training_goes_on_in_another_language(stores: Path, tmp_path: Path) -> None:
    """A model that writes no text has no language to keep to."""
    first = pre_trained(tmp_path)
    going_on = pre_trained(tmp_path, name="on", seed=f"seed_model: {first}", store="french")
    out = run(going_on, stores, tmp_path).folder
    assert load_recogniser(out).language == "fr"
    fine = written(tmp_path / "fine.yaml", CENTRAL, seed=str(out), store="french")
    assert run(fine, stores, tmp_path / "fine").results is not None


@pytest.mark.parametrize(
    ("seed", "fine", "words"),
    [
        (
            "width: 6",
            "width: 8",
            r"does not fit `model`: parameter 'encoder\.0\.weight' has shape \[6, 80\], expected \[8",
        ),
        ("width: 8", "width: 8, layers: 2", r"has no 'encoder\.1\.bias': a pre-trained encoder of another shape"),
    ],
)
def test_a_pre_trained_encoder_of_another_shape_is_one_line(
    seed: str, fine: str, words: str, stores: Path, tmp_path: Path
) -> None:
    recipe = written(tmp_path / "fine.yaml", CENTRAL, seed=pre_trained(tmp_path, model=seed), model=fine)
    with pytest.raises(InputError, match=words):
        run(recipe, stores, tmp_path)


def test_a_family_that_inherits_nothing_says_so(stores: Path, tmp_path: Path) -> None:
    recipe = written(tmp_path / "fine.yaml", CENTRAL, seed=pre_trained(tmp_path))
    text = Path(recipe).read_text().replace('family: "tests.training.encoders:WRITER", width: 8', "size: tiny")
    Path(recipe).write_text(text)
    with pytest.raises(InputError, match=r"is of family=tests\.training\.encoders:MUTE, expected ctc_transformer"):
        run(recipe, stores, tmp_path)


def test_a_smoke_run_makes_a_step_of_every_stage(stores: Path, tmp_path: Path) -> None:
    recipe = written(tmp_path / "fine.yaml", CENTRAL, seed=pre_trained(tmp_path))
    ended = forked.run(["run", recipe, "--smoke", "--stores", tmp_path / "made", "--out", tmp_path / "smoke"])
    assert ended.code == 0, ended.err
    assert "are left behind; the rest is new" in ended.err  # a step of the last one, on the encoder of the first
