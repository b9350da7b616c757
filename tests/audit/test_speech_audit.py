"""Attacks on speech: they tell what is there to be told, and nothing where there is nothing."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sottovoce.audit.speech_audit import (
    HOW,
    IN,
    OUT,
    TAKES,
    SecretSpeaker,
    audit_speech,
    exposure,
    exposures,
    format_attacks,
    half_silenced,
    membership,
    played_fast,
    secret_sentence,
    secret_store,
)
from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream, torch_stream
from sottovoce.config import load_recipe
from sottovoce.data.audio.waveforms import pack_waveforms
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.evaluation.losses import compute_loss
from sottovoce.models.family import DEFAULT, find_family
from sottovoce.models.recogniser import Recogniser
from sottovoce.training.run_context import RunContext

TOKENS = CharacterTokens.seen_in("abcdefghijklmnopqrstuvwxyz ")


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Store:
    pytest.importorskip("espeakng_loader", reason="synthetic voices need espeak-ng")
    return secret_store(tmp_path_factory.mktemp("secrets") / "store", count=4, language="en", seed=3)


def test_a_pair_is_told_right_as_often_as_the_scores_say() -> None:
    drawn = np.random.default_rng(1)
    found = membership(drawn.normal(1.0, 1.0, 400), drawn.normal(0.0, 1.0, 400))
    truth = 0.7602  # Φ(1/√2)
    assert found.low < truth < found.high
    assert found.high - found.low < 0.08
    assert membership([1.0, 1.0], [1.0, 1.0]).auc == 0.5
    with pytest.raises(InputError, match="membership of 1"):
        membership([1.0], [1.0, 2.0])


def test_the_interval_of_guessing_holds_a_half() -> None:
    drawn = np.random.default_rng(2)
    held = 0
    for _ in range(200):
        found = membership(drawn.normal(size=60), drawn.normal(size=50))
        held += found.low <= 0.5 <= found.high
    assert held >= 200 * 0.95 - 4 * math.sqrt(200 * 0.95 * 0.05)


def test_secrets_are_sentences_of_their_own(secrets: Store) -> None:
    assert secrets.splits[IN] == range(2)
    assert secrets.splits[OUT] == range(2, 4)
    texts = {secrets.utterance(row).text for row in range(4 * TAKES)}
    assert len(texts) == 4
    assert len({secret_sentence(stream(1, number)) for number in range(200)}) == 200
    with pytest.raises(InputError, match="language=sw"):
        secret_store(Path("nowhere"), count=4, language="sw", seed=1)
    assert SecretSpeaker("a", IN, "en", "ba", 1).split == IN


def test_what_is_left_of_the_sound() -> None:
    samples = np.arange(1, 3001, dtype=np.int16)
    assert not half_silenced(samples)[1500:].any()
    assert np.array_equal(half_silenced(samples)[:1500], samples[:1500])
    assert len(played_fast(samples)) == 2000
    assert samples[0] == 1


def fresh() -> Recogniser:
    family = find_family(DEFAULT)
    options = {"layers": 1, "width": 32, "heads": 2, "dropout": 0.0, "layer_drop": 0.0}
    settings = family.Settings(tokens=TOKENS.size + 1, **options)
    return Recogniser(family, settings, TOKENS, family.init(settings, generator=torch_stream(1, "init")), "en")


def memorised(start: Recogniser, store: Store, row: int, *, steps: int) -> Recogniser:
    """The model after it has learned one utterance by heart."""
    text = store.utterance(row).text
    assert text is not None
    parameters = {name: value.clone().requires_grad_() for name, value in start.parameters.items()}
    recogniser = replace(start, parameters=parameters)
    optimiser = torch.optim.Adam(parameters.values(), lr=3e-3)
    samples = store.samples(row)
    recordings = pack_waveforms([samples, half_silenced(samples)], [TOKENS.encode(text)] * 2)
    for _ in range(steps):
        optimiser.zero_grad()
        compute_loss(recogniser, recordings).backward()
        optimiser.step()
    return replace(start, parameters={name: value.detach() for name, value in parameters.items()})


def test_a_sentence_that_was_learned_by_heart_is_exposed_and_others_are_not(secrets: Store) -> None:
    start = fresh()
    after = memorised(start, secrets, 0, steps=40)
    (own,) = exposures(start, after, secrets, np.array([0]), how="half silenced", seed=1)
    assert own == 6.0  # log2 of 64: the first of all
    unmoved = exposures(start, start, secrets, np.array([0, TAKES]), how="played fast", seed=1)
    # Everything is tied: as much as a rank in the middle.
    assert unmoved == pytest.approx([6 - math.log2(1 + 63 / 2)] * 2)
    found = exposure([own, own, own], [1.0, 1.2, 0.8], how="half silenced")
    assert found.low > 4
    assert found.most == 6.0


def test_a_recipe_is_attacked_with_secrets_among_its_people(place: Path, secrets: Store) -> None:
    recipe = load_recipe(str(place / "tones.yaml"))
    around = RunContext(place / "runs", place / "stores", torch.device("cpu"))
    found = audit_speech(recipe, secrets=4, rounds=1, seed=1, context=around)
    assert found.membership is not None
    assert (found.membership.members, found.membership.others) == (18, 12)
    assert [one.how for one in found.exposures] == list(HOW)
    lines = format_attacks(found.as_json())
    assert len(lines) == 3
    assert lines[0].startswith("participants are told from non-participants")
    with pytest.raises(InputError, match="secrets=2"):
        audit_speech(recipe, secrets=2, rounds=1, seed=1, context=around)


def test_an_encoder_has_members_and_nothing_to_expose(place: Path) -> None:
    recipe = load_recipe(str(place / "tones.yaml"), ["model={family: cpc, size: tiny, ahead: 6, candidates: 16}"])
    around = RunContext(place / "runs", place / "stores", torch.device("cpu"))
    found = audit_speech(recipe, secrets=4, rounds=1, seed=1, context=around)
    assert found.membership is not None
    assert found.exposures == ()
    assert "write no text" in found.missing["exposure"]
    assert format_attacks(found.as_json())[-1].startswith("exposure: not tried")
