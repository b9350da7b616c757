"""The transducer: sizes, no look-ahead, streams, padding, searches, and what it inherits."""

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream as random_stream
from sottovoce.base.seeds import torch_stream
from sottovoce.data.audio.waveforms import pack_waveforms, pad_waveforms
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.evaluation.decoder import DecodingOptions, choose_decoder
from sottovoce.models import rnnt
from sottovoce.models.attention_search import GREEDY, SearchOptions
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, adapt_parameters
from sottovoce.models.speech_lstm import (
    EncoderSettings,
    encode_features,
    encode_frames,
    encoder_shapes,
    extract_features,
)
from sottovoce.models.transducer import search as searching
from sottovoce.models.transducer.family import FAMILY, Options, loss, search, unusable
from sottovoce.models.transducer.network import (
    MOST_AT_ONCE,
    Settings,
    init,
    joint,
    parameter_shapes,
    predict,
    predict_next,
)
from sottovoce.models.transducer.search import StreamState, recognise_stream

ENCODER = EncoderSettings(dense_layers=2, dense_width=12, lstm_layers=2, lstm_width=10)
SETTINGS = Settings(tokens=5, encoder=ENCODER, embedding=6, predictor_layers=2)
# As sherpa-onnx streams: filterbanks, four to a step, and the last two tokens alone.
STREAMED = replace(
    SETTINGS,
    encoder=replace(ENCODER, input="filterbanks", stack=4, mean=-8.0),
    prediction="stateless",
)
both = pytest.mark.parametrize("settings", [SETTINGS, STREAMED], ids=["paper", "streamed"])
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64, and no sum of more than a few hundred products


def noise(samples: int, *, seed: int = 1) -> NDArray[np.int16]:
    """Louder and softer, some three times a second."""
    level = 10.0 ** (2 + 2 * np.sin(np.arange(samples) / 900 + seed))
    return (level * random_stream(seed, "noise").uniform(-1, 1, size=samples)).astype(np.int16)


def weights(
    dtype: torch.dtype = torch.float64, *, sure: float = 1.0, blank: float = 0.0, settings: Settings = SETTINGS
) -> dict[str, Tensor]:
    """Untrained, but `sure` times as large, and with so much more for the blank."""
    made = {name: sure * p.to(dtype) for name, p in init(settings, generator=torch_stream(5, "init")).items()}
    if settings.is_stateless:  # g is not bounded there as that of LSTMs is
        made |= {name: p / max(sure / 2, 1) for name, p in made.items() if name.startswith(("embedding", "predictor"))}
    made["output.bias"][0] += blank
    return made


# Writes nothing, one token or several at a step.
TALKATIVE = {SETTINGS: {"sure": 6.0, "blank": 2.0}, STREAMED: {"sure": 6.0, "blank": 1.0}}


def features_of(
    *utterances: NDArray[np.int16], texts: list[list[int]] | None = None, settings: Settings = SETTINGS
) -> Any:
    return extract_features(pad_waveforms(list(utterances), texts), settings=settings, dtype=torch.float64)


def test_the_papers_size_has_the_papers_parameters() -> None:
    """Dense 919,040 and LSTMs 48,283,648; embedding and prediction network 19,354,624; joint 2,563,525."""
    settings = Options().settings(tokens=2501)
    assert sum(map(prod, encoder_shapes(settings.encoder).values())) == 49_202_688
    assert sum(map(prod, parameter_shapes(settings).values())) == 71_120_837


