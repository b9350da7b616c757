import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sottovoce.base.errors import InputError
from sottovoce.data.corpora import commonvoice
from sottovoce.data.corpora.corpus import ProblemKind
from sottovoce.data.store import Store, pack_corpus
from sottovoce.data.text.normalisation import foreign_characters, normalise_text
from sottovoce.data.text.spelling import Spelling, spell_as_gao

WriteTone = Callable[[Path], Path]

# The headers of real releases: 6.1, 8.0 and 17.0.
HEADERS = {
    "6.1": "client_id path sentence up_votes down_votes age gender accent locale segment",
    "8.0": "client_id path sentence up_votes down_votes age gender accents locale segment",
    "17.0": "client_id path sentence_id sentence sentence_domain up_votes down_votes age gender accents variant locale "
    "segment",
}


def write_table(
    path: Path, header: str, rows: list[dict[str, str]], *, end: str = "\n", encoding: str = "utf-8"
) -> None:
    columns = header.split()
    lines = ["\t".join(columns), *("\t".join(row.get(column, "") for column in columns) for row in rows)]
    path.write_bytes("".join(line + end for line in lines).encode(encoding))


@pytest.fixture
def release(tmp_path: Path, write_tone: WriteTone) -> Path:
    for name in "abcd":
        write_tone(tmp_path / "cv-corpus" / "en" / "clips" / f"{name}.mp3")
    return tmp_path / "cv-corpus"


def row(user: str, name: str, sentence: str = "Hello", **cells: str) -> dict[str, str]:
    # A release has `accent` or `accents`; the table takes the one of its header.
    return {"client_id": user, "path": f"{name}.mp3", "sentence": sentence, "locale": "en", **cells}


@pytest.mark.parametrize("version", HEADERS)
@pytest.mark.parametrize(("end", "encoding"), [("\n", "utf-8"), ("\r\n", "utf-8-sig")])
def test_reads_every_release(release: Path, version: str, end: str, encoding: str) -> None:
    man = {"6.1": "male", "8.0": "male", "17.0": "male_masculine"}[version]
    facts = {"gender": man, "age": "fifties", "accent": "scotland", "accents": "scotland"}
    rows = [row("u2", "b", '"Open quote, she said', **facts), row("u2", "a"), row("u1", "c", "“Don’t!”")]
    write_table(release / "en" / "train.tsv", HEADERS[version], rows, end=end, encoding=encoding)
    corpus = commonvoice.read_commonvoice(release / "en")
    assert (corpus.language, [s.name for s in corpus.speakers]) == ("en", ["u1", "u2"])
    assert [clip.id for clip in corpus.speakers[1].clips] == ["a", "b"]
    assert corpus.speakers[1].metadata == {"gender": "male", "age": "fifties", "accent": "scotland"}
    texts = [u.text for speaker in corpus.speakers for u in corpus.render(speaker).utterances]
    assert texts == ["don't", "hello", "open quote she said"]
    assert not corpus.problems.counts


def test_columns_may_come_in_any_order_and_be_missing_or_more(release: Path) -> None:
    write_table(release / "en" / "dev.tsv", "mood sentence path client_id", [row("u", "a", mood="fine")])
    (speaker,) = commonvoice.read_commonvoice(release / "en").speakers
    assert (speaker.name, speaker.split, speaker.clips[0].text, speaker.metadata) == ("u", "dev", "Hello", {})


def test_most_rows_decide_what_is_known_of_a_person(release: Path) -> None:
    rows = [row("u", "a", age="teens"), row("u", "b", age="forties"), row("u", "c", age="forties"), row("u", "d")]
    write_table(release / "en" / "train.tsv", HEADERS["6.1"], rows)
    assert commonvoice.read_commonvoice(release / "en").speakers[0].metadata == {"age": "forties"}


