"""How models are evaluated in a run: by all of its processes, by which measure, on which sets, and what may be said.

A release names and quotes no speaker; a simulation quotes synthetic voices only.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_json
from sottovoce.base.interrupts import interruptible
from sottovoce.base.processes import Processes
from sottovoce.base.seeds import derive, keyed_order
from sottovoce.config import Recipe, SyntheticCorpus
from sottovoce.data.client_utterances import utterance_keys
from sottovoce.data.population import Population
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import Tokens
from sottovoce.evaluation.compare import LESS_START, WORST_GROUP, compute_difference, find_worst_group
from sottovoce.evaluation.decoder import USUAL, DecodingOptions, choose_decoder, has_ctc, has_search
from sottovoce.evaluation.error_rates import FEWEST_SPEAKERS
from sottovoce.evaluation.losses import compute_mean_figures, select_speech, summarise_figures
from sottovoce.evaluation.measures import LOSS, MEASURES, Measure
from sottovoce.evaluation.recognise import Progress, recognise_across_processes
from sottovoce.evaluation.score import Evaluation, Selection, check_language, score_hypotheses, select_utterances
from sottovoce.federated.client import SharedSpeech
from sottovoce.federated.ranks import ClientsOverRanks, RoundOrder
from sottovoce.flat.layout import Layout
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Weighting
from sottovoce.training.loop import Say
from sottovoce.training.run_data import RunData, Split
from sottovoce.training.run_folder import RESULTS

Tested = dict[str, dict[str, Any]]

# An exact rate is a fraction, and its denominator shows how many words somebody has said.
PERSON_DIGITS = 2
QUOTED = 8  # transcripts of a test set, for a report


@dataclass(frozen=True, eq=False)
class _RecogniseOrder:
    """Recognise `rows` of the store that lies at `store`, decoded as it says; the model follows."""

    store: str
    rows: NDArray[np.int64]
    decoding: DecodingOptions


@dataclass(frozen=True)
class _LossOrder:
    """Add up the losses of `split` of the store that lies at `store`; the model follows."""

    store: str
    split: str


@dataclass(frozen=True, eq=False)
class RankGroup(AbstractContextManager["RankGroup"]):
    """The processes of a federated run. The first leads: it asks the others for parts of cohorts and evaluations.

    The others hold no ledger, no checkpoint and no server; each order brings what they need. In the first process the
    group is entered, and the others end when it is left. `start` is a model of the kind that is evaluated, `stores`
    what it is evaluated on, by path.
    """

    processes: Processes
    start: Recogniser
    stores: Mapping[str, Store]
    device: torch.device

    def recognise(
        self,
        model: Recogniser,
        store: Store,
        rows: NDArray[np.int64],
        *,
        decoding: DecodingOptions = USUAL,
        on_collapse: Progress | None = None,
    ) -> list[str]:
        """The text of each utterance in `rows` of `store`, computed by all processes; greedily by default."""
        order = _RecogniseOrder(str(store.path), rows, decoding)
        if self.processes.is_distributed:
            self._send(order, model)
        return self._recognise_together(model, store, order, on_collapse=on_collapse)

    def evaluate(self, model: Recogniser, store: Store, *, split: str, decoding: DecodingOptions = USUAL) -> Evaluation:
        """What `evaluate` gives, computed by all processes."""
        chosen, collapses = select_utterances(store, split=split), list[int]()
        texts = self.recognise(model, store, chosen.rows, decoding=decoding, on_collapse=collapses.append)
        return score_hypotheses(store, chosen, texts, collapses=collapses)

    def mean_figures(self, model: Recogniser, store: Store, *, split: str) -> dict[str, float]:
        """What `mean_figures` gives, computed by all processes."""
        if self.processes.is_distributed:
            self._send(_LossOrder(str(store.path), split), model)
        return compute_mean_figures(
            model, select_speech(model, store, split=split), device=self.device, processes=self.processes
        )

    def follow(self, clients: ClientsOverRanks, plan: Plan) -> None:
        """In the others: carry out orders until there are no more."""
        server_P = plan.layout.zeros(device=self.device)
        with interruptible() as interrupted:
            while (order := self._receive()) is not None:
                if isinstance(order, RoundOrder):
                    clients.take_part(order, server_P, plan=plan, interrupted=interrupted)
                else:
                    self._carry_out(order)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After any other error the state of the others is unknown: torchrun ends them.
        if error is None or isinstance(error, InputError):
            self.processes.broadcast_object(None)

    def _send(self, order: _RecogniseOrder | _LossOrder, model: Recogniser) -> None:
        """In the first process: send the order and the model to all others."""
        self.processes.broadcast_object(order)
        layout = self._layout
        flat_P = layout.flatten({name: model.parameters[name] for name in layout.names})
        self.processes.broadcast(flat_P.to(self.device))

    def _receive(self) -> RoundOrder | _RecogniseOrder | _LossOrder | None:
        order: Any = self.processes.broadcast_object(None)
        return cast(RoundOrder | _RecogniseOrder | _LossOrder | None, order)

    def _carry_out(self, order: _RecogniseOrder | _LossOrder) -> None:
        parameters_P = self._layout.zeros(device=self.device)
        self.processes.broadcast(parameters_P)
        model = replace(self.start, parameters=self._layout.views(parameters_P))
        store = self.stores[order.store]
        if isinstance(order, _LossOrder):
            compute_mean_figures(
                model, select_speech(model, store, split=order.split), device=self.device, processes=self.processes
            )
        else:
            self._recognise_together(model, store, order)

    def _recognise_together(
        self, model: Recogniser, store: Store, order: _RecogniseOrder, *, on_collapse: Progress | None = None
    ) -> list[str]:
        decode = choose_decoder(model.family, model.tokens.pieces(), order.decoding, settings=model.settings)
        around: dict[str, Any] = {"processes": self.processes, "device": self.device}
        return recognise_across_processes(model, store, order.rows, decode=decode, on_collapse=on_collapse, **around)

    @classmethod
    def of(cls, processes: Processes, start: Recogniser, data: RunData, device: torch.device) -> "RankGroup":
        """For the sets of `data`, and for its clients, who are tested on their own speech."""
        used = (data.store, *(store for store, _ in data.evaluated.values()))
        return cls(processes, start, {str(store.path): store for store in used}, device)

    @property
    def _layout(self) -> Layout:
        return Layout.of(self.start.parameters)


# Before training: by what models are chosen and weighted.


def choose_measure(recipe: Recipe, start: Recogniser, data: RunData, *, say: Say) -> Measure:
    """What the best model is chosen by. Sets that cannot be scored are refused before training."""
    family, asked = start.family, recipe.measure
    transcribes = family.recognition is not None
    if asked == "wer" and not transcribes:
        raise InputError(f"measure=wer: models of family={family.name} write no text; expected loss or null")
    if asked == "ctc_wer" and not has_search(family, start.settings):
        raise InputError(f"measure=ctc_wer: models of family={family.name} know no attention; expected wer or loss")
    if asked == "ctc_wer" and not has_ctc(family, start.settings):
        raise InputError(f"measure=ctc_wer: models of family={family.name} know no CTC; expected wer or loss")
    check_decoding(recipe, start)
    for store, split in data.evaluated.values():
        check_scorable(start, store, split)
    if recipe.federation is not None and recipe.federation.test_along and not transcribes:
        raise InputError(f"federation.test_along: models of family={family.name} write no text")
    measure = MEASURES[asked or ("wer" if transcribes else "loss")]
    if measure is LOSS:
        store, split = data.dev
        say(f"chosen by the loss on {select_speech(start, store, split=split)}")
    return measure


def check_decoding(recipe: Recipe, start: Recogniser) -> None:
    """Refuse an `evaluation` that models of the family cannot do, before anything is trained."""
    if recipe.evaluation is None:
        return
    if start.family.recognition is None:
        raise InputError(f"evaluation: models of family={start.family.name} write no text; expected null")
    try:
        choose_decoder(start.family, start.tokens.pieces(), recipe.decoding, settings=start.settings)
    except InputError as error:
        raise InputError(f"evaluation: {error}") from None


def check_scorable(model: Recogniser, store: Store, split: str) -> None:
    """Refuse a split that `model` cannot be scored on."""
    if model.family.recognition is None:
        select_speech(model, store, split=split)
        return
    check_language(model, store)
    chosen = select_utterances(store, split=split)
    if not any(_can_encode(model.tokens, text) for text in chosen.references):
        raise InputError(
            f"store {store.path}: not one of the {len(chosen.references):,} texts of split={split} can be written "
            "with the model's tokens, expected tokens of its language"
        )


def _can_encode(tokens: Tokens, text: str) -> bool:
    try:
        return bool(tokens.encode(text))
    except InputError:
        return False


def check_can_transcribe(recipe: Recipe, start: Recogniser) -> None:
    """Refuse settings that look at clients' transcripts where models of the family write none."""
    settings = recipe.federated
    by_errors = settings.privacy.weighting in (Weighting.WER, Weighting.WER_RELEASED)
    asked = {
        f"privacy.weighting={settings.privacy.weighting}": by_errors,
        f"test_clients={settings.test_clients}": settings.test_clients is not None,
        "client_wer": settings.client_wer is not None,
    }
    for what, is_asked in asked.items():
        if is_asked and start.family.recognition is None:
            raise InputError(f"federation.{what}: models of family={start.family.name} write no text")


