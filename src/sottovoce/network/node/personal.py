"""A node's personal part: trained when a run is over, on the last model that came; it stays in the node's home.

HOME/personal/received    the last model of the run, as it came, behind the run's name
HOME/personal/model       the same as a model folder, made when the run is over
HOME/personal/part        the part, for its owner alone (`models.personal_part`)

A node does not get the model after the last round: its part is for the one before it, which is kept beside the part.
For the model that is published there is `sottovoce personalise`. No order asks for any of this, and no answer has any.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sottovoce.base.files import write_atomically, write_folder_atomically
from sottovoce.config import Recipe
from sottovoce.evaluation.decoder import DecodingOptions
from sottovoce.federated.personal import PersonalTraining, build_personaliser, train_own_part
from sottovoce.models.personal_part import save_personal_part
from sottovoce.models.recogniser import Recogniser, save_recogniser
from sottovoce.network.model_transfer import read_round_model
from sottovoce.network.node.training import NodeTraining
from sottovoce.training.start_model import split_trained_part

PERSONAL, RECEIVED, MODEL, PART = "personal", "received", "model", "part"


@dataclass(frozen=True, eq=False)
class EndedRun:
    """A run that is over, of which a part can be trained."""

    run: bytes
    recipe: Recipe
    training: NodeTraining


def keep_received(run: bytes, model: bytes, home: Path, *, say: Callable[[str], None]) -> None:
    """Keep a round's model, as it came, in the place of the one before; where that fails, the round goes on without."""
    place = home / PERSONAL
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        with write_atomically(place / RECEIVED, private=True) as file:
            file.write(run + model)
    except OSError as error:
        say(f"{place}: this round's model cannot be kept ({error.strerror}); a personal part may be of an older one")


def train_node_part(
    ended: EndedRun, home: Path, settings: PersonalTraining, *, say: Callable[[str], None] = lambda _: None
) -> None:
    """Train this node's part, and write it beside the model that it belongs to."""
    place = home / PERSONAL
    received = (place / RECEIVED).read_bytes() if (place / RECEIVED).is_file() else b""
    if not received.startswith(ended.run):
        say("no model of this run has come to this node: there is no personal part")
        return
    model, training = _read_model(ended, received[len(ended.run) :]), ended.training
    personaliser = build_personaliser(
        model,
        training.population,
        settings,
        seed=ended.recipe.seed,
        device=training.device,
        decoding=DecodingOptions(),
    )
    say(f"training {personaliser.parameter_count:,} parameters of your own ({settings.part}); nothing of it is sent")
    part, decision = train_own_part(personaliser, training.index)
    shutil.rmtree(place / MODEL, ignore_errors=True)
    with write_folder_atomically(place / MODEL) as folder:
        save_recogniser(model, folder)
    save_personal_part(part, place / PART)
    say(decision.describe())
    say(f"`sottovoce transcribe {place / MODEL} FILE --personal {place / PART}` uses it")


def _read_model(ended: EndedRun, payload: bytes) -> Recogniser:
    training, settings = ended.training, ended.recipe.federated
    layout = training.plan.layout
    server_P = read_round_model(payload, layout, model_bits=settings.model_bits)
    merged = split_trained_part(ended.recipe, training.start).frozen.merged(layout.views(server_P))
    parameters = {name: merged[name].clone() for name in training.start.parameters}
    return replace(training.start, parameters=parameters, part=None)
