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
from sottovoce.models.transducer.network import Settings, init, joint, parameter_shapes, predict, predict_next
from sottovoce.models.transducer.search import StreamState, recognise_stream

ENCODER = EncoderSettings(dense_layers=2, dense_width=12, lstm_layers=2, lstm_width=10)
SETTINGS = Settings(tokens=5, encoder=ENCODER, embedding=6, predictor_layers=2)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64, and no sum of more than a few hundred products


def noise(samples: int, *, seed: int = 1) -> NDArray[np.int16]:
    """Louder and softer, some three times a second."""
    level = 10.0 ** (2 + 2 * np.sin(np.arange(samples) / 900 + seed))
    return (level * random_stream(seed, "noise").uniform(-1, 1, size=samples)).astype(np.int16)


def weights(dtype: torch.dtype = torch.float64, *, sure: float = 1.0, blank: float = 0.0) -> dict[str, Tensor]:
    """Untrained, but `sure` times as large, and with so much more for the blank."""
    made = {name: sure * p.to(dtype) for name, p in init(SETTINGS, generator=torch_stream(5, "init")).items()}
    made["output.bias"][0] += blank
    return made


TALKATIVE = {"sure": 6.0, "blank": 2.0}  # writes nothing, one token or several at a step


def features_of(*utterances: NDArray[np.int16], texts: list[list[int]] | None = None) -> Any:
    return extract_features(pad_waveforms(list(utterances), texts), settings=SETTINGS, dtype=torch.float64)


def test_the_papers_size_has_the_papers_parameters() -> None:
    """Dense 919,040 and LSTMs 48,283,648; embedding and prediction network 19,354,624; joint 2,563,525."""
    settings = Options().settings(tokens=2501)
    assert sum(map(prod, encoder_shapes(settings.encoder).values())) == 49_202_688
    assert sum(map(prod, parameter_shapes(settings).values())) == 71_120_837


def test_features_are_the_same_in_lines_and_end_to_end_and_zero_behind_an_utterance() -> None:
    utterances = [noise(5_000), noise(9_000, seed=2)]
    lines, ends = (extract_features(laid(utterances), settings=SETTINGS) for laid in (pad_waveforms, pack_waveforms))
    assert lines.features_UTF.shape == (2, 54, 256)
    assert lines.frames_U.tolist() == ends.frames_U.tolist() == [29, 54]
    torch.testing.assert_close(lines.features_UTF, ends.features_UTF)
    assert lines.features_UTF[0, 29:].eq(0).all()


def test_no_step_looks_ahead() -> None:
    """Whatever is said after a step's last window changes nothing, and what is said in it does."""
    before, parameters = noise(16_000), weights()
    expected, lengths = encode_features(parameters, features_of(before), settings=SETTINGS)
    step = 12
    end = (step + 1) * 480 + 240  # a step of 30 ms, and 15 ms of its last frame's window
    after = before.copy()
    after[end:] = noise(16_000, seed=3)[end:]
    found, _ = encode_features(parameters, features_of(after), settings=SETTINGS)
    assert lengths.tolist() == [32]
    torch.testing.assert_close(found[:, : step + 1], expected[:, : step + 1], **CLOSE)
    assert not torch.allclose(found[:, step + 1], expected[:, step + 1])
    after[end - 60 : end] = 0
    found, _ = encode_features(parameters, features_of(after), settings=SETTINGS)
    assert not torch.allclose(found[:, step], expected[:, step])


@pytest.mark.parametrize("steps", [1, 5, 31])
def test_an_encoder_that_carries_its_state_on_computes_the_same(steps: int) -> None:
    parameters, features = weights(), features_of(noise(16_000))
    expected, _ = encode_features(parameters, features, settings=SETTINGS)
    state, found = None, []
    for first in range(0, 96, 3 * steps):
        chunk = features.features_UTF[:, first : min(first + 3 * steps, 96)]
        encoded, state = encode_frames(parameters, chunk, state, settings=ENCODER)
        found.append(encoded)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **CLOSE)


@pytest.mark.parametrize("samples", [70, 480, 1_111, 100_000])
def test_a_stream_writes_what_the_whole_recording_does(samples: int) -> None:
    parameters, speech = weights(torch.float32, **TALKATIVE), noise(40_000)
    features = extract_features(pad_waveforms([speech]), settings=SETTINGS)
    (whole,), state, found = search(parameters, features, settings=SETTINGS, how=GREEDY)[0], None, []
    for first in range(0, len(speech), samples):
        tokens, state = recognise_stream(parameters, speech[first : first + samples], state, settings=SETTINGS)
        found += tokens
    assert len(whole.tokens) > 10
    assert found == list(zip(whole.tokens, whole.frames, strict=True))
    assert isinstance(state, StreamState)
    assert len(state.left_N) < 480 + 240


def test_padding_changes_no_loss_and_no_gradient() -> None:
    texts = [[1, 2], [3, 4, 4]]
    short, long = noise(5_000), noise(9_000, seed=2)
    found = []
    for utterances, said in (([short], texts[:1]), ([long], texts[1:]), ([short, long], texts)):
        parameters = {name: p.requires_grad_() for name, p in weights().items()}
        value = loss(parameters, features_of(*utterances, texts=said), settings=SETTINGS, draws=None)
        found.append([value, *torch.autograd.grad(value, list(parameters.values()))])
    for one, other, both in zip(*found, strict=True):
        torch.testing.assert_close(both, (one + other) / 2, **CLOSE)


