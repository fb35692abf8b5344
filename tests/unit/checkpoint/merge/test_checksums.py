"""Checksums while copying: by threads for large chunks, at once for small ones, each once, none left open."""

import os
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdplaunch.checkpoint.byte_transfer import crc32
from fsdplaunch.checkpoint.chunks import ItemLocation, Piece, Region
from fsdplaunch.checkpoint.merge.write import ChecksumCheck
from fsdplaunch.checkpoint.readers.data_files import DataFiles
from fsdplaunch.errors import CheckpointError

SIZES = [10, 64 * 2**10, 64 * 2**10 + 1, 3 * 2**20 + 5]


@pytest.fixture
def stored(tmp_path):
    """Four chunks of different sizes in one file, with their checksums."""
    data = [os.urandom(size) for size in SIZES]
    (tmp_path / "f").write_bytes(b"".join(data))
    starts = [sum(SIZES[:number]) for number in range(len(SIZES))]
    with DataFiles(tmp_path, {"f": sum(SIZES)}) as sources:
        pieces = [_piece(start, part) for start, part in zip(starts, data, strict=True)]
        yield SimpleNamespace(sources=sources, pieces=pieces, data=data)


def _piece(start: int, data: bytes) -> Piece:
    region, place = Region((0,), (len(data),)), ItemLocation("f", start, len(data))
    return Piece(region, place, start, len(data), (1,), 0, zlib.crc32(data), 0, True, 0, len(data))


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_sound_chunks_are_each_checked_once(stored):
    before = _open_files()
    with ChecksumCheck(stored.sources) as check:
        for piece in 3 * stored.pieces:
            check.add("w", piece)
    assert check.checked == sum(SIZES)
    assert _open_files() <= before + 1  # the file itself stays open


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_damaged_chunk_is_named_wherever_it_stands(stored, number):
    piece = stored.pieces[number]
    spoilt = [each if each is not piece else piece._replace(crc=piece.crc ^ 1) for each in stored.pieces]

    def check_all() -> None:
        with ChecksumCheck(stored.sources) as check:
            for each in spoilt:
                check.add("w", each)

    with pytest.raises(CheckpointError, match=f"the bytes of 'w' at {piece.file_offset} do not match"):
        check_all()
    with ChecksumCheck(stored.sources, wanted=False) as check:
        for each in spoilt:
            check.add("w", each)
    assert check.checked == 0


def test_whichever_checksum_is_in_use_is_that_of_zip_files():
    data = os.urandom(100_003)
    assert crc32(data[50:], crc32(data[:50], 0)) == zlib.crc32(data)
