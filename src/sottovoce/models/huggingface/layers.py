"""Layers that know the clients of a stack: torch's own, whose weights may have a leading client axis.

Utterances of N clients lie client by client in one batch. A layer whose weights are shared makes one product for all of
them; one whose weights have a client axis, as trained ones do in a stack, gives each client its own. So with low-rank
corrections (LoRA) the frozen matrices of all clients are multiplied at once.

`adapt_layers` turns the layers of a module into these; names and parameters stay as they were.

Shapes: N clients, B utterances of all of them, I inputs, O outputs, r rank, C channels, T frames, V tokens, D width.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from sottovoce.models.huggingface.frozen import corrected_product, frozen_convolution


class ClientLinear(nn.Linear):
    """x·Wᵀ + bias, and (x·aᵀ)·bᵀ where there is a correction of low rank."""

    def forward(self, x: Tensor) -> Tensor:  # as torch's
        a, b = self._parameters.get("lora_a"), self._parameters.get("lora_b")
        if a is None or b is None:
            return _linear(x, self.weight, self.bias)
        if _is_trained(self.weight, self.bias) or self.weight.dim() == 3 or torch.compiler.is_exporting():
            return _linear(x, self.weight, self.bias) + _linear(_linear(x, a, None), b, None)
        clients = max(len(own) if own.dim() == 3 else 1 for own in (a, b))
        a_NrI, b_NOr = (own.expand(clients, *own.shape[-2:]) for own in (a, b))
        x_NMI = _by_client(x, clients).flatten(1, -2)
        return corrected_product(x_NMI, self.weight, self.bias, a_NrI, b_NOr).view(*x.shape[:-1], -1)


def _is_trained(*weights: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(own is not None and own.requires_grad for own in weights)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dim() == 2 and (bias is None or bias.dim() == 1):
        return functional.linear(x, weight, bias)
    clients = len(weight) if weight.dim() == 3 else len(bias) if bias is not None else 1
    x_NMI = _by_client(x, clients).flatten(1, -2)
    if bias is None:
        y_NMO = x_NMI @ weight.mT
    elif weight.dim() == 3:
        y_NMO = torch.baddbmm(bias.expand(clients, -1)[:, None], x_NMI, weight.mT)
    else:
        y_NMO = x_NMI @ weight.mT + bias[:, None]
    return y_NMO.view(*x.shape[:-1], -1)


class ClientLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None or self.weight.dim() == len(self.normalized_shape):
            return super().forward(x)
        normal = functional.layer_norm(x, self.normalized_shape, None, None, self.eps)
        return _scale_by_client(normal, self.weight, self.bias)


def _scale_by_client(x: Tensor, weight_ND: Tensor, bias_ND: Tensor | None) -> Tensor:
    x_ND = _by_client(x, len(weight_ND))
    view = (len(weight_ND), *[1] * (x_ND.dim() - 2), weight_ND.shape[-1])
    scaled = x_ND * weight_ND.view(view)
    return (scaled if bias_ND is None else scaled + bias_ND.view(view)).view(x.shape)


class ClientConv1d(nn.Conv1d):
    """With a kernel of one it is a product, which is faster and, where its weights are frozen, keeps no inputs."""

    def forward(self, x_BCT: Tensor) -> Tensor:
        if self.kernel_size == self.stride == (1,) and self.padding == (0,) and self.groups == 1:
            return _linear(x_BCT.mT, self.weight[..., 0], self.bias).mT
        if self.weight.dim() == 3:
            return self._convolve(x_BCT)
        x_NBCT = _by_client(x_BCT, len(self.weight))
        if self.groups == 1 and self.dilation == (1,) and isinstance(self.padding, tuple):
            return self._multiply(x_NBCT, padding=self.padding[0])
        # Clients become groups of one convolution.
        clients, outputs = self.weight.shape[:2]
        bias = None if self.bias is None else self.bias.expand(clients, outputs).reshape(-1)
        found = functional.conv1d(
            x_NBCT.transpose(0, 1).flatten(1, 2),
            self.weight.flatten(0, 1),
            bias,
            self.stride,
            self.padding,
            self.dilation,
            clients * self.groups,
        )
        return found.view(-1, clients, outputs, found.shape[-1]).transpose(0, 1).flatten(0, 1)

    def _convolve(self, x_BCT: Tensor) -> Tensor:
        plain = self.padding_mode == "zeros" and isinstance(self.padding, tuple)
        if not plain or not _is_trained(x_BCT) or _is_trained(self.weight, self.bias):
            return super().forward(x_BCT)
        how = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        return frozen_convolution(x_BCT, self.weight, self.bias, **how)

    def _multiply(self, x_NBCT: Tensor, *, padding: int) -> Tensor:
        """As products of all windows: GPUs are slow at convolutions of many groups, above all backwards."""
        (kernel,), (stride,) = self.kernel_size, self.stride
        windows_NBCTK = functional.pad(x_NBCT, (padding, padding)).unfold(-1, kernel, stride)
        clients, lines, _, frames, _ = windows_NBCTK.shape
        windows_NBTI = windows_NBCTK.transpose(2, 3).reshape(clients, lines * frames, -1)
        y_NBTO = _linear(windows_NBTI, self.weight.flatten(2), self.bias)
        return y_NBTO.view(clients * lines, frames, -1).mT


class ClientEmbedding(nn.Embedding):
    """Of tokens: its indices are [B, L]."""

    def forward(self, indices_BL: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return super().forward(indices_BL)
        clients, size = self.weight.shape[:2]
        offsets_N = torch.arange(clients, device=indices_BL.device) * size
        own_NBL = _by_client(indices_BL, clients) + offsets_N[:, None, None]
        found: Tensor = functional.embedding(own_NBL.flatten(0, 1), self.weight.flatten(0, 1))
        return found


class MaskedGroupNorm(nn.GroupNorm):
    """A group norm of [B, C, T] that does not look behind the `frames_B` of each utterance; None: all count.

    Theirs takes means over padding too, so that an utterance would depend on who shares its batch.
    """

    frames_B: Tensor | None

    def forward(self, x_BCT: Tensor) -> Tensor:
        if self.frames_B is None and self.weight.dim() == 1:
            return super().forward(x_BCT)
        batch, channels, frames = x_BCT.shape
        x_BGMT = x_BCT.to(torch.promote_types(x_BCT.dtype, torch.float32)).view(batch, self.num_groups, -1, frames)
        inside_BT = torch.ones(batch, frames, dtype=torch.bool, device=x_BCT.device)
        if self.frames_B is not None:
            inside_BT = torch.arange(frames, device=x_BCT.device) < self.frames_B[:, None]
        inside = inside_BT[:, None, None]
        count = inside.sum(dim=(2, 3), keepdim=True) * x_BGMT.shape[2]
        mean = x_BGMT.where(inside, 0).sum(dim=(2, 3), keepdim=True) / count
        away = (x_BGMT - mean).where(inside, 0)
        variance = away.square().sum(dim=(2, 3), keepdim=True) / count
        normal_BCT = (away * torch.rsqrt(variance + self.eps)).view(batch, channels, frames).to(x_BCT.dtype)
        if self.weight.dim() == 1:
            return normal_BCT * self.weight[:, None] + self.bias[:, None]
        return _scale_by_client(normal_BCT.mT, self.weight, self.bias).mT


def _by_client(x: Tensor, clients: int) -> Tensor:
    return x.view(clients, len(x) // clients, *x.shape[1:])


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ClientLinear,
    nn.LayerNorm: ClientLayerNorm,
    nn.Conv1d: ClientConv1d,
    nn.Embedding: ClientEmbedding,
    nn.GroupNorm: MaskedGroupNorm,
}
_OF_TOKENS = "embed_tokens"  # others are indexed by places, which have no client axis


def adapt_layers(module: nn.Module) -> None:
    """Turn the layers of `module` into those that know clients; the others, and subclasses, stay as they are."""
    for layer in module.modules():
        adapted = _CLASSES.get(type(layer))
        if adapted is not None:
            layer.__class__ = adapted
        if isinstance(layer, MaskedGroupNorm):
            layer.register_buffer("frames_B", None, persistent=False)


def add_low_rank(module: nn.Module, stems: Iterable[str]) -> None:
    """Places for a and b in the linear layers called `stems`; their values come with each call."""
    for stem in stems:
        layer = module.get_submodule(stem)
        assert isinstance(layer, ClientLinear), f"{stem} is {type(layer).__name__}"
        for name in ("lora_a", "lora_b"):
            layer.register_parameter(name, nn.Parameter(torch.empty(0, device="meta")))


def find_unstackable(module: nn.Module, trained: Iterable[str]) -> str | None:
    """The first of the `trained` tensors whose layer cannot give each client its own; None where all can."""
    for name in trained:
        stem, _, leaf = name.rpartition(".")
        layer = module.get_submodule(stem) if leaf != name else module
        known = isinstance(layer, ClientLinear | ClientLayerNorm | ClientConv1d | MaskedGroupNorm) or (
            isinstance(layer, ClientEmbedding) and stem.endswith(_OF_TOKENS)
        )
        if not known or (isinstance(layer, ClientConv1d) and layer.padding_mode != "zeros"):
            return f"{stem} ({type(layer).__name__.removeprefix('Client')})"
    return None
