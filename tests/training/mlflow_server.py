"""A server that answers MLflow's client over HTTP as MLflow's own does, as far as runs are followed there.

It keeps what it is sent in memory, in the order in which it came, and can be away for a while.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

BEFORE = "/api/2.0/mlflow/"
MISSING = (404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "not there"})

Answer = tuple[int, dict[str, Any]]


@dataclass
class KeptRun:
    """A run as the server has it."""

    info: dict[str, Any]
    tags: list[dict[str, str]]
    params: list[dict[str, str]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def by_step(self) -> dict[int, dict[str, float]]:
        """What it has of each step; fails where a value is there twice."""
        found: dict[int, dict[str, float]] = {}
        for one in self.metrics:
            assert one["key"] not in found.setdefault(one["step"], {})
            found[one["step"]][one["key"]] = one["value"]
        return found


@dataclass
class MlflowServer:
    """What it was sent, and whether it is there; `address` is where it listens.

    `missed` is set when somebody has asked it while it was away.
    """

    address: str = ""
    is_away: bool = False
    missed: threading.Event = field(default_factory=threading.Event)
    experiments: dict[str, str] = field(default_factory=dict)
    runs: dict[str, KeptRun] = field(default_factory=dict)

    def answer(self, method: str, given: dict[str, Any]) -> Answer:
        if self.is_away:
            self.missed.set()
            return 503, {}
        name = method.replace("/", "_").replace("-", "_")
        answer: Answer = getattr(self, f"_{name}")(**given)
        return answer

    def _experiments_get_by_name(self, experiment_name: str) -> Answer:
        if experiment_name not in self.experiments:
            return MISSING
        found = {"experiment_id": self.experiments[experiment_name], "name": experiment_name}
        return 200, {"experiment": {**found, "lifecycle_stage": "active"}}

    def _experiments_create(self, name: str) -> Answer:
        self.experiments[name] = str(len(self.experiments) + 1)
        return 200, {"experiment_id": self.experiments[name]}

    def _runs_create(self, experiment_id: str, tags: Any = (), **info: Any) -> Answer:
        identity = f"{len(self.runs):032x}"
        known = {"experiment_id": experiment_id, "run_id": identity, "run_uuid": identity, "status": "RUNNING"}
        self.runs[identity] = KeptRun({**info, **known, "lifecycle_stage": "active"}, list(tags))
        return self._runs_get(identity)

    def _runs_get(self, run_id: str, **_others: Any) -> Answer:
        if (found := self.runs.get(run_id)) is None:
            return MISSING
        return 200, {"run": {"info": found.info, "data": {"tags": found.tags, "params": found.params}}}

    def _runs_update(self, run_id: str, **changed: Any) -> Answer:
        self.runs[run_id].info.update({name: value for name, value in changed.items() if name != "run_uuid"})
        return 200, {"run_info": self.runs[run_id].info}

    def _runs_log_batch(self, run_id: str, metrics: Any = (), params: Any = (), **_others: Any) -> Answer:
        self.runs[run_id].metrics += metrics
        self.runs[run_id].params += params
        return 200, {}

    def _metrics_get_history(self, run_id: str, metric_key: str, **_others: Any) -> Answer:
        return 200, {"metrics": [one for one in self.runs[run_id].metrics if one["key"] == metric_key]}


@contextmanager
def serve_mlflow() -> Iterator[MlflowServer]:
    """A server at a free port of this machine, until it is left."""
    kept, lock = MlflowServer(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(dict(parse_qsl(urlsplit(self.path).query)))

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_given: Any) -> None:
            pass

        def _answer(self, given: dict[str, Any]) -> None:
            with lock:
                status, found = kept.answer(urlsplit(self.path).path.removeprefix(BEFORE), given)
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept.address = f"http://127.0.0.1:{server.server_address[1]}"
        working = threading.Thread(target=server.serve_forever)
        working.start()
        try:
            yield kept
        finally:
            server.shutdown()
            working.join()
