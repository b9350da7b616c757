"""A run's model as a folder for the Hugging Face hub: the family's files, a card, and results in the hub's own form.

    README.md                      the card: metadata that the hub reads, then text
    .eval_results/DATASET.yaml     word error rates, as huggingface_hub 2.4 reads them

The card says what the run's own verdict says. Everything comes from files that may be published: no name, no clock, no
path of this machine.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sottovoce import __version__
from sottovoce.base.drawing import fill_template
from sottovoce.base.errors import InputError
from sottovoce.base.files import encode_utf8, write_atomically, write_folder_atomically
from sottovoce.models.hub import CARD, HubModel
from sottovoce.models.model_files import locate_model
from sottovoce.models.recogniser import Recogniser
from sottovoce.report.parts import show_count, show_percent
from sottovoce.report.records import RunRecord, read_run
from sottovoce.report.verdict import Verdict, judge_run
from sottovoce.training.ledger_check import find_run_of_model
from sottovoce.training.run_folder import CONFIG, MODEL, reset_file_times

EVAL_RESULTS = ".eval_results"
TASK = "automatic-speech-recognition"
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ)?")
NO_RUN = "Nothing is promised: the model came without its run, which alone says how it was trained."


@dataclass(frozen=True, kw_only=True)
class HubNames:
    """What only the user knows.

    Args:
        base: the hub's name of the base model; None is the name that the recipe has.
        datasets: the hub's names of data, as `NAME` of the run's own store, or `STORE=NAME` of another.
        date: when it was evaluated; there is no other clock.
    """

    base: str | None = None
    datasets: tuple[str, ...] = ()
    date: str | None = None

    def __post_init__(self) -> None:
        if self.base is not None and not _NAME.fullmatch(self.base):
            raise InputError(f"base={self.base}: expected a name on the hub, such as UsefulSensors/moonshine-tiny")
        if self.date is not None and not _DATE.fullmatch(self.date):
            raise InputError(f"date={self.date}: expected a date such as 2026-01-31")
        for one in self.datasets:
            if not _NAME.fullmatch(one.rpartition("=")[2]):
                raise InputError(f"dataset={one}: expected a name on the hub, or STORE=NAME")

    def by_store(self, run: RunRecord | None) -> dict[str, str]:
        """The names of data by the stores of `run`; without one, nothing is known of stores."""
        own = "" if run is None else str(run.data.get("store"))
        stores = {own} if run is None else {own, *(run.locate_split(test)[0] for test in run.tests)}
        found: dict[str, str] = {}
        for one in self.datasets:
            store, _, name = one.rpartition("=")
            if (store or own) not in stores:
                raise InputError(f"dataset={one}: expected one of the run's stores: {', '.join(sorted(stores))}")
            if found.setdefault(store or own, name) != name:
                raise InputError(
                    f"dataset={one}: {found[store or own]} is the same store; expected STORE=NAME of another"
                )
        return found


@dataclass(frozen=True)
class TestScore:
    """The word error rate on one test set. `dataset` is its hub name, None where the user gave none."""

    __test__ = False

    split: str
    dataset: str | None
    facts: Mapping[str, Any]
    is_chosen_on: bool
    start_wer: float | None

    @property
    def percent(self) -> float:
        return float(round(100 * self.facts["wer"], 2))

    @property
    def interval(self) -> str:
        ends = self.facts.get("wer_interval")
        return f"95 % interval {show_percent(ends[0])} to {show_percent(ends[1])}" if ends else "no interval"

    @property
    def words(self) -> str:
        """For the card."""
        data = "data that are not named here" if self.dataset is None else f"`{self.dataset}`"
        size = f"{show_count(self.facts['utterances'])} utterances of {show_count(self.facts['speakers'])} speakers"
        chosen = "; the model was chosen by this very set, so that it is no result" if self.is_chosen_on else ""
        start = "" if self.start_wer is None else f"; before training {show_percent(self.start_wer)}"
        rate = f"{show_percent(self.facts['wer'])} ({self.interval})"
        return f"{rate} on {data}, split `{self.split}`, {size}{start}{chosen}"


def export_to_hub(model: Path, recogniser: Recogniser, folder: Path, *, names: HubNames) -> dict[str, Any]:
    """Write the `recogniser` of `model` (a run's folder, or a model's) into a new `folder`; what was written."""
    write = recogniser.family.transfer.write_pretrained
    if write is None:
        raise InputError(
            f"models of family={recogniser.family.name} are of no class of transformers: expected a pretrained model, "
            "or --to sottovoce"
        )
    run = find_run_of_model(model)
    if run is not None and not (run / CONFIG).is_file():  # an export, which has a ledger but is no run
        run = None
    record = None if run is None else read_run(run.name, run)
    datasets = names.by_store(record)
    is_tested = run is not None and locate_model(model).resolve() == (run / MODEL).resolve()
    scores = list_scores(record, datasets) if record is not None and is_tested else []
    with write_folder_atomically(folder) as written:
        made = write(recogniser, written, base=names.base)
        card = Card(folder.name, made, recogniser.language, record, scores, tuple(datasets.values()))
        _write(written / CARD, card.text)
        for name, entries in eval_results(scores, date=names.date).items():
            (written / EVAL_RESULTS).mkdir(exist_ok=True)
            _write(written / EVAL_RESULTS / f"{name.replace('/', '--')}.yaml", _yaml(entries))
        files = [file for file in written.rglob("*") if file.is_file()]
        for file in files:  # safetensors are written for their owner alone, and this is to be published
            file.chmod(0o644)
        size = sum(file.stat().st_size for file in files)
        reset_file_times(written)
    return {
        "folder": str(folder),
        "whole": made.is_whole,
        "library": made.library,
        "parameters": made.parameters,
        "bytes": size,
        "results": sum(score.dataset is not None for score in scores),
    }


def list_scores(run: RunRecord, datasets: Mapping[str, str]) -> list[TestScore]:
    """The word error rates of a run's best model; those of models that write no text are none."""
    found = []
    for test, facts in run.tests.items():
        store, split = run.locate_split(test)
        start = (run.start_tests.get(test) or {}).get("wer")
        if facts.get("wer") is not None:
            found.append(TestScore(split, datasets.get(store), facts, run.is_chosen_on(test), start))
    return found


