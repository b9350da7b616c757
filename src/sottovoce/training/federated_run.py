"""A federated run: the federation of a recipe is trained in its folder and tested, and its results are written."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.base.files import add_digest, check_digest, read_json, write_json
from sottovoce.base.processes import Processes
from sottovoce.base.signatures import SigningKey
from sottovoce.config import Recipe
from sottovoce.data.client_utterances import find_owners, utterance_samples, utterances_of
from sottovoce.data.population import Population
from sottovoce.evaluation.converged import judge_metrics
from sottovoce.federated.ranks import ClientsOverRanks
from sottovoce.models.recogniser import load_recogniser
from sottovoce.privacy.ledger import record_results
from sottovoce.privacy.round_noise import MEMORY
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.secret_files import SECRETS, delete_secrets, write_secret
from sottovoce.training.assemble import Federation, assemble
from sottovoce.training.client_wer import read_client_wers, score_clients
from sottovoce.training.engines import choose_clients
from sottovoce.training.federation import FederatedLoop
from sottovoce.training.loop import INTERRUPTED, LoopEnd
from sottovoce.training.parent_model import find_enclosing_run, find_parent_model
from sottovoce.training.personal import write_personal_results
from sottovoce.training.privacy_report import (
    build_privacy_report,
    describe_noise,
    describe_unfinished_promise,
    measure_noise,
)
from sottovoce.training.recorded_files import digest_final_files, digest_signed_files
from sottovoce.training.records import NO_EVENTS
from sottovoce.training.remote_clients import DEPARTURES, RemoteClients
from sottovoce.training.run_context import Outcome, RunContext, RunTarget, read_finished, write_results
from sottovoce.training.run_data import compare_with_paper, describe_clients_without_holdout
from sottovoce.training.run_folder import LEDGER, NO_EPSILON, POPULATION, RESULTS, RunFolder
from sottovoce.training.start_model import count_communication, describe_base_model, describe_part
from sottovoce.training.testing import RankGroup, describe_decoding, score_models
from sottovoce.training.tokens import describe_tokens

GROUPS = "groups.json"
ROUND_SECRETS = (MEMORY, GROUPS, DEPARTURES)  # not needed after the last round


def run_federated(
    recipe: Recipe,
    target: RunTarget,
    *,
    context: RunContext,
    processes: Processes,
    remote: RemoteClients | None = None,
    key: SigningKey | None = None,
) -> Outcome:
    """Train with the store's clients, or `remote` ones, and test the best model and the one it started from."""
    federation = assemble(recipe, context=context, clients=remote, processes=processes)
    tokens = describe_tokens(recipe, federation.start.tokens, runs=context.runs, stores=context.stores)
    inputs = _inputs(federation, processes)
    ranks = RankGroup.of(processes, federation.start, federation.data, context.device)
    opening = target.open(recipe, inputs=inputs, processes=processes, is_release=federation.is_release)
    with opening as run:
        if (known := read_finished(run, processes)) is not None:
            if processes.is_first:  # it may have been killed before it came to that
                delete_secrets(run.path / SECRETS, *ROUND_SECRETS)
            return known
        if not processes.is_first:
            followers = choose_clients(federation, run=run, processes=processes)
            assert isinstance(followers, ClientsOverRanks)
            ranks.follow(followers, federation.plan)
            return Outcome(target.out)
        with ranks:
            context.on_stage("rounds")
            _announce(federation)
            _write_population(federation, run)
            if remote is None:
                clients: Any = choose_clients(federation, run=run, processes=processes)
            else:
                clients = remote.clients(run, federation.plan, federation.start)
            ended = FederatedLoop(federation, run, clients=clients, ranks=ranks, inputs=inputs, key=key).run()
            if ended.words:
                context.say(ended.words)
            if (unfinished := describe_unfinished_promise(run, federation.settings, ended.step)) is not None:
                context.say(unfinished)
            if ended.reason == INTERRUPTED:
                return Outcome(target.out, stopped_at=ended.step)
            context.on_stage("testing")
            results = _results(federation, run, ended, ranks) | {"tokens": tokens}
            write_personal_results(federation, run, load_recogniser(run.best))
            # Before they are written: a run whose results are there has nothing left to do.
            record_results(
                run.path / LEDGER,
                digest_final_files(run.path, results),
                key=key,
                signed_files=digest_signed_files(run.path),
            )
            finished = write_results(run, results)
            delete_secrets(run.path / SECRETS, *ROUND_SECRETS)
            return finished


