"""Pretrained recognisers for other runtimes, their features included: CTC as one graph, or an encoder and a decoder.

    samples ─► encoder ─► vectors of speech
    the last token, vectors of speech, keys and values so far ─► decoder ─► scores of tokens, keys and values

The decoder takes one token at a time. Keys and values are empty at first; those of speech are computed then, and
handed in again later.

Shapes: B utterances, N samples, T frames, D width, H heads, P tokens so far, V outputs.
"""

import base64
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import WINDOW_SAMPLES
from sottovoce.models.ctc import log_softmax
from sottovoce.models.family import Parameters
from sottovoce.models.huggingface.decoding import (
    FEWEST_TOKENS,
    TOKENS_A_SECOND,
    blank_first,
    decoder_prompt,
    end_of_text,
    longest_text,
    suppressed_tokens,
)
from sottovoce.models.huggingface.front_ends import stack_filterbanks
from sottovoce.models.huggingface.inputs import (
    RAW,
    extract_lines,
    masked_inputs,
    samples_per_frame,
    silence_samples,
    window_samples,
)
from sottovoce.models.huggingface.network import build_network, call_network, import_transformers
from sottovoce.models.huggingface.settings import Settings
from sottovoce.models.onnx_graphs import (
    BATCH,
    Axes,
    Export,
    Function,
    Graph,
    OnnxModel,
    SherpaModel,
    ctc_from_samples,
    sherpa_from_filterbanks,
    sherpa_from_samples,
)

_EXAMPLE_SAMPLES = 9_700
_LEAST_SAMPLES = 1_000  # a frame of Moonshine's encoder, and a little more
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# What sherpa-onnx's decoding of Moonshine has by heart.
_SHERPA_START, _SHERPA_END = 1, 2


def to_onnx(parameters: Parameters, settings: Settings) -> OnnxModel:
    if settings.is_ctc:
        return ctc_from_samples(
            partial(emit_samples, settings=settings),
            parameters,
            outputs=settings.tokens,
            samples_per_frame=samples_per_frame(settings),
            most_samples=window_samples(settings),
        )
    decoding = {
        "method": "autoregressive",
        "prompt": list(decoder_prompt(settings)),
        "end": end_of_text(settings),
        "most_tokens": longest_text(settings),
        "fewest_tokens": FEWEST_TOKENS,
        "tokens_a_second": TOKENS_A_SECOND,
        "samples_per_frame": samples_per_frame(settings),
        "first_token": 1,  # the first of `tokens` is the blank, which the decoder does not have
        **suppressed_tokens(settings),
    }
    graphs = (_encoder_graph(parameters, settings), _decoder_graph(parameters, settings))
    return OnnxModel(graphs=graphs, decoding=decoding)


