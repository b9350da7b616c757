"""The same function from other numbers: LayerNorms made smaller, the matrices that read them larger.

A pre-LayerNorm block reads its LayerNorm through one matrix alone, y = W·(w·x̂ + b), so (w/f, b/f, f·W) computes the
same for any f > 0. Training is another matter, for a gradient scales against its parameter: one step of SGD moves the
LayerNorm f times as far as before and the matrix a f-th as far, and relative to one another their updates change by f².

So a model can be given the imbalance of Pelikan et al. (2025, Figure 5) between LayerNorms and the matrices that read
them, as strong as one wants and at the same error rate. Local training is another one then, too: compare clippings at
one factor, never one clipping across factors.
"""

import math

from torch import Tensor

from sottovoce.errors import InputError
from sottovoce.models.family import Parameters
from sottovoce.models.transformer.settings import Settings, parameter_shapes

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
