"""The CRDNN family: sizes, padding, the joint loss, and the interface that a search calls."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from tests.golden.make_crdnn import FRAMES, SETTINGS, TOKENS, features, weights

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream
from sottovoce.data.audio.waveforms import Features, pack_waveforms, pad_tokens, pad_waveforms
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.crdnn.decoder import start_decoder, step_decoder, teacher_forced
from sottovoce.models.crdnn.family import FAMILY, Draws, Options, adjust_draws, loss, measure, search, unusable
from sottovoce.models.crdnn.network import encode
from sottovoce.models.crdnn.settings import Settings, parameter_shapes, running_statistics
from sottovoce.models.family import TrainingProgress
from sottovoce.models.speechbrain import converted, settings_of

OURS = replace(SETTINGS, as_released=False)
PLAIN = replace(OURS, norm="layer")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64, and no sum of more than a few hundred products


def own_weights(settings: Settings) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights().items() if name in parameter_shapes(settings)}


def golden_batch(*utterances: int, padding: int = 0) -> Features:
    """Some of the golden utterances, with noise behind each to the longest and `padding` more."""
    frames, made = torch.tensor(FRAMES)[list(utterances)], features()[list(utterances)]
    made = torch.nn.functional.pad(made[:, : int(frames.max())], (0, 0, 0, padding), value=3.0)
    for own, count in zip(made, frames.tolist(), strict=True):
        own[count:] = 5.0
    return Features(made, frames, *pad_tokens([TOKENS[i] for i in utterances]))


# Sources: the released code's modules counted, see docs/decisions/016-crdnn.md.
@pytest.mark.parametrize(
    ("size", "tokens", "count"),
    [("gao", 500, 158_907_410), ("speechbrain", 500, 148_182_546), ("template", 250, 46_337_102)],
)
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_named_sizes_have_as_many_parameters_as_were_released(size: str, tokens: int, count: int, norm: str) -> None:
    settings = Options(size=size, norm=norm).settings(tokens=tokens)  # type: ignore[arg-type]
    shapes, kept = parameter_shapes(settings), running_statistics(settings)
    assert sum(prod(shape) for name, shape in shapes.items() if name not in kept) == count
    assert sum(prod(shapes[name]) for name in kept) == (4 * settings.dnn_width if norm == "batch" else 0)


@pytest.mark.parametrize("settings", [PLAIN, OURS], ids=["layer", "batch"])
def test_padding_changes_neither_memory_nor_text_nor_gradients(settings: Settings) -> None:
    parameters = own_weights(settings)
    alone, beside = golden_batch(1), golden_batch(1, 0, padding=5)
    one, two = (encode(parameters, batch, settings=settings) for batch in (alone, beside))
    steps = int(one.lengths_U[0])
    torch.testing.assert_close(two.memory_UTD[0, :steps], one.memory_UTD[0, :steps], **CLOSE)
    read = [
        teacher_forced(parameters, encoded.memory_UTD, encoded.lengths_U, batch.tokens_UL, settings=settings)[0]
        for encoded, batch in ((one, alone), (two, beside))
    ]
    torch.testing.assert_close(read[1][0, : len(TOKENS[1]) + 1], read[0][0], **CLOSE)


@pytest.mark.parametrize("settings", [PLAIN, OURS], ids=["layer", "batch"])
def test_padding_changes_no_training_step(settings: Settings) -> None:
    found = []
    for padding in (0, 6):
        parameters = {name: tensor.requires_grad_() for name, tensor in own_weights(settings).items()}
        value = loss(parameters, golden_batch(0, 1, padding=padding), settings=settings, draws=Draws(1))
        found.append([value, *torch.autograd.grad(value, list(parameters.values()))])
    for ours, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, ours, **CLOSE)


def test_a_search_reads_what_training_reads() -> None:
    """Step by step as with all tokens at once, and with rows taken in another order in between."""
    parameters, batch = own_weights(PLAIN), golden_batch(0, 1)
    encoded = encode(parameters, batch, settings=PLAIN)
    expected, attended = teacher_forced(
        parameters, encoded.memory_UTD, encoded.lengths_U, batch.tokens_UL, settings=PLAIN
    )
    swapped = torch.tensor([1, 0])
    memory, lengths, given = encoded.memory_UTD, encoded.lengths_U, torch.nn.functional.pad(batch.tokens_UL, (1, 0))
    state = start_decoder(parameters, memory, lengths, settings=PLAIN)
    for place in range(given.shape[1]):
        log_probs, state, attention = step_decoder(parameters, memory, lengths, given[:, place], state, settings=PLAIN)
        torch.testing.assert_close(log_probs, expected[:, place], **CLOSE)
        torch.testing.assert_close(attention, attended[:, place], **CLOSE)
        state = type(state)(*(tensor.index_select(0, swapped) for tensor in state))
        memory, lengths, given, expected, attended = (t[swapped] for t in (memory, lengths, given, expected, attended))


def test_ctc_is_left_out_when_its_epochs_are_over() -> None:
    by_epoch = replace(PLAIN, ctc_epochs=4)
    assert [adjust_draws(by_epoch, Draws(1), TrainingProgress(9, epoch)).with_ctc for epoch in (0, 3, 4)] == [
        True,
        True,
        False,
    ]
    assert adjust_draws(PLAIN, Draws(1), TrainingProgress(10**6, 10**6)).with_ctc
    parameters = {name: tensor.requires_grad_() for name, tensor in own_weights(PLAIN).items()}
    without = loss(parameters, golden_batch(0, 1), settings=PLAIN, draws=Draws(1, with_ctc=False))
    alone = loss(parameters, golden_batch(0, 1), settings=replace(PLAIN, mu=1.0), draws=Draws(1))
    assert torch.equal(without, alone)
    assert torch.autograd.grad(without, parameters["ctc.weight"], allow_unused=True) == (None,)


def test_the_validation_loss_is_that_of_the_decoder_alone() -> None:
    """As in SpeechBrain's recipe, also while CTC is part of the training loss; the joint loss stands beside it."""
    parameters, batch = own_weights(PLAIN), golden_batch(0, 1)
    found = measure(parameters, batch, settings=PLAIN)
    assert [*found] == ["loss", FAMILY.inspection.validation]
    assert torch.equal(found["loss"], loss(parameters, batch, settings=PLAIN, draws=None))
    alone = loss(parameters, batch, settings=replace(PLAIN, mu=1.0), draws=None)
    torch.testing.assert_close(found[FAMILY.inspection.validation], alone, **CLOSE)
    assert found["loss"] != alone
    assert [*measure(parameters, batch, settings=replace(PLAIN, mu=0.0))] == ["loss"], "a decoder that is not trained"


