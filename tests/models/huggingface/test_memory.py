"""What training keeps in memory: the count that stacks are sized by, and layers that are computed again."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

from tests.models.huggingface import tiny_models  # noqa: E402
from tests.models.huggingface.test_family import assert_close, gradients_of, noise, part_of, settings_of  # noqa: E402

from sottovoce.models.huggingface import family  # noqa: E402
from sottovoce.models.huggingface.graphs import network_scores  # noqa: E402
from sottovoce.models.huggingface.inputs import network_inputs  # noqa: E402
from sottovoce.models.huggingface.memory import MOST_OF_FREE, SPARE, activation_bytes, fitting_share, stack_bytes  # noqa: E402
from sottovoce.models.huggingface.settings import Settings  # noqa: E402

KINDS = list(tiny_models.KINDS)
WIDER = {"hidden_size": 64, "output_hidden_size": 64, "d_model": 64}
LAYERS = ("num_hidden_layers", "encoder_layers", "encoder_num_hidden_layers")
FOUR_TIMES = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim")


def write_wider_model(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a shape like real ones': hidden layers four times as wide, and four layers."""

    def wider(config: dict[str, Any]) -> dict[str, Any]:
        changed = {name: own for name, own in WIDER.items() if name in config}
        changed |= {name: 256 for name in FOUR_TIMES if name in config} | {name: 4 for name in LAYERS if name in config}
        if kind == "wav2vec2-bert":
            changed |= {"output_hidden_size": 64}
        if "encoder_config" in config:
            changed |= {"encoder_config": wider(config["encoder_config"])}
        return config | changed

    name, config, processor = tiny_models.KINDS[kind]
    monkeypatch.setattr(tiny_models, "KINDS", {**tiny_models.KINDS, kind: (name, wider(config), processor)})
    return tiny_models.write_tiny_model(kind, folder)


def count_kept(settings: Settings, *, recompute: float = 0.0) -> int:
    """Numbers that a pass keeps besides parameters, by what autograd is given to keep."""
    part, features = part_of(settings), noise(settings, utterances=3)
    leaves = {name: own.requires_grad_() for name, own in part.initial.items()}
    whole = part.frozen.with_trained(leaves)
    own = {tensor.untyped_storage().data_ptr() for tensor in whole.values()}
    seen: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address is used again
        return tensor

    inputs, norm_frames_U, _ = network_inputs(features.features_UTF, features.frames_U, settings)
    if not settings.is_ctc:
        inputs["decoder_input_ids"] = features.tokens_UL
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = network_scores(whole, settings, inputs, norm_frames_B=norm_frames_U, recompute=recompute)
    assert scores.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values()) // 8


