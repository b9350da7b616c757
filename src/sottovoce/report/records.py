"""What a run folder holds. A file that is missing or torn is named, and the rest is shown."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_file
from sottovoce.base.parsing import ParseError, parse_json, parse_yaml
from sottovoce.base.parsing import Record as Record
from sottovoce.models.family import DEFAULT, REGISTERED, Family, ParameterPlace, find_family, place_by_name
from sottovoce.privacy.accounting import rdp_epsilon
from sottovoce.privacy.events import NoGuarantee, repeated
from sottovoce.privacy.guarantee import Guarantee, guarantee_of, guarantee_to_json
from sottovoce.privacy.ledger_report import LedgerReport, SignatureCheck
from sottovoce.report.archives import open_path, restore_archive_names
from sottovoce.training.ledger_check import UNSIGNED, check_ledger
from sottovoce.training.run_folder import (
    BASE_MODEL,
    CONFIG,
    DIAGNOSTICS,
    ENGINE,
    ENVIRONMENT,
    INPUTS,
    LEDGER,
    METRICS,
    NO_EPSILON,
    PERSONAL,
    POPULATION,
    RESULTS,
    STAND_IN,
)

# What a step on a stand-in records of its privacy, which is not the recipe's.
OF_STAND_IN = ("useful", "extrapolated", "scaled")
NO_PRIVACY: Record = {
    "guarantee": f"no guarantee: {NO_EPSILON}",
    "epsilon_pld": None,
    "epsilon_pld_reason": NO_EPSILON,
    "epsilon_rdp": None,
    "spent": {"epsilon_pld": None, "epsilon_rdp": None},
}


@dataclass(frozen=True)
class LedgerCheck:
    """A ledger, verified when the report was made, line by line and against all that its folder says of it.

    `report` if it is sound, else `problem`. `notes` are on files that it cannot be held against.
    """

    report: LedgerReport | None = None
    problem: str = ""
    signature: SignatureCheck = UNSIGNED
    notes: tuple[str, ...] = ()

    @property
    def epsilon(self) -> float | None:
        """ε by RDP of all that was charged, computed anew; None without a guarantee."""
        if self.report is None:
            return None
        spent = rdp_epsilon(self.report.spent, self.report.header["delta"])
        return spent if math.isfinite(spent) else None


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run, as its folder has it. What is not there is empty; `problems` says what could not be read.

    `damaged` are those of them that a killed run cannot leave behind: a file that somebody has changed.
    """

    label: str
    folder: Path
    config: Record
    environment: Record
    engine: Record
    population: Record
    results: Record
    metrics: Sequence[Record]
    diagnostics: Sequence[Record]
    ledger: LedgerCheck | None
    problems: tuple[str, ...]
    damaged: tuple[str, ...] = ()
    inputs: Record = field(default_factory=dict)
    personal: Record = field(default_factory=dict)

    @property
    def base_model(self) -> Record:
        """The model from outside that its own was made from: its name, and what identifies it; empty without one."""
        start = f"{BASE_MODEL} "
        return {key.removeprefix(start): str(own) for key, own in self.inputs.items() if key.startswith(start)}

    @property
    def federation(self) -> Record:
        """Its settings; empty for central training."""
        return self.config.get("federation") or {}

    @property
    def data(self) -> Record:
        """The settings of its data."""
        return self.config.get("data") or {}

    @property
    def privacy_settings(self) -> Record:
        return self.federation.get("privacy") or {}

    @property
    def paper(self) -> Record:
        """What its recipe quotes from a paper."""
        return self.config.get("paper") or {}

    @cached_property
    def privacy(self) -> Record:
        """What the finished run records of its privacy; of an older run that stopped early, what it had promised."""
        found: Record = self.results.get("privacy") or {}
        if found and self.is_stand_in:
            return {**{name: value for name, value in found.items() if name not in OF_STAND_IN}, **NO_PRIVACY}
        if (
            not found
            or "promised_steps" in found
            or self.guarantee is None
            or self.guarantee.steps == self.guarantee.made
        ):
            return found
        assert self.ledger is not None
        assert self.ledger.report is not None
        return {**found, **guarantee_to_json(self.guarantee, self.ledger.report)}

    @cached_property
    def guarantee(self) -> Guarantee | None:
        """What it promised, finished or not; None without a ledger that holds."""
        if self.ledger is None or self.ledger.report is None:
            return None
        made = guarantee_of(self.ledger.report, central_steps=self.federation.get("steps"))
        return replace(made, event=repeated(NoGuarantee(NO_EPSILON), made.steps)) if self.is_stand_in else made

    @property
    def is_stand_in(self) -> bool:
        """One step with other people and other noise than the recipe's (`--smoke`): its ε is nobody's."""
        return bool(self.environment.get(STAND_IN))

    @property
    def tests(self) -> Mapping[str, Record]:
        return self.results.get("test") or {}

    @property
    def start_tests(self) -> Mapping[str, Record]:
        """Those of the model that it started from."""
        return (self.results.get("start") or {}).get("test") or {}

    def is_chosen_on(self, test: str) -> bool:
        """Whether the best model was chosen by that very set: its error there is no result."""
        return self.locate_split(test) == self.locate_split(self.data.get("dev", "dev"))

    def locate_split(self, name: str) -> tuple[str, str]:
        """The store and the split that its recipe means by `name`."""
        store, _, split = name.rpartition(":")
        return store or str(self.data.get("store")), split

    def test_title(self, test: str) -> str:
        """What a table calls that set."""
        return f"{test} (chosen on)" if self.is_chosen_on(test) else test

    @property
    def headline_test(self) -> str | None:
        """The test set in the headline: of those it was not chosen on, the first that is called a test."""
        others = [name for name in self.tests if not self.is_chosen_on(name)]
        called = [name for name in others if name.rpartition(":")[2].startswith("test")]
        return next(iter([*called, *others, *self.tests]), None)

    @property
    def is_federated(self) -> bool:
        return bool(self.federation) or bool(self.privacy)

    def settings_but(self, *, own: Sequence[str], federation: Sequence[str] = (), privacy: Sequence[str]) -> str:
        """All that its recipe sets, as text to compare with another's, but for these keys."""
        settings = {name: value for name, value in self.config.items() if name not in own}
        federated = {name: value for name, value in self.federation.items() if name not in federation}
        private = {name: value for name, value in self.privacy_settings.items() if name not in privacy}
        return json.dumps({**settings, "federation": {**federated, "privacy": private}}, sort_keys=True, default=str)

    @property
    def is_release(self) -> bool:
        """Whether cohorts and noise came from the operating system: a secure run, which keeps no diagnostics."""
        return self.privacy_settings.get("mode") == "secure" or self.privacy.get("simulated") is False

    @property
    def header(self) -> Record:
        """Of the ledger, where it is sound."""
        return {} if self.ledger is None or self.ledger.report is None else self.ledger.report.header

    @property
    def unsound(self) -> str:
        """Why what the run states of its privacy is not valid; empty where there is no reason."""
        if self.ledger is not None:
            return self.ledger.problem
        begun = self.is_release and (self.metrics or self.results)
        missing = f"{self.folder / LEDGER} is missing: what the release has spent is not known"
        return restore_archive_names(missing) if begun else ""

    @property
    def place(self) -> Callable[[str], ParameterPlace]:
        """Where each tensor of its model belongs; of a family from outside this package, by the tensor's name."""
        return place_by_name if self._family is None else self._family.place

    @property
    def kinds(self) -> Mapping[str, str]:
        """What the kinds of its model's tensors are called, in the order of the network."""
        return {} if self._family is None else self._family.presentation.kinds

    @property
    def place_apart(self) -> Callable[[str], ParameterPlace]:
        """The same where figures distinguish more, such as both norms of a block."""
        return self.place if self._family is None else self._family.presentation.fine_place or self._family.place

    @property
    def kinds_apart(self) -> Mapping[str, str]:
        return (
            self._family.presentation.fine_kinds
            if self._family is not None and self._family.presentation.fine_place
            else self.kinds
        )

    @cached_property
    def _family(self) -> Family[Any, Any] | None:
        """None where it is not ours: a report imports no code that a run's folder names."""
        model = self.config.get("model")
        name = model.get("family", DEFAULT) if isinstance(model, dict) else DEFAULT
        return find_family(name) if isinstance(name, str) and name in REGISTERED else None

    @cached_property
    def layer_sizes(self) -> Mapping[str, int]:
        """How many parameters each tensor has; from the ledger's header."""
        layout = self.header.get("plan", {}).get("layout") or {}
        return {name: math.prod(shape) for name, shape in layout.items()}