def test_ctc_alone_needs_no_decoder() -> None:
    parameters = {name: tensor.requires_grad_() for name, tensor in own_weights(PLAIN).items()}
    value = loss(parameters, golden_batch(0, 1), settings=replace(PLAIN, mu=0.0), draws=Draws(1))
    assert torch.autograd.grad(value, parameters["output.weight"], allow_unused=True) == (None,)


def test_a_decoder_that_was_never_trained_decides_nothing() -> None:
    settings, found = replace(PLAIN, mu=0.0), []
    for factor in (1.0, -3.0):
        parameters = own_weights(settings)
        parameters["output.weight"] = parameters["output.weight"] * factor
        texts = search(parameters, golden_batch(0, 1), settings=settings, how=SearchOptions(width=2))
        found.append([own[0].tokens for own in texts])
    assert found[0] == found[1]


def test_dropout_follows_its_seed() -> None:
    settings = replace(PLAIN, dropout=0.3)
    values = [
        loss(own_weights(settings), golden_batch(0, 1), settings=settings, draws=Draws(seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


@pytest.mark.parametrize(
    ("samples", "tokens", "reason"),
    [
        (879, [1], "too short for one encoder step"),  # 3 frames
        (880, [1], None),
        (880, [1, 2], "text too long for its audio"),
        (1_520, [1, 1], "text too long for its audio"),  # two steps, and a blank is needed between
        (2_160, [1, 1], None),
    ],
)
def test_what_no_loss_can_be_computed_for_is_unusable(samples: int, tokens: list[int], reason: str | None) -> None:
    assert unusable(PLAIN, samples, tokens) == reason


def test_less_than_a_step_of_speech_is_emitted_as_nothing() -> None:
    short = Features(torch.ones(1, 1, 80, dtype=torch.float64), torch.tensor([1]), *pad_tokens([[1]]))
    assert FAMILY.recognition is not None
    log_probs, lengths = FAMILY.recognition.emit(own_weights(PLAIN), short, settings=PLAIN)
    assert lengths.tolist() == [0]
    assert log_probs.isfinite().all()
    assert loss(own_weights(PLAIN), short, settings=PLAIN, draws=None).isfinite()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"channels": ()}, "channels"),
        ({"tokens": 1}, "at least 2"),
        ({"mu": 1.5}, "mu=1.5"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"ctc_epochs": -1}, "ctc_epochs=-1"),
        ({"norm": "group"}, "layer or batch"),
        ({"rnn_layers": 0}, "rnn_layers=0"),
    ],
)
def test_what_cannot_be_built_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(PLAIN, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="size='huge', expected one of tiny"):
        Options(size="huge")


def test_weights_of_something_else_are_refused() -> None:
    with pytest.raises(InputError, match="expected the weights of SpeechBrain's CRDNN"):
        settings_of({"encoder.weight": torch.zeros(2)}, where="model.ckpt")
    with pytest.raises(InputError, match="is missing"):
        converted({}, SETTINGS, where="model.ckpt")


def test_as_released_padding_is_heard_as_silence() -> None:
    """Laid in lines or end to end; centred windows give one frame more than there are hops."""
    noise = [
        stream(1, "noise", i).integers(-3000, 3000, size=size).astype(np.int16) for i, size in enumerate((3000, 9000))
    ]
    lines, ends = (
        FAMILY.front_end.extract_features(laid(noise, [[1], [2]]), settings=SETTINGS)
        for laid in (pad_waveforms, pack_waveforms)
    )
    assert lines.frames_U.tolist() == [19, 57]
    assert torch.equal(lines.features_UTF, ends.features_UTF)
    assert lines.features_UTF.shape == (2, 57, 80)
    torch.testing.assert_close(lines.features_UTF[0, :19].mean(dim=0), torch.zeros(80), rtol=0, atol=1e-5)
    assert (lines.features_UTF[0, 25:] < lines.features_UTF[0, :19].amin(dim=0)).all()


def test_as_released_padding_changes_the_result() -> None:
    parameters = weights()
    one, two = (
        encode(parameters, batch, settings=SETTINGS).memory_UTD for batch in (golden_batch(1), golden_batch(1, 0))
    )
    assert not torch.allclose(one[0], two[0, : one.shape[1]])
