"""A real browser for tests: chromium without a window, driven over a pipe by its DevTools protocol.

No library, no port, no network: two file descriptors, JSON messages with a zero byte after each.
"""

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.commands import command

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page at a time. `complaints` are errors of the page and of its console, and everything it fetched."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._buffer, self._number = send, receive, b"", 0
        self._session: str | None = None
        self._events: list[Mapping[str, Any]] = []
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, page: Path, *, theme: str, width: int, height: int = 900, medium: str = "screen") -> None:
        """Load `page` in a window of that size for a reader who prefers `theme` (light or dark)."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        preferred = {"name": "prefers-color-scheme", "value": theme}
        self._call("Emulation.setEmulatedMedia", media=medium, features=[preferred])
        self._events.clear()
        self.complaints.clear()
        url = page.resolve().as_uri()
        self._call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read()
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        for event in self._events:
            self._judge(event, own=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as Python data."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """A key of the keyboard: Tab or Enter."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            given = text if kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **given)

    def print_pages(self) -> int:
        """How many pages the page takes on paper (A4)."""
        found = self._call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=True)
        return len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(found["data"])))

    def names_and_roles(self) -> list[tuple[str, str]]:
        """What a screen reader is told of the page: roles and names, in order."""
        self._call("Accessibility.enable")
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node.get("ignored")]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in shown]

    def screenshot(self, out: Path) -> None:
        out.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _judge(self, event: Mapping[str, Any], *, own: str) -> None:
        params = event["params"]
        match event["method"]:
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(f"console.{params['type']}: {params['args']}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(params["entry"]["text"]))
            case "Network.requestWillBeSent" if params["request"]["url"].partition("#")[0] != own:
                self.complaints.append(f"fetched {params['request']['url']}")

    def _call(self, method: str, **params: Any) -> Mapping[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]  # type: ignore[no-any-return]

    def _read(self) -> Mapping[str, Any]:
        """The next message; an event is kept, too."""
        while b"\0" not in self._buffer:
            found = os.read(self._receive, 1 << 16)
            assert found, "the browser has gone away"
            self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: Mapping[str, Any] = json.loads(line)
        if "method" in message:
            self._events.append(message)
        return message


@contextmanager
def browser(executable: str, profile: Path) -> Iterator[Tab]:
    """A browser with a fresh profile, gone when the block ends."""
    to_read, send = os.pipe()
    receive, to_write = os.pipe()
    # The protocol wants descriptors 3 and 4, which a shell can give it whatever numbers ours have.
    script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    arguments = ["bash", "-c", script, "browser", executable, *FLAGS, f"--user-data-dir={profile}"]
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with command(arguments, pass_fds=(to_read, to_write), **silent):
        os.close(to_read)
        os.close(to_write)
        try:
            yield Tab(send, receive)
        finally:
            os.close(send)
            os.close(receive)
