"""Kept runs by name: `suite/label`. `label-seed2`, `label-seed3` … are `label` once more with another root seed.

`label-whole2` … are so, too, and whole: `data.people_seed` is their own seed, so other people have trained a seed model
of their own. With `label`, the first of them, they are the setting `label-whole`.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sottovoce.base.errors import InputError
from sottovoce.config import is_recipe
from sottovoce.report.archives import ZIP, open_path
from sottovoce.report.records import RunRecord, read_run
from sottovoce.training.run_folder import RESULTS

WHOLE = "-whole"
REPEAT = re.compile(rf"(?P<setting>.+?)(?:-seed|(?P<whole>{WHOLE}))(?P<seed>\d+)")
PEOPLE = "data.people_seed"
NOT_SETTINGS = ("about", "paper", "seed")  # of a recipe: what may differ between repeats of one setting

Settings = Mapping[str, Any]
Found = TypeVar("Found")


class MissingRunsError(Exception):
    """Runs that the template names and that are not kept."""

    def __init__(self, *names: str) -> None:
        super().__init__(", ".join(names))
        self.names = names


@dataclass(frozen=True)
class Kept:
    """The runs in the archives of `root`; links to them are written for a document in the folder `document`."""

    root: Path
    document: Path
    _read: dict[str, RunRecord] = field(default_factory=dict)

    def suites(self) -> list[str]:
        return sorted(path.stem for path in self.root.glob(f"*{ZIP}"))

    def labels(self, suite: str) -> list[str]:
        """The finished runs of a suite, numbers in their own order."""
        return sorted((path.parent.name for path in self._folder(suite).glob(f"*/{RESULTS}")), key=_natural)

    def run(self, name: str) -> RunRecord:
        """The run `suite/label`."""
        suite, *labels = str(name).split("/")
        if len(labels) != 1:
            raise InputError(f"run={name}: expected suite/label")
        if name not in self._read:
            folder = self._folder(suite) / labels[0]
            if not (folder / RESULTS).is_file():
                raise MissingRunsError(name)
            found = read_run(name, folder)
            if found.problems or found.unsound:
                raise InputError(f"{name}: {(*found.problems, found.unsound)[0]}")
            self._read[name] = found
        return self._read[name]

    def repeats(self, name: str) -> dict[int, RunRecord]:
        """The runs of one setting by root seed, which is all they differ in; whole repeats, in `people_seed` too."""
        suite, _, setting = str(name).partition("/")
        labels = [label for label in self.labels(suite) if setting_of(label) == setting]
        if labels and setting.endswith(WHOLE):
            labels = [*(label for label in self.labels(suite) if label == setting.removesuffix(WHOLE)), *labels]
        if not labels:
            raise MissingRunsError(name)
        found: dict[int, RunRecord] = {}
        for label in labels:
            run = self.run(f"{suite}/{label}")
            seed = int(run.config.get("seed", 1))
            match = REPEAT.fullmatch(label)
            if match is not None and int(match["seed"]) != seed:
                raise InputError(f"{run.label}: its name says seed {match['seed']}, its recipe says seed={seed}")
            if seed in found:
                raise InputError(f"{run.label}: seed={seed} is that of {found[seed].label} already")
            found[seed] = run
        first, *others = found.values()
        are_whole = all(_people_seed(run) == seed for seed, run in found.items())
        if setting.endswith(WHOLE) and not are_whole:
            raise InputError(f"{name}: expected {PEOPLE} to be the seed of each of its runs, or none")
        for other in others:
            differ = varying([settings_of(first), settings_of(other)])
            if differ and not (are_whole and differ == [PEOPLE]):
                raise InputError(f"{other.label}: expected {name} with another seed, but it differs in {differ[0]}")
        return dict(sorted(found.items()))

    def settings(self, suite: str, *, only: Sequence[str] = ()) -> list[str]:
        """The names of a suite's settings: those of `only` in its order, or all, numbers in their own order."""
        found = dict.fromkeys(setting_of(label) for label in self.labels(suite))
        if not found:
            raise MissingRunsError(*(f"{suite}/{label}" for label in only or ("…",)))
        if lost := [f"{suite}/{label}" for label in only if label not in found]:
            raise MissingRunsError(*lost)
        return [f"{suite}/{label}" for label in only or sorted(found, key=_natural)]

    def link(self, run: RunRecord, words: str) -> str:
        """`words`, leading to the run on its suite's page."""
        suite, _, label = run.label.partition("/")
        return f"[{words}]({Path(os.path.relpath(self.root, self.document)).as_posix()}/{suite}.md#{label})"

    def _folder(self, suite: str) -> Path:
        return open_path(self.root / f"{suite}{ZIP}")


def each(find: Callable[[str], Found], names: Iterable[str]) -> list[Found]:
    """What `find` gives for each of `names`; runs that are missing are all named at once."""
    found, lost = list[Found](), list[str]()
    for name in names:
        try:
            found.append(find(name))
        except MissingRunsError as missing:
            lost += missing.names
    if lost:
        raise MissingRunsError(*lost)
    return found


def setting_of(label: str) -> str:
    """
    >>> setting_of("dim-seed3"), setting_of("dim"), setting_of("dim-whole3")
    ('dim', 'dim', 'dim-whole')
    """
    match = REPEAT.fullmatch(label)
    return label if match is None else match["setting"] + (match["whole"] or "")


def shares_seed_model(runs: Mapping[int, RunRecord]) -> bool:
    """Whether runs of several seeds start from one model: repeats of one `people_seed`, or from a model's folder."""
    starts = [
        run.federation.get("seed_model") or (run.config.get("central") or {}).get("start_from") for run in runs.values()
    ]
    if len(runs) < 2 or not any(starts):
        return False
    return not all(is_recipe(str(start)) for start in starts) or len(
        {_people_seed(run) for run in runs.values()}
    ) < len(runs)


def _people_seed(run: RunRecord) -> int:
    """What decides who is in the seed part, and is the seed model's seed."""
    people = run.data.get("people_seed")
    return int(run.config.get("seed", 1) if people is None else people)


def settings_of(run: RunRecord) -> dict[str, Any]:
    """What its recipe sets, by whole path such as `federation.privacy.share`."""
    return {path: value for path, value in _flat(run.config) if path not in NOT_SETTINGS}


def varying(several: Sequence[Settings]) -> list[str]:
    """The paths whose values are not the same in all of `several`."""
    paths = dict.fromkeys(path for settings in several for path in settings)
    return [path for path in paths if any(s.get(path) != several[0].get(path) for s in several)]


def find_path(ending: str, settings: Iterable[str]) -> str:
    """The one path that ends in `ending`: `share` is enough for `federation.privacy.share`."""
    found = [path for path in dict.fromkeys(settings) if path == ending or path.endswith(f".{ending}")]
    if len(found) != 1:
        what = f"one of {', '.join(found)}" if found else "a setting of these runs"
        raise InputError(f"setting={ending}: expected {what}")
    return found[0]


def short(path: str, settings: Iterable[str]) -> str:
    """The shortest ending that means `path` alone."""
    parts, others = path.split("."), [other for other in settings if other != path]
    endings = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
    return next(e for e in endings if not any(o == e or o.endswith(f".{e}") for o in others))


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict) and value and f"{prefix}{name}" not in NOT_SETTINGS:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _natural(label: str) -> list[tuple[int, float, str]]:
    parts = re.findall(r"\d+(?:\.\d+)?|\D+", label)
    return [(0, float(part), "") if part[0].isdigit() else (1, 0.0, part) for part in parts]
