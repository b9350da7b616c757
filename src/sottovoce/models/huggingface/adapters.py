"""Low-rank corrections as the ecosystem has them: folders that `peft.PeftModel.from_pretrained` loads.

adapter_config.json  adapter_model.safetensors
"""

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from sottovoce.base.errors import InputError
from sottovoce.base.files import write_json
from sottovoce.models.family import Parameters
from sottovoce.models.huggingface.folder import CLASSES
from sottovoce.models.huggingface.network import MERGED, build_network, import_transformers
from sottovoce.models.huggingface.settings import Settings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Layers that peft can replace as a whole.
_REPLACEABLE = (nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Embedding)


def adapter_obstacle(settings: Settings) -> str | None:
    """Why corrections of this model cannot be an adapter of its base."""
    if settings.kind in MERGED:
        return f"{settings.kind}'s attention reads matrices past their layers, so that peft's adapters have no effect"
    return None if settings.head is None else f"the base model has no such head as head={settings.head} makes"


def write_adapter(
    low_rank: Parameters,
    folder: Path,
    *,
    scale: float,
    settings: Settings,
    base: str | None = None,
    replaced: Parameters | None = None,
) -> None:
    """Write pairs a, b into `folder`, which exists, by PEFT's names; nothing where its adapters have no effect.

    `scale` is alpha/r, `base` the base model's name, `replaced` are whole layers that were trained besides.
    """
    if adapter_obstacle(settings) is not None:
        return
    stems = sorted(name.removesuffix(".lora_a") for name in low_rank if name.endswith(".lora_a"))
    tensors = {_PREFIX + name: _for_file(tensor) for name, tensor in (replaced or {}).items()}
    for stem in stems:
        for ours, theirs in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            tensors[f"{_PREFIX}{stem}.{theirs}.weight"] = _for_file(low_rank[f"{stem}.{ours}"])
    rank = len(low_rank[f"{stems[0]}.lora_a"])
    alpha = scale * rank
    model_class = getattr(import_transformers(), CLASSES[settings.kind])
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(
        folder / CONFIG,
        {
            "peft_type": "LORA",
            # peft's tasks are of text: those of speech have none, and say by their class what they are.
            "task_type": None,
            "auto_mapping": {"base_model_class": model_class.__name__, "parent_library": model_class.__module__},
            "base_model_name_or_path": base or settings.source,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": name_targets(stems, settings),
            "modules_to_save": sorted({name.rpartition(".")[0] for name in replaced}) if replaced else None,
        },
    )


def _for_file(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone().contiguous()


def name_targets(stems: Iterable[str], settings: Settings) -> list[str]:
    """The layers `stems` as short as peft understands them: by their last names where no other layer has these."""
    stems = sorted(stems)
    last = {stem.rpartition(".")[2] for stem in stems}
    named = build_network(settings).module.named_modules()
    alike = sorted(name for name, _ in named if name.rpartition(".")[2] in last)
    return sorted(last) if alike == stems else stems


def find_replaced(names: Iterable[str], parameters: Parameters, settings: Settings) -> dict[str, Tensor]:
    """All tensors of the layers that the trained tensors `names` are in, for peft's `modules_to_save`.

    Refuses what peft would not give back as it was: a tensor that is tied to another or that several layers share.
    """
    module = build_network(settings).module
    tied: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(p), []).append(name)
    shared = {name for same in tied.values() if len(same) > 1 for name in same}
    layers = dict(module.named_modules())
    stems = dict.fromkeys(name.rpartition(".")[0] for name in names)
    found: dict[str, Tensor] = {}
    for stem in stems:
        own = {name: tensor for name, tensor in parameters.items() if name.rpartition(".")[0] == stem}
        alike = [name for name in layers if name.endswith(stem) and name not in stems]  # how peft finds them
        if not isinstance(layers[stem], _REPLACEABLE) or shared & own.keys() or alike:
            raise InputError(f"peft cannot replace the layer {stem or '(the whole)'!r} alone: expected --merged")
        found |= own
    return found
