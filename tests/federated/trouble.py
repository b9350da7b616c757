"""A room in which some clients have accidents: in a module of its own, because worker processes import it by name."""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from sottovoce.errors import InputError
from sottovoce.federated.client import ClientRoom
from sottovoce.models.speech import Speech
from sottovoce.users.population import Client


@dataclass(frozen=True, eq=False)
class Trouble(ClientRoom):
    """`accidents` says by client what happens: it cannot be read, its process is killed, or we have a bug."""

    accidents: Mapping[int, str] = field(default_factory=dict)

    def speech(self, client: Client) -> Speech:
        match self.accidents.get(client.index):
            case "unreadable":
                raise InputError("its audio is damaged")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "bug":
                raise ZeroDivisionError
        return super().speech(client)