def test_standard_splits_unless_only_validated_or_others_are_named(release: Path) -> None:
    for name, clip in [("validated", "a"), ("other", "d")]:
        write_table(release / "en" / f"{name}.tsv", HEADERS["6.1"], [row("u", clip)])
    assert [s.split for s in commonvoice.read_commonvoice(release / "en").speakers] == ["validated"]
    write_table(release / "en" / "train.tsv", HEADERS["6.1"], [row("u", "b")])
    write_table(release / "en" / "test.tsv", HEADERS["6.1"], [row("w", "c")])
    assert [s.split for s in commonvoice.read_commonvoice(release / "en").speakers] == ["test", "train"]
    assert [s.split for s in commonvoice.read_commonvoice(release / "en", splits=["other"]).speakers] == ["other"]
    with pytest.raises(InputError, match=r"split='dev' .* expected one of other, test, train, validated"):
        commonvoice.read_commonvoice(release / "en", splits=["dev"])


def test_finds_the_language(release: Path, write_tone: WriteTone) -> None:
    write_table(release / "en" / "train.tsv", HEADERS["6.1"], [row("u", "a")])
    assert commonvoice.read_commonvoice(release).language == "en"
    write_tone(release / "ga-IE" / "clips" / "a.mp3")
    write_table(release / "ga-IE" / "train.tsv", "client_id path sentence", [row("u", "a")])
    assert commonvoice.read_commonvoice(release, language="ga-IE").language == "ga-IE"
    assert commonvoice.read_commonvoice(release / "ga-IE").language == "ga-IE"  # no locale column: the folder's name
    with pytest.raises(InputError, match="language=None; expected one of en, ga-IE"):
        commonvoice.read_commonvoice(release)
    with pytest.raises(InputError, match=r"expected <language>/\{train,dev,test,validated\}.tsv .* found a.mp3"):
        commonvoice.read_commonvoice(release / "ga-IE" / "clips")


def test_bad_rows_are_counted(release: Path) -> None:
    rows = [row("u", "a"), row("u", "a"), row("", "b"), row("u", "b", " "), {}, row("u", "../../x"), row("w", "gone")]
    write_table(release / "en" / "train.tsv", HEADERS["8.0"], rows)
    corpus = commonvoice.read_commonvoice(release / "en")
    assert corpus.problems.counts == {
        ProblemKind.DUPLICATE_ROW: 1,
        ProblemKind.EMPTY_ROW: 2,
        ProblemKind.MISSING_TEXT: 1,
        ProblemKind.PATH_ESCAPES: 1,
    }
    assert corpus.problems.examples[ProblemKind.DUPLICATE_ROW][0].where.endswith("train.tsv:3")
    assert [p.kind for p in corpus.render(corpus.speakers[1]).problems] == [ProblemKind.MISSING_AUDIO]


def test_a_clip_in_two_splits_stays_in_the_first_and_its_user_in_both_is_told(release: Path) -> None:
    write_table(release / "en" / "train.tsv", HEADERS["8.0"], [row("u", "a")])
    write_table(release / "en" / "test.tsv", HEADERS["8.0"], [row("u", "a"), row("u", "b")])
    corpus = commonvoice.read_commonvoice(release / "en")
    assert {s.split: [clip.id for clip in s.clips] for s in corpus.speakers} == {"test": ["b"], "train": ["a"]}
    assert corpus.problems.counts == {ProblemKind.DUPLICATE_ROW: 1, ProblemKind.SPLIT_OVERLAP: 1}