def _inputs(federation: Federation, processes: Processes) -> dict[str, Any]:
    """What must be the same when the run is resumed."""
    inputs = {"tokens digest": federation.start.tokens.digest, "start model digest": federation.start_digest}
    inputs |= describe_base_model(federation.start)
    if federation.plan.settings.root_seed is None:
        # A release replays nothing, and digests of its data would let readers of its folder test guesses of the data.
        # Its sums are exact, whereas a simulation's depend on the number of processes by rounding. Who is late may
        # depend on their speech, so nothing that follows from it may decide how long others are waited for.
        return inputs if federation.remote is None else {**inputs, **federation.remote.deadlines}
    people = {"population digest": federation.population.digest, "number of processes": str(processes.world)}
    return {**inputs, **federation.data.digests(), **people}


def _announce(federation: Federation) -> None:
    """Say what is trained and what is promised."""
    recipe, settings, plan, context = federation.recipe, federation.settings, federation.plan, federation.context
    if federation.part.frozen.tensors:
        context.say(describe_part(federation.part, model_bits=settings.model_bits))
    if not federation.is_release and (small := describe_clients_without_holdout(recipe, federation.population)):
        context.say(small)
    beside = None if context.stand_in else compare_with_paper(recipe, clients=plan.settings.population_size)
    is_others = context.stand_in and plan.settings.z > 0
    promised = (NO_EPSILON,) if is_others else (*plan.warnings, settings.guarantee(plan))
    noise = None if context.stand_in else measure_noise(settings, plan)
    length = () if noise is None else describe_noise(noise)
    for line in filter(None, (beside, *promised, *length, NO_EVENTS if federation.is_release else None)):
        context.say(line)


def _write_population(federation: Federation, run: RunFolder) -> None:
    """What may be said of the clients: in a release, only what the plan has made public anyway."""
    population, plan = federation.population, federation.plan
    if federation.is_release and isinstance(plan.sampler, CyclicSampler):
        identities = None if federation.remote is None else federation.remote.identities
        begun = (run.path / LEDGER).exists()
        check_groups_unchanged(run.path / SECRETS, population, plan.sampler, begun=begun, identities=identities)
    described: dict[str, Any] = dict(population.describe())
    if plan.settings.root_seed is not None:
        deciles = np.quantile(population.seconds, np.linspace(0, 1, 11)).tolist()
        shown = {"accounted": False, **described, "seconds_per_client_deciles": deciles}
    else:
        shown = {name: described[name] for name in ("population_size", "privacy_unit", "settings")}
    write_json(run.path / POPULATION, shown)


def _results(federation: Federation, run: RunFolder, ended: LoopEnd, ranks: RankGroup) -> dict[str, Any]:
    recipe, settings, start = federation.recipe, federation.settings, federation.start
    best = load_recogniser(run.best)
    tests, is_release = federation.data.tests, federation.is_release
    after, before = score_models([best, start], recipe, tests, ranks, is_release=is_release)
    of_clients = score_clients(recipe, federation.population, start=start, best=best, ranks=ranks)
    return {
        "model": dict(best.about),
        "ended": ended.as_json(),
        "converged": judge_metrics(run.metrics.read(), best.about, last_step=ended.step),
        "test": after,
        "start": {"test": before} | _start_converged(federation),
        **describe_decoding(recipe),
        "privacy": build_privacy_report(settings, federation.plan, run),
        "communication": count_communication(
            federation.part,
            model_bits=settings.model_bits,
            has_base_files=start.family.base_files is not None,
        ),
        **({} if of_clients is None else {"clients": of_clients}),
        **({} if settings.client_wer is None else {"client_wer": read_client_wers(run)}),
    }


