"""The opcodes of pickle, protocol 4, that differ between the records of an index."""

import pickle
import struct
from functools import lru_cache

from fsdplaunch.runtime.saving.sharded.layouts import Numbers

_RANGES = ((0xFF, "<cB", b"K"), (0xFFFF, "<cH", b"M"), (0x7FFF_FFFF, "<ci", b"J"))


def recall(number: int) -> bytes:
    """Return the opcode that recalls what was memoized under a number."""
    return struct.pack("<cB", b"h", number) if number <= 0xFF else struct.pack("<cI", b"j", number)  # noqa: PLR2004


@lru_cache(maxsize=2**16)
def spell_int(number: int) -> bytes:
    """Return the opcode of a number that is not negative."""
    for largest, form, opcode in _RANGES:
        if number <= largest:
            return struct.pack(form, opcode, number)
    data = pickle.encode_long(number)
    return b"\x8a" + bytes([len(data)]) + data


def call_size(numbers: Numbers) -> bytes:
    """Return the opcodes that call torch.Size, which was recalled, with some numbers."""
    ints = b"".join(map(spell_int, numbers))
    tuples = {0: b")", 1: ints + b"\x85\x94", 2: ints + b"\x86\x94", 3: ints + b"\x87\x94"}
    return tuples.get(len(numbers), b"(" + ints + b"t\x94") + b"\x85\x94R\x94"


def count_memoized(numbers: Numbers) -> int:
    """Return how much that memoizes: the numbers, unless there are none, the arguments, the size."""
    return 3 if numbers else 2
