"""The architecture of the CTC transformer: its settings and named sizes, its parameters and what figures call them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import FeatureSettings
from sottovoce.models.checks import check_counts, check_probabilities, check_size, check_token_count
from sottovoce.models.family import Parameters
from sottovoce.models.log_mel import check_feature_settings
from sottovoce.models.transformer.positions import Cape

KERNEL, STRIDE = 7, 3
CONTEXT = (KERNEL - STRIDE) // 2  # output frame i is centred on the input frames 3i, 3i+1, 3i+2 that it replaces
SECONDS_PER_FRAME = STRIDE * 0.01


@dataclass(frozen=True, slots=True)
class Settings:
    """The architecture. `tokens` counts the blank; the MLP is four times as wide as the model.

    `as_released`: what the code of Pelikan et al. has and their text does not name. Its features are others
    (`transformer.features`), and each utterance is normalised once more after SpecAugment, with a learned scale and
    offset. `ears`, as saved models call them: how our own features are normalised; None is the paper's way.
    """

    layers: int
    width: int
    tokens: int
    heads: int = 4
    features: int = 80
    dropout: float = 0.3
    layer_drop: float = 0.3
    norm: Literal["pre", "post"] = "pre"
    positions: Literal["cape", "sinusoidal"] = "cape"
    cape: Cape = field(default_factory=Cape)
    as_released: bool = False
    ears: FeatureSettings | None = None

    def __post_init__(self) -> None:
        check_feature_settings(self.ears, as_released=self.as_released)
        check_counts(self, "layers", "width", "heads", "features")
        check_token_count(self.tokens)
        if self.width % self.heads:
            raise InputError(f"model: width={self.width} does not divide into heads={self.heads}")
        check_probabilities(self, "dropout", "layer_drop")
        for name, allowed in (("norm", ("pre", "post")), ("positions", ("cape", "sinusoidal"))):
            if (value := getattr(self, name)) not in allowed:
                raise InputError(f"model: {name}={value!r}, expected {' or '.join(allowed)}")


class Size(NamedTuple):
    layers: int
    width: int
    heads: int = 4


SIZES: Mapping[str, Size] = {
    "tiny": Size(layers=4, width=96),
    "small": Size(layers=8, width=256),
    "base": Size(layers=36, width=768),  # 255.8M parameters
    "narrow": Size(layers=36, width=512),
    "wide": Size(layers=36, width=1024),
    "shallow": Size(layers=16, width=768),
    "deep": Size(layers=72, width=768),
}


def named_settings(size: str, *, tokens: int, **changes: Any) -> Settings:
    """The settings of a named size, with the flagship's dropout and layer-drop unless changed.

    >>> named_settings("tiny", tokens=30, layer_drop=0.0).width
    96
    """
    check_size(size, SIZES, where="model: ")
    return Settings(**{**SIZES[size]._asdict(), "tokens": tokens, **changes})


# Queries, keys and values are one tensor, hence one layer to clip, as in the paper's Figure 5 ("wqkv").
BLOCK_NAMES = (
    "attention.norm.weight",
    "attention.norm.bias",
    "attention.qkv.weight",
    "attention.output.weight",
    "mlp.norm.weight",
    "mlp.norm.bias",
    "mlp.hidden.weight",
    "mlp.output.weight",
)


def parameter_shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape, in the model's order."""
    d, v = settings.width, settings.tokens
    block = ((d,), (d,), (3 * d, d), (d, d), (d,), (d,), (4 * d, d), (d, 4 * d))
    shapes: dict[str, tuple[int, ...]] = {"input.weight": (1,), "input.bias": (1,)} if settings.as_released else {}
    shapes |= {"conv.weight": (2 * d, settings.features, KERNEL), "conv.bias": (2 * d,)}
    for layer in range(settings.layers):
        shapes |= {f"blocks.{layer:02d}.{name}": shape for name, shape in zip(BLOCK_NAMES, block, strict=True)}
    if settings.norm == "pre":
        shapes |= {"final.norm.weight": (d,), "final.norm.bias": (d,)}
    return shapes | {"output.weight": (v, d), "output.bias": (v,)}


