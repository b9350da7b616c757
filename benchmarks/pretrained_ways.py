"""What `pretrained.py` and `pretrained_counts.py` share: models, and the ways to train clients with them."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sottovoce.data.audio.waveforms import Features
from sottovoce.flat.layout import Layout
from sottovoce.models.family import accelerate_family
from sottovoce.models.huggingface import family as hf
from sottovoce.models.huggingface.folder import CLASSES, find_folder
from sottovoce.models.huggingface.graphs import network_scores
from sottovoce.models.huggingface.inputs import network_inputs
from sottovoce.models.huggingface.settings import Options, Settings
from sottovoce.models.trainable import Trainable, split_parameters
from sottovoce.optimisers import build_optimiser
from sottovoce.optimisers.weights import Weights

TOKENS, LOCAL_STEPS, LR = 12, 2, 0.01
MANY_STEPS = 1_000_000  # as in a long run, where recording pays
LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"]
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "output_hidden_size": 32}
ENCODERS: Mapping[str, Mapping[str, Any]] = {  # Wav2Vec2-BERT, by layers
    "wav2vec2-bert-300m": {"num_hidden_layers": 12},
    "wav2vec2-bert-600m": {"num_hidden_layers": 24},
    "tiny-encoder": {"num_hidden_layers": 2, **_TINY},
}
PLAIN = "plain transformers + peft"
Step = Callable[[], Any]  # trains, and gives the updates


@dataclass(frozen=True)
class Clips:
    """What every client has in a step."""

    seconds: int
    count: int

    @property
    def audio_seconds(self) -> int:
        return self.seconds * self.count * LOCAL_STEPS


USUAL, SHORT = Clips(seconds=4, count=10), Clips(seconds=1, count=3)


def write_random_encoder(name: str, folder: Path) -> Path:
    """A Wav2Vec2-BERT with random weights and a tokenizer of letters."""
    import transformers

    config = transformers.Wav2Vec2BertConfig(vocab_size=len(LETTERS), pad_token_id=0, **ENCODERS[name])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.Wav2Vec2BertForCTC(config).save_pretrained(folder)
    extractor = {"feature_extractor_type": "SeamlessM4TFeatureExtractor", "sampling_rate": 16000, "stride": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps({**extractor, "num_mel_bins": 80}))
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(LETTERS)}))
    return folder


def write_random_weights(source: Path, folder: Path) -> Path:
    """The model of a folder that has all but its weights, with random ones."""
    import transformers

    folder.mkdir()
    for file in source.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        getattr(transformers, CLASSES[config.model_type])(config).save_pretrained(folder)
    return folder


def find_model(name: str, temporary: Path, random_from: Path | None = None) -> Path:
    """The folder of a model: a random encoder, random weights for the files in `random_from`, or what is there."""
    if name in ENCODERS:
        return write_random_encoder(name, temporary / name)
    return find_folder(name) if random_from is None else write_random_weights(random_from, temporary / name)


@dataclass(frozen=True, eq=False)
class Bench:
    """A model, the part of it that is trained, and where."""

    folder: Path
    settings: Settings
    part: Trainable
    device: torch.device
    dtype: torch.dtype

    def features(self, clips: Clips, clients: int) -> Features:
        generator = torch.Generator().manual_seed(1)
        raw, utterances = self.settings.kind == "moonshine", clips.count * clients
        frames, width = (16_000 * clips.seconds, 1) if raw else (50 * clips.seconds, 160)
        features = torch.randn(utterances, frames, width, generator=generator) * (0.1 if raw else 1.0)
        tokens = torch.randint(6, 30, (utterances, TOKENS), generator=generator)
        lengths = torch.full((utterances,), TOKENS)
        return Features(features.to(self.device, self.dtype), torch.full((utterances,), frames), tokens, lengths)


def make_bench(folder: Path, train: str, device: torch.device, dtype: torch.dtype | None = None) -> Bench:
    """In `dtype`; None is bfloat16 on a GPU, as runs have it."""
    settings = Options(source=str(folder), train=train).settings(tokens=2)
    generator = torch.Generator().manual_seed(2)
    parameters = hf.init(settings, generator=generator)
    part = split_parameters(hf.choose_part(settings), parameters, is_lora_target=hf.is_lora_target, generator=generator)
    usual = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Bench(folder, settings, part, device, dtype or usual)


def ours(
    bench: Bench,
    clips: Clips,
    clients: int,
    *,
    steps: int = MANY_STEPS,
    recompute: bool = False,
    features: Features | None = None,
) -> Step:
    """`clients` at once, as engines train them in a run of so many `steps`; 1 is one after another.

    `recompute`: layers are computed again on the way back, as they are where memory is short.
    """
    settings, device = bench.settings, bench.device
    layout, frozen = Layout.of(bench.part.initial), bench.part.frozen.to(device, bench.dtype)
    rows = None if clients == 1 else clients
    weights = Weights(layout, build_optimiser("sgd"), device=device, dtype=bench.dtype, rows=rows)
    server_P = layout.flatten(bench.part.initial).to(device)
    features = features or bench.features(clips, clients)
    rows_U = [client for client in range(clients) for _ in range(clips.count)]
    training: dict[str, Any] = {"steps": steps, "batch_seconds": clips.seconds * clips.count, "device": device}
    family = accelerate_family(hf.FAMILY, weights.working, settings=settings, **training)
    stacked = hf.FAMILY.stacking.stacked
    assert stacked is not None
    assert stacked.accelerate is not None
    losses = stacked.accelerate(stacked, **training).losses
    if recompute:
        losses = partial(hf.stacked_losses, scores=partial(network_scores, recompute=True))

    def step() -> Tensor:
        weights.reset(server_P)
        for _ in range(LOCAL_STEPS):
            whole = frozen.with_trained(weights.working)
            if clients == 1:
                loss = family.loss(whole, features, settings=settings, draws=0)
            else:
                loss = losses(whole, features, rows_U=rows_U, clients=clients, settings=settings, draws=None).sum()
            weights.set_gradients(torch.autograd.grad(loss, list(weights.working.values()), allow_unused=True))
            weights.step(lr=LR, max_norm=1.0)
        return weights.master.neg_().add_(server_P)

    return step


def plain(bench: Bench, clips: Clips, features: Features | None = None) -> Step:
    """The same by transformers and peft, as their users write it; from the same adapters, so that updates compare."""
    import peft
    import transformers

    settings, device = bench.settings, bench.device
    model = getattr(transformers, CLASSES[settings.kind]).from_pretrained(bench.folder, dtype=bench.dtype)
    if settings.train != "all":
        targets = [name for name in hf.LORA_TARGETS if any(name in n for n, _ in model.named_modules())]
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=8, target_modules=targets))
    model.to(device).train()
    for config in (model.config, getattr(model.config, "encoder_config", None)):
        for name in ("layerdrop", "hidden_dropout", "attention_dropout", "activation_dropout", "apply_spec_augment"):
            if config is not None and hasattr(config, name):
                setattr(config, name, type(getattr(config, name))(0))
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0  # ours draws none, and updates must compare
    named = {_our_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, p in named.items():
            if name in bench.part.initial:
                p.copy_(bench.part.initial[name])
    trained = list(named.values())
    server = [p.detach().clone() for p in trained]
    optimiser = torch.optim.SGD(trained, lr=LR)
    features = features or bench.features(clips, 1)
    inputs, _, _ = network_inputs(features.features_UTF, features.frames_U, settings)
    labels = (features.tokens_UL - (0 if settings.is_ctc else 1)).to(device)

    share = len(labels) if settings.is_ctc else 1  # transformers adds CTC's losses up

    def step() -> dict[str, Tensor]:
        with torch.no_grad():
            for p, before in zip(trained, server, strict=True):
                p.copy_(before)
        for _ in range(LOCAL_STEPS):
            optimiser.zero_grad()
            (model(**inputs, labels=labels).loss / share).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimiser.step()
        with torch.no_grad():
            return {name: before - p for (name, p), before in zip(named.items(), server, strict=True)}

    return step


def _our_name(name: str) -> str:
    name = name.removeprefix("base_model.model.")
    return name.replace("lora_A.default.weight", "lora_a").replace("lora_B.default.weight", "lora_b")
