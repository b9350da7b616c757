"""One voice of espeak-ng, in a process of its own.

espeak-ng keeps state between calls (its random numbers start from the clock, and filters and phases outlive even
Terminate and Initialize), so samples would depend on everything the process said before. A process of its own per
speaker, with the random seed set, makes them a function of the speaker alone. It is forked from one that has loaded
the library and said nothing, which takes 2 ms; to start Python and load the library anew took 15.
"""

import atexit
import importlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError

SAMPLE_RATE = 22_050
Say = Callable[[str], NDArray[np.int16]]
_CHILD = Path(__file__).with_name("espeak_child.py")


@dataclass(frozen=True, slots=True)
class Installation:
    library: Path
    data: Path


def find_espeak() -> Installation:
    """Where the pip package espeakng-loader put the library and its data."""
    try:
        loader = importlib.import_module("espeakng_loader")
    except ImportError:
        raise InputError("the synthetic crowd needs espeak-ng: pip install 'sottovoce[demo]'") from None
    installation = Installation(Path(loader.get_library_path()), Path(loader.get_data_path()))
    for path in (installation.library, installation.data):
        if not path.exists():
            raise InputError(
                f"espeakng-loader is damaged, {path} is missing: pip install --force-reinstall espeakng-loader"
            )
    return installation


def require_espeak(language: str, *, variants: frozenset[str]) -> None:
    """Refuse early where espeak-ng is not installed, or lacks the language or one of the voices."""
    data = find_espeak().data
    # espeak-ng returns no error for either: it falls silent without its dictionary, and ignores a missing variant.
    if not (data / f"{language}_dict").exists():
        raise InputError(f"language={language!r}: espeak-ng has no dictionary {data / f'{language}_dict'}")
    if missing := sorted(name for name in variants if not (data / "voices" / "!v" / name).exists()):
        raise InputError(f"espeak-ng in {data} has no voice variant {', '.join(missing)}")


@contextmanager
def open_espeak(voice: str, *, words_per_minute: int, pitch: int, pitch_range: int, seed: int) -> Iterator[Say]:
    """A function from text to samples at `SAMPLE_RATE`; `voice` is an accent and a variant, `en-us+f3`.

    >>> with open_espeak("en-us+f3", words_per_minute=170, pitch=50, pitch_range=50, seed=1) as say:
    ...     say("Good morning.").dtype
    dtype('int16')
    """
    settings = [voice, *(str(value) for value in (words_per_minute, pitch, pitch_range, seed % 2**31))]
    child = _take_idle() or _start()
    try:
        _ask(child, "\t".join(settings), voice=voice)

        def say(text: str) -> NDArray[np.int16]:
            assert text, "an empty line ends a voice"
            assert "\n" not in text, text
            return np.frombuffer(_ask(child, text, voice=voice), dtype="<i2")

        yield say
        _ask(child, "", voice=voice)
    except BaseException:
        _end(child)  # nobody knows how far it had come
        raise
    _idle.append((os.getpid(), child))


# Processes that wait for their next voice, each with the process that it belongs to: a fork of it must not use it.
_idle: list[tuple[int, "subprocess.Popen[bytes]"]] = []


def _take_idle() -> "subprocess.Popen[bytes] | None":
    while _idle:
        owner, child = _idle.pop()
        if owner == os.getpid() and child.poll() is None:
            return child
    return None


def _start() -> "subprocess.Popen[bytes]":
    where = find_espeak()
    # -I -S: nothing of the user's environment is loaded, which is most of a Python start.
    command = [sys.executable, "-I", "-S", str(_CHILD), str(where.library), str(where.data)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Closing its input ends it, and what it has forked."""
    with child:
        child.kill()


def _end_idle() -> None:
    while (child := _take_idle()) is not None:
        _end(child)


atexit.register(_end_idle)


def _ask(child: "subprocess.Popen[bytes]", line: str, *, voice: str) -> bytes:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line.encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        raise _failure(child, voice) from None
    if len(header := child.stdout.read(4)) < 4:
        raise _failure(child, voice)
    (length,) = struct.unpack("<I", header)
    return child.stdout.read(length)


def _failure(child: subprocess.Popen[bytes], voice: str) -> InputError:
    assert child.stderr is not None
    complaint = child.stderr.read().decode(errors="replace").strip().splitlines()
    return InputError(f"espeak-ng cannot speak as voice={voice!r}: {complaint[-1] if complaint else 'it ended early'}")