@pytest.mark.parametrize("train", ["lora(r=8)", "all"])
@pytest.mark.parametrize("kind", ["wav2vec2-bert", "parakeet_ctc", "moonshine", "whisper", "xls-r"])
def test_what_a_pass_keeps_is_foreseen(kind: str, train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never too little by more than what is spare, and at most twice too much."""
    settings = settings_of(write_wider_model(kind, tmp_path, monkeypatch), train=train)
    frames = noise(settings).features_UTF.shape[1]
    foreseen = activation_bytes(settings, 3, frames, number_bytes=1)
    counted = count_kept(settings)
    assert counted <= foreseen * SPARE
    assert foreseen <= 2 * counted


@pytest.mark.parametrize("kind", ["wav2vec2-bert", "moonshine"])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_what_a_pass_keeps_is_foreseen_where_some_layers_are_computed_again(
    share: float, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(write_wider_model(kind, tmp_path, monkeypatch))
    frames = noise(settings).features_UTF.shape[1]
    counted = count_kept(settings, recompute=share)
    assert count_kept(settings, recompute=share + 0.25) < counted < count_kept(settings, recompute=share - 0.25)
    foreseen = activation_bytes(settings, 3, frames, recompute=share, number_bytes=1)
    assert counted <= foreseen * SPARE
    assert foreseen <= 2.5 * counted  # what passes counts for more where less is kept


@pytest.mark.parametrize("kind", ["wav2vec2-bert", "moonshine"])
def test_layers_that_are_computed_again_keep_their_inputs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(write_wider_model(kind, tmp_path, monkeypatch))
    frames = noise(settings).features_UTF.shape[1]
    again, plainly = (count_kept(settings, recompute=own) for own in (True, False))
    assert again < plainly / 4
    # One layer at a time is there besides, on the way back.
    assert again <= activation_bytes(settings, 3, frames, recompute=True, number_bytes=1) < plainly


@pytest.mark.parametrize("train", ["lora(r=2, alpha=6)", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_computed_again_it_is_the_same(kind: str, train: str, tmp_path: Path) -> None:
    settings = settings_of(tiny_models.write_tiny_model(kind, tmp_path), train=train)
    part, features = part_of(settings), noise(settings, utterances=4)
    leaves = {name: own.requires_grad_() for name, own in part.initial.items()}
    scores = partial(network_scores, recompute=True)
    found = [
        gradients_of(
            family.loss(part.frozen.with_trained(leaves), features, settings=settings, draws=0, **how),
            leaves,
        )
        for how in ({}, {"scores": scores})
    ]
    assert_close(found[1], found[0])
    if family.stack_obstacle(settings) is not None:
        return
    stacked = {name: torch.stack([own.detach(), own.detach() * 0.9]).requires_grad_() for name, own in leaves.items()}
    found = [
        gradients_of(
            family.stacked_losses(
                part.frozen.with_trained(stacked),
                features,
                rows_U=[0, 0, 1, 1],
                clients=2,
                settings=settings,
                draws=None,
                **how,
            ).sum(),
            stacked,
        )
        for how in ({}, {"scores": scores})
    ]
    assert_close(found[1], found[0])


def test_dropout_is_drawn_again_as_it_was(tmp_path: Path) -> None:
    settings = replace(settings_of(tiny_models.write_tiny_model("moonshine", tmp_path)), dropout=True)
    settings = replace(settings, config=settings.config.replace('"attention_dropout":0.0', '"attention_dropout":0.4'))
    part, features = part_of(settings), noise(settings)
    leaves = {name: own.requires_grad_() for name, own in part.initial.items()}
    whole = part.frozen.with_trained(leaves)
    found = [
        gradients_of(family.loss(whole, features, settings=settings, draws=draws, **how), leaves)
        for draws, how in ((1, {}), (1, {"scores": partial(network_scores, recompute=True)}), (2, {}))
    ]
    assert_close(found[1], found[0])
    with pytest.raises(AssertionError):
        assert_close(found[2], found[0])


def encoder_settings(layers: int) -> Settings:
    config = transformers.Wav2Vec2BertConfig(vocab_size=32, num_hidden_layers=layers)
    return Settings(
        tokens=32,
        source="",
        digests=(),
        config=config.to_json_string(use_diff=False),
        processor='{"feature_extractor_type": "SeamlessM4TFeatureExtractor", "stride": 2}',
        generation="{}",
        train="lora(r=8)",
    )


def test_sixteen_clients_of_a_600m_encoder_fit_into_80_gb() -> None:
    """Ten utterances of four seconds a client, as in `benchmarks/pretrained.py`; 64 of them with layers recomputed."""
    settings = encoder_settings(24)
    weights = 600e6 * 2
    assert 30e9 < activation_bytes(settings, 160, 200) + weights < 80e9
    assert activation_bytes(settings, 640, 200) > 80e9
    assert activation_bytes(settings, 640, 200, recompute=True) + weights < 40e9
    # Of unknown utterances it is taken that they are long.
    assert activation_bytes(settings, 10, 200) < stack_bytes(settings, seconds=40.0, steps=2) < 6e9


@pytest.mark.parametrize(("gib", "layers", "share"), [(80, 12, 0.0), (40, 12, 0.75), (139, 24, 0.25), (80, 24, 0.75)])
def test_64_clients_compute_no_more_layers_again_than_the_memory_asks_for(gib: int, layers: int, share: float) -> None:
    """By the same count. 12 layers are the 300M encoder, of which 64 fit into 80 GiB as they are."""
    settings, most_bytes = encoder_settings(layers), MOST_OF_FREE * gib * 2**30
    assert fitting_share(settings, 640, 200, most_bytes=most_bytes) == share
    assert activation_bytes(settings, 640, 200, recompute=share) <= most_bytes
    assert share == 0.0 or activation_bytes(settings, 640, 200, recompute=share - 0.25) > most_bytes
    assert fitting_share(settings, 640, 200, most_bytes=0) == 1.0  # the least that there is
