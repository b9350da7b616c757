"""Pretrained models in local training, one client after another and stacked, beside a plain transformers + peft loop.

    python benchmarks/pretrained.py --models moonshine-tiny-en wav2vec2-bert-300m --json out.json

Every row does the same steps: from the server's part of the model, local steps of SGD on utterances of equal length,
and the difference as the client's update. `moonshine-tiny-en` is found through $SOTTOVOCE_MODELS; the others have
random weights. Rows of a model are measured in turns; the figure is the median of the turns, with their range.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sottovoce.data.audio.waveforms import Features
from sottovoce.flat.layout import Layout
from sottovoce.models.huggingface import family as hf
from sottovoce.models.huggingface.folder import CLASSES, find_folder
from sottovoce.models.huggingface.inputs import network_inputs
from sottovoce.models.huggingface.settings import Options, Settings
from sottovoce.models.trainable import Trainable, split_parameters
from sottovoce.optimisers import build_optimiser
from sottovoce.optimisers.weights import Weights

SECONDS, UTTERANCES, TOKENS, LOCAL_STEPS, LR = 4, 10, 12, 2, 0.01
LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"]
ENCODERS: Mapping[str, Mapping[str, Any]] = {  # Wav2Vec2-BERT, by layers
    "wav2vec2-bert-300m": {"num_hidden_layers": 12},
    "wav2vec2-bert-600m": {"num_hidden_layers": 24},
}
Step = Callable[[], None]


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


def random_features(settings: Settings, utterances: int, device: torch.device) -> Features:
    generator = torch.Generator().manual_seed(1)
    raw = settings.kind == "moonshine"
    frames, width = (16_000 * SECONDS, 1) if raw else (50 * SECONDS, 160)
    features = torch.randn(utterances, frames, width, generator=generator) * (0.1 if raw else 1.0)
    tokens = torch.randint(6, 30, (utterances, TOKENS), generator=generator)
    lengths = torch.full((utterances,), TOKENS)
    return Features(features.to(device, torch.bfloat16), torch.full((utterances,), frames), tokens, lengths)


def make_part(settings: Settings) -> Trainable:
    generator = torch.Generator().manual_seed(2)
    parameters = hf.init(settings, generator=generator)
    return split_parameters(hf.choose_part(settings), parameters, is_lora_target=hf.is_lora_target, generator=generator)


def ours(settings: Settings, part: Trainable, clients: int, device: torch.device) -> Step:
    """`clients` at once; 1 is one after another, without a client axis."""
    layout, frozen = Layout.of(part.initial), part.frozen.to(device, torch.bfloat16)
    rows = None if clients == 1 else clients
    weights = Weights(layout, build_optimiser("sgd"), device=device, dtype=torch.bfloat16, rows=rows)
    server_P = layout.flatten(part.initial).to(device)
    features = random_features(settings, UTTERANCES * clients, device)
    rows_U = [client for client in range(clients) for _ in range(UTTERANCES)]

    def step() -> None:
        weights.reset(server_P)
        for _ in range(LOCAL_STEPS):
            whole = frozen.with_trained(weights.working)
            if clients == 1:
                loss = hf.loss(whole, features, settings=settings, draws=0)
            else:
                loss = hf.stacked_losses(
                    whole, features, rows_U=rows_U, clients=clients, settings=settings, draws=None
                ).sum()
            weights.set_gradients(torch.autograd.grad(loss, list(weights.working.values()), allow_unused=True))
            weights.step(lr=LR, max_norm=1.0)
        weights.master.neg_().add_(server_P)

    return step


def plain(settings: Settings, folder: Path, device: torch.device) -> Step:
    """The same by transformers and peft, as their users write it."""
    import peft
    import transformers

    model = getattr(transformers, CLASSES[settings.kind]).from_pretrained(folder, dtype=torch.bfloat16)
    if settings.train != "all":
        targets = [name for name in hf.LORA_TARGETS if any(name in n for n, _ in model.named_modules())]
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=8, target_modules=targets))
    model.to(device).train()
    for config in (model.config, getattr(model.config, "encoder_config", None)):
        for name in ("layerdrop", "hidden_dropout", "attention_dropout", "activation_dropout", "apply_spec_augment"):
            if config is not None and hasattr(config, name):
                setattr(config, name, type(getattr(config, name))(0))
    trained = [p for p in model.parameters() if p.requires_grad]
    server = [p.detach().clone() for p in trained]
    optimiser = torch.optim.SGD(trained, lr=LR)
    features = random_features(settings, UTTERANCES, device)
    inputs, _, _ = network_inputs(features.features_UTF, features.frames_U, settings)
    labels = (features.tokens_UL - (0 if settings.is_ctc else 1)).to(device)

    def step() -> None:
        with torch.no_grad():
            for p, before in zip(trained, server, strict=True):
                p.copy_(before)
        for _ in range(LOCAL_STEPS):
            optimiser.zero_grad()
            model(**inputs, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimiser.step()
        with torch.no_grad():
            _updates = [before - p for p, before in zip(trained, server, strict=True)]

    return step


def measure(step: Step, *, seconds: float, audio: float) -> float:
    """Seconds of audio a second."""
    torch.cuda.synchronize()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        step()
        torch.cuda.synchronize()
        count += 1
    return count * audio / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["moonshine-tiny-en", "wav2vec2-bert-300m"])
    parser.add_argument("--stacks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, found = torch.device("cuda", 0), []
    audio = SECONDS * UTTERANCES * LOCAL_STEPS
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.models:
            folder = write_random_encoder(name, Path(temporary) / name) if name in ENCODERS else find_folder(name)
            for train in ("lora(r=8)", "all"):
                settings = Options(source=str(folder), train=train).settings(tokens=2)
                part = make_part(settings)
                ways: dict[str, tuple[int, Callable[[], Step]]] = {
                    "plain transformers + peft": (1, partial(plain, settings, folder, device)),
                    "one after another": (1, partial(ours, settings, part, 1, device)),
                }
                if hf.stack_obstacle(settings) is None:
                    for clients in arguments.stacks:
                        ways[f"stacks of {clients}"] = (clients, partial(ours, settings, part, clients, device))
                for way, (clients, make) in ways.items():
                    row: dict[str, Any] = {"model": name, "train": train, "way": way}
                    try:
                        torch.cuda.empty_cache()
                        torch.cuda.reset_peak_memory_stats()
                        step = make()
                        step()
                        step()
                        rates = [
                            measure(step, seconds=arguments.seconds, audio=audio * clients)
                            for _ in range(arguments.turns)
                        ]
                        row |= {
                            "audio_seconds_per_second": round(statistics.median(rates)),
                            "range": [round(min(rates)), round(max(rates))],
                            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                        }
                        del step
                    except torch.OutOfMemoryError:
                        row["obstacle"] = "out of memory"
                    found.append(row)
                    print(json.dumps(row), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
