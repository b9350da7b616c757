"""The three terminals of docs/guides/deploying.md, run as the page says, recorded and drawn.

    python benchmarks/terminals.py                  # docs/images/terminals.svg, and what was said on standard output
    python benchmarks/terminals.py --two-hosts      # as root: server and nodes on addresses of their own (ip netns),
                                                    # behind deploy/firewall.nft; nothing is drawn

It needs the extras `federation` and `demo`. The recipe and the commands are those that the page shows.
"""

import argparse
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guides" / "deploying.md"
DRAWING = ROOT / "docs" / "images" / "terminals.svg"
FIREWALL = ROOT / "deploy" / "firewall.nft"

QUESTION = "Do you want to take part? [y/N]: "
SERVER, NODES = "10.77.0.1", {"anna": "10.77.1", "bert": "10.77.2"}


@dataclass(frozen=True)
class Said:
    seconds: float
    who: str
    line: str


@dataclass
class Recording:
    """What everybody says, in the order in which they say it."""

    begun: float = field(default_factory=time.monotonic)
    said: list[Said] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, who: str, line: str) -> None:
        with self.changed:
            self.said.append(Said(time.monotonic() - self.begun, who, line))
            print(f"{self.said[-1].seconds:6.1f} s  {f'({who})':9} {line}", flush=True)
            self.changed.notify_all()

    def wait_for(self, who: str, start: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: any(s.who == who and s.line.startswith(start) for s in self.said))


# The page.


def shown(language: str) -> list[str]:
    """The page's blocks of a language, until it comes to two hosts."""
    text = PAGE.read_text(encoding="utf-8").partition("## Stopping")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> tuple[list[str], str, list[str]]:
    """What is typed before, in the first terminal, and in the others."""
    before, serve, joins = (block.splitlines() for block in shown("bash"))
    return before, serve[0], joins


# Running.


@dataclass
class Hosts:
    """Where commands are run: all on this machine, or in network namespaces of their own."""

    apart: bool

    def inside(self, who: str) -> list[str]:
        return ["ip", "netns", "exec", f"sottovoce-{who}"] if self.apart else []

    def spelt(self, command: str) -> list[str]:
        """A command of the page, with this Python and the server's address."""
        words = shlex.split(command.replace("127.0.0.1", SERVER) if self.apart else command)
        assert words[0] == "sottovoce"
        return [sys.executable, "-m", *words]


@contextmanager
def namespaces() -> Iterator[None]:
    """One for the server, with the firewall in place, and one for each node, each with a wire to the server's."""
    names = [f"sottovoce-{who}" for who in ("server", *NODES)]

    def do(command: str, *, check: bool = True) -> None:
        subprocess.run(shlex.split(command), check=check, capture_output=not check)

    for name in names:
        do(f"ip netns del {name}", check=False)
        do(f"ip netns add {name}")
        do(f"ip -n {name} link set lo up")
    try:
        do(f"ip -n sottovoce-server addr add {SERVER}/32 dev lo")
        for who, net in NODES.items():
            do(f"ip -n sottovoce-server link add to-{who} type veth peer name eth0 netns sottovoce-{who}")
            for name, end, address in (("server", f"to-{who}", f"{net}.1"), (who, "eth0", f"{net}.2")):
                do(f"ip -n sottovoce-{name} addr add {address}/30 dev {end}")
                do(f"ip -n sottovoce-{name} link set {end} up")
            do(f"ip -n sottovoce-{who} route add {SERVER} via {net}.1")
        do(f"ip netns exec sottovoce-server nft -f {FIREWALL}")
        yield
    finally:
        for name in names:
            do(f"ip netns del {name}")


def run(folder: Path, hosts: Hosts) -> Recording:
    before, serve, joins = commands()
    roster = ["users:"]
    for command in before:
        done = subprocess.run(hosts.spelt(command), cwd=folder, check=True, capture_output=True, text=True)
        roster += [line for line in done.stdout.splitlines() if line.lstrip().startswith("- {name:")]
    (folder / "roster.yaml").write_text("\n".join([*roster, ""]), encoding="utf-8")
    (folder / "few.yaml").write_text(shown("yaml")[0], encoding="utf-8")
    recording = Recording()
    with ExitStack() as held:
        server = held.enter_context(started("server", hosts, serve, folder, recording))
        recording.wait_for("server", "listening at ")
        if hosts.apart:
            check_firewall()
        nodes = [
            held.enter_context(started(who, hosts, join, folder, recording))
            for who, join in zip(NODES, joins, strict=True)
        ]
        codes = [process.wait() for process in (server, *nodes)]
    assert codes == [0, 0, 0], f"they ended with {codes}"
    return recording