def test_it_learns_an_utterance_by_heart() -> None:
    """And both searches then write it."""
    features = features_of(noise(4_000), texts=[[1, 2, 1]])
    parameters = {name: p.requires_grad_() for name, p in weights().items()}
    optimiser = torch.optim.Adam(parameters.values(), lr=0.03)
    for _ in range(150):
        optimiser.zero_grad()
        loss(parameters, features, settings=SETTINGS, draws=None).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert FAMILY.recognition is not None
    for how in (GREEDY, FAMILY.recognition.beam):
        assert search(parameters, features, settings=SETTINGS, how=how)[0][0].tokens == [1, 2, 1]


def test_a_text_may_be_longer_than_its_speech_and_empty_but_speech_has_a_step() -> None:
    assert unusable(SETTINGS, 400 + 2 * 160, [1] * 50) is None
    assert unusable(SETTINGS, 400 + 2 * 160 - 1, [1]) == "too short for one encoder step"
    long = loss(weights(), features_of(noise(720), texts=[[1, 2, 3, 4] * 3]), settings=SETTINGS, draws=None)
    empty = loss(weights(), features_of(noise(720), texts=[[]]), settings=SETTINGS, draws=None)
    assert float(long) > float(empty) > 0
    assert float(loss(weights(), features_of(noise(300), texts=[[1]]), settings=SETTINGS, draws=None)) == 0


def test_a_search_reads_what_training_reads() -> None:
    parameters, tokens = weights(), torch.tensor([[3, 1, 4]])
    at_once, state, steps = predict(parameters, tokens, settings=SETTINGS), None, []
    for token in (0, 3, 1, 4):
        predicted, state = predict_next(parameters, torch.tensor([[token]]), state, settings=SETTINGS)
        steps.append(predicted)
    torch.testing.assert_close(torch.cat(steps, dim=1), at_once, **CLOSE)


def plainly(parameters: dict[str, Tensor], encoded_TD: Tensor) -> tuple[list[int], list[int], float]:
    """Greedy search, step by step, without looking ahead."""
    predicted, state = predict_next(parameters, torch.tensor([[0]]), settings=SETTINGS)
    tokens: list[int] = []
    frames: list[int] = []
    score = 0.0
    for step, f in enumerate(encoded_TD):
        for count in range(searching.MOST_AT_ONCE + 1):
            log_probs = joint(parameters, f, predicted[0, 0])
            best = int(log_probs.argmax()) if count < searching.MOST_AT_ONCE else 0
            score += float(log_probs[best])
            if best == 0:
                break
            tokens.append(best)
            frames.append(step)
            predicted, state = predict_next(parameters, torch.tensor([[best]]), state, settings=SETTINGS)
    return tokens, frames, score


@pytest.mark.parametrize("blank", [2.0, -90.0], ids=["that pauses", "that never stops"])
def test_greedy_search_is_the_plain_loop(blank: float) -> None:
    parameters = weights(sure=6.0, blank=blank)
    utterances = [noise(16_000), noise(5_000, seed=2), noise(300), noise(11_000, seed=4)]
    encoded, lengths = encode_features(parameters, features_of(*utterances), settings=SETTINGS)
    found, _ = searching.search_greedily(parameters, encoded, lengths, settings=SETTINGS)
    assert lengths.tolist() == [32, 9, 0, 22]
    for own, encoded_TD, length in zip(found, encoded, lengths.tolist(), strict=True):
        tokens, frames, score = plainly(parameters, encoded_TD[:length])
        assert (own.tokens, own.frames) == (tokens, frames)
        assert own.score == pytest.approx(score, rel=1e-9)
        assert len(tokens) <= searching.MOST_AT_ONCE * length
    assert found[0].tokens


def test_a_beam_that_holds_everything_finds_every_texts_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps and at most two tokens in each: all texts of up to two tokens are summed over all their ways."""
    monkeypatch.setattr(searching, "MOST_AT_ONCE", 2)
    settings = replace(SETTINGS, tokens=3)
    parameters = {name: p.double() for name, p in init(settings, generator=torch_stream(6, "init")).items()}
    encoded, lengths = encode_features(parameters, features_of(noise(720 + 2 * 480)), settings=SETTINGS)
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


def test_a_wide_beam_finds_a_text_at_least_as_probable_as_the_greedy_one() -> None:
    parameters, features = weights(sure=3.0), features_of(noise(9_000), noise(7_000, seed=2))
    encoded, lengths = encode_features(parameters, features, settings=SETTINGS)
    wide = searching.search_transducer(
        parameters,
        encoded,
        lengths,
        settings=SETTINGS,
        how=replace(FAMILY.recognition.beam, width=30, results=30),  # type: ignore[union-attr]
    )
    greedy, _ = searching.search_greedily(parameters, encoded, lengths, settings=SETTINGS)
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
