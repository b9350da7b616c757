"""A pretrained network as a function of parameters, and what is changed about it so that clients can train it.

- Batch norm runs with its own statistics, which are frozen tensors: clients never change them.
- Group norms do not look at padding, and masks count frames exactly: an utterance is the same in any batch.
- LayerDrop and dropout are off, or drawn from the client's own seed; their SpecAugment is off, ours is used.
- Layers know the clients of a stack (`layers`).

Shapes: B utterances, T frames, F features, V outputs, L tokens, D width.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sottovoce.base.errors import InputError
from sottovoce.base.importing import import_extra
from sottovoce.base.seeds import seeded_kernels
from sottovoce.models.family import Parameters
from sottovoce.models.huggingface.folder import CLASSES
from sottovoce.models.huggingface.layers import MaskedGroupNorm, adapt_layers, add_low_rank
from sottovoce.models.huggingface.settings import Settings, find_weights
from sottovoce.models.trainable import with_corrections

MERGED = ("wavlm",)  # their attention reads matrices past their layers, so that corrections are added to these
CPU = torch.device("cpu")
_UNUSED = "masked_spec_embed"  # their SpecAugment's


def import_transformers(called: str = "model: family=huggingface") -> Any:
    return import_extra("transformers", extra="hf", called=called)


class EncoderCtc(nn.Module):
    """The encoder of a recogniser with a decoder, and an output layer for CTC in the decoder's place."""

    def __init__(self, encoder: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.output = nn.Linear(width, outputs)

    def forward(self, **inputs: Tensor) -> Any:
        return self.output(self.encoder(**inputs).last_hidden_state)


def _configure(settings: Settings) -> Any:
    """Their configuration, without what they would draw for themselves in training."""
    content = json.loads(settings.config)
    if settings.head == "ctc" and settings.kind in CLASSES and "decoder_start_token_id" not in content:
        content |= {"vocab_size": settings.tokens, "pad_token_id": 0}
    made = import_transformers().CONFIG_MAPPING[settings.kind].from_dict(content)
    # A file leaves out what is at its default, which is not always zero.
    return type(made).from_dict(_switch_off(made.to_dict(), keep_dropout=settings.dropout))


def _switch_off(content: dict[str, Any], *, keep_dropout: bool) -> dict[str, Any]:
    for name, value in content.items():
        if isinstance(value, dict):
            _switch_off(value, keep_dropout=keep_dropout)
        elif name == "apply_spec_augment":
            content[name] = False
        elif not keep_dropout and ("dropout" in str(name) or "layerdrop" in str(name)) and isinstance(value, float):
            content[name] = 0.0
    return content


def _make(settings: Settings) -> nn.Module:
    config = _configure(settings)
    made: nn.Module = getattr(import_transformers(), CLASSES[settings.kind])(config)
    return _with_head(made, settings, config)


def _with_head(made: Any, settings: Settings, config: Any) -> nn.Module:
    if settings.is_ctc and hasattr(config, "decoder_start_token_id") and settings.head == "ctc":
        width = getattr(config, "hidden_size", None) or config.d_model
        return EncoderCtc(made.model.encoder, width, settings.tokens)
    found: nn.Module = made
    return found


def load_pretrained(settings: Settings, *, generator: torch.Generator) -> dict[str, Tensor]:
    """Parameters and kept statistics with the values of the model's files; only a new head is drawn."""
    folder, transformers = find_weights(settings), import_transformers()
    config, seed = _configure(settings), int(torch.randint(2**62, (1,), generator=generator))
    with seeded_kernels(seed, device=CPU), _quiet(transformers):
        loaded, info = getattr(transformers, CLASSES[settings.kind]).from_pretrained(
            folder.path,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=settings.head is not None,
            output_loading_info=True,
        )
        module = _with_head(loaded, settings, config)
    if settings.head is None and (missing := sorted(info["missing_keys"])):
        raise InputError(f"{folder.path}: its files have no {missing[0]!r}: they are of another model")
    return {name: tensor.detach().clone() for name, tensor in _named_tensors(module).items()}


class _quiet:
    """Their notes on what was loaded are ours to make."""

    def __init__(self, transformers: Any) -> None:
        self._logging = transformers.utils.logging

    def __enter__(self) -> None:
        self._before = self._logging.get_verbosity()
        self._logging.set_verbosity_error()
        self._bar = self._logging.is_progress_bar_enabled()
        self._logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        self._logging.set_verbosity(self._before)
        if self._bar:
            self._logging.enable_progress_bar()


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, each once, and statistics that are saved with them."""
    saved = module.state_dict(keep_vars=True).keys()
    statistics = {
        name: buffer for name, buffer in module.named_buffers() if name in saved and buffer.is_floating_point()
    }
    return {**dict(module.named_parameters()), **statistics}


@dataclass(frozen=True, eq=False)
class Network:
    """A network without parameters of its own. `shapes` has all tensors, `trainable` those that may be trained."""

    module: nn.Module
    shapes: Mapping[str, tuple[int, ...]]
    trainable: tuple[str, ...]


@cache
def build_network(settings: Settings, corrected: frozenset[str] = frozenset(), *, training: bool = False) -> Network:
    """The network of `settings`, with low-rank corrections of the layers `corrected`."""
    with seeded_kernels(0, device=CPU), _quiet(import_transformers()):
        module = _make(settings)
    tensors = _named_tensors(module)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    trainable = tuple(name for name, p in module.named_parameters() if p.requires_grad and not name.endswith(_UNUSED))
    adapt_layers(module)
    add_low_rank(module, corrected)
    _forget_values(module)
    module.train(training)
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval()
    module.requires_grad_(False)
    return Network(module, shapes, trainable)


def _forget_values(module: nn.Module) -> None:
    """Parameters come with each call: here they need no memory. Tied ones stay tied."""
    blank: dict[int, nn.Parameter] = {}
    for layer in module.modules():
        for name, p in layer._parameters.items():
            if p is not None:
                layer._parameters[name] = blank.setdefault(id(p), nn.Parameter(p.to("meta"), requires_grad=False))


Method = str | Callable[..., Any]


class Call(nn.Module):
    """What is called of a network: the network itself, its encoder, its own decoding (`generate`), or a function."""

    def __init__(self, network: nn.Module, method: Method) -> None:
        super().__init__()
        self.network, self.method = network, method

    def forward(self, **inputs: Any) -> Any:
        network: Any = self.network
        if callable(self.method):
            return self.method(network, **inputs)
        if self.method == "generate":
            return network.generate(**inputs)
        if self.method == "encode":
            return _encoder(network)(**inputs).last_hidden_state
        return network(**inputs)


def _encoder(network: Any) -> Any:
    """What makes vectors of speech: a part of every network."""
    if isinstance(network, EncoderCtc):
        return network.encoder
    if network.config.is_encoder_decoder:
        return network.get_encoder()
    return getattr(network, "encoder", None) or getattr(network, network.base_model_prefix)


@cache
def _prepare_call(
    settings: Settings,
    corrected: frozenset[str],
    training: bool,
    method: Method,
    device: torch.device,
) -> tuple[nn.Module, Mapping[str, Tensor], tuple[str, ...]]:
    """The module to call, buffers that are no parameters (positions, say) on the `device`, and its group norms."""
    network = build_network(settings, corrected, training=training)
    buffers = {
        f"network.{name}": buffer.to(device)
        for name, buffer in network.module.named_buffers()
        if name not in network.shapes
    }
    norms = tuple(f"network.{name}" for name, m in network.module.named_modules() if isinstance(m, MaskedGroupNorm))
    return Call(network.module, method), buffers, norms


def call_network(
    parameters: Parameters,
    settings: Settings,
    inputs: Mapping[str, Any],
    *,
    norm_frames_B: Tensor | None = None,
    training: bool = False,
    method: Method = "forward",
) -> Any:
    """What the network makes of `inputs`; `norm_frames_B` are the frames that group norms look at, None for all."""
    if settings.kind in MERGED:
        parameters = with_corrections(parameters)
    corrected = frozenset(name.removesuffix(".lora_a") for name in parameters if name.endswith(".lora_a"))
    first = next(iter(parameters.values()))
    module, buffers, norms = _prepare_call(settings, corrected, training, method, first.device)
    given = {f"network.{name}": tensor for name, tensor in parameters.items()}
    if norm_frames_B is not None:
        given |= {f"{name}.frames_B": norm_frames_B for name in norms}
    with _without_warnings() if settings.kind == "wavlm" else nullcontext():
        return functional_call(module, {**buffers, **given}, kwargs=dict(inputs))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """WavLM hands torch's attention a mask of another type than its positions, of which torch warns at every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Support for mismatched")
        yield


# What is trained.

_HEADS = ("lm_head", "ctc_head", "proj_out", "output")


def name_part(settings: Settings, part: str) -> list[str]:
    """The tensors that `all`, `head` or `norms` mean."""
    network = build_network(settings)
    if part == "all":
        return list(network.trainable)
    if part == "norms":
        return [name for name in network.trainable if _is_norm(network.module, name)]
    own = [name for name in network.trainable if name.split(".")[0] in _HEADS]
    tied = [name for name in network.trainable if name.endswith("embed_tokens.weight")]
    return own or tied  # an output layer that is tied to the embedding of tokens


def _is_norm(module: nn.Module, name: str) -> bool:
    layer = module.get_submodule(name.rpartition(".")[0])
    return isinstance(layer, nn.LayerNorm | nn.GroupNorm | nn.modules.batchnorm._BatchNorm)