@contextmanager
def started(
    who: str, hosts: Hosts, command: str, folder: Path, recording: Recording
) -> Iterator["subprocess.Popen[str]"]:
    """A command in a terminal of its own, in which somebody says yes when asked."""
    keyboard, typed = pty.openpty()
    process = subprocess.Popen(
        [*hosts.inside(who), *hosts.spelt(command)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        stdin=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.lstrip().startswith("digest "):
                os.write(keyboard, b"y\n")
            if line.startswith(QUESTION):
                recording.add(who, f"{QUESTION}y")
                line = line.removeprefix(QUESTION)
            recording.add(who, line.rstrip())

    listening = threading.Thread(target=listen)
    listening.start()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        listening.join()
        os.close(keyboard)
        os.close(typed)


def check_firewall() -> None:
    """The one port can be reached from a node, and another, where somebody listens too, cannot."""
    inside = Hosts(apart=True).inside
    other = subprocess.Popen(
        [*inside("server"), sys.executable, "-u", "-c", _LISTEN], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert other.stdout is not None
    port = int(other.stdout.readline())
    reached = [
        subprocess.run(
            [*inside("anna"), sys.executable, "-c", _REACH, SERVER, str(each)], check=False, capture_output=True
        ).returncode
        == 0
        for each in (9443, port)
    ]
    other.kill()
    other.wait()
    assert reached == [True, False], f"reached through the firewall: 9443 {reached[0]}, {port} {reached[1]}"
    print(f"          from anna's address 9443 is reached, and {port}, where somebody listens, is not", flush=True)


_LISTEN = "import socket, sys; s = socket.create_server(('', 0)); print(s.getsockname()[1]); sys.stdin.read()"
_REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)"


# Drawing.

COLUMNS, HALF, HEIGHT, WIDTH, MARGIN = 130, 62, 17, 7.25, 14
_STYLE = """
text { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1f2430; white-space: pre; }
rect { fill: #f6f7f9; stroke: #dfe3ea; } .page { fill: #ffffff; stroke: none; }
.when { fill: #565d6b; } .title { font-weight: bold; fill: #005b8f; } .typed { font-weight: bold; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8ee; } rect { fill: #1a1e26; stroke: #2d333f; } .page { fill: #14171d; }
  .when { fill: #a9b0be; } .title { fill: #7cc4f0; }
}
"""


@dataclass(frozen=True)
class Pane:
    """A terminal: its lines with their classes, `columns` wide."""

    columns: int
    lines: list[tuple[str, str, str]]  # when, class, text

    @property
    def height(self) -> int:
        return HEIGHT * len(self.lines) + 2 * MARGIN

    @property
    def width(self) -> float:
        return WIDTH * self.columns + 2 * MARGIN

    def drawn(self, x: float, y: float) -> Iterator[str]:
        yield f'<rect x="{x:g}" y="{y:g}" width="{self.width:g}" height="{self.height:g}" rx="6"/>'
        for number, (when, kind, text) in enumerate(self.lines):
            below = y + MARGIN + HEIGHT * number + 12
            yield f'<text x="{x + MARGIN:g}" y="{below:g}" class="when">{escape(when)}</text>'
            yield f'<text x="{x + MARGIN + 7 * WIDTH:g}" y="{below:g}" class="{kind}">{escape(text)}</text>'


def pane(title: str, command: str, said: list[Said], *, columns: int) -> Pane:
    lines: list[tuple[str, str, str]] = [("", "title", title)]
    for kind, when, text in (("typed", "", f"$ {command}"), *(("", f"{s.seconds:.0f} s", s.line) for s in said)):
        indent = " " * (len(text) - len(text.lstrip()) + 2)
        wrapped = textwrap.wrap(text, columns - 7, subsequent_indent=indent, drop_whitespace=True) or [""]
        wrapped[0] = text[: len(text) - len(text.lstrip())] + wrapped[0].lstrip()
        lines += [(when if n == 0 else "", kind, part) for n, part in enumerate(wrapped)]
    return Pane(columns, lines)


def draw(recording: Recording) -> str:
    """The server above, and the two nodes beside each other."""
    _, serve, joins = commands()
    lines = [s for s in recording.said if s.line.strip()]
    end = next(n for n, s in enumerate(lines) if s.who == "server" and s.line.endswith("testing"))
    of = {who: [s for n, s in enumerate(lines) if s.who == who and (who != "server" or n <= end)] for who in _TITLES}
    top = pane(_TITLES["server"], serve, of["server"], columns=COLUMNS)
    below = [pane(_TITLES[who], join, of[who], columns=HALF) for who, join in zip(NODES, joins, strict=True)]
    tall = max(each.height for each in below)
    below = [Pane(each.columns, each.lines + [("", "", "")] * ((tall - each.height) // HEIGHT)) for each in below]
    gap = top.width - sum(each.width for each in below)
    width, height = top.width + 2 * MARGIN, top.height + tall + 3 * MARGIN
    under = top.height + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
        "<title>Three terminals: a server and two nodes, from its start to the end of the run</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{width:g}" height="{height:g}"/>',
        *top.drawn(MARGIN, MARGIN),
        *below[0].drawn(MARGIN, under),
        *below[1].drawn(MARGIN + below[0].width + gap, under),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


_TITLES = {"server": "the first terminal: the server", "anna": "the second: anna", "bert": "the third: bert"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--two-hosts", action="store_true", help="each with a network of its own; needs root")
    hosts = Hosts(apart=parser.parse_args().two_hosts)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        if hosts.apart:
            held.enter_context(namespaces())
        recording = run(Path(folder), hosts)
    if not hosts.apart:
        DRAWING.write_text(draw(recording), encoding="utf-8")
        print(f"wrote {DRAWING.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
