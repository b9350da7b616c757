"""From a store to error rates: who is counted, who is left out, and how people are grouped."""

from dataclasses import replace
from pathlib import Path

import pytest

from sottovoce.base.errors import InputError
from sottovoce.data.store import Store
from sottovoce.data.text.normalisation import Normaliser, NormaliserName
from sottovoce.evaluation.score import evaluate_recogniser, score_hypotheses, select_utterances
from sottovoce.evaluation.tables import format_evaluation_notes
from sottovoce.models.recogniser import Recogniser
from sottovoce.report.evaluation_figure import draw_evaluation


def test_select_counts_what_it_leaves_out(store: Store) -> None:
    chosen = select_utterances(store, longest_seconds=2.5)
    assert chosen.references == ("hello there", "good day", "one two three", "yes", "far too long", "hello again")
    assert (chosen.without_text, chosen.too_long) == (1, 1)
    assert select_utterances(store, split="dev").references == ("hello there", "good day")
    assert select_utterances(store, split="test").ids == ("bob-0", "bob-2", "cyd-0", "cyd-1")


def test_select_mistakes(store: Store) -> None:
    with pytest.raises(InputError, match=r"split='eval' is not in .*: expected one of dev, test, train"):
        select_utterances(store, split="eval")
    with pytest.raises(
        InputError, match=r"nothing to score in .*:dev: of 2 utterances 0 have no text and 2 are longer"
    ):
        select_utterances(store, split="dev", longest_seconds=0.1)


def test_score_by_hand(store: Store) -> None:
    chosen = select_utterances(store)
    hypotheses = ["hello", "good day", "one to three", "yes", "far too long", "yes no", "hello again"]
    result = score_hypotheses(store, chosen, hypotheses)
    # "there" lost, "two" heard as "to", "yes" put in: 3 errors in 2+2+3+1+3+1+2 words.
    assert (result.words.length, result.words.substitutions) == (14, 1)
    assert (result.words.deletions, result.words.insertions) == (1, 1)
    assert result.wer == 3 / 14
    # " there", the w of "two" and "yes ": 6 + 1 + 4 characters of 11+8+13+3+12+2+11.
    assert result.cer == 11 / 60
    assert result.splits == ("dev", "test", "train")

    # Ada is in two splits and one person; her 3 utterances have 6 words.
    assert result.speakers == ("ada", "bob", "cyd")
    assert result.speaker_counts_S4.tolist() == [[6, 0, 1, 0], [4, 1, 0, 0], [4, 0, 0, 1]]
    assert result.spread.mean == pytest.approx((1 / 6 + 1 / 4 + 1 / 4) / 3)
    assert {fact: [group.name for group in groups] for fact, groups in result.groups.items()} == {
        "gender": ["female", "male", "unknown"],
        "age": ["old", "unknown"],
    }
    for groups in result.groups.values():
        assert sum(group.words.length for group in groups) == result.words.length
        assert sum(group.words.errors for group in groups) == result.words.errors
        assert sum(group.speakers for group in groups) == 3
    assert result.interval is None, "three speakers are too few"
    assert result.as_json() == score_hypotheses(store, chosen, hypotheses).as_json()


def test_rates_name_the_rules_of_a_store_that_is_not_spelled_by_ours(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "spelling", "gao2022")
    told = score_hypotheses(store, select_utterances(store, split="dev"), ["hello there", "good way"])
    assert told.as_json()["normalisation"] == {"name": "gao2022", "version": 1}
    assert "texts normalised by gao2022 1" in format_evaluation_notes(told)


def test_other_rules_spell_references_as_the_corpus_wrote_them_and_hypotheses(store: Store) -> None:
    """With rules that let a text begin with its number of letters, every utterance is one word longer."""
    chosen, heard = select_utterances(store, split="dev"), ["hello there", "good way"]
    rules = Normaliser(NormaliserName.WHISPER_BASIC, "0.1", lambda text: f"{len(text)} {text}")
    told = score_hypotheses(store, chosen, heard, normaliser=rules)
    assert (told.words.length, told.words.errors) == (6, 1)
    assert told.as_json()["normalisation"] == {"name": "whisper-basic", "version": "0.1"}
    assert "texts normalised by whisper-basic 0.1" in format_evaluation_notes(told)
    ours = score_hypotheses(store, chosen, heard)
    assert (ours.words.length, ours.speech) == (4, told.speech), "the same speech, by other rules"
    assert not any("normalised" in line for line in format_evaluation_notes(ours))
    nothing = Normaliser(NormaliserName.WHISPER_BASIC, "0.1", lambda text: "")
    with pytest.raises(InputError, match=r"normaliser=whisper-basic leaves no word of 2 references"):
        score_hypotheses(store, chosen, heard, normaliser=nothing)


def test_evaluate_one_split(recogniser: Recogniser, store: Store) -> None:
    result = evaluate_recogniser(recogniser, store, split="test")
    assert (result.utterances, result.splits, result.without_text) == (4, ("test",), 1)
    assert result.audio_seconds == pytest.approx(0.5 + 0.5 * 1.74 + 2.0 + 2.74)
    assert result.wer > 0.9, "noise and an untrained model"


def test_language_must_be_the_same(recogniser: Recogniser, store: Store) -> None:
    with pytest.raises(InputError, match=r"the model writes language=fr, but store .* is in language=en"):
        evaluate_recogniser(replace(recogniser, language="fr"), store)
    evaluate_recogniser(replace(recogniser, language="en-GB"), store, split="dev")


@pytest.mark.parametrize("name", ["figure.png", "figure.svg", "figure.html"])
def test_figure(store: Store, tmp_path: Path, name: str) -> None:
    result = score_hypotheses(store, select_utterances(store), ["a [b] <c>"] * 7)
    draw_evaluation(result, tmp_path / name, title="tiny <model> on $made$")
    content = (tmp_path / name).read_bytes()
    draw_evaluation(result, tmp_path / name, title="tiny <model> on $made$")
    assert (tmp_path / name).read_bytes() == content, "the same bytes each time"
    if name.endswith("html"):
        assert b"tiny &lt;model&gt;" in content
        assert b"<svg" in content
        assert b"http-equiv" not in content


def test_figure_mistakes(store: Store, tmp_path: Path) -> None:
    result = score_hypotheses(store, select_utterances(store, split="dev"), ["", ""])
    with pytest.raises(InputError, match=r"expected a file name that ends in \.png, \.svg, \.html"):
        draw_evaluation(result, tmp_path / "figure.jpg", title="")
    with pytest.raises(InputError, match="does not exist"):
        draw_evaluation(result, tmp_path / "nowhere/figure.png", title="")
