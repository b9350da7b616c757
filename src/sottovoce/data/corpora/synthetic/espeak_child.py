"""Speaks for one voice after another: `python espeak_child.py LIBRARY DATA`.

A line of standard input names a voice and its settings: VOICE WPM PITCH RANGE SEED, with tabs between them. A process
forked for it alone answers with four zero bytes, and each line of text with its length in bytes (4, little-endian) and
that many bytes of 16-bit samples. An empty line ends that process, which is answered like its beginning. Nobody sends
more than a line before it is answered. It imports the standard library only, so that a process starts in milliseconds.
"""

import ctypes
import os
import struct
import sys

# From espeak-ng's speak_lib.h.
SYNCHRONOUS = 2
DONT_EXIT = 0x8000
UTF8 = 1
RATE, VOLUME, PITCH, RANGE = 1, 2, 3, 4
# Some variants clip inside espeak-ng at its usual 100; level is set later anyway.
QUIET_VOLUME = 30

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def main(library: str, data: str) -> None:
    """Load the library, which no voice changes, and fork for each voice."""
    espeak = ctypes.CDLL(library)
    for line in sys.stdin.buffer:
        if not (child := os.fork()):
            speak(espeak, data, *line.decode().rstrip("\n").split("\t"))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:  # it has said why
            sys.exit(1)
        answer(b"")


def answer(samples: bytes) -> None:
    sys.stdout.buffer.write(struct.pack("<I", len(samples)) + samples)
    sys.stdout.buffer.flush()


def speak(espeak: ctypes.CDLL, data: str, voice: str, *settings: str) -> None:
    words_per_minute, pitch, pitch_range, seed = map(int, settings)
    chunks: list[bytes] = []

    def keep(samples: "ctypes._Pointer[ctypes.c_short]", count: int, _events: int) -> int:
        if count > 0:
            chunks.append(ctypes.string_at(samples, 2 * count))
        return 0

    callback = CALLBACK(keep)
    if espeak.espeak_Initialize(SYNCHRONOUS, 0, data.encode(), DONT_EXIT) <= 0:
        sys.exit(f"espeak_Initialize failed with the data in {data}")
    espeak.espeak_SetSynthCallback(callback)
    if code := espeak.espeak_SetVoiceByName(voice.encode()):
        sys.exit(f"espeak_SetVoiceByName returned {code}")
    # Otherwise the breath and flutter of a voice are drawn from the clock.
    espeak.espeak_ng_SetRandSeed(ctypes.c_long(seed))
    for parameter, value in ((RATE, words_per_minute), (VOLUME, QUIET_VOLUME), (PITCH, pitch), (RANGE, pitch_range)):
        if code := espeak.espeak_SetParameter(parameter, value, 0):
            sys.exit(f"espeak_SetParameter({parameter}, {value}) returned {code}")

    answer(b"")
    while text := sys.stdin.buffer.readline().rstrip(b"\n"):
        chunks.clear()
        if code := espeak.espeak_Synth(text + b"\0", len(text) + 1, 0, 1, 0, UTF8, None, None):
            sys.exit(f"espeak_Synth returned {code}")
        answer(b"".join(chunks))


if __name__ == "__main__":
    main(*sys.argv[1:])
