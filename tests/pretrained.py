"""A tiny pretrained model, tones to train it on, and recipes for both, in one folder."""

from pathlib import Path

from tests.models.huggingface.tiny_models import write_tiny_model
from tests.tones import pack_tones

_MODEL = """
data: {store: tones}
model: {family: huggingface, from: base, train: "TRAIN"HEAD}
"""
FEDERATED = f"""
about: tones from a pretrained model
{_MODEL}
federation:
  steps: 3
  cohort_size: 3
  local: {{batch_seconds: 4, lr: 0.1, local_steps: 1, spec_augment: null}}
  server: {{optimiser: {{name: adam}}, schedule: {{name: constant, lr: 0.01}}}}
  privacy: {{clip_bound: 0.5, noise_multiplier: 2.0, delta: 1e-3}}
  evaluate_every: 1
"""
CENTRAL = f"""
about: tones in one pile, from a pretrained model
{_MODEL}
central:
  steps: 2
  batch_seconds: 8
  optimiser: {{name: adam}}
  schedule: {{name: constant, lr: 0.001}}
  augment: {{spec_augment: null}}
"""


def write_pretrained(place: Path, kind: str, *, train: str = "lora(r=2)", head: str | None = None) -> None:
    """`base` (the model), `stores/tones`, `federated.yaml` and `central.yaml`."""
    write_tiny_model(kind, place / "base")
    pack_tones(place / "stores/tones", letters=(3, 4), utterances=2)
    for name, recipe in (("federated", FEDERATED), ("central", CENTRAL)):
        chosen = recipe.replace("TRAIN", train).replace("HEAD", "" if head is None else f", head: {head}")
        (place / f"{name}.yaml").write_text(chosen.replace("from: base", f"from: {place / 'base'}"))
