"""Training a part of a model: chosen tensors, or low-rank corrections of its block matrices (LoRA, Hu et al. 2022).

    start ─► split_parameters ─► trained   a dictionary of tensors like any model's
                              └─► frozen   the rest, which stays as it is

    frozen.with_trained(trained)    what a forward pass takes; gradients flow to `trained`
    frozen.merged(trained)          a plain model again: what is evaluated and saved

What is trained is written as a list of
    blocks.30-35, output, *.norm.*    names of parameters: a shell-like pattern, or what a name begins with
    lora(r=16), lora(r=8, alpha=16)   for every block matrix W that is not trained itself: W + alpha/r · b·a
    lora(r=8, targets=q_proj|v_proj)  for the matrices of layers with these names alone
    lora(r=8, factors=b)              b alone is trained, and a stays as it was drawn (FFA-LoRA, Sun et al. 2024)
    lora(r=8, factors=alternate)      b in the first round, a in the second, and so on (RoLoRA, Chen et al. 2024)
    lora(r=8, factors=project)        b alone; after each round the server makes a, b of b·a anew, by its singular value
                                      decomposition, with orthonormal rows of a (FedSVD, Lee et al. 2025)
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.flat.layout import Layout
from sottovoce.models.family import Parameters
from sottovoce.models.low_rank import low_rank_names, orthonormal_rows

ALLOWED = 'expected "lora(r=16)", "lora(r=8, alpha=16)", "blocks.30-35", "output", "*.norm.*", or several with commas'

_LORA = re.compile(r"lora\(([^()]*)\)")
_SETTING = re.compile(r"\s*(r|alpha|targets|factors)\s*=\s*([\w.|+-]+)\s*")
FACTORS = ("both", "b", "alternate", "project")
_BLOCKS = re.compile(r"blocks\.([0-9]{1,3})(?:-([0-9]{1,3}))?(\..+)?")
_PATTERN = re.compile(r"[\w.*?\[\]-]+")
_COMMA = re.compile(r",(?![^(]*\))")  # not within parentheses


def with_corrections(parameters: Parameters) -> dict[str, Tensor]:
    """Plain parameters, with low-rank corrections added to their matrices."""
    whole = {name: p for name, p in parameters.items() if not name.endswith((".lora_a", ".lora_b"))}
    for name in whole:
        a, b = low_rank_names(name)
        if a in parameters:
            whole[name] = whole[name] + parameters[b] @ parameters[a]
    return whole


@dataclass(frozen=True)
class Lora:
    """Low-rank corrections of rank `rank`. `scale` is alpha/r.

    `targets` are names of layers, None the family's own choice. With noise on both `factors` their product has noise of
    the second order. With b alone, or one of them in a round, it has not.
    """

    rank: int
    scale: float
    targets: tuple[str, ...] | None = None
    factors: str = "both"

    def corrects(self, name: str, *, is_lora_target: Callable[[str], bool]) -> bool:
        """Whether the matrix called `name` gets a correction."""
        if self.targets is None:
            return is_lora_target(name)
        return name.endswith(".weight") and name.split(".")[-2] in self.targets


@dataclass(frozen=True)
class Part:
    """What a list of names and `lora(…)` says: which tensors are trained, and whether block matrices are corrected."""

    text: str
    patterns: tuple[str, ...]
    lora: Lora | None


def parse_part(text: str) -> Part:
    """Read what is to be trained; InputError where it cannot be understood.

    >>> parse_part("blocks.9-10, output").patterns
    ('blocks.09', 'blocks.10', 'output')
    >>> parse_part("lora(r=8, alpha=16)").lora
    Lora(rank=8, scale=2.0, targets=None, factors='both')
    """
    patterns: list[str] = []
    loras: list[Lora] = []
    for item in split_names(text):
        if found := _LORA.fullmatch(item):
            loras.append(_lora(found[1], text=text))
        elif found := _BLOCKS.fullmatch(item):
            patterns += _blocks(*found.groups(), text=text)
        elif _PATTERN.fullmatch(item):
            patterns.append(item)
        else:
            raise InputError(f"trainable={text!r}: {item!r} is not understood, {ALLOWED}")
    if len(loras) > 1:
        raise InputError(f"trainable={text!r}: expected lora(…) at most once")
    return Part(text, tuple(patterns), loras[0] if loras else None)


def split_names(text: str) -> list[str]:
    """The items of a list of what is trained.

    >>> split_names("lora(r=8, alpha=16), output")
    ['lora(r=8, alpha=16)', 'output']
    """
    return [item.strip() for item in _COMMA.split(text)]


def _lora(settings: str, *, text: str) -> Lora:
    found = [_SETTING.fullmatch(item) for item in settings.split(",")]
    given = {match[1]: match[2] for match in found if match is not None}
    if None in found or len(given) != len(found) or "r" not in given:
        raise InputError(f"trainable={text!r}: 'lora({settings})' is not understood, {ALLOWED}")
    try:
        rank = int(given["r"])
        scale = float(given["alpha"]) / rank if "alpha" in given else 1.0
    except (ValueError, ZeroDivisionError):
        rank, scale = 0, math.nan
    if not 1 <= rank < 10**6 or not (math.isfinite(scale) and scale > 0):
        raise InputError(f"trainable={text!r}: expected a rank r of at least 1 and a positive alpha")
    factors = given.get("factors", "both")
    if factors not in FACTORS:
        raise InputError(f"trainable={text!r}: factors={factors}, expected {' or '.join(FACTORS)}")
    targets = given.get("targets")
    return Lora(rank, scale, None if targets is None else tuple(targets.split("|")), factors)


def _blocks(first: str, last: str | None, below: str | None, *, text: str) -> list[str]:
    numbers = range(int(first), int(last or first) + 1)
    if not numbers:
        raise InputError(f"trainable={text!r}: blocks.{first}-{last} is empty, expected the lower number first")
    return [f"blocks.{number:02d}{below or ''}" for number in numbers]


@dataclass(frozen=True, eq=False)
class Frozen:
    """What is not trained, and how it goes together with what is. `scale` is that of the low-rank corrections."""

    tensors: Parameters = field(default_factory=dict)
    scale: float = 1.0

    def to(self, device: torch.device, dtype: torch.dtype) -> "Frozen":
        return Frozen({name: tensor.to(device, dtype) for name, tensor in self.tensors.items()}, self.scale)

    def with_trained(self, trained: Parameters) -> Parameters:
        """All that a forward pass needs. `trained` may have a leading client axis; what is frozen is shared."""
        if not self.tensors:
            return trained
        whole = {**self.tensors, **trained}
        if self.scale != 1:
            whole |= {name: tensor * self.scale for name, tensor in trained.items() if name.endswith(".lora_b")}
        return whole

    @torch.no_grad()
    def merged(self, trained: Parameters) -> dict[str, Tensor]:
        """One model's plain parameters, by their usual names and with corrections added, where `trained` lies."""
        whole = {name: tensor for name, tensor in self.tensors.items() if not name.endswith(".lora_a")}
        for name, tensor in trained.items():
            if name.endswith(".lora_a"):
                continue
            if not name.endswith(".lora_b"):
                whole[name] = tensor
                continue
            matrix = name.removesuffix("lora_b") + "weight"
            factor = low_rank_names(matrix)[0]
            a = trained[factor] if factor in trained else self.tensors[factor].to(tensor.device)
            whole[matrix] = self.tensors[matrix].to(tensor.device) + self.scale * tensor @ a
        return whole


