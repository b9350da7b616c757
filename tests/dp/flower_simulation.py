"""Flower's own Simulation Runtime, with its clients in this process where ray is not installed."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.server.superlink.fleet.vce.backend import Backend
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

_RAY = "flwr.server.superlink.fleet.vce.backend.raybackend"


class InProcess(Backend):
    """In place of ray: one worker, which is a thread of the runtime's own."""

    def __init__(self, backend_config: dict[str, Any]) -> None:
        self._app: ClientApp | None = None

    def build(self, app_fn: Callable[[], ClientApp]) -> None:
        self._app = app_fn()

    @property
    def num_workers(self) -> int:
        return 1

    def is_worker_idle(self) -> bool:
        return True

    def terminate(self) -> None: ...

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        assert self._app is not None
        return self._app(message, context), context


def simulate(server: ServerApp, client: ClientApp, *, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an app of Flower as `flwr run` does in simulation."""
    module = ModuleType(_RAY)
    module.RayBackend = InProcess  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, _RAY, module)
    run_simulation(server, client, num_supernodes=nodes, backend_name="in-process")
