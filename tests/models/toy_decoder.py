"""A small random decoder with a memory, an attention and a state, and what greedy search with it is."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sottovoce.models.attention_search import END, AttentionDecoder


class State(NamedTuple):
    hidden_BD: Tensor
    keys_BTD: Tensor  # its utterance's: a step hands it on


@dataclass(frozen=True)
class Toy:
    """An Elman network that attends by dot products; all of its numbers are drawn."""

    outputs: int
    size: int
    seed: int = 0
    sharpness: float = 2.0
    end: float = 0.0  # added to the end's logit

    def decoder(self) -> AttentionDecoder:
        random = torch.Generator().manual_seed(self.seed)
        embedding_VD, inner_DD, context_DD = (
            torch.randn(rows, self.size, generator=random) for rows in (self.outputs, self.size, self.size)
        )
        output_DV = self.sharpness * torch.randn(self.size, self.outputs, generator=random) / self.size**0.5
        output_DV[:, END] /= 2

        def start(memory_BTD: Tensor, _lengths_B: Tensor) -> State:
            return State(memory_BTD.new_zeros(len(memory_BTD), self.size), memory_BTD.tanh())

        def step(memory_BTD: Tensor, lengths_B: Tensor, tokens_B: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
            query_BD = (state.hidden_BD @ inner_DD / self.size**0.5 + embedding_VD[tokens_B]).tanh()
            energy_BT = (state.keys_BTD * query_BD[:, None]).sum(dim=-1)
            behind_BT = torch.arange(energy_BT.shape[1]) >= lengths_B[:, None]
            attention_BT = energy_BT.masked_fill(behind_BT, -torch.inf).softmax(dim=-1)
            heard_BD = (attention_BT[..., None] * memory_BTD).sum(dim=1)
            hidden_BD = (query_BD + heard_BD @ context_DD / self.size**0.5).tanh()
            logits_BV = hidden_BD @ output_DV
            logits_BV[:, END] += self.end
            return logits_BV.log_softmax(dim=-1), State(hidden_BD, state.keys_BTD), attention_BT

        return AttentionDecoder(start=start, step=step)

    def memory(self, lengths: list[int]) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(len(lengths), max(lengths), self.size, generator=random), torch.tensor(lengths)


def plain_greedy(decoder: AttentionDecoder, memory_UTD: Tensor, lengths_U: Tensor) -> list[tuple[list[int], list[int]]]:
    """The best token of every step, and the frame it looks at, one utterance after another."""
    texts = []
    for memory_TD, length in zip(memory_UTD, lengths_U.tolist(), strict=True):
        own = (memory_TD[None], torch.tensor([length]))
        state, token_B = decoder.start(*own), torch.tensor([END])
        text: list[int] = []
        frames: list[int] = []
        while len(text) < length:
            log_probs_BV, state, attention_BT = decoder.step(*own, token_B, state)
            token_B = log_probs_BV.argmax(dim=-1)
            if int(token_B) == END:
                break
            text.append(int(token_B))
            frames.append(int(attention_BT.argmax()))
        texts.append((text, frames))
    return texts


def score_of(decoder: AttentionDecoder, memory_TD: Tensor, tokens: list[int], *, ended: bool) -> float:
    """log p(tokens | memory), and of their end."""
    own = (memory_TD[None], torch.tensor([len(memory_TD)]))
    state, total = decoder.start(*own), 0.0
    for before, after in zip([END, *tokens], [*tokens, *[END] * ended], strict=False):
        log_probs_BV, state, _ = decoder.step(*own, torch.tensor([before]), state)
        total += float(log_probs_BV[0, after])
    return total
