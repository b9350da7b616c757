"""tiny on the CPU: a training step of our encoder beside the same model written with torch.nn.TransformerEncoder.

    python benchmarks/encoder_cpu.py [--threads 2]

Both have the same sizes, front, positions, loss, dropout (attention weights, MLP; the library adds the residual
branches) and pre-LayerNorm; layer-drop is off, biases are the library's own affair. The two alternate within one
run; the ratio is the median over pairs, with its quartiles.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sottovoce.models import ctc
from sottovoce.models.transformer.draws import draw_several
from sottovoce.models.transformer.network import forward
from sottovoce.models.transformer.positions import cape_positions, sinusoids
from sottovoce.models.transformer.settings import Settings, init, named_settings

Step = Callable[[], float]


class LibraryModel(nn.Module):
    """The same architecture, as a user of torch.nn would write it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.front = nn.Conv1d(settings.features, 2 * settings.width, 7, stride=3, padding=2)
        layer = nn.TransformerEncoderLayer(
            settings.width,
            settings.heads,
            4 * settings.width,
            settings.dropout,
            "relu",
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(settings.width)
        self.encoder = nn.TransformerEncoder(layer, settings.layers, norm, enable_nested_tensor=False)
        self.output = nn.Linear(settings.width, settings.tokens)

    def forward(self, features_BTF: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = F.dropout(F.glu(self.front(features_BTF.mT).mT, dim=-1), self.settings.dropout)
        lengths_B = lengths_B // 3
        positions_BT = cape_positions(lengths_B, frames=x_BTD.shape[1], seconds_per_frame=0.03)
        x_BTD = x_BTD + sinusoids(positions_BT, width=self.settings.width)
        padding_BT = torch.arange(x_BTD.shape[1]) >= lengths_B[:, None]
        x_BTD = self.encoder(x_BTD, src_key_padding_mask=padding_BT)
        return self.output(x_BTD).log_softmax(dim=-1), lengths_B


def batch(settings: Settings, utterances: int, seconds: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    frames, text = int(100 * seconds), int(8 * seconds)
    features_BTF = torch.randn(utterances, frames, settings.features, generator=generator)
    lengths_B = torch.randint(int(0.8 * frames), frames + 1, (utterances,), generator=generator)
    tokens_BU = torch.randint(1, settings.tokens, (utterances, text), generator=generator)
    return features_BTF, lengths_B, tokens_BU, torch.full((utterances,), text)


def steps(settings: Settings, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Step, Step]:
    """One training step (forward, loss, backward) of each model on the same batch."""
    features_BTF, lengths_B, tokens_BU, token_lengths_B = data
    generator = torch.Generator().manual_seed(2)
    parameters = {name: tensor.requires_grad_() for name, tensor in init(settings, generator=generator).items()}
    library = LibraryModel(settings)

    def ours() -> float:
        (draws,) = draw_several(settings, batch_sizes=[len(features_BTF)], generator=generator)
        log_probs_BTV, out_B = forward(parameters, features_BTF, lengths_B, settings=settings, draws=draws)
        loss = ctc.mean_ctc_loss(log_probs_BTV, out_B, tokens_BU, token_lengths_B)
        torch.autograd.grad(loss, list(parameters.values()))
        return loss.item()

    def theirs() -> float:
        log_probs_BTV, out_B = library(features_BTF, lengths_B)
        loss = ctc.mean_ctc_loss(log_probs_BTV, out_B, tokens_BU, token_lengths_B)
        torch.autograd.grad(loss, list(library.parameters()))
        return loss.item()

    return ours, theirs


def seconds_of(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--pairs", type=int, default=25)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    settings = named_settings("tiny", tokens=30, layer_drop=0.0)
    print(f"tiny, training step, torch {torch.__version__}, {options.threads} threads, {options.pairs} pairs")
    print(f"{'batch':>14} {'ours ms':>9} {'library ms':>11} {'library ÷ ours: median [quartiles]':>37}")
    for utterances, length in ((16, 2.5), (8, 5.0)):
        ours, theirs = steps(settings, batch(settings, utterances, length))
        for warm_up in (ours, theirs) * 3:
            warm_up()
        pairs = [(seconds_of(ours), seconds_of(theirs)) for _ in range(options.pairs)]
        low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
        ours_ms, theirs_ms = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        name = f"{utterances} x {length:g} s"
        print(f"{name:>14} {ours_ms:9.1f} {theirs_ms:11.1f} {f'{middle:.2f} [{low:.2f}, {high:.2f}]':>37}")


if __name__ == "__main__":
    main()
