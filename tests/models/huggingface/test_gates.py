"""What is refused, or handled, before anybody trains a pretrained model: each gate with a planted fault."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

from tests.federated.small import CPU, LOCAL  # noqa: E402
from tests.models.huggingface.test_family import noise, part_of, settings_of  # noqa: E402
from tests.models.huggingface.tiny_models import KINDS  # noqa: E402
from tests.tones import pack_tones  # noqa: E402

from sottovoce.base.errors import InputError  # noqa: E402
from sottovoce.data.population import PopulationSettings, build_population  # noqa: E402
from sottovoce.data.store import Store  # noqa: E402
from sottovoce.federated.client import ClientContext, LocalTraining  # noqa: E402
from sottovoce.federated.engines import Engine, SequentialEngine, WorkersEngine  # noqa: E402
from sottovoce.flat.layout import Layout  # noqa: E402
from sottovoce.models.huggingface import family, network  # noqa: E402
from sottovoce.models.huggingface.family import FAMILY  # noqa: E402
from sottovoce.models.huggingface.gates import check_can_be_trained  # noqa: E402
from sottovoce.models.huggingface.layers import MaskedGroupNorm  # noqa: E402
from sottovoce.models.huggingface.settings import Options, Settings  # noqa: E402
from sottovoce.privacy.noise import add_gaussian  # noqa: E402

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "tones"
    pack_tones(store, letters=(2, 3), utterances=2)
    return store


def changed(folder: Path, place: Path, **config: Any) -> Path:
    """A copy of a model's folder with another configuration."""
    shutil.copytree(folder, place)
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return place


def context_of(folder: Path, store: Path, **options: Any) -> tuple[ClientContext, Layout, Tensor]:
    chosen = Options(source=str(folder), **options)
    tokens = family.own_tokens(chosen, "en")
    assert tokens is not None
    settings = chosen.settings(tokens=tokens.size + 1)
    part = part_of(settings)
    part = replace(part, initial={name: own.float() for name, own in part.initial.items()})
    people = build_population(Store(store), PopulationSettings(split=("train",)), seed=1)
    local = LocalTraining(**LOCAL | {"local_steps": 1, "batch_seconds": 4.0})
    context = ClientContext(people, tokens, FAMILY, settings, local, seed=2, cohort_size=3, frozen=part.frozen)
    layout = Layout.of(part.initial)
    return context, layout, layout.flatten(part.initial)


def updates_of(engine: Engine, server_P: Tensor, clients: Iterable[int]) -> dict[int, Tensor]:
    found = {}
    for trained in engine.train(server_P, list(clients), step=1):
        rows = trained.update if trained.update.dim() == 2 else trained.update[None]
        found |= dict(zip(trained.clients, rows.clone(), strict=True))
    return found


# Batch norm.


@pytest.mark.parametrize("train", ["all", "norms", "encoder", "encoder, lora(r=2)"])
def test_statistics_are_frozen_whatever_is_trained(train: str, folders: Folders) -> None:
    settings = settings_of(folders("parakeet_ctc"), train=train)
    part = part_of(settings)
    statistics = {name for name in FAMILY.shapes(settings) if "running_" in name}
    assert len(statistics) == 4
    assert statistics <= part.frozen.tensors.keys()
    assert not statistics & part.initial.keys()


def test_batch_norm_goes_by_its_own_statistics_in_training_too(folders: Folders) -> None:
    """Others in a batch would change an utterance, and clients would send what no clip bounds."""
    settings = settings_of(folders("parakeet_ctc"), dropout=True)
    module = network.build_network(settings, training=True).module
    norms = [layer for layer in module.modules() if isinstance(layer, torch.nn.BatchNorm1d)]
    assert norms
    assert not any(norm.training for norm in norms)
    assert module.training
    part, speech = part_of(settings), noise(settings)
    whole = part.frozen.with_trained(part.initial)
    before = {name: own.clone() for name, own in part.frozen.tensors.items() if "running_" in name}
    FAMILY.loss(whole, speech, settings=settings, draws=1)
    assert all(torch.equal(part.frozen.tensors[name], own) for name, own in before.items())


def test_statistics_cannot_be_named(folders: Folders) -> None:
    with pytest.raises(InputError, match=r"'encoder.layers.0.conv.norm.running_mean' matches no parameter"):
        family.choose_part(settings_of(folders("parakeet_ctc"), train="encoder.layers.0.conv.norm.running_mean"))


# Buffers, and what one utterance leaves for the next.


