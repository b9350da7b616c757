"""Exported models against ours: loaded by transformers and peft, here and where Sottovoce cannot be imported."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
peft = pytest.importorskip("peft", reason="the extra hf is not installed")

from tests.models.huggingface.test_family import noise, settings_of  # noqa: E402
from tests.models.huggingface.tiny_models import KINDS, write_tiny_model  # noqa: E402
from tests.tones import say  # noqa: E402

from sottovoce.base.errors import InputError  # noqa: E402
from sottovoce.data.audio.waveforms import Waveforms  # noqa: E402
from sottovoce.data.corpora.corpus import SAMPLE_RATE  # noqa: E402
from sottovoce.data.text.normalisation import normalise_text  # noqa: E402
from sottovoce.data.text.pretrained_tokens import read_pretrained_tokens  # noqa: E402
from sottovoce.data.text.tokens import CharacterTokens, train_sentence_pieces  # noqa: E402
from sottovoce.models.attention_search import GREEDY  # noqa: E402
from sottovoce.models.decoding import decode_greedily  # noqa: E402
from sottovoce.models.huggingface import family  # noqa: E402
from sottovoce.models.huggingface.family import FAMILY  # noqa: E402
from sottovoce.models.huggingface.folder import MODELS  # noqa: E402
from sottovoce.models.huggingface.inputs import network_inputs  # noqa: E402
from sottovoce.models.huggingface.network import call_network  # noqa: E402
from sottovoce.models.huggingface.saving import write_pretrained  # noqa: E402
from sottovoce.models.huggingface.settings import Settings  # noqa: E402
from sottovoce.models.recogniser import Recogniser, TrainedPart  # noqa: E402
from sottovoce.models.trainable import split_parameters  # noqa: E402

# float32 keeps seven digits, and sums of a few hundred numbers lose two of them.
CLOSE = 1e-5
# Features of this class agree to 1e-4.
CLOSE_FROM_SAMPLES = {"wav2vec2-bert": 1e-4}
LORA = "lora(r=2, alpha=6)"
SPECIAL = re.compile(r"<[^>]+>")  # <unk> and the like, which we leave out; untrained models write them
NO_ADAPTER = {"wavlm"}  # peft's have no effect there
NEEDS_LIBROSA = {"parakeet_ctc"}
CHARACTERS = CharacterTokens(" 'abcdefghijklmnopqrstuvwxyz")


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """All in one folder, from which they are found by their names."""
    place = tmp_path_factory.mktemp("bases")

    def base(kind: str) -> Path:
        if not (place / kind).exists():
            write_tiny_model(kind, place / kind)
        return place / kind

    return base


def trained(settings: Settings, tokens: Any) -> Recogniser:
    """A model whose trained part has moved."""
    generator = torch.Generator().manual_seed(1)
    start = FAMILY.init(settings, generator=generator)
    chosen = family.choose_part(settings)
    part = split_parameters(chosen, start, is_lora_target=family.is_lora_target, generator=generator)
    moved = {name: own + 0.05 * torch.randn(own.shape, generator=generator) for name, own in part.initial.items()}
    fixed = {name: own for name, own in part.frozen.tensors.items() if name.endswith(".lora_a")}
    whole = part.frozen.merged(moved)
    of_part = TrainedPart(moved, part.frozen.scale, "", fixed)
    return Recogniser(FAMILY, settings, tokens, whole, "en", part=of_part)


def fine_tuned(base: Path, train: str = LORA, **options: Any) -> Recogniser:
    settings = settings_of(base, train=train, **options)
    return trained(settings, read_pretrained_tokens(base, config=settings.of_model, language="en"))


def with_new_head(base: Path, train: str, tokens: Any = CHARACTERS) -> Recogniser:
    settings = replace(settings_of(base, train=train, head="ctc"), tokens=tokens.size + 1)
    return trained(settings, tokens)


def written(recogniser: Recogniser, folder: Path) -> Any:
    folder.mkdir(parents=True)
    return write_pretrained(recogniser, folder)


def own_logits(recogniser: Recogniser, inputs: dict[str, Tensor]) -> Tensor:
    decoder = {} if recogniser.settings.is_ctc else {"decoder_input_ids": torch.tensor([[1, 7, 8]])}
    with torch.no_grad():
        found: Tensor = call_network(recogniser.parameters, recogniser.settings, inputs | decoder).logits
    return found


def their_logits(model: Any, recogniser: Recogniser, inputs: dict[str, Tensor]) -> Tensor:
    decoder = {} if recogniser.settings.is_ctc else {"decoder_input_ids": torch.tensor([[1, 7, 8]])}
    with torch.no_grad():
        found: Tensor = model.eval()(**inputs, **decoder).logits
    return found


def assert_same_logits(model: Any, recogniser: Recogniser) -> None:
    one = noise(recogniser.settings).take(torch.tensor([0]))
    inputs, _, _ = network_inputs(one.features_UTF.float(), one.frames_U, recogniser.settings)
    ours = own_logits(recogniser, inputs)
    theirs = their_logits(model, recogniser, inputs)
    torch.testing.assert_close(theirs, ours, rtol=CLOSE, atol=CLOSE * float(ours.abs().max()))


def load_whole(folder: Path, recogniser: Recogniser) -> Any:
    auto = transformers.AutoModelForCTC if recogniser.settings.is_ctc else transformers.AutoModelForSpeechSeq2Seq
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


# What is written is what was trained.


@pytest.mark.parametrize("train", [LORA, "norms", "head", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_model_is_loaded_by_transformers(
    kind: str, train: str, bases: Callable[[str], Path], tmp_path: Path
) -> None:
    recogniser = fine_tuned(bases(kind), train).whole
    made = written(recogniser, tmp_path / "out")
    assert (made.library, made.base, made.is_whole) == ("transformers", kind, True)
    assert_same_logits(load_whole(tmp_path / "out", recogniser), recogniser)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["model_type"]) == ("float32", recogniser.settings.kind)
    assert (tmp_path / "out" / "generation_config.json").exists() is not recogniser.settings.is_ctc or (
        kind == "parakeet_ctc"  # whose CTC is called generation
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = recogniser.tokens.encode("a few words")
    assert normalise_text(tokenizer.decode(recogniser.tokens.to_theirs(ids), skip_special_tokens=True), "en")
    if kind not in NEEDS_LIBROSA or find_spec("librosa"):
        transformers.AutoProcessor.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("train", [LORA, "lora(r=2, factors=b)", "lora(r=3, targets=q_proj|linear_q)"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NO_ADAPTER])
def test_an_adapter_is_loaded_by_peft(kind: str, train: str, bases: Callable[[str], Path], tmp_path: Path) -> None:
    recogniser = fine_tuned(bases(kind), train)
    made = written(recogniser, tmp_path / "out")
    assert (made.library, made.base, made.is_whole) == ("peft", kind, False)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted({name.split(".")[-2] for name in recogniser.part.trained})  # type: ignore[union-attr]
    base = getattr(transformers, KINDS[kind][0]).from_pretrained(bases(kind))
    assert_same_logits(peft.PeftModel.from_pretrained(base, tmp_path / "out"), recogniser)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_transformers_alone_finds_the_base_of_an_adapter(
    bases: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name in adapter_config.json, which is the recipe's: here a folder below the current one."""
    recogniser = fine_tuned(bases("moonshine"))
    written(recogniser, tmp_path / "out")
    monkeypatch.chdir(bases("moonshine").parent)
    for auto in (transformers.AutoModelForSpeechSeq2Seq, peft.AutoPeftModel):
        assert_same_logits(auto.from_pretrained(tmp_path / "out"), recogniser)