def eval_results(scores: Sequence[TestScore], *, date: str | None) -> dict[str, list[dict[str, Any]]]:
    """Entries of `.eval_results` by data set; of rates whose data set has a name on the hub."""
    found: dict[str, list[dict[str, Any]]] = {}
    for score in scores:
        if score.dataset is None or score.is_chosen_on:
            continue
        entry = {
            "dataset": {"id": score.dataset, "task_id": score.split},
            "value": score.percent,
            **({} if date is None else {"date": date}),
            "notes": f"word error rate in %, {score.interval}; {_normalisation(score)}",
        }
        found.setdefault(score.dataset, []).append(entry)
    return found


def _normalisation(score: TestScore) -> str:
    rules = score.facts.get("normalisation") or {}
    named = f" (rules {rules['name']} {rules['version']})" if rules else ""
    return f"texts compared in lower case without punctuation{named}"


@dataclass(frozen=True, eq=False)
class Card:
    """What README.md is made of. `run` is None where nothing is known of the training."""

    name: str
    model: HubModel
    language: str
    run: RunRecord | None
    scores: Sequence[TestScore]
    datasets: tuple[str, ...]

    @property
    def text(self) -> str:
        verdict = None if self.run is None else judge_run(self.run)
        return fill_template(
            "card.md",
            card=self,
            metadata=_yaml(self.metadata(verdict)),
            promised=NO_RUN if verdict is None else verdict.headline,
            how=_training(self.run),
            normalisation=_normalisation(self.scores[0]) if self.scores else "",
            decoding=(self.run.results.get("decoding") if self.run else None) or "greedy",
            version=__version__,
        )

    def metadata(self, verdict: Verdict | None) -> dict[str, Any]:
        """The front matter."""
        found = {
            "pipeline_tag": TASK,
            "library_name": self.model.library,
            "base_model": self.model.base,
            "license": self.model.license,
            "language": self.language,
            "datasets": list(self.datasets),
            "metrics": ["wer"],
            "tags": _tags(self.run, verdict),
            "model-index": self.model_index(),
        }
        return {name: value for name, value in found.items() if value}

    def model_index(self) -> list[dict[str, Any]]:
        """Results in the older form."""
        results = [
            {
                "task": {"type": TASK, "name": "Automatic Speech Recognition"},
                "dataset": {"type": score.dataset, "name": score.dataset, "split": score.split},
                "metrics": [{"type": "wer", "value": score.percent, "name": f"word error rate in %, {score.interval}"}],
            }
            for score in self.scores
            if score.dataset is not None and not score.is_chosen_on
        ]
        return [{"name": self.name, "results": results}] if results else []


def _training(run: RunRecord | None) -> str:
    if run is None:
        return "Fine-tuned"
    return "Fine-tuned with federated learning" if run.is_federated else "Fine-tuned on speech in one place"


def _tags(run: RunRecord | None, verdict: Verdict | None) -> list[str]:
    """A simulation protects nobody, and a tag has no room to say so: it is not called private."""
    tags = ["federated-learning"] if run is not None and run.is_federated else []
    if verdict is not None and verdict.kind in ("release", "weak"):
        tags.append("differential-privacy")
    if verdict is not None and verdict.kind == "simulation":
        tags.append("differential-privacy-simulation")
    return tags


def _yaml(content: Any) -> str:
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=10_000))


def _write(path: Path, text: str) -> None:
    with write_atomically(path) as file:
        file.write(encode_utf8(text))