def _start_converged(federation: Federation) -> dict[str, str]:
    """What the run that trained the start model says of it; nothing where training starts from nothing."""
    parent = find_parent_model(federation.recipe, runs=federation.context.runs)
    if parent is None:
        return {}
    results = (find_enclosing_run(parent.folder) or parent.folder) / RESULTS
    return {"converged": read_json(results).get("converged", "not shown") if results.is_file() else "not shown"}


# Groups of a release with correlated noise. Between two rows of noise that may have the same client lie at least
# `cycle` − 1 others: that is what is charged, and it holds only while nobody changes groups. Groups go by places in the
# population, so one client more or less would move many. A release publishes no digest of its data, so this one is
# keyed, and lies with its key in `secrets/` until the run has ended. Clients on other machines are who their keys say.


def check_groups_unchanged(
    secrets: Path,
    population: Population,
    sampler: CyclicSampler,
    *,
    begun: bool,
    identities: Sequence[bytes] | None = None,
) -> None:
    """Store who is in which group, or refuse to go on where that has changed or is not known.

    `begun`: whether the run may have charged a round already. `identities` as for `digest_groups`.
    """
    path = secrets / GROUPS
    if not begun:
        key = os.urandom(32)
        content = {"key": key.hex(), "members": digest_groups(population, sampler, key=key, identities=identities)}
        with write_secret(path) as file:
            file.write(json.dumps(add_digest(content)).encode())
        return
    if not path.exists():
        raise InputError(
            f"{path} is missing: nobody can say whether clients are still in the groups in which this release began; "
            "restore it, or begin another run with --out"
        )
    known = check_digest(read_json(path), where=path)
    try:
        found = digest_groups(population, sampler, key=bytes.fromhex(known["key"]), identities=identities)
        same = found == known["members"]
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path} is damaged: expected who is in which group, as a digest and its key") from None
    if not same:
        changed, place = "some left or were renamed, or their recordings changed", "the store"
        if identities is not None:
            changed, place = "or have other keys or places in the roster", "the roster"
        raise InputError(
            f"{path}: clients are no longer in the groups in which this release began (others came, {changed}), and "
            f"its noise holds for these groups alone: restore {place}, or begin another run with --out"
        )


def digest_groups(
    population: Population, sampler: CyclicSampler, *, key: bytes, identities: Sequence[bytes] | None = None
) -> str:
    """Equal where the same people, with recordings of the same lengths, are in the same groups.

    In whatever order a store has them: people go by the keys of their names. Lengths show that two have changed names.
    Where recordings are elsewhere, people go by their `identities` alone: digests of their own keys.
    """
    store, members = population.store, population.members
    group_of = np.empty(len(population), dtype=np.uint64)
    for group, places in enumerate(sampler.groups(len(population))):
        group_of[places] = group
    digest = hashlib.blake2b(key=key, digest_size=32, person=b"groups")
    digest.update(np.array([sampler.cycle, len(population)], dtype="<u8").tobytes())
    if identities is not None:
        check_invariant(len({*identities}) == len(population), "groups of others than the population")
        for group, identity in sorted(zip(group_of.tolist(), identities, strict=True)):
            digest.update(int(group).to_bytes(8, "little") + hashlib.sha256(identity).digest())
        return digest.hexdigest()
    utterances = members if population.settings.deals_utterances else utterances_of(store, members)
    rows = utterances.members
    check_invariant(len(rows) > 0, "groups of people of whom nothing is known")
    said = (  # of every utterance: the group of its client, whose it is, and how long it lasts
        np.repeat(group_of, utterances.sizes),
        store.user_keys[find_owners(store, rows)],
        utterance_samples(store, rows).astype(np.uint64),
    )
    table = np.stack(said)[:, np.lexsort(said[::-1])]
    digest.update(table.astype("<u8").tobytes())
    return digest.hexdigest()
