"""A fine-tuned model as a folder of the hub, which transformers and peft load where Sottovoce is not installed.

    adapter_config.json  adapter_model.safetensors          corrections of low rank: an adapter of the base model
    config.json  model.safetensors  generation_config.json  a whole model
    preprocessor_config.json  tokenizer files               both

Whole models are written in float32, also where their base is not: in half precision a correction that is small beside
its weight would be rounded away.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_json, write_json
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.text.pretrained_tokens import PretrainedTokens
from sottovoce.data.text.tokens import CharacterTokens, Tokens
from sottovoce.models.family import Parameters
from sottovoce.models.hub import HubModel
from sottovoce.models.huggingface.adapters import CONFIG, adapter_obstacle, find_replaced, write_adapter
from sottovoce.models.huggingface.folder import CLASSES, SEQ2SEQ, read_license
from sottovoce.models.huggingface.network import describe_config, import_transformers, quiet
from sottovoce.models.huggingface.settings import Settings
from sottovoce.models.recogniser import Recogniser

PROCESSOR, TOKENIZER_CONFIG = "preprocessor_config.json", "tokenizer_config.json"
# Where files once lay on somebody's machine.
_PLACES = frozenset({"_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file"})
_AUTO_CLASSES = {True: "AutoModelForCTC", False: "AutoModelForSpeechSeq2Seq"}
LORA = (".lora_a", ".lora_b")


def write_pretrained(recogniser: Recogniser, folder: Path, *, base: str | None = None) -> HubModel:
    """Write `recogniser` into `folder`, which exists; `base` is the hub's name of its base model.

    A part of low rank is an adapter, everything else a whole model.
    """
    settings, part = recogniser.settings, recogniser.part
    if settings.head is not None and settings.kind in SEQ2SEQ:
        raise InputError(
            f"head={settings.head} on the encoder of model_type={settings.kind}: transformers has no class for it; "
            "expected a model whose own class is CTC's, or --to sottovoce"
        )
    name = base or settings.source
    is_adapter = part is not None and any(tensor.endswith(LORA) for tensor in part.trained)
    written = _write_adapter(recogniser, folder, base=name) if is_adapter else _write_whole(recogniser, folder)
    _write_processor(settings, folder)
    _write_tokenizer(recogniser.tokens, folder)
    made = "Low-rank corrections (LoRA) of" if is_adapter else "A fine-tuned version of"
    return HubModel(
        library="peft" if is_adapter else "transformers",
        what=f"{made} the speech recogniser `{name}` ({CLASSES[settings.kind]}).",
        base=name,
        license=read_license(settings.source, digests=settings.digests),
        example=_example(settings, base=name if is_adapter else None),
        notes=tuple(_notes(settings, folder, is_adapter=is_adapter)),
        is_whole=not is_adapter,
        parameters=written,
    )


def _write_adapter(recogniser: Recogniser, folder: Path, *, base: str) -> int:
    part, settings = recogniser.part, recogniser.settings
    assert part is not None
    if (why := adapter_obstacle(settings)) is not None:
        raise InputError(f"no adapter can be written: {why}; expected --merged")
    others = [name for name in part.trained if not name.endswith(LORA)]
    replaced = find_replaced(others, recogniser.parameters, settings)
    low_rank = {name: tensor for name, tensor in {**part.fixed, **part.trained}.items() if name.endswith(LORA)}
    write_adapter(low_rank, folder, scale=part.scale, settings=settings, base=base, replaced=replaced)
    return sum(tensor.numel() for tensor in (*low_rank.values(), *replaced.values()))


def _write_whole(recogniser: Recogniser, folder: Path) -> int:
    """By transformers' own `save_pretrained`, which knows how each class names and ties its tensors."""
    settings, transformers = recogniser.settings, import_transformers()
    content = _without_places(describe_config(settings)) | {"dtype": "float32"}
    config = transformers.CONFIG_MAPPING[settings.kind].from_dict(content)
    with torch.device("meta"):  # values follow
        model = getattr(transformers, CLASSES[settings.kind])(config)
    model.load_state_dict(_state(recogniser.parameters, model), strict=False, assign=True)
    model.tie_weights()
    if settings.of_generation:
        model.generation_config = transformers.GenerationConfig.from_dict(_generation(settings))
    with quiet(transformers):
        model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def _state(parameters: Parameters, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`parameters` and the counts of batches, which only training looks at and which are not kept here."""
    state = {name: p.detach().to("cpu", torch.float32).contiguous() for name, p in parameters.items()}
    counts = {
        name: torch.zeros(buffer.shape, dtype=buffer.dtype)
        for name, buffer in model.state_dict().items()
        if name not in state and not buffer.is_floating_point()
    }
    return state | counts


def _generation(settings: Settings) -> dict[str, Any]:
    """What their `generate` begins with: a model that knows several languages is told the one it was trained for."""
    content = _without_places(settings.of_generation)
    content.pop("_from_model_config", None)  # with it they leave out what is not from there
    if "lang_to_id" in content:
        content |= {"language": settings.language or "en", "task": "transcribe"}
    return content


def _write_processor(settings: Settings, folder: Path) -> None:
    """With the name of its processor, which is otherwise found by a config.json that an adapter does not have."""
    names = import_transformers().models.auto.processing_auto.PROCESSOR_MAPPING_NAMES
    content = {"processor_class": names[settings.kind]} | _without_places(settings.of_processor)
    write_json(folder / PROCESSOR, content)


def _write_tokenizer(tokens: Tokens, folder: Path) -> None:
    if isinstance(tokens, PretrainedTokens):
        tokens.write_files(folder)
        if (file := folder / TOKENIZER_CONFIG).exists():
            write_json(file, _without_places(read_json(file)))
        return
    if not isinstance(tokens, CharacterTokens):
        raise InputError(
            "a head for sentence pieces: transformers has no tokenizer that reads CTC's outputs as these; "
            "expected tokens.kind=characters, or --to sottovoce"
        )
    written = {"<pad>": 0} | {one.replace(" ", "|"): number for number, one in enumerate(tokens.characters, start=1)}
    settings = {
        "tokenizer_class": "Wav2Vec2CTCTokenizer",
        "pad_token": "<pad>",
        "unk_token": "<pad>",  # nothing else would be an output of the model
        "bos_token": None,
        "eos_token": None,
        "word_delimiter_token": "|",
        "do_lower_case": False,
    }
    write_json(folder / "vocab.json", written)
    write_json(folder / TOKENIZER_CONFIG, settings)


def _without_places(content: Mapping[str, Any]) -> dict[str, Any]:
    inside = {name: value for name, value in content.items() if name not in _PLACES}
    return {name: _without_places(value) if isinstance(value, dict) else value for name, value in inside.items()}


# What its card says.


def _notes(settings: Settings, folder: Path, *, is_adapter: bool) -> list[str]:
    notes = [f"It takes recordings of one channel with {SAMPLE_RATE:,} samples a second."]
    if is_adapter:
        adapter = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        layers = ", ".join(sorted({f"`{name.rpartition('.')[2]}`" for name in adapter["target_modules"]}))
        notes.append(f"Rank {adapter['r']}, alpha {adapter['lora_alpha']:g}, of the layers {layers}.")
    else:
        notes.append("Weights are float32.")
    weights = {name: digest for name, digest in settings.digests if name.endswith(".safetensors")}
    notes += [f"The base is the one whose `{name}` has the SHA-256 `{digest}`." for name, digest in weights.items()]
    if settings.silence_seconds:
        seconds = f"{settings.silence_seconds:g} s of silence before and after each recording"
        notes.append(f"It was trained with {seconds}, which the program adds.")
    if settings.kind == "parakeet_ctc":
        notes.append("Its features need the package librosa.")
    return notes


def _example(settings: Settings, *, base: str | None) -> str:
    """A program; with the `base` of an adapter."""
    auto, silence = _AUTO_CLASSES[settings.is_ctc], round(settings.silence_seconds * SAMPLE_RATE)
    lines = [
        *(["import numpy"] if silence else []),
        "import soundfile",
        "import torch",
        *(["from peft import PeftModel"] if base else []),
        f"from transformers import {auto}, AutoProcessor",
        "",
        *([f'BASE = "{base}"'] if base else []),
        'FOLDER = "."  # where this file is, or its name on the hub',
        'RECORDING = "recording.wav"',
        "",
        'samples, rate = soundfile.read(RECORDING, dtype="float32")',
        *([f"samples = numpy.pad(samples, {silence})"] if silence else []),
        "processor = AutoProcessor.from_pretrained(FOLDER)",
        f"model = {auto}.from_pretrained({'BASE' if base else 'FOLDER'}, dtype=torch.float32)",
        *(["model = PeftModel.from_pretrained(model, FOLDER)"] if base else []),
        "model.eval()",
        'inputs = processor(samples, sampling_rate=rate, return_tensors="pt")',
    ]
    if settings.is_ctc:
        lines += [
            "with torch.no_grad():",
            "    logits = model(**inputs).logits",
            "print(processor.batch_decode(logits.argmax(dim=-1))[0])",
        ]
    else:
        lines += [
            "longest = max(10, round(6.5 * len(samples) / rate))  # more is a decoder that repeats itself",
            "found = model.generate(**inputs, max_new_tokens=longest)",
            "print(processor.batch_decode(found, skip_special_tokens=True)[0])",
        ]
    return "\n".join(lines)
