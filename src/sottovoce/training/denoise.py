"""What releases are denoised by (`federated.denoise`), learned before the first round from people who are no clients.

Each of them trains once from the start model, as a client would, with draws of their own: no client's draw is moved by
them. All of it follows from the recipe, so that a run that is resumed learns the same again.
"""

from collections.abc import Mapping
from contextlib import closing

import numpy as np
import torch

from sottovoce.config import Recipe
from sottovoce.errors import BrokenPromise, InputError
from sottovoce.evaluation.evaluate import check_language
from sottovoce.federated.cohort import as_accumulated, as_sent
from sottovoce.federated.denoise import Moments, WienerFilter
from sottovoce.federated.engines import Dropped, Engine, Trained
from sottovoce.federated.weighting import WeightedSum
from sottovoce.models.saved import Recogniser
from sottovoce.privacy.plan import Plan
from sottovoce.store import Store
from sottovoce.training.engines import build_engine, likely_fastest
from sottovoce.training.places import Places
from sottovoce.training.seeding import keys_of, split_keys
from sottovoce.training.speakers import store_of
from sottovoce.training.strangers import check_public
from sottovoce.training.trained_part import trained_part
from sottovoce.users.population import Population

FEWEST = 2  # of one nobody can say what they have in common with others


def check_denoise(recipe: Recipe, start: Recogniser, clients: Population, places: Places) -> None:
    """Refuse public people who are clients, or evaluated on, or too few, where the recipe has any."""
    asked, public = recipe.federated.denoise, places.public
    if asked is None or public is None:
        return
    where, store = f"federation.denoise.data={asked.data}", store_of(public)
    if len(public) < FEWEST:
        raise InputError(f"{where}: {len(public)} public people, expected at least {FEWEST}")
    check_language(start, store)
    keys, rows = keys_of(public), public.utterance_rows()
    check_public(where, store, keys=keys, rows=rows, clients=clients, instead="public people are not")
    _check_not_judged(where, public, places.evaluated)


def _check_not_judged(where: str, public: Population, evaluated: Mapping[str, tuple[Store, str]]) -> None:
    for what, place in evaluated.items():
        both = np.intersect1d(keys_of(public), split_keys(*place))
        if len(both):
            raise InputError(
                f"{where}: {len(both)} of its speakers are in {what}, what the model is judged by: expected others"
            )


def learn_denoise(
    recipe: Recipe,
    start: Recogniser,
    public: Population,
    plan: Plan,
    *,
    device: torch.device,
    most: int | None = None,
) -> WienerFilter:
    """Train everybody in `public` once from `start`, or the first `most`, and learn from their clipped updates."""
    # On a CPU the same engine whatever number of cores there are: another would add up in another order.
    name = "sequential" if device.type == "cpu" else likely_fastest(recipe, start, device=device)
    server_P = plan.layout.flatten(trained_part(recipe, start).initial).to(device)
    sent_P = as_sent(server_P, recipe.federated.model_bits)
    with closing(build_engine(name, recipe, public, start, plan, device=device, draws="denoise")) as engine:
        found = _moments(engine, sent_P, range(len(public))[:most], plan)
    del engine
    if device.type == "cuda":  # the clients' engine takes what is free
        torch.cuda.empty_cache()
    return found.filter()


def _moments(engine: Engine, server_P: torch.Tensor, people: range, plan: Plan) -> Moments:
    """Weighted and clipped as clients are; who cannot be trained is counted, and left out."""
    moments, weighted = Moments(plan.layout, device=server_P.device), WeightedSum(plan, plan.new_total())
    for trained in engine.train(server_P, list(people), step=0):
        if isinstance(trained, Dropped):
            moments.left_out += 1
            continue
        if not isinstance(trained, Trained):
            raise BrokenPromise("a sum of updates that nobody has clipped, in a plan with noise")
        weight = as_accumulated(weighted.weigh(trained.figures), trained.update)
        moments.add(plan.clip(trained.update, weight=weight))
    return moments
