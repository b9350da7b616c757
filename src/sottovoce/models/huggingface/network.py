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
from functools import cache, partial
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sottovoce.base.errors import InputError
from sottovoce.base.importing import import_extra
from sottovoce.base.seeds import seeded_kernels
from sottovoce.models.family import Parameters
from sottovoce.models.huggingface.attention import adapt_attention
from sottovoce.models.huggingface.folder import CLASSES
from sottovoce.models.huggingface.layers import MaskedGroupNorm, adapt_layers, add_low_rank
from sottovoce.models.huggingface.recompute import Scope, recompute_layers
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


def describe_config(settings: Settings) -> dict[str, Any]:
    """The model's config.json; with a new head, that of the model with it."""
    content: dict[str, Any] = json.loads(settings.config)
    if settings.head == "ctc" and settings.kind in CLASSES and "decoder_start_token_id" not in content:
        content |= {"vocab_size": settings.tokens, "pad_token_id": 0}
    return content


def _configure(settings: Settings) -> Any:
    """Their configuration, without what they would draw for themselves in training."""
    made = import_transformers().CONFIG_MAPPING[settings.kind].from_dict(describe_config(settings))
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
    with seeded_kernels(seed, device=CPU), quiet(transformers):
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
    unlike = [one if isinstance(one, str) else one[0] for one in (*info["missing_keys"], *info["mismatched_keys"])]
    missing = sorted(name for name in unlike if settings.head is None or name.split(".")[0] not in _HEADS)
    if missing:
        raise InputError(f"{folder.path}: its files have no {missing[0]!r}: they are of another model")
    tensors = {name: tensor.detach().clone() for name, tensor in _named_tensors(module).items()}
    return tensors if settings.head is None else tensors | _draw_head(tensors, generator=generator)


def _draw_head(tensors: Parameters, *, generator: torch.Generator) -> dict[str, Tensor]:
    """A new output layer, whatever the files have in its place: its outputs are for other tokens."""
    drawn = {}
    for name, tensor in tensors.items():
        if name.split(".")[0] in _HEADS:
            width = tensor[0].numel() if tensor.dim() > 1 else 0
            limit = 0.0 if width == 0 else width**-0.5
            drawn[name] = torch.empty(tensor.shape).uniform_(-limit, limit, generator=generator)
    return drawn


class quiet:
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


@contextmanager
def _calling(lock: RLock, *, quiet: bool) -> Iterator[None]:
    """One call at a time, since a module is shared.

    `quiet`: WavLM hands torch's attention a mask of another type than its positions, and torch warns of it every time.
    """
    with lock, warnings.catch_warnings() if quiet else nullcontext():
        if quiet:
            warnings.filterwarnings("ignore", message="Support for mismatched")
        yield


@dataclass(frozen=True, eq=False)
class Network:
    """A network without parameters of its own. `shapes` has all tensors, `trainable` those that may be trained."""

    module: nn.Module
    shapes: Mapping[str, tuple[int, ...]]
    trainable: tuple[str, ...]
    scope: Scope  # of calls


def build_network(
    settings: Settings,
    corrected: frozenset[str] = frozenset(),
    *,
    training: bool = False,
    recompute: float = 0.0,
) -> Network:
    """The network of `settings`, with low-rank corrections of the layers `corrected`.

    `recompute`: the share of its layers that are computed again on the way back.
    """
    return _build(settings, corrected, training, recompute)  # one network, however this is called


@cache
def _build(settings: Settings, corrected: frozenset[str], training: bool, recompute: float) -> Network:
    with seeded_kernels(0, device=CPU), quiet(import_transformers()):
        module = _make(settings)
    tensors = _named_tensors(module)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    trainable = tuple(name for name, p in module.named_parameters() if p.requires_grad and not name.endswith(_UNUSED))
    adapt_layers(module)
    adapt_attention(module, settings.kind)
    add_low_rank(module, corrected)
    _forget_values(module)
    module.train(training)
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval()
    module.requires_grad_(False)
    scope = partial(_calling, RLock(), quiet=settings.kind == "wavlm")
    if recompute:
        recompute_layers(module, share=recompute, scope=scope, draws=training)
    return Network(module, shapes, trainable, scope)


