import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.synthetic import espeak
from sottovoce.data.corpora.synthetic.speakers import ACCENTS

pytest.importorskip("espeakng_loader", reason="needs the extra `demo`")
HELLO = {
    "en": "Good morning everybody.",
    "fr": "Bonjour à tous.",
    "de": "Guten Morgen allerseits.",
    "it": "Buongiorno a tutti.",
}


def speak(voice: str, *texts: str, seed: int = 1) -> list[np.ndarray]:
    with espeak.open_espeak(voice, words_per_minute=170, pitch=50, pitch_range=50, seed=seed) as say:
        return [say(text) for text in texts]


@pytest.mark.parametrize(
    ("language", "accent"), [(language, accent) for language in ACCENTS for accent in ACCENTS[language]]
)
def test_every_accent_speaks(language: str, accent: str) -> None:
    (samples,) = speak(f"{accent}+f3", HELLO[language])
    assert 0.7 < len(samples) / espeak.SAMPLE_RATE < 2.5
    assert np.abs(samples.astype(int)).max() < 20_000
    # It starts at once: no leading silence of a tenth of a second.
    assert np.abs(samples[: espeak.SAMPLE_RATE // 10].astype(int)).max() > 100


def test_samples_do_not_depend_on_what_was_said_before() -> None:
    # "f3" breathes and flutters: it draws random numbers, which espeak-ng seeds from the clock.
    first = speak("en-us+f3", "One.", "Two.")
    speak("fr+klatt4", "Un mot de trop.")
    second = speak("en-us+f3", "One.", "Two.")
    assert all(np.array_equal(one, two) for one, two in zip(first, second, strict=True))
    assert not np.array_equal(speak("en-us+f3", "One.", seed=2)[0], first[0])


def test_languages_are_pronounced_by_their_own_rules() -> None:
    (english,), (german,) = speak("en-us+m1", "Die alte Katze."), speak("de+m1", "Die alte Katze.")
    assert abs(len(english) - len(german)) > 0.02 * len(german)


def test_voice_that_espeak_does_not_know() -> None:
    with pytest.raises(InputError, match=r"cannot speak as voice='xx\+f3': espeak_SetVoiceByName returned"):
        speak("xx+f3", "Hello.")


def test_a_voice_that_was_given_up_is_not_heard_in_the_next() -> None:
    (first,) = speak("en-us+f3", "One.")

    def give_up() -> None:
        with espeak.open_espeak("de+m1", words_per_minute=170, pitch=50, pitch_range=50, seed=1) as say:
            say("Zwei.")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()
    assert np.array_equal(speak("en-us+f3", "One.")[0], first)


def test_a_fork_does_not_speak_through_its_parents_process(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = speak("en-us+f3", "One.")
    _, waiting = espeak._idle[-1]
    monkeypatch.setattr(espeak, "_idle", [(os.getpid() + 1, waiting)])
    assert np.array_equal(speak("en-us+f3", "One.")[0], first)
    assert [child is waiting for _, child in espeak._idle] == [False]
    espeak._end_idle()


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(InputError, match=r"pip install 'sottovoce\[demo\]'"):
        espeak.find_espeak()


def test_missing_dictionary_or_variant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fr_dict").touch()
    loader = SimpleNamespace(get_library_path=lambda: __file__, get_data_path=lambda: str(tmp_path))
    monkeypatch.setitem(sys.modules, "espeakng_loader", loader)
    with pytest.raises(InputError, match="language='de': espeak-ng has no dictionary"):
        espeak.require_espeak("de", variants=frozenset())
    with pytest.raises(InputError, match="has no voice variant f3"):
        espeak.require_espeak("fr", variants=frozenset({"f3"}))
