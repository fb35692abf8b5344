"""Small indexes that ask for much memory: reading takes 20 times the file and 64 MB at most, whatever is in it."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from fsdplaunch.checkpoint.readers.dcp_index import parse_index
from fsdplaunch.errors import CheckpointError

CHUNK = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\nq\x00"


def _state_of_64_dimensions() -> bytes:
    numbers = b"(" + b"".join(b"K" + bytes([number]) for number in range(64)) + b"t"
    state = b"}(X\x07\x00\x00\x00offsetsh\x01X\x05\x00\x00\x00sizesh\x01uq\x02"
    size = b"ctorch\nSize\n" + numbers + b"\x85Rq\x01"
    return b"\x80\x02" + CHUNK + size + state + b"(" + b"h\x00)\x81h\x02b" * 300_000 + b"l."


DOUBLING = b"]\x94" + b"".join(b"(h" + bytes([n]) + b"h" + bytes([n]) + b"t\x94" for n in range(200))
PICKLES = {
    "state of 64 dimensions": _state_of_64_dimensions,
    "nested tuples": lambda: b"\x80\x04N" + b"\x85" * 2_000_000 + b".",
    "empty dicts": lambda: b"\x80\x04" + b"}" * 2_000_000 + b".",
    "memo": lambda: b"\x80\x04N" + b"\x94" * 3_000_000 + b".",
    "marks": lambda: b"\x80\x04" + b"(" * 3_000_000 + b".",
    "doubling tuple": lambda: b"\x80\x04" + DOUBLING + b".",
    "doubling tuple as a key": lambda: b"\x80\x04}" + DOUBLING + b"Ns.",
    "memo slots": lambda: b"\x80\x04N" + b"".join(b"r" + n.to_bytes(4, "big") for n in range(1000)) + b".",
    "no end": lambda: b"\x80\x04N",
    "empty file": lambda: b"",
    "zeros": lambda: bytes(10_000),
    "text": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


def _grown(data: bytes) -> tuple[int, float]:
    """Read an index in a process of its own; return how many bytes its memory grew, and in how many seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, start = _peak(), time.monotonic()
        try:
            parse_index(data, where="it")
        except CheckpointError:
            os.write(writing, f"{_peak() - before} {time.monotonic() - start}".encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:  # noqa: PTH123  (a descriptor)
        told = answer.read().split()
    assert os.waitpid(child, 0)[1] == 0
    assert told, "the index was read without an error"
    return int(told[0]), float(told[1])


def _peak() -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", PICKLES)
def test_what_a_file_takes_is_bounded_by_its_size(name):
    data = PICKLES[name]()
    grown, seconds = _grown(data)
    assert grown < 20 * len(data) + 64e6
    assert seconds < 20


def _shared(dcp, kind: str) -> bytes:
    draft = dcp.Draft().add("w", (4,))
    value = dcp.Made(dcp.Named(dcp.METADATA, "BytesStorageMetadata"), {})
    text, entry = "x" * 130_000, dcp.tensor_entry("float32", (5000,), [((row,), (1,)) for row in range(5000)])
    transforms = ["x"] * 50_000
    for number in range(300):
        if kind == "long text":
            draft.entries[f"n{number}"], draft.planner[f"n{number}"] = value, (text,) * 64
        elif kind == "chunks":
            draft.entries[f"t{number}"] = dcp.Made(entry.cls, dict(entry.state))
        else:
            info = dcp.info("f", number, 1, transform_descriptors=transforms)
            draft.storage.append((dcp.index_key(f"t{number}", None), info))
    return draft.index()


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("long text", "'n0' has the path"),
        ("chunks", "its tensors name more than the \\d+ chunks that a file of its size can describe"),
        ("transforms", "is stored through torch's extensions"),
    ],
)
def test_what_many_entries_share_is_not_expanded(dcp, kind, match):
    data = _shared(dcp, kind)
    with pytest.raises(CheckpointError, match=match):
        parse_index(data, where="it")
    grown, seconds = _grown(data)
    assert grown < 20 * len(data) + 64e6
    assert seconds < 10
