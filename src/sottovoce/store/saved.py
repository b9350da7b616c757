"""How far a `prepare` has come, beside what it has written so far: enough to go on when it is killed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sottovoce.base.errors import InputError
from sottovoce.base.files import add_digest, check_digest, read_json, write_json
from sottovoce.corpora.problems import ProblemLog
from sottovoce.store import on_disk


@dataclass(frozen=True)
class Saved:
    """Of the work named `work` so many tasks are done, and this is what the writer and the problems were then."""

    work: str
    tasks_done: int
    writer: Mapping[str, Any]
    problems: ProblemLog

    def write(self, folder: Path) -> None:
        """Atomically: before it the last one holds, whose files have only grown since."""
        content = {"work": self.work, "tasks_done": self.tasks_done, "writer": self.writer}
        write_json(folder / on_disk.UNFINISHED, add_digest(content | {"problems": self.problems.state()}))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """What was saved in `folder`; None where nothing was, or it cannot be trusted."""
        path = folder / on_disk.UNFINISHED
        try:
            content = check_digest(read_json(path), where=path)
        except InputError:
            return None
        return cls(
            content["work"], content["tasks_done"], content["writer"], ProblemLog.from_state(content["problems"])
        )