def read_run(label: str, folder: Path) -> RunRecord:
    """Read the run in `folder`, finished or not."""
    damaged: list[str] = []
    torn: list[str] = []
    results = _read(folder / RESULTS, parse_json, damaged) or {}
    return RunRecord(
        label=label,
        folder=folder,
        config=_read(folder / CONFIG, parse_yaml, damaged) or {},
        environment=_read(folder / ENVIRONMENT, parse_json, damaged) or {},
        engine=_read(folder / ENGINE, parse_json, damaged) or {},
        population=_read(folder / POPULATION, parse_json, damaged) or {},
        results=results,
        metrics=_read_lines(folder / METRICS, torn),
        diagnostics=_read_lines(folder / DIAGNOSTICS, torn),
        ledger=_check_ledger(folder),
        inputs=_read(folder / INPUTS, parse_json, damaged) or {},
        personal=_read(folder / PERSONAL, parse_json, damaged) or {},
        problems=(*damaged, *torn),
        damaged=tuple(damaged),
    )


def read_ledger_alone(label: str, report: LedgerReport) -> RunRecord:
    """A run of which there is a sound ledger and nothing else."""
    return RunRecord(label, report.path.parent, {}, {}, {}, {}, {}, (), (), LedgerCheck(report=report), ())


def find_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """The run folders among `paths`, by label: folders of runs, or of suites, which hold several; or either in an
    archive."""
    found: list[Path] = []
    for path in paths:
        place = open_path(path)
        if not place.is_dir():
            raise InputError(f"run={path}: expected the folder of a run")
        inside = [place] if _is_run(place) else sorted(child for child in place.iterdir() if _is_run(child))
        if not inside:
            raise InputError(f"run={path}: neither a run ({CONFIG}, {METRICS}) nor a folder of runs")
        found += [folder for folder in inside if folder.resolve() not in {known.resolve() for known in found}]
    return label_paths(found)