def test_only_layers_that_were_trained_are_named(bases: Callable[[str], Path], tmp_path: Path) -> None:
    """Where a last name is not enough, peft gets whole names."""
    recogniser = fine_tuned(bases("whisper"))
    part = recogniser.part
    assert part is not None
    encoder = {name: own for name, own in part.trained.items() if "encoder.layers" in name}
    only = replace(recogniser, part=replace(part, trained=encoder))
    written(only, tmp_path / "out")
    named = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    assert len(named) == 4
    assert all(name.startswith("model.encoder.layers.") for name in named)


@pytest.mark.parametrize(
    ("kind", "others", "saved"),
    [
        ("wav2vec2", "lm_head", ["lm_head"]),
        ("wav2vec2-bert", "lm_head.bias", ["lm_head"]),
        ("moonshine", "model.encoder.layer_norm", ["model.encoder.layer_norm"]),
        ("parakeet_ctc", "ctc_head", ["ctc_head"]),
    ],
)
def test_layers_trained_besides_are_saved_whole(
    kind: str, others: str, saved: list[str], bases: Callable[[str], Path], tmp_path: Path
) -> None:
    recogniser = fine_tuned(bases(kind), f"{LORA}, {others}")
    written(recogniser, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"] == saved
    base = getattr(transformers, KINDS[kind][0]).from_pretrained(bases(kind))
    assert_same_logits(peft.PeftModel.from_pretrained(base, tmp_path / "out"), recogniser)


@pytest.mark.parametrize(
    ("kind", "train", "why"),
    [
        ("wavlm", LORA, "no adapter can be written: wavlm's attention reads matrices past their layers.*--merged"),
        # Tied to the output layer.
        ("moonshine", f"{LORA}, model.decoder.embed_tokens", r"cannot replace the layer .*embed_tokens.*--merged"),
        ("wav2vec2", f"{LORA}, *.parametrizations.*", r"cannot replace the layer .*parametrizations.weight.*--merged"),
    ],
)
def test_what_peft_cannot_load_is_refused_and_merges(
    kind: str, train: str, why: str, bases: Callable[[str], Path], tmp_path: Path
) -> None:
    recogniser = fine_tuned(bases(kind), train)
    with pytest.raises(InputError, match=why):
        written(recogniser, tmp_path / "adapter")
    written(recogniser.whole, tmp_path / "whole")
    assert_same_logits(load_whole(tmp_path / "whole", recogniser), recogniser)


# New heads.


@pytest.mark.parametrize("kind", ["wav2vec2", "xls-r", "hubert", "wav2vec2-bert", "parakeet_ctc"])
def test_a_new_head_brings_its_own_tokenizer(kind: str, bases: Callable[[str], Path], tmp_path: Path) -> None:
    recogniser = with_new_head(bases(kind), "all")
    written(recogniser, tmp_path / "out")
    model = load_whole(tmp_path / "out", recogniser)
    assert_same_logits(model, recogniser)
    assert model.config.vocab_size == len(CHARACTERS.characters) + 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = CHARACTERS.encode("it's ah word")
    assert tokenizer("it's ah word").input_ids == ids
    frames = [frame for token in ids for frame in (token, token, 0)]  # as CTC writes them
    assert tokenizer.decode(frames) == "it's ah word"


def test_heads_that_transformers_cannot_have_are_refused(bases: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the base model has no such head as head=ctc makes; expected --merged"):
        written(with_new_head(bases("wav2vec2"), LORA), tmp_path / "adapter")
    with pytest.raises(InputError, match="head=ctc on the encoder of model_type=moonshine: transformers has no class"):
        written(with_new_head(bases("moonshine"), "all"), tmp_path / "encoder")
    pieces = train_sentence_pieces(["a few words", "some other words of the same kind"], size=19)
    with pytest.raises(InputError, match=r"a head for sentence pieces: .*expected tokens.kind=characters"):
        written(with_new_head(bases("wav2vec2"), "all", pieces), tmp_path / "pieces")


def test_places_on_somebodys_machine_are_left_out(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = write_tiny_model("moonshine", tmp_path / "moonshine")
    for file, names in {
        "config.json": ["_name_or_path"],
        "tokenizer_config.json": ["name_or_path", "special_tokens_map_file"],
        "preprocessor_config.json": ["_name_or_path"],
        "generation_config.json": ["_name_or_path"],
    }.items():
        content = json.loads((base / file).read_text())
        (base / file).write_text(json.dumps(content | dict.fromkeys(names, "/home/somebody/model")))
    for merged in (True, False):
        recogniser = fine_tuned(base)
        written(recogniser.whole if merged else recogniser, tmp_path / f"out-{merged}")
        for file in (tmp_path / f"out-{merged}").iterdir():
            assert b"somebody" not in file.read_bytes(), file.name


@pytest.mark.parametrize(
    ("front_matter", "expected"),
    [("license: mit", "mit"), ("language: en", None), ("license: [a, b]", None), ("license: {", None)],
)
def test_the_license_is_the_bases(front_matter: str, expected: str | None, tmp_path: Path) -> None:
    base = write_tiny_model("moonshine", tmp_path / "moonshine")
    (base / "README.md").write_text(f"---\n{front_matter}\n---\n# A model\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODELS, str(tmp_path))
        recogniser = fine_tuned(base)
        assert written(recogniser, tmp_path / "out").license == expected
        (base / "config.json").write_text((base / "config.json").read_text() + " ")  # another model by now
        assert written(recogniser, tmp_path / "again").license is None


def test_whisper_is_told_its_language(tmp_path: Path) -> None:
    base = write_tiny_model("whisper", tmp_path / "whisper")
    content = json.loads((base / "generation_config.json").read_text())
    of_languages = {"lang_to_id": {"<|en|>": 5, "<|fr|>": 6}, "task_to_id": {"transcribe": 7}, "is_multilingual": True}
    (base / "generation_config.json").write_text(json.dumps(content | of_languages))
    written(fine_tuned(base, language="fr").whole, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (found["language"], found["task"], found["lang_to_id"]) == ("fr", "transcribe", of_languages["lang_to_id"])


# Where Sottovoce is not installed.

ALONE = """
import json, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sottovoce":
            raise ImportError("it is not here")

sys.meta_path.insert(0, Refused())
try:
    import sottovoce
except ImportError:
    pass
else:
    raise SystemExit("sottovoce can be imported")

import contextlib, io, torch
from safetensors.torch import save_file

for job in json.load(sys.stdin):
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        exec(job["example"], names)
    decoder = {} if job["is_ctc"] else {"decoder_input_ids": torch.tensor([[1, 7, 8]])}
    with torch.no_grad():
        logits = names["model"](**names["inputs"], **decoder).logits
    save_file({"logits": logits.contiguous()}, job["out"])
    print(json.dumps(printed.getvalue().removesuffix("\\n")))
"""


def run_alone(jobs: list[dict[str, Any]], *, where: Path) -> list[str]:
    """What the examples of cards print in a process without Sottovoce, whose current folder has the bases."""
    ended = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", ALONE],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        cwd=where,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def prepare_job(recogniser: Recogniser, folder: Path, recording: Path) -> dict[str, Any]:
    made = written(recogniser, folder)
    example = made.example.replace('"."', repr(str(folder))).replace('"recording.wav"', repr(str(recording)))
    assert example.count(str(folder)) == example.count(str(recording)) == 1
    return {"example": example, "is_ctc": recogniser.settings.is_ctc, "out": f"{folder}.safetensors"}


def own_results(recogniser: Recogniser, recording: Path) -> tuple[str, Tensor]:
    """Our text of a recording, and logits of its beginning."""
    samples, rate = soundfile.read(recording, dtype="int16")
    assert rate == SAMPLE_RATE
    none_UL, zero_U = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    speech = Waveforms(torch.from_numpy(samples), zero_U, torch.tensor([len(samples)]), none_UL, zero_U)
    features = FAMILY.front_end.extract_features(speech, settings=recogniser.settings, dtype=torch.float32)
    if recogniser.settings.is_ctc:
        text = decode_greedily(*family.emit(recogniser.parameters, features, settings=recogniser.settings))[0]
    else:
        text = family.search(recogniser.parameters, features, settings=recogniser.settings, how=GREEDY)[0][0]
    inputs, _, _ = network_inputs(features.features_UTF, features.frames_U, recogniser.settings)
    return recogniser.tokens.decode(text.tokens), own_logits(recogniser, inputs)


def test_cards_examples_run_where_sottovoce_is_not_installed(bases: Callable[[str], Path], tmp_path: Path) -> None:
    """Of every class, merged and as an adapter: the same logits and texts as ours."""
    recording = tmp_path / "recording.wav"
    soundfile.write(recording, say("abcdeabc", pitch=1.0), SAMPLE_RATE)
    kinds = [kind for kind in KINDS if kind not in NEEDS_LIBROSA or find_spec("librosa")]
    recognisers, jobs = [], []
    for kind in kinds:
        own = fine_tuned(bases(kind), silence_seconds=0.5 if kind == "moonshine" else 0.0)
        for recogniser in [own.whole, *([own] if kind not in NO_ADAPTER else [])]:
            recognisers.append((kind, recogniser))
            jobs.append(prepare_job(recogniser, tmp_path / str(len(jobs)), recording))
    texts = run_alone(jobs, where=bases(kinds[0]).parent)
    assert len(texts) == len(jobs) > 8
    for (kind, recogniser), job, text in zip(recognisers, jobs, texts, strict=True):
        ours, logits = own_results(recogniser, recording)
        within = CLOSE_FROM_SAMPLES.get(kind, CLOSE)
        found = load_file(job["out"])["logits"]
        torch.testing.assert_close(found, logits, rtol=0, atol=within * float(logits.abs().max()), msg=kind)
        theirs = normalise_text(SPECIAL.sub("", text), "en")
        if kind == "whisper":  # untrained, it never ends: ours may write as much as in its whole window
            ours = ours[: len(theirs)]
        assert theirs == ours, kind


def test_an_adapter_of_the_real_moonshine_writes_the_same_text_without_sottovoce(
    real_speech: Path, tmp_path: Path
) -> None:
    models = os.environ.get(MODELS)
    if not models or not (Path(models) / "moonshine-tiny-en").is_dir():
        pytest.skip(f"{MODELS} is not set, or has no moonshine-tiny-en")
    source = next(iter(sorted((real_speech / "librispeech-mini").rglob("*.flac"))))
    samples, rate = soundfile.read(source, dtype="int16")
    soundfile.write(tmp_path / "recording.wav", np.asarray(samples), rate)
    recogniser = fine_tuned(Path(models) / "moonshine-tiny-en", "lora(r=8)", silence_seconds=0.5)
    recogniser = scale_down(recogniser, 0.1)
    job = prepare_job(recogniser, tmp_path / "out", tmp_path / "recording.wav")
    (text,) = run_alone([job], where=Path(models))
    ours, logits = own_results(recogniser, tmp_path / "recording.wav")
    torch.testing.assert_close(load_file(job["out"])["logits"], logits, rtol=0, atol=CLOSE * float(logits.abs().max()))
    assert normalise_text(text, "en") == ours
    assert len(ours.split()) > 5


def scale_down(recogniser: Recogniser, factor: float) -> Recogniser:
    """The same with smaller corrections: a model that still writes words."""
    part = recogniser.part
    assert part is not None
    whole = dict(recogniser.parameters)
    for name, b in part.trained.items():
        if name.endswith(".lora_b"):
            stem = name.removesuffix("lora_b")
            whole[f"{stem}weight"] = (
                whole[f"{stem}weight"] - (1 - factor) * part.scale * b @ part.trained[f"{stem}lora_a"]
            )
    trained = {name: own * factor if name.endswith(".lora_b") else own for name, own in part.trained.items()}
    return replace(recogniser, parameters=whole, part=replace(part, trained=trained))