@pytest.mark.parametrize(
    ("settings", "values", "frames"),
    [(SETTINGS, 256, [29, 54, 1]), (STREAMED, 80, [30, 55, 1])],
    ids=["paper", "streamed"],
)
def test_features_are_the_same_in_lines_and_end_to_end_and_zero_behind_an_utterance(
    settings: Settings, values: int, frames: list[int]
) -> None:
    utterances = [noise(5_000), noise(9_000, seed=2), noise(50, seed=3)]
    lines, ends = (extract_features(laid(utterances), settings=settings) for laid in (pad_waveforms, pack_waveforms))
    assert lines.features_UTF.shape == (3, max(frames), values)
    assert lines.frames_U.tolist() == ends.frames_U.tolist() == frames
    torch.testing.assert_close(lines.features_UTF, ends.features_UTF)
    assert lines.features_UTF[0, frames[0] :].eq(0).all()
    assert lines.features_UTF.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "end"),
    # The step of 30 ms, and 15 ms of its last frame's window; or the step of 40 ms, and 7.5 ms.
    [(SETTINGS, 13 * 480 + 240), (STREAMED, 13 * 640 + 120)],
    ids=["paper", "streamed"],
)
def test_no_step_looks_ahead(settings: Settings, end: int) -> None:
    """Whatever is said after a step's last window changes nothing, and what is said in it does."""
    before, parameters, step = noise(16_000), weights(settings=settings), 12
    expected, lengths = encode_features(parameters, features_of(before, settings=settings), settings=settings)
    after = before.copy()
    after[end:] = noise(16_000, seed=3)[end:]
    found, _ = encode_features(parameters, features_of(after, settings=settings), settings=settings)
    assert (
        lengths.tolist() == [settings.encoder.steps(16_000)] == [(16_000 - end) // settings.encoder.step_samples + 13]
    )
    torch.testing.assert_close(found[:, : step + 1], expected[:, : step + 1], **CLOSE)
    assert not torch.allclose(found[:, step + 1], expected[:, step + 1])
    after[end - 60 : end] = 0
    found, _ = encode_features(parameters, features_of(after, settings=settings), settings=settings)
    assert not torch.allclose(found[:, step], expected[:, step])


@both
@pytest.mark.parametrize("steps", [1, 5, 31])
def test_an_encoder_that_carries_its_state_on_computes_the_same(settings: Settings, steps: int) -> None:
    parameters, features = weights(settings=settings), features_of(noise(16_000), settings=settings)
    expected, _ = encode_features(parameters, features, settings=settings)
    state, found, stack = None, [], settings.encoder.stack
    for first in range(0, 96, stack * steps):
        chunk = features.features_UTF[:, first : min(first + stack * steps, 96)]
        encoded, state = encode_frames(parameters, chunk, state, settings=settings.encoder)
        found.append(encoded)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **CLOSE)


@both
@pytest.mark.parametrize("samples", [70, 480, 1_111, 100_000])
def test_a_stream_writes_what_the_whole_recording_does(settings: Settings, samples: int) -> None:
    parameters, speech = weights(torch.float32, settings=settings, **TALKATIVE[settings]), noise(40_000)
    features = extract_features(pad_waveforms([speech]), settings=settings)
    (whole,), state, found = search(parameters, features, settings=settings, how=GREEDY)[0], None, []
    for first in range(0, len(speech), samples):
        tokens, state = recognise_stream(parameters, speech[first : first + samples], state, settings=settings)
        found += tokens
    assert len(whole.tokens) > 10
    assert found == list(zip(whole.tokens, whole.frames, strict=True))
    assert isinstance(state, StreamState)
    assert len(state.left_N) < settings.encoder.step_samples + 240


@both
def test_padding_changes_no_loss_and_no_gradient(settings: Settings) -> None:
    texts = [[1, 2], [3, 4, 4]]
    short, long = noise(5_000), noise(9_000, seed=2)
    found = []
    for utterances, said in (([short], texts[:1]), ([long], texts[1:]), ([short, long], texts)):
        parameters = {name: p.requires_grad_() for name, p in weights(settings=settings).items()}
        features = features_of(*utterances, texts=said, settings=settings)
        value = loss(parameters, features, settings=settings, draws=None)
        found.append([value, *torch.autograd.grad(value, list(parameters.values()))])
    for one, other, both in zip(*found, strict=True):
        torch.testing.assert_close(both, (one + other) / 2, **CLOSE)