def label_paths(paths: Sequence[Path]) -> dict[str, Path]:
    """Paths by the shortest ends of them that are unique."""
    longest = max(len(path.resolve().parts) for path in paths)
    for depth in range(1, longest + 1):
        labels = ["/".join(path.resolve().parts[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            break
    return dict(zip(labels, paths, strict=True))


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, METRICS, RESULTS))


def _read(path: Path, parse: Callable[[str], Any], problems: list[str]) -> Any:
    if not path.is_file():
        return None
    try:
        content = parse(read_file(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
        return None
    if not isinstance(content, dict):
        problems.append(f"{path.name} holds no settings or results")
        return None
    return content


def _read_lines(path: Path, problems: list[str]) -> list[Record]:
    if not path.is_file():
        return []
    found: list[Record] = []
    for number, line in enumerate(read_file(path).decode("utf-8", errors="replace").splitlines(), start=1):
        try:
            record = parse_json(line)
        except ParseError:
            record = None
        if not isinstance(record, dict) or "step" not in record:
            problems.append(f"{path.name}: line {number} is torn; it and what follows are left out")
            break
        found.append(record)
    return found


def _check_ledger(folder: Path) -> LedgerCheck | None:
    if not (folder / LEDGER).is_file():
        return None
    try:
        found = check_ledger(folder)
        return LedgerCheck(report=found.report, signature=found.signature, notes=found.notes)
    except InputError as problem:
        return LedgerCheck(problem=restore_archive_names(str(problem)))
