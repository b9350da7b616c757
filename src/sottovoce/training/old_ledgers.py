"""Models of runs whose ledger has no SHA-256 of them: by their fingerprint, for which a family's order is needed."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sottovoce.digests import flat_fingerprint
from sottovoce.errors import InputError
from sottovoce.flat.layout import ALIGNMENT
from sottovoce.models.family import REGISTERED, find_family
from sottovoce.models.model_files import PARAMETERS, read_model_config
from sottovoce.parsing import parse_yaml
from sottovoce.training.run_folder import CONFIG


def fingerprint_of(run: Path, folder: Path) -> str | None:
    """The fingerprint of the model in `folder`, as the ledger of its `run` has it; None where that cannot be found.

    So it is of a part of a model, of an average of models, and of families from outside, which are not imported.
    """
    config = read_model_config(folder)
    if config.get("part") is not None or config.get("architecture") not in REGISTERED or _is_average(run):
        return None
    family = find_family(config["architecture"])
    try:
        settings = TypeAdapter(family.Settings).validate_python(config["settings"])
        names = [*family.shapes(settings)]
    except (ValidationError, KeyError, TypeError, ValueError):
        raise InputError(f"{folder.name}/config.json does not describe a model of family={family.name}") from None
    return flat_fingerprint(folder / PARAMETERS, names, alignment=ALIGNMENT)


def _is_average(run: Path) -> bool:
    """Whether a run's models are averages, which its ledger's fingerprints are not of; so where nobody can say."""
    try:
        recipe = parse_yaml((run / CONFIG).read_text(encoding="utf-8"))
        return recipe["federation"]["server"].get("ema") is not None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return True