@pytest.mark.parametrize("train", ["lora(r=2)", "all"])
def test_a_buffer_that_training_changes_is_refused(
    train: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotary = transformers.models.moonshine.modeling_moonshine.MoonshineRotaryEmbedding
    forward = rotary.forward

    def counting(self: Any, *arguments: Any, **options: Any) -> Any:
        self.original_inv_freq += 1.0  # of no use for the result
        return forward(self, *arguments, **options)

    monkeypatch.setattr(rotary, "forward", counting)
    settings = settings_of(folders("moonshine"), train=train)
    with pytest.raises(InputError, match=r"training changes the buffer 'model.*original_inv_freq'"):
        check_can_be_trained(FAMILY, settings, part_of(settings))


def test_what_one_utterance_leaves_for_the_next_is_refused(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, seen = MaskedGroupNorm.forward, [0.0]

    def remembering(self: MaskedGroupNorm, x_BCT: Tensor) -> Tensor:
        seen[0] += 1e-3
        return forward(self, x_BCT) * (1 + seen[0] // 3e-3)

    monkeypatch.setattr(MaskedGroupNorm, "forward", remembering)
    settings = settings_of(folders("moonshine"))
    with pytest.raises(InputError, match=r"(depends on those before it|padding changes)"):
        check_can_be_trained(FAMILY, settings, part_of(settings))


# Dropout and LayerDrop.


def test_layers_that_are_dropped_are_not_taken_for_dead(folders: Folders, tmp_path: Path) -> None:
    settings = settings_of(changed(folders("hubert"), tmp_path / "dropping", layerdrop=0.9), dropout=True)
    check_can_be_trained(FAMILY, settings, part_of(settings))


@pytest.mark.parametrize("kind", ["hubert", "wav2vec2-bert", "parakeet_ctc"])
def test_a_client_drops_the_same_whoever_else_is_sampled(
    kind: str, folders: Folders, tones: Path, tmp_path: Path, one_thread: None
) -> None:
    place = changed(folders(kind), tmp_path / kind)
    if kind == "hubert":
        file = place / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"layerdrop": 0.5}))
    context, layout, server_P = context_of(place, tones, dropout=True)
    engine = SequentialEngine(context, layout, device=CPU)
    all_of, alone = updates_of(engine, server_P, range(3)), updates_of(engine, server_P, [1])
    assert torch.equal(all_of[1], alone[1])
    again = updates_of(SequentialEngine(context, layout, device=CPU), server_P, [2, 1])
    assert torch.equal(again[1], alone[1])
    without = context_of(place, tones, dropout=False)
    assert not torch.equal(updates_of(SequentialEngine(*without[:2], device=CPU), server_P, [1])[1], alone[1])


@pytest.mark.parametrize("options", [{}, {"dropout": True}])
def test_workers_train_as_one_process_does(
    options: dict[str, Any], folders: Folders, tones: Path, one_thread: None
) -> None:
    context, layout, server_P = context_of(folders("hubert"), tones, **options)
    expected = updates_of(SequentialEngine(context, layout, device=CPU), server_P, range(3))
    engine = WorkersEngine(context, layout, workers=2)
    try:
        found = updates_of(engine, server_P, range(3))
    finally:
        engine.close()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[client], own) for client, own in expected.items())


# Weight norm and tied tensors.


@pytest.mark.parametrize("kind", ["wav2vec2", "xls-r", "hubert", "wavlm"])
def test_weight_norm_is_trained_by_its_two_factors(kind: str, folders: Folders) -> None:
    """The matrix itself is no tensor of the model, or it would be clipped and noised beside them."""
    settings = settings_of(folders(kind), train="all")
    names = {
        name.partition("pos_conv_embed.conv.")[2] for name in part_of(settings).initial if "pos_conv_embed" in name
    }
    assert names == {"bias", "parametrizations.weight.original0", "parametrizations.weight.original1"}


@pytest.mark.parametrize("kind", ["whisper", "moonshine"])
def test_a_tied_tensor_is_clipped_and_noised_once(kind: str, folders: Folders) -> None:
    settings = settings_of(folders(kind), train="all")
    initial = {name: own.float() for name, own in part_of(settings).initial.items()}
    tied = [name for name in initial if name.endswith(("embed_tokens.weight", "proj_out.weight"))]
    assert len(tied) == 1
    theirs = getattr(transformers, KINDS[kind][0]).from_pretrained(folders(kind))
    assert theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    # Theirs are counted once too. Whisper's waves in place of positions are constants.
    named = {
        name: own for name, own in theirs.named_parameters() if not name.endswith("encoder.embed_positions.weight")
    }
    trained = sum(own.numel() for own in named.values())
    assert sum(own.numel() for own in initial.values()) == trained
    layout = Layout.of(initial)
    # One draw of noise moves what goes in and what comes out alike.
    noisy_P = layout.flatten(initial)
    add_gaussian(noisy_P, std=0.05, generator=torch.Generator().manual_seed(4), layout=layout)
    moved = layout.views(noisy_P)
    theirs.load_state_dict({name: own.clone() for name, own in moved.items()}, strict=False)
    theirs.tie_weights()
    speech = noise(settings).take(torch.tensor([0]))
    speech = replace(speech, features_UTF=speech.features_UTF.float())
    ours = FAMILY.loss(
        {**FAMILY.init(settings, generator=torch.Generator()), **moved}, speech, settings=settings, draws=None
    )
    inputs, _, _ = family.network_inputs(speech.features_UTF, speech.frames_U, settings)
    with torch.no_grad():
        expected = theirs.eval()(**inputs, labels=speech.tokens_UL - 1).loss
    assert float(ours.detach()) == pytest.approx(float(expected), rel=1e-5)


