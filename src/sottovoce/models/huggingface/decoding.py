"""What a pretrained model's own files say of its texts: how they begin and end, how long they get, its blank."""

from functools import cache

import torch
from torch import Tensor

from sottovoce.models.huggingface.settings import Settings

TOKENS_A_SECOND, FEWEST_TOKENS = 6.5, 10  # more is a decoder that repeats itself


@cache
def prompt_tokens(settings: Settings, device: torch.device) -> Tensor:
    """Once a device: a new tensor would wait for it in every step."""
    return torch.tensor(decoder_prompt(settings), device=device)


@cache
def decoder_prompt(settings: Settings) -> tuple[int, ...]:
    """What a decoder begins with: its start, and for Whisper language, task and that no times are written."""
    config, generation = settings.of_model, settings.of_generation
    start = [int(generation.get("decoder_start_token_id", config.get("decoder_start_token_id", 1)))]
    if settings.kind != "whisper":
        return tuple(start)
    if languages := generation.get("lang_to_id"):
        code = f"<|{settings.language or 'en'}|>"
        start += [int(languages[code])] if code in languages else []
        start += [int(generation["task_to_id"]["transcribe"])]
    if (without_times := generation.get("no_timestamps_token_id")) is not None:
        start.append(int(without_times))
    return tuple(start)


def padding_token(settings: Settings) -> int:
    return int(settings.of_model.get("pad_token_id") or 0)


def end_of_text(settings: Settings) -> int:
    end = settings.of_generation.get("eos_token_id", settings.of_model.get("eos_token_id"))
    return int(end[0] if isinstance(end, list) else end or 0)


def suppressed_tokens(settings: Settings) -> dict[str, list[int]]:
    """Tokens that the model's files forbid: everywhere, and right behind what a text begins with (Whisper's do)."""
    named = ("suppress_tokens", "begin_suppress_tokens")
    return {name: [int(token) for token in own] for name in named if (own := settings.of_generation.get(name))}


def longest_text(settings: Settings) -> int:
    """How many tokens the decoder can write."""
    config, generation = settings.of_model, settings.of_generation
    positions = int(config.get("max_target_positions") or config.get("max_position_embeddings") or 194)
    return min(int(generation.get("max_length") or positions), positions) - len(decoder_prompt(settings))


def blank_first(logits_UTV: Tensor, settings: Settings) -> Tensor:
    if (blank := _blank(settings)) == 0:
        return logits_UTV
    return torch.cat([logits_UTV[..., blank : blank + 1], logits_UTV[..., :blank], logits_UTV[..., blank + 1 :]], -1)


def _blank(settings: Settings) -> int:
    return 0 if settings.head == "ctc" else int(settings.of_model.get("pad_token_id") or 0)
