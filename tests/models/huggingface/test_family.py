"""Pretrained models of every class, tiny and random, against transformers' own code and one client at a time."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

from tests.federated.small import CPU, LOCAL  # noqa: E402
from tests.models.huggingface.tiny_models import KINDS, WHISPER_SECONDS, write_tiny_model  # noqa: E402
from tests.tones import pack_tones  # noqa: E402

from sottovoce.base.errors import InputError  # noqa: E402
from sottovoce.data.audio.waveforms import Features  # noqa: E402
from sottovoce.data.population import PopulationSettings, build_population  # noqa: E402
from sottovoce.data.store import Store  # noqa: E402
from sottovoce.federated.client import ClientContext, LocalTraining  # noqa: E402
from sottovoce.federated.engines import SequentialEngine, StackedEngine  # noqa: E402
from sottovoce.models.attention_search import GREEDY  # noqa: E402
from sottovoce.models.family import stacking_obstacle  # noqa: E402
from sottovoce.models.huggingface import adapters, family, network  # noqa: E402
from sottovoce.models.huggingface.family import FAMILY  # noqa: E402
from sottovoce.models.huggingface.gates import check_can_be_trained  # noqa: E402
from sottovoce.models.huggingface.inputs import RAW, network_inputs  # noqa: E402
from sottovoce.models.huggingface.layers import MaskedGroupNorm  # noqa: E402
from sottovoce.models.huggingface.settings import Options, Settings  # noqa: E402
from sottovoce.models.trainable import Trainable, split_parameters  # noqa: E402

CAN_BE_STACKED = [kind for kind in KINDS if kind != "wavlm"]
# Compared in float64, but for tables of positions, which theirs keep in float32: both have the same.
CLOSE = 1e-9
# Their losses are float32's.
CLOSE_TO_THEIRS = 1e-5


@pytest.fixture(scope="session")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "tones"
    pack_tones(store)
    return store


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def settings_of(folder: Path, **options: Any) -> Settings:
    return Options(source=str(folder), **options).settings(tokens=2)


def part_of(settings: Settings) -> Trainable:
    """What is trained, with corrections that have begun to learn."""
    generator = torch.Generator().manual_seed(1)
    part = split_parameters(
        family.choose_part(settings),
        {name: p.double() for name, p in FAMILY.init(settings, generator=generator).items()},
        is_lora_target=family.is_lora_target,
        generator=generator,
    )
    moved = {
        name: torch.randn(tensor.shape, generator=generator) * 0.1 if name.endswith(".lora_b") else tensor
        for name, tensor in part.initial.items()
    }
    frozen = replace(part.frozen, tensors={name: own.double() for name, own in part.frozen.tensors.items()})
    return replace(part, initial={name: own.double() for name, own in moved.items()}, frozen=frozen)


def noise(settings: Settings, *, utterances: int = 2) -> Features:
    """Features of several lengths, with noise behind their ends."""
    generator = torch.Generator().manual_seed(2)
    raw, whisper = settings.kind in RAW, settings.kind == "whisper"
    frames = 12_000 if raw else 100 * WHISPER_SECONDS if whisper else 80
    width = 1 if raw else 160 if settings.kind == "wav2vec2-bert" else 80
    features = torch.randn(utterances, frames, width, generator=generator, dtype=torch.float64)
    frames_U = torch.tensor([frames if whisper else frames - frames * place // 8 for place in range(utterances)])
    if not raw:
        features = features.where((torch.arange(frames) < frames_U[:, None])[..., None], 0)
    lengths_U = torch.tensor([5 - place % 3 for place in range(utterances)])
    tokens_UL = torch.randint(6, 30, (utterances, 5), generator=generator)
    end = 2 + 1  # theirs, plus one
    if not settings.is_ctc:
        tokens_UL[torch.arange(utterances), lengths_U - 1] = end
    inside_UL = torch.arange(5) < lengths_U[:, None]
    return Features(features, frames_U, tokens_UL.where(inside_UL, 0), lengths_U)


def gradients_of(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaves[name]) if own is None else own for name, own in zip(leaves, found, strict=True)
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], *, within: float = CLOSE) -> None:
    """Relative to the largest of all, since some gradients are nothing but rounding."""
    largest = max(float(own.abs().max()) for own in expected.values())
    for name, own in expected.items():
        assert float((found[name] - own).abs().max()) <= within * largest, name


def test_loss_and_gradients_are_those_of_transformers(kind: str, folders: Callable[[str], Path]) -> None:
    settings = settings_of(folders(kind), train="all")
    one = noise(settings).take(torch.tensor([1]))
    theirs = getattr(transformers, KINDS[kind][0]).from_pretrained(folders(kind)).double().eval()
    inputs, _, _ = network_inputs(one.features_UTF, one.frames_U, settings)
    blank_first = settings.is_ctc and settings.kind != "parakeet_ctc"
    labels_UL = one.tokens_UL if blank_first else one.tokens_UL - 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Support for mismatched")  # of torch, about WavLM
        if settings.is_ctc:
            # As they have it, but in float64: in float32 their own gradients are off by some 3e-5.
            scores_TUV = theirs(**inputs).logits.log_softmax(dim=-1).transpose(0, 1)
            lengths_U, blank = torch.tensor([len(scores_TUV)]), theirs.config.pad_token_id
            expected = torch.nn.functional.ctc_loss(
                scores_TUV, labels_UL, lengths_U, one.token_lengths_U, blank=blank, reduction="sum"
            )
        else:
            expected = theirs(**inputs, labels=labels_UL).loss
    start = FAMILY.init(settings, generator=torch.Generator())
    trained = {name: start[name].double().requires_grad_() for name in network.build_network(settings).trainable}
    whole = {name: p.double() for name, p in start.items()} | trained
    found = FAMILY.loss(whole, one, settings=settings, draws=None)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=CLOSE_TO_THEIRS)
    named = {name: p for name, p in theirs.named_parameters() if name in trained}
    assert named.keys() == trained.keys()
    assert_close(gradients_of(found, trained), gradients_of(expected, named), within=CLOSE_TO_THEIRS)


def test_a_clients_loss_does_not_depend_on_who_shares_its_batch(kind: str, folders: Callable[[str], Path]) -> None:
    settings = settings_of(folders(kind))
    part, both = part_of(settings), noise(settings)
    parameters = part.frozen.with_trained(part.initial)
    behind = torch.arange(both.features_UTF.shape[1])[:, None] >= both.frames_U[1]
    other = replace(both, features_UTF=both.features_UTF.clone())
    other.features_UTF[1] = other.features_UTF[1].where(~behind, 0)
    alone = both.take(torch.tensor([1]))
    padded = Features(other.features_UTF[1:], both.frames_U[1:], both.tokens_UL[1:], both.token_lengths_U[1:])
    losses = [float(FAMILY.loss(parameters, one, settings=settings, draws=None)) for one in (alone, padded)]
    assert losses[0] == pytest.approx(losses[1], rel=CLOSE)


@pytest.mark.parametrize(
    "train",
    [
        "lora(r=2)",
        "lora(r=2, factors=b)",
        "lora(r=2, factors=alternate)",
        "lora(r=2, factors=project)",
        "norms",
        "head",
        "all",
    ],
)
def test_the_gates_let_sound_models_through(kind: str, train: str, folders: Callable[[str], Path]) -> None:
    settings = settings_of(folders(kind), train=train)
    check_can_be_trained(FAMILY, settings, part_of(settings))


def test_padding_that_is_looked_at_is_refused(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskedGroupNorm, "forward", torch.nn.GroupNorm.forward)
    settings = settings_of(folders("moonshine"))
    with pytest.raises(InputError, match=r"padding changes what moonshine makes of an utterance \(loss"):
        check_can_be_trained(FAMILY, settings, part_of(settings))


def test_adapters_that_no_gradient_reaches_are_refused(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As WavLM's are in peft: its attention reads matrices past their layers."""
    monkeypatch.setattr(network, "MERGED", ())
    settings = settings_of(folders("wavlm"))
    with pytest.raises(InputError, match=r"8 of 8 trained tensors do not move, '.*_proj.lora_a' the first"):
        check_can_be_trained(FAMILY, settings, part_of(settings))