def test_as_released_nobody_is_left_out_for_a_digit(release: Path) -> None:
    """Skipping what no token writes keeps the utterance, and so the speaker whose every sentence has some of it."""
    rows = [row("u1", "a", "Route 66, isn’t it?"), row("u2", "b", "So well-known...indeed"), row("u3", "c", "1984")]
    write_table(release / "en" / "train.tsv", HEADERS["17.0"], rows)
    own, released = (commonvoice.read_commonvoice(release, as_released=choice) for choice in (False, True))
    rendered = [released.render(speaker) for speaker in released.speakers]
    assert [[u.text for u in found.utterances] for found in rendered] == [
        ["route isn't it"],
        ["so well-knownindeed"],
        [],
    ]
    assert [
        (p.kind, p.detail) for found in rendered for p in found.problems if p.kind is not ProblemKind.RESAMPLED
    ] == [
        (ProblemKind.UNWRITTEN, "6"),
        (ProblemKind.EMPTY_TEXT, ""),
    ]
    kept = [[u.text for u in own.render(speaker).utterances] for speaker in own.speakers]
    assert kept == [[], ["so well-known indeed"], []]


def test_spelled_as_gao_hyphens_part_words_and_digits_stay(release: Path) -> None:
    sentences = {"a": "Peut-être 66", "b": "Est-ce l'été ?", "c": "Bonjour", "d": "ça"}
    rows = [row("u", clip, sentence) for clip, sentence in sentences.items()]
    write_table(release / "en" / "train.tsv", HEADERS["6.1"], rows)
    own, theirs = (
        commonvoice.read_commonvoice(release / "en", language="fr", spelling=spelling)
        for spelling in (Spelling.OURS, Spelling.GAO)
    )
    (rendered,) = (theirs.render(speaker) for speaker in theirs.speakers)
    assert [utterance.text for utterance in rendered.utterances] == ["peut être 66", "est ce l'été", "bonjour"]
    assert [
        (problem.kind, problem.detail) for problem in rendered.problems if problem.kind is not ProblemKind.RESAMPLED
    ] == [
        (ProblemKind.LEFT_OUT_BY_OURS, "6"),
        (ProblemKind.SPELLED_OTHERWISE, "-"),
        (ProblemKind.SHORT_TEXT, ""),
    ]
    kept = [utterance.text for speaker in own.speakers for utterance in own.render(speaker).utterances]
    assert kept == ["est-ce l'été", "bonjour", "ça"]


def test_two_spellings_at_once_and_unknown_languages_are_refused_before_anything_is_read(release: Path) -> None:
    write_table(release / "en" / "train.tsv", HEADERS["6.1"], [row("u", "a")])
    with pytest.raises(InputError, match="spelling=gao2022 with as_released, which is pelikan2025"):
        commonvoice.read_commonvoice(release, spelling=Spelling.GAO, as_released=True)
    with pytest.raises(InputError, match="spelling=gao2022 with language=de"):
        commonvoice.read_commonvoice(release / "en", language="de", spelling=Spelling.GAO)


@pytest.mark.skipif("SOTTOVOCE_DATA" not in os.environ, reason="SOTTOVOCE_DATA names no folder with real speech")
def test_real_french_texts_that_differ_between_our_rules_and_gaos(tmp_path: Path) -> None:
    """What `prepare --spelling gao2022` prints of real clips, counted here by hand from both rules."""
    folder = Path(os.environ["SOTTOVOCE_DATA"]) / "commonvoice-fr-mini" / "cv-corpus-6.1" / "fr"
    corpus = commonvoice.read_commonvoice(folder, spelling=Spelling.GAO)
    pack_corpus(corpus, tmp_path / "store", workers=1)
    store = Store(tmp_path / "store")
    original = [store.utterance(row).raw_text or "" for row in range(store.utterance_count)]
    ours = [normalise_text(text, "fr") for text in original]
    differ = sum(text != spell_as_gao(raw, "fr") for raw, text in zip(original, ours, strict=True))
    left_out = sum(bool(foreign_characters(text, "fr")) for text in ours)
    assert corpus.problems.counts[ProblemKind.LEFT_OUT_BY_OURS] == left_out
    assert corpus.problems.counts[ProblemKind.SPELLED_OTHERWISE] + left_out == differ > 0
    assert store.spelling == store.header["spelling"] == "gao2022"
