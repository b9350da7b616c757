"""Personal parts on the model of a run that is there: for settings that its recipe does not have.

    python benchmarks/personal.py RUN --stores STORES --people 20 --utterances 16 --json out.json

RUN is a finished simulation whose clients hold speech out. Each of so many clients trains a part on so many of their
training utterances and is tested on what they hold out, as `federation.personal` does it. The public model's rates,
those with the part in any case, as the guard keeps it and as one by errors alone would, are written with every person's
counts; of what a corpus knows of them, an accent that enough people share.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from findings.keeping import facts_pooled

from sottovoce.base.files import write_json
from sottovoce.config import load_recipe
from sottovoce.data.store import Store
from sottovoce.evaluation.personal_groups import PERSONAL, PUBLIC, UNGUARDED, compare_groups, describe_people
from sottovoce.federated.personal import PersonalTraining, build_personaliser, order_speech, take_speech
from sottovoce.models.recogniser import load_recogniser
from sottovoce.training.personal import choose_people, measure_people
from sottovoce.training.run_data import build_recipe_population
from sottovoce.training.run_folder import CONFIG


def measure(run: Path, stores: Path, settings: PersonalTraining, *, people: int, utterances: int) -> dict[str, Any]:
    """What `personal.json` would say, of that many people with that many utterances each at most."""
    recipe = load_recipe(str(run / CONFIG))
    population = build_recipe_population(
        recipe, Store(stores / recipe.data.store), recipe.federated.clients.population(recipe.data)
    )
    personaliser = build_personaliser(
        load_recogniser(run),
        population,
        settings,
        seed=recipe.seed,
        device=torch.device("cpu"),
        decoding=recipe.decoding,
    )
    chosen = [
        replace(person, speech=take_speech(person.speech, order_speech(personaliser, person.speech)[:utterances]))
        for person in choose_people(personaliser, people=people).people
    ]
    found = measure_people(personaliser, chosen, amounts=())
    return facts_pooled({"parameters": personaliser.parameter_count, "seed": recipe.seed, "per_client": found})


def summarise(found: Mapping[str, Any]) -> dict[str, Any]:
    """Rates of everybody, and how guarded parts differ from the public model in each group."""
    people = found["per_client"]
    strict = [_keep_by_errors(person) for person in people]
    return {
        "wer": {way: describe_people(people, way)["wer"] for way in (PUBLIC, UNGUARDED, PERSONAL)},
        "by errors alone": {
            "wer": describe_people(strict, PERSONAL)["wer"],
            "kept": sum(person["is_kept"] for person in strict),
        },
        "groups": {
            group.name: group.difference.as_json() | {"kept": group.kept, "is_worse": group.is_worse}
            for group in compare_groups(people)
        },
    }


def _keep_by_errors(person: Mapping[str, Any]) -> dict[str, Any]:
    """As a guard that looks at no loss would have it."""
    guard, errors = person["guard"], person["errors"]
    is_kept = person["is_kept"] and guard["public_errors"] - guard["personal_errors"] > guard["needed"]
    return {**person, "is_kept": is_kept, "errors": errors | {PERSONAL: errors[UNGUARDED if is_kept else PUBLIC]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--stores", type=Path, default=Path("stores"))
    parser.add_argument("--people", type=int, default=20)
    parser.add_argument("--utterances", type=int, default=16, help="at most, of what each person trains on")
    parser.add_argument("--part", default="lora(r=4)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = PersonalTraining(part=given.part, steps=given.steps, lr=given.lr, batch_seconds=8.0, folds=given.folds)
    found = measure(given.run, given.stores, settings, people=given.people, utterances=given.utterances)
    asked = {name: getattr(given, name) for name in ("people", "utterances", "part", "steps", "lr", "folds")}
    summary = summarise(found)
    write_json(given.json, {"settings": asked, **summary, **found})
    rates = summary["wer"] | {"by errors alone": summary["by errors alone"]["wer"]}
    print(", ".join(f"{way} {rate:.1%}" for way, rate in rates.items()))


if __name__ == "__main__":
    main()