@pytest.mark.parametrize("train", ["lora(r=2)", "lora(r=2, factors=b)", "norms", "head", "all"])
@pytest.mark.parametrize("kind", CAN_BE_STACKED)
def test_a_stack_is_its_clients_one_by_one(kind: str, train: str, folders: Callable[[str], Path]) -> None:
    settings = settings_of(folders(kind), train=train)
    if (why := family.stack_obstacle(settings)) is not None:
        assert train in ("head", "norms", "all")
        assert why.startswith("because of ")
        return
    part, all_of, rows_U, clients = part_of(settings), noise(settings, utterances=5), [0, 0, 1, 2, 2], 3
    generator = torch.Generator().manual_seed(3)
    stacked = {
        name: (
            tensor + 0.02 * torch.randn(clients, *tensor.shape, generator=generator, dtype=torch.float64)
        ).requires_grad_()
        for name, tensor in part.initial.items()
    }
    losses_N = family.stacked_losses(
        part.frozen.with_trained(stacked), all_of, rows_U=rows_U, clients=clients, settings=settings, draws=None
    )
    found = gradients_of(losses_N.sum(), stacked)
    for client in range(clients):
        own = {name: tensor[client].detach().clone().requires_grad_() for name, tensor in stacked.items()}
        lines = torch.tensor([line for line, row in enumerate(rows_U) if row == client])
        loss = FAMILY.loss(part.frozen.with_trained(own), all_of.take(lines), settings=settings, draws=0)
        assert float(losses_N[client].detach()) == pytest.approx(float(loss.detach()), rel=CLOSE)
        assert_close({name: own_N[client] for name, own_N in found.items()}, gradients_of(loss, own))


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("wavlm", {}, "with LoRA, whose corrections wavlm takes in no layer: encoder.layers.0.attention"),
        ("xls-r", {"train": "all"}, r"because of wav2vec2.encoder.pos_conv_embed.conv \(ParametrizedConv1d\)"),
        ("moonshine", {"dropout": True}, "with dropout, which is drawn for each client"),
    ],
)
def test_what_cannot_be_stacked_names_the_module(
    kind: str, options: dict[str, Any], why: str, folders: Callable[[str], Path]
) -> None:
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(stacking_obstacle(FAMILY, settings_of(folders(kind), **options)))


