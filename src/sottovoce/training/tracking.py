"""Which trackers follow a run: what the user asks for, and what is refused."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.base.importing import suggest_nearest
from sottovoce.training.trackers import KINDS, TENSORBOARD


@dataclass(frozen=True)
class Tracking:
    """Which trackers follow a run; without `names` it is TensorBoard, and nothing follows a release.

    With `diagnostics` they are sent, too: a simulation's only. Runs are called by their places below `root`.
    """

    names: tuple[str, ...] | None = None
    diagnostics: bool = False
    root: Path | None = None

    def check(self, *, is_release: bool) -> None:
        """Refuse what a release must not be sent to, and diagnostics of it."""
        if not is_release:
            return
        if self.diagnostics:
            raise InputError(
                "--track-diagnostics: they are by-products of people's data, which no ε covers, and "
                "federation.privacy.mode=secure is a release; expected a simulation"
            )
        for name in self.names or ():
            if (why := KINDS[name].refused) is not None:
                raise InputError(
                    f"--track {name}: {why}, and federation.privacy.mode=secure is a release; expected mlflow, which "
                    "gets its metrics when it has ended, or nothing"
                )

    def chosen(self, *, is_service: bool) -> list[str]:
        """Services, or files in the run's folder."""
        names = (TENSORBOARD,) if self.names is None else self.names
        return [name for name in names if KINDS[name].is_service == is_service]

    def name(self, folder: Path) -> str:
        """What a run is called: its place below `root`, or its folder's name."""
        place = folder.absolute()
        if self.root is not None and self.root.absolute() in place.parents:
            return place.relative_to(self.root.absolute()).as_posix()
        return place.name


BY_DEFAULT = Tracking()


def choose_trackers(names: str | None, *, diagnostics: bool, root: Path) -> Tracking:
    """What `--track` and `--track-diagnostics` ask for; refuses what is not known, or not installed."""
    if names is None:
        return Tracking(None, diagnostics, root)
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in KINDS:
            raise InputError(f"--track {name}: no such tracker{suggest_nearest(name, KINDS)}")
        if importlib.util.find_spec(package := KINDS[name].package) is None:
            raise InputError(f"--track {name} needs {package}: pip install 'sottovoce[{name}]'")
    return Tracking(chosen, diagnostics, root)
