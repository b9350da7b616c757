"""Pretrained recognisers as a family: their own features and tokens, our loss, their decoding.

    wav2vec2, XLS-R, MMS, HuBERT, WavLM, Wav2Vec2-BERT, Parakeet-CTC     CTC
    Whisper, Moonshine                                                   encoder and decoder

Shapes: U utterances, T frames, F features, V outputs, L tokens, N clients of a stack.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import seeded_kernels
from sottovoce.data.audio.augment import apply_masks
from sottovoce.data.audio.waveforms import Features
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.text.pretrained_tokens import read_pretrained_tokens
from sottovoce.data.text.tokens import Tokens
from sottovoce.models import ctc
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.base_files import BaseFiles
from sottovoce.models.decoding import Hypothesis
from sottovoce.models.family import (
    Family,
    FrontEnd,
    Inspection,
    Parameters,
    Recognition,
    Stacked,
    Stacking,
    Training,
    Transfer,
)
from sottovoce.models.huggingface.adapters import write_adapter
from sottovoce.models.huggingface.decoding import (
    FEWEST_TOKENS,
    TOKENS_A_SECOND,
    blank_first,
    decoder_prompt,
    end_of_text,
    longest_text,
    padding_token,
    prompt_tokens,
    suppressed_tokens,
)
from sottovoce.models.huggingface.gates import check_can_be_trained
from sottovoce.models.huggingface.graphs import (
    NOT_RECORDED,
    RecordedNetwork,
    network_scores,
    padded_frames,
    padded_tokens,
)
from sottovoce.models.huggingface.inputs import (
    extract_features,
    feature_frames,
    network_inputs,
    output_frames,
    samples_per_frame,
)
from sottovoce.models.huggingface.layers import find_unstackable
from sottovoce.models.huggingface.memory import stack_bytes
from sottovoce.models.huggingface.network import (
    MERGED,
    build_network,
    call_network,
    import_transformers,
    load_pretrained,
    quiet,
)
from sottovoce.models.huggingface.onnx import EXPORT
from sottovoce.models.huggingface.parts import LORA_TARGETS as LORA_TARGETS
from sottovoce.models.huggingface.parts import choose_part as choose_part
from sottovoce.models.huggingface.parts import is_lora_target as is_lora_target
from sottovoce.models.huggingface.pins import describe_base_model, find_base_model, pin_options
from sottovoce.models.huggingface.saving import write_pretrained
from sottovoce.models.huggingface.settings import NAME, Options, Settings, describe_origin
from sottovoce.models.huggingface.word_times import align_texts, explain_untimed, lead_frames
from sottovoce.models.module import draw_seeds
from sottovoce.models.stacks import line_places, to_lines

IGNORED = -100


def own_tokens(options: Options, language: str) -> Tokens | None:
    """The tokens of the pretrained model; None where it gets a new head for the run's own."""
    if options.head is not None:
        return None
    folder = options.folder
    return read_pretrained_tokens(folder.path, config=folder.config, language=language)


def shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    return dict(build_network(settings).shapes)


def init(settings: Settings, *, generator: torch.Generator) -> dict[str, Tensor]:
    """The pretrained weights."""
    return load_pretrained(settings, generator=generator)


def unusable(settings: Settings, samples: int, tokens: Sequence[int]) -> str | None:
    frames = int(output_frames(torch.tensor([feature_frames(samples, settings)]), settings)[0])
    if frames < 1:
        return "too short for one frame"
    if settings.is_ctc:
        return ctc.text_obstacle(tokens, frames=frames)
    return "longer than the decoder's limit" if len(tokens) > longest_text(settings) else None


# The network in training.


Scores = Callable[..., Tensor]


