"""Two processes that write one folder: the second is told who the first is, and a dead one keeps nobody out."""

import os
import threading

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


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o600), (0o2775, 0o660), (0o777, 0o666)])
def test_lock_can_be_opened_by_those_who_may_write_into_its_folder(tmp_path, folder, file):
    tmp_path.chmod(folder)
    (tmp_path / ".c.lock").touch(0o644)  # as a killed process has left it
    FolderLock(tmp_path / "c").acquire()
    assert (tmp_path / ".c.lock").stat().st_mode & 0o777 == file


def test_who_waits_gets_the_lock_of_who_has_it_for_a_moment(tmp_path):
    first, second = FolderLock(tmp_path / "c"), FolderLock(tmp_path / "c")
    first.acquire()
    waiting = threading.Thread(target=second.acquire, args=(30.0,))
    waiting.start()
    first.release()
    waiting.join()
    assert second.is_held


def test_what_is_no_lock_file_is_said_and_not_written_through(tmp_path):
    place, target = tmp_path / ".c.lock", tmp_path / "precious"
    target.write_text("kept")
    for make in (lambda: place.symlink_to(target), lambda: os.mkfifo(place), place.mkdir):
        make()
        with pytest.raises(CheckpointError, match=r"c cannot be locked: .*\.c\.lock"):
            FolderLock(tmp_path / "c").acquire()
        place.rmdir() if place.is_dir() else place.unlink()
    assert target.read_text() == "kept"
