"""Damage to the bytes of a file, as disks, networks, editors and people do it; the same generator does the same."""

from collections.abc import Callable

import numpy as np

Damage = Callable[[bytes, np.random.Generator], bytes]

# What stands in a header's field when a writer was wrong: nothing, all ones, the largest, a little, a lot.
FIELDS = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 0x8000_0000, 65_536, 1 << 20)
HEADER_BYTES = 128


def flip_bits(data: bytes, rng: np.random.Generator) -> bytes:
    """Between one bit and eight, anywhere."""
    damaged = bytearray(data)
    for _ in range(int(rng.integers(1, 9))):
        damaged[int(rng.integers(len(damaged)))] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


def flip_one_bit(data: bytes, rng: np.random.Generator) -> bytes:
    damaged = bytearray(data)
    damaged[int(rng.integers(len(damaged)))] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


def flip_header(data: bytes, rng: np.random.Generator) -> bytes:
    """A bit or a few near the beginning, where a format says what it is."""
    head = min(HEADER_BYTES, len(data))
    return flip_bits(data[:head], rng) + data[head:]


def change_field(data: bytes, rng: np.random.Generator) -> bytes:
    """Another number in one field of the header, in either order of its bytes."""
    width = int(rng.choice((1, 2, 4, 8)))
    at = int(rng.integers(max(1, min(HEADER_BYTES, len(data)) - width)))
    value = int(rng.choice(FIELDS)) % (1 << 8 * width)
    return data[:at] + value.to_bytes(width, "little" if rng.integers(2) else "big") + data[at + width :]


def truncate(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(len(data)))]


def truncate_a_little(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: -int(rng.integers(1, min(64, len(data)) + 1))]


def append(data: bytes, rng: np.random.Generator) -> bytes:
    """Something behind the end: itself again, or noise."""
    return data + (data if rng.integers(2) else rng.bytes(int(rng.integers(1, 200))))


def cut_out(data: bytes, rng: np.random.Generator) -> bytes:
    """A piece is missing in the middle."""
    first, last = sorted(int(place) for place in rng.integers(len(data), size=2))
    return data[:first] + data[last + 1 :]


def zero_out(data: bytes, rng: np.random.Generator) -> bytes:
    """A block that was never written."""
    first = int(rng.integers(len(data)))
    last = min(len(data), first + int(rng.integers(1, 600)))
    return data[:first] + bytes(last - first) + data[last:]


def swap_lines(data: bytes, rng: np.random.Generator) -> bytes:
    lines = data.splitlines(keepends=True)
    one, other = rng.integers(len(lines), size=2)
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def duplicate_line(data: bytes, rng: np.random.Generator) -> bytes:
    lines = data.splitlines(keepends=True)
    at = int(rng.integers(len(lines)))
    return b"".join([*lines[: at + 1], *lines[at:]])


def drop_line(data: bytes, rng: np.random.Generator) -> bytes:
    lines = data.splitlines(keepends=True)
    at = int(rng.integers(len(lines)))
    return b"".join([*lines[:at], *lines[at + 1 :]])


def change_digit(data: bytes, rng: np.random.Generator) -> bytes:
    """Another digit in the place of one: a number that still reads as a number."""
    places = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x39]
    if not places:
        return flip_one_bit(data, rng)
    at = places[int(rng.integers(len(places)))]
    digit = 0x30 + (data[at] - 0x30 + int(rng.integers(1, 10))) % 10
    return data[:at] + bytes([digit]) + data[at + 1 :]


BINARY: tuple[Damage, ...] = (
    flip_bits,
    flip_header,
    change_field,
    truncate,
    truncate_a_little,
    append,
    cut_out,
    zero_out,
)
TEXT: tuple[Damage, ...] = (flip_bits, truncate, append, cut_out, zero_out, swap_lines, duplicate_line, drop_line)
