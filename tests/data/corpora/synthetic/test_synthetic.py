import hashlib
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import SAMPLE_RATE, RenderedSpeaker
from sottovoce.data.corpora.synthetic import PRESETS, read_synthetic, render_speaker
from sottovoce.data.text.normalisation import foreign_characters, normalise_text

pytest.importorskip("espeakng_loader", reason="needs the extra `demo`")


def fingerprint(rendered: RenderedSpeaker) -> str:
    digest = hashlib.sha256(repr((rendered.name, rendered.split, sorted(rendered.metadata.items()))).encode())
    for utterance in rendered.utterances:
        digest.update(f"{utterance.id} {utterance.text} {utterance.raw_text}".encode() + utterance.samples.tobytes())
    return digest.hexdigest()


def seconds(rendered: RenderedSpeaker) -> list[float]:
    return [len(utterance.samples) / SAMPLE_RATE for utterance in rendered.utterances]


def test_same_seed_same_bytes_in_any_order_and_any_process() -> None:
    speakers = read_synthetic("crowd", users=6, hours=6 * 8 / 3600, seed=5).speakers
    here = {speaker.name: fingerprint(render_speaker(speaker)) for speaker in reversed(speakers)}
    # Workers that are themselves started by a pool, as the store's are.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        there = {rendered.name: fingerprint(rendered) for rendered in pool.map(render_speaker, speakers)}
    assert here == there
    assert len(set(here.values())) == len(speakers)
    other_seed = read_synthetic("crowd", users=6, hours=6 * 8 / 3600, seed=6).speakers
    assert not set(here.values()) & {fingerprint(render_speaker(speaker)) for speaker in other_seed[:2]}


def test_a_small_crowd_is_the_beginning_of_a_large_one() -> None:
    small, large = (read_synthetic("crowd", users=users, seed=5).speakers for users in (20, 60))
    known = {speaker.name: (speaker.split, speaker.voice, speaker.room, speaker.seed) for speaker in large}
    assert all(known[speaker.name] == (speaker.split, speaker.voice, speaker.room, speaker.seed) for speaker in small)


def test_saying_more_begins_with_saying_less() -> None:
    little, much = (
        render_speaker(read_synthetic("digits", users=3, hours=3 * each / 3600, seed=2).speakers[0])
        for each in (4.0, 12.0)
    )
    assert len(little.utterances) < len(much.utterances)
    for one, two in zip(little.utterances, much.utterances, strict=False):
        assert one.text == two.text
        assert np.array_equal(one.samples, two.samples)


def test_listing_is_sorted_disjoint_and_picklable() -> None:
    corpus = read_synthetic("crowd", users=50, seed=1)
    order = [(speaker.split, speaker.name) for speaker in corpus.speakers]
    assert order == sorted(order)
    assert len({speaker.name for speaker in corpus.speakers}) == 50
    assert {split: sum(s == split for s, _ in order) for split in ("train", "dev", "test")} == {
        "train": 40,
        "dev": 5,
        "test": 5,
    }
    copy = pickle.loads(pickle.dumps(corpus))
    assert copy.speakers == corpus.speakers
    assert copy.render is corpus.render
    assert sum(speaker.seconds for speaker in corpus.speakers) == pytest.approx(50 * PRESETS["crowd"].mean_seconds)


@pytest.mark.parametrize(
    ("task", "language", "low", "high"),
    [
        ("crowd", "en", 1.0, 9.0),
        ("crowd", "fr", 1.0, 9.0),
        ("crowd", "it", 1.0, 9.0),
        ("studio", "de", 6.0, 16.0),
        ("digits", "en", 1.0, 9.0),
        ("digits-noise", "en", 1.0, 9.0),
        ("digits-studio", "fr", 2.0, 16.0),
        ("digits-crowd", "it", 1.0, 9.0),
    ],
)
def test_every_task_sounds_as_described(task: str, language: str, low: float, high: float) -> None:
    corpus = read_synthetic(task, users=4, hours=4 * 25 / 3600, seed=3, language=language)
    for rendered in map(corpus.render, corpus.speakers):
        assert rendered.metadata["gender"] in ("female", "male")
        assert rendered.metadata["domain"] == task
        assert all(low <= length <= high for length in seconds(rendered))
        for utterance in rendered.utterances:
            assert utterance.text == normalise_text(utterance.raw_text or "", language)
            assert utterance.text
            assert not foreign_characters(utterance.text, language)
            samples = utterance.samples
            assert samples.dtype == np.int16
            loudness = samples[: len(samples) // 160 * 160].reshape(-1, 160).astype(float).std(axis=1)
            # It can be heard, and is not clipped; speech sets in within three quarters of a second.
            assert loudness.max() > 100
            assert np.abs(samples.astype(int)).max() < 32_000
            assert np.argmax(loudness > 0.2 * loudness.max()) < 75
    spoken = sum(sum(seconds(rendered)) for rendered in map(corpus.render, corpus.speakers))
    assert spoken == pytest.approx(100, rel=0.3)


def test_studio_is_cleaner_and_longer_than_the_crowd() -> None:
    def silence_db(task: str) -> float:
        """How far the quietest tenth of 10 ms frames lies below the loudest."""
        gaps = []
        for speaker in read_synthetic(task, users=6, hours=6 * 12 / 3600, seed=4).speakers:
            for utterance in render_speaker(speaker).utterances:
                frames = utterance.samples[: len(utterance.samples) // 160 * 160].reshape(-1, 160).astype(float)
                low, high = np.percentile(20 * np.log10(frames.std(axis=1) + 1e-3), [10, 90])
                gaps.append(high - low)
        return float(np.mean(gaps))

    assert silence_db("studio") > silence_db("crowd") + 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"task": "choir", "users": 5},
            "task='choir': expected one of crowd, studio, digits, digits-noise, digits-st",
        ),
        ({"task": "crowd", "users": 0}, "users=0: expected at least 1"),
        ({"task": "crowd", "users": 5, "hours": 0}, "hours=0: expected a positive number"),
        ({"task": "crowd", "users": 5, "hours": float("nan")}, "hours=nan: expected a positive number"),
        ({"task": "crowd", "users": 5, "hours": 500}, "hours=500, users=5: expected at most 4 hours per user"),
        ({"task": "crowd", "users": 5, "hours": 1e-9}, "hours=1e-09, users=5: expected at least 0.00139 hours"),
        ({"task": "crowd", "users": 10**30}, "expected at least 1, and at most 1,000,000"),
        ({"task": "crowd", "users": 5, "language": "la"}, "language='la': the synthetic crowd speaks en, fr, de, it"),
    ],
)
def test_impossible_crowds(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_synthetic(**{"seed": 1, **arguments})  # type: ignore[arg-type]