def test_dropout_is_the_clients_own(folders: Callable[[str], Path]) -> None:
    """Drawn from the step's seed: the same with it, another with another, and none in evaluation."""
    settings = settings_of(folders("hubert"), dropout=True)
    part, speech = part_of(settings), noise(settings)
    parameters = {name: own.detach() for name, own in part.frozen.with_trained(part.initial).items()}
    losses = [float(FAMILY.loss(parameters, speech, settings=settings, draws=seed).detach()) for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert float(FAMILY.loss(parameters, speech, settings=settings, draws=None)) not in losses


def test_recognition_is_theirs(folders: Callable[[str], Path]) -> None:
    """`generate` of their own code, for an utterance alone; ours has it in a batch."""
    settings = settings_of(folders("moonshine"))
    parameters = FAMILY.init(settings, generator=torch.Generator())
    both = noise(settings)
    both = replace(both, features_UTF=both.features_UTF.float())
    found = family.search(parameters, both, settings=settings, how=GREEDY)
    theirs = transformers.MoonshineForConditionalGeneration.from_pretrained(folders("moonshine"))
    for place, texts in enumerate(found):
        one = both.take(torch.tensor([place]))
        (line,) = theirs.generate(one.features_UTF[:, :, 0], max_new_tokens=10).tolist()
        expected = line[1 : line.index(2, 1) if 2 in line[1:] else None]
        assert [token - 1 for token in texts[0].tokens] == expected[:10]


def test_tokens_that_a_model_forbids_are_not_written(tmp_path: Path) -> None:
    """Whisper's files name some for the whole text and some for its beginning; the oracle is its own `generate`."""
    folder = write_tiny_model("whisper", tmp_path / "whisper")
    features = noise(settings_of(folder))
    features = replace(features, features_UTF=features.features_UTF.float()).take(torch.tensor([0]))

    def search() -> list[int]:
        settings = settings_of(folder)
        parameters = FAMILY.init(settings, generator=torch.Generator())
        ((best, *_),) = family.search(parameters, features, settings=settings, how=GREEDY)
        return [token - 1 for token in best.tokens]

    free = search()
    assert len(set(free)) > 1
    nowhere, not_first = free[-1], free[0] if free[0] != free[-1] else free[1]
    file = folder / "generation_config.json"
    forbidden = {"suppress_tokens": [nowhere], "begin_suppress_tokens": [not_first]}
    file.write_text(json.dumps(json.loads(file.read_text()) | forbidden))
    found = search()
    assert nowhere not in found
    assert found[0] != not_first
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    (line,) = transformers.GenerationMixin.generate(
        theirs,
        input_features=features.features_UTF.mT,
        decoder_input_ids=torch.tensor([[1]]),
        generation_config=transformers.GenerationConfig(
            decoder_start_token_id=1, eos_token_id=2, pad_token_id=0, max_new_tokens=len(found), **forbidden
        ),
    ).tolist()
    assert found == line[1:]


@pytest.mark.parametrize("factors", ["both", "b", "alternate", "project"])
def test_what_is_written_is_an_adapter_for_peft(
    kind: str, factors: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="the extra hf is not installed")
    if kind == "wavlm":
        pytest.skip("peft's own adapters of WavLM do nothing")
    settings = settings_of(folders(kind), train=f"lora(r=2, alpha=6, factors={factors})")
    part = part_of(settings)
    fixed = {name: own for name, own in part.frozen.tensors.items() if name.endswith(".lora_a")}
    adapters.write_adapter({**fixed, **part.initial}, tmp_path, scale=part.frozen.scale, settings=settings)
    base = getattr(transformers, KINDS[kind][0]).from_pretrained(folders(kind)).double()
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).double().eval()
    one = noise(settings).take(torch.tensor([0]))
    inputs, _, _ = network_inputs(one.features_UTF, one.frames_U, settings)
    decoder = {} if settings.is_ctc else {"decoder_input_ids": torch.tensor([[1, 7, 8]])}
    ours = network.call_network(part.frozen.with_trained(part.initial), settings, inputs | decoder)
    merged = network.call_network(part.frozen.merged(part.initial), settings, inputs | decoder)
    with torch.no_grad():
        expected = theirs(**inputs, **decoder).logits
    for found in (ours.logits, merged.logits):
        torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE * float(expected.abs().max()))


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("train", ["lora(r=2)", "lora(r=2, factors=alternate)", "lora(r=2, factors=project)", "all"])
def test_engines_agree(train: str, step: int, folders: Callable[[str], Path], tones: Path) -> None:
    options = Options(source=str(folders("moonshine")), train=train)
    tokens = family.own_tokens(options, "en")
    assert tokens is not None
    settings = options.settings(tokens=tokens.size + 1)
    part = part_of(settings)
    part = replace(part, initial={name: own.float() for name, own in part.initial.items()})
    context = ClientContext(
        build_population(Store(tones), PopulationSettings(split=("train",)), seed=1),
        tokens,
        FAMILY,
        settings,
        LocalTraining(**LOCAL),
        seed=2,
        cohort_size=3,
        frozen=part.frozen,
    )
    layout = part.layout
    server_P = layout.flatten(part.initial)
    for name, view in layout.views(server_P).items():  # with b = 0 nothing reaches a
        view += 0.02 if name.endswith(".lora_b") else 0.0
    updates = []
    for engine in (
        SequentialEngine(context, layout, device=CPU, dtype=torch.float64),
        StackedEngine(context, layout, device=CPU, dtype=torch.float64, size=3),
    ):
        found: dict[int, Tensor] = {}
        for trained in engine.train(server_P, range(3), step=step):
            rows = trained.update if trained.update.dim() == 2 else trained.update[None]
            found |= dict(zip(trained.clients, rows.clone(), strict=True))
        updates.append(found)
    for client, expected in updates[0].items():
        away = torch.linalg.vector_norm(updates[1][client] - expected) / torch.linalg.vector_norm(expected)
        assert float(away) < 1e-5  # weights are kept in float32
        for name, own in layout.views(updates[1][client]).items():
            assert bool(own.any()) != (name in layout.held_at(step)), name
