"""Speaks the lines of standard input: `python espeak_child.py LIBRARY DATA VOICE WPM PITCH RANGE SEED`.

Each line answers with its length in bytes (4, little-endian) and that many bytes of 16-bit samples. It imports the
standard library only, so that a process starts in milliseconds.
"""

import ctypes
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


def main(library: str, data: str, voice: str, *settings: str) -> None:
    words_per_minute, pitch, pitch_range, seed = map(int, settings)
    espeak = ctypes.CDLL(library)
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

    for line in sys.stdin.buffer:
        chunks.clear()
        text = line.rstrip(b"\n") + b"\0"
        if code := espeak.espeak_Synth(text, len(text), 0, 1, 0, UTF8, None, None):
            sys.exit(f"espeak_Synth returned {code}")
        samples = b"".join(chunks)
        sys.stdout.buffer.write(struct.pack("<I", len(samples)) + samples)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
