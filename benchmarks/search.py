"""Attention search with a decoder of random weights: steps, time a step, and times real time; no encoder.

    python benchmarks/search.py [--width 10] [--size 128] [--utterances 8] [--seconds 4] [--threads 1] [--device cpu]

The decoder is a GRU with location-aware attention, as large as `tiny` by default, over 500 tokens. It is made to end
after six tokens a second, which is fast speech in sentence pieces, so that every run takes as many steps. A frame is
40 ms. Each time is the median of `--repeats`, with its quartiles.
"""

import argparse
import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sottovoce.models.attention_search import END, AttentionDecoder, SearchOptions, search_attention

FRAME_SECONDS = 0.04
TOKENS_A_SECOND = 6
OUTPUTS = 500


class State(NamedTuple):
    hidden_BD: Tensor
    context_BD: Tensor
    attention_BT: Tensor
    said_B: Tensor
    keys_BTD: Tensor


class Decoder(nn.Module):
    """`step` counts its calls."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.calls = size, 0
        self.embedding = nn.Embedding(OUTPUTS, 128)
        self.gru = nn.GRUCell(128 + size, size)
        self.key, self.query, self.value, self.readout = (nn.Linear(size, size) for _ in range(4))
        self.places = nn.Conv1d(1, 10, 201, padding=100, bias=False)
        self.location = nn.Linear(10, size)
        self.energy = nn.Linear(size, 1, bias=False)
        self.output = nn.Linear(2 * size, OUTPUTS)

    def start(self, memory_BTD: Tensor, lengths_B: Tensor) -> State:
        rows, frames, _ = memory_BTD.shape
        zeros_BD = memory_BTD.new_zeros(rows, self.size)
        even_BT = memory_BTD.new_full((rows, frames), 1 / frames)
        said_B = torch.zeros(rows, dtype=torch.int64, device=memory_BTD.device)
        return State(zeros_BD, zeros_BD, even_BT, said_B, self.key(memory_BTD))

    def step(
        self, memory_BTD: Tensor, lengths_B: Tensor, tokens_B: Tensor, state: State
    ) -> tuple[Tensor, State, Tensor]:
        self.calls += 1
        hidden_BD = self.gru(torch.cat([self.embedding(tokens_B), state.context_BD], dim=-1), state.hidden_BD)
        location_BTD = self.location(self.places(state.attention_BT[:, None]).mT)
        energy_BT = self.energy((state.keys_BTD + self.query(hidden_BD)[:, None] + location_BTD).tanh())[..., 0]
        frames_T = torch.arange(memory_BTD.shape[1], device=memory_BTD.device)
        attention_BT = energy_BT.masked_fill(frames_T >= lengths_B[:, None], -torch.inf).softmax(dim=-1)
        context_BD = self.value((attention_BT[:, None] @ memory_BTD)[:, 0])
        logits_BV = self.output(torch.cat([hidden_BD, context_BD], dim=-1))
        over_B = state.said_B >= lengths_B * FRAME_SECONDS * TOKENS_A_SECOND
        logits_BV[:, END] += torch.where(over_B, 30.0, -30.0)
        return (
            logits_BV.log_softmax(dim=-1),
            State(hidden_BD, context_BD, attention_BT, state.said_B + 1, state.keys_BTD),
            attention_BT,
        )


def emissions(utterances: int, frames: int) -> Tensor:
    """Log-probabilities of random tokens, as many a second, and blanks between."""
    spoken_T = torch.arange(frames) % round(1 / FRAME_SECONDS / TOKENS_A_SECOND) == 0
    path_UT = torch.randint(1, OUTPUTS, (utterances, frames)) * spoken_T
    return (10.0 * torch.nn.functional.one_hot(path_UT, OUTPUTS)).log_softmax(dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=10)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--utterances", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Decoder(arguments.size).to(device, dtype)
    decoder = AttentionDecoder(start=model.start, step=model.step)
    frames = round(arguments.seconds / FRAME_SECONDS)
    print(f"{arguments.seconds:g} s ({frames} frames) each, size {arguments.size}, {OUTPUTS} outputs, on {device}")
    for utterances in sorted({1, arguments.utterances}):
        memory_UTD = torch.randn(utterances, frames, arguments.size, device=device, dtype=dtype)
        ctc_UTV = emissions(utterances, frames).to(device)
        lengths_U = torch.full((utterances,), frames)
        for width, ctc_weight in ((1, 0.0), (arguments.width, 0.0), (arguments.width, 0.3)):
            how, times = SearchOptions(width=width, ctc_weight=ctc_weight), []
            for repeat in range(arguments.repeats + 1):
                model.calls, began = 0, time.perf_counter()
                search_attention(decoder, memory_UTD, lengths_U, ctc_log_probs_UTV=ctc_UTV, how=how)  # ends on the host
                if repeat:
                    times.append(time.perf_counter() - began)
            low, middle, high = statistics.quantiles(times, n=4)
            audio = utterances * arguments.seconds
            print(
                f"{utterances:3} utterances, width {width:3}, CTC weight {ctc_weight}: {model.calls:3} steps of "
                f"{1000 * middle / model.calls:6.2f} ms, {audio / middle:7.1f} × real time "
                f"({audio / high:.1f}–{audio / low:.1f})"
            )


if __name__ == "__main__":
    main()