def _logits(
    parameters: Parameters,
    features: Features,
    settings: Settings,
    *,
    training: bool,
    scores: Scores,
    decoder_input_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores of outputs, by frame or, with a decoder's inputs, by token; and the encoder's frames, on the host."""
    features_UTF = features.features_UTF.to(next(iter(parameters.values())).dtype)
    if isinstance(scores, RecordedNetwork):
        missing = padded_frames(features_UTF.shape[1], settings) - features_UTF.shape[1]
        features_UTF = pad(features_UTF, (0, 0, 0, missing))
    inputs, norm_frames_U, out_U = network_inputs(features_UTF, features.frames_U, settings)
    if decoder_input_ids is not None:
        inputs["decoder_input_ids"] = decoder_input_ids
    return scores(parameters, settings, inputs, norm_frames_B=norm_frames_U, training=training), out_U


def emit(
    parameters: Parameters,
    features: Features,
    *,
    settings: Settings,
    training: bool = False,
    scores: Scores = network_scores,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [U, T, V], the blank first, and their lengths."""
    if not settings.is_ctc:
        raise InputError(f"models of model_type={settings.kind} cannot be decoded by CTC: they have a decoder")
    logits_UTV, out_U = _logits(parameters, features, settings, training=training, scores=scores)
    return ctc.log_softmax(blank_first(logits_UTV, settings)), out_U


def loss(
    parameters: Parameters,
    features: Features,
    *,
    settings: Settings,
    draws: int | None,
    scores: Scores = network_scores,
) -> Tensor:
    """The mean of CTC over utterances, or of the cross-entropy over tokens, as transformers have it."""
    training = draws is not None and settings.dropout
    seeded = seeded_kernels(draws, device=features.features_UTF.device) if training and draws is not None else None
    with seeded or nullcontext():
        if settings.is_ctc:
            emitted = emit(parameters, features, settings=settings, training=training, scores=scores)
            return ctc.mean_ctc_loss(*emitted, features.tokens_UL, features.token_lengths_U)
        losses_UL, counts_U = _token_losses(parameters, features, settings, training=training, scores=scores)
    return losses_UL.sum() / counts_U.sum()


def _token_losses(
    parameters: Parameters, features: Features, settings: Settings, *, scores: Scores, training: bool = False
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of every token [U, L], zero behind a text's end, and how many there are [U]."""
    device, tokens = features.features_UTF.device, features.tokens_UL.shape[1]
    missing = 0
    if isinstance(scores, RecordedNetwork):
        missing = padded_tokens(tokens, longest=longest_text(settings)) - tokens
    labels_UL = pad(features.tokens_UL - 1, (0, missing)).to(device, non_blocking=True)
    counts_U = features.token_lengths_U.to(device, non_blocking=True)
    inside_UL = torch.arange(labels_UL.shape[1], device=device) < counts_U[:, None]
    prompt_P = prompt_tokens(settings, device)
    inputs_UL = torch.cat(
        [prompt_P.expand(len(labels_UL), -1), labels_UL.where(inside_UL, padding_token(settings))[:, :-1]], dim=1
    )
    logits_ULV, _ = _logits(
        parameters, features, settings, training=training, scores=scores, decoder_input_ids=inputs_UL
    )
    text_ULV = logits_ULV[:, len(prompt_P) - 1 :].to(torch.promote_types(logits_ULV.dtype, torch.float32))
    targets_UL = labels_UL.where(inside_UL, IGNORED)
    losses_UL = torch.nn.functional.cross_entropy(
        text_ULV.flatten(0, 1), targets_UL.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses_UL.view(targets_UL.shape), counts_U


# Recognition.


def has_decoder(settings: Settings) -> bool:
    return not settings.is_ctc


@torch.no_grad()
def search(
    parameters: Parameters, features: Features, *, settings: Settings, how: SearchOptions
) -> list[list[Hypothesis]]:
    """By the model's own `generate`, with its own limits: at most what can be said in the time."""
    dtype = next(iter(parameters.values())).dtype
    inputs, norm_frames_U, out_U = network_inputs(features.features_UTF.to(dtype), features.frames_U, settings)
    samples_U = out_U * samples_per_frame(settings)
    most_U = (samples_U / SAMPLE_RATE * TOKENS_A_SECOND).ceil().long().clamp(FEWEST_TOKENS, longest_text(settings))
    prompt, rows = decoder_prompt(settings), len(features)
    device = features.features_UTF.device
    decoder = {
        "decoder_input_ids": torch.tensor(prompt, device=device).expand(rows, -1),
        "generation_config": _generation(settings, width=how.width, most=int(most_U.max())),
    }
    with quiet(import_transformers()):
        found_UL = call_network(parameters, settings, inputs | decoder, norm_frames_B=norm_frames_U, method="generate")
    end, texts = end_of_text(settings), []
    for line, most, frames in zip(found_UL.tolist(), most_U.tolist(), out_U.tolist(), strict=True):
        line = line[len(prompt) :] if line[: len(prompt)] == list(prompt) else line
        ended = end in line[: most + 1]
        tokens = line[: line.index(end)] if ended else line[:most]
        # Until `align_texts` says when a token was said: spread evenly over what was spoken, for joining windows.
        spoken, lead = max(frames - 2 * lead_frames(settings), 0), lead_frames(settings)
        places = [lead + int(spoken * (place + 0.5) / max(len(tokens), 1)) for place in range(len(tokens))]
        texts.append([Hypothesis([token + 1 for token in tokens], places, 0.0, ended)])
    return texts


def _generation(settings: Settings, *, width: int, most: int) -> Any:
    """The best text by a beam of so many hypotheses, in `most` tokens."""
    return import_transformers().GenerationConfig(
        decoder_start_token_id=decoder_prompt(settings)[0],
        eos_token_id=end_of_text(settings),
        pad_token_id=padding_token(settings),
        max_new_tokens=most,
        max_length=None,
        num_beams=width,
        do_sample=False,
        **suppressed_tokens(settings),
    )


# Many clients at once.


def stacked_losses(
    parameters: Parameters,
    features: Features,
    *,
    rows_U: Sequence[int],
    clients: int,
    settings: Settings,
    draws: None,
    scores: Scores = network_scores,
) -> Tensor:
    """`loss` of each of N clients, from trained tensors with a leading client axis and frozen ones that all share."""
    places_U, width = line_places(rows_U, clients)
    lines = clients * width
    device = features.features_UTF.device
    frames_B = torch.full((lines,), features.features_UTF.shape[1])
    frames_B[places_U] = features.frames_U.cpu()
    in_lines = Features(
        to_lines(features.features_UTF, places_U, lines),
        frames_B,
        to_lines(features.tokens_UL, places_U, lines),
        to_lines(features.token_lengths_U, places_U, lines),
    )
    chosen_U = places_U.to(device, non_blocking=True)
    if settings.is_ctc:
        log_probs_BTV, out_B = emit(parameters, in_lines, settings=settings, scores=scores)
        return ctc.mean_ctc_losses_by_client(
            log_probs_BTV.index_select(0, chosen_U),
            out_B[places_U],
            features.tokens_UL,
            features.token_lengths_U,
            places=ctc.find_places(rows_U, rows=clients),
        )
    losses_BL, counts_B = _token_losses(parameters, in_lines, settings, scores=scores)
    sums_N, counts_N = losses_BL.sum(dim=1).view(clients, -1).sum(dim=1), counts_B.view(clients, -1).sum(dim=1)
    return sums_N / counts_N.clamp(min=1)


def stack_obstacle(settings: Settings) -> str | None:
    """Why clients with this model cannot be stacked."""
    if settings.dropout:
        return "with dropout, which is drawn for each client by itself: expected model.dropout=false"
    part, network = choose_part(settings), build_network(settings)
    if part.lora is not None and settings.kind in MERGED:
        return f"with LoRA, whose corrections {settings.kind} takes in no layer: encoder.layers.0.attention"
    layer = find_unstackable(network.module, part.patterns)
    return None if layer is None else f"because of {layer}"


# Recording takes about half a second for each of some dozens of shapes.
WORTH_RECORDING, WORTH_RECORDING_STACKS = 500, 2_000


def accelerate(
    family: Family[Settings, int],
    _working: Parameters | None,
    *,
    settings: Settings,
    steps: int,
    batch_seconds: float,
    device: torch.device,
) -> Family[Settings, int]:
    """Recorded, for training on a GPU, whichever part is trained. Dropout is drawn for every step, and not recorded."""
    if device.type != "cuda" or steps < WORTH_RECORDING or settings.dropout or settings.kind in NOT_RECORDED:
        return family
    return replace(family, loss=partial(loss, scores=RecordedNetwork()))


def accelerate_stacks(
    stacked: Stacked[Settings, int], *, steps: int, batch_seconds: float, device: torch.device
) -> Stacked[Settings, int]:
    """For stacked clients; `steps` counts those of each."""
    if device.type != "cuda" or steps < WORTH_RECORDING_STACKS:
        return stacked
    return replace(stacked, losses=partial(stacked_losses, scores=RecordedNetwork()))


def _join(_draws: Sequence[Any]) -> None:
    return None


def mask_features(features_UTF: Tensor, frames_U: Tensor, *, draws: Tensor, settings: Any) -> Tensor:
    """SpecAugment, of features that have frequencies; samples have none."""
    if features_UTF.shape[2] == 1:
        return features_UTF
    return apply_masks(features_UTF, frames_U, draws=draws, settings=settings)


def encode(parameters: Parameters, features: Features, *, settings: Settings) -> tuple[Tensor, Tensor]:
    """The encoder's vectors, for `sottovoce probe`."""
    dtype = next(iter(parameters.values())).dtype
    inputs, norm_frames_U, out_U = network_inputs(features.features_UTF.to(dtype), features.frames_U, settings)
    found = call_network(parameters, settings, inputs, norm_frames_B=norm_frames_U, method="encode")
    return found, out_U


FAMILY: Family[Settings, int] = Family(
    name=NAME,
    Options=Options,
    Settings=Settings,
    smoke_options={},
    shapes=shapes,
    init=init,
    unusable=unusable,
    draw=draw_seeds,
    loss=loss,
    front_end=FrontEnd(extract_features=extract_features, mask=mask_features),
    recognition=Recognition(
        emit=emit,
        search=search,
        samples_per_frame=samples_per_frame,
        has_decoder=has_decoder,
        lead_frames=lead_frames,
        untimed=explain_untimed,
        align=align_texts,
    ),
    stacking=Stacking(
        stacked=Stacked(
            join=_join, losses=stacked_losses, bytes=stack_bytes, unfit=stack_obstacle, accelerate=accelerate_stacks
        ),
    ),
    transfer=Transfer(
        is_lora_target=is_lora_target,
        part=choose_part,
        write_adapter=write_adapter,
        write_pretrained=write_pretrained,
        origin=describe_origin,
    ),
    training=Training(own_tokens=own_tokens, check=check_can_be_trained, accelerate=accelerate),
    inspection=Inspection(encode=encode),
    base_files=BaseFiles(pin=pin_options, describe=describe_base_model, find=find_base_model),
    export=EXPORT,
)