# Every tensor moves, in an engine's own step.


@pytest.mark.parametrize("train", ["lora(r=2)", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_trained_tensor_moves_in_a_clients_step(kind: str, train: str, folders: Folders, tones: Path) -> None:
    """All but the bias of keys, which adds the same to all scores of a softmax: its gradient is rounding alone."""
    context, layout, server_P = context_of(folders(kind), tones, train=train)
    context = replace(context, local=replace(context.local, lr=1e4))  # small gradients are seen in float32
    updates = updates_of(SequentialEngine(context, layout, device=CPU), server_P, [0])
    still = [name for name, own in layout.views(updates[0]).items() if not own.any()]
    assert all(name.endswith(("k_proj.bias", "linear_k.bias")) for name in still), still


# Names in `train`.


@pytest.mark.parametrize("targets", ["embed_tokens", "nothing", "conv1"])
def test_corrections_of_what_is_no_linear_layer_are_refused(targets: str, folders: Folders) -> None:
    settings = settings_of(folders("moonshine"), train=f"lora(r=2, targets={targets})")
    with pytest.raises(InputError, match=r"expected targets among its linear layers \(fc1, fc2, k_proj, .*v_proj\)"):
        family.choose_part(settings)


def test_a_named_part_that_cannot_be_stacked_is_refused(folders: Folders) -> None:
    settings = settings_of(folders("xls-r"), train="lora(r=2), wav2vec2.encoder.pos_conv_embed")
    assert family.stack_obstacle(settings) == "because of wav2vec2.encoder.pos_conv_embed.conv (ParametrizedConv1d)"


# A new head.


@pytest.mark.parametrize("train", ["lora(r=2)", "norms"])
@pytest.mark.parametrize("kind", ["wav2vec2", "parakeet_ctc", "whisper", "moonshine"])
def test_a_new_head_is_drawn_and_trained_with_whatever_else_is(kind: str, train: str, folders: Folders) -> None:
    settings: Settings = Options(source=str(folders(kind)), train=train, head="ctc").settings(tokens=9)
    first, other = (FAMILY.init(settings, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    head = {name for name in first if name.split(".")[0] in ("lm_head", "ctc_head", "output")}
    assert {name for name in first if not torch.equal(first[name], other[name])} == {
        name for name in head if name.endswith("weight")
    }
    assert len(first[next(name for name in head if name.endswith("weight"))]) == 9
    part = part_of(settings)
    assert head <= part.initial.keys()
    check_can_be_trained(FAMILY, settings, part)


def test_a_new_head_is_new_even_where_one_of_its_size_is_in_the_files(folders: Folders) -> None:
    plain = settings_of(folders("hubert"))
    settings = Options(source=str(folders("hubert")), head="ctc").settings(tokens=plain.tokens)
    old, new = (FAMILY.init(one, generator=torch.Generator().manual_seed(1)) for one in (plain, settings))
    assert old["lm_head.weight"].shape == new["lm_head.weight"].shape
    assert not torch.equal(old["lm_head.weight"], new["lm_head.weight"])


@pytest.mark.parametrize(
    ("kind", "name"), [("wav2vec2", "Wav2Vec2Model"), ("hubert", "HubertModel"), ("wav2vec2", "Wav2Vec2ForPreTraining")]
)
def test_an_encoder_as_it_comes_from_pretraining_gets_a_head(
    kind: str, name: str, folders: Folders, tmp_path: Path
) -> None:
    _, config, _ = KINDS[kind]
    made = getattr(transformers, name)
    module = made(made.config_class(**config))
    shutil.copytree(folders(kind), tmp_path / "encoder")
    module.save_pretrained(tmp_path / "encoder")
    (tmp_path / "encoder/vocab.json").unlink()  # as XLS-R's, which writes nothing
    with pytest.raises(InputError, match="an encoder without an output layer; expected head: ctc"):
        settings_of(tmp_path / "encoder")
    settings = Options(source=str(tmp_path / "encoder"), head="ctc").settings(tokens=9)
    found = FAMILY.init(settings, generator=torch.Generator())
    inside = module.state_dict()
    prefix = f"{kind}."
    shared = {
        key.removeprefix(prefix): own for key, own in inside.items() if f"{prefix}{key.removeprefix(prefix)}" in found
    }
    assert len(shared) > 30
    assert all(torch.equal(found[f"{prefix}{key}"], own) for key, own in shared.items())
    check_can_be_trained(FAMILY, settings, part_of(settings))