def emit_samples(
    parameters: Parameters, samples_BN: Tensor, lengths_B: Tensor, *, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T, V], the blank first, and their lengths, of floats in [-1, 1)."""
    features_BTF, frames_B = extract_lines(samples_BN, lengths_B, settings)
    return _emit(parameters, features_BTF, frames_B, settings)


def _emit(parameters: Parameters, features_BTF: Tensor, frames_B: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    inputs, norm_frames_B, out_B = masked_inputs(features_BTF, frames_B, settings)
    found = call_network(parameters, settings, inputs, norm_frames_B=norm_frames_B)
    logits_BTV = found if isinstance(found, Tensor) else found.logits
    return log_softmax(blank_first(logits_BTV, settings)), out_B


# An encoder and a decoder.


def encode_samples(parameters: Parameters, samples_BN: Tensor, *, settings: Settings) -> Tensor:
    """Vectors of speech [B, T, D]: utterances of one length, for which no masks are needed."""
    lengths_B = torch.full_like(samples_BN[:, 0], samples_BN.shape[1], dtype=torch.int64)
    features_BTF, _ = extract_lines(samples_BN, lengths_B, settings)
    name = "input_values" if settings.kind in RAW else "input_features"
    given = features_BTF[:, :, 0] if settings.kind in RAW else features_BTF.mT
    found: Tensor = call_network(parameters, settings, {name: given}, method="encode")
    return found


def decode_token(
    parameters: Parameters, token_B1: Tensor, encoded_BTD: Tensor, *past_and_unused: Tensor, settings: Settings
) -> tuple[Tensor, ...]:
    """Scores [B, 1, V] behind one more token, and keys and values with it, four of each layer."""
    past = past_and_unused[: 4 * _decoder_shape(settings)[0]]
    inputs = {"token_B1": token_B1, "encoded_BTD": encoded_BTD, "past": past}
    found: tuple[Tensor, ...] = call_network(parameters, settings, inputs, method=_step_decoder)
    return found


def _step_decoder(network: Any, token_B1: Tensor, encoded_BTD: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, ...]:
    transformers, decoder = import_transformers(), network.get_decoder()
    own, speech = [], []
    for layer, place in zip(decoder.layers, range(0, len(past), 4), strict=True):
        own.append(tuple(past[place : place + 2]))
        # What is not there yet: all of it at first, nothing later.
        new_BTD = encoded_BTD[:, past[place + 2].shape[2] :]
        pairs = zip((layer.encoder_attn.k_proj, layer.encoder_attn.v_proj), past[place + 2 : place + 4], strict=True)
        speech.append(tuple(torch.cat([kept, _heads(project(new_BTD), kept)], dim=2) for project, kept in pairs))
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(own), transformers.DynamicCache(speech))
    hidden_B1D = decoder(
        input_ids=token_B1, encoder_hidden_states=encoded_BTD, past_key_values=cache, use_cache=True
    ).last_hidden_state
    kept = zip(cache.self_attention_cache.layers, speech, strict=True)
    return network.proj_out(hidden_B1D), *(one for layer, pair in kept for one in (layer.keys, layer.values, *pair))


def _heads(x_BTD: Tensor, like_BHTd: Tensor) -> Tensor:
    return x_BTD.reshape(*x_BTD.shape[:2], like_BHTd.shape[1], like_BHTd.shape[3]).transpose(1, 2)


def _decoder_shape(settings: Settings) -> tuple[int, int, int]:
    """Layers, heads and their width."""
    config: Any = build_network(settings).module.config
    of_moonshine = settings.kind == "moonshine"
    heads = config.decoder_num_attention_heads if of_moonshine else config.decoder_attention_heads
    width = config.hidden_size if of_moonshine else config.d_model
    return (config.decoder_num_hidden_layers if of_moonshine else config.decoder_layers), heads, width // heads


def _encoder_graph(parameters: Parameters, settings: Settings) -> Graph:
    _, heads, width = _decoder_shape(settings)
    most = window_samples(settings)
    return Graph(
        name="encoder",
        module=Function(partial(encode_samples, settings=settings), _part(parameters, is_decoder=False)),
        examples=(torch.sin(torch.arange(2 * _EXAMPLE_SAMPLES).float() ** 1.1).mul(0.1).view(2, -1),),
        inputs={"samples": (BATCH, "samples")},
        outputs={"encoded": (BATCH, "frames", heads * width)},
        least={"samples": max(WINDOW_SAMPLES, _LEAST_SAMPLES - 2 * silence_samples(settings))},
        most={} if most is None else {"samples": most},
    )


def _decoder_graph(parameters: Parameters, settings: Settings, *, for_sherpa: bool = False) -> Graph:
    layers, heads, width = _decoder_shape(settings)
    past: dict[str, Axes] = {}
    present: dict[str, Axes] = {}
    for layer in range(layers):
        for of, before, after in (("decoder", "past", "tokens"), ("encoder", "past_frames", "frames")):
            for name in (f"{layer}.{of}.key", f"{layer}.{of}.value"):
                past[f"past_key_values.{name}"] = (BATCH, heads, before, width)
                present[f"present.{name}"] = (BATCH, heads, after, width)
    sizes = {"past": 3, "past_frames": 5}
    unused: dict[str, Axes] = {"use_cache_branch": (1,)} if for_sherpa else {}
    return Graph(
        name="decoder",
        module=Function(partial(decode_token, settings=settings), _part(parameters, is_decoder=True)),
        examples=(
            torch.ones(2, 1, dtype=torch.int64),
            torch.zeros(2, 9, heads * width),
            *(torch.zeros(2, heads, sizes[str(before)], width) for _, _, before, _ in past.values()),
            *(torch.tensor([True]) for _ in unused),
        ),
        inputs={"token": (BATCH, 1), "encoded": (BATCH, "frames", heads * width), **past, **unused},
        outputs={"logits": (BATCH, 1, settings.tokens - 1), **present},
        least={"past": 0, "past_frames": 0},
    )


def _part(parameters: Parameters, *, is_decoder: bool) -> Parameters:
    """The tensors of the decoder, its output among them, or of the encoder."""
    return {name: p for name, p in parameters.items() if (".encoder." not in f".{name}") == is_decoder}


# sherpa-onnx.


def to_sherpa(parameters: Parameters, settings: Settings, pieces: Sequence[str]) -> SherpaModel:
    if not settings.is_ctc:
        return _moonshine_to_sherpa(parameters, settings, pieces)
    if settings.kind == "wav2vec2-bert":
        if settings.silence_seconds:
            raise InputError("silence_seconds: sherpa-onnx computes the features, to which none can be added")
        emit = partial(emit_filterbanks, settings=settings)
        return sherpa_from_filterbanks(emit, parameters, pieces=pieces, subsampling=2)
    if settings.kind not in RAW or not settings.of_processor.get("do_normalize", True):
        raise InputError(
            f"sherpa-onnx has no recogniser that takes the features of this model (model_type={settings.kind}, "
            f"{settings.of_processor.get('feature_extractor_type')}): expected --to onnx"
        )
    return sherpa_from_samples(partial(emit_samples, settings=settings), parameters, pieces=pieces)


def emit_filterbanks(
    parameters: Parameters, filterbanks_BTF: Tensor, frames_B: Tensor, *, settings: Settings
) -> tuple[Tensor, Tensor]:
    """`emit_samples` of Kaldi's filterbanks of 16-bit samples, as Wav2Vec2-BERT takes them."""
    features_BTF, frames_B = stack_filterbanks(filterbanks_BTF, frames_B, settings.of_processor)
    return _emit(parameters, features_BTF, frames_B, settings)


