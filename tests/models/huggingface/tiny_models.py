"""Tiny random models of every class, in folders that their own `save_pretrained` has written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'-"]
TOKENS = len(LETTERS)
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
_CONVOLUTIONS = {
    "conv_dim": [16] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": TOKENS,
    "pad_token_id": 0,
    "ctc_zero_infinity": True,
    "ctc_loss_reduction": "mean",
}
_LAYER_NORM = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
WHISPER_SECONDS = 6  # its window, where real ones have 30: a pass computes all of it, speech or not
_WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": TOKENS,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "max_source_positions": WHISPER_SECONDS * 50,
    "max_target_positions": 64,
    "num_mel_bins": 80,
}
_MOONSHINE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 2,
    "decoder_num_attention_heads": 2,
    "vocab_size": TOKENS,
    "pad_token_id": 2,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "max_position_embeddings": 64,
}
_RAW = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 16000, "feature_size": 1}
_PARAKEET = {
    "feature_extractor_type": "ParakeetFeatureExtractor",
    "feature_size": 80,
    "hop_length": 160,
    "n_fft": 512,
    "win_length": 400,
    "preemphasis": 0.97,
    "sampling_rate": 16000,
}
_SEAMLESS = {
    "feature_extractor_type": "SeamlessM4TFeatureExtractor",
    "feature_size": 80,
    "num_mel_bins": 80,
    "stride": 2,
    "sampling_rate": 16000,
    "padding_value": 1,
}
_OF_WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 80,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": WHISPER_SECONDS,
    "n_samples": WHISPER_SECONDS * 16_000,
    "nb_max_frames": WHISPER_SECONDS * 100,
    "sampling_rate": 16000,
}

# class, its configuration, and what features it takes; the first of each class by the name of its model_type
KINDS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2ForCTC", {**_ENCODER, **_CONVOLUTIONS}, {**_RAW, "do_normalize": True}),
    "xls-r": ("Wav2Vec2ForCTC", {**_ENCODER, **_CONVOLUTIONS, **_LAYER_NORM}, {**_RAW, "do_normalize": True}),
    "hubert": ("HubertForCTC", {**_ENCODER, **_CONVOLUTIONS}, {**_RAW, "do_normalize": True}),
    "wavlm": ("WavLMForCTC", {**_ENCODER, **_CONVOLUTIONS, "num_buckets": 32}, {**_RAW, "do_normalize": False}),
    "wav2vec2-bert": (
        "Wav2Vec2BertForCTC",
        {**_ENCODER, "vocab_size": TOKENS, "pad_token_id": 0, "feature_projection_input_dim": 160},
        _SEAMLESS,
    ),
    "parakeet_ctc": (
        "ParakeetForCTC",
        {
            "vocab_size": TOKENS,
            "pad_token_id": TOKENS - 1,
            "encoder_config": {**_ENCODER, "subsampling_conv_channels": 8, "num_mel_bins": 80},
        },
        _PARAKEET,
    ),
    "whisper": ("WhisperForConditionalGeneration", _WHISPER, _OF_WHISPER),
    "moonshine": ("MoonshineForConditionalGeneration", _MOONSHINE, {**_RAW, "do_normalize": False}),
}


def write_tiny_model(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """A folder as the hub has them, with random weights."""
    import transformers

    name, config, processor = KINDS[kind]
    made = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = made(made.config_class(**config))
        for p in module.parameters():  # what begins as nothing would hide mistakes
            if p.requires_grad and not p.any():
                torch.nn.init.normal_(p, std=0.02)
        for layer in module.modules():
            if isinstance(layer, torch.nn.BatchNorm1d):
                torch.nn.init.uniform_(layer.running_var, 0.5, 2.0)
                torch.nn.init.normal_(layer.running_mean, std=0.5)
    module.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    _write_tokenizer(kind, folder)
    return folder


def _write_tokenizer(kind: str, folder: Path) -> None:
    """Letters; of a model with a decoder as a `tokenizer.json`, and of Parakeet, whose blank is last, likewise."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if kind not in ("whisper", "moonshine", "parakeet_ctc"):
        vocabulary = {letter.upper() if len(letter) == 1 else letter: i for i, letter in enumerate(LETTERS)}
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        settings = {
            "tokenizer_class": "Wav2Vec2CTCTokenizer",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "word_delimiter_token": "|",
            "do_lower_case": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return
    letters = [letter.replace("|", "\u2581") for letter in LETTERS]
    if kind == "parakeet_ctc":
        letters = [*letters[1:], "<pad>"]
    own = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    own.normalizer = normalizers.Replace(" ", "\u2581")
    own.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    own.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("\u2581", " ")])
    own.add_special_tokens(["<pad>", "<s>", "</s>", "<unk>"])
    own.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