@both
def test_it_learns_an_utterance_by_heart(settings: Settings) -> None:
    """And both searches then write it."""
    features = features_of(noise(4_000), texts=[[1, 2, 1]], settings=settings)
    parameters = {name: p.requires_grad_() for name, p in weights(settings=settings).items()}
    optimiser = torch.optim.Adam(parameters.values(), lr=0.03)
    for _ in range(150):
        optimiser.zero_grad()
        loss(parameters, features, settings=settings, draws=None).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert FAMILY.recognition is not None
    for how in (GREEDY, FAMILY.recognition.beam):
        assert search(parameters, features, settings=settings, how=how)[0][0].tokens == [1, 2, 1]


def test_a_text_may_be_longer_than_its_speech_and_empty_but_speech_has_a_step() -> None:
    assert unusable(SETTINGS, 400 + 2 * 160, [1] * 50) is None
    assert unusable(SETTINGS, 400 + 2 * 160 - 1, [1]) == "too short for one encoder step"
    long = loss(weights(), features_of(noise(720), texts=[[1, 2, 3, 4] * 3]), settings=SETTINGS, draws=None)
    empty = loss(weights(), features_of(noise(720), texts=[[]]), settings=SETTINGS, draws=None)
    assert float(long) > float(empty) > 0
    assert float(loss(weights(), features_of(noise(300), texts=[[1]]), settings=SETTINGS, draws=None)) == 0


@both
def test_a_search_reads_what_training_reads(settings: Settings) -> None:
    parameters, tokens = weights(settings=settings), torch.tensor([[3, 1, 4]])
    at_once, state, steps = predict(parameters, tokens, settings=settings), None, []
    for token in (0, 3, 1, 4):
        predicted, state = predict_next(parameters, torch.tensor([[token]]), state, settings=settings)
        steps.append(predicted)
    torch.testing.assert_close(torch.cat(steps, dim=1), at_once, **CLOSE)


def test_a_stateless_prediction_network_reads_the_last_two_tokens_alone() -> None:
    parameters, texts = weights(settings=STREAMED), torch.tensor([[3, 1, 4, 2], [1, 2, 4, 2], [4, 2, 3, 3]])
    one, other, third = predict(parameters, texts, settings=STREAMED)
    torch.testing.assert_close(one[4], other[4], **CLOSE)
    assert not torch.allclose(one[3], other[3]), "the token before the last counts"
    torch.testing.assert_close(one[4], third[2], **CLOSE)


def plainly(
    parameters: dict[str, Tensor], encoded_TD: Tensor, *, settings: Settings
) -> tuple[list[int], list[int], float]:
    """Greedy search, step by step, without looking ahead."""
    predicted, state = predict_next(parameters, torch.tensor([[0]]), settings=settings)
    most = 1 if settings is STREAMED else MOST_AT_ONCE
    tokens: list[int] = []
    frames: list[int] = []
    score = 0.0
    for step, f in enumerate(encoded_TD):
        for count in range(most + 1):
            log_probs = joint(parameters, f, predicted[0, 0])
            best = int(log_probs.argmax()) if count < most else 0
            score += float(log_probs[best])
            if best == 0:
                break
            tokens.append(best)
            frames.append(step)
            predicted, state = predict_next(parameters, torch.tensor([[best]]), state, settings=settings)
    return tokens, frames, score