NOTHING_FROZEN = Frozen()


@dataclass(frozen=True, eq=False)
class Trainable:
    """A model at its start in two parts: `initial` is what is trained.

    Not all of it in every round: `held` is what rounds leave as it is (see `Layout`). The server makes the pairs (a, b)
    of `projected` anew after each.
    """

    initial: Parameters
    frozen: Frozen
    held: tuple[tuple[str, ...], ...] = ()
    projected: tuple[tuple[str, str], ...] = ()

    @property
    def layout(self) -> Layout:
        """Of what is trained."""
        return Layout.of(self.initial, held=self.held)

    @property
    def trained_count(self) -> int:
        return sum(tensor.numel() for tensor in self.initial.values())

    @property
    def frozen_count(self) -> int:
        return sum(tensor.numel() for tensor in self.frozen.tensors.values())


def split_parameters(
    part: Part | None, parameters: Parameters, *, is_lora_target: Callable[[str], bool], generator: torch.Generator
) -> Trainable:
    """`parameters` as what is trained and what is not; None trains everything.

    Low-rank corrections start as nothing: a is drawn like a block's matrices, b is zero. Where a is to have
    orthonormal rows, it gets those that span the same.
    """
    if part is None:
        return Trainable(parameters, NOTHING_FROZEN)
    chosen = _trained_names(part, parameters)
    initial: dict[str, Tensor] = {}
    fixed: dict[str, Tensor] = {}
    pairs: list[tuple[str, str]] = []
    for name, tensor in parameters.items():
        if name in chosen:
            initial[name] = tensor
        elif part.lora is not None and tensor.dim() == 2 and part.lora.corrects(name, is_lora_target=is_lora_target):
            a, b = _low_rank(part, name, tensor, generator=generator).items()
            (fixed if part.lora.factors == "b" else initial).update([a])
            initial.update([b])
            pairs.append((a[0], b[0]))
    rest = {name: tensor for name, tensor in parameters.items() if name not in initial} | fixed
    frozen = Frozen(rest, 1.0 if part.lora is None else part.lora.scale)
    all_a, all_b = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
    match None if part.lora is None or not pairs else part.lora.factors:
        case "alternate":  # b first: at b = 0 no gradient reaches a
            return Trainable(initial, frozen, held=(all_a, all_b))
        case "project":
            return Trainable(initial, frozen, held=(all_a,), projected=tuple(pairs))
        case _:
            return Trainable(initial, frozen)


def _trained_names(part: Part, parameters: Mapping[str, Tensor]) -> set[str]:
    chosen: set[str] = set()
    for pattern in part.patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not matched:
            known = f"{next(iter(parameters))!r} to {next(reversed(list(parameters)))!r}"
            raise InputError(f"trainable={part.text!r}: {pattern!r} matches no parameter of the model ({known})")
        chosen.update(matched)
    return chosen


def _low_rank(part: Part, name: str, matrix: Tensor, *, generator: torch.Generator) -> dict[str, Tensor]:
    assert part.lora is not None
    rank, (rows, columns) = part.lora.rank, matrix.shape
    if rank > min(rows, columns):
        raise InputError(f"trainable={part.text!r}: r={rank}, expected at most {min(rows, columns)}, {name}'s own rank")
    limit = 1 / math.sqrt(columns)
    a, b = low_rank_names(name)
    drawn = torch.empty(rank, columns).uniform_(-limit, limit, generator=generator)
    if part.lora.factors == "project":
        drawn = orthonormal_rows(drawn)[1].to(drawn.dtype)
    return {a: drawn, b: torch.zeros(rows, rank)}
