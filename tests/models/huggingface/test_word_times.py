"""When words were said. Oracle: transformers' own token times, from the attention of its own decoding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

from tests.models.huggingface.tiny_models import write_tiny_model  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers.models.whisper.generation_whisper import _dynamic_time_warping  # noqa: E402

from sottovoce.base.seeds import stream  # noqa: E402
from sottovoce.data.audio.waveforms import pad_waveforms  # noqa: E402
from sottovoce.data.corpora.corpus import SAMPLE_RATE  # noqa: E402
from sottovoce.data.text.pretrained_tokens import PretrainedTokens  # noqa: E402
from sottovoce.evaluation.recognise import search_timed_texts  # noqa: E402
from sottovoce.evaluation.transcribe import transcribe_files  # noqa: E402
from sottovoce.evaluation.transcripts import Transcript  # noqa: E402
from sottovoce.models.attention_search import GREEDY  # noqa: E402
from sottovoce.models.ctc import TokenSpan, join_words  # noqa: E402
from sottovoce.models.decoding import Hypothesis  # noqa: E402
from sottovoce.models.huggingface import family  # noqa: E402
from sottovoce.models.huggingface.family import FAMILY  # noqa: E402
from sottovoce.models.huggingface.settings import Options  # noqa: E402
from sottovoce.models.huggingface.word_times import explain_untimed, find_first_frames  # noqa: E402
from sottovoce.models.recogniser import Recogniser  # noqa: E402

HEADS = [[0, 1], [1, 0], [1, 1]]
LENGTHS = (40_000, 48_077)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads that follow the text, as the real ones have."""
    folder = write_tiny_model("whisper", tmp_path_factory.mktemp("whisper"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alignment_heads": HEADS}))
    return folder


def recogniser_of(folder: Path, **options: Any) -> Recogniser:
    chosen = Options(source=str(folder), **options)
    tokens = family.own_tokens(chosen, "en")
    assert tokens is not None
    settings = chosen.settings(tokens=tokens.size + 1)
    return Recogniser(FAMILY, settings, tokens, FAMILY.init(settings, generator=torch.Generator()), "en")


def test_token_times_are_those_of_transformers(whisper: Path) -> None:
    recogniser = recogniser_of(whisper)
    recordings = pad_waveforms([stream(1, "noise", n).normal(0, 3_000, n).astype(np.int16) for n in LENGTHS])
    features = family.extract_features(recordings, settings=recogniser.settings, dtype=torch.float32)
    texts = search_timed_texts(recogniser, recordings, GREEDY)
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(whisper, attn_implementation="eager")
    for number, text in enumerate(texts):
        assert len(text.tokens) > 5
        generation = transformers.GenerationConfig(
            decoder_start_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            max_new_tokens=len(text.tokens) + 1,  # theirs has no attention of the last one
            return_dict_in_generate=True,
            output_attentions=True,
        )
        found = transformers.GenerationMixin.generate(
            theirs,
            input_features=features.features_UTF[number : number + 1].mT,
            decoder_input_ids=torch.tensor([[1]]),
            generation_config=generation,
        )
        assert found.sequences[0, 1 : 1 + len(text.tokens)].tolist() == [token - 1 for token in text.tokens]
        hops = -(-LENGTHS[number] // 160)
        times = theirs._extract_token_timestamps(found, HEADS, num_frames=hops, num_input_ids=1)
        assert text.frames == (times[0, 1 : 1 + len(text.tokens)] / 0.02).round().int().tolist()
        assert len(set(text.frames)) > 3


@pytest.mark.parametrize("rounded", [False, True])  # many equal sums
def test_paths_are_those_of_transformers(rounded: bool) -> None:
    rng = stream(2, "paths")
    for _ in range(100):
        matrix = rng.normal(size=(rng.integers(1, 9), rng.integers(1, 30)))
        matrix = np.round(matrix) if rounded else matrix
        tokens, frames = _dynamic_time_warping(-matrix)
        begins = np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)
        assert find_first_frames(matrix) == frames[begins].tolist()


def test_silence_before_a_recording_is_taken_off_its_times(
    whisper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is found a second into what the model gets, half a second of it silence."""
    soundfile.write(tmp_path / "a.wav", stream(1, "noise").normal(0, 0.1, 2 * SAMPLE_RATE), SAMPLE_RATE)
    recogniser = recogniser_of(whisper, silence_seconds=0.5)
    word = recogniser.tokens.encode("ab")
    monkeypatch.setattr(
        "sottovoce.evaluation.transcribe.search_timed_texts",
        lambda _, recordings, __: [Hypothesis(word[:-1], [50, 60], 0.0)] * len(recordings.lengths_U),
    )
    (found,) = transcribe_files(recogniser, [tmp_path / "a.wav"])
    assert isinstance(found, Transcript)
    assert [(one.text, one.start, one.end) for one in found.words] == [("ab", 0.5, 0.72)]


def test_ctc_gives_times_by_its_frames(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """By default, of a long file in windows too: what a stitched path of best tokens says, silence taken off."""
    soundfile.write(tmp_path / "a.wav", stream(1, "noise").normal(0, 0.1, 3 * SAMPLE_RATE), SAMPLE_RATE)
    plain, padded = (recogniser_of(folders("hubert"), silence_seconds=seconds) for seconds in (0.0, 0.5))
    found = [
        next(transcribe_files(one, [tmp_path / "a.wav"], window_seconds=window))
        for one in (plain, padded)
        for window in (30.0, 1.5)
    ]
    for one in found:
        assert isinstance(one, Transcript)
        assert one.untimed is None
        assert one.words
        times = [time for word in one.words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] <= 3.0


def test_a_model_without_such_heads_says_so(folders: Callable[[str], Path], tmp_path: Path) -> None:
    recogniser = recogniser_of(folders("moonshine"))
    why = "models of model_type=moonshine without alignment_heads do not say when a word was said"
    assert explain_untimed(recogniser.settings) == why
    soundfile.write(tmp_path / "a.wav", stream(1, "noise").normal(0, 0.1, 2 * SAMPLE_RATE), SAMPLE_RATE)
    (found,) = transcribe_files(recogniser, [tmp_path / "a.wav"])
    assert isinstance(found, Transcript)
    assert found.as_json()["untimed"] == why
    assert all(word.keys() == {"text"} for word in found.as_json()["words"])


def test_pieces_that_are_bytes_are_written_as_letters() -> None:
    """A tokenizer as Whisper's: é is two tokens, neither of which is a letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    files = (("tokenizer.json", own.to_str()), ("tokenizer_config.json", '{"tokenizer_class": "TokenizersBackend"}'))
    tokens = PretrainedTokens(files, outputs=len(alphabet), language="fr", end=0)
    ids = tokens.encode("un Café,")[:-1]
    assert len(ids) == 9
    spans = [TokenSpan(token, place, place + 1) for place, token in enumerate(ids)]
    words = join_words(spans, tokens.pieces(), spell=tokens.spell)
    assert [(word.text, word.start, word.end) for word in words] == [("un", 0, 2), ("Café,", 3, 9)]


def test_tokens_without_times_are_spread_over_what_was_spoken(tmp_path: Path) -> None:
    """Not over the silence around it: words behind a recording's end would be dropped."""
    recogniser = recogniser_of(write_tiny_model("moonshine", tmp_path / "moonshine"), silence_seconds=1.0)
    recordings = pad_waveforms([stream(1, "noise").normal(0, 3_000, SAMPLE_RATE).astype(np.int16)])
    features = family.extract_features(recordings, settings=recogniser.settings, dtype=torch.float32)
    ((text,),) = family.search(recogniser.parameters, features, settings=recogniser.settings, how=GREEDY)
    lead, frame_samples = family.lead_frames(recogniser.settings), family.samples_per_frame(recogniser.settings)
    assert len(text.frames) > 1
    assert text.frames == sorted(text.frames)
    assert lead <= text.frames[0]
    assert text.frames[-1] < lead + SAMPLE_RATE / frame_samples