def _moonshine_to_sherpa(parameters: Parameters, settings: Settings, pieces: Sequence[str]) -> SherpaModel:
    """Its decoding stops at 15 tokens a second, ours at 6.5; nobody speaks so fast."""
    if settings.kind != "moonshine":
        raise InputError(f"sherpa-onnx runs {settings.kind} with a decoder of another form: expected --to onnx")
    if decoder_prompt(settings) != (_SHERPA_START,) or end_of_text(settings) != _SHERPA_END:
        raise InputError("sherpa-onnx begins texts of Moonshine with token 1 and ends them with 2; this model does not")
    return SherpaModel(
        recogniser="OfflineRecognizer.from_moonshine_v2",
        graphs={
            "encoder": _encoder_graph(parameters, settings),
            "decoder": _decoder_graph(parameters, settings, for_sherpa=True),
        },
        symbols={number: _encoded(piece) for number, piece in enumerate(pieces[1:]) if piece},
    )


def _encoded(piece: str) -> str:
    """A token's bytes as this recogniser reads them.

    >>> _encoded(" the"), _encoded("<0xE2>")
    ('IHRoZQ==', '4g==')
    """
    found = _BYTE.fullmatch(piece)
    return base64.b64encode(bytes([int(found[1], 16)]) if found else piece.encode()).decode()


EXPORT = Export(onnx=to_onnx, sherpa=to_sherpa)