def _forget_values(module: nn.Module) -> None:
    """Parameters come with each call: here they need no memory. Tied ones stay tied."""
    blank: dict[int, nn.Parameter] = {}
    for layer in module.modules():
        for name, p in layer._parameters.items():
            if p is not None:
                layer._parameters[name] = blank.setdefault(id(p), nn.Parameter(p.to("meta"), requires_grad=False))


Method = str | Callable[..., Any]


def _encoder(network: Any) -> Any:
    """What makes vectors of speech: a part of every network."""
    if isinstance(network, EncoderCtc):
        return network.encoder
    if network.config.is_encoder_decoder:
        return network.get_encoder()
    return getattr(network, "encoder", None) or getattr(network, network.base_model_prefix)


class Slot(NamedTuple):
    """A place in a module for a tensor, the tensor's name, and what lies there between calls."""

    owner: dict[str, Any]  # a layer's parameters, or its buffers
    key: str
    name: str
    empty: Tensor | None


@dataclass(frozen=True, eq=False)
class PreparedNetwork:
    """A network, its slots, and buffers that are no parameters (positions, say) on the device of its calls."""

    module: Any
    slots: tuple[Slot, ...]
    buffers: Mapping[str, Tensor]
    norms: tuple[Slot, ...]  # of the frames that group norms look at
    scope: Scope

    @contextmanager
    def holding(self, parameters: Parameters, norm_frames_B: Tensor | None) -> Iterator[None]:
        """Within this scope the module has these parameters.

        As `torch.func.functional_call`, which looks for all tensors anew and costs the host a third of a small step.
        """
        given = {**self.buffers, **parameters}
        with self.scope():
            try:
                for owner, key, name, empty in self.slots:
                    owner[key] = given.get(name, empty)  # a part of a network needs its own tensors alone
                for owner, key, _, _ in self.norms:
                    owner[key] = norm_frames_B
                yield
            finally:
                for owner, key, _, empty in (*self.slots, *self.norms):
                    owner[key] = empty


@cache
def _prepare(
    settings: Settings, corrected: frozenset[str], training: bool, recompute: float, device: torch.device
) -> PreparedNetwork:
    network = build_network(settings, corrected, training=training, recompute=recompute)
    module = network.module
    buffers = {name: own.to(device) for name, own in module.named_buffers() if name not in network.shapes}
    norms = [f"{name}.frames_B" for name, layer in module.named_modules() if isinstance(layer, MaskedGroupNorm)]
    first: dict[int, str] = {}  # tied tensors go by the first of their names
    slots = []
    for prefix, layer in module.named_modules():
        for owner in (layer._parameters, layer._buffers):
            for key, empty in owner.items():
                name = f"{prefix}.{key}" if prefix else key
                if empty is not None or name in norms:
                    slots.append(
                        Slot(owner, key, first.setdefault(id(empty), name) if empty is not None else name, empty)
                    )
    return PreparedNetwork(
        module,
        tuple(slot for slot in slots if slot.name not in norms),
        buffers,
        tuple(slot for slot in slots if slot.name in norms),
        network.scope,
    )


def call_network(
    parameters: Parameters,
    settings: Settings,
    inputs: Mapping[str, Any],
    *,
    norm_frames_B: Tensor | None = None,
    training: bool = False,
    recompute: float = 0.0,
    method: Method = "forward",
) -> Any:
    """What the network makes of `inputs`; `norm_frames_B` are the frames that group norms look at, None for all.

    `method` is what is called of it: the network itself, its encoder (`encode`), its own decoding
    (`generate`), or a function of it.
    """
    if settings.kind in MERGED:
        parameters = with_corrections(parameters)
    corrected = frozenset(name.removesuffix(".lora_a") for name in parameters if name.endswith(".lora_a"))
    prepared = _prepare(settings, corrected, training, recompute, next(iter(parameters.values())).device)
    with prepared.holding(parameters, norm_frames_B):
        if not isinstance(method, str):
            return method(prepared.module, **inputs)
        if method == "generate":
            return prepared.module.generate(**inputs)
        if method == "encode":
            return _encoder(prepared.module)(**inputs).last_hidden_state
        return prepared.module(**inputs)


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