def check_holdouts(recipe: Recipe, population: Population) -> None:
    """Refuse `client_wer` where no client of this machine has held-out speech to measure on."""
    asked = recipe.federated.client_wer is not None
    if asked and population.left_out.clients_without_holdout == len(population):
        raise InputError(
            f"federation.client_wer: none of {len(population):,} clients has enough utterances to hold some out"
        )


def choose_shared_dev(recipe: Recipe, place: Split) -> SharedSpeech:
    """As many utterances of `place` as the recipe says: the same in all rounds, and in repeats with the same people.

    By these all clients' models are weighted (Gao et al. 2022, as released, or by Eq. 10).
    """
    asked = recipe.federated.weighed_on
    assert asked is not None
    store, split = place
    try:
        chosen = select_utterances(store, split=split)
    except InputError as error:
        raise InputError(f"federation.privacy.weighting={recipe.federated.privacy.weighting}: {error}") from None
    spoken = [(row, text) for row, text in zip(chosen.rows.tolist(), chosen.references, strict=True) if text.split()]
    rows = np.array([row for row, _ in spoken], dtype=np.int64)
    order = keyed_order(utterance_keys(store, rows), derive(recipe.people_seed, "shared dev"), "utterances")
    places = np.sort(order[: asked.utterances])
    return SharedSpeech(store, rows[places], tuple(spoken[place][1] for place in places.tolist()))


