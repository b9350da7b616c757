"""What a server pass does not say itself is as in local training: masks, clipping, batches, their order, CTC."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.passes import CPU, LOCAL, PUBLIC_UTTERANCES, beginning, built

from sottovoce.base.errors import InputError
from sottovoce.config import ServerPassSettings, as_yaml, load_recipe
from sottovoce.data.store import Store
from sottovoce.federated.client import LocalTraining
from sottovoce.flat.layout import Layout
from sottovoce.models.crdnn.family import adjust_draws
from sottovoce.models.family import TrainingProgress
from sottovoce.training import server_pass
from sottovoce.training.run_data import find_split_people
from sottovoce.training.start_model import split_trained_part

LITTLE = "federation.server_pass={data: 'public:train', lr: 0.1, epochs: 1}"
SHARED = ("batch_seconds", "batch_utterances", "order", "optimiser", "clip_gradients")


def read_pass(recipe: Path, *changes: str) -> tuple[ServerPassSettings, LocalTraining]:
    federated = load_recipe(str(recipe), [*LOCAL, *changes]).federated
    assert federated.server_pass is not None
    return federated.server_pass, federated.local


def differing(own: ServerPassSettings, local: LocalTraining) -> set[str]:
    """The settings in which a pass is not as local training."""
    masks = {"spec_augment"} if own.augment.spec_augment != local.spec_augment else set()
    return masks | {name for name in SHARED if getattr(own, name) != getattr(local, name)}


def test_a_pass_is_as_local_training_where_nothing_else_is_said(federated_recipe: Path) -> None:
    own, local = read_pass(federated_recipe, LITTLE)
    assert differing(own, local) == set()
    assert (own.lr, own.augment.speeds, own.augment.noise) == (0.1, (), None)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("augment={spec_augment: {frequency_masks: 2, frequency_width: 30, time_masks: 10}}", "spec_augment"),
        ("augment.spec_augment=null", "spec_augment"),
        ("clip_gradients=1", "clip_gradients"),
        ("batch_utterances=null", "batch_utterances"),
        ("order=null", "order"),
        ("optimiser={name: sgd}", "optimiser"),
        ("batch_seconds=2", "batch_seconds"),
    ],
)
def test_what_is_given_wins_and_is_read_back_the_same(given: str, name: str, federated_recipe: Path) -> None:
    changes = [LITTLE, f"federation.server_pass.{given}"]
    own, local = read_pass(federated_recipe, *changes)
    assert differing(own, local) == {name}
    written = federated_recipe.with_name("written.yaml")
    written.write_text(as_yaml(load_recipe(str(federated_recipe), [*LOCAL, *changes])))
    again = load_recipe(str(written)).federated.server_pass
    assert again == own


def test_a_pass_changes_samples_and_bands_as_local_training_does(federated_recipe: Path) -> None:
    own, local = read_pass(
        federated_recipe,
        LITTLE,
        "federation.local.speeds=[0.95, 1.05]",
        "federation.local.dropped_frequencies={most: 2}",
        "federation.local.dropped_chunks={most: 4}",
        "federation.local.narrow_band={share: 0.5}",
    )
    names = ("speeds", "dropped_frequencies", "dropped_chunks", "narrow_band")
    assert all(getattr(local, name) for name in names)
    assert {name: getattr(own.augment, name) for name in names} == {name: getattr(local, name) for name in names}


def test_other_augmentation_brings_no_other_masks(federated_recipe: Path) -> None:
    own, local = read_pass(federated_recipe, LITTLE, "federation.server_pass.augment={speeds: [0.9, 1.1]}")
    assert (own.augment.speeds, own.augment.spec_augment) == ((0.9, 1.1), local.spec_augment)


def test_a_pass_of_some_steps_is_shuffled(federated_recipe: Path) -> None:
    """From the shortest utterance on, the longest would never have their turn."""
    some = "federation.server_pass={data: 'public:train', lr: 0.1, steps: 2}"
    own, local = read_pass(federated_recipe, some)
    assert differing(own, local) == {"order"}
    with pytest.raises(InputError, match="order=ascending with steps=2: the longest utterances"):
        read_pass(federated_recipe, some, "federation.server_pass.order=ascending")


def test_a_pass_trains_with_the_masks_the_clip_and_the_order_of_local_training(
    federated_recipe: Path, public_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each of its steps is made with; wrong masks, planted, are seen."""
    seen: list[dict[str, Any]] = []
    train_step = server_pass.train_step

    def watched(weights: Any, pieces: Any, common: Any, **options: Any) -> Any:
        ((piece, _),) = pieces
        seen.append({"common": common, "lengths": len(piece.batch.rows), "seconds": piece.batch.padded_seconds})
        seen[-1] |= {"progress": options["progress"], "lr": options["lr"]}
        return train_step(weights, pieces, common, **options)

    monkeypatch.setattr(server_pass, "train_step", watched)
    ends = {}
    for name, wrong in (("as local", []), ("wrong", ["federation.server_pass.augment.spec_augment.time_masks=10"])):
        seen.clear()
        recipe = load_recipe(str(federated_recipe), [*LOCAL, LITTLE, *wrong])
        start_P, passes = built(recipe, public_stores)
        passes(start_P, 0)
        ends[name] = start_P
        local = recipe.federated.local
        (masks,) = {step["common"].augment.spec_augment for step in seen}
        assert (masks == local.spec_augment) is (not wrong)
        assert {(step["common"].max_norm, step["lr"]) for step in seen} == {(local.clip_gradients, 0.1)}
        assert [step["progress"] for step in seen] == [TrainingProgress(n, 0) for n in range(len(seen))]
        assert sum(step["lengths"] for step in seen) == PUBLIC_UTTERANCES
        assert max(step["lengths"] for step in seen) <= 4
        lengths = [step["seconds"] / step["lengths"] for step in seen]
        assert lengths == sorted(lengths)
    assert not torch.equal(ends["as local"], ends["wrong"])


@pytest.mark.parametrize(("ctc_epochs", "expected"), [(4, [True, True]), (1, [True, False]), (0, [False, False])])
def test_ctc_takes_part_in_the_epochs_in_which_it_does_on_clients(
    ctc_epochs: int,
    expected: list[bool],
    federated_recipe: Path,
    public_stores: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The released code's one epoch has it, as the first four of its clients do."""
    two = "federation.server_pass={data: 'public:train', lr: 0.1, epochs: 2, batch_seconds: 60, batch_utterances: 60}"
    family = ["model.family=crdnn", "model.size=tiny", f"model.ctc_epochs={ctc_epochs}"]
    recipe = load_recipe(str(federated_recipe), [*family, *LOCAL, two])
    found = []

    def watched(settings: Any, draws: Any, progress: Any) -> Any:
        found.append(adjust_draws(settings, draws, progress).with_ctc)
        return adjust_draws(settings, draws, progress)

    start, population = beginning(recipe, public_stores)
    watching = replace(start.family, training=replace(start.family.training, adjust_draws=watched))
    start = replace(start, family=watching)
    people = find_split_people(Store(public_stores / "public"), "train")
    speech = server_pass.load_public_speech(recipe, start, population, people)
    initial = split_trained_part(recipe, start).initial
    server_pass.build_server_pass(recipe, start, speech, device=CPU)(Layout.of(initial).flatten(initial), 0)
    assert found == expected
