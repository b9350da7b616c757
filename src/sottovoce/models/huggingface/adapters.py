"""Low-rank corrections as the ecosystem has them: folders that `peft.PeftModel.from_pretrained` loads.

adapter_config.json  adapter_model.safetensors
"""

from pathlib import Path

from safetensors.torch import save_file

from sottovoce.base.files import write_json
from sottovoce.models.family import Parameters
from sottovoce.models.huggingface.settings import Settings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_adapter(low_rank: Parameters, folder: Path, *, scale: float, settings: Settings) -> None:
    """Write pairs a, b into `folder`, which exists, by PEFT's names. `scale` is alpha/r."""
    stems = sorted(name.removesuffix(".lora_a") for name in low_rank if name.endswith(".lora_a"))
    tensors = {}
    for stem in stems:
        for ours, theirs in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            tensors[f"{_PREFIX}{stem}.{theirs}.weight"] = low_rank[f"{stem}.{ours}"].detach().cpu().clone().contiguous()
    rank = len(low_rank[f"{stems[0]}.lora_a"])
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(
        folder / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": settings.source,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": scale * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": stems,
            "modules_to_save": None,
        },
    )
