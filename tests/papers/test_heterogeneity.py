"""Figures of stores made for the purpose, by hand; of real speech, against what is known of it."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kurtosis
from tests.papers.sounds import as_samples, noise, voice

from sottovoce.base.errors import InputError
from sottovoce.data.corpora import commonvoice, librispeech
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.store import Store, pack_corpus
from sottovoce.papers.embeddings import SPECTRUM
from sottovoce.papers.heterogeneity import excess_kurtosis, heterogeneity_json, measure_heterogeneity
from sottovoce.papers.heterogeneity_figure import draw_heterogeneity


def same(speaker):
    return speaker


def spoken(name, pitch, levels, *, split="train"):
    """A speaker with one second at each level; they differ in pitch and in the noise around them."""
    sound = voice(pitch) + noise(rms=pitch / 10_000, name=name)
    seconds = [as_samples(level * sound[i * 16_000 : (i + 1) * 16_000]) for i, level in enumerate(levels)]
    utterances = [RenderedUtterance(f"{name}-{i}", samples, "", "") for i, samples in enumerate(seconds)]
    return RenderedSpeaker(name=name, split=split, utterances=utterances)


@pytest.fixture
def store(tmp_path):
    people = [
        spoken("adalbert", 100, [0.5, 1.0], split="dev"),
        spoken("adalbert", 100, [1.5], split="train"),
        spoken("ben", 140, [1.0, 1.0, 1.0, 1.0]),
        spoken("cat", 210, [2.0]),
    ]
    pack_corpus(Corpus("sounds", "en", people, same, ProblemLog()), tmp_path / "_$tore", workers=1)
    return Store(tmp_path / "_$tore")


def test_figures_by_hand(store):
    found = measure_heterogeneity(store, embedding=SPECTRUM, seed=1)
    figures = heterogeneity_json([found], seed=1)
    json.dumps(figures, allow_nan=False)
    (one,) = figures["stores"]
    # Ann is one client of two splits. Cat spoke once: no std, and nothing to be found again.
    assert (one["clients"], one["utterances"], one["purity_clients"]) == (3, 8, 2)
    assert one["purity"] == 1
    loudness = one["measures"]["loudness"]
    assert (loudness["clients"], loudness["clients_with_std"]) == (3, 2)
    # Means: Ann 0.1·(0.5 + 1 + 1.5)/3 = 0.1, Ben 0.1, Cat 0.2, but for the noise, of a hundredth of the energy at most.
    assert loudness["mean"] == pytest.approx(0.4 / 3, rel=0.03)
    assert loudness["std_of_means"] == pytest.approx(np.std([0.1, 0.1, 0.2]), rel=0.06)
    # Stds: Ann's √(0.05²·2/3), and Ben's 0.
    assert loudness["std_of_stds"] == pytest.approx(np.std([0.1 * np.sqrt(0.25 * 2 / 3), 0]), rel=0.06)
    # Three clients, two of them alike: m4 / m2² is 3/2 whatever their distance.
    assert loudness["kurtosis_of_means"] == pytest.approx(-1.5, abs=0.01)
    assert set(figures["definitions"]) == {*one["measures"], "purity", "embedding", "statistics"}
    assert "not differentially private" in figures["note"]


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20))
def test_kurtosis_is_scipys(values):
    values = np.array(values)
    if np.ptp(values) < 1e-3:
        assert excess_kurtosis(np.zeros(3)) is None
    else:
        assert excess_kurtosis(values) == pytest.approx(kurtosis(values), rel=1e-9, abs=1e-9)


def test_limits_choose_by_seed(store):
    everything = measure_heterogeneity(store, embedding=SPECTRUM, seed=1)
    some = measure_heterogeneity(store, embedding=SPECTRUM, seed=1, users=2, utterances=1)
    assert (some.clients, some.clients_in_store, len(some.client_U)) == (2, 3, 2)
    # What is heard of a few is what was heard of them among all.
    assert all(any(np.array_equal(row, other) for other in everything.values_UM) for row in some.values_UM)
    again = measure_heterogeneity(store, embedding=SPECTRUM, seed=1, users=2, utterances=1)
    assert np.array_equal(again.values_UM, some.values_UM)
    choices = {
        measure_heterogeneity(store, embedding=SPECTRUM, seed=s, users=1, utterances=1).values_UM.tobytes()
        for s in range(9)
    }
    assert len(choices) > 1
    with pytest.raises(InputError, match="users=0: expected at least 1"):
        measure_heterogeneity(store, embedding=SPECTRUM, seed=1, users=0)


def test_one_client_alone_has_no_spread(store):
    (one,) = heterogeneity_json(
        [measure_heterogeneity(store, embedding=SPECTRUM, seed=1, users=1, utterances=1)], seed=1
    )["stores"]
    assert one["purity"] is None
    assert [one["measures"]["loudness"][key] for key in ("std_of_means", "kurtosis_of_means", "std_of_stds")] == [
        None
    ] * 3


def test_the_page_stands_alone_and_says_that_it_is_not_private(store, tmp_path):
    found = [measure_heterogeneity(store, embedding=SPECTRUM, seed=1)] * 2
    figures = heterogeneity_json(found, seed=1)
    for name in ("a.svg", "b.svg", "a.html"):
        draw_heterogeneity(found, figures, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    page = (tmp_path / "a.html").read_text()
    assert "not differentially private" in page
    assert "_$tore" in page
    assert "adalbert" not in page[page.index("<table") :]
    assert 'class="total"' not in page


def test_silence_is_counted_and_not_measured(tmp_path):
    silent = RenderedSpeaker("s", "train", [RenderedUtterance("s-0", np.zeros(16_000, np.int16), "", "")])
    people = [spoken("adalbert", 100, [1.0, 1.0]), silent]
    pack_corpus(Corpus("sounds", "en", people, same, ProblemLog()), tmp_path / "store", workers=1)
    (one,) = heterogeneity_json([measure_heterogeneity(Store(tmp_path / "store"), embedding=SPECTRUM, seed=1)], seed=1)[
        "stores"
    ]
    assert [one["measures"][name]["utterances_without"] for name in ("loudness", "log_hnr", "blind_snr")] == [0, 1, 1]
    assert one["measures"]["blind_snr"]["clients"] == 1


def test_real_speech_is_as_others_measured_it(real_speech, tmp_path):
    libri = librispeech.read_librispeech(real_speech / "librispeech-mini" / "LibriSpeech", splits=["test-other"])
    french = commonvoice.read_commonvoice(real_speech / "commonvoice-fr-mini" / "cv-corpus-6.1" / "fr", language="fr")
    for corpus, name in ((libri, "libri"), (french, "french")):
        pack_corpus(corpus, tmp_path / name, workers=1)
    found = [measure_heterogeneity(Store(tmp_path / name), embedding=SPECTRUM, seed=1) for name in ("libri", "french")]
    one, other = heterogeneity_json(found, seed=1)["stores"]
    assert [(store["clients"], store["utterances"]) for store in (one, other)] == [(6, 60), (6, 50)]
    # Every recording is read aloud: it has voice in it, below full scale, neither a tone nor white noise.
    for store in (one, other):
        assert all(spread["utterances_without"] == 0 for spread in store["measures"].values())
        assert 0.005 < store["measures"]["loudness"]["mean"] < 0.2
        assert np.log(2) / np.log(6) < store["measures"]["permutation_entropy"]["mean"] < 1
        assert store["measures"]["blind_snr"]["mean"] > 3
        # Better than any one client's share of the utterances by far: people are told apart.
        assert store["purity"] > 0.8
    # As in the paper, utterances of one Common Voice client differ more among themselves.
    for name in ("loudness", "permutation_entropy", "blind_snr"):
        assert other["measures"][name]["mean_of_stds"] > one["measures"][name]["mean_of_stds"]