@pytest.mark.parametrize("blank", [0.0, -90.0], ids=["that pauses", "that never stops"])
@both
def test_greedy_search_is_the_plain_loop(settings: Settings, blank: float) -> None:
    parameters = weights(sure=6.0, blank=TALKATIVE[settings]["blank"] + blank, settings=settings)
    utterances = [noise(16_000), noise(5_000, seed=2), noise(300), noise(11_000, seed=4)]
    encoded, lengths = encode_features(parameters, features_of(*utterances, settings=settings), settings=settings)
    found, _ = searching.search_greedily(parameters, encoded, lengths, settings=settings)
    assert lengths.tolist() == ([24, 7, 0, 17] if settings is STREAMED else [32, 9, 0, 22])
    for own, encoded_TD, length in zip(found, encoded, lengths.tolist(), strict=True):
        tokens, frames, score = plainly(parameters, encoded_TD[:length], settings=settings)
        assert (own.tokens, own.frames) == (tokens, frames)
        assert own.score == pytest.approx(score, rel=1e-9)
        assert len(tokens) <= settings.most_at_once * length
    assert found[0].tokens


@both
def test_a_beam_that_holds_everything_finds_every_texts_probability(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps and at most two tokens in each: all texts of up to two tokens are summed over all their ways."""
    monkeypatch.setattr(Settings, "most_at_once", 2)
    settings = replace(settings, tokens=3)
    parameters = {name: p.double() for name, p in init(settings, generator=torch_stream(6, "init")).items()}
    speech = noise(240 + 3 * settings.encoder.step_samples - settings.encoder.lead_samples)
    encoded, lengths = encode_features(parameters, features_of(speech, settings=settings), settings=settings)
    assert lengths.tolist() == [3]
    (found,) = searching.search_with_beam(
        parameters, encoded, lengths, settings=settings, how=SearchOptions(width=200, temperature=1.0)
    )
    scores = {tuple(text.tokens): text.score for text in found}
    for tokens in ((), *product((1, 2), repeat=1), *product((1, 2), repeat=2)):
        text = torch.tensor([tokens], dtype=torch.long).view(1, -1)
        output = (parameters["output.weight"], parameters["output.bias"])
        predicted = predict(parameters, text, settings=settings)
        exact = rnnt.joint_losses(encoded, predicted, *output, lengths, text, torch.tensor([len(tokens)]))
        assert scores[tokens] == pytest.approx(-float(exact), rel=1e-9)
    assert found == sorted(found, key=lambda text: -text.score)
    assert all(a <= b for text in found for a, b in zip(text.frames, text.frames[1:], strict=False))


@both
def test_a_wide_beam_finds_a_text_at_least_as_probable_as_the_greedy_one(settings: Settings) -> None:
    parameters = weights(sure=3.0, settings=settings)
    features = features_of(noise(9_000), noise(7_000, seed=2), settings=settings)
    encoded, lengths = encode_features(parameters, features, settings=settings)
    wide = searching.search_transducer(
        parameters,
        encoded,
        lengths,
        settings=settings,
        how=replace(FAMILY.recognition.beam, width=30, results=30),  # type: ignore[union-attr]
    )
    greedy, _ = searching.search_greedily(parameters, encoded, lengths, settings=settings)
    for texts, one in zip(wide, greedy, strict=True):
        assert len(texts) == 30
        assert len({tuple(text.tokens) for text in texts}) == 30
        assert texts[0].score >= one.score


def test_a_language_model_ranks_the_beams_texts() -> None:
    parameters, features = weights(sure=3.0), features_of(noise(9_000))
    how = SearchOptions(width=8, temperature=1.0, normalised=False)
    (plain,) = search(parameters, features, settings=SETTINGS, how=how)
    disliked = plain[0].tokens
    model = replace(how, language_model=lambda tokens: -100.0 * (list(tokens) == disliked), lm_weight=1.0)
    (ranked,) = search(parameters, features, settings=SETTINGS, how=model)
    assert ranked[0].tokens != disliked


def test_options_of_attention_and_ctc_are_refused() -> None:
    pieces = ["", "a", "b", "c", "d"]
    assert choose_decoder(FAMILY, pieces) == GREEDY
    chosen = choose_decoder(FAMILY, pieces, DecodingOptions(beam_width=4, temperature=1.2))
    assert chosen == SearchOptions(width=4, temperature=1.2, end_threshold=None, longest_shift=None, normalised=False)
    with pytest.raises(InputError, match="longest_shift=9 means nothing to models of family=transducer"):
        choose_decoder(FAMILY, pieces, DecodingOptions(longest_shift=9))
    with pytest.raises(InputError, match="family=transducer cannot be decoded by CTC"):
        choose_decoder(FAMILY, pieces, DecodingOptions(by_ctc=True))


TOKENS = CharacterTokens.seen_in("abc")


def another(encoder: EncoderSettings, parameters: dict[str, Tensor]) -> Recogniser:
    """A model of another family that has an encoder of this kind, and something else besides."""
    other = replace(find_family("crdnn"), name="another")
    return Recogniser(
        other, replace(SETTINGS, encoder=encoder), TOKENS, parameters | {"head.weight": torch.ones(2)}, "en"
    )


def test_an_encoder_carries_over_from_another_family_and_nothing_else_does() -> None:
    pretrained = {name: p + 1 for name, p in weights(torch.float32).items()}
    found = adapt_parameters(
        another(ENCODER, pretrained), SETTINGS, TOKENS, family=FAMILY, generator=torch_stream(7, "init")
    )
    fresh = init(SETTINGS, generator=torch_stream(7, "init"))
    assert found.keys() == fresh.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, (pretrained if name.startswith("encoder.") else fresh)[name])


def test_options_say_what_is_read_and_what_is_remembered() -> None:
    assert Options(size="tiny").settings(tokens=5) == Options(size="tiny", input="spectra", prediction="lstm").settings(
        tokens=5
    )
    streamed = Options(size="tiny", input="filterbanks", prediction="stateless").settings(tokens=5)
    assert (streamed.encoder.stack, streamed.encoder.step_samples, streamed.encoder.values) == (4, 640, 80)
    shapes = parameter_shapes(streamed)
    assert shapes["encoder.dense.0.weight"] == (64, 4 * 80)
    assert {name for name in shapes if name.startswith("predictor.")} == {
        f"predictor.{layer}.{tensor}" for layer in ("context", "projection") for tensor in ("weight", "bias")
    }
    assert {FAMILY.place(name).kind for name in shapes} < FAMILY.presentation.kinds.keys()
    pretrained = find_family("cpc").Options(family="cpc", size="tiny", input="filterbanks").settings()
    assert pretrained.encoder == streamed.encoder, "so that it may be inherited"


def test_an_encoder_of_another_shape_or_none_is_refused() -> None:
    wider = replace(ENCODER, lstm_width=11)
    options: dict[str, Any] = {"family": FAMILY, "generator": torch_stream(7, "init")}
    with pytest.raises(
        InputError, match=r"the model to start from has EncoderSettings\(.*lstm_width=11.*expected EncoderSettings\("
    ):
        adapt_parameters(another(wider, {}), SETTINGS, TOKENS, **options)
    crdnn = find_family("crdnn")
    seed = Recogniser(crdnn, crdnn.Options(size="tiny").settings(tokens=4), TOKENS, {}, "en")
    with pytest.raises(InputError, match="the model to start from is of family=crdnn, expected transducer"):
        adapt_parameters(seed, SETTINGS, TOKENS, **options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"tokens": 1}, "tokens=1"), ({"embedding": 0}, "embedding=0"), ({"predictor_layers": 0}, "predictor_layers=0")],
)
def test_what_cannot_be_built_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(SETTINGS, **wrong)
    with pytest.raises(InputError, match="size='huge', expected one of tiny"):
        Options(size="huge")
    with pytest.raises(InputError, match="lstm_layers=0"):
        replace(ENCODER, lstm_layers=0)
    with pytest.raises(InputError, match="deviation"):
        replace(ENCODER, deviation=0.0)
