"""Makes crdnn.json with SpeechBrain's own modules: what a small CRDNN of theirs computes, and its gradients.

Not run with the tests, since it needs SpeechBrain, in an environment of its own that has this project too:
    pip install -e . && pip install --no-deps speechbrain==1.1.2 hyperpyyaml ruamel.yaml joblib requests huggingface_hub
    python -m tests.golden.make_crdnn

Weights, features and texts are sines of their places, so that nothing but arithmetic is needed to have them again.
Modules are SpeechBrain's, from its CommonVoice seq2seq recipe, in float32 (their attention has no other), without
dropout; in evaluation, and in a training step with batch-norm by the batch. The second utterance is padded, and
padding is not masked but in attention and in the losses.
"""

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sottovoce.models.crdnn.settings import Settings, parameter_shapes
from sottovoce.models.speechbrain import their_name

FILE = Path(__file__).parent / "crdnn.json"
SETTINGS = Settings(
    tokens=6,
    channels=(3, 4),
    rnn_layers=2,
    rnn_width=5,
    dnn_layers=2,
    dnn_width=6,
    embedding=3,
    decoder_width=5,
    location_channels=2,
    location_reach=2,
    dropout=0.0,
    norm="batch",
    as_released=True,
)
FRAMES_KEPT = [0, 5, 10]
FRAMES, TOKENS = [24, 16], [[1, 4, 2], [5, 3]]


def waves(*shape: int, phase: float) -> Tensor:
    places = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(1.7 * places + 0.37 * places.square().remainder(11) + phase).view(shape)


def weights() -> dict[str, Tensor]:
    """By our names. Gains and variances are near 1."""
    made = {}
    for number, (name, shape) in enumerate(parameter_shapes(SETTINGS).items()):
        positive = ".norm" in name and name.endswith((".weight", ".variance"))
        made[name] = 0.5 * waves(*shape, phase=number) + (1.0 if positive else 0.0)
    return made


def features() -> Tensor:
    """The second is silent behind its end."""
    made = waves(len(FRAMES), max(FRAMES), 80, phase=0.5)
    for own, frames in zip(made, FRAMES, strict=True):
        own[frames:] = 0
    return made


def samples() -> Tensor:
    """A tenth of a second that grows, and half as much of it again."""
    made = 0.3 * waves(2, 1600, phase=0.1) * torch.linspace(0.001, 1, 1600, dtype=torch.float64)
    made[1, 800:] = 0
    return made


def heard() -> dict[str, Any]:
    """Features of the first, a middle and the last frame."""
    sys.modules.setdefault("torchaudio", types.ModuleType("torchaudio"))
    from speechbrain.lobes.features import Fbank

    return {"features": Fbank(n_mels=80, n_fft=400, sample_rate=16_000)(samples().float())[:, FRAMES_KEPT].tolist()}


def theirs() -> torch.nn.ModuleList:
    """SpeechBrain's modules with our weights."""
    sys.modules.setdefault("torchaudio", types.ModuleType("torchaudio"))  # imported there, not used here
    from speechbrain.lobes.models.CRDNN import CRDNN
    from speechbrain.nnet.embedding import Embedding
    from speechbrain.nnet.linear import Linear
    from speechbrain.nnet.RNN import LSTM, AttentionalRNNDecoder

    s = SETTINGS
    encoder = CRDNN(
        input_shape=[None, None, 80],
        dropout=0.0,
        cnn_blocks=len(s.channels),
        cnn_channels=list(s.channels),
        inter_layer_pooling_size=[2] * len(s.channels),
        time_pooling=True,
        time_pooling_size=4,
        rnn_class=LSTM,
        rnn_layers=s.rnn_layers,
        rnn_neurons=s.rnn_width,
        rnn_bidirectional=True,
        dnn_blocks=s.dnn_layers,
        dnn_neurons=s.dnn_width,
    )
    decoder = AttentionalRNNDecoder(
        enc_dim=s.dnn_width,
        input_size=s.embedding,
        rnn_type="gru",
        attn_type="location",
        hidden_size=s.decoder_width,
        attn_dim=s.decoder_width,
        num_layers=1,
        channels=s.location_channels,
        kernel_size=s.location_reach,
        dropout=0.0,
    )
    heads = [Linear(input_size=s.dnn_width, n_neurons=s.tokens), Linear(input_size=s.decoder_width, n_neurons=s.tokens)]
    modules = torch.nn.ModuleList([encoder, Embedding(s.tokens, s.embedding), decoder, *heads])
    state = modules.state_dict()
    ours = {their_name(name): _turned(name, tensor).float() for name, tensor in weights().items()}
    counters = {name: tensor for name, tensor in state.items() if name.endswith("num_batches_tracked")}
    assert {name: t.shape for name, t in (ours | counters).items()} == {name: t.shape for name, t in state.items()}
    modules.load_state_dict(ours | counters)
    return modules


def _turned(name: str, tensor: Tensor) -> Tensor:
    return tensor.transpose(2, 3) if name.startswith("cnn.") and tensor.dim() == 4 else tensor


def computed(*, training: bool) -> dict[str, Any]:
    modules = theirs().train(training)
    from speechbrain.nnet.losses import ctc_loss, nll_loss

    encoder, embedding, decoder, ctc_head, token_head = modules
    lengths = torch.tensor(FRAMES) / max(FRAMES)
    longest = max(map(len, TOKENS))
    tokens = torch.tensor([own + [0] * (longest - len(own)) for own in TOKENS])
    begun = torch.nn.functional.pad(tokens, (1, 0))
    ended = torch.nn.functional.pad(tokens, (0, 1))
    counts = torch.tensor([len(own) for own in TOKENS])
    memory = encoder(features().float())
    ctc_log_probs = ctc_head(memory).log_softmax(dim=-1)
    states, attention = decoder(embedding(begun), memory, lengths)
    log_probs = token_head(states).log_softmax(dim=-1)
    ctc = ctc_loss(ctc_log_probs, tokens, lengths, counts / longest, blank_index=0)
    # Their relative lengths are of the padded text, the end of each counted.
    nll = nll_loss(log_probs, ended, (counts + 1) / (longest + 1), label_smoothing=SETTINGS.label_smoothing)
    loss = SETTINGS.mu * nll + (1 - SETTINGS.mu) * ctc
    loss.backward()
    named = dict(modules.named_parameters())
    state = modules.state_dict()
    found = {
        "memory": memory,
        "ctc_log_probs": ctc_log_probs,
        "attention": attention,
        "log_probs": log_probs,
        "losses": torch.stack([ctc, nll, loss]),
    }
    norms = {name: named[own].grad.norm() for name in weights() if (own := their_name(name)) in named}
    after = {name: state[their_name(name)] for name in weights() if their_name(name) not in named}
    return {
        **{name: tensor.tolist() for name, tensor in found.items()},
        "gradient_norms": {name: float(norm) for name, norm in norms.items()},
        "statistics": {name: tensor.tolist() for name, tensor in after.items()},
    }


def rounded(value: Any) -> Any:
    """Seven digits: what float32 has."""
    if isinstance(value, dict):
        return {name: rounded(own) for name, own in value.items()}
    return [rounded(own) for own in value] if isinstance(value, list) else float(f"{value:.7g}")


if __name__ == "__main__":
    found = {"front": heard(), "evaluation": computed(training=False), "training": computed(training=True)}
    FILE.write_text(json.dumps(rounded(found)) + "\n")
