"""A context in which some clients have accidents: a module of its own, because worker processes import it by name."""

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.data.loading import Speech
from sottovoce.data.population import Client
from sottovoce.federated.client import ClientContext
from sottovoce.models.family import StepDraws


@dataclass(frozen=True, eq=False)
class Trouble(ClientContext):
    """`accidents` says by client what happens: it cannot be read, its process is killed, we have a bug, or it never
    comes to an end, which a byte in the named pipe $STUCK tells. A bug may show when the client is planned (in a thread
    of its own) or only while it is trained."""

    accidents: Mapping[int, str] = field(default_factory=dict)

    def speech(self, client: Client) -> Speech:
        match self.accidents.get(client.index):
            case "unreadable":
                raise InputError("its audio is damaged")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "bug":
                raise ZeroDivisionError
            case "stuck":
                with open(os.environ["STUCK"], "wb", buffering=0) as pipe:
                    pipe.write(b".")
                    threading.Event().wait()
            case "boom":
                raise RuntimeError("boom")
            case "memory":
                raise MemoryError
        return super().speech(client)

    def draws(self, client: Client, *arguments: Any, **options: Any) -> list[StepDraws]:
        drawn = super().draws(client, *arguments, **options)
        if self.accidents.get(client.index) != "in training":
            return drawn
        return [replace(own, model=replace(own.model, kept=(99,))) for own in drawn]  # a block that no model has
