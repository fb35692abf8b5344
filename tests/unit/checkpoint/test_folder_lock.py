"""Two processes that write one folder: the second is told who the first is, and a dead one keeps nobody out."""

import os

import pytest

from fsdplaunch.checkpoint.output_folder import FolderLock
from fsdplaunch.errors import CheckpointError


def test_lock_is_taken_again_and_again_and_a_strange_note_does_no_harm(tmp_path):
    first, second = FolderLock(tmp_path / "c"), FolderLock(tmp_path / "c")
    for _ in range(3):
        first.acquire()
        first.acquire()
        (tmp_path / ".c.lock").write_bytes(b"[" * 5000)
        with pytest.raises(CheckpointError, match="is being written by another process"):
            second.acquire()
        first.release()
        second.acquire()
        second.release()


def test_what_is_no_lock_file_is_said_and_not_written_through(tmp_path):
    place, target = tmp_path / ".c.lock", tmp_path / "precious"
    target.write_text("kept")
    for make in (lambda: place.symlink_to(target), lambda: os.mkfifo(place), place.mkdir):
        make()
        with pytest.raises(CheckpointError, match=r"c cannot be locked: .*\.c\.lock"):
            FolderLock(tmp_path / "c").acquire()
        place.rmdir() if place.is_dir() else place.unlink()
    assert target.read_text() == "kept"