# After training: test sets.


def score_models(
    models: Sequence[Recogniser],
    recipe: Recipe,
    tests: Mapping[str, Split],
    ranks: RankGroup,
    *,
    is_release: bool = False,
) -> list[Tested]:
    """What `results.json` says of each model, by test set: the WER and its spread, or the loss without transcripts.

    Decoded as the recipe's `evaluation` says. Of a release it names and quotes nobody, counts nobody's words, and a
    group has at least five people: whoever holds the corpus could look people up by each of these. Such results
    cannot be paired by speaker, so it adds how far the first model is from the second, which it started from, and the
    group that each recognises worst. A speaker has the same pseudonym in all of it.
    """
    if any(model.family.recognition is None for model in models):
        return [_measure_model(model, tests, ranks) for model in models]
    found = [_score_model(model, recipe, tests, ranks, is_release=is_release) for model in models]
    if is_release:
        for first, second in pairwise(found):
            for name, test in first.items():
                test[LESS_START] = compute_difference(test, second[name]).in_brief()
        for test in (test for tested in found for test in tested.values()):
            if (gap := find_worst_group(test)) is not None:
                test[WORST_GROUP] = gap.as_json()
        pseudonymise_speakers([test for tested in found for test in tested.values()])
    return found


def describe_decoding(recipe: Recipe) -> dict[str, str]:
    """What `results.json` says of how test sets were decoded; nothing where that is greedily, as it always was."""
    return {} if recipe.evaluation is None else {"decoding": recipe.decoding.as_text()}


def read_run_decoding(model: Path) -> str | None:
    """How the test WERs of a run with this `model` were decoded; None where greedily, or where there is no such run."""
    for run in (model, model.absolute().parent):
        if (run / RESULTS).is_file():
            found = read_json(run / RESULTS).get("decoding")
            return None if found is None else str(found)
    return None


def _score_model(
    model: Recogniser, recipe: Recipe, tests: Mapping[str, Split], ranks: RankGroup, *, is_release: bool
) -> Tested:
    found = {}
    for name, (store, split) in tests.items():
        chosen, collapses = select_utterances(store, split=split), list[int]()
        hypotheses = ranks.recognise(model, store, chosen.rows, decoding=recipe.decoding, on_collapse=collapses.append)
        smallest = FEWEST_SPEAKERS if is_release else 1
        found[name] = score_hypotheses(
            store, chosen, hypotheses, smallest_group=smallest, collapses=collapses
        ).as_json()
        if may_quote_store(recipe, store) and not is_release:
            found[name]["samples"] = pick_transcripts(chosen, hypotheses)
    return found


def _measure_model(model: Recogniser, tests: Mapping[str, Split], ranks: RankGroup) -> Tested:
    return {
        name: summarise_figures(select_speech(model, store, split=split), ranks.mean_figures(model, store, split=split))
        for name, (store, split) in tests.items()
    }


def may_quote_store(recipe: Recipe, store: Store) -> bool:
    """Whether a report may quote from `store`: only where the recipe itself has made it, of voices nobody owns."""
    made = recipe.data.prepare
    return isinstance(made, SyntheticCorpus) and store.name == f"synthetic-{made.task}"


def pick_transcripts(chosen: Selection, hypotheses: Sequence[str], *, count: int = QUOTED) -> list[dict[str, str]]:
    """Up to `count` transcripts, evenly spread over the set, so that they come from different speakers."""
    picked = sorted({position * len(hypotheses) // count for position in range(count)})
    return [{"reference": chosen.references[row], "hypothesis": hypotheses[row]} for row in picked]


def pseudonymise_speakers(tests: Sequence[dict[str, Any]]) -> None:
    """Give the speakers of `tests` pseudonyms, one person the same in all of them, and round what is said of each."""
    names = sorted({person["speaker"] for test in tests for person in test["per_speaker"]})
    random.SystemRandom().shuffle(names)  # the order of a corpus shows who is who
    numbers = {name: number for number, name in enumerate(names, start=1)}
    for test in tests:
        people = sorted(test["per_speaker"], key=lambda person: numbers[person["speaker"]])
        test["per_speaker"] = [
            {"speaker": f"speaker {numbers[person['speaker']]}", "wer": _rounded(person["wer"])} for person in people
        ]
        test.pop("speech", None)  # who has the corpus could try who was in it
        test["spread"] = {name: _rounded(rate) for name, rate in test["spread"].items()}


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, PERSON_DIGITS)