def init(settings: Settings, *, generator: torch.Generator) -> dict[str, Tensor]:
    """Fresh float32 parameters on the host, in the flagship's distributions.

    Block matrices are uniform with variance 1/(3·fan_in); the convolution and the output matrix have 1/fan_in.
    """
    shapes = parameter_shapes(settings)
    parameters = {}
    for name, shape in shapes.items():
        if ".norm." in name or name.startswith("input."):
            parameters[name] = torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
            continue
        fan_in = math.prod(shapes[name.replace("bias", "weight")][1:])
        variance_times_fan_in = 1.0 if name in ("conv.weight", "output.weight") else 1 / 3
        limit = math.sqrt(3 * variance_times_fan_in / fan_in)
        parameters[name] = torch.empty(shape).uniform_(-limit, limit, generator=generator)
    return parameters


def layer_index(name: str) -> int | None:
    """The block that a parameter belongs to, None outside the blocks.

    >>> layer_index("blocks.07.mlp.hidden.weight"), layer_index("conv.weight")
    (7, None)
    """
    return int(name.split(".")[1]) if name.startswith("blocks.") else None


def parameter_kind(name: str) -> str:
    """The group in which the paper plots (Figure 5) and noises (Figure 15) a parameter.

    One of conv, layer_norm, attention (its "wqkv"), attention_output ("wf"), mlp ("w1", "w2"), output; as released also
    input.

    >>> parameter_kind("blocks.07.attention.output.weight"), parameter_kind("blocks.07.mlp.norm.bias")
    ('attention_output', 'layer_norm')
    """
    if ".norm." in name:
        return "layer_norm"
    if ".attention." in name:
        return "attention_output" if ".output." in name else "attention"
    return "mlp" if ".mlp." in name else name.split(".")[0]


def parameter_role(name: str) -> str:
    """What the paper calls a parameter in its figures, norms and matrices of a block apart.

    One of conv, ln1, wqkv, wf, ln2, w1, w2, last_norm (behind the blocks), output; as released also input.

    >>> parameter_role("blocks.07.mlp.hidden.weight"), parameter_role("blocks.07.mlp.norm.bias")
    ('w1', 'ln2')
    """
    part = next((part for part in ("attention", "mlp") if f".{part}." in name), None)
    if ".norm." in name:
        return {"attention": "ln1", "mlp": "ln2", None: "last_norm"}[part]
    if part is None:
        return name.split(".")[0]
    first, second = ("wqkv", "wf") if part == "attention" else ("w1", "w2")
    return second if ".output." in name else first


# The same function from other numbers. A pre-LayerNorm block reads its LayerNorm through one matrix alone,
# y = W·(w·x̂ + b), so (w/f, b/f, f·W) computes the same for any f > 0. Gradients scale against their parameters:
# relative to one another, the updates of LayerNorm and matrix change by f². So a model can be given the imbalance of
# Pelikan et al. (2025, Figure 5) at the same error rate. Compare clippings at one factor only.

_READERS_IN_BLOCK = {"attention.norm": "attention.qkv.weight", "mlp.norm": "mlp.hidden.weight"}


def norm_readers(settings: Settings) -> dict[str, str]:
    """Every LayerNorm and the one matrix that reads it.

    >>> norm_readers(Settings(layers=1, width=8, tokens=5))["blocks.00.mlp.norm"]
    'blocks.00.mlp.hidden.weight'
    """
    if settings.norm != "pre":
        raise InputError(
            f"norm={settings.norm!r}: the residual stream reads a post-LayerNorm too, which cannot be rescaled; "
            "expected norm='pre'"
        )
    readers = {
        f"blocks.{layer:02d}.{norm}": f"blocks.{layer:02d}.{matrix}"
        for layer in range(settings.layers)
        for norm, matrix in _READERS_IN_BLOCK.items()
    }
    return readers | {"final.norm": "output.weight"}


def rescaled_norms(parameters: Parameters, *, factor: float, settings: Settings) -> dict[str, Tensor]:
    """`parameters` of the same function with every LayerNorm divided by `factor` and its matrix multiplied by it.

    The outputs are equal up to rounding, and to the bit where `factor` is a power of two. Tensors that do not change
    are shared with `parameters`.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise InputError(f"factor={factor}, expected a positive finite number")
    readers = norm_readers(settings)
    # A low-rank pair beside a matrix would have to be rescaled with it.
    assert parameters.keys() == parameter_shapes(settings).keys(), "expected the parameters of a whole, plain model"
    rescaled = dict(parameters)
    for norm, matrix in readers.items():
        for name in (f"{norm}.weight", f"{norm}.bias"):
            rescaled[name] = parameters[name] / factor
        rescaled[matrix] = parameters[matrix] * factor
    return rescaled
